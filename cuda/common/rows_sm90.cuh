// What the int8 kernels share that keep many rows of activations on the chip: products with the batch as the N of a
// wgmma, and the quantization of float rows into the shared memory that it reads.
//
//   weights      are the 64 rows of a wgmma. A tensor map interleaves them, so that outputs 2 a and 2 a + 1 fall to one
//                thread. They stream through a ring of stages of 128 bytes of K.
//   activations  int8, lie in panels of R rows of 128 bytes, swizzled as wgmma reads them.
#pragma once
#include "divide.cuh"
#include "wgmma.cuh"

constexpr int ROW = 128;  // bytes of K in a stage and in a panel: the width of a swizzled row
constexpr int WARPGROUP = 128, THREADS = 3 * WARPGROUP, CONSUMERS = 2 * WARPGROUP;
constexpr int MOST_STAGES = 8;
constexpr int LONGEST = 1024;  // elements of a row of x

__device__ __forceinline__ int panels_of(int K) { return (K + ROW - 1) / ROW; }

// --- instructions ---------------------------------------------------------------------------------------------------

#define QSPARSE_NUMBERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QSPARSE_NUMBERS_16 QSPARSE_NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define QSPARSE_NUMBERS_24 QSPARSE_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define QSPARSE_NUMBERS_40 QSPARSE_NUMBERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define QSPARSE_NUMBERS_80 QSPARSE_NUMBERS_40 \
    ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55" \
    ", %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71" \
    ", %72, %73, %74, %75, %76, %77, %78, %79"
#define QSPARSE_WGMMA_S8(n, count, a_at, b_at, onto, d, ...) \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" #onto ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" QSPARSE_NUMBERS_##count "}, %" #a_at ", %" #b_at ", p;\n}" \
        : __VA_ARGS__ \
        : "l"(a), "l"(b), "r"(accumulate))

// d (64 x N) += a (64 x 32) · b (N x 32), as the wrappers of common/wgmma.cuh, for the N that divide a batch evenly.
template <int N>
__device__ __forceinline__ void wgmma_s8(int (&d)[N / 2], unsigned long long a, unsigned long long b, int accumulate) {
    static_assert(N == 16 || N == 32 || N == 48 || N == 64 || N == 80 || N == 128 || N == 160, "a wrapper for this N is not written yet");
    if constexpr (N == 16) QSPARSE_WGMMA_S8(16, 8, 8, 9, 10, d, QSPARSE_ACC8("+r", d, 0));
    if constexpr (N == 32)
        QSPARSE_WGMMA_S8(32, 16, 16, 17, 18, d, QSPARSE_ACC8("+r", d, 0), QSPARSE_ACC8("+r", d, 8));
    if constexpr (N == 48)
        QSPARSE_WGMMA_S8(48, 24, 24, 25, 26, d, QSPARSE_ACC8("+r", d, 0), QSPARSE_ACC8("+r", d, 8),
                         QSPARSE_ACC8("+r", d, 16));
    if constexpr (N == 64 || N == 128) wgmma<signed char, N, 0, 0>(d, a, b, accumulate);
    if constexpr (N == 80)
        QSPARSE_WGMMA_S8(80, 40, 40, 41, 42, d, QSPARSE_ACC32("+r", d, 0), QSPARSE_ACC8("+r", d, 32));
    if constexpr (N == 160)
        QSPARSE_WGMMA_S8(160, 80, 80, 81, 82, d, QSPARSE_ACC32("+r", d, 0), QSPARSE_ACC32("+r", d, 32),
                         QSPARSE_ACC8("+r", d, 64), QSPARSE_ACC8("+r", d, 72));
}

// The box at column k of w whose rows, in groups of 16, arrive as 0, 2, ..., 14, 1, 3, ..., 15; `group` is the first.
__device__ __forceinline__ void tma_load_pairs(void* to, const TensorMap* map, unsigned long long* barrier, int k,
                                               int group) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(0), "r"(group)
        : "memory");
}

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

// Two 8x8 matrices of 16-bit values, transposed on their way to shared memory; lane i < 16 gives the address of row
// i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x2_transposed(void* to, unsigned a, unsigned b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(to)), "r"(a),
                 "r"(b)
                 : "memory");
}

__device__ __forceinline__ unsigned packed(unsigned a, unsigned b, unsigned c, unsigned d) {  // of their low bytes
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// --- the input --------------------------------------------------------------------------------------------------------

template <typename T> constexpr int TEAM_OF = 4 * sizeof(T);  // lanes that share a row

__device__ __forceinline__ unsigned larger_halves(unsigned a, unsigned b) { return __vmaxu2(a, b & 0x7fff7fffu); }
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) { return max(a, b & 0x7fffffffu); }

// The scale of a row whose largest magnitude has these bits: its own, or a given one. NaN where a value beyond `limit`
// spoils the row.
__device__ __forceinline__ float scale_of(unsigned largest, bool given, float fixed, unsigned limit) {
    float s = __fdiv_rn(__uint_as_float(largest), 127.0f);
    if (s < 1.17549435e-38f) s = 1.0f;
    if (given) s = fixed;
    return largest <= limit ? s : not_a_number();
}

// 16 bytes of a row as floats.
__device__ __forceinline__ void elements_of(float (&v)[4], uint4 raw, const float*) {
    v[0] = __uint_as_float(raw.x), v[1] = __uint_as_float(raw.y);
    v[2] = __uint_as_float(raw.z), v[3] = __uint_as_float(raw.w);
}
__device__ __forceinline__ void elements_of(float (&v)[8], uint4 raw, const __half*) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        v[2 * i] = two.x, v[2 * i + 1] = two.y;
    }
}
__device__ __forceinline__ void elements_of(float (&v)[8], uint4 raw, const __nv_bfloat16*) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        v[2 * i] = __uint_as_float(words[i] << 16), v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
}

// Bring bytes, a multiple of 16 at a multiple of 16, into L2.
__device__ __forceinline__ void bulk_prefetch(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// One team's row: its largest magnitude, its scale, its integers into the swizzled row at `to`, panels `panel` bytes
// apart. PIECES pieces of 16 bytes a lane hold it.
template <typename T, int PIECES, int PANEL>
__device__ __forceinline__ void quantize_row(const uint4 (&raw)[PIECES], char* act, int row, float* scale, int K,
                                             bool given, float fixed) {
    constexpr int VEC = 16 / sizeof(T), TEAM = TEAM_OF<T>;
    const int member = threadIdx.x % TEAM;
    unsigned largest = 0;  // as the bits of a magnitude: NaN above Inf above all numbers
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const uint4 v = raw[i];
        if constexpr (sizeof(T) == 4) largest = larger(larger(larger(larger(largest, v.x), v.y), v.z), v.w);
        else largest = larger_halves(larger_halves(larger_halves(larger_halves(largest, v.x), v.y), v.z), v.w);
    }
    if constexpr (sizeof(T) == 2) {
        largest = max(largest & 0xffffu, largest >> 16);
        const unsigned short bits = static_cast<unsigned short>(largest);
        if constexpr (is_same<T, __half>) largest = __float_as_uint(__half2float(__ushort_as_half(bits)));
        else largest <<= 16;
    }
#pragma unroll
    for (int lane = TEAM / 2; lane > 0; lane /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, lane));
    const float s = scale_of(largest, given, fixed, 0x7f7fffffu);
    if (member == 0) *scale = s;
    const Divider by(s, -127, 127);
    const auto store = [&](auto nearest) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int k = (member + TEAM * i) * VEC;
            if (TEAM * i * VEC >= K) break;
            float v[VEC];
            elements_of(v, raw[i], static_cast<const T*>(nullptr));
            unsigned q[VEC];
#pragma unroll
            for (int e = 0; e < VEC; ++e) q[e] = nearest(v[e]);
            if (k >= K) continue;
            char* const to = act + k / ROW * PANEL + row * ROW + (k / 16 % 8 ^ row % 8) * 16 + k % 16;
            if constexpr (VEC == 4) {
                *reinterpret_cast<unsigned*>(to) = packed(q[0], q[1], q[2], q[3]);
            } else {
                *reinterpret_cast<uint2*>(to) =
                    make_uint2(packed(q[0], q[1], q[2], q[3]), packed(q[4], q[5], q[6], q[7]));
            }
        }
    };
    if (!given && __all_sync(~0u, by.factor == 1.0f)) store([&](float v) { return by.nearest_as_it_is(v); });
    else store([&](float v) { return by.nearest(v); });
}

// Quantize `count` rows (a multiple of 8) of x from row m0 on, those below M, into rows `first` and following of the panels at `act`, R rows
// each, and their scales; rows beyond M become zeros. The first warp, which has weights to load, comes last.
template <typename T, int R>
__device__ __forceinline__ void quantize_rows(char* act, float* scales, const void* source, long long m0, int M, int K,
                                              const float* given_scale, int first, int count) {
    constexpr int VEC = 16 / sizeof(T), TEAM = TEAM_OF<T>, PIECES = LONGEST / VEC / TEAM;
    const T* const x = static_cast<const T*>(source) + m0 * K;
    const int exist = static_cast<int>(max(0ll, min(static_cast<long long>(count), M - m0)));
    const bool given = given_scale;
    const float fixed = given ? *given_scale : 0.0f;
#pragma unroll 1
    for (int r = (threadIdx.x + THREADS - 32) % THREADS / TEAM; r < count; r += THREADS / TEAM) {
        uint4 raw[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int k = (threadIdx.x % TEAM + TEAM * i) * VEC;
            raw[i] = uint4{0, 0, 0, 0};
            if (r < exist && k < K) raw[i] = *reinterpret_cast<const uint4*>(x + static_cast<long long>(r) * K + k);
        }
        quantize_row<T, PIECES, R * ROW>(raw, act, first + r, scales + first + r, K, given, fixed);
    }
}

template <int R>
__device__ __forceinline__ void quantize_input(char* act, float* scales, const void* x, long long m0, int M, int K,
                                               int kind, const float* given, int first, int count) {
    if (kind == 0) quantize_rows<float, R>(act, scales, x, m0, M, K, given, first, count);
    else if (kind == 1) quantize_rows<__half, R>(act, scales, x, m0, M, K, given, first, count);
    else quantize_rows<__nv_bfloat16, R>(act, scales, x, m0, M, K, given, first, count);
}

// The same rows on their way to L2, long before they are loaded.
__device__ __forceinline__ void prefetch_input(const void* x, long long m0, int M, int K, int kind, int count) {
    const int bytes = K * (kind == 0 ? 4 : 2);
    const int exist = static_cast<int>(max(0ll, min(static_cast<long long>(count), M - m0)));
    if (exist > 0) bulk_prefetch(static_cast<const char*>(x) + m0 * bytes, exist * bytes);
}

// Rows of a share, a multiple of 8 rows; the last blocks of a cluster of C may have none.
template <int R, int C> constexpr int SHARE_OF = (R / C + 7) / 8 * 8;

// Send the rows that a block of a cluster of C has quantized, and their scales, to the other blocks.
template <int R, int C>
__device__ __forceinline__ void send_input(char* act, float* scales, int panels, int rank, unsigned long long* received) {
    constexpr int SHARE = SHARE_OF<R, C>;
    if (rank * SHARE >= R) return;
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
                        const float v = relu_of(__fadd_rn(__fmul_rn(scaled, outputs.scale[i][h]), outputs.bias[i][h]));
                        top[jc + c] = larger(top[jc + c], __float_as_uint(v));
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

// Scales of the rows with these maxima, or `given` for all, and what dividing by them takes; the maxima are 0 again.
template <int R>
__device__ __forceinline__ void rescale(float* scales, float2* dividers, unsigned* maxima, const float* given) {
    const float fixed = given ? *given : 0.0f;
    for (int r = threadIdx.x - WARPGROUP; r < R; r += CONSUMERS) {
        // between static layers what is infinite is clipped
        const float scale = scale_of(maxima[r], given, fixed, given ? 0x7f800000u : 0x7f7fffffu);
        const Divider by(scale, -127, 127);
        maxima[r] = 0;
        scales[r] = scale;
        dividers[r] = make_float2(by.factor, by.r);
    }
    barrier_sync(MULTIPLIERS, CONSUMERS);
}

// Quantize the values and leave them in the panels at `act`; this warpgroup's first column there is `column`.
template <int R, int MI>
__device__ __forceinline__ void quantize_values(const int (&acc)[MI][R / 2], const float* scales,
                                                const float2* dividers, char* act, int column) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
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
                for (int e = 0; e < 4; ++e) q[e] = by[e % 2].nearest_finite<true>(__int_as_float(acc[i][4 * j + e]));
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
    fence_proxy_async();
    barrier_sync(MULTIPLIERS, CONSUMERS);
}
