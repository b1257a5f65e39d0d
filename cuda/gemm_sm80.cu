// y = act(alpha · x · wᵀ + bias) on the tensor cores of Ampere and later, by cp.async, ldmatrix and mma.sync. half or
// bfloat16 in and out, sums in float.
//
//   x (M, K), w (N, K), y (M, N) row-major, bias (N,) or null. X_K / W_K false: that operand lies transposed in
//   memory, (K, M) or (K, N), as the backward products need it. ldx, ldw: distance between lines in elements.
//   Lines of x and w start on 16 bytes and are whole 16-byte chunks long: K % 8 == 0 for a K-major operand, for a
//   transposed one M % 8 == 0 or N % 8 == 0.
//
// common/sm80_tile.cuh has the product and says how it is made fast. The blocks that share a tile, where K is split, leave
// float sums, and a second kernel adds them up in a fixed order. Else a warp turns its tile in shared memory, so that it
// leaves in whole lines of 16 bytes a lane.

#include "common/sm80_tile.cuh"

template <typename T> __device__ __forceinline__ unsigned pack(float low, float high) {
    const auto pair = pair_from<T>(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

template <typename T, bool X_K, bool W_K, int BM, int BN, int BK, int WM, int WN, int STAGES>
__global__ void __launch_bounds__(Config<T, BM, BN, BK, WM, WN, STAGES>::THREADS,
                                  Config<T, BM, BN, BK, WM, WN, STAGES>::BLOCKS)
gemm_sm80(const T* __restrict__ x, long long ldx, const T* __restrict__ w, long long ldw, const T* __restrict__ bias,
          T* __restrict__ y, float* __restrict__ sums, int M, int N, int K, float alpha, int relu, int group,
          int split) {
    using C = Config<T, BM, BN, BK, WM, WN, STAGES>;
    static_assert(BM * BN * 2 <= STAGES * C::STAGE_BYTES, "y leaves through the stages' memory");
    constexpr int CHUNK = C::CHUNK;
    extern __shared__ __align__(128) char shared[];

    const Block<C> block(M, N, K, group, split);
    float acc[WM / 16][WN / 8][4] = {};
    multiply<T, X_K, W_K>(acc, block, x, ldx, w, ldw, M, N, block.end(K), shared_address(shared));

    const int m0 = block.m0, n0 = block.n0, m_warp = block.m_warp, n_warp = block.n_warp;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int g = lane / 4, t = lane % 4;
    if (split > 1) {
        const long long rows = static_cast<long long>(block.part) * M;
#pragma unroll
        for (int i = 0; i < WM / 16; ++i)
#pragma unroll
            for (int j = 0; j < WN / 8; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int m = m0 + m_warp + i * 16 + g + h * 8, n = n0 + n_warp + j * 8 + t * 2;
                    if (m >= M || n >= N) continue;
                    float* const at = sums + (rows + m) * N + n;
                    if (N % 2 == 0) {
                        *reinterpret_cast<float2*>(at) = {acc[i][j][h * 2], acc[i][j][h * 2 + 1]};
                    } else {
                        at[0] = acc[i][j][h * 2];
                        if (n + 1 < N) at[1] = acc[i][j][h * 2 + 1];
                    }
                }
        return;
    }

    // A warp's own part of the stages' memory, once nobody reads or writes those any more.
    copy_wait<0>();
    __syncthreads();
    char* const mine = shared + warp * (WM * WN * 2);
#pragma unroll
    for (int j = 0; j < WN / 8; ++j) {
        const int n = n0 + n_warp + j * 8 + t * 2;
        const float low = bias && n < N ? to_float(bias[n]) : 0.0f;
        const float high = bias && n + 1 < N ? to_float(bias[n + 1]) : 0.0f;
#pragma unroll
        for (int i = 0; i < WM / 16; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float even = fmaf(alpha, acc[i][j][h * 2], low), odd = fmaf(alpha, acc[i][j][h * 2 + 1], high);
                if (relu) even = relu_of(even), odd = relu_of(odd);
                *reinterpret_cast<unsigned*>(mine + swizzled<WN * 2>(i * 16 + g + h * 8, j) + t * 4) =
                    pack<T>(even, odd);
            }
    }
    __syncwarp();
    const bool aligned = N % CHUNK == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;  // every row of y
    constexpr int CHUNKS = WN / CHUNK, ROWS = WARP / CHUNKS;  // rows that a warp stores at once
#pragma unroll
    for (int r = 0; r < WM; r += ROWS) {
        const int row = r + lane / CHUNKS, chunk = lane % CHUNKS;
        const int m = m0 + m_warp + row, n = n0 + n_warp + chunk * CHUNK;
        if (m >= M || n >= N) continue;
        const char* const from = mine + swizzled<WN * 2>(row, chunk);
        T* const at = y + static_cast<long long>(m) * N + n;
        if (aligned) {
            *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(from);
        } else {
#pragma unroll 1
            for (int e = 0; e < min(CHUNK, N - n); ++e) at[e] = reinterpret_cast<const T*>(from)[e];
        }
    }
}

// y = act(alpha · the sum of `split` partial products + bias), always added in the same order.
template <typename T>
__global__ void __launch_bounds__(256)
gemm_sm80_sum(const float* __restrict__ sums, const T* __restrict__ bias, T* __restrict__ y, long long M, int N,
              float alpha, int relu, int split) {
    const long long size = M * N, i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    float sum = 0.0f;
    for (int part = 0; part < split; ++part) sum += sums[part * size + i];
    sum = fmaf(alpha, sum, bias ? to_float(bias[i % N]) : 0.0f);
    y[i] = from_float<T>(relu ? relu_of(sum) : sum);
}
