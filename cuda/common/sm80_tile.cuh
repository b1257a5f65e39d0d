// The product of a tile on the tensor cores of Ampere and later, by cp.async, ldmatrix and mma.sync: what gemm_sm80.cu and
// gemm_int8_sm80.cu share. Elements of 16 or 8 bits: a line of a slice is counted in bytes.
//
//   tiles and groups      a block computes a BM x BN tile of y. Blocks are numbered down groups of neighbouring tile
//                         rows, so that those that run together share their operands in L2.
//   split K               where there are too few tiles to fill the chip, `split` blocks share one tile and divide K.
//   pipeline              slices of BK go straight from global to shared memory, STAGES - 1 of them ahead of use.
//   warp tiles            a warp owns WM x WN of the tile in registers. Each fragment of 16 lines and 32 bytes of K, one
//                         ldmatrix, serves WM / 16 or WN / 8 products; the fragments of the next 32 bytes load while
//                         those of this step multiply, across the border of two slices too, so the tensor cores wait
//                         for neither.
//   transposed operands   (16 bits) stay as they are in shared memory: ldmatrix.trans turns each 8 x 8 block as it
//                         loads it.
//
// Lines of x and w start on 16 bytes and are whole 16-byte chunks long.
#pragma once
#include "sm80.cuh"

constexpr int WARP = 32;

template <typename T, int BM_, int BN_, int BK_, int WM_, int WN_, int STAGES_> struct Config {
    static constexpr int BM = BM_, BN = BN_, BK = BK_, WM = WM_, WN = WN_, STAGES = STAGES_;
    static constexpr int WARPS_N = BN / WN, WARPS = BM / WM * WARPS_N, THREADS = WARP * WARPS;
    static constexpr int SIZE = sizeof(T), CHUNK = 16 / SIZE;  // elements in the 16 bytes of one copy
    static constexpr int X_BYTES = BM * BK * SIZE, W_BYTES = BN * BK * SIZE, STAGE_BYTES = X_BYTES + W_BYTES;
    static constexpr int STEPS = BK * SIZE / 32;  // products along K in a slice, each of 32 bytes
    static constexpr int BLOCKS = THREADS >= 256 ? 1 : 256 / THREADS;  // at least so many fit a multiprocessor
    static_assert(BM % WM == 0 && BN % WN == 0, "warp tiles divide the tile");
    static_assert(WM % 16 == 0 && WM <= 64 && WN % 32 == 0 && WN <= 64, "a warp tile is at most one swizzle period");
    static_assert(STEPS == 2 || STEPS == 4, "a slice has an even number of steps and is at most one swizzle period");
    static_assert(STAGES >= 3, "while one stage multiplies, the next has arrived and a third is on its way");
};

// One thread's share of an operand's slice (ROWS of M or N, BK of K): a chunk at the same place of every STEP-th line.
template <typename T, bool K_MAJOR, int ROWS, int BK, int THREADS> struct Loader {
    static constexpr int SIZE = sizeof(T), LINES = K_MAJOR ? ROWS : BK, BYTES = (K_MAJOR ? BK : ROWS) * SIZE;
    static constexpr int CHUNKS = BYTES / 16, STEP = THREADS / CHUNKS, COUNT = LINES / STEP;
    static_assert(THREADS % CHUNKS == 0 && LINES % STEP == 0, "all threads copy the same number of chunks");
    static_assert(STEP % 8 == 0, "a thread's lines are swizzled alike");

    const char* from;   // the thread's first chunk of the coming slice
    long long stride;   // from one of its lines to the next, in bytes
    long long advance;  // from slice to slice, in bytes
    int lines, inner;   // what is left of the matrix there, in lines, and in elements along a line; none if <= 0
    int to;             // the chunk's place in a stage

    __device__ __forceinline__ Loader(const T* a, long long ld, int row, int rows, int k, int K) {
        const int line = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        const int first_line = (K_MAJOR ? row : k) + line, first = (K_MAJOR ? k : row) + chunk * (16 / SIZE);
        from = reinterpret_cast<const char*>(a + first_line * ld + first);
        stride = ld * (STEP * SIZE);
        advance = K_MAJOR ? BK * SIZE : ld * (BK * SIZE);
        lines = (K_MAJOR ? rows : K) - first_line;
        inner = (K_MAJOR ? K : rows) - first;
        to = swizzled<BYTES>(line, chunk);
    }

    // Copy part PART of PARTS. Beyond the matrix nothing is read, and zeros arrive, which add nothing to any sum.
    template <int PARTS> __device__ __forceinline__ void copy(unsigned tile, int part) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (i * PARTS / COUNT == part)
                copy_async(tile + to + i * STEP * BYTES, from + i * stride, i * STEP < lines && inner > 0);
    }

    __device__ __forceinline__ void next() {
        from += advance;
        (K_MAJOR ? inner : lines) -= BK;
    }
};

// Where a lane finds a warp's fragments of an operand in a slice: 16 lines by 32 bytes of K each, as four 8 x 8 matrices
// of 16 bits (two 8-bit neighbours along K count as one) in the order of mma's registers. For x that is rows first, then
// K; for w, two operands of 8 columns side by side, K first.
template <typename T, bool K_MAJOR, bool K_FIRST, int ROWS, int BK> struct Fragments {
    static constexpr int BYTES = (K_MAJOR ? BK : ROWS) * sizeof(T);
    static_assert(K_MAJOR || sizeof(T) == 2, "ldmatrix transposes 16-bit elements only");
    int lane_at;

    __device__ __forceinline__ explicit Fragments(int row) {
        const int lane = threadIdx.x % WARP, within = lane % 8, odd = lane / 8 % 2, high = lane / 16;
        const int r = K_FIRST ? high : odd, k = K_FIRST ? odd : high;  // which half of the 16 x 16 the lane points at
        lane_at = K_MAJOR ? swizzled<BYTES>(row + r * 8 + within, k) : swizzled<BYTES>(k * 8 + within, row / 8 + r);
    }

    // 16 further along a line is two chunks, an XOR; 16 lines further are swizzled alike, a sum.
    __device__ __forceinline__ void load(unsigned (&r)[4], unsigned tile, int row_tile, int k_tile) const {
        const int along = K_MAJOR ? k_tile : row_tile, across = K_MAJOR ? row_tile : k_tile;
        load_matrices<!K_MAJOR>(r, tile + (lane_at ^ along * 32) + across * 16 * BYTES);
    }
};

// Which part of the product a block computes, and a warp's place in its tile.
template <typename C> struct Block {
    int m0, n0, part, begin, count;  // the tile's corner; of `split` parts of K which one, its first slice and how many
    int m_warp, n_warp;

    __device__ __forceinline__ Block(int M, int N, int K, int group, int split) {
        const int tiles_m = (M + C::BM - 1) / C::BM, tiles_n = (N + C::BN - 1) / C::BN;
        const int tile = blockIdx.x / split;
        part = blockIdx.x % split;
        const int first = tile / (group * tiles_n) * group;  // groups of `group` tile rows, walked column by column
        const int height = min(group, tiles_m - first);
        const int within = tile % (group * tiles_n);
        m0 = (first + within % height) * C::BM, n0 = within / height * C::BN;

        const int slices = (K + C::BK - 1) / C::BK, share = (slices + split - 1) / split;
        begin = part * share, count = min(share, slices - begin);  // none if <= 0

        const int warp = threadIdx.x / WARP;
        m_warp = warp / C::WARPS_N * C::WM, n_warp = warp % C::WARPS_N * C::WN;
    }

    // Where its slices end along K: what is loaded ahead stops there, where another part's begin.
    __device__ __forceinline__ int end(int K) const { return min(K, (begin + count) * C::BK); }
};

// acc += the warp's tile of x · wᵀ over the block's slices, the last of which ends at K; `stages` is shared memory of
// C::STAGES slices. X_K / W_K false: that operand lies transposed in memory, (K, M) or (K, N). T is the type of x; w's
// may differ in its sign.
template <typename T, bool X_K, bool W_K, typename C, typename W, typename Sum>
__device__ __forceinline__ void multiply(Sum (&acc)[C::WM / 16][C::WN / 8][4], const Block<C>& block,
                                         const T* __restrict__ x, long long ldx, const W* __restrict__ w,
                                         long long ldw, int M, int N, int K, unsigned stages) {
    static_assert(sizeof(T) == C::SIZE && sizeof(W) == C::SIZE, "the configuration counts bytes of such elements");
    constexpr int WM = C::WM, WN = C::WN, STAGES = C::STAGES;

    Loader<T, X_K, C::BM, C::BK, C::THREADS> x_loader(x, ldx, block.m0, M, block.begin * C::BK, K);
    Loader<W, W_K, C::BN, C::BK, C::THREADS> w_loader(w, ldw, block.n0, N, block.begin * C::BK, K);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        x_loader.template copy<1>(stages + s * C::STAGE_BYTES, 0);
        w_loader.template copy<1>(stages + s * C::STAGE_BYTES + C::X_BYTES, 0);
        copy_commit();
        x_loader.next(), w_loader.next();
    }

    const Fragments<T, X_K, false, C::BM, C::BK> x_fragments(block.m_warp);
    const Fragments<W, W_K, true, C::BN, C::BK> w_fragments(block.n_warp);
    unsigned a[2][WM / 16][4], b[2][WN / 16][4];
    auto load_fragments = [&](int buffer, unsigned stage, int k) {
#pragma unroll
        for (int i = 0; i < WM / 16; ++i) x_fragments.load(a[buffer][i], stage, i, k);
#pragma unroll
        for (int j = 0; j < WN / 16; ++j) w_fragments.load(b[buffer][j], stage + C::X_BYTES, j, k);
    };

    copy_wait<STAGES - 2>();
    __syncthreads();
    load_fragments(0, stages, 0);
    unsigned reading = stages, writing = stages + (STAGES - 1) * C::STAGE_BYTES;
    for (int slice = 0; slice < block.count; ++slice) {
#pragma unroll
        for (int k = 0; k < C::STEPS; ++k) {
            if (k == C::STEPS - 1) {
                // The next slice has arrived, for all threads; and all have read the last of this one, whose stage
                // the coming round writes.
                copy_wait<STAGES - 2>();
                __syncthreads();
                writing = reading;
                reading += C::STAGE_BYTES;
                if (reading == stages + STAGES * C::STAGE_BYTES) reading = stages;
            }
            load_fragments((k + 1) % 2, reading, (k + 1) % C::STEPS);
            if (k < C::STEPS - 1) {  // beyond the last slice these copies read nothing
                x_loader.template copy<C::STEPS - 1>(writing, k);
                w_loader.template copy<C::STEPS - 1>(writing + C::X_BYTES, k);
            }
            if (k == C::STEPS - 2) {
                copy_commit();
                x_loader.next(), w_loader.next();
            }
#pragma unroll
            for (int j = 0; j < WN / 8; ++j)
#pragma unroll
                for (int i = 0; i < WM / 16; ++i)  // to and fro, so that neighbouring products share an operand
                    mma<T>(acc[j % 2 ? WM / 16 - 1 - i : i][j], a[k % 2][j % 2 ? WM / 16 - 1 - i : i],
                           b[k % 2][j / 2][j % 2 * 2], b[k % 2][j / 2][j % 2 * 2 + 1]);
        }
    }
}
