// A whole int8 network in one launch, for up to 64 rows and layers so wide that it takes the whole GPU to read their weights:
// what mlp_int8_sm90.cu computes, bit for bit.
//
//   x (M, K) float, half or bfloat16, rows on 4 elements, K <= 1024; each w (N, K) int8, K a multiple of 16, all row-major
//   and on 16 bytes; y (M, N) float. Two layers at least, the last of up to 16 outputs (the head).
//
// The ideas, outermost first:
//   weights at once   all weights of all hidden layers are on their way to shared memory before anything else happens.
//   two dimensions    a block multiplies 64 rows by BN outputs and a share of K, so it needs few weights and few
//                     activations; the SPLIT blocks of a cluster, which share K out, add up their integers.
//   two barriers      between layers: a row's scale needs the largest magnitude of the whole row, so all blocks agree on it
//                     (a maximum in memory) before they quantize what they hold, and all must have before any goes on.
//   turns             the maxima of one launch are cleared by the next, which has others.

#include "common/divide.cuh"
#include "common/numeric.cuh"
#include "common/wgmma.cuh"

constexpr int HIDDEN = 3, ROWS = 64, PIECE = 128, THREADS = 256, LONGEST = 1024;
constexpr int A_PIECE = ROWS * PIECE;  // bytes of a piece of K of all rows

struct Layer {
    const float* scale_w;  // (N,), or one for step_w == 0
    const float* bias;     // (N,) or null
    const float* scale_x;  // static scale of the input, or null
    signed char* q;        // (ROWS, N) the quantized outputs, in memory
    int N, K, step_w;
    int w_at;  // where in shared memory the block's weights lie, piece after piece
};

struct Network {
    Layer layer[HIDDEN + 1];  // the last used one is the head
    const void* x;
    const signed char* head;  // the head's weights
    float* y;
    unsigned* counter;     // of the barrier, and 128 bytes further which half of `maxima` is this launch's
    unsigned* maxima;      // (2, HIDDEN, ROWS), the bits of each row's largest magnitude
    int M, hidden, kind;   // layers but the head; of x: 0 float, 1 half, 2 bfloat16
    int head_at;           // where in shared memory the head's weights will lie
};

__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void fence_proxy_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void cluster_store(unsigned to, unsigned v) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
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

// All blocks are here, and each sees what the others wrote. The counter's top bit flips when the last one arrives, and
// the lower bits are then zero again, so it serves the next time as it is.
__device__ __forceinline__ void grid_sync(unsigned* counter) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
        unsigned before, now;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(add) : "memory");
        int tries = 0;
        do {
            if (++tries > (1 << 20)) __trap();
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        } while (((before ^ now) & 0x80000000u) == 0);
    }
    __syncthreads();
}

__device__ __forceinline__ unsigned packed(int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
__device__ __forceinline__ unsigned packed(const Divider& by, float4 v) {
    return packed(by.nearest(v.x), by.nearest(v.y), by.nearest(v.z), by.nearest(v.w));
}

__device__ __forceinline__ unsigned largest_of(float4 v) {
    const unsigned MAGNITUDE = 0x7fffffffu;  // without their signs floats order like integers, NaN above Inf
    return max(max(__float_as_uint(v.x) & MAGNITUDE, __float_as_uint(v.y) & MAGNITUDE),
               max(__float_as_uint(v.z) & MAGNITUDE, __float_as_uint(v.w) & MAGNITUDE));
}

// The scale of a row, of its static one (0: none) or of the bits of its largest magnitude. A row with NaN or Inf is not
// kept: its scale is NaN and its integers are zeros (between layers with static scales Inf is clipped).
struct Scale {
    float value;
    bool kept;
    __device__ __forceinline__ Scale(unsigned largest, float fixed, bool input) : value(fixed) {
        kept = largest <= (input || fixed == 0.0f ? 0x7f7fffffu : 0x7f800000u);
        if (fixed == 0.0f) {
            value = __fdiv_rn(__uint_as_float(largest), 127.0f);
            if (value < 1.17549435e-38f) value = 1.0f;
        }
    }
    __device__ __forceinline__ float or_nan() const { return kept ? value : not_a_number(); }
};

// Four elements of x.
__device__ __forceinline__ float4 load_four(const void* x, long long at, int kind) {
    if (kind == 0) return *reinterpret_cast<const float4*>(static_cast<const float*>(x) + at);
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const __half*>(x) + at);
    if (kind == 1) {
        const float2 low = __half22float2(reinterpret_cast<const __half2&>(raw.x));
        const float2 high = __half22float2(reinterpret_cast<const __half2&>(raw.y));
        return {low.x, low.y, high.x, high.y};
    }
    return {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
            __uint_as_float(raw.y & 0xffff0000u)};
}

// Where byte k of a row's piece lies in a swizzled tile of 128-byte rows.
__device__ __forceinline__ int swizzled(int row, int k) { return row * PIECE + (k / 16 ^ row % 8) * 16 + k % 16; }

template <int BN, int SPLIT>
__global__ void __launch_bounds__(THREADS, 1)
mlp_int8_grid_sm90(const __grid_constant__ TensorMap map0, const __grid_constant__ TensorMap map1,
                   const __grid_constant__ TensorMap map2, const __grid_constant__ Network net) {
    constexpr int WN = BN / 64, WK = 2 / WN;  // warpgroups side by side, and dividing each piece of K
    constexpr int CW = BN / SPLIT, QUADS = CW / 4;  // columns that a block finishes, in fours
    constexpr int ITEMS = (ROWS * QUADS + THREADS - 1) / THREADS;  // fours of a thread, all in the same columns
    constexpr int PITCH = BN + 8;
    extern __shared__ __align__(128) unsigned char raw[];
    unsigned char* const shared = raw + (1024 - shared_address(raw) % 1024) % 1024;  // swizzle atoms are 1,024 bytes
    unsigned char* const a_tile = shared;  // the rows' pieces of this block's share of K; then its sums
    __shared__ unsigned long long arrived[HIDDEN + 1];
    __shared__ float scales[ROWS];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = threadIdx.x / 128;
    const int rank = cluster_rank(), n0 = blockIdx.x / SPLIT * BN;
    auto share_of = [&](int K) { return ((K + PIECE - 1) / PIECE + SPLIT - 1) / SPLIT; };
    auto first_of = [&](int K) { return min(rank * share_of(K), (K + PIECE - 1) / PIECE); };
    auto count_of = [&](int K) { return min(share_of(K), (K + PIECE - 1) / PIECE - first_of(K)); };

    if (threadIdx.x == 0) {
#pragma unroll
        for (int l = 0; l <= HIDDEN; ++l) mbarrier_init(&arrived[l], 1);
        mbarrier_init_fence();
#pragma unroll
        for (int l = 0; l < HIDDEN; ++l) {
            const Layer& layer = net.layer[l];
            if (l >= net.hidden || n0 >= layer.N) continue;
            const TensorMap* map = l == 0 ? &map0 : l == 1 ? &map1 : &map2;
            const int count = count_of(layer.K);
            mbarrier_expect_bytes(&arrived[l], count * BN * PIECE);
            for (int p = 0; p < count; ++p)
                tma_load(shared + layer.w_at + p * (BN * PIECE), map, &arrived[l], (first_of(layer.K) + p) * PIECE, n0);
        }
    }
    const unsigned turn = *reinterpret_cast<volatile unsigned*>(net.counter + 32);
    unsigned* const maxima = net.maxima + turn * (HIDDEN * ROWS);
    if (blockIdx.x == 0 && threadIdx.x < HIDDEN * ROWS) net.maxima[(turn ^ 1) * (HIDDEN * ROWS) + threadIdx.x] = 0;
    cluster_sync();  // the cluster's shared memory can be written to

    // Each block quantizes its share of x and gives all blocks of the cluster their parts of K.
    {
        constexpr int FOURS = LONGEST / 128, MINE = ROWS / SPLIT / 8;  // of a lane; rows of a warp
        const int K = net.layer[0].K, share = share_of(K);
        const float fixed = net.layer[0].scale_x ? *net.layer[0].scale_x : 0.0f;
        float4 v[MINE][FOURS];
#pragma unroll
        for (int r = 0; r < MINE; ++r) {
            const int m = rank * (ROWS / SPLIT) + warp * MINE + r;
#pragma unroll
            for (int i = 0; i < FOURS; ++i) {
                const int k = 4 * (lane + 32 * i);
                v[r][i] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (m < net.M && k < K) v[r][i] = load_four(net.x, static_cast<long long>(m) * K + k, net.kind);
            }
        }
#pragma unroll
        for (int r = 0; r < MINE; ++r) {
            const int m = rank * (ROWS / SPLIT) + warp * MINE + r;
            unsigned largest = 0;
#pragma unroll
            for (int i = 0; i < FOURS; ++i) largest = max(largest, largest_of(v[r][i]));
            const Scale s(__reduce_max_sync(~0u, largest), fixed, true);
            const Divider by(s.value, -127, 127);
#pragma unroll
            for (int i = 0; i < FOURS; ++i) {
                const int k = 4 * (lane + 32 * i), piece = k / PIECE;
                if (k >= K) break;
                const int to = piece / share;
                cluster_store(cluster_address(a_tile + (piece - to * share) * A_PIECE + swizzled(m, k % PIECE), to),
                              s.kept ? packed(by, v[r][i]) : 0);
            }
            if (lane < SPLIT) cluster_store(cluster_address(&scales[m], lane), __float_as_uint(s.or_nan()));
        }
        fence_proxy_async_all();
        cluster_sync();
        fence_proxy_async_all();
    }

    const int quad = threadIdx.x % QUADS * 4;  // this thread's columns, of those that the block finishes
    float scale_x[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int m = threadIdx.x / QUADS + i * (THREADS / QUADS);
        scale_x[i] = m < ROWS ? scales[m] : 0.0f;
    }

#pragma unroll 1
    for (int l = 0; l < net.hidden; ++l) {
        const Layer& layer = net.layer[l];
        const int K = layer.K, count = count_of(K), n = n0 + rank * CW + quad;
        const bool mine = n < layer.N;  // N is a multiple of 16
        float scale_w[4] = {}, bias[4] = {-0.0f, -0.0f, -0.0f, -0.0f};  // x + -0 is x
        if (mine) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                scale_w[c] = layer.scale_w[(n + c) * layer.step_w];
                if (layer.bias) bias[c] = layer.bias[n + c];
            }
        }
        const float fixed = net.layer[l + 1].scale_x ? *net.layer[l + 1].scale_x : 0.0f;
        if (n0 < layer.N) {
            bounded_wait(&arrived[l], 0);
            int acc[32] = {};
            const unsigned char* const w_tile = shared + layer.w_at + group % WN * (64 * PIECE);
            wgmma_fence();
#pragma unroll 1
            for (int p = 0; p < count; ++p)
#pragma unroll
                for (int k = 0; k < 4 / WK; ++k) {
                    const int at = (group / WN * (4 / WK) + k) * 32;
                    wgmma<signed char, 64, 0, 0>(acc, wgmma_descriptor(a_tile + p * A_PIECE + at, 16),
                                                 wgmma_descriptor(w_tile + p * (BN * PIECE) + at, 16), 1);
                }
            wgmma_commit();
            wgmma_wait<0>();
            __syncthreads();  // both warpgroups are done with the rows: the sums take their place
            int* const sums = reinterpret_cast<int*>(a_tile) + group / WN * (ROWS * PITCH) + group % WN * 64;
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *reinterpret_cast<int2*>(sums + (warp % 4 * 16 + lane / 4 + 8 * h) * PITCH + 8 * j + 2 * (lane % 4)) =
                        int2{acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]};
        }
        if (l + 1 == net.hidden && threadIdx.x == 0 && blockIdx.x < net.M) {  // the weights have been read: the head's follow
            const Layer& head = net.layer[l + 1];
            fence_proxy_async_all();
            mbarrier_expect_bytes(&arrived[HIDDEN], head.N * head.K);
            bulk_load(shared + net.head_at, net.head, head.N * head.K, &arrived[HIDDEN]);
        }
        cluster_sync();

        float4 v[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int m = threadIdx.x / QUADS + i * (THREADS / QUADS);
            unsigned largest = 0;
            if (mine && m < net.M) {
                int4 sum = {0, 0, 0, 0};
                const int* const at = reinterpret_cast<const int*>(a_tile) + m * PITCH + rank * CW + quad;
#pragma unroll
                for (int p = 0; p < SPLIT; ++p)
#pragma unroll
                    for (int k = 0; k < WK; ++k) {
                        const uint4 part = cluster_load(reinterpret_cast<const uint4*>(at + k * (ROWS * PITCH)), p);
                        sum = {sum.x + static_cast<int>(part.x), sum.y + static_cast<int>(part.y),
                               sum.z + static_cast<int>(part.z), sum.w + static_cast<int>(part.w)};
                    }
                auto value = [&](int s, int c) {
                    return relu_of(
                        __fadd_rn(__fmul_rn(__fmul_rn(static_cast<float>(s), scale_x[i]), scale_w[c]), bias[c]));
                };
                v[i] = {value(sum.x, 0), value(sum.y, 1), value(sum.z, 2), value(sum.w, 3)};
                largest = largest_of(v[i]);
            }
#pragma unroll
            for (int other = QUADS / 2; other > 0; other /= 2)
                largest = max(largest, __shfl_xor_sync(~0u, largest, other));
            if (threadIdx.x % QUADS == 0 && mine && m < net.M)
                atomicMax(maxima + l * ROWS + m, largest);
        }
        grid_sync(net.counter);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int m = threadIdx.x / QUADS + i * (THREADS / QUADS);
            if (m >= net.M) continue;
            const Scale s(__ldcg(maxima + l * ROWS + m), fixed, false);
            const Divider by(s.value, -127, 127);
            if (mine)
                *reinterpret_cast<unsigned*>(layer.q + static_cast<long long>(m) * layer.N + n) =
                    s.kept ? packed(by, v[i]) : 0;
            scale_x[i] = s.or_nan();
            if (threadIdx.x % QUADS == 0) scales[m] = scale_x[i];
        }
        grid_sync(net.counter);

        if (l + 1 < net.hidden) {
            const int first = first_of(layer.N), chunks = count_of(layer.N) * (ROWS * PIECE / 16);
            for (int i = threadIdx.x; i < chunks; i += THREADS) {
                const int piece = i / (ROWS * 8), m = i / 8 % ROWS, k = (first + piece) * PIECE + i % 8 * 16;
                if (m < net.M && k < layer.N)
                    copy_async(a_tile + piece * A_PIECE + swizzled(m, i % 8 * 16),
                               layer.q + static_cast<long long>(m) * layer.N + k);
            }
            copy_wait_all();
            fence_proxy_async();
            __syncthreads();
        }
    }

    if (blockIdx.x == 0 && threadIdx.x == 0) *reinterpret_cast<volatile unsigned*>(net.counter + 32) = turn ^ 1;
    if (blockIdx.x >= net.M) return;
    // The head: a block a row.
    const Layer& head = net.layer[net.hidden];
    const signed char* const q = net.layer[net.hidden - 1].q + static_cast<long long>(blockIdx.x) * head.K;
    const float s = scales[blockIdx.x];
    bounded_wait(&arrived[HIDDEN], 0);
#pragma unroll 1
    for (int o = 2 * warp; o < head.N; o += THREADS / 16) {  // two outputs a warp
        int d[2] = {};
        const unsigned char* const w = shared + net.head_at + o * head.K;
        const int other = o + 1 < head.N ? head.K : 0;
#pragma unroll 4
        for (int k = 16 * lane; k < head.K; k += 16 * 32) {
            const int4 b = __ldcg(reinterpret_cast<const int4*>(q + k));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int4 a = *reinterpret_cast<const int4*>(w + i * other + k);
                d[i] = __dp4a(a.x, b.x, d[i]);
                d[i] = __dp4a(a.y, b.y, d[i]);
                d[i] = __dp4a(a.z, b.z, d[i]);
                d[i] = __dp4a(a.w, b.w, d[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int sum = __reduce_add_sync(~0u, d[i]);
            if (lane == i && o + i < head.N)
                net.y[static_cast<long long>(blockIdx.x) * head.N + o + i] =
                    __fadd_rn(__fmul_rn(__fmul_rn(static_cast<float>(sum), s), head.scale_w[(o + i) * head.step_w]),
                              head.bias ? head.bias[o + i] : -0.0f);
        }
    }
}
