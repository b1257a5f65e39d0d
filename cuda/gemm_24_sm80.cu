// y = act(x · wᵀ + bias) with 2:4 weights on the sparse tensor cores of Ampere and later: half or bfloat16 in, sums in
// float. The product: common/gemm_24_sm80.cuh.
//
//   x (M, K), values (N, K / 2), metadata (N, K / 8 bytes), y (M, N), bias (N,) or null.

#include "common/gemm_24_sm80.cuh"

template <typename T, typename O, int BO, int BB, int WO, int WB, int STAGES>
__global__ void __launch_bounds__(Config24<T, BO, BB, WO, WB, STAGES>::THREADS)
gemm_24_sm80(const T* __restrict__ x, long long ldx, const T* __restrict__ values, long long ldv,
             const unsigned char* __restrict__ metadata, long long lde, const T* __restrict__ bias, O* __restrict__ y,
             int M, int N, int K, int relu, int group) {
    extern __shared__ __align__(128) char shared[];
    const bool whole = N % 8 == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;
    gemm_24_tile<Config24<T, BO, BB, WO, WB, STAGES>, T, float>(
        x, ldx, values, ldv, metadata, lde, M, N, K, group, shared, [&](int m, int n, const float(&sums)[8]) {
            O eight[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float value = bias ? sums[e] + to_float(bias[min(n + e, N - 1)]) : sums[e];
                eight[e] = from_float<O>(relu ? relu_of(value) : value);
            }
            store_eight(y, eight, m, n, N, whole);
        });
}
