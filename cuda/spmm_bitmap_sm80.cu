// y = act(x · wᵀ + bias) for few rows of x and w in bitmap tiles, on the tensor cores of Ampere and later.
//
//   x (M, K) half or bfloat16, rows ldx apart, on 16 bytes; values, masks, offsets: bitmap tiles of w (N, K); bias (N,) or
//   null; y (M, N) row-major, of x's type or float.
//
// common/spmm_bitmap.cuh has the product. Where `split` blocks divide K they leave float sums, and a second kernel adds
// them up in a fixed order.

#include "common/spmm_bitmap.cuh"

template <typename T, typename O, int BATCH>
__global__ void __launch_bounds__(BATCH == 64 ? 256 : 512, 1)
spmm_bitmap_sm80(const T* __restrict__ x, long long ldx, const T* __restrict__ values,
                 const unsigned* __restrict__ masks, const int* __restrict__ offsets, const T* __restrict__ bias,
                 O* __restrict__ y, float* __restrict__ sums, int M, int N, int K, int relu, int share, int segments, int split) {
    extern __shared__ __align__(128) char shared[];
    const FewRows<T, BATCH> block(N, K, share, segments, split);
    block.run(x, ldx, values, masks, offsets, M, N, K, share, shared);
    for (int i = threadIdx.x; i < BATCH * block.width; i += blockDim.x) {
        const int row = i / block.width, m = block.m0 + row, n = block.n0 + i % block.width;
        if (m >= M || n >= N) continue;
        const float sum = reinterpret_cast<const float*>(shared)[row * block.sums_pitch() + i % block.width];
        if (split > 1) sums[(static_cast<long long>(block.part) * M + m) * N + n] = sum;
        else y[static_cast<long long>(m) * N + n] = finished<T, O>(sum, bias, n, relu);
    }
}

// y = act(the sum of `split` partial products + bias), always added in the same order.
template <typename T, typename O>
__global__ void __launch_bounds__(256)
spmm_bitmap_sum(const float* __restrict__ sums, const T* __restrict__ bias, O* __restrict__ y, long long M, int N,
                int relu, int split) {
    const long long size = M * N, i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    float sum = 0.0f;
    for (int part = 0; part < split; ++part) sum += sums[part * size + i];
    y[i] = finished<T, O>(sum, bias, static_cast<int>(i % N), relu);
}
