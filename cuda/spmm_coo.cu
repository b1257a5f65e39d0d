// y = act(x · Wᵀ + bias), W (N, K) in COO: values (nnz,), rows (nnz,) int in ascending order, cols (nnz,) int.
// common/spmm_simt.cuh has the layouts and the idea; here a row finds its entries by two binary searches. So no output is
// shared between warps: no atomics, and every run adds in the same order.

#include "common/spmm_simt.cuh"

struct CooRows {
    const int* rows;
    long long nnz;
    __device__ long long first_not_below(long long n) const {
        long long low = 0, high = nnz;
        while (low < high) {
            const long long middle = (low + high) / 2;
            if (rows[middle] < n) low = middle + 1;
            else high = middle;
        }
        return low;
    }
    __device__ Entries operator()(long long n) const { return {first_not_below(n), first_not_below(n + 1)}; }
};

template <typename T>
__global__ void __launch_bounds__(WARPS * WARP)
spmm_coo_small(const T* __restrict__ x, const T* __restrict__ values, const int* __restrict__ cols,
               const int* __restrict__ rows, long long nnz, const T* __restrict__ bias, T* __restrict__ y, long long M,
               long long N, long long K, int relu) {
    spmm_small(x, values, cols, CooRows{rows, nnz}, bias, y, M, N, K, relu);
}

template <typename T>
__global__ void __launch_bounds__(WARPS * WARP)
spmm_coo_large(const T* __restrict__ xt, const T* __restrict__ values, const int* __restrict__ cols,
               const int* __restrict__ rows, long long nnz, const T* __restrict__ bias, T* __restrict__ y, long long M,
               long long N, int relu) {
    spmm_large(xt, values, cols, CooRows{rows, nnz}, bias, y, M, N, relu);
}

template <typename T>
__global__ void __launch_bounds__(WARPS * WARP)
spmm_coo_transpose(const T* __restrict__ x, T* __restrict__ xt, long long M, long long K) {
    transpose(x, xt, M, K);
}
