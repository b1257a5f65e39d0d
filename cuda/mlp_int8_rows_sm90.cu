// A whole int8 network for many rows in one launch: for each layer  q, s = quantize(x),
// x = act(((float)(q · wᵀ) · s) · scale_w + bias), with a ReLU after each layer but the last. The arithmetic, bit for
// bit, is that of quantize_rows and gemm_int8.
//
//   x (M, K) float, half or bfloat16; each w (N, K) int8, all row-major; y (M, N) float, N <= 64 of the last layer.
//
// The idea: what lies between two layers never leaves the chip. A cluster of C blocks owns R rows of the batch, and the
// products are turned around: outputs are the 64 rows of a wgmma and the batch is its N, so that R may be anything and
// the batch divides evenly. A block multiplies SLICE outputs of a hidden layer for all R rows, and its sums stay in
// registers until the largest value of each batch row is known, over the cluster; then they are quantized from there.
//
//   weights      stream through a ring of stages, loaded by one thread, and start before x is quantized.
//   activations  int8, lie in shared memory in panels of R rows of 128 bytes, as wgmma reads them. Each block quantizes
//                its share of x, or its slice of a hidden layer, and sends it to the others with the bulk copy engine.
//                One buffer serves all layers: it is written again when all blocks of the cluster have multiplied.
//   pairs        of outputs 2 a and 2 a + 1 fall to one thread (the tensor map interleaves the rows of w), so that
//                stmatrix, which moves 16 bits, writes the transposed activations.
#include "common/int8_rows_sm90.cuh"

constexpr int THREADS = 3 * WARPGROUP, CONSUMERS = 2 * WARPGROUP;
constexpr int MOST_STAGES = 8;

struct Network {
    Layer layer[LAYERS];
    const void* x;
    float* y;
    int M, layers;
    int kind;    // of x: 0 float, 1 half, 2 bfloat16
    int panels;  // of the activations' buffer
    int stages;
    int unused;
};

// --- instructions ---------------------------------------------------------------------------------------------------

// Copy plain bytes to the same place in block `rank`'s shared memory, whose barrier counts them.
__device__ __forceinline__ void bulk_send(const void* what, int bytes, unsigned long long* barrier, unsigned rank) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            cluster_address(what, rank)),
        "r"(shared_address(what)), "r"(bytes), "r"(cluster_address(barrier, rank))
        : "memory");
}

// Raise the word at the same place in block `rank`'s shared memory to `value`.
__device__ __forceinline__ void cluster_raise(unsigned* word, unsigned value, unsigned rank) {
    asm volatile("red.relaxed.cluster.shared::cluster.max.u32 [%0], %1;" ::"r"(cluster_address(word, rank)), "r"(value)
                 : "memory");
}

// Arrive on block `rank`'s barrier, and wait for one's own, so that what was written before is seen after, all over the
// cluster: by this thread before a fence, and by those of its block that fenced before they met it at a barrier.
__device__ __forceinline__ void cluster_fence() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive(unsigned long long* barrier, unsigned rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank))
                 : "memory");
}
__device__ __forceinline__ void cluster_wait(unsigned long long* barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// --- the input --------------------------------------------------------------------------------------------------------

constexpr int PIECE = 8, PIECES = LONGEST / PIECE / 32;  // elements that a lane loads at once; such pieces of a lane

__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) { return max(a, b & 0x7fffffffu); }

// The scale of a row whose largest magnitude has these bits: its own, or a given one. NaN where a value beyond `limit`
// spoils the row.
__device__ __forceinline__ float scale_of(unsigned largest, bool given, float fixed, unsigned limit) {
    float s = __fdiv_rn(__uint_as_float(largest), 127.0f);
    if (s < 1.17549435e-38f) s = 1.0f;
    if (given) s = fixed;
    return largest <= limit ? s : not_a_number();
}

// What a lane holds of a row: pieces of 8 elements, 32 pieces apart.
template <typename T> struct alignas(16) Piece { T at[PIECE]; };

template <typename T> __device__ __forceinline__ unsigned largest_of(const Piece<T> (&row)[PIECES]) {
    unsigned most = 0;  // as the bits of a magnitude: NaN above Inf above all numbers
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const unsigned* words = reinterpret_cast<const unsigned*>(&row[i]);
#pragma unroll
        for (int w = 0; w < static_cast<int>(sizeof(Piece<T>)) / 4; ++w)
            most = sizeof(T) == 4 ? larger(most, words[w]) : __vmaxu2(most, words[w] & 0x7fff7fffu);
    }
    if constexpr (sizeof(T) == 2) {
        const auto half = static_cast<unsigned short>(max(most & 0xffffu, most >> 16));
        if constexpr (is_same<T, __half>) most = __float_as_uint(__half2float(__ushort_as_half(half)));
        else most = static_cast<unsigned>(half) << 16;
    }
    return __reduce_max_sync(~0u, most);
}

// Have a warp bring a row, a multiple of 16 bytes at a multiple of 16, into L2.
__device__ __forceinline__ void prefetch_row(const char* row, int bytes) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int at = lane * 128; at < bytes + 112; at += 32 * 128)  // every line of 128 bytes that the row touches
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + min(at, bytes - 16)));
}

// Quantize `count` rows of x from row m0 on, those below M, into rows `first` and following of the panels at `act`, R rows
// each, and their scales; rows beyond M become zeros. A warp takes one row after the other, the next one on its way; the
// first warp, which has weights to load, comes last.
template <typename T, int R>
__device__ __forceinline__ void quantize_rows(char* act, float* scales, const void* source, long long m0, int M, int K,
                                              const float* given_scale, int first, int count) {
    const T* const x = static_cast<const T*>(source) + m0 * K;
    const int exist = static_cast<int>(max(0ll, min(static_cast<long long>(count), M - m0)));
    const bool given = given_scale;
    const float fixed = given ? *given_scale : 0.0f;
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32 + THREADS / 32 - 1) % (THREADS / 32);
    Piece<T> next[PIECES];
    const auto load = [&](int r) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int k = (lane + 32 * i) * PIECE;
            next[i] = {};
            if (r < exist && k < K) next[i] = *reinterpret_cast<const Piece<T>*>(x + static_cast<long long>(r) * K + k);
        }
    };
    for (int r = warp; r < min(count, exist); r += THREADS / 32)
        prefetch_row(reinterpret_cast<const char*>(x + static_cast<long long>(r) * K), K * static_cast<int>(sizeof(T)));
    if (warp < count) load(warp);
#pragma unroll 1
    for (int r = warp; r < count; r += THREADS / 32) {
        Piece<T> now[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; ++i) now[i] = next[i];
        load(r + THREADS / 32);
        const float s = scale_of(largest_of(now), given, fixed, 0x7f7fffffu);
        const int row = first + r;
        if (lane == 0) scales[row] = s;
        const Divider by(s, -127, 127);
        const auto store = [&](auto nearest) {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const int piece = lane + 32 * i;
                if (piece * PIECE >= K) break;
                unsigned q[PIECE];
#pragma unroll
                for (int e = 0; e < PIECE; ++e) q[e] = nearest(to_float(now[i].at[e]));
                char* const to = act + piece / 16 * (R * ROW) + row * ROW + (piece / 2 % 8 ^ row % 8) * 16 + piece % 2 * 8;
                *reinterpret_cast<uint2*>(to) =
                    make_uint2(packed(q[0], q[1], q[2], q[3]), packed(q[4], q[5], q[6], q[7]));
            }
        };
        // nothing lies beyond the row's own maximum, and a spoilt row may hold anything
        if (!given && by.factor == 1.0f) store([&](float v) { return by.nearest_as_it_is(v); });
        else store([&](float v) { return by.nearest(v); });
    }
}

template <int R>
__device__ __forceinline__ void quantize_input(char* act, float* scales, const void* x, long long m0, int M, int K,
                                               int kind, const float* given, int first, int count) {
    if (kind == 0) quantize_rows<float, R>(act, scales, x, m0, M, K, given, first, count);
    else if (kind == 1) quantize_rows<__half, R>(act, scales, x, m0, M, K, given, first, count);
    else quantize_rows<__nv_bfloat16, R>(act, scales, x, m0, M, K, given, first, count);
}

// Send the rows that a block of a cluster of C has quantized, and their scales, to the other blocks.
template <int R, int C>
__device__ __forceinline__ void send_input(char* act, float* scales, int panels, int rank, unsigned long long* received) {
    constexpr int SHARE = R / C;
    for (int i = threadIdx.x; i < (C - 1) * (panels + 1); i += THREADS) {
        const int to = (rank + 1 + i / (panels + 1)) % C, panel = i % (panels + 1);
        if (panel < panels) bulk_send(act + panel * (R * ROW) + rank * SHARE * ROW, SHARE * ROW, received, to);
        else bulk_send(scales + rank * SHARE, SHARE * 4, received, to);
    }
}

// --- products ---------------------------------------------------------------------------------------------------------

// acc[i] = 64 rows of weights, those of `tile` + i, by the R rows of activations, over all of K. The ring goes on from
// `stage` and `phase`; `release(stage)` says that this warpgroup has left one.
template <int R, int MI, int STAGE_BYTES, class Release>
__device__ __forceinline__ void multiply_rows(int (&acc)[MI][R / 2], const char* act, const char* ring,
                                              unsigned long long* full, int K, int tile, int stages, int& stage,
                                              unsigned& phase, Release release) {
    const int whole = K / ROW, rest = (K % ROW + 31) / 32;  // of what lies beyond K nothing is multiplied
    auto multiply = [&](int panel, int from, int to, bool fresh) {
        const char* const ws = ring + stage * STAGE_BYTES + tile * 64 * ROW;
        wgmma_fence();
#pragma unroll
        for (int kk = from; kk < to; ++kk) {
            const auto b = wgmma_descriptor(act + panel * (R * ROW) + kk * 32, 16);
#pragma unroll
            for (int i = 0; i < MI; ++i)
                wgmma_s8<R>(acc[i], wgmma_descriptor(ws + i * 64 * ROW + kk * 32, 16), b, kk > from || !fresh);
        }
        wgmma_commit();
    };
    auto next_stage = [&] {
        if (++stage == stages) stage = 0, phase ^= 1;
    };
    int previous = 0;
    for (int panel = 0; panel < whole; ++panel) {
        mbarrier_wait(&full[stage], phase);
        multiply(panel, 0, 4, panel == 0);
        wgmma_wait<1>();  // the products of the previous stage are done, those of this one go on
        if (panel > 0) release(previous);
        previous = stage;
        next_stage();
    }
    if (rest > 0) {
        mbarrier_wait(&full[stage], phase);
        for (int kk = 0; kk < rest; ++kk) multiply(whole, kk, kk + 1, whole + kk == 0);
        if (whole > 0) {
            wgmma_wait<1>();
            release(previous);
        }
        previous = stage;
        next_stage();
    }
    wgmma_wait<0>();
    release(previous);
}

// What an output's sums are scaled with: of this thread's outputs first + 64 i + h, those beyond N give 0.
template <int MI> struct Outputs {
    float scale[MI][2], bias[MI][2];

    __device__ __forceinline__ Outputs(const float* scale_w, const float* bias_w, int step_w, int first, int N) {
#pragma unroll
        for (int i = 0; i < MI * 2; ++i) {
            const int n = first + i / 2 * 64 + i % 2;
            const bool there = n < N;
            scale[i / 2][i % 2] = there ? scale_w[n * step_w] : 0.0f;
            bias[i / 2][i % 2] = there && bias_w ? bias_w[n] : there ? -0.0f : 0.0f;  // y + -0 is y
        }
    }
};

// --- hidden layers: from sums to integers again -----------------------------------------------------------------------

enum NamedBarrier { MULTIPLIERS = 1 };

// The values after the ReLU take their sums' places, and the largest of each row goes into `maxima`, as the bits of a
// float: over the thread, over the lanes that hold the same rows, over the block.
template <int R, int MI>
__device__ __forceinline__ void scale_sums(int (&acc)[MI][R / 2], const float* scales, const Outputs<MI>& outputs,
                                           unsigned* maxima) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int jj = 0; jj < R / 16; ++jj) {
        unsigned top[4];
#pragma unroll
        for (int jc = 0; jc < 4; jc += 2) {
            const int j = 2 * jj + jc / 2;
            const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * j + lane % 4 * 2);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                top[jc + c] = 0;
#pragma unroll
                for (int i = 0; i < MI; ++i) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        int& at = acc[i][4 * j + c + 2 * h];
                        const float scaled = __fmul_rn(static_cast<float>(at), c ? scale.y : scale.x);
                        // (ReLU gives +0 for -0 here, whose integer is 0 too)
                        const float v = max_nan(__fadd_rn(__fmul_rn(scaled, outputs.scale[i][h]), outputs.bias[i][h]), 0.0f);
                        top[jc + c] = max(top[jc + c], __float_as_uint(v));
                        at = __float_as_int(v);
                    }
                }
            }
        }
        // Lanes 16 and 8 apart divide the four rows among them, those 4 apart share one.
        const bool upper = lane & 16, odd = lane & 8;
        const unsigned a = max(upper ? top[2] : top[0], __shfl_xor_sync(~0u, upper ? top[0] : top[2], 16));
        const unsigned b = max(upper ? top[3] : top[1], __shfl_xor_sync(~0u, upper ? top[1] : top[3], 16));
        unsigned most = max(odd ? b : a, __shfl_xor_sync(~0u, odd ? a : b, 8));
        most = max(most, __shfl_xor_sync(~0u, most, 4));
        if (!(lane & 4)) atomicMax(&maxima[16 * jj + 8 * upper + lane % 4 * 2 + odd], most);
    }
}

// Every block's maxima become those of the cluster. That all blocks have arrived also says that none of them reads its
// activations any more. (Reductions that a barrier counts one by one are far slower.)
template <int R, int C>
__device__ __forceinline__ void raise_maxima(unsigned* maxima, unsigned long long* raised, int rank, unsigned parity) {
    const int thread = threadIdx.x - WARPGROUP;
    barrier_sync(MULTIPLIERS, CONSUMERS);
    if constexpr (C > 1) {
        for (int r = thread; r < R; r += CONSUMERS) {
#pragma unroll
            for (int other = 1; other < C; ++other) cluster_raise(&maxima[r], maxima[r], (rank + other) % C);
        }
        cluster_fence();
        barrier_sync(MULTIPLIERS, CONSUMERS);
        if (thread < C - 1) cluster_arrive(raised, (rank + 1 + thread) % C);
        cluster_wait(raised, parity);
    }
}

// Whether a condition holds for all threads that meet at a barrier.
__device__ __forceinline__ bool barrier_all(int id, int threads, bool condition) {
    int all;
    asm volatile(
        "{\n"
        ".reg .pred in, out;\n"
        "setp.ne.b32 in, %3, 0;\n"
        "barrier.cta.red.and.pred out, %1, %2, in;\n"
        "selp.b32 %0, 1, 0, out;\n"
        "}"
        : "=r"(all)
        : "r"(id), "r"(threads), "r"(static_cast<int>(condition))
        : "memory");
    return all;
}

// Scales of the rows with these maxima, or `given` for all, and what dividing by them takes; the maxima are 0 again. True
// where `Divider::nearest_as_it_is` may divide.
template <int R>
__device__ __forceinline__ bool rescale(float* scales, float2* dividers, unsigned* maxima, const float* given) {
    const float fixed = given ? *given : 0.0f;
    bool plain = !given;
    for (int r = threadIdx.x - WARPGROUP; r < R; r += CONSUMERS) {
        // between static layers what is infinite is clipped
        const float scale = scale_of(maxima[r], given, fixed, given ? 0x7f800000u : 0x7f7fffffu);
        const Divider by(scale, -127, 127);
        plain = plain && (by.factor == 1.0f || !(scale == scale));  // a spoilt row may hold anything
        maxima[r] = 0;
        scales[r] = scale;
        dividers[r] = make_float2(by.factor, by.r);
    }
    return barrier_all(MULTIPLIERS, CONSUMERS, plain);
}

// Quantize the values and leave them in the panels at `act`; this warpgroup's first column there is `column`.
template <int R, int MI>
__device__ __forceinline__ void quantize_values(const int (&acc)[MI][R / 2], const float* scales,
                                                const float2* dividers, bool plain, char* act, int column) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const auto store = [&](auto nearest) {
#pragma unroll
        for (int jj = 0; jj < R / 16; ++jj) {
            unsigned pairs[MI][2];
#pragma unroll
            for (int j2 = 0; j2 < 2; ++j2) {
                const int j = 2 * jj + j2, m = 8 * j + lane % 4 * 2;
                Divider by[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) by[c] = Divider(scales[m + c], dividers[m + c].x, dividers[m + c].y);
#pragma unroll
                for (int i = 0; i < MI; ++i) {
                    unsigned q[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) q[e] = nearest(by[e % 2], __int_as_float(acc[i][4 * j + e]));
                    pairs[i][j2] = packed(q[0], q[2], q[1], q[3]);
                }
            }
            const int to_row = 16 * jj + lane % 16;
#pragma unroll
            for (int i = 0; i < MI; ++i) {
                const int n = column + i * 64 + 16 * warp;
                char* const to = act + n / ROW * (R * ROW) + to_row * ROW + (n % ROW / 16 ^ to_row % 8) * 16;
                stmatrix_x2_transposed(to, pairs[i][0], pairs[i][1]);
            }
        }
    };
    if (plain) store([](const Divider& by, float v) { return by.nearest_as_it_is(v); });
    else store([](const Divider& by, float v) { return by.nearest_finite<true>(v); });
    fence_proxy_async();
    barrier_sync(MULTIPLIERS, CONSUMERS);
}

// --- the kernel -------------------------------------------------------------------------------------------------------

// R rows a cluster, MI wgmma tiles of 64 outputs a warpgroup, C blocks a cluster; the last layer's products take HEAD_R
// rows at once, at least a block's share.
template <int R, int MI, int C, int HEAD_R>
__global__ void __launch_bounds__(THREADS, 1)
mlp_int8_rows_sm90(const __grid_constant__ Maps maps, const __grid_constant__ Network net) {
    constexpr int SLICE = 2 * MI * 64, SHARE = R / C, PANEL = R * ROW, STAGE = SLICE * ROW;
    static_assert(R % C == 0 && SHARE % 8 == 0, "blocks share out whole groups of swizzled rows");
    static_assert(R % 16 == 0 && HEAD_R >= SHARE && HEAD_R <= R, "products take 16 rows, the last one a block's share");
    static_assert(MI * R / 2 <= 160, "the sums must fit a thread's registers");
    extern __shared__ __align__(1024) char shared[];
    char* const act = shared;
    char* const ring = act + net.panels * PANEL;
    float* const scales = reinterpret_cast<float*>(ring + net.stages * STAGE);  // of the rows, NaN for a spoilt one
    unsigned* const maxima = reinterpret_cast<unsigned*>(scales + R);
    float2* const dividers = reinterpret_cast<float2*>(maxima + R);  // factor and reciprocal, as in Divider
    auto* const full = reinterpret_cast<unsigned long long*>(dividers + R);
    auto* const empty = full + MOST_STAGES;
    auto* const received = empty + MOST_STAGES;  // the others' activations
    auto* const raised = received + 1;           // the others' maxima

    const int rank = C > 1 ? cluster_rank() : 0, last = net.layers - 1;
    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % 32;
    const long long m0 = static_cast<long long>(blockIdx.x / C) * R;
    if (threadIdx.x == 0) {
        for (int s = 0; s < net.stages; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], 2);
        }
        mbarrier_init(received, 1);
        mbarrier_init(raised, max(1, C - 1));
        mbarrier_init_fence();
        if (C > 1) mbarrier_expect_bytes(received, (C - 1) * SHARE * (panels_of(net.layer[0].K) * ROW + 4));
    }
    for (int r = threadIdx.x; r < R; r += THREADS) maxima[r] = 0;
    if (C > 1) cluster_sync();
    else __syncthreads();

    // One thread loads the weights of all layers, one panel after the other.
    int load_layer = 0, load_panel = 0, load_stage = 0;
    unsigned load_phase = 1;
    auto load_next = [&] {
        mbarrier_wait(&empty[load_stage], load_phase);
        char* const to = ring + load_stage * STAGE;
        if (load_layer < last) {
            mbarrier_expect_bytes(&full[load_stage], STAGE);
            tma_load_pairs(to, &maps.w[load_layer], &full[load_stage], load_panel * ROW, rank * (SLICE / 16));
        } else {
            mbarrier_expect_bytes(&full[load_stage], HEAD * ROW);
            tma_load(to, &maps.w[load_layer], &full[load_stage], load_panel * ROW, 0);
        }
        if (++load_stage == net.stages) load_stage = 0, load_phase ^= 1;
        if (++load_panel == panels_of(net.layer[load_layer].K)) load_panel = 0, ++load_layer;
    };
    if (threadIdx.x == 0)
        for (int i = 0; i < net.stages && load_layer <= last; ++i) load_next();

    quantize_input<R>(act, scales, net.x, m0 + rank * SHARE, net.M, net.layer[0].K, net.kind, net.layer[0].scale_x,
                      rank * SHARE, SHARE);
    fence_proxy_async();
    __syncthreads();
    if (C > 1) send_input<R, C>(act, scales, panels_of(net.layer[0].K), rank, received);

    if (warpgroup == 0) {
        give_registers<40>();
        if (threadIdx.x == 0)
            while (load_layer <= last) load_next();
        __syncwarp();
    } else {
        take_registers<232>();
        const int mine = warpgroup - 1, thread = threadIdx.x - WARPGROUP, warp = thread / 32 % 4;
        int stage = 0;
        unsigned phase = 0;
        auto next_stage = [&] {
            if (++stage == net.stages) stage = 0, phase ^= 1;
        };
        auto release = [&](int s) {
            if (thread % WARPGROUP == 0) mbarrier_arrive(&empty[s]);
        };

#pragma unroll 1
        for (int l = 0; l < last; ++l) {
            const Layer& layer = net.layer[l];
            // acc[i][4 j + c + 2 h]: output first + 64 i + h, row 8 j + 2 * (lane % 4) + c of the cluster's
            const int first = rank * SLICE + mine * MI * 64 + 16 * warp + lane / 4 * 2;
            const Outputs<MI> outputs(layer.scale_w, layer.bias, layer.step_w, first, layer.N);
            if (C > 1) mbarrier_wait(received, l & 1);

            int acc[MI][R / 2];
            multiply_rows<R, MI, STAGE>(acc, act, ring, full, layer.K, mine * MI, net.stages, stage, phase, release);

            scale_sums<R, MI>(acc, scales, outputs, maxima);
            raise_maxima<R, C>(maxima, raised, rank, l & 1);
            if (C > 1 && thread == 0) mbarrier_expect_bytes(received, (C - 1) * PANEL * MI);
            const bool plain = rescale<R>(scales, dividers, maxima, net.layer[l + 1].scale_x);
            quantize_values<R, MI>(acc, scales, dividers, plain, act, rank * SLICE + mine * MI * 64);
            if (C > 1 && thread < C - 1) bulk_send(act + rank * MI * PANEL, MI * PANEL, received, (rank + 1 + thread) % C);
        }

        if (C > 1) mbarrier_wait(received, last & 1);
        if (mine == 0) {  // the last layer: a block's share of the rows, all outputs
            const Layer& layer = net.layer[last];
            const int from = min(rank * SHARE, R - HEAD_R);
            float scale_w[2], bias[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int n = min(16 * warp + lane / 4 + 8 * h, layer.N - 1);
                scale_w[h] = layer.scale_w[n * layer.step_w];
                bias[h] = layer.bias ? layer.bias[n] : -0.0f;
            }
            int acc[HEAD_R / 2];
            const int panels = panels_of(layer.K);
            for (int panel = 0; panel < panels; ++panel) {
                mbarrier_wait(&full[stage], phase);
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < 4; ++kk)
                    wgmma_s8<HEAD_R>(acc, wgmma_descriptor(ring + stage * STAGE + kk * 32, 16),
                                     wgmma_descriptor(act + panel * PANEL + from * ROW + kk * 32, 16), panel + kk > 0);
                wgmma_commit();
                wgmma_wait<0>();
                release(stage);
                release(stage);  // for the other warpgroup, which has nothing to do here
                next_stage();
            }
            float2 scale[HEAD_R / 8];  // read before anything is stored: y might be where they lie, for all the compiler knows
#pragma unroll
            for (int j = 0; j < HEAD_R / 8; ++j)
                scale[j] = *reinterpret_cast<const float2*>(scales + from + 8 * j + lane % 4 * 2);
            const int n = 16 * warp + lane / 4, low = rank * SHARE;
            const int high = static_cast<int>(min(low + static_cast<long long>(SHARE), net.M - m0));
            float* const y = net.y + (m0 + from) * layer.N + n;
            if (16 * warp < layer.N) {
#pragma unroll
                for (int e = 0; e < HEAD_R / 2; ++e) {
                    const int r = e / 4 * 8 + lane % 4 * 2 + e % 2, h = e % 4 / 2;
                    const float of_row = e % 2 ? scale[e / 4].y : scale[e / 4].x;
                    const float scaled = __fmul_rn(__fmul_rn(static_cast<float>(acc[e]), of_row), scale_w[h]);
                    if (n + 8 * h < layer.N && from + r >= low && from + r < high)
                        y[r * layer.N + 8 * h] = __fadd_rn(scaled, bias[h]);
                }
            }
        }
    }
    if (C > 1) cluster_sync();  // no block leaves while another may still reach its memory
}
