// y = act(x · wᵀ + bias) on the plain floating-point units.
//
//   x (M, K), w (N, K), y (M, N) row-major, bias (N,) or null. float, half or bfloat16; sums in float.
//
// Each operand may also be given transposed in memory, so that the backward products need no copy: X_K_MAJOR says
// that x[m][k] lies at x[m * ldx + k], otherwise at x[k * ldx + m]; the same for w.
//
// The idea: a block owns a BM x BN tile of y and walks over K in steps of BK. Both operands' slices are staged in
// shared memory, so every element fetched from global memory serves BM (or BN) multiply-adds; each thread then keeps
// a TM x TN patch of y in registers, so every element fetched from shared memory serves TN (or TM) more.

#include "common/numeric.cuh"

constexpr int BM = 64, BN = 64, BK = 16;
constexpr int TM = 4, TN = 4;
constexpr int THREADS = (BM / TM) * (BN / TN);
static_assert(THREADS == 256, "the Python face launches 256 threads");
static_assert(BM * BK % THREADS == 0 && BN * BK % THREADS == 0, "every thread stages the same number of elements");

// Copy a ROWS x BK slice of an operand to shared memory as [BK][ROWS]. Consecutive threads read consecutive addresses
// in whichever direction is contiguous. Elements beyond the matrix become zero, which adds nothing to any sum.
template <typename T, bool K_MAJOR, int ROWS>
__device__ void stage(float (&tile)[BK][ROWS + 1], const T* a, long long ld, long long row0, long long rows,
                      long long k0, long long K) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * BK; i += THREADS) {
        const int r = K_MAJOR ? i / BK : i % ROWS;
        const int k = K_MAJOR ? i % BK : i / ROWS;
        const bool inside = row0 + r < rows && k0 + k < K;
        const long long at = K_MAJOR ? (row0 + r) * ld + k0 + k : (k0 + k) * ld + row0 + r;
        tile[k][r] = inside ? to_float(a[at]) : 0.0f;
    }
}

template <typename T, bool X_K_MAJOR, bool W_K_MAJOR>
__global__ void __launch_bounds__(THREADS, 2)
gemm_simt(const T* __restrict__ x, long long ldx, const T* __restrict__ w, long long ldw, const T* __restrict__ bias,
          T* __restrict__ y, long long M, long long N, long long K, int relu) {
    __shared__ float xs[BK][BM + 1];  // the extra column spreads a transposing store over the banks
    __shared__ float ws[BK][BN + 1];

    const long long tiles_n = (N + BN - 1) / BN;
    const long long m0 = blockIdx.x / tiles_n * BM;
    const long long n0 = blockIdx.x % tiles_n * BN;
    const int tm = threadIdx.x / (BN / TN);
    const int tn = threadIdx.x % (BN / TN);

    float acc[TM][TN] = {};
    for (long long k0 = 0; k0 < K; k0 += BK) {
        stage<T, X_K_MAJOR, BM>(xs, x, ldx, m0, M, k0, K);
        stage<T, W_K_MAJOR, BN>(ws, w, ldw, n0, N, k0, K);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            float a[TM], b[TN];
#pragma unroll
            for (int i = 0; i < TM; ++i) a[i] = xs[k][tm + i * (BM / TM)];
#pragma unroll
            for (int j = 0; j < TN; ++j) b[j] = ws[k][tn + j * (BN / TN)];
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
        }
        __syncthreads();
    }

    // A thread's patch is strided over the tile, so neighbouring threads write neighbouring outputs.
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            const long long m = m0 + tm + i * (BM / TM), n = n0 + tn + j * (BN / TN);
            if (m < M && n < N) {
                float value = acc[i][j] + (bias ? to_float(bias[n]) : 0.0f);
                if (relu) value = relu_of(value);
                y[m * N + n] = from_float<T>(value);
            }
        }
    }
}
