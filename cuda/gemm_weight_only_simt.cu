// Weights in int8 or int4 as floats again: out = scale · q, for the dense product to take over where x has many rows.
//
//   q (N, K) int8, or (N, ceil(K / 2)) bytes of which column 2 j is the low half and 2 j + 1 the high one, rows ldw
//   bytes apart; scale (N, groups) float or half, one for each `group` columns; out (N, K) rows ld apart, ld % 8 == 0,
//   zeros beyond column K.
//
// The idea: a thread has 8 columns of a row, which it reads at once (where rows are aligned) and writes at once.

#include "common/weight_only.cuh"

constexpr int COLUMNS = 8;

template <typename T, int BITS>
__global__ void __launch_bounds__(256)
gemm_weight_only_simt(const signed char* __restrict__ w, long long ldw, int aligned, const void* __restrict__ scale,
                      int half_scale, long long groups, long long group, T* __restrict__ out, long long ld,
                      long long N, long long K) {
    constexpr int BYTES = COLUMNS * BITS / 8;
    const long long chunks = ld / COLUMNS, i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= N * chunks) return;
    const long long n = i / chunks, k = i % chunks * COLUMNS;
    const signed char* const from = w + n * ldw + k * BITS / 8;

    union {
        unsigned words[BYTES / 4];
        signed char bytes[BYTES];
    } q;
    if (aligned && k + COLUMNS <= K) {
#pragma unroll
        for (int b = 0; b < BYTES / 4; ++b) q.words[b] = reinterpret_cast<const unsigned*>(from)[b];
    } else {
#pragma unroll
        for (int b = 0; b < BYTES; ++b) q.bytes[b] = k + b * 8 / BITS < K ? from[b] : 0;
    }

    union {
        uint4 vectors[COLUMNS * sizeof(T) / 16];
        T values[COLUMNS];
    } floats;
    auto scale_at = [&](long long i) { return scale_of(scale_bits(scale, half_scale, i), half_scale); };
    long long at = n * groups + k / group, edge = (k / group + 1) * group;
    float s = k < K ? scale_at(at) : 0.0f;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        if (k + c == edge && k + c < K) {
            s = scale_at(++at);
            edge += group;
        }
        const int integer = BITS == 8 ? q.bytes[c] : c % 2 ? q.bytes[c / 2] >> 4 : (q.bytes[c / 2] & 15 ^ 8) - 8;
        floats.values[c] = from_float<T>(k + c < K ? s * static_cast<float>(integer) : 0.0f);
    }
#pragma unroll
    for (int v = 0; v < COLUMNS * static_cast<int>(sizeof(T)) / 16; ++v)
        reinterpret_cast<uint4*>(out + n * ld + k)[v] = floats.vectors[v];
}
