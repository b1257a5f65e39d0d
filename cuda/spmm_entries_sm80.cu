// y = act(x · wᵀ + bias) for few rows of x and w in tiles of entries, on the tensor cores of Ampere and later.
//
//   x (M, K) half or bfloat16, rows ldx apart, on 16 bytes, zeros from K up to a multiple of 8; entries, offsets: tiles
//   of w (N, K), see qsparse/kernels/_entry_tiles.py; bias (N,) or null; y (M, N) row-major, of x's type or float.
//
// The ideas:
//   an entry is a store   its upper half says where its lower half belongs in a tile that is written out in shared
//                         memory as the registers of mma's left operand, and four come with one load: two instructions
//                         a weight. The order of entries is such that the lanes of a store meet few of each other's
//                         banks.
//   a warp alone          a warp has a tile's room of its own, zeros before the first entries arrive. It writes a tile
//                         out, reads it as fragments, and takes it back by storing zeros to the same places. x comes
//                         straight into registers. Nobody waits for another before the sums, which are added in a fixed
//                         order.

#include "common/weight_tiles_sm80.cuh"

// Cards of 12.0 have no shared memory for a block of 32 warps, and ptxas too few registers there.
template <int WARPS> constexpr int BOUND = WARP * (__CUDA_ARCH__ >= 1200 && WARPS > 16 ? 16 : WARPS);
template <int WARPS> constexpr int AT_ONCE = WARPS < 16 && __CUDA_ARCH__ < 1200 ? 2 : 1;  // blocks of a multiprocessor
constexpr int ROUNDS = 2;  // of 32 chunks of 4 entries, that are on their way while the tile before is multiplied

// The tiles of a warp, `count` that follow each other, fewer than lanes.
class Stream {
    const uint4* entries;
    int count, starts;  // lane i: where tile i begins, in chunks
    unsigned tile;      // the warp's room in shared memory
    uint4 now[ROUNDS], next[ROUNDS];

    __device__ __forceinline__ int begin_of(int t) const { return __shfl_sync(~0u, starts, t); }

    __device__ __forceinline__ void load(uint4 (&to)[ROUNDS], int t) const {
        const int start = begin_of(t), size = begin_of(t + 1) - start;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (r * WARP + lane_number() < size) to[r] = __ldg(entries + start + r * WARP + lane_number());
    }

    // Put four entries where they belong, or zeros there.
    template <bool CLEAR> __device__ __forceinline__ void store(uint4 e) const {
        store_half(tile + (e.x >> 16), CLEAR ? 0 : e.x);
        store_half(tile + (e.y >> 16), CLEAR ? 0 : e.y);
        store_half(tile + (e.z >> 16), CLEAR ? 0 : e.z);
        store_half(tile + (e.w >> 16), CLEAR ? 0 : e.w);
    }

    // The tile at hand is written out, or taken back.
    template <bool CLEAR> __device__ __forceinline__ void put(int start, int size) const {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (r * WARP + lane_number() < size) store<CLEAR>(now[r]);
#pragma unroll 1
        for (int at = ROUNDS * WARP + lane_number(); at < size; at += WARP) store<CLEAR>(__ldg(entries + start + at));
        __syncwarp();
    }

  public:
    // The first tile on its way, and zeros in the warp's room.
    __device__ __forceinline__ Stream(const uint4* entries, const int* offsets, int count, unsigned tile)
        : entries(entries), count(count), tile(tile) {
        starts = count ? __ldg(offsets + min(lane_number(), count)) : 0;
        if (count) load(now, 0);
        clear_tile(tile);
        __syncwarp();
    }

    template <class Multiply> __device__ __forceinline__ void run(Multiply multiply) {
#pragma unroll 1
        for (int t = 0; t < count; ++t) {
            const int start = begin_of(t), size = begin_of(t + 1) - start;
            put<false>(start, size);
            const bool more = t + 1 < count;
            if (more) load(next, t + 1);  // not sooner: all warps' first tiles shall come first
            multiply(more);
            if (!more) break;
            __syncwarp();  // all lanes have read the tile
            put<true>(start, size);
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) now[r] = next[r];
        }
    }
};

template <typename T, typename O, int BATCH, int WARPS>
__global__ void __launch_bounds__(BOUND<WARPS>, AT_ONCE<WARPS>)
spmm_entries_sm80(const T* __restrict__ x, long long ldx, const uint4* __restrict__ entries,
                  const int* __restrict__ offsets, const T* __restrict__ bias, O* __restrict__ y, int M, int N, int K,
                  int relu, int strips, int share) {
    extern __shared__ __align__(128) char shared[];
    const Share<BATCH> mine(K, strips, share);
    const unsigned tile = shared_address(shared) + threadIdx.x / WARP * TILE_BYTES;
    let_successor_start();
    Stream stream(entries, offsets + mine.tile0, mine.count, tile);
    multiply_few<T, O, BATCH, WARPS>(x, ldx, bias, y, M, N, K, relu, mine, stream, tile, shared,
                              [](float sum, int, int, bool) { return sum; });
}
