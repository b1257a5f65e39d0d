// The epilogue of 8-bit products in the pipeline of gemm_sm90.cuh. What it computes, and the struct that says with what:
// int8_epilogue.cuh; the sum may be a float (fp8), which has no zero points.
#pragma once
#include "gemm_sm90.cuh"
#include "int8_epilogue.cuh"

template <> struct Pair<int> { using type = int2; };
template <> struct Pair<signed char> { using type = char2; };
template <> struct Pair<unsigned char> { using type = uchar2; };

template <typename SumT, typename O, int BN, int MI> struct ScaleEpilogue {
    using Sum = SumT;
    using Out = O;
    using Value = typename Int8Value<O>::type;
    static constexpr int COLUMN_BYTES = sizeof(Int8Column);
    static constexpr bool ACCUMULATES = false;

    const Int8Epilogue& e;
    int M, N;
    Divider by;
    float* scale_w;  // of this tile's columns
    float* bias;
    int* sums_w;
    float scale_x[MI][2];  // of this thread's rows
    int zero_x[MI][2];

    __device__ __forceinline__ ScaleEpilogue(const Int8Epilogue& e, int M, int N)
        : e(e), M(M), N(N), by(int8_divider<O>(e.scale_y ? *e.scale_y : 1.0f)) {}

    template <class Sync> __device__ __forceinline__ void begin(char* columns, int n0, int thread, Sync sync) {
        scale_w = reinterpret_cast<float*>(columns);
        bias = scale_w + BN;
        sums_w = reinterpret_cast<int*>(bias + BN);
        sync();  // the previous tile's are no longer read
        for (int i = thread; i < BN; i += WARPGROUP) {
            const Int8Column column(e, min(n0 + i, N - 1));
            scale_w[i] = column.scale, bias[i] = column.bias, sums_w[i] = column.sum;
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

    __device__ __forceinline__ Value finish(int i, int h, int column, Sum acc) {
        if constexpr (is_same<Sum, int>) {
            if (e.zero_x) acc = int8_corrected(acc, zero_x[i][h], sums_w[column]);
        }
        if constexpr (is_same<Value, int>) return e.relu ? max(acc, 0) : acc;
        else return int8_value(acc, scale_x[i][h], scale_w[column], bias[column], e.relu);
    }
    __device__ __forceinline__ void finish(int i, int h, int, int column, Sum a, Sum b, Value& low, Value& high) {
        low = finish(i, h, column, a);
        high = finish(i, h, column + 1, b);
    }

    __device__ __forceinline__ O out(Value v) { return int8_output<O>(v, by); }
    __device__ __forceinline__ typename Pair<O>::type pair(Value low, Value high) {
        if constexpr (sizeof(O) == 2) return pair_from<O>(low, high);
        else return {out(low), out(high)};
    }
    __device__ __forceinline__ unsigned pack(Value low, Value high) {  // 16 or 32 bits
        const auto both = pair(low, high);
        if constexpr (sizeof(O) == 1) return *reinterpret_cast<const unsigned short*>(&both);
        else return *reinterpret_cast<const unsigned*>(&both);
    }
};
