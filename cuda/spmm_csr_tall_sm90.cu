// y = act(x · Wᵀ + bias) in float, W (N, K) in CSR, for many batch rows and few rows of W.
//
//   x (M, K), contiguous along k; y (M, N), contiguous; rows of both start on 16 bytes; values (nnz,), cols (nnz,) int
//   or unsigned short. No column repeats within a row, and no row is so long that a warp keeps the others waiting.
//
// As in spmm_csr_groups_sm90.cu a warp owns a group of 12 rows of W and BATCH = 256 batch rows, 8 a lane, all sums in
// registers, and what it multiplies comes from shared memory: slabs of WIDTH columns of x, turned to lines of batch
// rows, and with each slab, group by group, the entries that lie in it. Where few blocks read the same x, turning it
// beforehand takes as long as the product. So blocks turn it: the copy engine brings it, as it lies, to a ring of
// pieces, from where PRODUCERS warps turn it into a ring of slabs. A block stays for one item (rows of W, batch rows)
// after the other, so that x goes on coming while outputs go. The copy engine stores these, too: 32 lanes would write
// to 32 rows at once.
//
// A plan, made once for a pattern, holds the entries in that order (`sources`), and where each group's begin in each
// slab (`segments`). With W's values they become `records`, before each product.

#include "common/dependent.cuh"
#include "common/numeric.cuh"
#include "common/sm90.cuh"

constexpr int WARP = 32;
constexpr int GROUP = 12;  // rows of W
constexpr int V = 8, BATCH = WARP * V, LINE = BATCH * 4;  // batch rows of a lane and of a block; a line's bytes
constexpr int CONSUMERS = 12, PRODUCERS = 4, WARPS = CONSUMERS + PRODUCERS;
constexpr int WIDTH = 64, SLAB = WIDTH * LINE + WIDTH / 4 * 16;  // columns; bytes, as `offset_of` lays lines out
constexpr int BOX_ROWS = 16, BOX = BOX_ROWS * WIDTH * 4;  // batch rows of x as it lies; bytes
constexpr int RAW = 4 * BOX, PIECES = BATCH / 4 / BOX_ROWS;  // a piece is four boxes, each 32 batch rows from the last
constexpr int STAGES = 2, MOST_RAWS = 4;
constexpr int PATCH = WARP * GROUP * 4;  // bytes: outputs of 32 batch rows
constexpr int ORDER_BLOCK = 256;
constexpr int SLABS = 64, WINDOW = SLABS * WIDTH;  // what is put in order at once

struct __align__(8) Segment {  // a group's entries in a slab: where their record begins, and its length, of 16 bytes
    int start, units;
};

struct __align__(8) Source {  // of an entry: where its value is (-1: of none), and its column within the slab
    int index;
    unsigned column;
};

// --- the plan -------------------------------------------------------------------------------------------------------

// use(i, r, k) for each entry i of a group's rows, r, whose column is k0 + k, in the window; warps share the rows.
template <typename I, typename USE>
__device__ __forceinline__ void each_entry(const I* cols, const int* row_offsets, int count, long long k0,
                                           const USE& use) {
    for (int r = threadIdx.x / WARP; r < count; r += ORDER_BLOCK / WARP) {
        const unsigned end = row_offsets[r + 1];
        for (unsigned i = row_offsets[r] + threadIdx.x % WARP; i < end; i += WARP) {
            const long long k = static_cast<long long>(cols[i]) - k0;
            if (k >= 0 && k < WINDOW) use(i, r, static_cast<int>(k));
        }
    }
}

// A block a group: sources, segments [group][slab]; found: the units of the longest record, and whether a column
// repeats. A record is a unit that counts the entries of each row, and then the entries, row after row.
template <typename I>
__global__ void __launch_bounds__(ORDER_BLOCK)
spmm_csr_tall_order(const I* __restrict__ cols, const int* __restrict__ row_offsets, Source* __restrict__ sources,
                    Segment* __restrict__ segments, int* __restrict__ found, long long N, long long K, int slabs) {
    wait_for_predecessor();
    __shared__ unsigned long long masks[SLABS][GROUP];  // the columns with an entry
    __shared__ int starts[SLABS][GROUP];
    __shared__ int sums[ORDER_BLOCK / WARP];
    const long long n0 = static_cast<long long>(blockIdx.x) * GROUP;
    const int count = static_cast<int>(min(static_cast<long long>(GROUP), N - n0));
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    row_offsets += n0;
    segments += static_cast<long long>(blockIdx.x) * slabs;
    int position = (row_offsets[0] + 1) / 2 + blockIdx.x * (2 * slabs + 1);  // in units
    for (long long k0 = 0; k0 < K; k0 += WINDOW) {
        __syncthreads();
        for (int i = thread; i < SLABS * GROUP; i += ORDER_BLOCK) (&masks[0][0])[i] = 0;
        __syncthreads();
        each_entry(cols, row_offsets, count, k0, [&](int, int r, int k) {
            if (atomicOr(&masks[k / WIDTH][r], 1ull << k % WIDTH) >> k % WIDTH & 1) found[1] = 1;
        });
        __syncthreads();
        unsigned counts[GROUP / 4] = {};
        int own = 2;  // places of 8 bytes
        if (thread < SLABS) {
#pragma unroll
            for (int r = 0; r < GROUP; ++r) {
                const int here = __popcll(masks[thread][r]);
                counts[r / 4] |= here << r % 4 * 8;
                starts[thread][r] = own;
                own += here;
            }
        }
        const int units = thread < SLABS ? (own + 1) / 2 : 0;
        int sum = units;
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == WARP - 1) sums[warp] = sum;
        __syncthreads();
        int before = position + sum - units;
        for (int w = 0; w < ORDER_BLOCK / WARP; ++w) {
            if (w < warp) before += sums[w];
            position += sums[w];
        }
        if (thread < SLABS && k0 / WIDTH + thread < slabs) {
            for (int r = 0; r < GROUP; ++r) starts[thread][r] += 2 * before;
            if (own % 2) sources[2 * before + own] = {-1, 0};
            reinterpret_cast<uint4*>(sources)[before] = {counts[0], counts[1], counts[2], 0};
            segments[k0 / WIDTH + thread] = {before, units};
            atomicMax(&found[0], units);
        }
        __syncthreads();
        each_entry(cols, row_offsets, count, k0, [&](int i, int r, int k) {
            const auto before_k = masks[k / WIDTH][r] & ((1ull << k % WIDTH) - 1);
            sources[starts[k / WIDTH][r] + __popcll(before_k)] = {i, static_cast<unsigned>(k % WIDTH)};
        });
    }
}

// Where a column of a slab is: a line of batch rows, and after every fourth 16 bytes more, so that a warp that turns 4
// batch rows x 32 columns touches every bank once.
__device__ __forceinline__ unsigned offset_of(unsigned column) { return column * LINE + column / 4 * 16; }

// A warp a record: for values the entries' values, for columns their lines.
__global__ void __launch_bounds__(ORDER_BLOCK)
spmm_csr_tall_records(const Segment* __restrict__ segments, const uint4* __restrict__ sources,
                      const float* __restrict__ values, uint4* __restrict__ records, int count) {
    wait_for_predecessor();  // for the successor, too, which reads x at once
    let_successor_start();
    const int warps = ORDER_BLOCK / WARP;
    for (int i = blockIdx.x * warps + threadIdx.x / WARP; i < count; i += gridDim.x * warps) {
        const Segment segment = segments[i];
        const auto value = [&](int index) { return index < 0 ? 0u : __float_as_uint(values[index]); };
        for (int u = threadIdx.x % WARP; u < segment.units; u += WARP) {
            const long long at = static_cast<long long>(segment.start) + u;
            const uint4 two = sources[at];
            records[at] = u ? uint4{value(two.x), offset_of(two.y), value(two.z), offset_of(two.w)} : two;
        }
    }
}

// --- the product ----------------------------------------------------------------------------------------------------

// The same value, of which the compiler knows nothing: what is worked out from it stays where it is needed.
__device__ __forceinline__ int opaque(int v) {
    asm volatile("mov.b32 %0, %0;" : "+r"(v));
    return v;
}

// Lines have batch row 32 j + lane in a lane's place of value j: four neighbouring words, and four half a line away.
__device__ __forceinline__ void load_line(float (&x)[V], unsigned from) {
#pragma unroll
    for (int j = 0; j < V; j += 4)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[j]), "=f"(x[j + 1]), "=f"(x[j + 2]), "=f"(x[j + 3])
                     : "r"(from + j / 4 * (LINE / 2)));
}

__device__ __forceinline__ void load_entry(float& value, unsigned& line, unsigned from) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=f"(value), "=r"(line) : "r"(from));
}

// Add up what a record says, of lines that lie from `lines` on.
__device__ __forceinline__ void consume(float (&sums)[GROUP][V], unsigned record, unsigned lines) {
    unsigned counts[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(counts[0]), "=r"(counts[1]), "=r"(counts[2]), "=r"(counts[3]) : "r"(record));
    float value;
    unsigned line;
    load_entry(value, line, record += 16);
#pragma unroll
    for (int r = 0; r < GROUP; ++r)
#pragma unroll 1
        for (int left = counts[r / 4] >> r % 4 * 8 & 255; left > 0; --left) {
            float x[V];
            load_line(x, lines + line);
            const float factor = value;
            load_entry(value, line, record += 8);  // beyond the last one, of what lies there
#pragma unroll
            for (int j = 0; j < V; ++j) sums[r][j] = fmaf(factor, x[j], sums[r][j]);
        }
}

// A piece of x as it lies, turned into a quarter of a slab's lines: at once a batch row of each box x 32 columns, 4 a
// lane.
__device__ __forceinline__ void turn(unsigned from, unsigned to, int columns) {
    constexpr int COUNT = BOX_ROWS / PRODUCERS;
#pragma unroll
    for (int k = 0; k < WIDTH; k += WARP) {
        if (k >= columns) break;
        float four[COUNT][4];
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(four[i][0]), "=f"(four[i][1]), "=f"(four[i][2]), "=f"(four[i][3])
                         : "r"(from + k * 4 + i * WIDTH * 4));
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + offset_of(k) + i * 16 + j * LINE), "f"(four[i][j])
                             : "memory");
    }
}

// A group's outputs, batch rows m0 on, through two patches in turn that only this warp uses.
__device__ __forceinline__ void store(const float (&sums)[GROUP][V], const TensorMap& y, char* patches, float bias,
                                      float least, int n0, int m0) {
    const int lane = opaque(threadIdx.x % WARP);
#pragma unroll
    for (int j = 0; j < V; ++j) {
        char* const patch = patches + j % 2 * PATCH;
        if (lane == 0) tma_store_wait_read<1>();  // of the last but one, which was this patch's
        __syncwarp();
#pragma unroll
        for (int r = 0; r < GROUP; r += 4) {
            float four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) four[i] = max_nan(sums[r + i][j] + __shfl_sync(~0u, bias, r + i), least);
            *reinterpret_cast<float4*>(patch + lane * (GROUP * 4) + r * 4) = {four[0], four[1], four[2], four[3]};
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
            tma_store(&y, patch, n0, m0 + j * WARP);
            tma_store_commit();
        }
    }
}

// An item is a block of groups and one of batch rows. Items with the same batch rows are neighbours, and so taken at
// the same time: x comes from memory once.
__global__ void __launch_bounds__(WARPS* WARP, 1)
spmm_csr_tall(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y, const float* __restrict__ bias,
              const Segment* __restrict__ segments, const uint4* __restrict__ records, int N, int K, int relu,
              int row_blocks, int items, int raws, int stage_bytes, int room) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ unsigned long long full[STAGES], empty[STAGES], raw_full[MOST_RAWS], raw_empty[MOST_RAWS];
    char* const patches = shared + raws * RAW;
    char* const ring = patches + CONSUMERS * 2 * PATCH;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int slabs = (K + WIDTH - 1) / WIDTH, all_groups = (N + GROUP - 1) / GROUP;
    const auto first_of = [&](int row_block, int blocks) { return all_groups * row_block / blocks; };

    if (threadIdx.x < STAGES) {
        mbarrier_init(&full[threadIdx.x], PRODUCERS * WARP + 1);
        mbarrier_init(&empty[threadIdx.x], CONSUMERS * WARP);
    }
    if (threadIdx.x < raws) {
        mbarrier_init(&raw_full[threadIdx.x], 1);
        mbarrier_init(&raw_empty[threadIdx.x], PRODUCERS * WARP);
    }
    mbarrier_init_fence();
    __syncthreads();

    int stage = 0;
    if (warp >= CONSUMERS) {
        const int producer = warp - CONSUMERS, quad = lane % 8 * 4;  // of columns
        const unsigned from = shared_address(shared) + lane / 8 * BOX + producer * (BOX / PRODUCERS) + quad * 4;
        const unsigned place = offset_of(quad) + producer * (BOX_ROWS / PRODUCERS * 16) + lane / 8 * 4;
        const bool asks = producer == 0 && lane == 0;
        // What is asked for next: a piece of the slabs of item `ahead`.
        int ahead = blockIdx.x, ahead_piece = 0, ahead_raw = 0;
        unsigned ahead_parity = 1;
        const auto ask = [&]() {
            if (ahead >= items) return;
            mbarrier_wait(&raw_empty[ahead_raw], ahead_parity);
            mbarrier_expect_bytes(&raw_full[ahead_raw], RAW);
            const int piece = ahead_piece % PIECES;
            const int m = ahead / row_blocks * BATCH + piece / 2 * (4 * WARP) + piece % 2 * BOX_ROWS;
            char* const raw = shared + ahead_raw * RAW;
            for (int i = 0; i < 4; ++i)
                tma_load(raw + i * BOX, &x, &raw_full[ahead_raw], ahead_piece / PIECES * WIDTH, m + i * WARP);
            if (++ahead_raw == raws) ahead_raw = 0, ahead_parity ^= 1;
            if (++ahead_piece == slabs * PIECES) ahead_piece = 0, ahead += gridDim.x;
        };
        if (asks)
            for (int i = 0; i < raws; ++i) ask();
        bool waits = true;  // for the records, which nobody needs before x has come
        int raw = 0;
        unsigned parity = 1, raw_parity = 0;  // of the phase before the first, which is over; of the first
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            const int row_block = item % row_blocks, g0 = first_of(row_block, row_blocks);
            const int groups = first_of(row_block + 1, row_blocks) - g0;
            const Segment* const own = segments + static_cast<long long>(g0 + min(lane, groups - 1)) * slabs;
            Segment next = own[0];
            for (int s = 0; s < slabs; ++s) {
                const Segment segment = next;
                if (s + 1 < slabs) next = own[s + 1];
                mbarrier_wait(&empty[stage], parity);
                char* const slab = ring + stage * stage_bytes;
                if (producer == 0) {
                    if (waits) wait_for_predecessor();
                    waits = false;
                    const int bytes = lane < groups ? segment.units * 16 : 0;
                    const int all = __reduce_add_sync(~0u, bytes);
                    if (lane == 0) mbarrier_expect_bytes(&full[stage], all);
                    __syncwarp();
                    if (lane < groups)
                        bulk_load(slab + SLAB + lane * room, records + segment.start, bytes, &full[stage]);
                }
                // Batch row 32 j + l is word j / 4 * 128 + 4 l + j % 4 of a line. A piece has four j, and half the l.
                const unsigned to = shared_address(slab) + place;
#pragma unroll 1
                for (int piece = 0; piece < PIECES; ++piece) {
                    mbarrier_wait(&raw_full[raw], raw_parity);
                    turn(from + raw * RAW, to + piece / 2 * (LINE / 2) + piece % 2 * (BOX_ROWS * 16), K - s * WIDTH);
                    mbarrier_arrive(&raw_empty[raw]);
                    if (asks) ask();
                    __syncwarp();
                    if (++raw == raws) raw = 0, raw_parity ^= 1;
                }
                mbarrier_arrive(&full[stage]);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
    } else {
        unsigned parity = 0;
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            const int blocks = opaque(row_blocks), row_block = item % blocks;
            const int g = opaque(first_of(row_block, blocks) + warp);
            const bool active = g < first_of(row_block + 1, blocks);
            float sums[GROUP][V] = {};
            for (int s = 0; s < slabs; ++s) {
                mbarrier_wait(&full[stage], parity);
                const unsigned slab = shared_address(ring) + stage * stage_bytes;
                if (active) consume(sums, slab + SLAB + warp * room, slab + lane * 16);
                mbarrier_arrive(&empty[stage]);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            if (active) {
                const int n = g * GROUP + lane;
                const float own_bias = bias && lane < GROUP && n < N ? bias[n] : 0.0f;
                const int m0 = item / opaque(row_blocks) * BATCH;
                store(sums, y, patches + warp * 2 * PATCH, own_bias, relu ? 0.0f : -infinity(), g * GROUP, m0);
            }
        }
        if (lane == 0) tma_store_wait_read<0>();  // nobody leaves before his patches are read
    }
}
