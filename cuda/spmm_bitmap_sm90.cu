// The same as spmm_bitmap_sm80.cu for Hopper: the blocks that divide K are a cluster and add up through distributed shared
// memory, in a fixed order, within the one launch.

#include "common/sm90.cuh"
#include "common/spmm_bitmap.cuh"

template <typename T, typename O, int BATCH>
__global__ void __launch_bounds__(BATCH == 64 ? 256 : 512, 1)
spmm_bitmap_sm90(const T* __restrict__ x, long long ldx, const T* __restrict__ values,
                 const unsigned* __restrict__ masks, const int* __restrict__ offsets, const T* __restrict__ bias,
                 O* __restrict__ y, int M, int N, int K, int relu, int share, int segments, int split) {
    extern __shared__ __align__(128) char shared[];
    const FewRows<T, BATCH> block(N, K, share, segments, split);
    block.run(x, ldx, values, masks, offsets, M, N, K, share, shared);
    cluster_sync();
    const int quads = block.width / 4;  // of outputs in a row
    for (int i = block.part * blockDim.x + threadIdx.x; i < BATCH * quads; i += split * blockDim.x) {
        const int row = i / quads, column = i % quads * 4, m = block.m0 + row, n = block.n0 + column;
        if (m >= M || n >= N) continue;
        const auto* const mine = reinterpret_cast<const uint4*>(shared + (row * block.sums_pitch() + column) * 4);
        float sum[4] = {};
#pragma unroll 8
        for (int rank = 0; rank < split; ++rank) {
            const uint4 part = cluster_load(mine, rank);
            sum[0] += __uint_as_float(part.x), sum[1] += __uint_as_float(part.y);
            sum[2] += __uint_as_float(part.z), sum[3] += __uint_as_float(part.w);
        }
        O* const at = y + static_cast<long long>(m) * N + n;
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (n + e < N) at[e] = finished<T, O>(sum[e], bias, n + e, relu);
    }
    // No block leaves while another may still read its sums. Nothing was written that others read: no fence.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
