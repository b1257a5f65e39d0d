// Bitmap tiles written out as a dense matrix, for products of many rows and for cards without tensor cores of their own
// tier.
//
//   values, masks, offsets: bitmap tiles of w (N, K), see qsparse/kernels/_bitmap_tiles.py; dense (N, ld).
//   ld is a multiple of 8 elements and dense on 16 bytes, so 8 columns leave at once, beyond K as zeros.
//
// A warp has a tile, a lane a word of mask at a time, which is 8 neighbouring columns of each of four blocks. Ones are
// counted in all four bytes at once, and one scan over the lanes says where each byte's values start.

#include "common/numeric.cuh"

constexpr int WARP = 32;

template <typename T>
__global__ void __launch_bounds__(256)
spmm_bitmap_dense(const T* __restrict__ values, const unsigned* __restrict__ masks, const int* __restrict__ offsets,
                  T* __restrict__ dense, long long ld, int N, int K, int tiles) {
    const int tile = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, lane = threadIdx.x % WARP;
    if (tile >= tiles) return;
    const int wide = (K + 127) / 128, row0 = tile / wide * 16 + lane / 4, column0 = tile % wide * 128 + lane % 4 * 8;
    long long start = 8ll * offsets[tile];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned mask = masks[tile * 64ll + half * WARP + lane];
        unsigned ones = mask - (mask >> 1 & 0x55555555u);
        ones = (ones & 0x33333333u) + (ones >> 2 & 0x33333333u);
        ones = (ones + (ones >> 4)) & 0x0f0f0f0fu;
        unsigned sum = ones;
        for (int step = 1; step < WARP; step *= 2) {
            const unsigned other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        const unsigned before = sum - ones;  // a carry between bytes, in the last lane's sum, is taken back here
        const unsigned before_last = __shfl_sync(~0u, before, WARP - 1), ones_last = __shfl_sync(~0u, ones, WARP - 1);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const T* from = values + start + (before >> 8 * q & 255);
            alignas(16) T out[8];
#pragma unroll
            for (int bit = 0; bit < 8; ++bit) {
                const bool stored = mask >> (8 * q + bit) & 1;
                out[bit] = stored ? *from : from_float<T>(0.0f);
                from += stored;
            }
            start += (before_last >> 8 * q & 255) + (ones_last >> 8 * q & 255);
            const int row = row0 + q % 2 * 8, column = column0 + half * 64 + q / 2 * 32;
            if (row >= N || column >= ld) continue;
            auto* const to = reinterpret_cast<uint4*>(dense + row * ld + column);
#pragma unroll
            for (int i = 0; i < static_cast<int>(sizeof(out) / 16); ++i) to[i] = reinterpret_cast<const uint4*>(out)[i];
        }
    }
}
