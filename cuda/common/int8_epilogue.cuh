// What the integer sums of an int8 product become on their way out, one output at a time, the same in every tier:
//
//   acc' = acc - zero_x[m] * sums_w[n]                         exact integers
//   y    = act((((float)acc' * scale_x[m]) * scale_w[n]) + bias[n])
//   q    = clip(rint(y / scale_y))                             where y leaves as int8 again
//
// Every float operation is rounded (no fused multiply-add), so a CPU that does the same steps gets the same bits.
#pragma once
#include "divide.cuh"
#include "numeric.cuh"

enum Int8Out { OUT_FLOAT, OUT_HALF, OUT_BFLOAT, OUT_INT, OUT_LONG, OUT_INT8, OUT_UINT8 };

// One kernel parameter. A null pointer stands for scale 1, zero point 0, no bias; a step is 1 where there is a value
// for each row or column, 0 where one serves all.
struct Int8Epilogue {
    const float *scale_x, *scale_w, *bias, *scale_y;
    const int *zero_x, *sums_w;
    int step_x, step_w, step_zero, relu, out, unused;
};
static_assert(sizeof(Int8Epilogue) == 72, "the Python side packs 72 bytes");

struct Int8Row {
    float scale;
    int zero;

    __device__ __forceinline__ Int8Row(const Int8Epilogue& e, long long m)
        : scale(e.scale_x ? e.scale_x[m * e.step_x] : 1.0f), zero(e.zero_x ? e.zero_x[m * e.step_zero] : 0) {}
};

struct Int8Column {
    float scale, bias;
    int sum;

    __device__ __forceinline__ Int8Column(const Int8Epilogue& e, long long n)
        : scale(e.scale_w ? e.scale_w[n * e.step_w] : 1.0f),
          bias(e.bias ? e.bias[n] : -0.0f),  // y + -0 is y
          sum(e.zero_x ? e.sums_w[n] : 0) {}
};

// The sum without what the zero points put into it. ACC is int where no such sum can leave it, else long long.
template <typename ACC> __device__ __forceinline__ ACC int8_corrected(ACC acc, int zero, int sum) {
    return acc - static_cast<ACC>(zero) * sum;
}

template <typename ACC>
__device__ __forceinline__ float int8_value(ACC acc, float scale_x, float scale_w, float bias, bool relu) {
    const float value = __fadd_rn(__fmul_rn(__fmul_rn(static_cast<float>(acc), scale_x), scale_w), bias);
    return relu ? relu_of(value) : value;
}

// What an output of type O is made of: the exact sum for integers, else the float value.
template <typename O, typename ACC = int> struct Int8Value { using type = float; };
template <typename ACC> struct Int8Value<int, ACC> { using type = ACC; };
template <typename ACC> struct Int8Value<long long, ACC> { using type = ACC; };

// Division by scale_y, for 8-bit outputs; any divider, for others.
template <typename O> __device__ __forceinline__ Divider int8_divider(float scale_y) {
    return Divider(scale_y, is_same<O, signed char> ? -127 : 0, is_same<O, signed char> ? 127 : 255);
}

// The value as an output of type O; 8 bits hold no NaN, which becomes 0.
template <typename O, typename V> __device__ __forceinline__ O int8_output(V value, const Divider& by) {
    if constexpr (is_same<O, signed char> || is_same<O, unsigned char>)
        return static_cast<O>(by.nearest(value));
    else if constexpr (is_same<O, int> || is_same<O, long long>)
        return static_cast<O>(value);
    else
        return from_float<O>(value);
}

// All of it: from the sum to an output of type O.
template <typename O, typename ACC>
__device__ __forceinline__ O int8_finish(ACC acc, Int8Row row, Int8Column column, bool relu, const Divider& by) {
    acc = int8_corrected(acc, row.zero, column.sum);
    if constexpr (is_same<typename Int8Value<O, ACC>::type, ACC>)
        return int8_output<O>(relu && acc < 0 ? 0 : acc, by);
    else
        return int8_output<O>(int8_value(acc, row.scale, column.scale, column.bias, relu), by);
}

// f(O()) for the output type O that `out` names, so that one kernel serves them all.
template <typename F> __device__ __forceinline__ void with_output(int out, F f) {
    switch (out) {
        case OUT_FLOAT: return f(float());
        case OUT_HALF: return f(__half());
        case OUT_BFLOAT: return f(__nv_bfloat16());
        case OUT_INT: return f(int());
        case OUT_LONG: return f((long long)0);
        case OUT_INT8: return f((signed char)0);
        case OUT_UINT8: return f((unsigned char)0);
    }
}
