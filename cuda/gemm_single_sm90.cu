// y = act(alpha · x · wᵀ + bias) of halves where every block has one tile. The pipeline, and what X_K, W_K and the sizes
// mean: common/gemm_single_sm90.cuh.

#include "common/gemm_single_sm90.cuh"

template <typename T, bool X_K, bool W_K, int BM, int BN, int CONSUMERS, int STAGES, int CM, int CN, int SPLIT>
__global__ void __cluster_dims__(CM * CN * SPLIT, 1, 1) __launch_bounds__(WARPGROUP * CONSUMERS + 32, 1)
gemm_single_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                 const T* __restrict__ bias, T* y, int M, int N, int K, float alpha, int flags, int tiles_m,
                 unsigned reciprocal) {
    using Epilogue = FloatEpilogue<T, T, BN, NO_MASK, 1>;
    const Epilogue epilogue{bias, nullptr, nullptr, nullptr, M, N, alpha, flags & RELU ? 0.0f : -infinity()};
    run_single<T, X_K, W_K, BM, BN, CONSUMERS, STAGES, CM, CN, SPLIT>(x_map, w_map, y, M, N, K, flags, tiles_m,
                                                                     reciprocal, epilogue);
}
