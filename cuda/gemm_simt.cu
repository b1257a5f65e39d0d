// y = act(alpha · x · wᵀ + bias) on the plain floating-point units.
//
//   x (M, K), w (N, K), y (M, N) row-major, bias (N,) or null. float, half or bfloat16; sums in float.
//
// Each operand may also be given transposed in memory, so that the backward products need no copy: X_K_MAJOR says
// that x[m][k] lies at x[m * ldx + k], otherwise at x[k * ldx + m]; the same for w.
//
// Rung 1, gemm_simt: a block owns a BM x BN tile of y and walks over K in steps of BK. Both operands' slices are
// staged in shared memory, so every element fetched from global memory serves BM (or BN) multiply-adds; each thread
// then keeps a TM x TN patch of y in registers, so every element fetched from shared memory serves TN (or TM) more.
// It takes any type, size and alignment.
//
// Rung 2, gemm_simt_tiles (float): the multiply-adds must never wait. An SM starts one a cycle in each of its four
// quarters, and every other instruction takes the place of one, so the patch grows to as many registers as there are:
// 16 x 8 outputs cost six 16-byte loads a step of k for 128 multiply-adds. Loads run ahead of their use twice: the
// next slice travels from global memory while this one is multiplied, and the operands of step k + 1 are read from
// shared memory during step k. Where the tiles are too few for the chip, the grid also cuts K into slices whose sums
// go to a workspace, and gemm_simt_sum adds them, always in the same order.

#include "common/numeric.cuh"

constexpr int BM = 64, BN = 64, BK = 16;
constexpr int TM = 4, TN = 4;
constexpr int THREADS = (BM / TM) * (BN / TN);
static_assert(THREADS == 256, "the Python face launches 256 threads");
static_assert(BM * BK % THREADS == 0 && BN * BK % THREADS == 0, "every thread stages the same number of elements");

// Copy a ROWS x BK slice of an operand to shared memory as [BK][ROWS]. Consecutive threads read consecutive addresses
// in whichever direction is contiguous. Elements beyond the matrix become zero, which adds nothing to any sum.
template <typename T, bool K_MAJOR, int ROWS>
__device__ void stage(float (&tile)[BK][ROWS + 1], const T* a, long long ld, long long row0, long long rows,
                      long long k0, long long K) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * BK; i += THREADS) {
        const int r = K_MAJOR ? i / BK : i % ROWS;
        const int k = K_MAJOR ? i % BK : i / ROWS;
        const bool inside = row0 + r < rows && k0 + k < K;
        const long long at = K_MAJOR ? (row0 + r) * ld + k0 + k : (k0 + k) * ld + row0 + r;
        tile[k][r] = inside ? to_float(a[at]) : 0.0f;
    }
}

template <typename T, typename O, bool X_K_MAJOR, bool W_K_MAJOR>
__global__ void __launch_bounds__(THREADS, 2)
gemm_simt(const T* __restrict__ x, long long ldx, const T* __restrict__ w, long long ldw, const T* __restrict__ bias,
          O* __restrict__ y, long long M, long long N, long long K, float alpha, int relu) {
    __shared__ float xs[BK][BM + 1];  // the extra column spreads a transposing store over the banks
    __shared__ float ws[BK][BN + 1];

    const long long tiles_n = (N + BN - 1) / BN;
    const long long m0 = blockIdx.x / tiles_n * BM;
    const long long n0 = blockIdx.x % tiles_n * BN;
    const int tm = threadIdx.x / (BN / TN);
    const int tn = threadIdx.x % (BN / TN);

    float acc[TM][TN] = {};
    for (long long k0 = 0; k0 < K; k0 += BK) {
        stage<T, X_K_MAJOR, BM>(xs, x, ldx, m0, M, k0, K);
        stage<T, W_K_MAJOR, BN>(ws, w, ldw, n0, N, k0, K);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            float a[TM], b[TN];
#pragma unroll
            for (int i = 0; i < TM; ++i) a[i] = xs[k][tm + i * (BM / TM)];
#pragma unroll
            for (int j = 0; j < TN; ++j) b[j] = ws[k][tn + j * (BN / TN)];
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
        }
        __syncthreads();
    }

    // A thread's patch is strided over the tile, so neighbouring threads write neighbouring outputs.
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            const long long m = m0 + tm + i * (BM / TM), n = n0 + tn + j * (BN / TN);
            if (m < M && n < N) {
                float value = fmaf(alpha, acc[i][j], bias ? to_float(bias[n]) : 0.0f);
                if (relu) value = relu_of(value);
                y[m * N + n] = from_float<O>(value);
            }
        }
    }
}

// ---- rung 2 --------------------------------------------------------------------------------------------------------

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
constexpr bool HAS_ASYNC_COPY = true;
#else
constexpr bool HAS_ASYNC_COPY = false;
#endif

// Copies from global to shared memory that need no register: 16 bytes, or one float.
__device__ __forceinline__ void async_copy_vector(float* shared, const float* global) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
                 "l"(global)
                 : "memory");
#endif
}

__device__ __forceinline__ void async_copy_element(float* shared, const float* global) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
                 "l"(global)
                 : "memory");
#endif
}

__device__ __forceinline__ void async_copy_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void load_vector(float* to, const float* from) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
}

// Brings a ROWS x BK slice of one operand to shared memory as [BK][ROWS + 4], four elements (a vector) at a time.
//
// An operand whose rows are contiguous in memory lies there as shared memory wants it and is copied asynchronously.
// A K-major one is transposed on the way: a vector is fetched into registers early in a slice, and its four elements
// are stored under each other late in it. There a warp takes 16 rows x 2 vectors: with rows of 4 (mod 8) floats, the
// 32 stores of one element fall in 32 banks.
template <bool K_MAJOR, int ROWS, int BK, int THREADS>
struct Stager {
    static constexpr int LD = ROWS + 4;
    static constexpr int VECTORS = ROWS * BK / 4 / THREADS;
    static constexpr bool ASYNC = HAS_ASYNC_COPY && !K_MAJOR;
    static_assert(ROWS * BK / 4 % THREADS == 0, "every thread copies the same number of vectors");
    static_assert(LD % 8 == 4, "rows of shared memory hold whole vectors, and transposing stores fall in 32 banks");
    static_assert(K_MAJOR ? BK % 8 == 0 : THREADS % (ROWS / 4) == 0, "a vector's place splits into thread and turn");
    static_assert(!K_MAJOR || (2 * ROWS) % THREADS == 0 || THREADS % (2 * ROWS) == 0, "threads fill whole columns");

    const float* at;  // where this thread's first vector of the next slice lies
    long long ld;
    int whole;        // slices still to come that can be copied in aligned vectors without looking
    int rows;         // of the tile that exist
    long long ahead;  // steps of k from the next slice's first to the end
    float4 held[VECTORS];

    __device__ int row(int i) const {
        return K_MAJOR ? threadIdx.x / 2 % ROWS + i * (THREADS / 2) % ROWS : 4 * (threadIdx.x % (ROWS / 4));
    }
    __device__ int col(int i) const {
        return K_MAJOR ? threadIdx.x % 2 * 4 + (threadIdx.x / (2 * ROWS) + i * THREADS / (2 * ROWS)) * 8
                       : threadIdx.x / (ROWS / 4) + i * (THREADS / (ROWS / 4));
    }

    __device__ Stager(const float* a, long long ld, long long row0, long long all_rows, long long k0, long long k_end)
        : ld(ld), ahead(k_end - k0) {
        at = a + (K_MAJOR ? (row0 + row(0)) * ld + k0 + col(0) : (k0 + col(0)) * ld + row0 + row(0));
        rows = min(all_rows - row0, (long long)ROWS);
        const bool aligned = ld % 4 == 0 && (K_MAJOR || row0 % 4 == 0) && (unsigned long long)a % 16 == 0;
        whole = rows == ROWS && aligned ? (int)(ahead / BK) : 0;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) held[i] = {};
    }

    // Begin to bring the next slice; `tile` is where it will lie.
    __device__ void fetch(float* tile) {
        if (whole > 0) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                if constexpr (ASYNC)
                    async_copy_vector(tile + col(i) * LD + row(i), vector(i));
                else
                    held[i] = __ldg(reinterpret_cast<const float4*>(vector(i)));
            }
        } else {  // element by element; what lies beyond the matrix becomes zero, which adds nothing to any sum
            const int cols = min(ahead, (long long)BK);
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int r = row(i) + (K_MAJOR ? 0 : e), c = col(i) + (K_MAJOR ? e : 0);
                    const bool inside = r < rows && c < cols;
                    if constexpr (ASYNC) {
                        float* to = tile + c * LD + r;
                        if (inside) async_copy_element(to, vector(i) + e);
                        else *to = 0.0f;
                    } else {
                        (&held[i].x)[e] = inside ? __ldg(vector(i) + e) : 0.0f;
                    }
                }
            }
        }
        at += K_MAJOR ? BK : BK * ld;
        whole -= 1;
        ahead -= BK;
    }

    __device__ const float* vector(int i) const {
        return at + (K_MAJOR ? (row(i) - row(0)) * ld + (col(i) - col(0)) : (col(i) - col(0)) * ld);
    }

    // Store vector i of what was fetched.
    __device__ void deposit(float* tile, int i) const {
        if constexpr (ASYNC) return;
        float* to = tile + col(i) * LD + row(i);
        if constexpr (K_MAJOR) {
            to[0] = held[i].x;
            to[LD] = held[i].y;
            to[2 * LD] = held[i].z;
            to[3 * LD] = held[i].w;
        } else {
            *reinterpret_cast<float4*>(to) = held[i];
        }
    }
};

// Sum one slice of K per block: slice s of `splits` covers k in [s * slice_k, (s + 1) * slice_k). With one split y is
// the output, otherwise the workspace (splits, M, N), and alpha, bias and relu wait for gemm_simt_sum.
//
// A warp owns 4 x 8 patches of TM x TN outputs. A patch is cut into pieces of 4 x 4 that lie 16 rows and 32 columns
// apart, so the lanes' 16-byte reads of one operand are neighbours. Lanes 2i and 2i + 1 share the columns, lanes of a
// half warp two values of rows: so the hardware can merge each half warp's reads into one access.
template <int BM, int BN, int BK, int TM, int TN, int BLOCKS, bool X_K_MAJOR, bool W_K_MAJOR>
__global__ void __launch_bounds__(BM / TM * (BN / TN), BLOCKS)
gemm_simt_tiles(const float* __restrict__ x, long long ldx, const float* __restrict__ w, long long ldw,
                const float* __restrict__ bias, float* __restrict__ y, long long M, long long N, long long K,
                long long slice_k, int splits, int group, float alpha, int relu) {
    constexpr int THREADS = BM / TM * (BN / TN);
    constexpr int WARPS_N = BN / (8 * TN);
    static_assert(BM % (4 * TM) == 0 && BN % (8 * TN) == 0, "the tile is a grid of whole warps");
    static_assert(TM % 4 == 0 && TN % 4 == 0, "patches are made of 4 x 4 pieces");
    static_assert(BK % 2 == 0, "a slice ends with the registers that the next one begins with");
    using StageX = Stager<X_K_MAJOR, BM, BK, THREADS>;
    using StageW = Stager<W_K_MAJOR, BN, BK, THREADS>;
    constexpr int X_FLOATS = BK * StageX::LD, FLOATS = X_FLOATS + BK * StageW::LD;
    constexpr int DEPOSITS = StageX::VECTORS + StageW::VECTORS;
    extern __shared__ float4 shared_vectors[];  // two slices
    float* shared = reinterpret_cast<float*>(shared_vectors);

    // Tiles in groups of `group` rows of tiles: the blocks that run together share few rows of x and of w.
    const unsigned tiles_m = (M + BM - 1) / BM, tiles_n = (N + BN - 1) / BN;
    const unsigned slice = blockIdx.x / (tiles_m * tiles_n), tile = blockIdx.x % (tiles_m * tiles_n);
    const unsigned first = tile / (group * tiles_n) * group;
    const unsigned height = min(tiles_m - first, (unsigned)group);
    const unsigned within = tile - first * tiles_n;
    const long long own_m = (long long)(first + within % height) * BM, own_n = (long long)(within / height) * BN;
    // The last tile of a row or column is moved back inside the matrix: it computes some outputs again and stores only
    // its own.
    const long long m0 = max(min(own_m, M - BM), 0LL), n0 = max(min(own_n, N - BN), 0LL);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tm = warp / WARPS_N * 4 * TM + (lane / 16 * 2 + lane % 2) * 4;
    const int tn = warp % WARPS_N * 8 * TN + lane / 2 % 8 * 4;

    const long long k_begin = slice * slice_k, k_end = min(K, k_begin + slice_k);
    const int steps = (k_end - k_begin + BK - 1) / BK;
    StageX stage_x(x, ldx, m0, M, k_begin, k_end);
    StageW stage_w(w, ldw, n0, N, k_begin, k_end);

    float acc[TM][TN] = {};
    float a[2][TM], b[2][TN];  // the operands of this step of k and of the next
    int read_x = tm, read_w = X_FLOATS + tn;
    auto read = [&](int to, int k) {
#pragma unroll
        for (int i = 0; i < TM; i += 4)
            load_vector(&a[to][i], &shared[read_x + k * StageX::LD + 4 * i]);
#pragma unroll
        for (int j = 0; j < TN; j += 4)
            load_vector(&b[to][j], &shared[read_w + k * StageW::LD + 8 * j]);
    };
    auto deposit = [&](float* to, int i) {
        if (i < StageX::VECTORS) stage_x.deposit(to, i);
        else stage_w.deposit(to + X_FLOATS, i - StageX::VECTORS);
    };

    if (steps > 0) {
        stage_x.fetch(shared);
        stage_w.fetch(shared + X_FLOATS);
    }
#pragma unroll
    for (int i = 0; i < DEPOSITS; ++i) deposit(shared, i);
    async_copy_wait();
    __syncthreads();
    read(0, 0);

    for (int step = 0; step < steps; ++step) {
        const int turn = step % 2 ? -FLOATS : FLOATS;
        float* next = shared + (step + 1) % 2 * FLOATS;
        if (step + 1 < steps) {  // `next` was last read before the barrier of the step before
            stage_x.fetch(next);
            stage_w.fetch(next + X_FLOATS);
        }
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            // The fetched vectors are stored one by one over the later steps, so that no warp waits for the stores.
#pragma unroll
            for (int i = 0; i < DEPOSITS; ++i)
                if (k == BK - 2 - (DEPOSITS - 1 - i) * (BK / 2) / DEPOSITS) deposit(next, i);
            if (k == BK - 1) {
                async_copy_wait();
                __syncthreads();
                read_x += turn;
                read_w += turn;
            }
            read((k + 1) % 2, (k + 1) % BK);
            // Back and forth: each multiply-add shares an operand with the one before, also where a row ends, and so
            // reads two registers, not three. Three would need a second cycle.
#pragma unroll
            for (int i = 0; i < TM; ++i) {
#pragma unroll
                for (int forth = 0; forth < TN; ++forth) {
                    const int j = i % 2 ? TN - 1 - forth : forth;
                    acc[i][j] = fmaf(a[k % 2][i], b[k % 2][j], acc[i][j]);
                }
            }
        }
    }

    // Apart from the epilogue: folded into it, ptxas allots the main loop's registers anew and loses 7 % to conflicts.
    if (alpha != 1.0f && splits == 1) {
#pragma unroll
        for (int i = 0; i < TM * TN; ++i) acc[i / TN][i % TN] *= alpha;
    }
    if (splits > 1) y += slice * M * N;
    // With whole tiles of whole vectors, n0 is a multiple of 4 too.
    const bool vectors = N % 4 == 0 && n0 + BN <= N && (unsigned long long)y % 16 == 0;
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
        const long long n = n0 + tn + 8 * j;
        float add[4] = {};
        if (bias && splits == 1) {
#pragma unroll
            for (int e = 0; e < 4; ++e) add[e] = n + e < N ? bias[n + e] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            const long long m = m0 + tm + i / 4 * 16 + i % 4;
            if (m < own_m || m >= M) continue;
            float* to = y + m * N + n;
            float out[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                out[e] = acc[i][j + e] + add[e];
                if (relu && splits == 1) out[e] = relu_of(out[e]);
            }
            if (vectors) {
                if (n >= own_n) *reinterpret_cast<float4*>(to) = {out[0], out[1], out[2], out[3]};
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (n + e >= own_n && n + e < N) to[e] = out[e];
            }
        }
    }
}

// y = act(alpha · sum of the slices + bias), one output a thread, the slices in order.
__global__ void __launch_bounds__(256)
gemm_simt_sum(const float* __restrict__ partial, const float* __restrict__ bias, float* __restrict__ y, long long M,
              long long N, int splits, float alpha, int relu) {
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= M * N) return;
    float sum = partial[i];
#pragma unroll 8
    for (int s = 1; s < splits; ++s) sum += partial[s * M * N + i];
    sum = fmaf(alpha, sum, bias ? bias[i % N] : 0.0f);
    y[i] = relu ? relu_of(sum) : sum;
}
