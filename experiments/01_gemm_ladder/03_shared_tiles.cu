// y = x · wᵀ, tiles in shared memory.   x (M, K), w (N, K), y (M, N), float, row-major; M, N, K multiples of the tile.
//
// The new idea: a block owns a BM x BN tile of y. It walks along K in slices of BK, and first copies its slices of x
// and w to shared memory, coalesced. What was fetched once from global memory now serves 32 threads. A thread computes
// one output again.

constexpr int BM = 32, BN = 32, BK = 32;
constexpr int THREADS = BM * BN;
static_assert(BK == BM && BK == BN, "every thread copies one element of each slice");

__global__ void __launch_bounds__(THREADS)
shared_tiles(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y, int M, int N, int K) {
    __shared__ float xs[BM][BK];
    __shared__ float ws[BN][BK + 1];  // the lanes of a warp read down a column: 33 apart, they hit 32 different banks
    const int m0 = blockIdx.x / (N / BN) * BM, n0 = blockIdx.x % (N / BN) * BN;
    const int row = threadIdx.x / BN, column = threadIdx.x % BN;
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += BK) {
        xs[row][column] = x[(m0 + row) * K + k0 + column];
        ws[row][column] = w[(n0 + row) * K + k0 + column];
        __syncthreads();  // the slices are there
#pragma unroll
        for (int k = 0; k < BK; ++k) sum += xs[row][k] * ws[column][k];
        __syncthreads();  // nobody reads them any more
    }
    y[(m0 + row) * N + n0 + column] = sum;
}
