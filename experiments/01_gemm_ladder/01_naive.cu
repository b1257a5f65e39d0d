// y = x · wᵀ, naive.   x (M, K), w (N, K), y (M, N), float, row-major; M, N multiples of the tile.
//
// A thread computes one output: it walks along a row of x and a row of w and reads two numbers from global memory for
// every multiply-add. Neighbouring threads own neighbouring outputs, hence different rows of w: the 32 addresses of a
// warp's load lie K floats apart, and each fetches a line of its own.

constexpr int BM = 8, BN = 32;  // outputs of a block, one a thread; a warp has 32 of one row

__global__ void __launch_bounds__(BM * BN)
naive(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y, int M, int N, int K) {
    const int m = blockIdx.x / (N / BN) * BM + threadIdx.x / BN;
    const int n = blockIdx.x % (N / BN) * BN + threadIdx.x % BN;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum += x[m * K + k] * w[n * K + k];
    y[m * N + n] = sum;
}
