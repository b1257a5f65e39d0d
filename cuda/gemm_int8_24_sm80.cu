// The int8 product with 2:4 weights and range-based scaling (common/int8_epilogue.cuh) on the sparse tensor cores of
// Ampere and later. The product: common/gemm_24_sm80.cuh.
//
//   x (M, K) int8 or uint8 (U), values (N, K / 2) int8, metadata (N, K / 8 bytes), y (M, N) of any type but long long.

#include "common/gemm_24_sm80.cuh"
#include "common/int8_epilogue.cuh"

template <typename U, int BO, int BB, int WO, int WB, int STAGES>
__global__ void __launch_bounds__(Config24<signed char, BO, BB, WO, WB, STAGES>::THREADS)
gemm_int8_24_sm80(const U* __restrict__ x, long long ldx, const signed char* __restrict__ values, long long ldv,
                  const unsigned char* __restrict__ metadata, long long lde, char* __restrict__ y,
                  const Int8Epilogue epilogue, int M, int N, int K, int group) {
    extern __shared__ __align__(128) char shared[];
    const bool whole = N % 8 == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;
    const float scale_y = epilogue.scale_y ? *epilogue.scale_y : 1.0f;
    gemm_24_tile<Config24<signed char, BO, BB, WO, WB, STAGES>, U, int>(
        x, ldx, values, ldv, metadata, lde, M, N, K, group, shared, [&](int m, int n, const int(&sums)[8]) {
            const Int8Row row(epilogue, m);
            with_output(epilogue.out, [&](auto type) {
                using O = decltype(type);
                const Divider by = int8_divider<O>(scale_y);
                O eight[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const Int8Column column(epilogue, min(n + e, N - 1));
                    eight[e] = int8_finish<O>(sums[e], row, column, epilogue.relu, by);
                }
                store_eight(reinterpret_cast<O*>(y), eight, m, n, N, whole);
            });
        });
}
