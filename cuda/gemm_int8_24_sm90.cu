// The int8 product with 2:4 weights and range-based scaling (common/int8_epilogue.cuh) on Hopper's sparse tensor cores.
// The pipeline, and what the sizes mean: common/gemm_24_sm90.cuh.
//
//   x (M, K) int8 or uint8 (U), values (N, K / 2) int8, metadata packed by pack_24, y (M, N) of
//   type O.

#include "common/gemm_24_sm90.cuh"
#include "common/int8_epilogue.cuh"

template <typename O, int BB, int MI> struct ScaleEpilogue24 {
    using Sum = int;
    using Out = O;
    using Value = typename Int8Value<O>::type;
    static constexpr int ROW_BYTES = 8;

    const Int8Epilogue& e;
    int M, N;
    Divider by;
    bool activates;
    float* scale_x;  // of this tile's batch rows
    int* zero_x;
    float scale_w[MI][2], bias[MI][2];  // of this thread's outputs
    int sums_w[MI][2];

    __device__ __forceinline__ ScaleEpilogue24(const Int8Epilogue& e, int M, int N)
        : e(e), M(M), N(N), by(int8_divider<O>(e.scale_y ? *e.scale_y : 1.0f)), activates(e.relu) {}

    template <class Sync> __device__ __forceinline__ void begin(char* memory, int m0, int thread, Sync sync) {
        scale_x = reinterpret_cast<float*>(memory);
        zero_x = reinterpret_cast<int*>(scale_x + BB);
        sync();  // the previous tile's are no longer read
        for (int i = thread; i < BB; i += WARPGROUP) {
            const Int8Row row(e, min(m0 + i, M - 1));
            scale_x[i] = row.scale, zero_x[i] = row.zero;
        }
        sync();
    }

    __device__ __forceinline__ void outputs(int n) {
#pragma unroll
        for (int i = 0; i < MI; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Int8Column column(e, min(n + 64 * i + 8 * h, N - 1));
                scale_w[i][h] = column.scale, bias[i][h] = column.bias, sums_w[i][h] = column.sum;
            }
        }
    }

    // Take out what zero points put in, all at once: asking at each sum would cost those that have none.
    template <int COUNT> __device__ __forceinline__ void correct(int (&acc)[MI][COUNT], int row) {
        if (!e.zero_x) return;
#pragma unroll
        for (int at = 0; at < COUNT; ++at) {
            const int zero = zero_x[row + at / 4 * 8 + at % 2];
#pragma unroll
            for (int i = 0; i < MI; ++i) acc[i][at] = int8_corrected(acc[i][at], zero, sums_w[i][at % 4 / 2]);
        }
    }

    __device__ __forceinline__ void finish(int i, int h, int row, int a, int b, Value& low, Value& high) {
        if constexpr (is_same<Value, int>) {
            low = a, high = b;
        } else {
            const float2 two = *reinterpret_cast<const float2*>(scale_x + row);  // row is even
            low = int8_value(a, two.x, scale_w[i][h], bias[i][h], false);
            high = int8_value(b, two.y, scale_w[i][h], bias[i][h], false);
        }
    }

    __device__ __forceinline__ Value activated(int, int, Value v) {
        if constexpr (is_same<Value, int>) return max(v, 0);
        else return relu_of(v);
    }

    __device__ __forceinline__ O out(Value v) { return int8_output<O>(v, by); }
    __device__ __forceinline__ typename Pair<O>::type pair(Value low, Value high) {
        if constexpr (sizeof(O) == 2) return pair_from<O>(low, high);
        else return {out(low), out(high)};
    }
};

template <typename U, typename O, int BO, int BB, int CONSUMERS, int STAGES, int CO, int SPLIT>
__global__ void __cluster_dims__(CO * SPLIT, 1, 1) __launch_bounds__(WARPGROUP * (CONSUMERS + 1), 1)
gemm_int8_24_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                  const char* __restrict__ packed, const __grid_constant__ TensorMap y_map, O* y,
                  const __grid_constant__ Int8Epilogue e, int M, int N, int K, int flags, int group) {
    using Epilogue = ScaleEpilogue24<O, BB, BO / 64 / CONSUMERS>;
    Pipeline24<signed char, U, BO, BB, CONSUMERS, STAGES, CO, SPLIT, Epilogue>::run(
        x_map, w_map, packed, y_map, y, M, N, K, flags, group, Epilogue(e, M, N));
}
