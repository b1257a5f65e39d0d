// y = act(x · wᵀ + bias) for few rows of x and w in CSR, whose pattern is known, on the tensor cores of Ampere and
// later.
//
//   x (M, K) half or bfloat16, rows ldx apart, on 16 bytes, zeros from K up to a multiple of 8; values, cols (int, or
//   unsigned short where `short_cols`), row_offsets: w (N, K), in each row ascending columns; places, starts, shifts:
//   where they go in tiles, see qsparse/kernels/_spmm_few_sm80.py; bias (N,) or null; y (M, N) row-major.
//
// The ideas:
//   an entry is a store   a tile is written out in shared memory as the registers of mma's left operand, zeros and all.
//                         The pattern says of each entry, in the order in which they lie in CSR, where in the tile it
//                         belongs, and of each of the tile's rows where in CSR its values are.
//   a warp alone          as in spmm_entries_sm80.cu.
//   no false NaN          what is not stored contributes nothing, but as a zero of a tile it makes NaN of NaN and Inf
//                         in x. So a sum that is NaN is found out again, entry by entry.

#include "common/weight_tiles_sm80.cuh"

constexpr int ROUNDS = 2, CHUNK = 4;  // entries that are on their way ahead: 32 chunks a round
constexpr unsigned ODD = 1 << 16 | 1;

// The tiles of a warp, `count` that follow each other, fewer than lanes. An entry's place is where in a tile it belongs,
// in bytes; from bit 11 on, the number of its row in the order of `shifts`; odd, if it is none and fills up a chunk.
class Stream {
    const unsigned short* values;
    const uint2* places;
    const int* shifts;
    unsigned tile;  // the warp's room in shared memory
    int count;
    int starts;  // lane i: where tile i begins, in chunks
    int shift;   // of this lane's row in the tile to come
    uint2 now[ROUNDS], next[ROUNDS];
    unsigned short given[ROUNDS][CHUNK];  // values, of this tile until they are stored, then of the next

    __device__ __forceinline__ int begin_of(int t) const { return __shfl_sync(~0u, starts, t); }

    // This lane's chunk of the `size` from `start` on, of those from `at` on.
    __device__ __forceinline__ uint2 place_of(int start, int size, int at) const {
        return at + lane_number() < size ? __ldg(places + start + at + lane_number()) : make_uint2(ODD, ODD);
    }

    __device__ __forceinline__ void load_places(uint2 (&to)[ROUNDS], int t) {
        const int start = begin_of(t), size = begin_of(t + 1) - start;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) to[r] = place_of(start, size, r * WARP);
        shift = __ldg(shifts + t * TILE_ROWS);
    }

    // The values of this lane's chunk of the `size` from chunk `at` on: entry i of a tile is value i + shift of its row.
    __device__ __forceinline__ void load_values(unsigned short (&to)[CHUNK], uint2 p, int at, int size,
                                                int of_rows) const {
        const int lanes = min(size - at, WARP), i = at * CHUNK + lane_number();
        const unsigned places[CHUNK] = {p.x, p.x >> 16, p.y, p.y >> 16};
        int from[CHUNK];
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) from[c] = i + c * lanes + __shfl_sync(~0u, of_rows, places[c] >> 11);
#pragma unroll
        for (int c = 0; c < CHUNK; ++c)
            if (!(places[c] & 1)) to[c] = __ldg(values + from[c]);
    }

    __device__ __forceinline__ void load_values(const uint2 (&p)[ROUNDS], int of_rows, int t) {
        const int size = begin_of(t + 1) - begin_of(t);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (r * WARP < size) load_values(given[r], p[r], r * WARP, size, of_rows);
    }

    // Put four values where they belong, or zeros there.
    template <bool CLEAR> __device__ __forceinline__ void store(uint2 p, const unsigned short (&v)[CHUNK]) const {
        constexpr unsigned BYTES = TILE_BYTES - 2;
        if (!(p.x & 1)) store_half(tile + (p.x & BYTES), CLEAR ? 0 : v[0]);
        if (!(p.x >> 16 & 1)) store_half(tile + (p.x >> 16 & BYTES), CLEAR ? 0 : v[1]);
        if (!(p.y & 1)) store_half(tile + (p.y & BYTES), CLEAR ? 0 : v[2]);
        if (!(p.y >> 16 & 1)) store_half(tile + (p.y >> 16 & BYTES), CLEAR ? 0 : v[3]);
    }

    // The tile at hand is written out, or taken back.
    template <bool CLEAR> __device__ __forceinline__ void put(int t) const {
        const int start = begin_of(t), size = begin_of(t + 1) - start;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) store<CLEAR>(now[r], given[r]);
        if (size > ROUNDS * WARP) {  // the rest was not fetched
            const int of_rows = CLEAR ? 0 : __ldg(shifts + t * TILE_ROWS);
            uint2 p = place_of(start, size, ROUNDS * WARP);
#pragma unroll 1
            for (int at = ROUNDS * WARP; at < size; at += WARP) {
                const uint2 later = place_of(start, size, at + WARP);
                unsigned short v[CHUNK] = {};
                if (!CLEAR) load_values(v, p, at, size, of_rows);
                store<CLEAR>(p, v);
                p = later;
            }
        }
        __syncwarp();
    }

  public:
    // The first tiles on their way, and zeros in the warp's room.
    __device__ __forceinline__ Stream(const void* values, const uint2* places, const int* starts_of_tiles,
                                      const int* shifts, long long tile0, int count, unsigned tile)
        : values(static_cast<const unsigned short*>(values)), places(places),
          shifts(shifts + tile0 * TILE_ROWS + lane_number()), tile(tile), count(count) {
        starts = count ? __ldg(starts_of_tiles + tile0 + min(lane_number(), count)) : 0;
        if (count) load_places(now, 0);
        const int of_rows = shift;
        if (count > 1) load_places(next, 1);
        clear_tile(tile);
        if (count) load_values(now, of_rows, 0);
        __syncwarp();
    }

    template <class Multiply> __device__ __forceinline__ void run(Multiply multiply) {
#pragma unroll 1
        for (int t = 0; t < count; ++t) {
            const bool more = t + 1 < count;
            put<false>(t);
            if (more) load_values(next, shift, t + 1);
            multiply(more);
            if (!more) break;
            __syncwarp();  // all lanes have read the tile
            put<true>(t);
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) now[r] = next[r];
            if (t + 2 < count) load_places(next, t + 2);
        }
    }
};

template <typename T, int BATCH, int WARPS>
__global__ void __launch_bounds__(WARPS * WARP, WARPS < 16 ? 2 : 1)
spmm_csr_few(const T* __restrict__ x, long long ldx, const T* __restrict__ values, const void* __restrict__ cols,
             const int* __restrict__ row_offsets, const uint2* __restrict__ places, const int* __restrict__ starts,
             const int* __restrict__ shifts, const T* __restrict__ bias, T* __restrict__ y, int M, int N, int K,
             int short_cols, int relu, int strips, int share) {
    extern __shared__ __align__(128) char shared[];
    const Share<BATCH> mine(K, strips, share);
    const unsigned tile = shared_address(shared) + threadIdx.x / WARP * TILE_BYTES;
    let_successor_start();
    Stream stream(values, places, starts, shifts, mine.tile0, mine.count, tile);
    const auto corrected = [&](float sum, int m, int n, bool owner) {
        for (unsigned wrong = __ballot_sync(~0u, sum != sum && owner); wrong; wrong &= wrong - 1) {
            const int lane = __ffs(wrong) - 1, row = __shfl_sync(~0u, n, lane);
            float exact = 0.0f;
#pragma unroll 1
            for (int i = row_offsets[row] + lane_number(); i < row_offsets[row + 1]; i += WARP) {
                int k;
                if (short_cols) k = static_cast<const unsigned short*>(cols)[i];
                else k = static_cast<const int*>(cols)[i];
                exact = fmaf(to_float(values[i]), to_float(x[m * ldx + k]), exact);
            }
            for (int half = WARP / 2; half > 0; half /= 2) exact += __shfl_xor_sync(~0u, exact, half);
            if (lane_number() == lane) sum = exact;
        }
        return sum;
    };
    multiply_few<T, T, BATCH, WARPS>(x, ldx, bias, y, M, N, K, relu, mine, stream, tile, shared, corrected);
}
