// y = x · wᵀ, tiles in registers.   x (M, K), w (N, K), y (M, N), float, row-major; M, N, K multiples of the tile.
//
// The new idea: a thread computes TM x TN outputs. For every k it reads TM + TN numbers from shared memory and makes
// TM * TN multiply-adds of them: 4 a number instead of 1/2, so that shared memory no longer sets the pace. The block's
// tile grows with it, and global memory is read 4 times less often.

constexpr int BM = 128, BN = 128, BK = 8;
constexpr int TM = 8, TN = 8;
constexpr int THREADS = (BM / TM) * (BN / TN);
static_assert(THREADS == 256, "16 x 16 threads");

// Copy ROWS rows of BK numbers to shared memory as [BK][ROWS]: later, neighbouring threads read neighbouring rows.
// 4 floats between the lines' ends and the next multiple of 32 banks keep the turned stores free of conflicts.
template <int ROWS> __device__ void stage(float (&tile)[BK][ROWS + 4], const float* a, int K) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * BK; i += THREADS) tile[i % BK][i / BK] = a[i / BK * K + i % BK];
}

__global__ void __launch_bounds__(THREADS)
register_tiles(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y, int M, int N, int K) {
    __shared__ float xs[BK][BM + 4];
    __shared__ float ws[BK][BN + 4];
    const int m0 = blockIdx.x / (N / BN) * BM, n0 = blockIdx.x % (N / BN) * BN;
    const int tm = threadIdx.x / (BN / TN), tn = threadIdx.x % (BN / TN);

    float acc[TM][TN] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        stage<BM>(xs, x + m0 * K + k0, K);
        stage<BN>(ws, w + n0 * K + k0, K);
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
                for (int j = 0; j < TN; ++j) acc[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
    // A thread's outputs are strided over the tile, so that neighbouring threads write neighbouring outputs.
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) y[(m0 + tm + i * (BM / TM)) * N + n0 + tn + j * (BN / TN)] = acc[i][j];
}
