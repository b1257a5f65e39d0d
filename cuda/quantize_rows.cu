// Quantization of each row to 8 bits: q = clip(rint(x / scale) + zero_point), with the row's own scale or a given one.
//
//   x (M, K) float, half or bfloat16, rows ld elements apart; q (M, K) int8 or uint8 row-major; scale (M,) float,
//   zero_point (M,) int, sums (M,) int (of q) or null.
//
// One pass: the threads of a row hold it in registers between finding its range and dividing, so x is read from memory
// once and only q is written. A short row is one warp's, a longer one a block's; a row beyond the registers is read a
// second time, mostly from cache.
//
//   symmetric     scale = absmax / 127, q in [-127, 127], zero point 0
//   asymmetric    lo = min(0, x), hi = max(0, x): scale = hi / 255 - lo / 255, zero_point = rint(-lo / scale), q in
//                 [0, 255]
//   given scale   q is in the same ranges; the zero point is 0
//
// A scale of a row below the smallest normal float becomes 1 (zeros quantize to zeros). A row with NaN or Inf gets a
// NaN scale and zeros, so that whatever is computed from it is NaN, in that row alone.

#include "common/divide.cuh"
#include "common/numeric.cuh"

enum Mode { ASYMMETRIC = 1, RELU = 2 };

constexpr int WARP = 32, LEAST_BLOCK = 128;
constexpr unsigned INFINITE = 0x7f800000u;  // the bits of +Inf; those of NaN are larger

// Elements that travel in one access; VEC of them are 16 bytes, or one.
template <typename T, int VEC> struct alignas(VEC * sizeof(T)) Pack { T at[VEC]; };

// The largest positive and the largest negative value, as the bits of their magnitudes, which order like numbers: Inf
// above all and NaN above Inf. So two integer maxima find the range and whether anything is not finite.
struct Range {
    int high = 0, low = 0;

    __device__ __forceinline__ void add(float v) {
        high = max(high, __float_as_int(v));
        low = max(low, __float_as_int(v) ^ 0x80000000);
    }
};

__device__ __forceinline__ int warp_max(int v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, v);
#else
    for (int lane = WARP / 2; lane > 0; lane /= 2) v = max(v, __shfl_xor_sync(~0u, v, lane));
    return v;
#endif
}

__device__ __forceinline__ int warp_sum(int v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(~0u, v);
#else
    for (int lane = WARP / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(~0u, v, lane);
    return v;
#endif
}

template <int THREADS> __device__ __forceinline__ Range row_range(Range mine) {
    Range all{warp_max(mine.high), warp_max(mine.low)};
    if constexpr (THREADS > WARP) {
        __shared__ Range warps[THREADS / WARP];
        if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = all;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < THREADS / WARP; ++i) {
            all.high = max(all.high, warps[i].high);
            all.low = max(all.low, warps[i].low);
        }
    }
    return all;
}

template <int THREADS> __device__ __forceinline__ int row_sum(int sum) {
    sum = warp_sum(sum);
    if constexpr (THREADS > WARP) {
        __shared__ int warps[THREADS / WARP];
        if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = sum;
        __syncthreads();
        sum = 0;
#pragma unroll
        for (int i = 0; i < THREADS / WARP; ++i) sum += warps[i];
    }
    return sum;
}

template <typename T, int VEC, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS < LEAST_BLOCK ? LEAST_BLOCK : THREADS)
quantize_rows(const T* __restrict__ x, long long ld, const float* __restrict__ given, unsigned char* __restrict__ q,
              float* __restrict__ scale, int* __restrict__ zero_point, int* __restrict__ sums, long long M,
              long long K, int mode) {
    constexpr int ROWS = THREADS < LEAST_BLOCK ? LEAST_BLOCK / THREADS : 1;
    constexpr long long SPAN = THREADS * ITEMS * VEC;
    const int thread = threadIdx.x % THREADS;
    const long long m = static_cast<long long>(blockIdx.x) * ROWS + threadIdx.x / THREADS;
    if (ROWS > 1 && m >= M) return;  // whole warps
    x += m * ld;
    q += m * K;

    Pack<T, VEC> row[ITEMS];
    const auto load = [&](long long base) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const long long k = base + (i * THREADS + thread) * VEC;
            row[i] = {};  // zero is in every range
            if (k < K) row[i] = *reinterpret_cast<const Pack<T, VEC>*>(x + k);
        }
    };

    Range range;
    for (long long base = 0; base < K; base += SPAN) {
        load(base);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (base + i * THREADS * VEC < K)
#pragma unroll
                for (int e = 0; e < VEC; ++e) range.add(to_float(row[i].at[e]));
    }
    range = row_range<THREADS>(range);
    if (mode & RELU && range.low <= INFINITE) range.low = 0;

    const bool finite = max(range.high, range.low) < INFINITE;
    const float high = __int_as_float(range.high), low = __int_as_float(range.low);  // of the magnitudes
    float s = mode & ASYMMETRIC ? __fadd_rn(__fdiv_rn(high, 255.0f), __fdiv_rn(low, 255.0f))
                                : __fdiv_rn(fmaxf(high, low), 127.0f);
    int zero = 0;
    if (given) s = *given;
    else if (s < 1.17549435e-38f) s = 1.0f;
    else if (mode & ASYMMETRIC && finite) zero = min(__float2int_rn(__fdiv_rn(low, s)), 255);
    if (thread == 0) {
        scale[m] = finite ? s : not_a_number();
        if (mode & ASYMMETRIC) zero_point[m] = zero;
    }

    const int least = mode & ASYMMETRIC ? -zero : mode & RELU ? 0 : -127;
    const int most = mode & ASYMMETRIC ? 255 - zero : 127;
    const Divider by(s, least, most);
    int sum = 0;
    if (finite && by.quick) {
        for (long long base = 0; base < K; base += SPAN) {
            if (K > SPAN) load(base);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const long long k = base + (i * THREADS + thread) * VEC;
                if (k >= K) continue;
                int value[VEC];
#pragma unroll
                for (int e = 0; e < VEC; ++e) value[e] = by.nearest_quickly(to_float(row[i].at[e])) + zero;
                if constexpr (VEC == 1) {
                    q[k] = value[0];
                    sum += mode & ASYMMETRIC ? value[0] & 255 : static_cast<signed char>(value[0]);
                } else {
                    Pack<unsigned, VEC / 4> words;
#pragma unroll
                    for (int j = 0; j < VEC / 4; ++j) {
                        const int *v = value + 4 * j;
                        words.at[j] = __byte_perm(__byte_perm(v[0], v[1], 0x40), __byte_perm(v[2], v[3], 0x40), 0x5410);
                        sum = mode & ASYMMETRIC ? __dp4a(words.at[j], 0x01010101u, static_cast<unsigned>(sum))
                                                : __dp4a(static_cast<int>(words.at[j]), 0x01010101, sum);
                    }
                    *reinterpret_cast<Pack<unsigned, VEC / 4>*>(q + k) = words;
                }
            }
        }
    } else {
#pragma unroll 1
        for (long long k = thread; k < K; k += THREADS) {
            const int value = finite ? by.nearest(to_float(x[k])) + zero : 0;
            q[k] = value;
            sum += value;
        }
    }
    if (sums) {
        sum = row_sum<THREADS>(sum);
        if (thread == 0) sums[m] = sum;
    }
}
