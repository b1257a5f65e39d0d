// Quantization of each row to 8 bits: q = clip(rint(x / scale) + zero_point), with the row's own scale or a given one.
//
//   x (M, K) float, half or bfloat16, rows ld elements apart; q (M, K) int8 or uint8 row-major; scale (M,) float,
//   zero_point (M,) int, sums (M,) int (of q) or null.
//
// One pass: the threads of a row hold it in registers between finding its range and dividing, so x is read from memory
// once and only q is written. Short rows share a warp, so that they also share the instructions that a row costs once, a
// longer one is a block's; a row beyond the registers is read a second time, mostly from cache.
//
//   symmetric     scale = absmax / 127, q in [-127, 127], zero point 0
//   asymmetric    lo = min(0, x), hi = max(0, x): scale = hi / 255 - lo / 255, zero_point = rint(-lo / scale), q in
//                 [0, 255]
//   given scale   q is in the same ranges; the zero point is 0; scale is `told`, if that is not null
//
// A scale of a row below the smallest normal float becomes 1 (zeros quantize to zeros). A row with NaN or Inf gets a
// NaN scale and zeros, so that whatever is computed from it is NaN, in that row alone.

#include "common/dependent.cuh"
#include "common/divide.cuh"
#include "common/numeric.cuh"

enum Mode { ASYMMETRIC = 1, RELU = 2 };

constexpr int WARP = 32, LEAST_BLOCK = 128;
constexpr unsigned INFINITE = 0x7f800000u;  // the bits of +Inf; those of NaN are larger

// Elements that travel in one access; VEC of them are 16 bytes, or one.
template <typename T, int VEC> struct alignas(VEC * sizeof(T)) Pack { T at[VEC]; };

// The largest positive and the largest negative value, as the bits of their magnitudes, which order like numbers: Inf
// above all and NaN above Inf. So two integers tell the range and whether anything is not finite.
struct Range { int high, low; };

// Of float: as signed integers positive values order, as unsigned ones negative values by their magnitude.
template <typename T, int VEC> struct Extremes {
    int high = 0;
    unsigned low = 0;

    __device__ __forceinline__ void add(const Pack<T, VEC>& values) {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            high = max(high, __float_as_int(to_float(values.at[e])));
            low = max(low, __float_as_uint(to_float(values.at[e])));
        }
    }
    __device__ __forceinline__ Range range() const {
        return {high, low > 0x80000000u ? static_cast<int>(low & 0x7fffffffu) : 0};
    }
};

// Of 16-bit types in pairs, by the maximum and minimum that let NaN through.
template <typename T> struct Extremes<T, 8> {
    typename Pair<T>::type high = pair_from<T>(0.0f, 0.0f), low = high;

    __device__ __forceinline__ void add(const Pack<T, 8>& values) {
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const auto two = *reinterpret_cast<const typename Pair<T>::type*>(&values.at[e]);
            high = __hmax2_nan(high, two);
            low = __hmin2_nan(low, two);
        }
    }
    __device__ __forceinline__ Range range() const {
        return {max(magnitude(high.x), magnitude(high.y)), max(magnitude(low.x), magnitude(low.y))};
    }
    __device__ __forceinline__ static int magnitude(T v) { return __float_as_int(to_float(v)) & 0x7fffffff; }
};

// The reductions over the THREADS that share a row, for each of them: a part of a warp, a warp, or the block.
template <int THREADS, typename F> __device__ __forceinline__ int warp_reduce(int v, F combine) {
#pragma unroll
    for (int lane = (THREADS < WARP ? THREADS : WARP) / 2; lane > 0; lane /= 2)
        v = combine(v, __shfl_xor_sync(~0u, v, lane));
    return v;
}

template <int THREADS> __device__ __forceinline__ Range row_range(Range mine) {
    const auto larger = [](int a, int b) { return max(a, b); };
    Range all{warp_reduce<THREADS>(mine.high, larger), warp_reduce<THREADS>(mine.low, larger)};
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
    sum = warp_reduce<THREADS>(sum, [](int a, int b) { return a + b; });
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

enum Way { PLAIN, CLIPPED, SHIFTED };  // of the quotients: as they are, clipped, clipped with the zero point added
template <Way WAY> struct Constant { static constexpr Way value = WAY; };

// Divide, round, store; returns the sum of what was stored.
template <Way WAY, typename T, int VEC>
__device__ __forceinline__ int store(const Pack<T, VEC>& values, unsigned char* to, const Divider& by, int zero) {
    unsigned bits[VEC];  // the integers in the low bytes
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
        bits[e] = by.nearest_finite<WAY != PLAIN>(to_float(values.at[e]));
        if (WAY == SHIFTED) bits[e] += zero;
    }
    if constexpr (VEC == 1) {
        *to = bits[0];
        return WAY == SHIFTED ? bits[0] & 255 : static_cast<signed char>(bits[0]);
    } else {
        Pack<unsigned, VEC / 4> words;
        int sum = 0;
#pragma unroll
        for (int j = 0; j < VEC; j += 4) {
            const unsigned low = __byte_perm(bits[j], bits[j + 1], 0x40);
            const unsigned word = __byte_perm(low, __byte_perm(bits[j + 2], bits[j + 3], 0x40), 0x5410);
            words.at[j / 4] = word;
            sum = WAY == SHIFTED ? __dp4a(word, 0x01010101u, static_cast<unsigned>(sum))
                                 : __dp4a(static_cast<int>(word), 0x01010101, sum);
        }
        *reinterpret_cast<Pack<unsigned, VEC / 4>*>(to) = words;
        return sum;
    }
}

template <typename T, int VEC, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS < LEAST_BLOCK ? LEAST_BLOCK : THREADS)
quantize_rows(const T* __restrict__ x, long long ld, const float* __restrict__ given, const float* __restrict__ told,
              unsigned char* __restrict__ q, float* __restrict__ scale, int* __restrict__ zero_point,
              int* __restrict__ sums, long long M, long long K, int mode) {
    constexpr int ROWS = THREADS < LEAST_BLOCK ? LEAST_BLOCK / THREADS : 1;
    constexpr int STEP = THREADS * VEC, SPAN = STEP * ITEMS;
    let_successor_start();
    wait_for_predecessor();
    const int thread = threadIdx.x % THREADS, first = thread * VEC;
    long long m = static_cast<long long>(blockIdx.x) * ROWS + threadIdx.x / THREADS;
    if (ROWS > 1) m = min(m, M - 1);  // threads beyond the last row do it once more
    x += m * ld;
    q += m * K;

    // Of the part of the row that starts at `base` a thread holds packs at first, first + STEP, ..., below `left`.
    Pack<T, VEC> row[ITEMS];
    const auto load = [&](long long base, int left) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            row[i] = {};  // zero is in every range
            if (i * STEP < left) row[i] = *reinterpret_cast<const Pack<T, VEC>*>(x + base + first + i * STEP);
        }
    };

    Extremes<T, VEC> extremes;
#pragma unroll 1
    for (long long base = 0; base < K; base += SPAN) {
        const int left = static_cast<int>(min(K - base, static_cast<long long>(SPAN)));
        load(base, left - first);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (i * STEP < left) extremes.add(row[i]);
    }
    Range range = row_range<THREADS>(extremes.range());
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
        // NaN or Inf as the given scale spoils the row, too
        scale[m] = !finite ? not_a_number() : told ? fmaf(0.0f, s, *told) : s;
        if (mode & ASYMMETRIC) zero_point[m] = zero;
    }

    const int least = mode & ASYMMETRIC ? -zero : mode & RELU ? 0 : -127;
    const int most = mode & ASYMMETRIC ? 255 - zero : 127;
    const Divider by(s, least, most);
    int sum = 0;
    const auto divide = [&](auto way) {
#pragma unroll 1
        for (long long base = 0; base < K; base += SPAN) {
            const int left = static_cast<int>(min(K - base, static_cast<long long>(SPAN))) - first;
            if (K > SPAN) load(base, left);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i)
                if (i * STEP < left)
                    sum += store<decltype(way)::value>(row[i], q + base + first + i * STEP, by, zero);
        }
    };
    if (!finite || by.special) {  // zeros, or whatever a given scale makes of x; the zero point is 0
        const Divider strange(s, mode & ASYMMETRIC ? 0 : -127, most);
#pragma unroll 1
        for (long long k = thread; k < K; k += THREADS) {
            const float v = to_float(x[k]);
            const int value = finite ? strange.nearest(mode & RELU ? relu_of(v) : v) : 0;
            q[k] = value;
            sum += value;
        }
    } else if (mode & ASYMMETRIC) {
        divide(Constant<SHIFTED>());
    } else if (given || mode & RELU) {
        divide(Constant<CLIPPED>());
    } else {
        divide(Constant<PLAIN>());  // of a row's own absmax nothing is beyond 127
    }
    if (sums) {
        sum = row_sum<THREADS>(sum);
        if (thread == 0) sums[m] = sum;
    }
}
