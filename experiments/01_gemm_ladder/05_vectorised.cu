// y = x · wᵀ, vectorised.   x (M, K), w (N, K), y (M, N), float, row-major; M, N, K multiples of the tile, the arrays
// 16-byte aligned.
//
// The new idea: fewer and earlier instructions for the same numbers. Every access moves 16 bytes (float4), in global
// and in shared memory. And there are two buffers: while one slice is multiplied, the next is on its way from global
// memory to registers, and goes to the other buffer; its latency is hidden, and one barrier a slice is enough.

constexpr int BM = 128, BN = 128, BK = 8;
constexpr int TM = 8, TN = 8;
constexpr int THREADS = (BM / TM) * (BN / TN);
static_assert(BM * BK == 4 * THREADS && BN * BK == 4 * THREADS, "a thread moves one float4 of each slice");

// A thread's float4 is part of one row; in shared memory its numbers lie below each other.
template <int ROWS> __device__ void put(float (&tile)[BK][ROWS + 4], float4 v) {
    const int row = threadIdx.x / 2, k = threadIdx.x % 2 * 4;
    tile[k][row] = v.x, tile[k + 1][row] = v.y, tile[k + 2][row] = v.z, tile[k + 3][row] = v.w;
}

// Half of a thread's numbers come from the first half of the tile and half from the second: the 16 float4 that a
// warp's threads read at once are neighbours then, and do not meet in a bank.
template <int ROWS> __device__ void get(float (&values)[8], const float (&tile)[BK][ROWS + 4], int k, int t) {
    const float4 low = *reinterpret_cast<const float4*>(&tile[k][t * 4]);
    const float4 high = *reinterpret_cast<const float4*>(&tile[k][ROWS / 2 + t * 4]);
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

__global__ void __launch_bounds__(THREADS, 2)
vectorised(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y, int M, int N, int K) {
    alignas(16) __shared__ float xs[2][BK][BM + 4];
    alignas(16) __shared__ float ws[2][BK][BN + 4];
    const int m0 = blockIdx.x / (N / BN) * BM, n0 = blockIdx.x % (N / BN) * BN;
    const int tm = threadIdx.x / (BN / TN), tn = threadIdx.x % (BN / TN);
    const float* const my_x = x + (m0 + threadIdx.x / 2) * K + threadIdx.x % 2 * 4;
    const float* const my_w = w + (n0 + threadIdx.x / 2) * K + threadIdx.x % 2 * 4;

    float4 next_x = *reinterpret_cast<const float4*>(my_x);
    float4 next_w = *reinterpret_cast<const float4*>(my_w);
    put<BM>(xs[0], next_x);
    put<BN>(ws[0], next_w);
    __syncthreads();

    float acc[TM][TN] = {};
    for (int k0 = 0, buffer = 0; k0 < K; k0 += BK, buffer ^= 1) {
        const bool more = k0 + BK < K;
        if (more) {
            next_x = *reinterpret_cast<const float4*>(my_x + k0 + BK);
            next_w = *reinterpret_cast<const float4*>(my_w + k0 + BK);
        }
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            float a[TM], b[TN];
            get<BM>(a, xs[buffer], k, tm);
            get<BN>(b, ws[buffer], k, tn);
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) acc[i][j] += a[i] * b[j];
        }
        if (more) {  // the other buffer was last read before the barrier of the previous slice
            put<BM>(xs[buffer ^ 1], next_x);
            put<BN>(ws[buffer ^ 1], next_w);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; j += 4) {
            const int m = m0 + i / 4 * (BM / 2) + tm * 4 + i % 4, n = n0 + j / 4 * (BN / 2) + tn * 4;
            *reinterpret_cast<float4*>(&y[m * N + n]) =
                make_float4(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]);
        }
}
