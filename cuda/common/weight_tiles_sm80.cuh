// Few rows of x times tiles of weights, on the tensor cores of Ampere and later: what the kernels share whose weights
// come as entries, each with its place in a tile.
//
// A tile is TILE_ROWS x TILE_COLUMNS weights of 16 bits. Written out in shared memory it is what mma wants of a warp's
// lanes as its left operand, 16 bytes a lane and 512 for 16 rows and 16 columns. Which columns these are is free, as
// long as x has the same: a lane has 8 neighbours along K of x, of which one mma takes the first four, and another the
// others. The place of each weight is in qsparse/kernels/_entry_tiles.py.
#pragma once
#include "dependent.cuh"
#include "sm80.cuh"

constexpr int WARP = 32;
constexpr int TILE_ROWS = 32, TILE_COLUMNS = 64, TILE_BYTES = TILE_ROWS * TILE_COLUMNS * 2, FRAGMENT_BYTES = 512;
constexpr int PITCH = TILE_ROWS + 4;  // floats of a batch row of sums: a warp's stores meet no bank twice

// Asked for where it is wanted: kept, it would be the register too much of the largest blocks.
__device__ __forceinline__ int lane_number() {
    int lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

__device__ __forceinline__ void store_half(unsigned to, unsigned value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(static_cast<unsigned short>(value)) : "memory");
}

// Zeros in a warp's room for a tile.
__device__ __forceinline__ void clear_tile(unsigned tile) {
#pragma unroll
    for (int i = 0; i < TILE_BYTES / FRAGMENT_BYTES; ++i) {
        const unsigned at = tile + lane_number() * 16 + i * FRAGMENT_BYTES;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
}

// The left operand of columns 32 half + 8 (lane % 4) + 4 quad to + 3, rows 16 high to + 15.
__device__ __forceinline__ void load_fragment(unsigned (&a)[4], unsigned tile, int half, int high, int quad) {
    const unsigned from = tile + lane_number() * 16 + ((high * 2 + half) * 2 + quad) * FRAGMENT_BYTES;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(from)
                 : "memory");
}

// Which rows of x and of tiles a block multiplies, and which tiles of K its warp. Blocks of the same rows of x are
// neighbours; `strips` rows of tiles, `share` tiles a warp.
template <int BATCH> struct Share {
    int strip, m0, first, count;
    long long tile0;  // of the warp, in the order of the tiles

    __device__ __forceinline__ Share(int K, int strips, int share) : strip(blockIdx.x), m0(0) {
        const int wide = (K + TILE_COLUMNS - 1) / TILE_COLUMNS;
        for (; strip >= strips; strip -= strips) m0 += BATCH;
        first = threadIdx.x / WARP * share;
        count = max(0, min(share, wide - first));
        tile0 = static_cast<long long>(strip) * wide + first;
    }
};

// y = act(x · wᵀ + bias) for a block's share. `stream.run(multiply)` writes each tile of the warp out in turn, in the
// warp's room `tile`, and calls `multiply(whether more follow)`. `corrected(sum, m, n, mine)` is asked by all lanes of a
// warp at once.
template <typename T, typename O, int BATCH, int WARPS, class Stream, class Corrected>
__device__ __forceinline__ void multiply_few(const T* __restrict__ x, long long ldx, const T* __restrict__ bias,
                                             O* __restrict__ y, int M, int N, int K, int relu,
                                             const Share<BATCH>& share, Stream& stream, unsigned tile, char* shared,
                                             Corrected corrected) {
    constexpr int COLUMNS = BATCH / 8;                                            // of mma's
    constexpr int Q = WARPS > BATCH ? WARPS / BATCH : 1, ACROSS = TILE_ROWS / Q;  // lanes a sum; sums a warp
    constexpr int SIZE = BATCH * PITCH + (Q > 1 ? ACROSS : 0);  // of a warp's sums: Q warps' are read at once
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    uint4 b[COLUMNS][2];  // x of the next tile's columns, 32 and 32
    int k = share.first * TILE_COLUMNS + lane % 4 * 8;
    const T* from = x + (share.m0 + lane / 4) * ldx + k;
    const auto load_x = [&] {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                b[j][half] = make_uint4(0, 0, 0, 0);
                if (share.m0 + lane / 4 + j * 8 < M && k + half * 32 < K)
                    b[j][half] = __ldg(reinterpret_cast<const uint4*>(from + j * 8 * ldx + half * 32));
            }
        k += TILE_COLUMNS, from += TILE_COLUMNS;
    };
    wait_for_predecessor();
    load_x();
    float acc[2][COLUMNS][4] = {};
    stream.run([&](bool more) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                unsigned a[2][4];
                load_fragment(a[0], tile, half, high, 0), load_fragment(a[1], tile, half, high, 1);
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    mma<T>(acc[high][j], a[0], b[j][half].x, b[j][half].y);
                    mma<T>(acc[high][j], a[1], b[j][half].z, b[j][half].w);
                }
            }
        if (more) load_x();
    });

    __syncthreads();  // the tiles are no longer read
    float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int high = 0; high < 2; ++high)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int m = j * 8 + lane % 4 * 2 + q % 2, row = high * 16 + lane / 4 + q / 2 * 8;
                sums[warp * SIZE + m * PITCH + row] = acc[high][j][q];
            }
    __syncthreads();
#pragma unroll 1
    for (int i = warp; i < min(M - share.m0, BATCH) * Q; i += WARPS) {
        const int m = i / Q, row = i % Q * ACROSS + lane % ACROSS, n = share.strip * TILE_ROWS + row;
        float sum = 0.0f;
#pragma unroll(WARPS / Q < 8 ? WARPS / Q : 8)
        for (int w = lane / ACROSS; w < WARPS; w += Q) sum += sums[w * SIZE + m * PITCH + row];
#pragma unroll
        for (int step = ACROSS; step < WARP; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const bool mine = lane < ACROSS && n < N;
        sum = corrected(sum, share.m0 + m, n, mine);
        if (!mine) continue;
        if (bias) sum += to_float(bias[n]);
        y[static_cast<long long>(share.m0 + m) * N + n] = from_float<O>(relu ? relu_of(sum) : sum);
    }
}
