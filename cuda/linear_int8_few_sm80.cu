// An int8 layer of float activations with few outputs, a network's head: q, s = quantize(x),
// y = act(((float)(q · wᵀ) · s) · scale_w + bias). The arithmetic, bit for bit, is that of quantize_rows and gemm_int8.
//
//   x (M, K) T, w (N, K) int8 with N <= 16, y (M, N) float, half or bfloat16, all row-major; K a multiple of 16.
//
// The idea: reading x is all the work there is, so nothing else touches memory. A warp holds a whole row in registers,
// finds its largest magnitude and leaves its integers in shared memory; the block then multiplies its ROWS rows, which
// are the 8 columns of an mma whose 16 rows are the outputs, and the warps share out K. Three blocks on a multiprocessor
// see to it that one reads while another multiplies.
#include "common/dependent.cuh"
#include "common/divide.cuh"
#include "common/numeric.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS, ROWS = 8, OUTPUTS = 16;
constexpr int PIECE = 64;  // bytes of K: 16 in each of a quad's lanes, whatever their order, feed two instructions

struct Head {
    const void* x;
    const signed char* w;
    const float* scale_w;  // (N,), or one for step_w == 0
    const float* bias;     // (N,) or null
    const float* scale_x;  // a static scale, or null
    void* y;
    int M, N, K, step_w;
    int out;  // of y: 0 float, 1 half, 2 bfloat16
    int relu;
};

__device__ __forceinline__ void mma(int (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <typename T> struct alignas(16) Vector { T at[16 / sizeof(T)]; };

// ITEMS vectors of 16 bytes in each lane hold a row.
template <typename T, int ITEMS>
__global__ void __launch_bounds__(THREADS, 3) linear_int8_few_sm80(const __grid_constant__ Head e) {
    constexpr int VEC = 16 / sizeof(T);
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float scales[ROWS];
    __shared__ int parts[WARPS][OUTPUTS][ROWS];
    const int pieces = (e.K + PIECE - 1) / PIECE;
    const int line = (pieces | 1) * PIECE;  // an odd number of pieces: neighbouring rows lie in other banks
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long m0 = static_cast<long long>(blockIdx.x) * ROWS;
    let_successor_start();
    wait_for_predecessor();
    const bool given = e.scale_x;
    const float fixed = given ? *e.scale_x : 0.0f;

#pragma unroll 1
    for (int r = warp; r < ROWS; r += WARPS) {
        const T* const x = static_cast<const T*>(e.x) + min(m0 + r, static_cast<long long>(e.M) - 1) * e.K;
        Vector<T> row[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int k = (lane + 32 * i) * VEC;
            row[i] = {};
            if (k < e.K) row[i] = *reinterpret_cast<const Vector<T>*>(x + k);
        }
        unsigned largest = 0;  // without their signs floats order like integers, NaN above Inf
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
            for (int v = 0; v < VEC; ++v) largest = max(largest, __float_as_uint(to_float(row[i].at[v])) & 0x7fffffffu);
        largest = __reduce_max_sync(~0u, largest);
        float s = __fdiv_rn(__uint_as_float(largest), 127.0f);
        if (s < 1.17549435e-38f) s = 1.0f;
        if (given) s = fixed;
        if (lane == 0) scales[r] = largest <= 0x7f7fffffu ? s : not_a_number();  // whatever such a row's integers are
        const Divider by(s, -127, 127);
        const auto store = [&](auto nearest) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int k = (lane + 32 * i) * VEC;
                if (k >= pieces * PIECE) break;
#pragma unroll
                for (int v = 0; v < VEC; v += 4) {
                    unsigned q[4];
#pragma unroll
                    for (int b = 0; b < 4; ++b) q[b] = nearest(to_float(row[i].at[v + b]));
                    *reinterpret_cast<unsigned*>(shared + r * line + k + v) =
                        __byte_perm(__byte_perm(q[0], q[1], 0x40), __byte_perm(q[2], q[3], 0x40), 0x5410);
                }
            }
        };
        // nothing lies beyond the row's own maximum, and a spoilt row may hold anything
        if (!given && by.factor == 1.0f) store([&](float v) { return by.nearest_as_it_is(v); });
        else store([&](float v) { return by.nearest(v); });
    }
    __syncthreads();

    // d[0], d[1]: output lane / 4, rows 2 * (lane % 4) and the next; d[2], d[3]: the output 8 further on.
    int d[4] = {};
    const int g = lane / 4, t = lane % 4;
#pragma unroll 4
    for (int p = warp; p < pieces; p += WARPS) {
        const int k = p * PIECE + t * 16;
        const auto weights = [&](int n) {
            return n < e.N && k < e.K ? *reinterpret_cast<const uint4*>(e.w + static_cast<long long>(n) * e.K + k)
                                      : uint4{0, 0, 0, 0};
        };
        const uint4 low = weights(g), high = weights(g + 8);
        const uint4 x = *reinterpret_cast<const uint4*>(shared + g * line + k);
        mma(d, low.x, high.x, low.y, high.y, x.x, x.y);
        mma(d, low.z, high.z, low.w, high.w, x.z, x.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[warp][g + i / 2 * 8][2 * t + i % 2] = d[i];
    __syncthreads();

    const int n = threadIdx.x / ROWS, r = threadIdx.x % ROWS;
    if (n >= e.N || m0 + r >= e.M) return;
    int sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += parts[w][n][r];
    const float scaled = __fmul_rn(__fmul_rn(static_cast<float>(sum), scales[r]), e.scale_w[n * e.step_w]);
    float value = __fadd_rn(scaled, e.bias ? e.bias[n] : -0.0f);  // y + -0 is y
    if (e.relu) value = relu_of(value);
    const long long at = (m0 + r) * e.N + n;
    if (e.out == 0) static_cast<float*>(e.y)[at] = value;
    else if (e.out == 1) static_cast<__half*>(e.y)[at] = from_float<__half>(value);
    else static_cast<__nv_bfloat16*>(e.y)[at] = from_float<__nv_bfloat16>(value);
}
static_assert(THREADS == OUTPUTS * ROWS, "a thread finishes one output of one row");
