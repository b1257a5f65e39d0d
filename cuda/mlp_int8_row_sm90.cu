// A whole int8 network in one launch, for so few rows that only latencies count: what mlp_int8_sm90.cu computes, bit for bit.
//
//   x (M, K) float, half or bfloat16, rows on 4 elements; each w (N, K) int8, K a multiple of 16, all row-major and w on
//   16 bytes; y (M, N) float. Two layers at least.
//
// The ideas:
//   groups        a group of blocks takes ROWS rows through all layers; each block has a slice of a layer's outputs, and
//                 all its weights are on their way to shared memory before anything else happens.
//   sending       a block sends its outputs, in float, to all blocks of its cluster, where an mbarrier counts the bytes,
//                 and each quantizes all rows for itself. For the last layer, the head, each row goes to one block only.
//   tags          groups larger than a cluster (ROWS 1) exchange outputs through memory, each beside the launch's number.
//                 Who wants a value reads until the number is the present one: no barrier, and no word to clear.
//   dot products  a warp takes four outputs at a time, its lanes 16 columns each (dp4a): no other warp has a part in it.
//   rehearsal     code comes from memory too, and slowly. So the first round of the loop over the layers computes with what
//                 happens to lie in shared memory, while the weights are on their way, and keeps nothing.

#include "common/divide.cuh"
#include "common/numeric.cuh"
#include "common/sm90.cuh"

constexpr int LAYERS = 4, OUTPUTS = 4;  // at most; of a warp at a time

struct Layer {
    const signed char* w;
    const float* scale_w;  // (N,), or one for step_w == 0
    const float* bias;     // (N,) or null
    const float* scale_x;  // static scale of the input, or null
    int N, K, step_w;
    int slice;     // outputs of a block, a multiple of OUTPUTS; the head's are one block's
    int w_at;      // where in shared memory the block's weights lie
    int scale_at;  // and its part of scale_w, then of the bias
    int out_at;    // where the outputs arrive, (ROWS, N) floats; with tags the first one's index
    int pad;
};

struct Network {
    Layer layer[LAYERS];
    const void* x;
    float* y;
    unsigned long long* tagged;  // outputs with tags, and, 128 bytes before them, the number of the last launch
    int M, layers, group, rows;  // blocks and rows of a group
    int kind;                    // of x: 0 float, 1 half, 2 bfloat16
    int raw_at;                  // where in shared memory this block's x lies, a place for each thread
};

__device__ __forceinline__ void cluster_announce() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_await() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ int cluster_id() {
    int id;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
    return id;
}

__device__ __forceinline__ void bounded_wait(unsigned long long* barrier, unsigned parity) {
#pragma unroll 1
    for (int i = 0; i < (1 << 18); ++i) {
        unsigned done;
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
        if (done) return;
    }
    __trap();
}

template <int BYTES> __device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void store_tagged(unsigned long long* to, float a, float b, unsigned tag) {
    const unsigned long long high = static_cast<unsigned long long>(tag) << 32;
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(high | __float_as_uint(a)),
                 "l"(high | __float_as_uint(b))
                 : "memory");
}
__device__ __forceinline__ void load_tagged(unsigned long long (&v)[2], const unsigned long long* from) {
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(v[0]), "=l"(v[1]) : "l"(from) : "memory");
}

__device__ __forceinline__ unsigned packed(int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

__device__ __forceinline__ unsigned largest_of(float4 v) {
    const unsigned MAGNITUDE = 0x7fffffffu;  // without their signs floats order like integers, NaN above Inf
    return max(max(__float_as_uint(v.x) & MAGNITUDE, __float_as_uint(v.y) & MAGNITUDE),
               max(__float_as_uint(v.z) & MAGNITUDE, __float_as_uint(v.w) & MAGNITUDE));
}

// Four elements of x, as they lie in memory.
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

constexpr int OWN = 256;  // bytes at the beginning of shared memory
template <int ROWS, int WARPS> struct Own {
    unsigned long long arrived[LAYERS], received[LAYERS];  // weights; outputs of a layer
    unsigned partial[WARPS];
    float scales[ROWS], fixed[LAYERS];
};

// The address of shared memory, which the compiler would work out again, from a slow register, wherever it is used.
__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(128) unsigned char memory[];
    unsigned address = shared_address(memory);
    asm volatile("" : "+r"(address));
    return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}

template <int ROWS, int WARPS, bool TAGS>
__global__ void __launch_bounds__(WARPS * 32, 1) mlp_int8_row_sm90(const __grid_constant__ Network net) {
    constexpr int THREADS = WARPS * 32, TEAM = THREADS / ROWS;  // threads that quantize a row
    constexpr int LONGEST = ROWS == 1 ? 4096 : 1024, FOURS = LONGEST / 4 / TEAM;
    static_assert(ROWS == 1 || !TAGS, "tags are for one row");
    static_assert(TEAM % 32 == 0, "a row is quantized by whole warps");
    static_assert(sizeof(Own<ROWS, WARPS>) <= OWN, "the block's own things fit their place");
    unsigned char* const shared = shared_memory();
    Own<ROWS, WARPS>& own = *reinterpret_cast<Own<ROWS, WARPS>*>(shared);
    unsigned char* const quantized = shared + OWN;  // rows of LONGEST bytes

    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // as above
    const int warp = thread / 32, lane = thread % 32, last = net.layers - 1;
    const int rank = TAGS ? blockIdx.x : cluster_rank();
    const int m0 = TAGS ? 0 : cluster_id() * net.rows, rows = min(net.rows, net.M - m0);
    auto first_of = [&](int l) { return l == last ? 0 : rank * net.layer[l].slice; };
    auto count_of = [&](int l) {
        const Layer& layer = net.layer[l];
        return l < last ? max(0, min(layer.slice, layer.N - rank * layer.slice)) : rank < rows ? layer.N : 0;
    };

    if (thread == THREADS - 32) {
#pragma unroll
        for (int l = 0; l < LAYERS; ++l) {
            mbarrier_init(&own.arrived[l], 1);
            mbarrier_init(&own.received[l], 1);
        }
        mbarrier_init_fence();
#pragma unroll 1
        for (int l = 0; l <= last; ++l) {
            const Layer& layer = net.layer[l];
            const int bytes = count_of(l) * layer.K;
            mbarrier_expect_bytes(&own.arrived[l], bytes);
            if (bytes)
                bulk_load(shared + layer.w_at, layer.w + static_cast<long long>(first_of(l)) * layer.K, bytes, &own.arrived[l]);
            // The head's input goes to one block a row, any other to all.
            if (!TAGS && l < last) mbarrier_expect_bytes(&own.received[l], (l < last - 1 ? rows : rank < rows) * layer.N * 4);
        }
    }
    __syncwarp();
    const int row = thread / TEAM, member = thread % TEAM;
    uint4* const raw = reinterpret_cast<uint4*>(shared + net.raw_at) + thread;
    if (ROWS == 1 || row < rows) {
        const int K = net.layer[0].K;
#pragma unroll 1
        for (int i = 0; 4 * (member + i * TEAM) < K; ++i) {
            const long long at = static_cast<long long>(m0 + row) * K + 4 * (member + i * TEAM);
            if (net.kind == 0) copy_async<16>(raw + i * THREADS, static_cast<const float*>(net.x) + at);
            else copy_async<8>(raw + i * THREADS, static_cast<const __half*>(net.x) + at);
        }
    }
    unsigned tag = 0;
    if constexpr (TAGS) tag = *reinterpret_cast<volatile unsigned*>(net.tagged - 16) + 1;
    else cluster_announce();
#pragma unroll 1
    for (int l = 0; l <= last; ++l) {
        const Layer& layer = net.layer[l];
        float* const scale_w = reinterpret_cast<float*>(shared + layer.scale_at);
#pragma unroll 1
        for (int c = thread; c < count_of(l); c += THREADS) {
            copy_async<4>(scale_w + c, layer.scale_w + (first_of(l) + c) * layer.step_w);
            if (layer.bias) copy_async<4>(scale_w + layer.slice + c, layer.bias + first_of(l) + c);
            else scale_w[layer.slice + c] = -0.0f;  // x + -0 is x
        }
        if (thread == 0) {
            if (layer.scale_x) copy_async<4>(&own.fixed[l], layer.scale_x);
            else own.fixed[l] = 0.0f;
        }
    }

#pragma unroll 1
    for (int round = -1; round <= last; ++round) {
        const bool real = round >= 0, head = round == last;
        const int l = max(round, 0);
        const Layer& layer = net.layer[l];
        const int K = layer.K, held = head ? 1 : rows;  // the last: rows that this block quantizes
        if (head && rank >= rows) break;

        float4 v[FOURS];
        unsigned largest = 0;
        if (round > 0) {
            const Layer& before = net.layer[l - 1];
            if constexpr (TAGS) {
                const unsigned long long* const from = net.tagged + before.out_at + 4 * member;
                unsigned long long low[FOURS][2], high[FOURS][2];
                bool present;
                int tries = 0;
                do {
                    if (++tries > (1 << 18)) __trap();
                    present = true;
#pragma unroll
                    for (int i = 0; i < FOURS; ++i)
                        if (4 * (member + i * TEAM) < K) {
                            load_tagged(low[i], from + 4 * i * TEAM);
                            load_tagged(high[i], from + 4 * i * TEAM + 2);
                        }
#pragma unroll
                    for (int i = 0; i < FOURS; ++i)
                        if (4 * (member + i * TEAM) < K)
                            present &= low[i][0] >> 32 == tag && low[i][1] >> 32 == tag && high[i][0] >> 32 == tag &&
                                       high[i][1] >> 32 == tag;
                } while (!present);
#pragma unroll
                for (int i = 0; i < FOURS; ++i)
                    v[i] = {__uint_as_float(low[i][0]), __uint_as_float(low[i][1]), __uint_as_float(high[i][0]),
                            __uint_as_float(high[i][1])};
            } else {
                bounded_wait(&own.received[l - 1], 0);
                const float4* const from = reinterpret_cast<const float4*>(shared + before.out_at) + row * (K / 4) + member;
#pragma unroll
                for (int i = 0; i < FOURS; ++i)
                    if ((ROWS == 1 || row < held) && 4 * (member + i * TEAM) < K) v[i] = from[i * TEAM];
            }
        } else {
            if (real) copy_wait_all();
#pragma unroll
            for (int i = 0; i < FOURS; ++i)
                if ((ROWS == 1 || row < held) && 4 * (member + i * TEAM) < K) v[i] = converted(raw[i * THREADS], net.kind);
        }
#pragma unroll
        for (int i = 0; i < FOURS; ++i)
            if ((ROWS == 1 || row < held) && 4 * (member + i * TEAM) < K) largest = max(largest, largest_of(v[i]));
        largest = __reduce_max_sync(~0u, largest);
        if (lane == 0) own.partial[warp] = largest;
        __syncthreads();  // also: all warps are done with the quantized rows of the round before
#pragma unroll
        for (int i = 0; i < TEAM / 32; ++i) largest = max(largest, own.partial[row * (TEAM / 32) + i]);
        float s = own.fixed[l];
        // A row with NaN or Inf gets a NaN scale and zeros (between layers with static scales Inf is clipped).
        const bool kept = largest <= (l == 0 || s == 0.0f ? 0x7f7fffffu : 0x7f800000u);
        if (s == 0.0f) {
            s = __fdiv_rn(__uint_as_float(largest), 127.0f);
            if (s < 1.17549435e-38f) s = 1.0f;
        }
        const Divider by(s, -127, 127);
        unsigned char* const q = quantized + row * LONGEST + 4 * member;
#pragma unroll
        for (int i = 0; i < FOURS; ++i)
            if ((ROWS == 1 || row < held) && 4 * (member + i * TEAM) < K)
                *reinterpret_cast<unsigned*>(q + 4 * i * TEAM) =
                    kept ? packed(by.nearest(v[i].x), by.nearest(v[i].y), by.nearest(v[i].z), by.nearest(v[i].w)) : 0;
        if (member == 0) own.scales[row] = kept ? s : not_a_number();
        __syncthreads();

        const int count = real ? count_of(l) : min(count_of(l), OUTPUTS * WARPS), mine = lane % ROWS;
        const float* const scale_w = reinterpret_cast<const float*>(shared + layer.scale_at);
        if (real) bounded_wait(&own.arrived[l], 0);
#pragma unroll 1
        for (int c = warp * OUTPUTS; c < count; c += WARPS * OUTPUTS) {
            const unsigned char* const w = shared + layer.w_at + c * K;
            const int end = (count - 1 - c) * K;  // what is computed of other outputs is for nothing
            int d[ROWS][OUTPUTS] = {};
#pragma unroll 2
            for (int k = 16 * lane; k < K; k += 16 * 32) {
                int4 a[OUTPUTS];
#pragma unroll
                for (int o = 0; o < OUTPUTS; ++o) a[o] = *reinterpret_cast<const int4*>(w + min(o * K, end) + k);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const int4 b = *reinterpret_cast<const int4*>(quantized + r * LONGEST + k);
#pragma unroll
                    for (int o = 0; o < OUTPUTS; ++o) {
                        d[r][o] = __dp4a(a[o].x, b.x, d[r][o]);
                        d[r][o] = __dp4a(a[o].y, b.y, d[r][o]);
                        d[r][o] = __dp4a(a[o].z, b.z, d[r][o]);
                        d[r][o] = __dp4a(a[o].w, b.w, d[r][o]);
                    }
                }
            }
            int sum[OUTPUTS] = {};  // of this lane's row
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int o = 0; o < OUTPUTS; ++o) {
                    const int total = __reduce_add_sync(~0u, d[r][o]);
                    if (mine == r) sum[o] = total;
                }
            float value[OUTPUTS];
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) {
                value[o] = __fadd_rn(__fmul_rn(__fmul_rn(static_cast<float>(sum[o]), own.scales[mine]), scale_w[c + o]),
                                     scale_w[layer.slice + c + o]);
                if (!head) value[o] = relu_of(value[o]);
            }
            if (!real) continue;
            const int at = first_of(l) + c;
            if (head) {
                if (lane == 0)
#pragma unroll
                    for (int o = 0; o < OUTPUTS; ++o)
                        if (c + o < count) net.y[static_cast<long long>(m0 + rank) * layer.N + c + o] = value[o];
            } else if constexpr (TAGS) {
                if (lane == 0) store_tagged(net.tagged + layer.out_at + at, value[0], value[1], tag);
                if (lane == 1) store_tagged(net.tagged + layer.out_at + at + 2, value[2], value[3], tag);
            } else {
                if (l == 0 && c == warp * OUTPUTS) cluster_await();  // all blocks can be sent to
                const bool to_all = l < last - 1;
                const float* const here =
                    reinterpret_cast<const float*>(shared + layer.out_at) + (to_all ? mine * layer.N : 0) + at;
                const uint4 four = {__float_as_uint(value[0]), __float_as_uint(value[1]), __float_as_uint(value[2]),
                                    __float_as_uint(value[3])};
                if (mine < rows) {
                    if (!to_all && lane < ROWS)
                        cluster_send(cluster_address(here, mine), four, cluster_address(&own.received[l], mine));
                    for (int to = lane / ROWS; to_all && to < net.group; to += 32 / ROWS)
                        cluster_send(cluster_address(here, to), four, cluster_address(&own.received[l], to));
                }
            }
        }
        if (!TAGS && round == 0 && warp * OUTPUTS >= count) cluster_await();
    }
    if (TAGS && rank == 0 && thread == 0) *reinterpret_cast<volatile unsigned*>(net.tagged - 16) = tag;
}
