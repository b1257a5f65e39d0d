// The epilogue of 8-bit products in the pipeline of gemm_sm90.cuh. What it computes, and the struct that says with what:
// int8_epilogue.cuh; the sum may be a float (fp8), which has no zero points.
#pragma once
#include "gemm_sm90.cuh"
#include "int8_epilogue.cuh"

template <typename SumT, typename O, int BN, int MI> struct ScaleEpilogue {
    using Sum = SumT;
    using Out = O;
    using Value = typename Int8Value<O>::type;
    static constexpr int COLUMN_BYTES = sizeof(Int8Column);
    static constexpr bool ACCUMULATES = false;
    static constexpr bool HOLDS = is_same<Sum, int>;

    const Int8Epilogue& e;
    int M, N;
    Divider by;
    float2* columns;  // scale and bias of this tile's; two columns are read at once
    int* sums_w;
    float scale_x[MI][2];  // of this thread's rows
    int zero_x[MI][2];

    __device__ __forceinline__ ScaleEpilogue(const Int8Epilogue& e, int M, int N)
        : e(e), M(M), N(N), by(int8_divider<O>(e.scale_y ? *e.scale_y : 1.0f)) {}

    template <class Sync> __device__ __forceinline__ void begin(char* memory, int n0, int thread, Sync sync) {
        columns = reinterpret_cast<float2*>(memory);
        sums_w = reinterpret_cast<int*>(columns + BN);
        sync();  // the previous tile's are no longer read
        for (int i = thread; i < BN; i += WARPGROUP) {
            const Int8Column column(e, min(n0 + i, N - 1));
            columns[i] = make_float2(column.scale, column.bias), sums_w[i] = column.sum;
        }
        sync();
    }

    __device__ __forceinline__ void rows(int m) {
#pragma unroll
        for (int i = 0; i < MI; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Int8Row row(e, min(m + 64 * i + 8 * h, M - 1));
                scale_x[i][h] = row.scale, zero_x[i][h] = row.zero;
            }
        }
    }

    // Take out what zero points put in, all at once: asking at each sum would cost those that have none.
    template <int COUNT> __device__ __forceinline__ void correct(Sum (&acc)[MI][COUNT], int column) {
        if constexpr (is_same<Sum, int>) {
            if (!e.zero_x) return;
#pragma unroll
            for (int at = 0; at < COUNT; ++at) {
                const int sum = sums_w[column + at / 4 * 8 + at % 2];
#pragma unroll
                for (int i = 0; i < MI; ++i) acc[i][at] = int8_corrected(acc[i][at], zero_x[i][at % 4 / 2], sum);
            }
        }
    }

    __device__ __forceinline__ void finish(int i, int h, int, int column, Sum a, Sum b, Value& low, Value& high) {
        if constexpr (is_same<Value, int>) {
            low = e.relu ? max(a, 0) : a;
            high = e.relu ? max(b, 0) : b;
        } else {
            const float4 two = *reinterpret_cast<const float4*>(columns + column);  // column is even
            low = int8_value(a, scale_x[i][h], two.x, two.y, e.relu);
            high = int8_value(b, scale_x[i][h], two.z, two.w, e.relu);
        }
    }

    __device__ __forceinline__ O out(Value v) { return int8_output<O>(v, by); }
    __device__ __forceinline__ typename Pair<O>::type pair(Value low, Value high) {
        if constexpr (sizeof(O) == 2) return pair_from<O>(low, high);
        else return {out(low), out(high)};
    }
};
