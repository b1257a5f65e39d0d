// y = act(alpha · x · wᵀ + bias) on Hopper's tensor cores. half, bfloat16 or tf32 (float that the copy engine rounds to
// 11 bits) in, sums in float. The pipeline, and what X_K, W_K and the sizes mean: common/gemm_sm90.cuh.
//
//   x (M, K), w (N, K), y (M, N), bias (N,) or null.
//   mask, x_scale, w_scale, and what MASK and PARTS mean: common/float_epilogue.cuh.

#include "common/float_epilogue.cuh"

template <typename T, typename O, bool X_K, bool W_K, int BM, int BN, int CONSUMERS, int STAGES, int CM, int CN,
          int SPLIT, int PANELS, bool PINGPONG, int MASK, int PARTS>
__global__ void __cluster_dims__(CM * CN * SPLIT, 1, 1)
__launch_bounds__(WARPGROUP * (CONSUMERS + 1), CONSUMERS > 1 || BN > 128 ? 1 : 2)
gemm_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
          const __grid_constant__ TensorMap y_map, const Bias<T, PARTS>* __restrict__ bias, O* y, unsigned char* mask,
          const float* __restrict__ x_scale, const float* __restrict__ w_scale, int M, int N, int K, float alpha,
          int flags, int group) {
    using Epilogue = FloatEpilogue<T, O, BN, MASK, PARTS>;
    Epilogue epilogue{bias, mask, x_scale, w_scale, M, N, alpha, flags & RELU ? 0.0f : -infinity()};
    Pipeline<T, X_K, W_K, BM, BN, CONSUMERS, STAGES, CM, CN, SPLIT, PANELS, PINGPONG, PARTS, Epilogue>::run(
        x_map, w_map, y_map, y, M, N, K, flags, group, epilogue);
}
