// Integers of a few bits as floats, and the products of few rows of x with them: what the kernels of weight-only
// products share.
//
// An integer becomes a float by putting its bits under a suitable exponent, two at a time, and subtracting that
// exponent's value: exact, and about one instruction a weight.
#pragma once
#include "numeric.cuh"

template <typename T> __device__ __forceinline__ unsigned minus(unsigned a, unsigned b) {
    using P = typename Pair<T>::type;
    const P difference = __hsub2(*reinterpret_cast<const P*>(&a), *reinterpret_cast<const P*>(&b));
    return *reinterpret_cast<const unsigned*>(&difference);
}

// (q & mask) ^ exponent. Written out, as the compiler would make two instructions of it.
template <unsigned MASK, unsigned EXPONENT> __device__ __forceinline__ unsigned under_exponent(unsigned q) {
    unsigned r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(q), "n"(MASK), "n"(EXPONENT));
    return r;
}

template <int BITS> struct Words;  // eight weights side by side
template <> struct Words<8> { using type = uint2; };
template <> struct Words<4> { using type = unsigned; };

// Four int8 as (0, 1) and (2, 3). half: 1024 + u is 0x6400 | u for a u below 1024, here the integer plus 128.
template <typename T> __device__ __forceinline__ void unpack_four(unsigned q, unsigned& p0, unsigned& p1);
template <> __device__ __forceinline__ void unpack_four<__half>(unsigned q, unsigned& p0, unsigned& p1) {
    const unsigned u = q ^ 0x80808080u;
    p0 = minus<__half>(__byte_perm(u, 0x64646464u, 0x4140), 0x64806480u);  // 1024 + 128
    p1 = minus<__half>(__byte_perm(u, 0x64646464u, 0x4342), 0x64806480u);
}
// bfloat16 has room for seven bits: 128 + u is 0x4300 | u. The eighth, the sign, is worth -128; and 0x4300 with it is
// 256 where it is set, else 128: just what is to be subtracted.
template <> __device__ __forceinline__ void unpack_four<__nv_bfloat16>(unsigned q, unsigned& p0, unsigned& p1) {
    const unsigned a = __byte_perm(q, 0x43434343u, 0x4140), b = __byte_perm(q, 0x43434343u, 0x4342);
    p0 = minus<__nv_bfloat16>(a & 0xff7fff7fu, a & 0xff80ff80u);
    p1 = minus<__nv_bfloat16>(b & 0xff7fff7fu, b & 0xff80ff80u);
}

// Eight int8 as (0, 1), (2, 3), (4, 5) and (6, 7).
template <typename T> __device__ __forceinline__ void unpack(uint2 q, unsigned (&p)[4]) {
    unpack_four<T>(q.x, p[0], p[1]);
    unpack_four<T>(q.y, p[2], p[3]);
}

// Eight int4 as (0, 4), (1, 5), (2, 6) and (3, 7): the halves of a register are 16 bits apart. Flipping an int4's sign
// bit adds 8, and one exclusive or does that and sets the exponent. half has room for the odd ones where they are, 16
// times as large.
template <typename T> __device__ __forceinline__ void unpack(unsigned q, unsigned (&p)[4]);
template <> __device__ __forceinline__ void unpack<__half>(unsigned q, unsigned (&p)[4]) {
    const __half2 sixteenth = __half2half2(__ushort_as_half(0x2c00)), minus72 = __half2half2(__ushort_as_half(0xd480));
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        p[i] = minus<__half>(under_exponent<0x000f000fu, 0x64086408u>(q), 0x64086408u);  // 1024 + 8
        const unsigned high = under_exponent<0x00f000f0u, 0x64806480u>(q);               // 1024 + 16 (8 + the integer)
        const __half2 pair = __hfma2(*reinterpret_cast<const __half2*>(&high), sixteenth, minus72);
        p[i + 1] = *reinterpret_cast<const unsigned*>(&pair);
        q >>= 8;
    }
}
template <> __device__ __forceinline__ void unpack<__nv_bfloat16>(unsigned q, unsigned (&p)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)  // 128 + 8
        p[i] = minus<__nv_bfloat16>(under_exponent<0x000f000fu, 0x43084308u>(q >> 4 * i), 0x43084308u);
}

// Eight values of x, paired as the weights are.
template <int BITS> __device__ __forceinline__ uint4 paired(uint4 x) {
    if constexpr (BITS == 8) return x;
    return {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
            __byte_perm(x.y, x.w, 0x7632)};
}
