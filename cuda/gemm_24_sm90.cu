// y = act(x · wᵀ + bias) with 2:4 weights on Hopper's sparse tensor cores: half or bfloat16 in, sums in float. The
// pipeline, and what the sizes mean: common/gemm_24_sm90.cuh.
//
//   x (M, K), values (N, K / 2), metadata packed by pack_24, y (M, N), bias (N,) or null.

#include "common/gemm_24_sm90.cuh"

template <typename T, typename OutT, int MI> struct FloatEpilogue24 {
    using Sum = float;
    using Value = float;
    using Out = OutT;
    static constexpr int ROW_BYTES = 0;

    const T* bias;
    int N;
    float bound;  // ReLU's 0, or no bound
    bool activates;
    float biases[MI][2];  // of this thread's outputs

    template <class Sync> __device__ __forceinline__ void begin(char*, int, int, Sync) {}

    __device__ __forceinline__ void outputs(int n) {
#pragma unroll
        for (int i = 0; i < MI; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                biases[i][h] = bias ? to_float(bias[min(n + 64 * i + 8 * h, N - 1)]) : -0.0f;  // y + -0 is y
        }
    }

    template <class Sums> __device__ __forceinline__ void correct(Sums&, int) {}

    __device__ __forceinline__ void finish(int, int, int, float a, float b, float& low, float& high) {
        low = a, high = b;
    }

    __device__ __forceinline__ float activated(int i, int h, float v) { return max_nan(v + biases[i][h], bound); }

    __device__ __forceinline__ Out out(float v) { return from_float<Out>(v); }
    __device__ __forceinline__ typename Pair<Out>::type pair(float low, float high) {
        return pair_from<Out>(low, high);
    }
};

template <typename T, typename O, int BO, int BB, int CONSUMERS, int STAGES, int CO, int SPLIT>
__global__ void __cluster_dims__(CO * SPLIT, 1, 1) __launch_bounds__(WARPGROUP * (CONSUMERS + 1), 1)
gemm_24_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
             const char* __restrict__ packed, const __grid_constant__ TensorMap y_map,
             const T* __restrict__ bias, O* y, int M, int N, int K, int flags, int group) {
    using Epilogue = FloatEpilogue24<T, O, BO / 64 / CONSUMERS>;
    Epilogue epilogue{bias, N, flags & RELU ? 0.0f : -infinity(), bias || flags & RELU};
    Pipeline24<T, T, BO, BB, CONSUMERS, STAGES, CO, SPLIT, Epilogue>::run(
        x_map, w_map, packed, y_map, y, M, N, K, flags, group, epilogue);
}
