// The ends of a product on dense tensor cores: W (N, K) from CSR to dense, and the outputs that a dense product gets wrong.
//
//   values (nnz,), cols (nnz,) int or unsigned short, row_offsets (N + 1,); w (N, stride), rows of whole 16 bytes;
//   x (M, K) in any strides, y (M, N) row-major.
//
// A structural zero contributes nothing, but in a dense W it makes NaN of NaN and Inf in x. Whatever a dense product gets
// wrong that way is NaN, so `repair` looks for NaN among the outputs and computes those again, entry by entry. And where
// a column repeats within a row, `expand` writes NaN: then all outputs of that row are computed again.

#include "common/numeric.cuh"

constexpr int WARP = 32;
constexpr int WARPS = 4;
template <typename T> constexpr int WINDOW = 8192 / static_cast<int>(sizeof(T));  // columns that a warp expands at once
template <typename T> constexpr int VECTOR = 16 / static_cast<int>(sizeof(T));
constexpr int REPAIR_BLOCK = 256;

template <typename T, typename I>
__global__ void __launch_bounds__(WARPS * WARP)
spmm_csr_expand(const T* __restrict__ values, const I* __restrict__ cols, const int* __restrict__ row_offsets,
                T* __restrict__ w, long long N, long long K, long long stride) {
    __shared__ __align__(16) T windows[WARPS][WINDOW<T>];
    __shared__ unsigned seen[WARPS][WINDOW<T> / 32];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long n = static_cast<long long>(blockIdx.x) * WARPS + warp;
    if (n >= N) return;
    T* const window = windows[warp];
    const int begin = row_offsets[n], end = row_offsets[n + 1];
    for (long long k0 = 0; k0 < K; k0 += WINDOW<T>) {
        const int width = static_cast<int>(min(static_cast<long long>(WINDOW<T>), stride - k0));
        for (int i = lane; i < width / VECTOR<T>; i += WARP) reinterpret_cast<uint4*>(window)[i] = make_uint4(0, 0, 0, 0);
        for (int i = lane; i < WINDOW<T> / 32; i += WARP) seen[warp][i] = 0;
        __syncwarp();
        bool repeats = false;
        for (int i = begin + lane; i < end; i += WARP) {
            const long long k = static_cast<long long>(cols[i]) - k0;
            if (k < 0 || k >= width) continue;
            window[k] = values[i];
            repeats |= atomicOr(&seen[warp][k / 32], 1u << k % 32) >> k % 32 & 1;
        }
        __syncwarp();
        if (__any_sync(~0u, repeats)) {
            if (lane == 0) window[0] = from_float<T>(not_a_number());
            __syncwarp();
        }
        for (int i = lane; i < width / VECTOR<T>; i += WARP)
            *reinterpret_cast<uint4*>(&w[n * stride + k0 + i * VECTOR<T>]) = reinterpret_cast<const uint4*>(window)[i];
        __syncwarp();
    }
}

template <typename T, typename I>
__global__ void __launch_bounds__(REPAIR_BLOCK)
spmm_csr_repair(T* __restrict__ y, const T* __restrict__ x, long long x_m, long long x_k, const T* __restrict__ values,
                const I* __restrict__ cols, const int* __restrict__ row_offsets, const T* __restrict__ bias, long long M,
                long long N, int relu) {
    const int lane = threadIdx.x % WARP;
    const long long all = M * N, step = static_cast<long long>(gridDim.x) * REPAIR_BLOCK * VECTOR<T>;
    const long long first = (static_cast<long long>(blockIdx.x) * REPAIR_BLOCK + threadIdx.x) * VECTOR<T>;
    for (long long at = first; at - lane * VECTOR<T> < all; at += step) {  // a warp stays together
        union { uint4 vector; T parts[VECTOR<T>]; } part;
        part.vector = make_uint4(0, 0, 0, 0);
        if (at + VECTOR<T> <= all) part.vector = *reinterpret_cast<const uint4*>(y + at);
        else
            for (int i = 0; i < VECTOR<T>; ++i)
                if (at + i < all) part.parts[i] = y[at + i];
        unsigned wrong = 0;
#pragma unroll
        for (int i = 0; i < VECTOR<T>; ++i) {
            const float v = to_float(part.parts[i]);
            wrong |= static_cast<unsigned>(v != v) << i;
        }
        for (unsigned lanes = __ballot_sync(~0u, wrong); lanes; lanes &= lanes - 1) {
            const int holder = __ffs(lanes) - 1;
            for (unsigned left = __shfl_sync(~0u, wrong, holder); left; left &= left - 1) {
                const long long output = at + (holder - lane) * VECTOR<T> + __ffs(left) - 1;
                const long long m = output / N, n = output % N;
                float sum = 0.0f;
                for (int i = row_offsets[n] + lane; i < row_offsets[n + 1]; i += WARP)
                    sum = fmaf(to_float(values[i]), to_float(x[m * x_m + static_cast<long long>(cols[i]) * x_k]), sum);
                for (int half = WARP / 2; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
                if (bias) sum += to_float(bias[n]);
                if (lane == 0) y[output] = from_float<T>(relu ? relu_of(sum) : sum);
            }
        }
    }
}
