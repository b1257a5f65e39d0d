// y = act(x · wᵀ + bias) for few rows of x and w in bitmap tiles, on the tensor cores of Ampere and later.
//
//   x (M, K) half or bfloat16, rows ldx apart, on 16 bytes; values, masks, offsets: bitmap tiles of w (N, K), see
//   qsparse/kernels/_bitmap_tiles.py; bias (N,) or null; y (M, N) row-major, of x's type or float. `ahead`: chunks of 8
//   values that go to L2 at once (Hopper), 0 or all of them.
//
// The ideas:
//   weights first       w is mma's left operand, 16 outputs high, x the right one; a weight is read once and unpacked
//                       once, straight into the fragment that the instruction wants. A register has two neighbours.
//   pairs of values     a pair needs the values p and p + 1, but p may be odd. So each value goes to shared memory
//                       twice: word i there is (value i - 1, value i), and any pair is one aligned load. Where the
//                       pair's high weight would be value q, word q has it in the upper half, and in the lower half
//                       what comes before it: right for both, for either alone, and for none once masked.
//   counting by bytes   a word of mask has four bytes, each of another block, and ones are counted in all four at once,
//                       within a byte by shifts and adds, over the lanes by one scan. No popcount, which is slow.
//   a warp alone        a warp has its own row of tiles, or a part of it, its own values on the way and its own buffer:
//                       nobody waits for another before the sums. Where `segments` warps divide a row, their sums meet
//                       in shared memory; `split` blocks that divide K leave float sums, and a second kernel adds them
//                       up; both in a fixed order.

#include "common/dependent.cuh"
#include "common/sm80.cuh"

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
__device__ __forceinline__ void store_shared_4(unsigned to, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
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

// Of a pair what is stored: bytes q of `first` and `second` have its low weight's bit and its high one's on top.
__device__ __forceinline__ unsigned kept(unsigned first, unsigned second, int q) {
    const unsigned sign = 8 | q, signs = sign | sign << 4 | (sign | 4) << 8 | (sign | 4) << 12;  // a byte's top bit
    return permuted(first, second, signs);
}

// Pair i of block q, whose words start at `start` in shared memory.
__device__ __forceinline__ unsigned pair_of(unsigned mask, const Counts& counts, int q, int i, unsigned start) {
    const unsigned word = load_shared(__dp4a(counts.before_high[i], 4u << 8 * q, start));
    return word & kept(mask << (7 - 2 * i), mask << (6 - 2 * i), q);
}

__device__ __forceinline__ unsigned ones_of_bytes(unsigned v) {
    v -= v >> 1 & 0x55555555u;
    v = (v & 0x33333333u) + (v >> 2 & 0x33333333u);
    return v + (v >> 4) & 0x0f0f0f0fu;
}

// Start moving this warp's part of all that is read to L2, so that what is read later does not come from memory.
__device__ __forceinline__ void send_ahead(const void* from, int chunks) {
#if __CUDA_ARCH__ >= 900
    const int jobs = gridDim.x * blockDim.x / WARP, mine = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const int share = (chunks + jobs - 1) / jobs, size = min(share, chunks - mine * share);
    const char* const part = static_cast<const char*>(from) + 16ll * mine * share;
    if (threadIdx.x % WARP == 0 && size > 0)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(part), "r"(size * 16) : "memory");
#endif
}

// What a warp's next tile needs, on its way: its masks, and the first ROUNDS times 256 of its values. TURNED: half of the
// lanes spread out the second half of their eight values first, so that a warp's words go to all banks at once.
template <int ROUNDS, bool TURNED> struct Fetched {
    const uint4* values;
    const unsigned* masks;
    int lane, count, offsets;  // tiles, fewer than lanes; lane i: where tile i starts, in chunks of 8
    int start, size;           // of this tile's values, in chunks
    unsigned mask[2];
    uint4 rounds[ROUNDS];

    __device__ __forceinline__ Fetched(const void* values, const unsigned* masks, const int* first, int count, int lane)
        : values(static_cast<const uint4*>(values) + lane), masks(masks), lane(lane), count(count) {
        if (count) mask[0] = __ldg(masks), mask[1] = __ldg(masks + WARP);
        offsets = count ? first[min(lane, count)] : 0;
    }

    __device__ __forceinline__ void load(int tile) {
        start = __shfl_sync(~0u, offsets, tile), size = __shfl_sync(~0u, offsets, tile + 1) - start;
        const uint4* const from = values + start;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i)
            if (i * WARP + lane < size) rounds[i] = __ldg(from + i * WARP);
    }

    static __device__ __forceinline__ void store(unsigned to, uint4 v, unsigned before) {
        const uint4 low{permuted(before, v.x, 0x5432), v.x, permuted(v.x, v.y, 0x5432), v.y};
        const uint4 high{permuted(v.y, v.z, 0x5432), v.z, permuted(v.z, v.w, 0x5432), v.w};
        const bool turned = TURNED && threadIdx.x & 4;
        store_shared_4(turned ? to + 16 : to, turned ? high : low);
        store_shared_4(turned ? to : to + 16, turned ? low : high);
    }

    // Spread this tile's values out in `buffer`, and fetch the next tile.
    __device__ __forceinline__ void spread(int tile, unsigned buffer, unsigned (&now)[2]) {
        const unsigned to = buffer + lane * 32;
        unsigned carry = 0;
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            if (i * WARP >= size) break;
            unsigned before = __shfl_up_sync(~0u, rounds[i].w, 1);
            if (lane == 0) before = carry;
            if (i * WARP + lane < size) store(to + i * WARP * 32, rounds[i], before);
            if ((i + 1) * WARP < size) carry = __shfl_sync(~0u, rounds[i].w, WARP - 1);
        }
        for (int i = ROUNDS * WARP; i < size; i += WARP) {  // denser than half: the rest was not fetched
            uint4 v = {};
            if (i + lane < size) v = __ldg(values + start + i);
            unsigned before = __shfl_up_sync(~0u, v.w, 1);
            if (lane == 0) before = carry;
            carry = __shfl_sync(~0u, v.w, WARP - 1);
            if (i + lane < size) store(to + i * 32, v, before);
        }
        now[0] = mask[0], now[1] = mask[1];
        if (tile + 1 < count) {
            masks += TILE_WORDS;
            mask[0] = __ldg(masks), mask[1] = __ldg(masks + WARP);
            load(tile + 1);
        }
    }
};

// A block's share of a product of few rows: `strips` neighbouring rows of tiles, and a part of K, for which its warps
// share x. Each row of tiles has `segments` warps, which divide the part among themselves, `share` tiles each.
template <typename T, int BATCH> struct FewRows {
    static constexpr int COLUMNS = BATCH / 8;  // of mma's
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

    // What lies beyond the matrix is not read, and zeros arrive, which add nothing to any sum. Blocks that read the
    // same begin at different places.
    __device__ __forceinline__ void copy_x(const T* __restrict__ x, long long ldx, int M, int K, int share,
                                           unsigned to) const {
        const int k0 = begin * TILE_COLUMNS, chunks = segments * share * (TILE_COLUMNS / 8);
        const int turn = blockIdx.x * 16 % chunks, warps_a_row = max(1, warps / BATCH);
        for (int row = warp % BATCH; row < BATCH; row += warps)
            for (int i = warp / BATCH * WARP + lane; i < chunks; i += warps_a_row * WARP) {
                const int c = i + turn < chunks ? i + turn : i + turn - chunks;
                const int valid = m0 + row < M ? min(max(K - k0 - 8 * c, 0), 8) * 2 : 0;
                const T* const from = x + (valid ? (m0 + row) * ldx + k0 + 8 * c : 0);
                const unsigned at = to + row * pitch + c * 16;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(valid)
                             : "memory");
            }
        copy_commit();
    }

    // Ends with the sums of each segment in shared memory, for all threads of the block: see `sum`.
    __device__ __forceinline__ void run(const T* __restrict__ x, long long ldx, const T* __restrict__ values,
                                        const unsigned* __restrict__ masks, const int* __restrict__ offsets, int M,
                                        int N, int K, int share, int ahead, char* shared) const {
        const int wide = (K + TILE_COLUMNS - 1) / TILE_COLUMNS, strip = n0 / TILE_ROWS + warp / segments;
        const int mine = strip * TILE_ROWS < N ? count : 0;
        const long long tile0 = static_cast<long long>(strip) * wide + first;
        const unsigned* const words = masks + tile0 * TILE_WORDS + lane;
        Fetched<4, false> stream(values, words, offsets + tile0, mine, lane);
        send_ahead(values, ahead);
        if (ahead) send_ahead(masks, (N + TILE_ROWS - 1) / TILE_ROWS * wide * (TILE_WORDS / 4));
        copy_x(x, ldx, M, K, share, shared_address(shared));
        if (mine) stream.load(0);

        const unsigned buffer = shared_address(shared) + BATCH * pitch + warp * TILE_BUFFER;
        unsigned x_at = shared_address(shared) + lane / 4 * pitch + lane % 4 * 16 + (first - begin) * TILE_COLUMNS * 2;
        float acc[COLUMNS][4] = {};
        copy_wait<0>();
        __syncthreads();
        for (int tile = 0; tile < mine; ++tile) {
            __syncwarp();  // the tile before has been read
            unsigned mask[2];
            stream.spread(tile, buffer, mask);
            __syncwarp();
            unsigned start = buffer;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned word = mask[half];
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
    }

    __device__ __forceinline__ float sum(const char* shared, int row, int column) const {
        const float* from = reinterpret_cast<const float*>(shared) + row * sums_pitch() + column;
        float total = 0.0f;
        for (int segment = 0; segment < segments; ++segment, from += BATCH * sums_pitch()) total += *from;
        return total;
    }
};

template <typename T, typename O>
__device__ __forceinline__ O finished(float sum, const T* __restrict__ bias, int n, int relu) {
    if (bias) sum += to_float(bias[n]);
    return from_float<O>(relu ? relu_of(sum) : sum);
}

template <typename T, typename O, int BATCH>
__global__ void __launch_bounds__(BATCH == 64 ? 256 : 512, 1)
spmm_bitmap_sm80(const T* __restrict__ x, long long ldx, const T* __restrict__ values,
                 const unsigned* __restrict__ masks, const int* __restrict__ offsets, const T* __restrict__ bias,
                 O* __restrict__ y, float* __restrict__ sums, int M, int N, int K, int relu, int share, int segments,
                 int split, int ahead) {
    extern __shared__ __align__(128) char shared[];
    const FewRows<T, BATCH> block(N, K, share, segments, split);
    block.run(x, ldx, values, masks, offsets, M, N, K, share, ahead, shared);
    for (int i = threadIdx.x; i < BATCH * block.width; i += blockDim.x) {
        const int row = i / block.width, m = block.m0 + row, n = block.n0 + i % block.width;
        if (m >= M || n >= N) continue;
        const float sum = block.sum(shared, row, i % block.width);
        if (split > 1) sums[(static_cast<long long>(block.part) * M + m) * N + n] = sum;
        else y[static_cast<long long>(m) * N + n] = finished<T, O>(sum, bias, n, relu);
    }
}

// y = act(the sum of `split` partial products + bias), always added in the same order.
template <typename T, typename O>
__global__ void __launch_bounds__(256)
spmm_bitmap_sum(const float* __restrict__ sums, const T* __restrict__ bias, O* __restrict__ y, long long M, int N,
                int relu, int split) {
    const long long size = M * N, i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    float sum = 0.0f;
    for (int part = 0; part < split; ++part) sum += sums[part * size + i];
    y[i] = finished<T, O>(sum, bias, static_cast<int>(i % N), relu);
}

// dense (N, ld) = w, zeros and all, for the dense product: a warp has `share` tiles, one after the other. ld is a multiple
// of 8 elements, so two neighbours leave at once, beyond K as zeros.
template <typename T> struct Writer {
    T* dense;
    long long ld;
    int N, lane;
    unsigned buffer;  // where a tile's values are spread out, in shared memory

    // A lane has one pair of each 64 weights, so the words that a warp reads at once lie close together, in different banks.
    template <bool INSIDE> __device__ __forceinline__ void write(const unsigned (&mask)[2], int row0, int column0) const {
        const int i = lane % 4;  // of the pairs of a byte of mask
        const unsigned up_to_high = ((2u << 2 * i) - 1) * 0x01010101u;
        unsigned start = buffer;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Counts counts(mask[half]);
            const unsigned before = counts.before_high[0] - (mask[half] & 0x01010101u);
            unsigned starts[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) starts[q] = start, start = counts.after(q, start);
            T* to = dense + row0 * ld + column0 + half * 64;
#pragma unroll 1
            for (int rows = 0; rows < 8; rows += 2) {  // whose bytes the lanes 4 rows to 4 rows + 7 have
                const int holder = 4 * rows + lane / 4;
                const unsigned word = __shfl_sync(~0u, mask[half], holder);
                const unsigned before_high = __shfl_sync(~0u, before, holder) + ones_of_bytes(word & up_to_high);
                const unsigned first = word << (7 - 2 * i), second = word << (6 - 2 * i);
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const unsigned pair = load_shared(__dp4a(before_high, 4u << 8 * q, starts[q]));
                    const int row = row0 + rows + q % 2 * 8, column = column0 + half * 64 + q / 2 * 32;
                    if (INSIDE || (row < N && column < ld))
                        *reinterpret_cast<unsigned*>(to + q % 2 * 8 * ld + q / 2 * 32) = pair & kept(first, second, q);
                }
                to += 2 * ld;
            }
        }
    }
};

template <typename T>
__global__ void __launch_bounds__(256, 3)
spmm_bitmap_write(const T* __restrict__ values, const unsigned* __restrict__ masks, const int* __restrict__ offsets,
                  T* __restrict__ dense, long long ld, int N, int K, int share) {
    extern __shared__ __align__(128) char shared[];
    let_successor_start();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int wide = (K + TILE_COLUMNS - 1) / TILE_COLUMNS, tiles = (N + TILE_ROWS - 1) / TILE_ROWS * wide;
    const int first = min((static_cast<int>(blockIdx.x * blockDim.x) / WARP + warp) * share, tiles);
    const int count = min(share, tiles - first);
    const Writer<T> writer{dense, ld, N, lane, shared_address(shared) + warp * TILE_BUFFER};
    Fetched<5, true> stream(values, masks + first * static_cast<long long>(TILE_WORDS) + lane, offsets + first, count, lane);
    if (count) stream.load(0);
    for (int tile = 0; tile < count; ++tile) {
        unsigned mask[2];
        __syncwarp();  // the tile before has been read
        stream.spread(tile, writer.buffer, mask);
        __syncwarp();
        const int row = (first + tile) / wide * TILE_ROWS, column = (first + tile) % wide * TILE_COLUMNS;
        const int row0 = row + lane / 16, column0 = column + lane % 16 * 2;
        if (row + TILE_ROWS <= N && column + TILE_COLUMNS <= ld) writer.template write<true>(mask, row0, column0);
        else writer.template write<false>(mask, row0, column0);
    }
}
