// Conversions between the storage types and float, and the activation, with one meaning for every kernel.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename A, typename B> constexpr bool is_same = false;  // NVRTC has no <type_traits>
template <typename A> constexpr bool is_same<A, A> = true;

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float<float>(float v) { return v; }
template <> __device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
    return __float2bfloat16_rn(v);
}

// Two neighbouring values, for stores twice as wide.
template <typename T> struct Pair;
template <> struct Pair<float> { using type = float2; };
template <> struct Pair<__half> { using type = __half2; };
template <> struct Pair<__nv_bfloat16> { using type = __nv_bfloat162; };
template <> struct Pair<int> { using type = int2; };
template <> struct Pair<signed char> { using type = char2; };
template <> struct Pair<unsigned char> { using type = uchar2; };

template <typename T> __device__ __forceinline__ typename Pair<T>::type pair_from(float low, float high);
template <> __device__ __forceinline__ float2 pair_from<float>(float low, float high) { return {low, high}; }
template <> __device__ __forceinline__ __half2 pair_from<__half>(float low, float high) {
    return __floats2half2_rn(low, high);
}
template <> __device__ __forceinline__ __nv_bfloat162 pair_from<__nv_bfloat16>(float low, float high) {
    return __floats2bfloat162_rn(low, high);
}

// A value's bits, and back, where memory knows no types.
__device__ __forceinline__ unsigned bits_of(float v) { return __float_as_uint(v); }
__device__ __forceinline__ unsigned bits_of(int v) { return static_cast<unsigned>(v); }
template <typename T> __device__ __forceinline__ T of_bits(unsigned v);
template <> __device__ __forceinline__ float of_bits<float>(unsigned v) { return __uint_as_float(v); }
template <> __device__ __forceinline__ int of_bits<int>(unsigned v) { return static_cast<int>(v); }

// Written with < so that NaN stays NaN, as in PyTorch.
__device__ __forceinline__ float relu_of(float v) { return v < 0.0f ? 0.0f : v; }

// NVRTC has no <cmath>, hence no INFINITY and NAN.
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

// The maximum over all threads of a block, for each of them.
template <int THREADS> __device__ __forceinline__ unsigned block_max(unsigned value) {
    for (int lane = 16; lane > 0; lane /= 2) value = max(value, __shfl_xor_sync(~0u, value, lane));
    __shared__ unsigned warps[THREADS / 32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; ++i) value = max(value, warps[i]);
    return value;
}
