// y = act(x · (scale · q)ᵀ + bias) for few rows of x (Ampere and later); see common/weight_only.cuh. Blocks that divide K
// leave float sums, and a second kernel adds them up in a fixed order.

#include "common/weight_only.cuh"

template <typename T, int BITS, int BM, int WN, int TILES, int WK, int ROW, int STAGES>
__global__ void __launch_bounds__(Config<BITS, BM, WN, TILES, WK, ROW, STAGES>::THREADS,
                                  Config<BITS, BM, WN, TILES, WK, ROW, STAGES>::BLOCKS)
gemm_weight_only_sm80(const __grid_constant__ Product<T> p, float* __restrict__ sums) {
    using C = Config<BITS, BM, WN, TILES, WK, ROW, STAGES>;
    const int tiles_m = (p.M + BM - 1) / BM, part = blockIdx.x % p.split, tile = blockIdx.x / p.split;
    const int m0 = tile % tiles_m * BM, n0 = tile / tiles_m * C::BN;  // neighbours share the weights
    const float* const mine = tile_sums<T, BITS, BM, WN, TILES, WK, ROW, STAGES>(p, part, m0, n0);
#pragma unroll 1
    for (int at = threadIdx.x; at < BM * C::BN; at += C::THREADS) {
        const int row = at / C::BN, column = at % C::BN, m = m0 + row, n = n0 + column;
        if (m >= p.M || n >= p.N) continue;
        float value = 0.0f;
#pragma unroll
        for (int k = 0; k < WK; ++k) value += mine[(k * BM + row) * C::PITCH + column];
        if (!p.group) value *= p.scale[n];
        const long long out = static_cast<long long>(m) * p.N + n;
        if (p.split > 1) sums[static_cast<long long>(part) * p.M * p.N + out] = value;
        else p.finish(value, out, n);
    }
}

// y = act(the sum of `split` partial products + bias), always added in the same order.
template <typename T>
__global__ void __launch_bounds__(256)
gemm_weight_only_sum(const float* __restrict__ sums, const T* __restrict__ bias, T* __restrict__ y, long long M, int N,
                     int relu, int split) {
    const long long size = M * N, i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    float sum = 0.0f;
    for (int part = 0; part < split; ++part) sum += sums[part * size + i];
    sum += bias ? to_float(bias[i % N]) : 0.0f;
    y[i] = from_float<T>(relu ? relu_of(sum) : sum);
}
