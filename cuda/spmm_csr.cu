// y = act(x · Wᵀ + bias), W (N, K) in CSR: values (nnz,), col_indices (nnz,) int, row_offsets (N + 1,) int.
// common/spmm_simt.cuh has the layouts and the idea; here a row's entries lie between two neighbouring offsets.

#include "common/spmm_simt.cuh"

struct CsrRows {
    const int* row_offsets;
    __device__ Entries operator()(long long n) const { return {row_offsets[n], row_offsets[n + 1]}; }
};

template <typename T>
__global__ void __launch_bounds__(WARPS * WARP)
spmm_csr_small(const T* __restrict__ x, const T* __restrict__ values, const int* __restrict__ col_indices,
               const int* __restrict__ row_offsets, const T* __restrict__ bias, T* __restrict__ y, long long M,
               long long N, long long K, int relu) {
    spmm_small(x, values, col_indices, CsrRows{row_offsets}, bias, y, M, N, K, relu);
}

template <typename T>
__global__ void __launch_bounds__(WARPS * WARP)
spmm_csr_large(const T* __restrict__ xt, const T* __restrict__ values, const int* __restrict__ col_indices,
               const int* __restrict__ row_offsets, const T* __restrict__ bias, T* __restrict__ y, long long M,
               long long N, int relu) {
    spmm_large(xt, values, col_indices, CsrRows{row_offsets}, bias, y, M, N, relu);
}

template <typename T>
__global__ void __launch_bounds__(WARPS * WARP)
spmm_csr_transpose(const T* __restrict__ x, T* __restrict__ xt, long long M, long long K) {
    transpose(x, xt, M, K);
}
