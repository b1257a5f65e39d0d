// Floats as one half or as the sum of two, for products on the tensor cores with sums in float: what the train_mlp
// kernels share.
//
// With one of PARTS an operand has 11 bits, as in tf32 (8 where T is bfloat16). With two, x = high + low, it has about
// 22, nearly those of float; a product is high · high + high · low + low · high, and what is left out lies below float's
// last bit.
// Powers of two keep the low halves of weights and gradients out of half's subnormal numbers.
#pragma once
#include "sm80.cuh"

constexpr float W_SCALE = 256.0f, D_SCALE = 1024.0f;

__device__ __forceinline__ unsigned bits(__half2 v) { return *reinterpret_cast<const unsigned*>(&v); }
__device__ __forceinline__ unsigned bits(__nv_bfloat162 v) { return *reinterpret_cast<const unsigned*>(&v); }
__device__ __forceinline__ __half2 half2_of(unsigned v) { return *reinterpret_cast<const __half2*>(&v); }

template <typename T> __device__ __forceinline__ float2 floats_of(unsigned v) {
    if constexpr (is_same<T, __half>) return __half22float2(half2_of(v));
    else return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v));
}

// Two floats as pairs of halves: the nearest, and with two PARTS also the nearest to what is left.
template <int PARTS, typename T = __half>
__device__ __forceinline__ void split(float a, float b, unsigned (&parts)[PARTS]) {
    static_assert(PARTS == 1 || is_same<T, __half>, "two bfloat16 would have fewer bits than float");
    const auto high = pair_from<T>(a, b);
    parts[0] = bits(high);
    if constexpr (PARTS == 2) parts[1] = bits(__floats2half2_rn(a - __low2float(high), b - __high2float(high)));
}

// d += a · b of mma's operands in PARTS.
template <int PARTS, typename T = __half>
__device__ __forceinline__ void multiply_parts(float (&d)[4], const unsigned (&a)[PARTS][4],
                                               const unsigned (&b0)[PARTS], const unsigned (&b1)[PARTS]) {
    mma<T>(d, a[0], b0[0], b1[0]);
    if constexpr (PARTS == 2) {
        mma<__half>(d, a[0], b0[1], b1[1]);
        mma<__half>(d, a[1], b0[0], b1[0]);
    }
}

// The sum over the four lanes that share a row of mma's operands.
__device__ __forceinline__ float quad_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}
