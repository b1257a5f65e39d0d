// A whole int8 network of one row in one launch, where only latencies count: what mlp_int8_sm90.cu computes, bit for bit.
//
//   x (M, K) float, half or bfloat16, rows on 4 elements; each w (N, K) int8, K a multiple of 16, all row-major and w on
//   16 bytes; y (M, N) float. HIDDEN layers, and a head of up to 16 outputs.
//
// The ideas:
//   weights first   a block has a slice of each layer's outputs, and its weights are on their way before anything else
//                   happens: to registers where a cluster can hold them all, else to shared memory.
//   dot products    a warp has a few outputs, its lanes 16 columns each (dp4a): no other warp has a part in it.
//   everybody       needs a whole row: each block quantizes it for itself. The head is the first block's.
//   sending         a block sends its outputs, in float, to all blocks of its cluster, where an mbarrier counts the bytes.
//   tags            networks wider than a cluster exchange outputs through memory, each beside the launch's number. Who
//                   wants a value reads until the number is the present one: no barrier, and no word to clear.
//   short chains    what every row takes is written for the shortest chain of dependent instructions; the rest is set apart.

#include "common/divide.cuh"
#include "common/numeric.cuh"
#include "common/sm90.cuh"

constexpr int LAYERS = 3, HEAD = 16;  // at most, with the head; outputs of the head

struct Layer {
    const signed char* w;
    const float* scale_w;  // (N,), or one for step_w == 0
    const float* bias;     // (N,) or null
    const float* scale_x;  // static scale of the input, or null
    int N, K, step_w;
    int pad;
};

struct Network {
    Layer layer[LAYERS];
    const void* x;
    float* y;
    unsigned long long* tagged;  // outputs with tags, and, 128 bytes before them, the number of the last launch
    int kind;                    // of x: 0 float, 1 half, 2 bfloat16
    int pad;
};

__device__ __forceinline__ void cluster_announce() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_await() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Store into another block's shared memory, without waiting; the barrier there counts the bytes as they arrive.
__device__ __forceinline__ void send(unsigned to, float v, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_uint(v)), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void store_tagged(unsigned long long* to, float v, unsigned tag) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to),
                 "l"(static_cast<unsigned long long>(tag) << 32 | __float_as_uint(v))
                 : "memory");
}
__device__ __forceinline__ void load_tagged(unsigned long long (&v)[2], const unsigned long long* from) {
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(v[0]), "=l"(v[1]) : "l"(from) : "memory");
}

// The block's shared memory. Its address comes from a slow register, whence the compiler would fetch it again and again.
template <class Own> __device__ __forceinline__ Own& laundered(Own& own) {
    unsigned address = shared_address(&own);
    asm volatile("" : "+r"(address));
    return *static_cast<Own*>(__cvta_shared_to_generic(address));
}
__device__ __forceinline__ int thread_number() {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}

// --- quantizing ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned packed(unsigned a, unsigned b, unsigned c, unsigned d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

__device__ __forceinline__ unsigned largest_of(float4 v) {
    const unsigned MAGNITUDE = 0x7fffffffu;  // without their signs floats order like integers, NaN above Inf
    return max(max(__float_as_uint(v.x) & MAGNITUDE, __float_as_uint(v.y) & MAGNITUDE),
               max(__float_as_uint(v.z) & MAGNITUDE, __float_as_uint(v.w) & MAGNITUDE));
}

// Four elements of x as they lie in memory, and in float.
__device__ __forceinline__ uint4 load_four(const void* x, long long at, int kind) {
    if (kind == 0) return *reinterpret_cast<const uint4*>(static_cast<const float*>(x) + at);
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const __half*>(x) + at);
    return {raw.x, raw.y, 0, 0};
}
__device__ __forceinline__ float4 converted(uint4 raw, int kind) {
    if (kind == 0) return reinterpret_cast<const float4&>(raw);
    if (kind == 1) {
        const float2 low = __half22float2(reinterpret_cast<const __half2&>(raw.x));
        const float2 high = __half22float2(reinterpret_cast<const __half2&>(raw.y));
        return {low.x, low.y, high.x, high.y};
    }
    return {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
            __uint_as_float(raw.y & 0xffff0000u)};
}

// What is rare is not inlined, as it would be in the way.
__device__ __noinline__ float scale_slowly(unsigned largest) {
    const float s = __fdiv_rn(__uint_as_float(largest), 127.0f);
    return s < 1.17549435e-38f ? 1.0f : s;
}
__device__ __noinline__ unsigned quantize_slowly(float4 v, float s) {
    const Divider by(s, -127, 127);
    return packed(by.nearest(v.x), by.nearest(v.y), by.nearest(v.z), by.nearest(v.w));
}

// How a row with this largest magnitude becomes integers. `fixed` is its static scale, or 0; `input` says that it is the
// network's input. A row with NaN or Inf is zeros with a NaN scale (between layers with static scales Inf is clipped).
struct Quantizer {
    float s, r;  // the scale and its reciprocal
    bool usual, kept;

    __device__ __forceinline__ Quantizer(unsigned largest, float fixed, bool input) {
        const unsigned LEAST = 0x0c000000u, MOST = 0x72000000u;  // 1e-31 and 2.5e30, far from where rounding is different
        usual = fixed == 0.0f && largest - LEAST < MOST - LEAST;
        kept = largest <= (input || fixed == 0.0f ? 0x7f7fffffu : 0x7f800000u);
        // largest / 127, rounded correctly: a product and one correction (P. Markstein; see divide.cuh)
        const float l = __uint_as_float(largest), inverse = 1.0f / 127.0f, guess = __fmul_rn(l, inverse);
        s = fmaf(fmaf(-127.0f, guess, l), inverse, guess);
        if (!usual) s = fixed != 0.0f ? fixed : scale_slowly(largest);
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(s));
        r = fmaf(r, fmaf(-r, s, 1.0f), r);
    }

    __device__ __forceinline__ unsigned operator()(float4 v) const {
        if (!usual) return kept ? quantize_slowly(v, s) : 0;
        return packed(nearest(v.x), nearest(v.y), nearest(v.z), nearest(v.w));
    }
    // As Divider's: the integer is the low byte. Nothing lies beyond the row's own maximum.
    __device__ __forceinline__ unsigned nearest(float x) const {
        const float q = __fmul_rn(x, r);
        return __float_as_uint(__fadd_rn(fmaf(fmaf(-q, s, x), r, q), 12582912.0f));
    }
    __device__ __forceinline__ float scale() const { return kept ? s : not_a_number(); }
};

__device__ __forceinline__ int dot(int4 a, int4 b, int d) {
    return __dp4a(a.w, b.w, __dp4a(a.z, b.z, __dp4a(a.y, b.y, __dp4a(a.x, b.x, d))));
}

__device__ __forceinline__ float scaled(int sum, float scale_x, float scale_w, float bias) {
    return __fadd_rn(__fmul_rn(__fmul_rn(static_cast<float>(sum), scale_x), scale_w), bias);
}

// The maximum over the block; `partial` must not be in use from the time before.
template <int WARPS>
__device__ __forceinline__ unsigned block_largest(unsigned largest, unsigned (&partial)[WARPS], int warp, int lane) {
    largest = __reduce_max_sync(~0u, largest);
    if (lane == 0) partial[warp] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(&partial[i]);
        largest = max(max(largest, max(four.x, four.y)), max(four.z, four.w));
    }
    return largest;
}

// --- up to 1024 values a row: a cluster of GROUP blocks a row, the weights in registers -----------------------------

// A warp has R outputs of each layer.
template <int HIDDEN, int R, int WARPS, int GROUP>
__global__ void __launch_bounds__(WARPS * 32, 1) mlp_int8_row_sm90(const __grid_constant__ Network net) {
    constexpr int LONGEST = 1024, SLICE = WARPS * R, HEADS = HEAD / WARPS;  // values; outputs of a block; of the head, of a warp
    static_assert(WARPS * 128 >= LONGEST, "a thread quantizes four values");
    struct Own {
        unsigned long long received[2];
        unsigned partial[2][WARPS];  // in turns
        __align__(16) unsigned q[2][LONGEST / 4];
        __align__(16) float outputs[HIDDEN][LONGEST];
    };
    __shared__ Own memory;
    Own& own = laundered(memory);
    const int thread = thread_number(), warp = thread / 32, lane = thread % 32;
    const int rank = blockIdx.x % GROUP, m = blockIdx.x / GROUP;

    const bool inside = 4 * thread < net.layer[0].K;
    uint4 raw = {0, 0, 0, 0};
    if (inside) raw = load_four(net.x, static_cast<long long>(m) * net.layer[0].K + 4 * thread, net.kind);
    const int first = rank * SLICE + warp * R;
    int4 w[HIDDEN][R][2];
    auto load_row = [&](int4 (&to)[2], const Layer& layer, int n) {
        const signed char* const from = layer.w + static_cast<long long>(n) * layer.K + 16 * lane;
        to[0] = to[1] = {0, 0, 0, 0};
        if (n < layer.N && 16 * lane < layer.K) to[0] = *reinterpret_cast<const int4*>(from);
        if (n < layer.N && 16 * lane + LONGEST / 2 < layer.K) to[1] = *reinterpret_cast<const int4*>(from + LONGEST / 2);
    };
#pragma unroll
    for (int l = 0; l < HIDDEN; ++l)
#pragma unroll
        for (int o = 0; o < R; ++o) load_row(w[l][o], net.layer[l], first + o);
    if (thread == WARPS * 32 - 32) {
#pragma unroll
        for (int l = 0; l < HIDDEN; ++l) mbarrier_init(&own.received[l], 1);
        mbarrier_init_fence();
    }
    __syncwarp();  // (racecheck takes the two halves for different threads')
    if (thread == WARPS * 32 - 32) {
#pragma unroll
        for (int l = 0; l < HIDDEN; ++l) mbarrier_expect_bytes(&own.received[l], net.layer[l].N * 4);
    }
    __syncwarp();
    cluster_announce();
    // What is needed later.
    const int mine = lane % R;  // of the warp's outputs, the one that this lane finishes
    float scale_w[HIDDEN], bias[HIDDEN], fixed[HIDDEN + 1];
#pragma unroll
    for (int l = 0; l < HIDDEN; ++l) {
        const Layer& layer = net.layer[l];
        const int n = min(first + mine, layer.N - 1);
        scale_w[l] = layer.scale_w[n * layer.step_w];
        bias[l] = layer.bias ? layer.bias[n] : -0.0f;  // x + -0 is x
    }
    const Layer& head = net.layer[HIDDEN];
    int4 head_w[HEADS][2];
    float head_scale[HEADS], head_bias[HEADS];
    if (rank == 0)
#pragma unroll
        for (int o = 0; o < HEADS; ++o) {
            const int n = min(warp + o * WARPS, head.N - 1);
            load_row(head_w[o], head, n);
            head_scale[o] = head.scale_w[n * head.step_w];
            head_bias[o] = head.bias ? head.bias[n] : -0.0f;
        }
#pragma unroll
    for (int l = 0; l <= HIDDEN; ++l) fixed[l] = net.layer[l].scale_x ? *net.layer[l].scale_x : 0.0f;

    float4 v = converted(raw, net.kind);
#pragma unroll
    for (int l = 0; l < HIDDEN; ++l) {
        const Layer& layer = net.layer[l];
        const bool within = 4 * thread < layer.K;
        if (l > 0) {
            mbarrier_wait(&own.received[l - 1], 0);
            v = {0.0f, 0.0f, 0.0f, 0.0f};
            if (within) v = *reinterpret_cast<const float4*>(&own.outputs[l - 1][4 * thread]);
        }
        const Quantizer quantizer(block_largest(largest_of(v), own.partial[l % 2], warp, lane), fixed[l], l == 0);
        if (within) own.q[l % 2][thread] = quantizer(v);
        __syncthreads();
        const int4 low = *reinterpret_cast<const int4*>(&own.q[l % 2][4 * lane]);
        const int4 high = *reinterpret_cast<const int4*>(&own.q[l % 2][4 * lane + LONGEST / 8]);
        int sum = 0;
#pragma unroll
        for (int o = 0; o < R; ++o) {  // where there is no row or column, weights are zero
            const int total = __reduce_add_sync(~0u, dot(w[l][o][0], low, dot(w[l][o][1], high, 0)));
            if (mine == o) sum = total;
        }
        const float value = relu_of(scaled(sum, quantizer.scale(), scale_w[l], bias[l]));
        if (l == 0) cluster_await();  // all blocks can be sent to
        const int n = first + mine;
        if (n < layer.N) {
            if (l + 1 < HIDDEN) {
#pragma unroll
                for (int to = lane / R; to < GROUP; to += 32 / R)
                    send(cluster_address(&own.outputs[l][n], to), value, cluster_address(&own.received[l], to));
            } else if (lane < R) {
                send(cluster_address(&own.outputs[l][n], 0), value, cluster_address(&own.received[l], 0));
            }
        }
    }
    if (rank != 0) return;

    mbarrier_wait(&own.received[HIDDEN - 1], 0);
    const bool within = 4 * thread < head.K;
    v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (within) v = *reinterpret_cast<const float4*>(&own.outputs[HIDDEN - 1][4 * thread]);
    const Quantizer quantizer(block_largest(largest_of(v), own.partial[HIDDEN % 2], warp, lane), fixed[HIDDEN], false);
    if (within) own.q[HIDDEN % 2][thread] = quantizer(v);
    __syncthreads();
    const int4 low = *reinterpret_cast<const int4*>(&own.q[HIDDEN % 2][4 * lane]);
    const int4 high = *reinterpret_cast<const int4*>(&own.q[HIDDEN % 2][4 * lane + LONGEST / 8]);
#pragma unroll
    for (int o = 0; o < HEADS; ++o) {
        const int n = warp + o * WARPS, sum = __reduce_add_sync(~0u, dot(head_w[o][0], low, dot(head_w[o][1], high, 0)));
        if (lane == 0 && n < head.N)
            net.y[static_cast<long long>(m) * head.N + n] = scaled(sum, quantizer.scale(), head_scale[o], head_bias[o]);
    }
}

// --- up to 4096 values a row: one row, all blocks, the weights in shared memory --------------------------------------

// All blocks, which must run at once, have R outputs a warp of each layer.
template <int HIDDEN, int R, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 1) mlp_int8_wide_row_sm90(const __grid_constant__ Network net) {
    constexpr int WIDEST = 4096, THREADS = WARPS * 32, SLICE = WARPS * R, FOURS = WIDEST / 4 / THREADS;
    static_assert(WARPS >= HEAD, "an output of the head for a warp");
    struct Own {
        unsigned long long arrived[LAYERS];
        __align__(16) unsigned partial[2][WARPS];
        __align__(16) unsigned q[2][WIDEST / 4];
    };
    __shared__ Own memory;
    extern __shared__ __align__(128) unsigned char dynamic[];
    Own& own = laundered(memory);
    unsigned char* const weights = &laundered(dynamic[0]);  // layer after layer, the head's last
    const int thread = thread_number(), warp = thread / 32, lane = thread % 32;
    const int rank = blockIdx.x;

    if (thread == THREADS - 32) {
        unsigned char* to = weights;
#pragma unroll
        for (int l = 0; l <= HIDDEN; ++l) mbarrier_init(&own.arrived[l], 1);
        mbarrier_init_fence();
#pragma unroll
        for (int l = 0; l <= HIDDEN; ++l) {
            const Layer& layer = net.layer[l];
            const int rows = l < HIDDEN ? max(0, min(SLICE, layer.N - rank * SLICE)) : rank == 0 ? layer.N : 0;
            const signed char* const from =
                layer.w + (l < HIDDEN ? static_cast<long long>(rank) * SLICE * layer.K : 0);
            mbarrier_expect_bytes(&own.arrived[l], rows * layer.K);
            if (rows > 0) bulk_load(to, from, rows * layer.K, &own.arrived[l]);
            to += SLICE * layer.K;
        }
    }
    __syncwarp();
    uint4 raw[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
        const int k = 4 * (thread + i * THREADS);
        raw[i] = {0, 0, 0, 0};
        if (k < net.layer[0].K) raw[i] = load_four(net.x, k, net.kind);
    }
    const unsigned tag = *reinterpret_cast<volatile unsigned*>(net.tagged - 16) + 1;
    const int mine = lane % R, first = rank * SLICE + warp * R;
    float scale_w[HIDDEN + 1], bias[HIDDEN + 1], fixed[HIDDEN + 1];
#pragma unroll
    for (int l = 0; l <= HIDDEN; ++l) {
        const Layer& layer = net.layer[l];
        const int n = min(l < HIDDEN ? first + mine : warp, layer.N - 1);
        scale_w[l] = layer.scale_w[n * layer.step_w];
        bias[l] = layer.bias ? layer.bias[n] : -0.0f;  // x + -0 is x
        fixed[l] = layer.scale_x ? *layer.scale_x : 0.0f;
    }

    float4 v[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; ++i) v[i] = converted(raw[i], net.kind);
    const unsigned char* here = weights;
    unsigned long long* to = net.tagged;
#pragma unroll
    for (int l = 0; l <= HIDDEN; ++l) {
        const Layer& layer = net.layer[l];
        const int K = layer.K;
        if (l == HIDDEN && rank != 0) return;
        if (l > 0) {
            const unsigned long long* const from = to - net.layer[l - 1].N + 4 * thread;
            unsigned long long low[FOURS][2], high[FOURS][2];
            bool present;
            do {
                present = true;
#pragma unroll
                for (int i = 0; i < FOURS; ++i)
                    if (4 * (thread + i * THREADS) < K) {
                        load_tagged(low[i], from + 4 * i * THREADS);
                        load_tagged(high[i], from + 4 * i * THREADS + 2);
                    }
#pragma unroll
                for (int i = 0; i < FOURS; ++i)
                    if (4 * (thread + i * THREADS) < K)
                        present &= low[i][0] >> 32 == tag && low[i][1] >> 32 == tag && high[i][0] >> 32 == tag &&
                                   high[i][1] >> 32 == tag;
            } while (!present);
#pragma unroll
            for (int i = 0; i < FOURS; ++i) {
                v[i] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (4 * (thread + i * THREADS) < K)
                    v[i] = {__uint_as_float(low[i][0]), __uint_as_float(low[i][1]), __uint_as_float(high[i][0]),
                            __uint_as_float(high[i][1])};
            }
        }
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < FOURS; ++i) largest = max(largest, largest_of(v[i]));
        const Quantizer quantizer(block_largest(largest, own.partial[l % 2], warp, lane), fixed[l], l == 0);
#pragma unroll
        for (int i = 0; i < FOURS; ++i)
            if (4 * (thread + i * THREADS) < K) own.q[l % 2][thread + i * THREADS] = quantizer(v[i]);
        __syncthreads();

        constexpr int MOST = R;
        const int outputs = l < HIDDEN ? MOST : 1, row = l < HIDDEN ? warp * R : warp;
        const int exist = (l < HIDDEN ? layer.N - rank * SLICE : layer.N) - row;  // of this warp's outputs
        if (exist > 0) {
            mbarrier_wait(&own.arrived[l], 0);
            int d[MOST] = {};
            const unsigned char* const w = here + row * K;
#pragma unroll 4
            for (int k = 16 * lane; k < K; k += 16 * 32) {
                const int4 b = *reinterpret_cast<const int4*>(&own.q[l % 2][k / 4]);
#pragma unroll
                for (int o = 0; o < MOST; ++o)
                    if (o < outputs)
                        d[o] = dot(*reinterpret_cast<const int4*>(w + min(o, exist - 1) * K + k), b, d[o]);
            }
            int sum = 0;
#pragma unroll
            for (int o = 0; o < MOST; ++o)
                if (o < outputs) {
                    const int total = __reduce_add_sync(~0u, d[o]);
                    if (l == HIDDEN || mine == o) sum = total;
                }
            const float value = scaled(sum, quantizer.scale(), scale_w[l], bias[l]);
            if (l == HIDDEN) {
                if (lane == 0) net.y[warp] = value;
            } else if (lane < min(R, exist)) {
                store_tagged(to + first + mine, relu_of(value), tag);
            }
        }
        here += SLICE * K;
        to += layer.N;
    }
    if (thread == 0) *reinterpret_cast<volatile unsigned*>(net.tagged - 16) = tag;
}
