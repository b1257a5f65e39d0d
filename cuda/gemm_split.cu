// Split floats into two halves for gemm_sm90.cu's PARTS: x = (high + low) · scale, row by row.
//
//   x (R, K) float, rows ld apart; parts (2, R, LD) half: all the high parts, then all the low ones; scale (R,) float.
//
// The idea: a half holds 11 bits, so two hold 22 of a float's 24, and the product of a sum needs three half products,
// each at 15 times the rate of the float units. Halves reach from 2^-24 to 65,504 only, so each row is first scaled by
// the power of two that brings its largest element to [2^14, 2^15): exact, and undone in the epilogue. Elements 2^17
// times smaller than their row's largest begin to lose bits, always below 2^-39 of that largest.
//
// A row with Inf or NaN is not scaled; its low parts are zero where the high ones are not finite.

#include "common/numeric.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
gemm_split(const float* __restrict__ x, long long ld, __half* __restrict__ parts, long long part_ld,
           float* __restrict__ scale, long long R, long long K) {
    const long long r = blockIdx.x;
    const float* row = x + r * ld;
    __half* const high = parts + r * part_ld;
    __half* const low = high + R * part_ld;

    unsigned largest = 0;  // as in quantize_rows.cu: without its sign bit a float orders like an integer
    for (long long k = threadIdx.x; k < K; k += THREADS) largest = max(largest, __float_as_uint(row[k]) & 0x7fffffffu);
    largest = block_max<THREADS>(largest);

    const int exponent = static_cast<int>(largest >> 23) - 127;
    const bool scaled = largest != 0 && largest < 0x7f800000u;
    const int shift = scaled ? min(14 - exponent, 126) : 0;  // 2^126 and 2^-126 are still normal floats
    const float up = __uint_as_float(static_cast<unsigned>(127 + shift) << 23);
    if (threadIdx.x == 0) scale[r] = __uint_as_float(static_cast<unsigned>(127 - shift) << 23);

    for (long long k = threadIdx.x; k < K; k += THREADS) {
        const float v = row[k] * up;
        const __half h = __float2half_rn(v);
        const float rest = v - __half2float(h);
        high[k] = h;
        low[k] = __float2half_rn(isfinite(__half2float(h)) ? rest : 0.0f);
    }
}
