// y = act(((float)acc · scale_x[m]) · scale_w[n] + bias[n]),  acc = x · wᵀ in exact integers (dp4a).
//
//   x (M, K), w (N, K) int8 row-major; scale_x (M,) or one value, scale_w (N,) or one value, bias (N,) float;
//   y (M, N) row-major, float, half, bfloat16, int (the bare accumulator) or long long.
//
// The idea: four int8 values travel as one 32-bit word and dp4a multiplies and adds four pairs in one instruction.
// The tiling is gemm_simt.cu's with K counted in words.
//
// The epilogue rounds after every operation (no fused multiply-add), so a CPU that does the same four steps in float
// gets the same bits.

#include "common/numeric.cuh"

constexpr int BM = 64, BN = 64, BK = 16;  // BK in words of four
constexpr int TM = 4, TN = 4;
constexpr int THREADS = (BM / TM) * (BN / TN);
static_assert(THREADS == 256, "the Python face launches 256 threads");

// Stage ROWS x BK words. A row that starts off a word boundary (K no multiple of 4, or an odd address) is gathered
// byte by byte; bytes beyond K are zero, which adds nothing.
template <bool WORDS, int ROWS>
__device__ void stage(int (&tile)[BK][ROWS + 1], const signed char* a, long long row0, long long rows, long long k0,
                      long long K) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * BK; i += THREADS) {
        const int r = i / BK, word = i % BK;
        const long long k = k0 + 4 * word;
        int packed = 0;
        if (row0 + r < rows && k < K) {
            const signed char* at = a + (row0 + r) * K + k;
            if (WORDS) {
                packed = *reinterpret_cast<const int*>(at);
            } else {
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    if (k + b < K) packed |= static_cast<int>(static_cast<unsigned char>(at[b])) << (8 * b);
            }
        }
        tile[word][r] = packed;
    }
}

template <typename O, typename ACC>
__device__ __forceinline__ void store(O* y, ACC acc, float scale_x, float scale_w, float bias, int relu) {
    float value = __fadd_rn(__fmul_rn(__fmul_rn(static_cast<float>(acc), scale_x), scale_w), bias);
    *y = from_float<O>(relu ? relu_of(value) : value);
}
template <typename ACC>
__device__ __forceinline__ void store(int* y, ACC acc, float, float, float, int relu) {
    *y = static_cast<int>(relu && acc < 0 ? 0 : acc);
}
template <typename ACC>
__device__ __forceinline__ void store(long long* y, ACC acc, float, float, float, int relu) {
    *y = relu && acc < 0 ? 0 : acc;
}

// ACC is int where K cannot overflow it, else long long: each BK step is summed in 32 bits and then widened.
template <typename O, typename ACC, bool WORDS>
__global__ void __launch_bounds__(THREADS, 2)
gemm_int8_simt(const signed char* __restrict__ x, const signed char* __restrict__ w, const float* __restrict__ scale_x,
               int step_x, const float* __restrict__ scale_w, int step_w, const float* __restrict__ bias,
               O* __restrict__ y, long long M, long long N, long long K, int relu) {
    __shared__ int xs[BK][BM + 1];
    __shared__ int ws[BK][BN + 1];

    const long long tiles_n = (N + BN - 1) / BN;
    const long long m0 = blockIdx.x / tiles_n * BM;
    const long long n0 = blockIdx.x % tiles_n * BN;
    const int tm = threadIdx.x / (BN / TN);
    const int tn = threadIdx.x % (BN / TN);

    ACC acc[TM][TN] = {};
    for (long long k0 = 0; k0 < K; k0 += 4 * BK) {
        stage<WORDS, BM>(xs, x, m0, M, k0, K);
        stage<WORDS, BN>(ws, w, n0, N, k0, K);
        __syncthreads();
        int step[TM][TN] = {};
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            int a[TM], b[TN];
#pragma unroll
            for (int i = 0; i < TM; ++i) a[i] = xs[k][tm + i * (BM / TM)];
#pragma unroll
            for (int j = 0; j < TN; ++j) b[j] = ws[k][tn + j * (BN / TN)];
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) step[i][j] = __dp4a(a[i], b[j], step[i][j]);
        }
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) acc[i][j] += step[i][j];
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            const long long m = m0 + tm + i * (BM / TM), n = n0 + tn + j * (BN / TN);
            if (m < M && n < N)
                store(&y[m * N + n], acc[i][j], scale_x ? scale_x[m * step_x] : 1.0f,
                      scale_w ? scale_w[n * step_w] : 1.0f, bias ? bias[n] : -0.0f, relu);  // x + -0 is x
        }
    }
}
