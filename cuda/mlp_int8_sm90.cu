// A whole int8 network in one launch: for each layer  q, s = quantize(x),  x = act(((float)(q · wᵀ) · s) · scale_w + bias)
// with a ReLU after each layer but the last. The arithmetic, bit for bit, is that of quantize_rows and gemm_int8.
//
//   x (M, K) float, half or bfloat16; each w (N, K) int8, all row-major; the last y (M, N) float.
//
// The idea: at this size a launch and a trip to memory cost more than the work. A group of blocks owns up to BM rows of
// the batch and takes them through all layers. Each block holds its slice of every layer's outputs, and all its weights are
// on their way to shared memory before anything else happens. Between the layers the group exchanges activations. Where
// it does so through L2, it meets at a barrier: that of a cluster, or, for groups larger than a cluster, a counter.
//
//   columns   a layer but the last is shared out by columns: a block computes its slice for all rows of the group.
//   rows      the last one, which is narrow, is shared out by rows: what a block computes there it quantized itself, so
//             no barrier is needed in between. Every block holds all weights of that layer.
//
// Three ways to exchange activations:
//   SENT      each block stores its outputs into the shared memory of all blocks of its cluster, where an mbarrier counts
//             the bytes, and each quantizes all rows for itself: few rows, and no other barrier.
//   READ      the same through L2, for groups larger than a cluster.
//   SHARED    each quantizes its share of the rows, and the others read the result: many rows.
//
// A warp multiplies BM rows by NT tiles of 8 columns, 64 bytes of K at a time; KS warps share out K and add their
// integers in shared memory, in any order with the same sum. Which 16 bytes of the 64 a lane reads is free as long as both
// operands agree: here they are contiguous, so one 16-byte load feeds two instructions.

#include "common/divide.cuh"
#include "common/numeric.cuh"
#include "common/sm90.cuh"

constexpr int LAYERS = 4;
constexpr int BM = 16;     // rows of a tile
constexpr int PIECE = 64;  // bytes of K
constexpr int LONGEST = 4096, LONGEST_OF_A_WARP = 1024;  // elements of a row that a block, a warp quantizes at once

struct Layer {
    const signed char* w;
    const float* scale_w;  // (N,), or one for step_w == 0
    const float* bias;     // (N,) or null
    const float* scale_x;  // static scale of the input, or null
    float* y;              // (M, ld), the last one's is the result; a hidden one's unless it is sent
    signed char* q;        // (M, pieces * PIECE) the quantized input, where blocks exchange it; padded with zeros
    float* scales;         // (M,) and its scales
    int N, K, ld, step_w;
    int slice;     // columns a block owns, a multiple of 8
    int w_at;      // where in shared memory its weights lie, in lines of line_of(K) bytes
    int scale_at;  // and its slice of scale_w, then of the bias
    int bulk;      // lines of w can be copied in bulk: K and w are multiples of 16 bytes
    int sent_at;   // where in shared memory its outputs arrive, (rows, ld) floats
};

enum Mode { SENT, READ, SHARED };

struct Network {
    Layer layer[LAYERS];
    const void* x;
    unsigned* counters;  // one a group, 128 bytes apart, or null for clusters
    int M, layers;
    int group, rows, share;  // blocks of a group, its rows, and those of a block
    int kind;     // of x: 0 float, 1 half, 2 bfloat16
    int aligned;  // four elements of x can be loaded at once
    int act_at;   // where in shared memory this block's quantized rows lie
};

__device__ __forceinline__ int pieces_of(int K) { return (K + PIECE - 1) / PIECE; }
// Lines of an odd number of 64-byte pieces: two neighbouring ones then cover all banks, whatever the piece.
__device__ __forceinline__ int line_of(int K) { return (pieces_of(K) | 1) * PIECE; }

// --- copies and barriers ------------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_word_async(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Bring bytes, a multiple of 16 at a multiple of 16, into L2.
__device__ __forceinline__ void bulk_prefetch(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ int cluster_id() {
    int id;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
    return id;
}

// The two halves of a cluster's barrier, where the first one only says that the block's mbarriers exist.
__device__ __forceinline__ void cluster_announce() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_await() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// All blocks of the group are here, and each sees what the others wrote. The counter's top bit flips when the last one
// arrives, and the lower bits are then zero again, so it serves the next launch as it is.
__device__ __forceinline__ void group_sync(unsigned* counter, int rank, int group) {
    if (!counter) {
        cluster_sync();
        return;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned add = rank == 0 ? 0x80000000u - (group - 1) : 1;
        unsigned before, now;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(add) : "memory");
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        while (((before ^ now) & 0x80000000u) == 0);
    }
    __syncthreads();
}

// --- quantizing ---------------------------------------------------------------------------------------------------

// Rows to quantize, `stride` bytes apart; `kind` and `aligned` as in Network.
struct Source {
    const char* x;
    long long stride;
    int K, kind;
    bool aligned;
    float fixed;       // their static scale, 0 for absmax / 127
    unsigned largest;  // the bits of the largest number that does not make a NaN of the row
};

// What is rare is not inlined: the code itself comes from memory, and less of it comes sooner.
__device__ __noinline__ uint4 load4_slowly(const void* row, int k, int K, int kind) {
    unsigned v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] = 0;
        if (k + i < K)
            v[i] = __float_as_uint(kind == 0   ? static_cast<const float*>(row)[k + i]
                                   : kind == 1 ? to_float(static_cast<const __half*>(row)[k + i])
                                               : to_float(static_cast<const __nv_bfloat16*>(row)[k + i]));
    }
    return {v[0], v[1], v[2], v[3]};
}

// Four elements of a row in each of WORDS words, TEAM words apart, as they lie in memory (slowly loaded ones as floats).
template <int TEAM, int WORDS>
__device__ __forceinline__ void load(uint4 (&raw)[WORDS], const Source& source, int r) {
    const char* row = source.x + r * source.stride;
    const int member = threadIdx.x % TEAM;
    if (!source.aligned) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) raw[i] = load4_slowly(row, 4 * (member + i * TEAM), source.K, source.kind);
    } else if (source.kind == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int word = member + i * TEAM;
            raw[i] = 4 * word < source.K ? reinterpret_cast<const uint4*>(row)[word] : uint4{0, 0, 0, 0};
        }
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int word = member + i * TEAM;
            const uint2 half = 4 * word < source.K ? reinterpret_cast<const uint2*>(row)[word] : uint2{0, 0};
            raw[i].x = half.x;
            raw[i].y = half.y;
        }
    }
}

template <int WORDS>
__device__ __forceinline__ void convert(float4 (&v)[WORDS], const uint4 (&raw)[WORDS], const Source& source) {
    if (source.kind == 1 && source.aligned) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const float2 low = __half22float2(reinterpret_cast<const __half2&>(raw[i].x));
            const float2 high = __half22float2(reinterpret_cast<const __half2&>(raw[i].y));
            v[i] = {low.x, low.y, high.x, high.y};
        }
    } else if (source.kind == 2 && source.aligned) {  // bfloat16 is the upper half of a float
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            v[i] = {__uint_as_float(raw[i].x << 16), __uint_as_float(raw[i].x & 0xffff0000u),
                    __uint_as_float(raw[i].y << 16), __uint_as_float(raw[i].y & 0xffff0000u)};
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) v[i] = reinterpret_cast<const float4&>(raw[i]);
    }
}

__device__ __forceinline__ unsigned packed(int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

__device__ __forceinline__ unsigned largest_of(float4 v) {
    const unsigned MAGNITUDE = 0x7fffffffu;  // without their signs floats order like integers, NaN above Inf
    return max(max(__float_as_uint(v.x) & MAGNITUDE, __float_as_uint(v.y) & MAGNITUDE),
               max(__float_as_uint(v.z) & MAGNITUDE, __float_as_uint(v.w) & MAGNITUDE));
}

// One row by TEAM threads, a warp or the block. Zeros fill up the last piece of its line. A row with NaN or Inf gets a
// NaN scale and zeros (between layers with static scales Inf is clipped).
template <int TEAM, int WORDS>
__device__ __forceinline__ void quantize_row(const float4 (&v)[WORDS], const Source& source, signed char* q, float* scale,
                                             unsigned* partial) {
    const int member = threadIdx.x % TEAM;
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) largest = max(largest, largest_of(v[i]));
    largest = __reduce_max_sync(~0u, largest);
    if constexpr (TEAM > 32) {
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = largest;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TEAM / 32; ++i) largest = max(largest, partial[i]);
    }
    const bool kept = largest <= source.largest;
    float s = source.fixed;
    if (s == 0.0f) {
        s = __fdiv_rn(__uint_as_float(largest), 127.0f);
        if (s < 1.17549435e-38f) s = 1.0f;
    }
    const Divider by(s, -127, 127);
    const int bytes = pieces_of(source.K) * PIECE;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const int k = 4 * (member + i * TEAM);
        if (k >= bytes) break;
        unsigned four = 0;
        if (kept && source.fixed != 0.0f) {
            four = packed(by.nearest(v[i].x), by.nearest(v[i].y), by.nearest(v[i].z), by.nearest(v[i].w));
        } else if (kept) {  // nothing lies beyond the row's own maximum
            auto nearest = [&](float x) { return static_cast<int>(by.nearest_finite<false>(x)); };
            four = packed(nearest(v[i].x), nearest(v[i].y), nearest(v[i].z), nearest(v[i].w));
        }
        *reinterpret_cast<unsigned*>(q + k) = four;
    }
    if (member == 0) *scale = kept ? s : not_a_number();
}

// Rows [0, rows) to lines of q and to scales. All threads of the block take part, and need not be in step. The next row
// is on its way while one is quantized.
template <int THREADS>
__device__ __forceinline__ void quantize(const Source& source, int rows, signed char* q, int ldq, float* scales,
                                         unsigned (*partial)[THREADS / 32]) {
    const bool by_warp = rows > 2 && source.K <= LONGEST_OF_A_WARP;
    if (by_warp) {
        constexpr int WORDS = LONGEST_OF_A_WARP / 4 / 32;
        uint4 raw[WORDS];
        float4 v[WORDS];
        int r = threadIdx.x / 32;
        if (r < rows) load<32>(raw, source, r);
#pragma unroll 1
        for (; r < rows; r += THREADS / 32) {
            convert(v, raw, source);
            if (r + THREADS / 32 < rows) load<32>(raw, source, r + THREADS / 32);
            quantize_row<32>(v, source, q + r * ldq, scales + r, nullptr);
        }
    } else {
        constexpr int WORDS = (LONGEST / 4 + THREADS - 1) / THREADS;
        uint4 raw[WORDS];
        float4 v[WORDS];
        // a row's partial maxima are still being read while the next one's are written, but not those of the one after
#pragma unroll 1
        for (int r = 0; r < rows; ++r) {
            load<THREADS>(raw, source, r);
            convert(v, raw, source);
            quantize_row<THREADS>(v, source, q + r * ldq, scales + r, partial[r % 2]);
        }
    }
}

// --- multiplying --------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mma(int (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// What a lane holds of the tile's rows: 16 bytes of row lane / 4, and of the row 8 below.
struct Rows {
    uint4 low, high;
};

// Lines at `a` from shared memory, where only `rows` of them exist (LOCAL), or from L2, where all do.
template <bool LOCAL> __device__ __forceinline__ void load_rows(Rows& r, const signed char* a, int lda, int rows) {
    const int g = threadIdx.x % 32 / 4;
    const uint4* low = reinterpret_cast<const uint4*>(a + g * lda);
    const uint4* high = reinterpret_cast<const uint4*>(a + (g + 8) * lda);
    if constexpr (LOCAL) {
        r.low = g < rows ? *low : uint4{0, 0, 0, 0};
        r.high = g + 8 < rows ? *high : uint4{0, 0, 0, 0};
    } else {
        r.low = *low;
        r.high = *high;
    }
}

// d += a · bᵀ over pieces first, first + step, ...; b has `tiles` tiles of 8 lines, and what is computed of others is for
// nothing: without branches loads and products overlap. DEPTH pieces of `a` are on their way.
template <int NT, int DEPTH, bool LOCAL>
__device__ __forceinline__ void multiply(int (&d)[NT][4], const signed char* a, int lda, int rows, const signed char* b,
                                         int ldb, int tiles, int pieces, int first, int step) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    a += t * 16;
    b += g * ldb + t * 16;
    const int line8 = 8 * ldb, last = (tiles - 1) * line8;
    Rows coming[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i)
        if (first + i * step < pieces) load_rows<LOCAL>(coming[i], a + (first + i * step) * PIECE, lda, rows);
#pragma unroll 1
    for (int p = first; p < pieces; p += step) {
        const Rows now = coming[0];
#pragma unroll
        for (int i = 1; i < DEPTH; ++i) coming[i - 1] = coming[i];
        const int after = p + DEPTH * step;
        if (after < pieces) load_rows<LOCAL>(coming[DEPTH - 1], a + after * PIECE, lda, rows);
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            const uint4 w = *reinterpret_cast<const uint4*>(b + min(j * line8, last) + p * PIECE);
            mma(d[j], now.low.x, now.high.x, now.low.y, now.high.y, w.x, w.y);
            mma(d[j], now.low.z, now.high.z, now.low.w, now.high.w, w.z, w.w);
        }
    }
}

// --- the kernel ---------------------------------------------------------------------------------------------------

template <int NT, int KS, Mode MODE>
__global__ void __launch_bounds__(KS * 32, 1) mlp_int8_sm90(const __grid_constant__ Network net) {
    constexpr int THREADS = KS * 32, BN = NT * 8, TILE_LD = BN + 8;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ unsigned long long arrived[LAYERS], received[LAYERS];  // weights; outputs of a layer
    __shared__ unsigned partial[2][THREADS / 32];
    __shared__ float fixed_scales[LAYERS];
    float* scales = reinterpret_cast<float*>(shared);  // BM
    int* tile = reinterpret_cast<int*>(scales + BM);   // BM x TILE_LD
    signed char* act = reinterpret_cast<signed char*>(shared + net.act_at);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool clustered = !net.counters && net.group > 1;
    const int rank = clustered ? cluster_rank() : blockIdx.x % net.group, last = net.layers - 1;
    const int group = clustered ? cluster_id() : blockIdx.x / net.group;
    unsigned* counter = net.counters ? net.counters + group * 32 : nullptr;
    const long long m0 = static_cast<long long>(group) * net.rows;
    const int rows = min(static_cast<long long>(net.rows), net.M - m0);
    const int share0 = min(rank * net.share, rows), share1 = min(share0 + net.share, rows);

    // This block's columns of a layer: [first, first + count).
    auto first_of = [&](int l) { return l == last ? 0 : rank * net.layer[l].slice; };
    auto count_of = [&](int l) {
        const Layer& layer = net.layer[l];
        return l < last ? max(0, min(layer.slice, layer.N - rank * layer.slice)) : share0 < share1 ? layer.N : 0;
    };

    if (threadIdx.x == 0) {
#pragma unroll
        for (int l = 0; l < LAYERS; ++l) {
            mbarrier_init(&arrived[l], 1);
            mbarrier_init(&received[l], 1);
        }
        mbarrier_init_fence();
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < BM * TILE_LD; i += THREADS) tile[i] = 0;
    __syncthreads();
    if constexpr (MODE == SENT) cluster_announce();
    if (MODE == SHARED && threadIdx.x == 0 && share0 < share1) {
        const int bytes = net.layer[0].K * (net.kind == 0 ? 4 : 2);
        const char* x = static_cast<const char*>(net.x) + (m0 + share0) * bytes;
        if (reinterpret_cast<unsigned long long>(x) % 16 == 0) bulk_prefetch(x, (share1 - share0) * bytes / 16 * 16);
    }
#pragma unroll 1
    for (int l = 0; l <= last; ++l) {
        const Layer& layer = net.layer[l];
        if (MODE == SENT && threadIdx.x == 0 && l < last) mbarrier_expect_bytes(&received[l], rows * layer.ld * 4);
        const int count = count_of(l), line = line_of(layer.K);
        const signed char* w = layer.w + static_cast<long long>(first_of(l)) * layer.K;
        unsigned char* to = shared + layer.w_at;
        if (layer.bulk) {
            if (threadIdx.x == 0) mbarrier_expect_bytes(&arrived[l], count * layer.K);
            if (lane == 0)
#pragma unroll 1
                for (int n = warp; n < count; n += THREADS / 32)
                    bulk_load(to + n * line, w + static_cast<long long>(n) * layer.K, layer.K, &arrived[l]);
        } else {
#pragma unroll 1
            for (int n = warp; n < count; n += THREADS / 32)
#pragma unroll 1
                for (int k = lane; k < layer.K; k += 32) to[n * line + k] = w[static_cast<long long>(n) * layer.K + k];
        }
        float* scale_w = reinterpret_cast<float*>(shared + layer.scale_at);
#pragma unroll 1
        for (int c = threadIdx.x; c < count; c += THREADS) {
            copy_word_async(scale_w + c, layer.scale_w + (first_of(l) + c) * layer.step_w);
            if (layer.bias)
                copy_word_async(scale_w + layer.slice + c, layer.bias + first_of(l) + c);
            else
                scale_w[layer.slice + c] = -0.0f;  // x + -0 is x
        }
        if (layer.scale_x) {
            if (threadIdx.x == 0) copy_word_async(&fixed_scales[l], layer.scale_x);
        } else if (threadIdx.x == 0) {
            fixed_scales[l] = 0.0f;
        }
    }

#pragma unroll 1
    for (int l = 0; l <= last; ++l) {
        const Layer& layer = net.layer[l];
        const bool by_rows = l == last, local = by_rows || MODE != SHARED;
        const int from = local && !by_rows ? 0 : share0, to = local && !by_rows ? rows : share1;
        if (MODE == SENT && l > 0) mbarrier_wait(&received[l - 1], 0);  // also before leaving: it is written to
        if (by_rows && from == to) {
            if (MODE == SENT && l == 0) cluster_await();
            break;
        }
        const int K = layer.K, pieces = pieces_of(K), line = line_of(K);
        signed char* q = local ? act : layer.q + (m0 + from) * (pieces * PIECE);
        float* s = local ? scales : layer.scales + m0 + from;
        const int ldq = local ? line : pieces * PIECE;
        Source source;
        source.K = K;
        if (l == 0) {
            source.stride = static_cast<long long>(K) * (net.kind == 0 ? 4 : 2);
            source.x = static_cast<const char*>(net.x) + (m0 + from) * source.stride;
            source.kind = net.kind;
            source.aligned = net.aligned;
            source.fixed = layer.scale_x ? *layer.scale_x : 0.0f;
            source.largest = 0x7f7fffffu;
        } else {
            const Layer& before = net.layer[l - 1];
            source.stride = before.ld * 4;
            source.x = MODE == SENT ? reinterpret_cast<const char*>(shared + before.sent_at) + from * source.stride
                                    : reinterpret_cast<const char*>(before.y) + (m0 + from) * source.stride;
            source.kind = 0;
            source.aligned = MODE == SENT || K % 4 == 0;
            source.fixed = fixed_scales[l];
            source.largest = source.fixed == 0.0f ? 0x7f7fffffu : 0x7f800000u;
        }
        quantize<THREADS>(source, to - from, q, ldq, s, partial);
        copy_wait_all();
        if (!local) {
            group_sync(counter, rank, net.group);
#pragma unroll 1
            for (int r = threadIdx.x; r < rows; r += THREADS) scales[r] = layer.scales[m0 + r];
        }
        __syncthreads();
        if (MODE == SENT && l == 0) cluster_await();  // all blocks can be sent to
        if (layer.bulk) mbarrier_wait(&arrived[l], 0);

        const int count = count_of(l), m_rows = local ? to - from : rows;
        const float* scale_w = reinterpret_cast<const float*>(shared + layer.scale_at);
        float* y = layer.y + (m0 + (by_rows ? from : 0)) * layer.ld + first_of(l);
        auto scaled = [&](int r, int c, int sum) {
            const float v = __fadd_rn(__fmul_rn(__fmul_rn(static_cast<float>(sum), scales[r]), scale_w[c]),
                                      scale_w[layer.slice + c]);
            return by_rows ? v : relu_of(v);
        };
#pragma unroll 1
        for (int c0 = 0; c0 < count; c0 += BN) {
            const int columns = min(BN, count - c0), tiles = (columns + 7) / 8;
            const signed char* b = reinterpret_cast<const signed char*>(shared + layer.w_at) + c0 * line;
            int d[NT][4] = {};
            if (local)
                multiply<NT, 1, true>(d, act, line, m_rows, b, line, tiles, pieces, warp, KS);
            else
                multiply<NT, 3, false>(d, layer.q + m0 * (pieces * PIECE), pieces * PIECE, 0, b, line, tiles, pieces,
                                       warp, KS);
            const int g = lane / 4, t = lane % 4;
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int r = g + e / 2 * 8, c = j * 8 + 2 * t + e % 2;
                    if (r < m_rows && c < columns) atomicAdd(&tile[r * TILE_LD + c], d[j][e]);
                }
            __syncthreads();
            if (MODE == SENT && !by_rows) {
                // Lanes 8 apart hold the same four columns and share out the blocks of the cluster. Beyond N
                // zeros go out, up to a multiple of four, and the next layer takes them for its padding.
                const int ld = layer.ld, to_rank = lane / 8;
#pragma unroll 1
                for (int r = warp; r < m_rows; r += THREADS / 32)
#pragma unroll 1
                    for (int next = 0; next < columns; next += 32) {
                        const int c = next + lane % 8 * 4;
                        int4* at = reinterpret_cast<int4*>(&tile[r * TILE_LD + min(c, BN - 4)]);
                        const int4 sum = *at;
                        __syncwarp();
                        if (c >= columns) continue;
                        *at = int4{0, 0, 0, 0};
                        auto value = [&](int i, int part) {
                            return c + i < columns ? __float_as_uint(scaled(r, c0 + c + i, part)) : 0;
                        };
                        const uint4 v = {value(0, sum.x), value(1, sum.y), value(2, sum.z), value(3, sum.w)};
                        const float* here = reinterpret_cast<const float*>(shared + layer.sent_at) + r * ld +
                                            first_of(l) + c0 + c;
#pragma unroll 1
                        for (int to = to_rank; to < net.group; to += 4)
                            cluster_send(cluster_address(here, to), v, cluster_address(&received[l], to));
                    }
            } else {
#pragma unroll 1
                for (int r = warp; r < m_rows; r += THREADS / 32)
#pragma unroll 1
                    for (int c = lane; c < columns; c += 32) {
                        y[static_cast<long long>(r) * layer.ld + c0 + c] = scaled(r, c0 + c, tile[r * TILE_LD + c]);
                        tile[r * TILE_LD + c] = 0;
                    }
            }
            __syncthreads();
        }
        if (MODE != SENT && !by_rows) group_sync(counter, rank, net.group);
    }
    copy_wait_all();
}
