// Scales of weights, stored as float or half: their bits, as soon as they are loaded, and their value, when it is needed.
#pragma once
#include "numeric.cuh"

__device__ __forceinline__ unsigned scale_bits(const void* scale, int half_scale, long long i) {
    return half_scale ? static_cast<const unsigned short*>(scale)[i] : static_cast<const unsigned*>(scale)[i];
}

__device__ __forceinline__ float scale_of(unsigned bits, int half_scale) {
    return half_scale ? to_float(__ushort_as_half(static_cast<unsigned short>(bits))) : __uint_as_float(bits);
}
