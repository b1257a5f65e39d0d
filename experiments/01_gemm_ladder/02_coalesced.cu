// y = x · wᵀ, coalesced.   x (M, K), w (N, K), y (M, N), float, row-major; M, N multiples of the tile, K of 32.
//
// The new idea: a warp, not a thread, computes an output. Its 32 lanes read 32 neighbours along K, of x and of w, so
// that a load is one line of 128 bytes that all lanes share. Each lane sums every 32nd product; at the end the lanes
// add up by shuffles.

constexpr int WARP = 32;
constexpr int BM = 4, BN = 8;  // outputs of a block, one a warp: rows of x and w are shared through the L1 cache

__global__ void __launch_bounds__(BM * BN * WARP)
coalesced(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y, int M, int N, int K) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int m = blockIdx.x / (N / BN) * BM + warp / BN;
    const int n = blockIdx.x % (N / BN) * BN + warp % BN;
    float sum = 0.0f;
    for (int k = lane; k < K; k += WARP) sum += x[m * K + k] * w[n * K + k];
    for (int step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) y[m * N + n] = sum;
}
