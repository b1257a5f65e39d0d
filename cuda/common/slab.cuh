// A slab of x that a block keeps: some columns k of its batch rows m, turned to [k][m], lines of BATCH = 32 V batch rows.
// Unlike the slabs of spmm.cuh, which come and go, it is filled by all warps at once, from registers.
#pragma once
#include "spmm.cuh"

constexpr int PLAN_WIDTH = 128;  // columns that a plan tells apart: slices of K are whole numbers of them

// How far the chunks of line k are turned: lines a vector of x apart differ, so that a warp that turns 4 words of rows and 8
// vectors along k meets each bank once.
template <typename T> __device__ __forceinline__ unsigned turned(unsigned k) { return k / VECTOR<T> % 8 * 16; }

struct Nothing {
    __device__ __forceinline__ void operator()() const {}
};

// All WARPS warps of a block: columns k0 to k0 + width of x, none of which is beyond K, batch rows m0 to m0 + BATCH. Each
// warp calls `meanwhile` once, when its first reads are on their way.
template <typename T, int V, int WARPS, typename F = Nothing>
__device__ __forceinline__ void fill(char* slab, const Matrix<T>& x, long long m0, long long k0, int width,
                                     const F& meanwhile = {}) {
    constexpr int BATCH = WARP * V, LINE = BATCH * sizeof(T);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    constexpr int LOADS = 128 / WARPS;  // in flight a lane
    if (x.k_step == 1 && x.wide) {  // a lane turns a vector of the rows of a word; a warp has 8 vectors, 4 words
        constexpr int ROWS = WORD<T>, DOWN = BATCH / (4 * ROWS), FLIGHT = LOADS / ROWS;
        const int patches = (width + 8 * VECTOR<T> - 1) / (8 * VECTOR<T>) * DOWN;
        for (int first = warp; first < patches; first += WARPS * FLIGHT) {
            uint4 v[FLIGHT][ROWS];
#pragma unroll
            for (int u = 0; u < FLIGHT; ++u) {
                const int patch = first + u * WARPS, k = (patch / DOWN * 8 + lane % 8) * VECTOR<T>;
#pragma unroll
                for (int p = 0; p < ROWS; ++p)
                    v[u][p] = x.vector(m0 + (patch % DOWN * 4 + lane / 8) * ROWS + p,
                                       patch < patches && k < width ? k0 + k : x.K);
            }
            if (first == warp) meanwhile();
#pragma unroll
            for (int u = 0; u < FLIGHT; ++u) {
                const int patch = first + u * WARPS, k = (patch / DOWN * 8 + lane % 8) * VECTOR<T>;
                if (patch >= patches || k >= width) continue;
                char* const to = slab + k * LINE + ((patch % DOWN * 4 + lane / 8) * 4 ^ lane % 8 * 16);
#pragma unroll
                for (int i = 0; i < VECTOR<T>; ++i) {
                    const unsigned word = reinterpret_cast<const unsigned*>(&v[u][0])[i / ROWS];
                    const unsigned other = reinterpret_cast<const unsigned*>(&v[u][ROWS - 1])[i / ROWS];
                    *reinterpret_cast<unsigned*>(to + i * LINE) =
                        ROWS == 1 ? word : __byte_perm(word, other, i % 2 ? 0x7632 : 0x5410);
                }
            }
        }
        if (warp >= patches) meanwhile();
        return;
    }
    meanwhile();
    const bool along_k = x.k_step == 1;
    const int length = along_k ? width : BATCH;
#pragma unroll 4
    for (int at = threadIdx.x; at < width * BATCH; at += WARPS * WARP) {
        const int k = along_k ? at % length : at / length, m = along_k ? at / length : at % length;
        const unsigned place = m * static_cast<unsigned>(sizeof(T)) ^ turned<T>(k);
        *reinterpret_cast<T*>(slab + k * LINE + place) = m0 + m < x.M ? x.at(m0 + m, k0 + k) : from_float<T>(0.0f);
    }
}
