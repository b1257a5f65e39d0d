// The gradient of a sparse W (N, K) at its entries only: out[i] = sum over m of dy[m, n_i] * x[m, k_i]. The plain rung:
// a warp a row of W, its lanes share out the batch. dyt (N, M) and xt (K, M) are dy and x turned; out (nnz,) float.

#include "common/spmm.cuh"

constexpr int WARPS = 8;

template <typename T>
__global__ void __launch_bounds__(WARPS * WARP)
sddmm_rows(const T* __restrict__ dyt, const T* __restrict__ xt, const int* __restrict__ cols,
           const int* __restrict__ row_offsets, float* __restrict__ out, long long M, long long N) {
    const long long n = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (n >= N) return;
    const int lane = threadIdx.x % WARP;
    for (int i = row_offsets[n]; i < row_offsets[n + 1]; ++i) {
        float sum[1] = {0.0f};
        for (long long m = lane; m < M; m += WARP)
            sum[0] = fmaf(to_float(dyt[n * M + m]), to_float(xt[cols[i] * M + m]), sum[0]);
        add_lanes(sum, lane);
        if (lane == 0) out[i] = sum[0];
    }
}
