// y = act(x · (scale · q)ᵀ + bias) for few rows of x on Hopper; see common/weight_only.cuh. The blocks that divide K are a
// cluster and add up their sums through distributed shared memory, in a fixed order: no second kernel, and no memory in
// between.

#include "common/sm90.cuh"
#include "common/weight_only.cuh"

__device__ __forceinline__ float cluster_load(const float* p, unsigned rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(cluster_address(p, rank)) : "memory");
    return v;
}

template <typename T, int BITS, int BM, int WN, int TILES, int WK, int ROW, int STAGES>
__global__ void __launch_bounds__(Config<BITS, BM, WN, TILES, WK, ROW, STAGES>::THREADS,
                                  Config<BITS, BM, WN, TILES, WK, ROW, STAGES>::BLOCKS)
gemm_weight_only_sm90(const __grid_constant__ Product<T> p) {
    using C = Config<BITS, BM, WN, TILES, WK, ROW, STAGES>;
    const int tiles_m = (p.M + BM - 1) / BM, part = blockIdx.x % p.split, tile = blockIdx.x / p.split;
    const int m0 = tile % tiles_m * BM, n0 = tile / tiles_m * C::BN;  // neighbours share the weights
    const float* const mine = tile_sums<T, BITS, BM, WN, TILES, WK, ROW, STAGES>(p, part, m0, n0);
    if (p.split > 1) cluster_sync();
    // The blocks of the cluster share out the tile's elements.
#pragma unroll 1
    for (int at = part * C::THREADS + threadIdx.x; at < BM * C::BN; at += p.split * C::THREADS) {
        const int row = at / C::BN, column = at % C::BN, m = m0 + row, n = n0 + column;
        if (m >= p.M || n >= p.N) continue;
        float value = 0.0f;
#pragma unroll 4
        for (int other = 0; other < p.split; ++other)
#pragma unroll
            for (int k = 0; k < WK; ++k) {
                const float* const sum = mine + (k * BM + row) * C::PITCH + column;
                value += p.split > 1 ? cluster_load(sum, other) : *sum;
            }
        if (!p.group) value *= p.scale[n];
        p.finish(value, static_cast<long long>(m) * p.N + n, n);
    }
    if (p.split > 1) cluster_sync();  // others read this block's sums
}
