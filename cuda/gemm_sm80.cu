// y = act(alpha · x · wᵀ + bias) on the tensor cores of Ampere and later, by cp.async, ldmatrix and mma.sync. half or
// bfloat16 in and out, sums in float.
//
//   x (M, K), w (N, K), y (M, N) row-major, bias (N,) or null. X_K / W_K false: that operand lies transposed in
//   memory, (K, M) or (K, N), as the backward products need it. ldx, ldw: distance between lines in elements.
//   Lines of x and w start on 16 bytes and are whole 16-byte chunks long: K % 8 == 0 for a K-major operand, for a
//   transposed one M % 8 == 0 or N % 8 == 0.
//
// The ideas, outermost first:
//   tiles and groups      a block computes a BM x BN tile of y. Blocks are numbered down groups of neighbouring tile
//                         rows, so that those that run together share their operands in L2.
//   split K               where there are too few tiles to fill the chip, `split` blocks share one tile and divide K;
//                         they leave float sums, and a second kernel adds them up in a fixed order.
//   pipeline              slices of BK go straight from global to shared memory, STAGES - 1 of them ahead of use.
//   warp tiles            a warp owns WM x WN of the tile in registers. Each 16 x 16 fragment, one ldmatrix, serves
//                         WM / 16 or WN / 8 products; the fragments of the next 16 of K load while those of this one
//                         multiply, across the border of two slices too, so the tensor cores wait for neither.
//   transposed operands   stay as they are in shared memory: ldmatrix.trans turns each 8 x 8 block as it loads it.
//   wide stores           a warp turns its tile in shared memory, so that it leaves in whole lines of 16 bytes a lane.

#include "common/sm80.cuh"

constexpr int WARP = 32;
constexpr int CHUNK = 8;  // elements in the 16 bytes of one copy

template <int BM, int BN, int BK, int WM, int WN, int STAGES> struct Config {
    static constexpr int WARPS_N = BN / WN, WARPS = BM / WM * WARPS_N, THREADS = WARP * WARPS;
    static constexpr int X_BYTES = BM * BK * 2, W_BYTES = BN * BK * 2, STAGE_BYTES = X_BYTES + W_BYTES;
    static constexpr int STEPS = BK / 16;  // products along K in a slice
    static constexpr int BLOCKS = THREADS >= 256 ? 1 : 256 / THREADS;  // at least so many fit a multiprocessor
    static_assert(BM % WM == 0 && BN % WN == 0, "warp tiles divide the tile");
    static_assert(WM % 16 == 0 && WM <= 64 && WN % 32 == 0 && WN <= 64, "a warp tile is at most one swizzle period");
    static_assert(BK == 32 || BK == 64, "a slice has an even number of steps and is at most one swizzle period");
    static_assert(STAGES >= 3, "while one stage multiplies, the next has arrived and a third is on its way");
    static_assert(BM * BN * 2 <= STAGES * STAGE_BYTES, "y leaves through the stages' memory");
};

// One thread's share of an operand's slice (ROWS of M or N, BK of K): a chunk at the same place of every STEP-th line.
template <bool K_MAJOR, int ROWS, int BK, int THREADS> struct Loader {
    static constexpr int LINES = K_MAJOR ? ROWS : BK, BYTES = (K_MAJOR ? BK : ROWS) * 2;
    static constexpr int CHUNKS = BYTES / 16, STEP = THREADS / CHUNKS, COUNT = LINES / STEP;
    static_assert(THREADS % CHUNKS == 0 && LINES % STEP == 0, "all threads copy the same number of chunks");
    static_assert(STEP % 8 == 0, "a thread's lines are swizzled alike");

    const char* from;   // the thread's first chunk of the coming slice
    long long stride;   // from one of its lines to the next, in bytes
    long long advance;  // from slice to slice, in bytes
    int lines, inner;   // what is left of the matrix there, in lines, and in elements along a line; none if <= 0
    int to;             // the chunk's place in a stage

    template <typename T>
    __device__ __forceinline__ Loader(const T* a, long long ld, int row, int rows, int k, int K) {
        const int line = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        const int first_line = (K_MAJOR ? row : k) + line, first = (K_MAJOR ? k : row) + chunk * CHUNK;
        from = reinterpret_cast<const char*>(a + first_line * ld + first);
        stride = ld * (STEP * 2);
        advance = K_MAJOR ? BK * 2 : ld * (BK * 2);
        lines = (K_MAJOR ? rows : K) - first_line;
        inner = (K_MAJOR ? K : rows) - first;
        to = swizzled<BYTES>(line, chunk);
    }

    // Copy part PART of PARTS. Beyond the matrix nothing is read, and zeros arrive, which add nothing to any sum.
    template <int PARTS> __device__ __forceinline__ void copy(unsigned tile, int part) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (i * PARTS / COUNT == part)
                copy_async(tile + to + i * STEP * BYTES, from + i * stride, i * STEP < lines && inner > 0);
    }

    __device__ __forceinline__ void next() {
        from += advance;
        (K_MAJOR ? inner : lines) -= BK;
    }
};

// Where a lane finds a warp's fragments of an operand in a slice: 16 x 16 elements each, as four 8 x 8 matrices in
// the order of mma's registers. For x that is rows first, then K; for w, two 16 x 8 operands side by side, K first.
template <bool K_MAJOR, bool K_FIRST, int ROWS, int BK> struct Fragments {
    static constexpr int BYTES = (K_MAJOR ? BK : ROWS) * 2;
    int lane_at;

    __device__ __forceinline__ explicit Fragments(int row) {
        const int lane = threadIdx.x % WARP, within = lane % 8, odd = lane / 8 % 2, high = lane / 16;
        const int r = K_FIRST ? high : odd, k = K_FIRST ? odd : high;  // which half of the 16 x 16 the lane points at
        lane_at = K_MAJOR ? swizzled<BYTES>(row + r * 8 + within, k) : swizzled<BYTES>(k * 8 + within, row / CHUNK + r);
    }

    // 16 further along a line is two chunks, an XOR; 16 lines further are swizzled alike, a sum.
    __device__ __forceinline__ void load(unsigned (&r)[4], unsigned tile, int row_tile, int k_tile) const {
        const int along = K_MAJOR ? k_tile : row_tile, across = K_MAJOR ? row_tile : k_tile;
        load_matrices<!K_MAJOR>(r, tile + (lane_at ^ along * 32) + across * 16 * BYTES);
    }
};

template <typename T> __device__ __forceinline__ unsigned pack(float low, float high) {
    const auto pair = pair_from<T>(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

template <typename T, bool X_K, bool W_K, int BM, int BN, int BK, int WM, int WN, int STAGES>
__global__ void __launch_bounds__(Config<BM, BN, BK, WM, WN, STAGES>::THREADS,
                                  Config<BM, BN, BK, WM, WN, STAGES>::BLOCKS)
gemm_sm80(const T* __restrict__ x, long long ldx, const T* __restrict__ w, long long ldw, const T* __restrict__ bias,
          T* __restrict__ y, float* __restrict__ sums, int M, int N, int K, float alpha, int relu, int group,
          int split) {
    using C = Config<BM, BN, BK, WM, WN, STAGES>;
    extern __shared__ __align__(128) char shared[];
    const unsigned stages = shared_address(shared);

    const int tiles_m = (M + BM - 1) / BM, tiles_n = (N + BN - 1) / BN;
    const int tile = blockIdx.x / split, part = blockIdx.x % split;
    const int first = tile / (group * tiles_n) * group;  // groups of `group` tile rows, walked column by column
    const int height = min(group, tiles_m - first);
    const int within = tile % (group * tiles_n);
    const int m0 = (first + within % height) * BM, n0 = within / height * BN;

    const int slices = (K + BK - 1) / BK, share = (slices + split - 1) / split;
    const int begin = part * share, count = min(share, slices - begin);  // none if <= 0

    Loader<X_K, BM, BK, C::THREADS> x_loader(x, ldx, m0, M, begin * BK, K);
    Loader<W_K, BN, BK, C::THREADS> w_loader(w, ldw, n0, N, begin * BK, K);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        x_loader.template copy<1>(stages + s * C::STAGE_BYTES, 0);
        w_loader.template copy<1>(stages + s * C::STAGE_BYTES + C::X_BYTES, 0);
        copy_commit();
        x_loader.next(), w_loader.next();
    }

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int m_warp = warp / C::WARPS_N * WM, n_warp = warp % C::WARPS_N * WN;
    const Fragments<X_K, false, BM, BK> x_fragments(m_warp);
    const Fragments<W_K, true, BN, BK> w_fragments(n_warp);
    unsigned a[2][WM / 16][4], b[2][WN / 16][4];
    auto load_fragments = [&](int buffer, unsigned stage, int k) {
#pragma unroll
        for (int i = 0; i < WM / 16; ++i) x_fragments.load(a[buffer][i], stage, i, k);
#pragma unroll
        for (int j = 0; j < WN / 16; ++j) w_fragments.load(b[buffer][j], stage + C::X_BYTES, j, k);
    };

    float acc[WM / 16][WN / 8][4] = {};
    copy_wait<STAGES - 2>();
    __syncthreads();
    load_fragments(0, stages, 0);
    unsigned reading = stages, writing = stages + (STAGES - 1) * C::STAGE_BYTES;
    for (int slice = 0; slice < count; ++slice) {
#pragma unroll
        for (int k = 0; k < C::STEPS; ++k) {
            if (k == C::STEPS - 1) {
                // The next slice has arrived, for all threads; and all have read the last of this one, whose stage
                // the coming round writes.
                copy_wait<STAGES - 2>();
                __syncthreads();
                writing = reading;
                reading += C::STAGE_BYTES;
                if (reading == stages + STAGES * C::STAGE_BYTES) reading = stages;
            }
            load_fragments((k + 1) % 2, reading, (k + 1) % C::STEPS);
            if (k < C::STEPS - 1) {  // beyond the last slice these copies read nothing
                x_loader.template copy<C::STEPS - 1>(writing, k);
                w_loader.template copy<C::STEPS - 1>(writing + C::X_BYTES, k);
            }
            if (k == C::STEPS - 2) {
                copy_commit();
                x_loader.next(), w_loader.next();
            }
#pragma unroll
            for (int j = 0; j < WN / 8; ++j)
#pragma unroll
                for (int i = 0; i < WM / 16; ++i)  // to and fro, so that neighbouring products share an operand
                    mma<T>(acc[j % 2 ? WM / 16 - 1 - i : i][j], a[k % 2][j % 2 ? WM / 16 - 1 - i : i],
                           b[k % 2][j / 2][j % 2 * 2], b[k % 2][j / 2][j % 2 * 2 + 1]);
        }
    }

    const int g = lane / 4, t = lane % 4;
    if (split > 1) {
        const long long rows = static_cast<long long>(part) * M;
#pragma unroll
        for (int i = 0; i < WM / 16; ++i)
#pragma unroll
            for (int j = 0; j < WN / 8; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int m = m0 + m_warp + i * 16 + g + h * 8, n = n0 + n_warp + j * 8 + t * 2;
                    if (m >= M || n >= N) continue;
                    float* const at = sums + (rows + m) * N + n;
                    if (N % 2 == 0) {
                        *reinterpret_cast<float2*>(at) = {acc[i][j][h * 2], acc[i][j][h * 2 + 1]};
                    } else {
                        at[0] = acc[i][j][h * 2];
                        if (n + 1 < N) at[1] = acc[i][j][h * 2 + 1];
                    }
                }
        return;
    }

    // A warp's own part of the stages' memory, once nobody reads or writes those any more.
    copy_wait<0>();
    __syncthreads();
    char* const mine = shared + warp * (WM * WN * 2);
#pragma unroll
    for (int j = 0; j < WN / 8; ++j) {
        const int n = n0 + n_warp + j * 8 + t * 2;
        const float low = bias && n < N ? to_float(bias[n]) : 0.0f;
        const float high = bias && n + 1 < N ? to_float(bias[n + 1]) : 0.0f;
#pragma unroll
        for (int i = 0; i < WM / 16; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float even = fmaf(alpha, acc[i][j][h * 2], low), odd = fmaf(alpha, acc[i][j][h * 2 + 1], high);
                if (relu) even = relu_of(even), odd = relu_of(odd);
                *reinterpret_cast<unsigned*>(mine + swizzled<WN * 2>(i * 16 + g + h * 8, j) + t * 4) =
                    pack<T>(even, odd);
            }
    }
    __syncwarp();
    const bool aligned = N % CHUNK == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;  // every row of y
    constexpr int CHUNKS = WN / CHUNK, ROWS = WARP / CHUNKS;  // rows that a warp stores at once
#pragma unroll
    for (int r = 0; r < WM; r += ROWS) {
        const int row = r + lane / CHUNKS, chunk = lane % CHUNKS;
        const int m = m0 + m_warp + row, n = n0 + n_warp + chunk * CHUNK;
        if (m >= M || n >= N) continue;
        const char* const from = mine + swizzled<WN * 2>(row, chunk);
        T* const at = y + static_cast<long long>(m) * N + n;
        if (aligned) {
            *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(from);
        } else {
#pragma unroll 1
            for (int e = 0; e < min(CHUNK, N - n); ++e) at[e] = reinterpret_cast<const T*>(from)[e];
        }
    }
}

// y = act(alpha · the sum of `split` partial products + bias), always added in the same order.
template <typename T>
__global__ void __launch_bounds__(256)
gemm_sm80_sum(const float* __restrict__ sums, const T* __restrict__ bias, T* __restrict__ y, long long M, int N,
              float alpha, int relu, int split) {
    const long long size = M * N, i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    float sum = 0.0f;
    for (int part = 0; part < split; ++part) sum += sums[part * size + i];
    sum = fmaf(alpha, sum, bias ? to_float(bias[i % N]) : 0.0f);
    y[i] = from_float<T>(relu ? relu_of(sum) : sum);
}
