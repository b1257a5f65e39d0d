// Tiles of entries written out as a dense matrix, for products of many rows and for cards without tensor cores of their own
// tier.
//
//   entries, offsets: tiles of w (N, K), see qsparse/kernels/_entry_tiles.py; dense (N, ld) of 16-bit elements.
//   ld is a multiple of 8 elements and dense on 16 bytes, so 8 columns leave at once, beyond K as zeros.
//
// A block has a tile, which it puts together in shared memory: an entry says where it belongs. A lane then has 8 neighbours
// of two rows, in two fragments.

constexpr int WARP = 32, THREADS = 128, TILE_ROWS = 32, TILE_COLUMNS = 64, TILE_BYTES = TILE_ROWS * TILE_COLUMNS * 2;

__global__ void __launch_bounds__(THREADS)
spmm_entries_dense(const uint4* __restrict__ entries, const int* __restrict__ offsets, unsigned short* __restrict__ dense,
                   long long ld, int N, int wide) {
    __shared__ __align__(128) char tile[TILE_BYTES];
    const int begin = offsets[blockIdx.x], end = offsets[blockIdx.x + 1];
    uint4* const chunks = reinterpret_cast<uint4*>(tile);
    for (int i = threadIdx.x; i < TILE_BYTES / 16; i += THREADS) chunks[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    for (int at = begin + threadIdx.x; at < end; at += THREADS) {
        const uint4 four = entries[at];
        const unsigned words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<unsigned short*>(tile + (words[i] >> 16)) = static_cast<unsigned short>(words[i]);
    }
    __syncthreads();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;  // a warp has 16 rows and 32 columns: two fragments
    const uint4 first = chunks[warp * 2 * WARP + lane], second = chunks[(warp * 2 + 1) * WARP + lane];
    const long long row = static_cast<long long>(blockIdx.x / wide) * TILE_ROWS + warp / 2 * 16 + lane / 4;
    const int column = blockIdx.x % wide * TILE_COLUMNS + warp % 2 * 32 + lane % 4 * 8;
    if (column >= ld) return;
    const uint4 upper = make_uint4(first.x, first.z, second.x, second.z);
    const uint4 lower = make_uint4(first.y, first.w, second.y, second.w);
    if (row < N) *reinterpret_cast<uint4*>(dense + row * ld + column) = upper;
    if (row + 8 < N) *reinterpret_cast<uint4*>(dense + (row + 8) * ld + column) = lower;
}
