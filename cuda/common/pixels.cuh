// Images of bytes as operands of the tensor cores: what the train_mlp kernels of one cluster share.
#pragma once
#include "halves.cuh"

// Two of four bytes, chosen by SELECT, as exact halves. In bfloat16, where nothing is subtracted, 0x4300 | p is 128 + p
// and, from 128 on, 2 p.
template <typename T, int SELECT> __device__ __forceinline__ unsigned pixels(unsigned bytes, __half2 zero) {
    if constexpr (is_same<T, __half>) {
        return bits(__hsub2(half2_of(__byte_perm(bytes, 0x64646464, SELECT)), zero));
    } else {
        const unsigned v = __byte_perm(bytes, 0x43434343, SELECT);
        const auto p = *reinterpret_cast<const __nv_bfloat162*>(&v);
        const auto half = __float2bfloat162_rn(0.5f), border = __float2bfloat162_rn(128.0f);
        return bits(__hsub2(p, __hmax2(__hmul2(p, half), border)));
    }
}
