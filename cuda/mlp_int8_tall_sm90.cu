// A whole int8 network for many rows in one launch: for each layer  q, s = quantize(x),
// x = act(((float)(q · wᵀ) · s) · scale_w + bias), with a ReLU after each layer but the last. The arithmetic, bit for
// bit, is that of quantize_rows and gemm_int8.
//
//   x (M, K) T; each w (N, K) int8, all row-major; y (M, N) float, N <= 64 of the last layer.
//
// The idea: what lies between two layers never leaves the chip. A block owns R rows of the batch, and the products are
// turned around: outputs are the 64 rows of a wgmma and the batch is its N, so that R may be any multiple of 16 and the
// batch divides evenly among the multiprocessors. Each of four warpgroups multiplies 64 outputs of a hidden layer for all
// R rows, and its sums stay in registers until the largest value of each batch row is known; then they are quantized from
// there.
//
//   weights      stream through a ring of stages, loaded by one thread, and start before x is quantized.
//   activations  int8, lie in shared memory in panels of R rows of 128 bytes, as wgmma reads them. One buffer serves all
//                layers: it is written again when all warpgroups have multiplied.
//   pairs        of outputs 2 a and 2 a + 1 fall to one thread (the tensor map interleaves the rows of w), so that
//                stmatrix, which moves 16 bits, writes the transposed activations.
//   short code   what every row takes is written short, what is rare is set apart.
#include "common/int8_rows_sm90.cuh"

constexpr int GROUPS = 4, THREADS = GROUPS * WARPGROUP, WARPS = THREADS / 32;
constexpr int WIDEST = GROUPS * 64;  // outputs of a hidden layer
constexpr int STAGE = WIDEST * ROW;  // bytes
constexpr int MOST_STAGES = 7;

struct Network {
    Layer layer[LAYERS];
    const void* x;
    float* y;
    int M, layers;
    int panels;  // of the activations' buffer
    int stages;
};

// Bring bytes, a multiple of 16 at a multiple of 16, into L2.
__device__ __forceinline__ void bulk_prefetch(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// --- scales ---------------------------------------------------------------------------------------------------------

constexpr unsigned FINITE = 0x7f7fffffu, INFINITE = 0x7f800000u;  // the bits of the largest number, and of Inf

// What a row's largest magnitude, given by its bits, makes of it: a scale of largest / 127, and its reciprocal. Far from
// where rounding is different both take a few instructions (as in mlp_int8_row_sm90.cu); a row of zeros, and one spoilt
// by NaN or Inf, whose integers may be anything, go with those. What else there is, is not `usual`.
struct Scale {
    float s, r;
    bool usual;

    __device__ __forceinline__ explicit Scale(unsigned largest) {
        const unsigned LEAST = 0x0c000000u, MOST = 0x72000000u;  // 1e-31 and 2.5e30
        const float l = __uint_as_float(largest), inverse = 1.0f / 127.0f, guess = __fmul_rn(l, inverse);
        s = largest == 0 ? 1.0f : fmaf(fmaf(-127.0f, guess, l), inverse, guess);
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(s));
        r = fmaf(r, fmaf(-r, s, 1.0f), r);
        usual = largest - LEAST < MOST - LEAST || largest == 0 || largest > FINITE;
    }

    // As Divider's: the integer is the low byte. Nothing lies beyond the row's own maximum.
    static __device__ __forceinline__ unsigned nearest(float x, float s, float r) {
        const float q = __fmul_rn(x, r);
        return __float_as_uint(__fadd_rn(fmaf(fmaf(-q, s, x), r, q), 12582912.0f));
    }
};
__device__ __noinline__ float scale_slowly(unsigned largest) {
    const float s = __fdiv_rn(__uint_as_float(largest), 127.0f);
    return s < 1.17549435e-38f ? 1.0f : s;
}

// --- the input --------------------------------------------------------------------------------------------------------

constexpr int PIECE = 8, PIECES = LONGEST / PIECE / 32;  // elements that a lane loads at once; such pieces of a lane

// What a lane holds of a row: pieces of 8 elements, 32 pieces apart.
template <typename T> struct alignas(16) Piece {
    static constexpr int WORDS = PIECE * sizeof(T) / 4;
    unsigned words[WORDS];

    __device__ __forceinline__ void to_floats(float (&v)[PIECE]) const {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            if constexpr (sizeof(T) == 4) v[w] = __uint_as_float(words[w]);
            else if constexpr (is_same<T, __half>) {
                const float2 two = __half22float2(reinterpret_cast<const __half2&>(words[w]));
                v[2 * w] = two.x, v[2 * w + 1] = two.y;
            } else {
                v[2 * w] = __uint_as_float(words[w] << 16), v[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
            }
        }
    }
};

template <typename T> __device__ __forceinline__ unsigned largest_of(const Piece<T> (&row)[PIECES]) {
    unsigned most = 0;  // as the bits of a magnitude: NaN above Inf above all numbers
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
        for (unsigned word : row[i].words)
            most = sizeof(T) == 4 ? max(most, word & 0x7fffffffu) : __vmaxu2(most, word & 0x7fff7fffu);
    if constexpr (sizeof(T) == 2) {
        const auto half = static_cast<unsigned short>(max(most & 0xffffu, most >> 16));
        if constexpr (is_same<T, __half>) most = __float_as_uint(__half2float(__ushort_as_half(half)));
        else most = static_cast<unsigned>(half) << 16;
    }
    return __reduce_max_sync(~0u, most);
}

// Where a piece of a row goes.
template <int R> __device__ __forceinline__ uint2* place_of(char* act, int row, int piece) {
    return reinterpret_cast<uint2*>(act + piece / 16 * (R * ROW) + row * ROW + (piece / 2 % 8 ^ row % 8) * 16 +
                                    piece % 2 * 8);
}

template <typename T, class Nearest> __device__ __forceinline__ uint2 quantized(const Piece<T>& piece, Nearest nearest) {
    float v[PIECE];
    piece.to_floats(v);
    unsigned q[PIECE];
#pragma unroll
    for (int e = 0; e < PIECE; ++e) q[e] = nearest(v[e]);
    return make_uint2(packed(q[0], q[1], q[2], q[3]), packed(q[4], q[5], q[6], q[7]));
}

// A row that is not usual, once more from memory.
template <typename T, int R> __device__ __noinline__ void quantize_slowly(char* act, int row, const T* x, int K, float s) {
    const Divider by(s, -127, 127);
#pragma unroll 1
    for (int piece = threadIdx.x % 32; piece * PIECE < K; piece += 32)
        *place_of<R>(act, row, piece) = quantized(*reinterpret_cast<const Piece<T>*>(x + piece * PIECE),
                                                  [&](float v) { return static_cast<unsigned>(by.nearest(v)); });
}

// Quantize the block's R rows of x, those that `exist`, into the panels at `act`, and their scales; the others become zeros.
// A warp takes one row after the other, of 16-bit types the next one on its way: of floats registers hold one.
template <typename T, int R>
__device__ __forceinline__ void quantize_input(char* act, float2* rows, const T* x, int exist, int K,
                                               const float* given) {
    constexpr bool AHEAD = sizeof(T) == 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Piece<T> next[PIECES];
    const auto load = [&](int r) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int k = (lane + 32 * i) * PIECE;
            next[i] = {};
            if (r < exist && k < K) next[i] = *reinterpret_cast<const Piece<T>*>(x + static_cast<long long>(r) * K + k);
        }
    };
    if (AHEAD) load(warp);
    const float fixed = given ? *given : 1.0f;
    const Divider by(fixed, -127, 127);
#pragma unroll 1
    for (int r = warp; r < R; r += WARPS) {
        if (!AHEAD) load(r);
        Piece<T> now[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; ++i) now[i] = next[i];
        if (AHEAD) load(r + WARPS);
        const unsigned largest = largest_of(now);
        Scale own(largest);
        if (!own.usual) own.s = scale_slowly(largest);
        const float s = given ? fixed : own.s;
        if (lane == 0) rows[r].x = largest <= FINITE ? s : not_a_number();
        const auto store = [&](auto nearest) {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const int piece = lane + 32 * i;
                if (piece * PIECE >= K) break;
                *place_of<R>(act, r, piece) = quantized(now[i], nearest);
            }
        };
        if (!given && own.usual) store([&](float v) { return Scale::nearest(v, own.s, own.r); });
        else if (given && !by.special) store([&](float v) { return by.nearest_finite<true>(v); });
        else if (r < exist) quantize_slowly<T, R>(act, r, x + static_cast<long long>(r) * K, K, s);
    }
}

// --- hidden layers: from sums to integers again -----------------------------------------------------------------------

// f(8 sums of a thread, i) for each 16 rows.
template <int R, class F> __device__ __forceinline__ void for_each_sixteen(int (&acc)[R / 2], F f) {
#pragma unroll
    for (int i = 0; i < R / 16; ++i) f(reinterpret_cast<int (&)[8]>(acc[8 * i]), i);
}

// The values after the ReLU take their sums' places, and the largest of each row goes into `maxima`, as the bits of a
// float: over the thread, over the lanes that hold the same rows, over the block.
template <int R>
__device__ __forceinline__ void scale_sums(int (&acc)[R / 2], const float2* rows, const float (&scale_w)[2],
                                           const float (&bias)[2], unsigned* maxima) {
    const int lane = threadIdx.x % 32;
    const auto sixteen = [&](int (&sums)[8], const float2* rows, unsigned* maxima) {
        unsigned top[4];
#pragma unroll
        for (int jc = 0; jc < 4; jc += 2) {
            const float4 two = *reinterpret_cast<const float4*>(rows + 4 * jc + lane % 4 * 2);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float v[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    int& at = sums[2 * jc + c + 2 * h];
                    const float scaled = __fmul_rn(static_cast<float>(at), c ? two.z : two.x);
                    // (ReLU gives +0 for -0 here, whose integer is 0 too)
                    v[h] = max_nan(__fadd_rn(__fmul_rn(scaled, scale_w[h]), bias[h]), 0.0f);
                    at = __float_as_int(v[h]);
                }
                top[jc + c] = max(__float_as_uint(v[0]), __float_as_uint(v[1]));
            }
        }
        // Lanes 16 and 8 apart divide the four rows among them, those 4 apart share one.
        const bool upper = lane & 16, odd = lane & 8;
        const unsigned a = max(upper ? top[2] : top[0], __shfl_xor_sync(~0u, upper ? top[0] : top[2], 16));
        const unsigned b = max(upper ? top[3] : top[1], __shfl_xor_sync(~0u, upper ? top[1] : top[3], 16));
        unsigned most = max(odd ? b : a, __shfl_xor_sync(~0u, odd ? a : b, 8));
        most = max(most, __shfl_xor_sync(~0u, most, 4));
        if (!(lane & 4)) atomicMax(&maxima[8 * upper + lane % 4 * 2 + odd], most);
    };
    for_each_sixteen<R>(acc, [&](int (&sums)[8], int jj) { sixteen(sums, rows + 16 * jj, maxima + 16 * jj); });
}

// Scales of the rows with these maxima, or `given` for all, and what dividing by them takes; the maxima are 0 again. True
// where all rows have usual scales of their own.
template <int R>
__device__ __forceinline__ bool rescale(float2* rows, float* factors, unsigned* maxima, const float* given) {
    static_assert(R <= THREADS, "a thread has a row");
    const int r = threadIdx.x;
    bool usual = !given;
    if (r < R) {
        const unsigned largest = maxima[r];
        const Scale own(largest);
        float s = own.s, reciprocal = own.r, factor = 1.0f;
        if (given || !own.usual) {
            s = given ? *given : scale_slowly(largest);
            const Divider by(s, -127, 127);
            factor = by.factor, reciprocal = by.r;
        }
        usual = usual && own.usual;
        maxima[r] = 0;
        // between static layers what is infinite is clipped
        rows[r] = make_float2(largest <= (given ? INFINITE : FINITE) ? s : not_a_number(), reciprocal);
        factors[r] = factor;
    }
    return __syncthreads_and(usual);
}

// Quantize the values and leave them in the panels at `act`; this warpgroup's first column there is `column`.
template <int R>
__device__ __forceinline__ void quantize_values(int (&acc)[R / 2], const float2* rows, const float* factors, bool usual,
                                                char* act, int column) {
    const int lane = threadIdx.x % 32, n = column + 16 * (threadIdx.x / 32 % 4);
    char* const to = act + n / ROW * (R * ROW) + lane % 16 * ROW + (n % ROW / 16 ^ lane % 8) * 16;
    const auto store = [&](auto nearest) {
        for_each_sixteen<R>(acc, [&](int (&values)[8], int jj) {
            unsigned pairs[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                unsigned q[4];
                nearest(q, &values[4 * j], 16 * jj + 8 * j + lane % 4 * 2);
                pairs[j] = packed(q[0], q[2], q[1], q[3]);
            }
            stmatrix_x2_transposed(to + jj * 16 * ROW, pairs[0], pairs[1]);
        });
    };
    if (usual) store([&](unsigned (&q)[4], const int* values, int m) {
        const float4 two = *reinterpret_cast<const float4*>(rows + m);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            q[e] = Scale::nearest(__int_as_float(values[e]), e % 2 ? two.z : two.x, e % 2 ? two.w : two.y);
    });
    else store([&](unsigned (&q)[4], const int* values, int m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 row = rows[m + e % 2];
            q[e] = Divider(row.x, factors[m + e % 2], row.y).nearest_finite<true>(__int_as_float(values[e]));
        }
    });
    fence_proxy_async();
    __syncthreads();
}

// --- the kernel -------------------------------------------------------------------------------------------------------

// A block has R rows of the batch; in the last layer's products a warpgroup has HEAD_R of them.
template <typename T, int R>
__global__ void __launch_bounds__(THREADS, 1)
mlp_int8_tall_sm90(const __grid_constant__ Maps maps, const __grid_constant__ Network net) {
    constexpr int PANEL = R * ROW, HEAD_R = (R / GROUPS + 7) / 8 * 8;
    static_assert(R % 16 == 0, "activations are stored 16 rows at a time");
    static_assert(R <= 80, "the sums must fit a thread's registers");
    extern __shared__ __align__(1024) char shared[];
    char* const act = shared;
    char* const ring = act + net.panels * PANEL;
    float2* const rows = reinterpret_cast<float2*>(ring + net.stages * STAGE);  // scale, NaN of a spoilt row; reciprocal
    float* const factors = reinterpret_cast<float*>(rows + R);                  // as in Divider
    unsigned* const maxima = reinterpret_cast<unsigned*>(factors + R);
    auto* const full = reinterpret_cast<unsigned long long*>(maxima + R);
    auto* const empty = full + MOST_STAGES;

    const int last = net.layers - 1;
    const int mine = threadIdx.x / WARPGROUP, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const long long m0 = static_cast<long long>(blockIdx.x) * R;
    const int exist = static_cast<int>(min(static_cast<long long>(R), net.M - m0));
    const T* const x = static_cast<const T*>(net.x) + m0 * net.layer[0].K;

    // One thread loads the weights of all layers, one panel after the other.
    const bool loads = threadIdx.x == THREADS - 32;
    int load_layer = 0, load_panel = 0, load_stage = 0;
    unsigned load_phase = 1;
    const auto load_next = [&] {
        if (load_layer > last) return;
        mbarrier_wait(&empty[load_stage], load_phase);
        char* const to = ring + load_stage * STAGE;
        const bool head = load_layer == last;
        mbarrier_expect_bytes(&full[load_stage], head ? HEAD * ROW : STAGE);
        if (head) tma_load(to, &maps.w[load_layer], &full[load_stage], load_panel * ROW, 0);
        else tma_load_pairs(to, &maps.w[load_layer], &full[load_stage], load_panel * ROW, 0);
        if (++load_stage == net.stages) load_stage = 0, load_phase ^= 1;
        if (++load_panel == panels_of(net.layer[load_layer].K)) load_panel = 0, ++load_layer;
    };
    if (loads) {
        if (R > WARPS) bulk_prefetch(x, exist * net.layer[0].K * static_cast<int>(sizeof(T)));
        for (int s = 0; s < net.stages; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], GROUPS);
        }
        mbarrier_init_fence();
#pragma unroll 1
        for (int s = 0; s < net.stages; ++s) load_next();
    }
    __syncwarp();
    if (threadIdx.x < R) maxima[threadIdx.x] = 0;
    int stage = 0;
    unsigned phase = 0;
    const auto next_stage = [&] {
        if (++stage == net.stages) stage = 0, phase ^= 1;
    };
    const auto release = [&](int s) {
        if (threadIdx.x % WARPGROUP == 0) mbarrier_arrive(&empty[s]);
    };

#pragma unroll 1
    for (int l = 0; l < last; ++l) {
        const Layer& layer = net.layer[l];
        // acc[4 j + c + 2 h]: output first + h, row 8 j + 2 * (lane % 4) + c
        const int first = mine * 64 + 16 * warp + lane / 4 * 2;
        float scale_w[2], bias[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // where there is no output, values are 0
            const int n = first + h;
            const bool there = n < layer.N;
            scale_w[h] = there ? layer.scale_w[n * layer.step_w] : 0.0f;
            bias[h] = there && layer.bias ? layer.bias[n] : there ? -0.0f : 0.0f;  // y + -0 is y
        }
        if (l == 0) {
            quantize_input<T, R>(act, rows, x, exist, layer.K, layer.scale_x);
            fence_proxy_async();
            __syncthreads();
        }

        int acc[R / 2];
        const int whole = layer.K / ROW, rest = (layer.K % ROW + 31) / 32;  // of what lies beyond K nothing is multiplied
        const auto multiply = [&](int panel, int from, int to) {
            const auto a = wgmma_descriptor(ring + stage * STAGE + mine * 64 * ROW, 16);
            const auto b = wgmma_descriptor(act + panel * PANEL, 16);
            wgmma_fence();
#pragma unroll
            for (int kk = from; kk < to; ++kk) wgmma_s8<R>(acc, a + 2 * kk, b + 2 * kk, panel + kk > 0);
            wgmma_commit();
        };
        int previous = 0;
#pragma unroll 1
        for (int panel = 0; panel < whole; ++panel) {
            mbarrier_wait(&full[stage], phase);
            multiply(panel, 0, 4);
            wgmma_wait<1>();  // the products of the previous stage are done, those of this one go on
            if (panel > 0) release(previous);
            if (panel > 1 && loads) load_next();  // to where all have been for a while
            __syncwarp();
            previous = stage;
            next_stage();
        }
        if (rest > 0) {
            mbarrier_wait(&full[stage], phase);
#pragma unroll 1
            for (int kk = 0; kk < rest; ++kk) multiply(whole, kk, kk + 1);
        }
        wgmma_wait<0>();
        if (whole > 0) release(previous);
        if (rest > 0) {
            release(stage);
            next_stage();
        }
        if (loads)
#pragma unroll 1
            for (int i = max(0, whole - 2); i < panels_of(layer.K); ++i) load_next();
        __syncwarp();

        scale_sums<R>(acc, rows, scale_w, bias, maxima);
        __syncthreads();
        const bool usual = rescale<R>(rows, factors, maxima, net.layer[l + 1].scale_x);
        quantize_values<R>(acc, rows, factors, usual, act, mine * 64);
    }

    // The last layer: all outputs of the warpgroup's rows, of which the last ones may be another's too.
    const Layer& layer = net.layer[last];
    const int low = mine * HEAD_R, from = min(low, R - HEAD_R), high = min(low + HEAD_R, exist);
    float scale_w[2], bias[2];
    const int n = 16 * warp + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int at = min(n + 8 * h, layer.N - 1);
        scale_w[h] = layer.scale_w[at * layer.step_w];
        bias[h] = layer.bias ? layer.bias[at] : -0.0f;
    }
    int acc[HEAD_R / 2];
    const int panels = panels_of(layer.K);
#pragma unroll 1
    for (int panel = 0; panel < panels; ++panel) {
        mbarrier_wait(&full[stage], phase);
        const auto a = wgmma_descriptor(ring + stage * STAGE, 16);
        const auto b = wgmma_descriptor(act + panel * PANEL + from * ROW, 16);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) wgmma_s8<HEAD_R>(acc, a + 2 * kk, b + 2 * kk, panel + kk > 0);
        wgmma_commit();
        wgmma_wait<0>();
        next_stage();  // a stage for each panel is loaded: nobody waits for one to be left
    }
    if (16 * warp < layer.N && low < high) {
        float2 scale[HEAD_R / 8];  // read before anything is stored: y might be where they lie, for all the compiler knows
#pragma unroll
        for (int j = 0; j < HEAD_R / 8; ++j) {
            const float4 two = *reinterpret_cast<const float4*>(rows + from + 8 * j + lane % 4 * 2);
            scale[j] = make_float2(two.x, two.z);
        }
        float* const y = net.y + m0 * layer.N + n;
#pragma unroll
        for (int e = 0; e < HEAD_R / 2; ++e) {
            const int r = from + e / 4 * 8 + lane % 4 * 2 + e % 2, h = e % 4 / 2;
            const float of_row = e % 2 ? scale[e / 4].y : scale[e / 4].x;
            const float scaled = __fmul_rn(__fmul_rn(static_cast<float>(acc[e]), of_row), scale_w[h]);
            if (n + 8 * h < layer.N && r >= low && r < high) y[r * layer.N + 8 * h] = __fadd_rn(scaled, bias[h]);
        }
    }
}
