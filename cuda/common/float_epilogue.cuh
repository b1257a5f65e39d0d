// What becomes of a float product's sums before they are stored: y = act(alpha · sum + bias), and the ReLU's mask. For the
// pipelines of gemm_sm90.cu and gemm_single_sm90.cu; what an epilogue has to have: gemm_sm90.cuh.
//
//   mask (M, ceil(N / 64)) 64-bit words: bit n % 64 of word n / 64 says whether y[m][n] > 0. WRITE_MASK writes it;
//   APPLY_MASK reads it, and y is zero where the bit is: the backward of the ReLU that wrote it.
//   PARTS 2: operands in two halves, scaled by x_scale (M,) and w_scale (N,), powers of two.
#pragma once
#include "gemm_sm90.cuh"

// Halves that stand for floats come with a float bias.
template <typename T, int PARTS> struct BiasType { using type = T; };
template <typename T> struct BiasType<T, 2> { using type = float; };
template <typename T, int PARTS> using Bias = typename BiasType<T, PARTS>::type;

enum Mask { NO_MASK, WRITE_MASK, APPLY_MASK };

template <typename T, typename O, int BN, int MASK, int PARTS> struct FloatEpilogue {
    using Sum = float;
    using Value = float;
    using Out = O;
    using B = Bias<T, PARTS>;
    static constexpr int COLUMN_BYTES = sizeof(B);
    static constexpr bool ACCUMULATES = true;
    static constexpr bool HOLDS = MASK == NO_MASK;

    const B* bias;
    unsigned char* mask;
    const float* x_scale;
    const float* w_scale;
    int M, N;
    float alpha, bound;  // ReLU's 0, or no bound
    B* biases;           // of this tile's columns
    int n0;

    template <class Sync> __device__ __forceinline__ void begin(char* columns, int first, int thread, Sync sync) {
        n0 = first;
        biases = reinterpret_cast<B*>(columns);
        if (!bias) return;
        sync();  // the previous tile's biases are no longer read
        fetch(thread, WARPGROUP);
        sync();
    }

    // Put the tile's biases where they are wanted; this is thread `thread` of `threads`.
    __device__ __forceinline__ void fetch(int thread, int threads) {
        for (int i = thread; i < BN; i += threads) biases[i] = n0 + i < N ? bias[n0 + i] : from_float<B>(0.0f);
    }

    __device__ __forceinline__ void rows(int) {}
    template <class Sums> __device__ __forceinline__ void correct(Sums&, int) {}

    __device__ __forceinline__ void finish(int, int, int m, int column, float a, float b, float& low, float& high) {
        low = a, high = b;
        if constexpr (PARTS == 2) {  // powers of two: exact
            const float by_row = m < M ? x_scale[m] : 0.0f;
            low *= by_row * (n0 + column < N ? w_scale[n0 + column] : 0.0f);
            high *= by_row * (n0 + column + 1 < N ? w_scale[n0 + column + 1] : 0.0f);
        }
        low *= alpha, high *= alpha;
        if (bias) {
            low += to_float(biases[column]);
            high += to_float(biases[column + 1]);
        }
        low = max_nan(low, bound), high = max_nan(high, bound);
        if constexpr (MASK != NO_MASK) {
            // The four lanes of a row hold 8 neighbouring columns, which is one byte of the mask.
            const bool inside = m < M && n0 + column < N;
            unsigned char* const at = mask + m * (static_cast<long long>(N + 63) / 64 * 8) + (n0 + column) / 8;
            if constexpr (MASK == APPLY_MASK) {
                const unsigned byte = inside ? *at >> column % 8 : 0;
                if (!(byte & 1)) low = 0.0f;
                if (!(byte & 2)) high = 0.0f;
            } else {
                unsigned byte = (low > 0.0f ? 1u : 0u) << column % 8 | (high > 0.0f ? 2u : 0u) << column % 8;
                byte |= __shfl_xor_sync(~0u, byte, 1);
                byte |= __shfl_xor_sync(~0u, byte, 2);
                if (threadIdx.x % 4 == 0 && inside) *at = byte;
            }
        }
    }

    static __device__ __forceinline__ O out(float v) { return from_float<O>(v); }
    static __device__ __forceinline__ typename Pair<O>::type pair(float low, float high) {
        return pair_from<O>(low, high);
    }
};
