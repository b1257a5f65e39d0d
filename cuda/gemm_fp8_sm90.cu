// y = act((((x · wᵀ) · scale_x[m]) · scale_w[n]) + bias[n]) of 8-bit floats (e4m3) on Hopper's tensor cores.
//
//   x (M, K), w (N, K) e4m3, y (M, N) of type O, row-major.
//
// The int8 product (gemm_int8_sm90.cu) with another instruction and float sums. The tensor cores add 8-bit floats with
// fewer bits than a float has; what that costs is in the face's docstring.

#include "common/scale_epilogue.cuh"

template <typename O, int BM, int BN, int CONSUMERS, int STAGES, int CM, int CN, int SPLIT, int PANELS, bool PINGPONG>
__global__ void __cluster_dims__(CM * CN * SPLIT, 1, 1)
__launch_bounds__(WARPGROUP * (CONSUMERS + 1), CONSUMERS > 1 || BN > 128 ? 1 : 2)
gemm_fp8_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
              const __grid_constant__ TensorMap y_map, O* y, const __grid_constant__ Int8Epilogue e, int M, int N,
              int K, int flags, int group) {
    using Epilogue = ScaleEpilogue<float, O, BN, BM / 64 / (PINGPONG ? 1 : CONSUMERS)>;
    Pipeline<E4m3, true, true, BM, BN, CONSUMERS, STAGES, CM, CN, SPLIT, PANELS, PINGPONG, 1, Epilogue>::run(
        x_map, w_map, y_map, y, M, N, K, flags, group, Epilogue(e, M, N));
}
