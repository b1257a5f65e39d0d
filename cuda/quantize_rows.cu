// Symmetric int8 quantization of each row: scale = absmax / 127, q = rint(x / scale) in [-127, 127].
//
//   x (M, K) row-major float, half or bfloat16; q (M, K) int8; scale (M,) float.
//
// The idea: one block owns one row, so its absmax needs a single reduction in shared memory, and the second pass over
// the row finds it in cache.
//
// A scale below the smallest normal float becomes 1 (an all-zero row quantizes to zeros); a row with NaN or Inf gets
// a NaN scale and zeros, so that whatever is computed from it is NaN, in that row alone.

#include "common/numeric.cuh"

constexpr int THREADS = 256;

template <typename T>
__global__ void __launch_bounds__(THREADS)
quantize_rows(const T* __restrict__ x, signed char* __restrict__ q, float* __restrict__ scale, long long K) {
    const T* row = x + blockIdx.x * K;
    signed char* out = q + blockIdx.x * K;

    // Without its sign bit a float orders like an integer, Inf above every number and NaN above Inf: one integer
    // maximum finds the range and whether anything is not finite.
    unsigned largest = 0;
    for (long long k = threadIdx.x; k < K; k += THREADS)
        largest = max(largest, __float_as_uint(to_float(row[k])) & 0x7fffffffu);
    largest = block_max<THREADS>(largest);

    const bool finite = largest < 0x7f800000u;
    float s = __fdiv_rn(__uint_as_float(largest), 127.0f);
    if (s < 1.17549435e-38f) s = 1.0f;
    if (!finite) s = not_a_number();
    if (threadIdx.x == 0) scale[blockIdx.x] = s;

    for (long long k = threadIdx.x; k < K; k += THREADS) {
        const float v = rintf(__fdiv_rn(to_float(row[k]), s));
        out[k] = finite ? static_cast<signed char>(fminf(fmaxf(v, -127.0f), 127.0f)) : 0;
    }
}
