// Weights in int8 or int4 as floats again: out = scale · q, for the dense product to take over where x has many rows.
//
//   q (N, K) int8, or (N, ceil(K / 2)) bytes of which column 2 j is the low half and 2 j + 1 the high one, rows ldw
//   bytes apart; scale (N, groups) float, one for each `group` columns; out (N, K) rows ld apart, ld % 16 == 0, zeros
//   beyond column K.
//
// The idea: a thread has 16 columns of a row, which it reads at once (where rows are aligned) and writes at once.

#include "common/numeric.cuh"

constexpr int COLUMNS = 16;

template <int BITS> struct Packed;  // the integers of 16 columns
template <> struct Packed<8> { using type = uint4; };
template <> struct Packed<4> { using type = uint2; };

template <typename T, int BITS>
__global__ void __launch_bounds__(256)
gemm_weight_only_simt(const signed char* __restrict__ w, long long ldw, int aligned, const float* __restrict__ scale,
                      int groups, int group, T* __restrict__ out, int ld, int N, int K) {
    constexpr int BYTES = COLUMNS * BITS / 8, VECTORS = COLUMNS * sizeof(T) / 16;
    const unsigned chunks = ld / COLUMNS, i = blockIdx.x * blockDim.x + threadIdx.x, n = i / chunks;
    const int k = i % chunks * COLUMNS;
    if (n >= N) return;
    const signed char* const from = w + n * ldw + k * BITS / 8;

    union {
        typename Packed<BITS>::type vector;
        signed char bytes[BYTES];
    } q;
    if (aligned && k + COLUMNS <= K) {
        q.vector = *reinterpret_cast<const typename Packed<BITS>::type*>(from);
    } else {
#pragma unroll
        for (int b = 0; b < BYTES; ++b) q.bytes[b] = k + b * 8 / BITS < K ? from[b] : 0;
    }

    union {
        uint4 vectors[VECTORS];
        T values[COLUMNS];
    } floats;
    const float* next = scale + static_cast<long long>(n) * groups + k / group;
    int edge = (k / group + 1) * group;
    float s = k < K ? *next : 0.0f;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        if (k + c == edge && k + c < K) {
            s = *++next;
            edge += group;
        }
        const int integer = BITS == 8 ? q.bytes[c] : c % 2 ? q.bytes[c / 2] >> 4 : (q.bytes[c / 2] & 15 ^ 8) - 8;
        floats.values[c] = from_float<T>(k + c < K ? s * static_cast<float>(integer) : 0.0f);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
        reinterpret_cast<uint4*>(out + static_cast<long long>(n) * ld + k)[v] = floats.vectors[v];
}
