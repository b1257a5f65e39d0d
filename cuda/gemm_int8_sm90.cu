// The int8 product with range-based scaling (common/int8_epilogue.cuh) on Hopper's tensor cores.
//
//   x (M, K) int8 or uint8, w (N, K) int8, y (M, N) of type O, row-major.
//
// The pipeline is that of the float product (common/gemm_sm90.cuh): a stage holds 128 values of K where it held 64, and
// the tensor cores take twice as many a clock. The scaling happens in the registers that hold the sums, so no int32
// tensor is ever written.

#include "common/dependent.cuh"
#include "common/scale_epilogue.cuh"

template <typename T, typename O, int BM, int BN, int CONSUMERS, int STAGES, int CM, int CN, int SPLIT, int PANELS,
          bool PINGPONG>
__global__ void __cluster_dims__(CM * CN * SPLIT, 1, 1)
__launch_bounds__(WARPGROUP * (CONSUMERS + 1), CONSUMERS > 1 || BN > 128 ? 1 : 2)
gemm_int8_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
               const __grid_constant__ TensorMap y_map, O* y, const __grid_constant__ Int8Epilogue e, int M, int N,
               int K, int flags, int group) {
    let_successor_start();
    wait_for_predecessor();
    using Epilogue = ScaleEpilogue<int, O, BN, BM / 64 / (PINGPONG ? 1 : CONSUMERS)>;
    Pipeline<T, true, true, BM, BN, CONSUMERS, STAGES, CM, CN, SPLIT, PANELS, PINGPONG, 1, Epilogue>::run(
        x_map, w_map, y_map, y, M, N, K, flags, group, Epilogue(e, M, N));
}
