// Bitmap tiles (qsparse/kernels/_bitmap_tiles.py), taken apart in registers, and the product of few rows of x with them:
// sums (M, N) = x · wᵀ, w (N, K) in tiles of 16 x 128, by mma.sync (Ampere and later).
//
// The ideas:
//   weights first       w is mma's left operand, 16 outputs high, x the right one; a weight is read once and unpacked once,
//                       straight into the fragment that the instruction wants. Two neighbouring weights are a register.
//   pairs of values     a pair needs the values p and p + 1, but p may be odd. So each value goes to shared memory twice:
//                       word i there is (value i - 1, value i), and any pair is one aligned load. Where the pair's
//                       high weight would be value q, word q has it in the upper half, and in the lower half what
//                       comes before it: right for both, for either alone, and for none once the mask is applied.
//   counting by bytes   a word of mask has four bytes, each of another block, and ones are counted in all four at once,
//                       within a byte by shifts and adds, over the lanes by one scan. No popcount, which is slow.
//   a warp alone        a warp has its own row of tiles, or a part of it, its own values on the way and its own buffer:
//                       nobody waits for another before the sums.
#pragma once
#include "sm80.cuh"

constexpr int WARP = 32;
constexpr int TILE_ROWS = 16, TILE_COLUMNS = 128, TILE_WORDS = 64;
constexpr int TILE_BUFFER = 257 * 32;  // bytes: a full tile's 2,048 values and the zeros after them, each as a word

__device__ __forceinline__ unsigned permuted(unsigned a, unsigned b, unsigned selector) {
    unsigned r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

__device__ __forceinline__ unsigned load_shared(unsigned from) {
    unsigned v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from));
    return v;
}
__device__ __forceinline__ uint4 load_shared_4(unsigned from) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}
__device__ __forceinline__ void store_shared_4(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// For each of the four blocks that a word of mask belongs to, in a byte each: how many values of the block come before
// the high weight of this lane's pair i; and what the last lane has, for the blocks' totals.
struct Counts {
    unsigned before_high[4];
    unsigned before_last, ones_last;  // 255 at most; together up to 256

    __device__ __forceinline__ Counts(unsigned mask) {
        constexpr unsigned LOW = 0x01010101u, TWO = 0x03030303u;
        const unsigned shifted = mask >> 1, twos = shifted - (shifted >> 1 & 0x55555555u);  // bits 1 + 2, 3 + 4, 5 + 6
        const unsigned first = mask & LOW, second = twos & TWO, third = twos >> 2 & TWO, fourth = twos >> 4 & TWO;
        const unsigned ones = first + second + third + (fourth + (mask >> 7 & LOW));
        unsigned sum = ones;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2)
            asm volatile(
                "{\n.reg .pred inside;\n.reg .b32 other;\n"
                "shfl.sync.up.b32 other|inside, %0, %1, 0, 0xffffffff;\n"
                "@inside add.u32 %0, %0, other;\n}"
                : "+r"(sum)
                : "r"(step));
        const unsigned before = sum - ones;  // a carry between bytes, in the last lane's sum, is taken back here
        before_last = __shfl_sync(~0u, before, WARP - 1);
        ones_last = __shfl_sync(~0u, ones, WARP - 1);
        before_high[0] = before + first;
        before_high[1] = before_high[0] + second;
        before_high[2] = before_high[1] + third;
        before_high[3] = before_high[2] + fourth;
    }

    // `start` + 4 times the values of block q.
    __device__ __forceinline__ unsigned after(int q, unsigned start) const {
        return __dp4a(ones_last, 4u << 8 * q, __dp4a(before_last, 4u << 8 * q, start));
    }
};

// Pair i of block q, whose words start at `start` in shared memory.
__device__ __forceinline__ unsigned pair_of(unsigned mask, const Counts& counts, int q, int i, unsigned start) {
    const unsigned word = load_shared(__dp4a(counts.before_high[i], 4u << 8 * q, start));
    const unsigned sign = 8 | q, signs = sign | sign << 4 | (sign | 4) << 8 | (sign | 4) << 12;  // a byte's top bit
    return word & permuted(mask << (7 - 2 * i), mask << (6 - 2 * i), signs);
}

// The values of a warp's tiles, AHEAD rounds of 256 on their way, none of which reaches over the end of a tile.
template <int AHEAD> struct Values {
    const uint4* chunks;
    int lane, count;    // tiles, fewer than lanes
    int offsets;        // lane i: where tile i starts, in chunks of 8
    int tile, at, end;  // what is to be loaded next
    uint4 rounds[AHEAD];

    __device__ __forceinline__ Values(const void* values, const int* first, int count, int lane)
        : chunks(static_cast<const uint4*>(values)), lane(lane), count(count), tile(0) {
        offsets = count ? first[min(lane, count)] : 0;
        at = __shfl_sync(~0u, offsets, 0);
        end = __shfl_sync(~0u, offsets, 1);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) load(rounds[i]);
    }

    __device__ __forceinline__ void load(uint4& round) {
        if (at + lane < end) round = __ldg(chunks + at + lane);
        at = min(at + WARP, end);
        if (at == end && tile + 1 < count) end = __shfl_sync(~0u, offsets, ++tile + 1);
    }

    // Spread tile i's values out in `buffer`.
    __device__ __forceinline__ void spread(int i, unsigned buffer) {
        const int size = __shfl_sync(~0u, offsets, i + 1) - __shfl_sync(~0u, offsets, i);
        unsigned carry = 0;
        for (int chunk = lane; chunk - lane < size; chunk += WARP) {
            const uint4 v = rounds[0];
#pragma unroll
            for (int j = 0; j + 1 < AHEAD; ++j) rounds[j] = rounds[j + 1];
            load(rounds[AHEAD - 1]);
            unsigned before = __shfl_up_sync(~0u, v.w, 1);
            if (lane == 0) before = carry;
            carry = __shfl_sync(~0u, v.w, WARP - 1);
            if (chunk < size) {
                const unsigned to = buffer + chunk * 32;
                store_shared_4(to, permuted(before, v.x, 0x5432), v.x, permuted(v.x, v.y, 0x5432), v.y);
                store_shared_4(to + 16, permuted(v.y, v.z, 0x5432), v.z, permuted(v.z, v.w, 0x5432), v.w);
            }
        }
    }
};

// A block's share of a product of few rows: `strips` neighbouring rows of tiles, and a part of K, for which its warps
// share x. Each row of tiles has `segments` warps, which divide the part among themselves, `share` tiles each.
template <typename T, int BATCH> struct FewRows {
    static constexpr int COLUMNS = BATCH / 8;  // of mma's
    static constexpr int AHEAD = 2;            // tiles whose masks, and rounds of values, that are on their way
    int warp, lane, warps, segments, part;
    int m0, n0, width;         // rows of x and outputs from here on; outputs
    int begin, first, count;   // tiles of K: where the block's and the warp's begin, and the warp's
    int pitch;                 // bytes from row to row of x in shared memory: 4 rows and 8 banks apart

    __device__ __forceinline__ FewRows(int N, int K, int share, int segments, int split) : segments(segments) {
        warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
        width = warps / segments * TILE_ROWS;
        const int wide = (K + TILE_COLUMNS - 1) / TILE_COLUMNS, heights = (N + width - 1) / width;
        const int block = blockIdx.x / split;
        part = blockIdx.x % split;
        n0 = block % heights * width;
        m0 = block / heights * BATCH;
        begin = part * segments * share;
        first = begin + warp % segments * share;
        count = max(0, min(share, wide - first));
        pitch = segments * share * TILE_COLUMNS * 2 + 64;
    }

    // Floats from row to row of the sums, which are (BATCH, width).
    __device__ __forceinline__ int sums_pitch() const { return width + 4; }

    // What lies beyond the matrix is not read, and zeros arrive, which add nothing to any sum.
    __device__ __forceinline__ void copy_x(const T* __restrict__ x, long long ldx, int M, int K, int share,
                                           unsigned to) const {
        const int k0 = begin * TILE_COLUMNS, chunks = segments * share * (TILE_COLUMNS / 8);
        for (int row = warp; row < BATCH; row += warps)
            for (int c = lane; c < chunks; c += WARP) {
                const int valid = m0 + row < M ? min(max(K - k0 - 8 * c, 0), 8) * 2 : 0;
                const T* const from = x + (valid ? (m0 + row) * ldx + k0 + 8 * c : 0);
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + row * pitch + c * 16), "l"(from),
                             "r"(valid)
                             : "memory");
            }
        copy_commit();
    }

    // Ends with the block's sums at the start of shared memory, for all of its threads.
    __device__ __forceinline__ void run(const T* __restrict__ x, long long ldx, const T* __restrict__ values,
                                        const unsigned* __restrict__ masks, const int* __restrict__ offsets, int M, int N,
                                        int K, int share, char* shared) const {
        const int wide = (K + TILE_COLUMNS - 1) / TILE_COLUMNS, strip = n0 / TILE_ROWS + warp / segments;
        const int mine = strip * TILE_ROWS < N ? count : 0;
        const long long tile0 = static_cast<long long>(strip) * wide + first;
        const unsigned* const words = masks + tile0 * TILE_WORDS + lane;
        unsigned mask[AHEAD][2];
        auto load_mask = [&](unsigned (&two)[2], int tile) {
            if (tile < mine) two[0] = __ldg(words + tile * TILE_WORDS), two[1] = __ldg(words + tile * TILE_WORDS + WARP);
        };
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) load_mask(mask[i], i);
        copy_x(x, ldx, M, K, share, shared_address(shared));
        Values<AHEAD> stream(values, offsets + tile0, mine, lane);

        const unsigned buffer = shared_address(shared) + BATCH * pitch + warp * TILE_BUFFER;
        unsigned x_at = shared_address(shared) + lane / 4 * pitch + lane % 4 * 16 + (first - begin) * TILE_COLUMNS * 2;
        float acc[COLUMNS][4] = {};
        copy_wait<0>();
        __syncthreads();
        for (int tile = 0; tile < mine; ++tile) {
            __syncwarp();  // the tile before has been read
            stream.spread(tile, buffer);
            __syncwarp();
            unsigned start = buffer;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned word = mask[0][half];
                const Counts counts(word);
#pragma unroll
                for (int block = 0; block < 4; block += 2) {  // 32 columns of both groups of 8 rows
                    const unsigned second = counts.after(block, start);
                    unsigned a[4][2];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        a[i][0] = pair_of(word, counts, block, i, start);
                        a[i][1] = pair_of(word, counts, block + 1, i, second);
                    }
                    start = counts.after(block + 1, second);
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j) {
                        const uint4 b = load_shared_4(x_at + j * 8 * pitch + half * 128 + block * 32);
                        mma<T>(acc[j], {a[0][0], a[0][1], a[1][0], a[1][1]}, b.x, b.y);
                        mma<T>(acc[j], {a[2][0], a[2][1], a[3][0], a[3][1]}, b.z, b.w);
                    }
                }
            }
            x_at += TILE_COLUMNS * 2;
#pragma unroll
            for (int i = 0; i + 1 < AHEAD; ++i) mask[i][0] = mask[i + 1][0], mask[i][1] = mask[i + 1][1];
            load_mask(mask[AHEAD - 1], tile + AHEAD);
        }

        __syncthreads();  // x and the buffers are no longer read
        float* const sums = reinterpret_cast<float*>(shared);
        const int size = BATCH * sums_pitch();
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int m = j * 8 + lane % 4 * 2 + e % 2, n = warp / segments * TILE_ROWS + lane / 4 + e / 2 * 8;
                sums[warp % segments * size + m * sums_pitch() + n] = acc[j][e];
            }
        __syncthreads();
        if (segments == 1) return;
        for (int i = threadIdx.x; i < size; i += blockDim.x) {  // a thread reads and writes its own place alone
            float sum = 0.0f;
            for (int segment = 0; segment < segments; ++segment) sum += sums[segment * size + i];
            sums[i] = sum;
        }
        __syncthreads();
    }
};

template <typename T, typename O>
__device__ __forceinline__ O finished(float sum, const T* __restrict__ bias, int n, int relu) {
    if (bias) sum += to_float(bias[n]);
    return from_float<O>(relu ? relu_of(sum) : sum);
}
