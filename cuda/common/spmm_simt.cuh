// y = act(x · Wᵀ + bias) with W (N, K) sparse: the part that the plain CSR and COO kernels share. They differ only in how
// a row of W finds its stored entries [begin, end).
//
//   x (M, K), y (M, N) row-major; values (nnz,) of x's type, col_indices (nnz,) int; sums in float.
//
// Two shapes of work:
//   small batches   a warp owns one output (m, n); its lanes share out the row's entries and add up by shuffles.
//   large batches   x is first transposed to (K, M), so that a warp reads 32 batch rows of one column of x as one
//                   coalesced line; a block owns TILE outputs x TILE batch rows, and turns its tile in shared memory
//                   to write y coalesced too.
#pragma once
#include "spmm.cuh"

struct Entries {
    long long begin, end;
};

constexpr int TILE = 32;
constexpr int WARPS = 8;

template <typename T, typename ROWS>
__device__ void spmm_small(const T* x, const T* values, const int* col_indices, ROWS entries_of, const T* bias, T* y,
                           long long M, long long N, long long K, int relu) {
    const long long output = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (output >= M * N) return;  // whole warps leave together
    const long long m = output / N, n = output % N;
    const int lane = threadIdx.x % WARP;
    const Entries entries = entries_of(n);
    float sum = 0.0f;
    for (long long i = entries.begin + lane; i < entries.end; i += WARP)
        sum = fmaf(to_float(values[i]), to_float(x[m * K + col_indices[i]]), sum);
    for (int step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) finish(&y[m * N + n], sum, bias, n, relu);
}

template <typename T, typename ROWS>
__device__ void spmm_large(const T* xt, const T* values, const int* col_indices, ROWS entries_of, const T* bias, T* y,
                           long long M, long long N, int relu) {
    __shared__ float tile[TILE][TILE + 1];
    const long long tiles_n = (N + TILE - 1) / TILE;
    const long long m0 = blockIdx.x / tiles_n * TILE, n0 = blockIdx.x % tiles_n * TILE;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    for (int r = warp; r < TILE; r += WARPS) {
        float sum = 0.0f;
        if (n0 + r < N && m0 + lane < M) {
            const Entries entries = entries_of(n0 + r);
            for (long long i = entries.begin; i < entries.end; ++i)
                sum = fmaf(to_float(values[i]), to_float(xt[col_indices[i] * M + m0 + lane]), sum);
        }
        tile[r][lane] = sum;
    }
    __syncthreads();
    for (int r = warp; r < TILE; r += WARPS)
        if (m0 + r < M && n0 + lane < N)
            finish(&y[(m0 + r) * N + n0 + lane], tile[lane][r], bias, n0 + lane, relu);
}

// xt (K, M) = xᵀ, a TILE x TILE square a block, turned in shared memory so that reads and writes both coalesce.
template <typename T>
__device__ void transpose(const T* x, T* xt, long long M, long long K) {
    __shared__ T tile[TILE][TILE + 1];
    const long long tiles_k = (K + TILE - 1) / TILE;
    const long long m0 = blockIdx.x / tiles_k * TILE, k0 = blockIdx.x % tiles_k * TILE;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int r = warp; r < TILE; r += WARPS)
        if (m0 + r < M && k0 + lane < K) tile[r][lane] = x[(m0 + r) * K + k0 + lane];
    __syncthreads();
    for (int r = warp; r < TILE; r += WARPS)
        if (k0 + r < K && m0 + lane < M) xt[(k0 + r) * M + m0 + lane] = tile[lane][r];
}
