// y = act(x · Wᵀ + bias) in float, W (N, K) in CSR with few entries, for so many batch rows that x is read from memory.
//
//   x (M, K) with rows of whole 16 bytes, y (M, N) row-major; values (nnz,), cols (nnz,) int or unsigned short.
//
// Where W is sparse, bringing x costs more than multiplying it; so a block has twice as many rows of W as in
// spmm_csr_groups_sm90.cu, a warp a group of 16, and half as many batch rows, BATCH = 128, 4 a lane. It takes one such
// piece of y after another, and each warp writes its outputs out alone, while x of the next piece comes.
//
// x comes in slabs of WIDTH columns: the copy engine brings pieces of it as they lie, and some warps turn them. With each
// slab comes a record for each group, those of a block in one copy: of each row two entries in a fixed place, so that a
// warp asks for the lines of the next row before it has those of this one, and then what more there is.
//
// A plan holds the order of the records (`sources`); spmm_csr_tall_records writes those of the values of each call. It
// counts on rows in which no column repeats.

#include "common/numeric.cuh"
#include "common/sm90.cuh"
#include "common/dependent.cuh"

constexpr int WARP = 32;
constexpr int GROUP = 16, V = 4, BATCH = WARP * V, LINE = BATCH * 4, WIDTH = 128;
constexpr int CONSUMERS = 16, TURNERS = 3, WARPS = CONSUMERS + TURNERS + 1;  // a warp a group; the last one asks
constexpr int PIECE = WARP * LINE, PIECES = WIDTH / WARP, PLACES = 3, SLAB = WIDTH * LINE;
constexpr int MOST_STAGES = 8, ORDER_BLOCK = 256, STARTS_BLOCK = 1024, RECORDS_BLOCK = 256;
constexpr int FIXED = 1 + GROUP;  // units of 16 bytes that every record has: counts, and the first two entries of each row
constexpr int SLABS = 32;  // that are put in order at once

struct __align__(8) Segment {  // where the record of a group and a slab is, and how long, in units
    int start, units;
};

struct __align__(8) Source {  // of an entry: where its value is (-1: of none), and its column within the slab
    int index;
    unsigned column;
};

// --- the plan -------------------------------------------------------------------------------------------------------

// Segments lie as a block of CONSUMERS groups wants them: [block][slab][group].
__device__ __forceinline__ long long segment_at(int group, int slab, int slabs) {
    return (static_cast<long long>(group / CONSUMERS) * slabs + slab) * CONSUMERS + group % CONSUMERS;
}

__device__ __forceinline__ int units_beyond(int count) { return (max(count, 2) - 1) / 2; }

// The columns of a group's rows in a window, as bits.
struct Columns {
    static constexpr int WINDOW = SLABS * WIDTH;
    unsigned long long bits[SLABS][GROUP][2];

    // Entries of a row in a slab before column `end`.
    __device__ __forceinline__ int count(int slab, int r, int end = WIDTH) const {
        int all = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (end > 64 * i) all += __popcll(bits[slab][r][i] & (end < 64 * (i + 1) ? (1ull << end % 64) - 1 : ~0ull));
        return all;
    }
};

// use(i, r, k) for each entry i of the group's rows, r, whose column is k0 + k, in the window; the block's warps share them.
template <typename I, typename USE>
__device__ __forceinline__ void each_entry(const I* cols, const int* offsets, int count, long long k0, const USE& use) {
    for (int r = threadIdx.x / WARP; r < count; r += ORDER_BLOCK / WARP)
        for (int i = offsets[r] + threadIdx.x % WARP; i < offsets[r + 1]; i += WARP) {
            const long long k = static_cast<long long>(cols[i]) - k0;
            if (k >= 0 && k < Columns::WINDOW) use(i, r, static_cast<int>(k));
        }
}

template <typename I>
__device__ __forceinline__ void find(Columns& columns, const I* cols, const int* offsets, int count, long long k0) {
    __syncthreads();
    for (int i = threadIdx.x; i < SLABS * GROUP * 2; i += ORDER_BLOCK) (&columns.bits[0][0][0])[i] = 0;
    __syncthreads();
    each_entry(cols, offsets, count, k0, [&](int, int r, int k) {
        atomicOr(&columns.bits[k / WIDTH][r][k % WIDTH / 64], 1ull << k % 64);
    });
    __syncthreads();
}

// A block a group: units of its records; `most` takes those of the largest.
template <typename I>
__global__ void __launch_bounds__(ORDER_BLOCK)
spmm_csr_tall_count(const I* __restrict__ cols, const int* __restrict__ row_offsets, Segment* __restrict__ segments,
                    int* __restrict__ most, int N, long long K, int slabs) {
    __shared__ Columns columns;
    wait_for_predecessor();
    const int n0 = blockIdx.x * GROUP, count = min(GROUP, N - n0);
    for (long long k0 = 0; k0 < K; k0 += Columns::WINDOW) {
        find(columns, cols, row_offsets + n0, count, k0);
        const long long slab = k0 / WIDTH + threadIdx.x;
        if (threadIdx.x >= SLABS || slab >= slabs) continue;
        int units = FIXED;
        for (int r = 0; r < GROUP; ++r) units += units_beyond(columns.count(threadIdx.x, r));
        atomicMax(most, units);
        segments[segment_at(blockIdx.x, slab, slabs)].units = units;
    }
}

// One block: where each record starts, one after another. `cells` times CONSUMERS of them, of no units where no group is.
__global__ void __launch_bounds__(STARTS_BLOCK) spmm_csr_tall_starts(Segment* __restrict__ segments, long long cells) {
    wait_for_predecessor();
    __shared__ int sums[STARTS_BLOCK / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int before_all = 0;
    for (long long cell0 = 0; cell0 < cells; cell0 += STARTS_BLOCK) {
        Segment* const own = segments + (cell0 + threadIdx.x) * CONSUMERS;
        const bool there = cell0 + threadIdx.x < cells;
        int units[CONSUMERS], all = 0;
#pragma unroll
        for (int i = 0; i < CONSUMERS; ++i) units[i] = there ? own[i].units : 0;
#pragma unroll
        for (int i = 0; i < CONSUMERS; ++i) all += units[i];
        int sum = all;  // over the warp up to this lane, then over the block up to this warp
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == WARP - 1) sums[warp] = sum;
        __syncthreads();
        int before = before_all + sum - all;
        for (int w = 0; w < STARTS_BLOCK / WARP; ++w) {
            if (w < warp) before += sums[w];
            before_all += sums[w];
        }
        if (there)
#pragma unroll
            for (int i = 0; i < CONSUMERS; ++i) {
                own[i].start = before;
                before += units[i];
            }
        __syncthreads();
    }
}

// A block a group: sources, where their entries will be in records. A record begins with how many units there are of each
// row beyond its first, a byte each; then come the first units of all rows, and then the others, row after row.
template <typename I>
__global__ void __launch_bounds__(ORDER_BLOCK)
spmm_csr_tall_order(const I* __restrict__ cols, const int* __restrict__ row_offsets, Source* __restrict__ sources,
                    const Segment* __restrict__ segments, int N, long long K, int slabs) {
    __shared__ Columns columns;
    __shared__ int records[SLABS], others[SLABS][GROUP];  // where they begin, and where each row's others do, in sources
    wait_for_predecessor();
    const int n0 = blockIdx.x * GROUP, count = min(GROUP, N - n0), thread = threadIdx.x;
    for (long long k0 = 0; k0 < K; k0 += Columns::WINDOW) {
        find(columns, cols, row_offsets + n0, count, k0);
        const long long slab = k0 / WIDTH + thread;
        if (thread < SLABS && slab < slabs) {
            const int record = 2 * segments[segment_at(blockIdx.x, slab, slabs)].start;
            int at = record + 2 * FIXED;
            unsigned counts[4] = {};
            for (int r = 0; r < GROUP; ++r) {
                const int here = columns.count(thread, r), units = units_beyond(here);
                counts[r / 4] |= static_cast<unsigned>(units) << r % 4 * 8;
                others[thread][r] = at;
                for (int e = here; e < 2; ++e) sources[record + 2 * (1 + r) + e] = {-1, 0};
                at += 2 * units;
                if (here % 2 && units) sources[at - 1] = {-1, 0};
            }
            records[thread] = record;
            *reinterpret_cast<uint4*>(sources + record) = {counts[0], counts[1], counts[2], counts[3]};
        }
        __syncthreads();
        each_entry(cols, row_offsets + n0, count, k0, [&](int i, int r, int k) {
            const int s = k / WIDTH, e = columns.count(s, r, k % WIDTH);
            sources[e < 2 ? records[s] + 2 * (1 + r) + e : others[s][r] + e - 2] = {i, static_cast<unsigned>(k % WIDTH)};
        });
    }
}

// --- the product ----------------------------------------------------------------------------------------------------

// A warp a record.
__global__ void __launch_bounds__(RECORDS_BLOCK)
spmm_csr_tall_records(const float* __restrict__ values, const uint4* __restrict__ sources,
                      const Segment* __restrict__ segments, uint4* __restrict__ records, int count) {
    wait_for_predecessor();
    let_successor_start();
    constexpr int WARPS_OF_BLOCK = RECORDS_BLOCK / WARP;
    for (int i = blockIdx.x * WARPS_OF_BLOCK + threadIdx.x / WARP; i < count; i += gridDim.x * WARPS_OF_BLOCK) {
        const Segment segment = segments[i];
        const auto value = [&](int index) { return index < 0 ? 0u : bits_of(values[index]); };
        const auto line = [&](int index, unsigned k) { return index < 0 ? 0x80000000u : k * LINE; };
        for (int u = threadIdx.x % WARP; u < segment.units; u += WARP) {
            const uint4 two = sources[segment.start + u];
            records[segment.start + u] =
                u ? make_uint4(value(two.x), line(two.x, two.y), value(two.z), line(two.z, two.w)) : two;
        }
    }
}

// Turn a piece of x, WARP columns, from rows of 128 bytes, swizzled: this is warp `turner`. A lane takes 16 bytes of four
// rows and leaves four columns of 16 bytes; so that eight lanes touch all banks on both sides, the rows are 8 apart, and
// lines have their batch rows in such fours.
__device__ __forceinline__ void turn(char* to, const char* from, int turner) {
    const int lane = threadIdx.x % WARP, p = lane % 8;
#pragma unroll 2
    for (int part = turner; part < BATCH / WARP * 2; part += TURNERS) {
        const int t = part / 2, c = part % 2 * 4 + lane / 8;
        float4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = *reinterpret_cast<const float4*>(from + (t * 32 + i * 8 + p) * 128 + (c ^ p) * 16);
        float4* const line = reinterpret_cast<float4*>(to + c * 4 * LINE) + t * 8 + p;
        line[0] = {v[0].x, v[1].x, v[2].x, v[3].x};
        line[LINE / 16] = {v[0].y, v[1].y, v[2].y, v[3].y};
        line[LINE / 16 * 2] = {v[0].z, v[1].z, v[2].z, v[3].z};
        line[LINE / 16 * 3] = {v[0].w, v[1].w, v[2].w, v[3].w};
    }
}
// The first batch row of a lane; the others are 8 apart.
__device__ __forceinline__ int batch_row(int lane) { return lane / 8 * 32 + lane % 8; }

// A lane's part of a line. Volatile: no load passes a wait.
__device__ __forceinline__ void load_line(float (&x)[V], unsigned from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(from));
}
// Where the line of an entry is; of none, zeros that all lanes share: these lie before all lines.
__device__ __forceinline__ unsigned place(unsigned columns, unsigned line, unsigned zeros) {
    return max(static_cast<int>(columns + line), static_cast<int>(zeros));
}

__device__ __forceinline__ uint4 load_unit(unsigned from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}

__device__ __forceinline__ void add(float (&sums)[V], unsigned factor, const float (&x)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) sums[j] = fmaf(__uint_as_float(factor), x[j], sums[j]);
}

// Add up what a record says, of columns that lie from `columns` on: first two entries of each row, a row ahead; then
// what more there is.
__device__ __forceinline__ void consume(float (&sums)[GROUP][V], unsigned record, unsigned columns, unsigned zeros) {
    float a[2][V], b[2][V];
    uint4 two[2] = {load_unit(record + 16), load_unit(record + 32)}, all;
    load_line(a[0], place(columns, two[0].y, zeros));
    load_line(b[0], place(columns, two[0].w, zeros));
#pragma unroll
    for (int r = 0; r < GROUP; ++r) {
        const int now = r % 2, next = 1 - now;
        if (r + 1 < GROUP) {
            load_line(a[next], place(columns, two[next].y, zeros));
            load_line(b[next], place(columns, two[next].w, zeros));
        }
        add(sums[r], two[now].x, a[now]);
        add(sums[r], two[now].z, b[now]);
        if (r + 2 < GROUP) two[now] = load_unit(record + 16 * (3 + r));
        if (r + 2 == GROUP) all = load_unit(record);
    }
    uint4 unit = load_unit(record += 16 * FIXED);
    const unsigned counts[] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int r = 0; r < GROUP; ++r) {
#pragma unroll 1
        for (int left = counts[r / 4] >> r % 4 * 8 & 255; left > 0; --left) {
            load_line(a[0], columns + unit.y);
            load_line(b[0], place(columns, unit.w, zeros));
            const uint4 now = unit;
            unit = load_unit(record += 16);  // beyond the last ones, of what lies there
            add(sums[r], now.x, a[0]);
            add(sums[r], now.z, b[0]);
        }
    }
}

// Where a warp is in a ring: at which stage, and in a phase of which parity.
struct Place {
    unsigned both;  // twice the stage, and the parity
    __device__ __forceinline__ int stage() const { return both / 2; }
    __device__ __forceinline__ unsigned parity() const { return both % 2; }
    __device__ __forceinline__ bool advance(unsigned stages) {  // whether it is back at the first stage
        both += 2;
        if (both < 2 * stages) return false;
        both = both % 2 ^ 1;
        return true;
    }
};

// The value itself, from the lane that has it: the compiler does not work it out again and again.
__device__ __forceinline__ unsigned kept(unsigned v) { return __shfl_sync(~0u, v, threadIdx.x % WARP); }

struct Output {  // y (M, N), rows m_step apart
    float* data;
    const float* bias;
    long long m_step, M;
    int N, relu, vectors;  // vectors: rows and bias consist of whole 16 bytes
};

// A warp's outputs, `batch` rows from m0 on, columns n0 and on; lanes take four columns each, turned in `buffer`, 16 rows
// at a time, swizzled.
__device__ __forceinline__ void put_out(const float (&sums)[GROUP][V], float4* buffer, const Output& y, int n0,
                                        long long m0, int batch) {
    const int lane = threadIdx.x % WARP, n = n0 + lane % 4 * 4;
    const float least = y.relu ? 0.0f : -infinity();
    const bool fours = y.vectors && n < y.N;
#pragma unroll
    for (int j = 0; j < V; ++j)
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {  // of the lanes
            __syncwarp();
            if (lane / 16 == half)
#pragma unroll
                for (int c = 0; c < GROUP / 4; ++c)
                    buffer[lane % 16 * 4 + (c ^ lane / 2 % 4)] = {sums[4 * c][j], sums[4 * c + 1][j], sums[4 * c + 2][j],
                                                                  sums[4 * c + 3][j]};
            __syncwarp();
#pragma unroll 1
            for (int from = lane / 4; from < 16; from += 8) {
                const int m = batch_row(half * 16 + from) + 8 * j;
                const float4 four = buffer[from * 4 + (lane % 4 ^ from / 2 % 4)];
                if (m >= batch) continue;
                float* const to = y.data + (m0 + m) * y.m_step + n;
                if (fours) {
                    const float4 more = y.bias ? *reinterpret_cast<const float4*>(y.bias + n) : float4{0.0f, 0.0f, 0.0f, 0.0f};
                    *reinterpret_cast<float4*>(to) = {max_nan(four.x + more.x, least), max_nan(four.y + more.y, least),
                                                      max_nan(four.z + more.z, least), max_nan(four.w + more.w, least)};
                    continue;
                }
#pragma unroll 1
                for (int q = 0; q < 4 && n + q < y.N; ++q) {
                    const float sum = q == 0 ? four.x : q == 1 ? four.y : q == 2 ? four.z : four.w;
                    to[q] = max_nan(sum + (y.bias ? y.bias[n + q] : 0.0f), least);
                }
            }
        }
}

// A block for pieces of y, `step` batch rows and CONSUMERS groups of rows of W each, one after another.
__global__ void __launch_bounds__(WARPS* WARP, 1)
spmm_csr_tall(const __grid_constant__ TensorMap x, const __grid_constant__ Output y, const Segment* __restrict__ segments,
              const uint4* __restrict__ records, int slabs, int row_blocks, int stages, int stage_bytes, int items,
              int step) {
    extern __shared__ __align__(1024) char shared[];
    char* const ring = shared + PLACES * PIECE;
    __shared__ unsigned long long full[MOST_STAGES], empty[MOST_STAGES], staged[PLACES], taken[PLACES];
    __shared__ int starts[MOST_STAGES][CONSUMERS];  // of each record of a stage, in bytes
    __shared__ float4 nothing;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    if (threadIdx.x < stages) {
        mbarrier_init(&full[threadIdx.x], CONSUMERS + TURNERS * WARP);
        mbarrier_init(&empty[threadIdx.x], CONSUMERS * WARP);
    }
    if (threadIdx.x < PLACES) {
        mbarrier_init(&staged[threadIdx.x], 1);
        mbarrier_init(&taken[threadIdx.x], TURNERS * WARP);
    }
    if (threadIdx.x == 0) nothing = {0.0f, 0.0f, 0.0f, 0.0f};
    mbarrier_init_fence();
    __syncthreads();

    if (warp >= CONSUMERS) {
        give_registers<64>();
        Place at = {1};  // the phase before the first is over
        if (warp == WARPS - 1) {
            Place piece = {1};
            for (int item = blockIdx.x; item < items; item += gridDim.x) {
                const int m0 = item / row_blocks * step;
                const Segment* const cells = segments + static_cast<long long>(item % row_blocks) * slabs * CONSUMERS;
                for (int s = 0; s < slabs; ++s) {
                    for (int p = 0; p < PIECES; ++p) {
                        mbarrier_wait(&taken[piece.stage()], piece.parity());
                        if (lane == 0) {
                            mbarrier_expect_bytes(&staged[piece.stage()], step * 128);
                            tma_load(shared + piece.stage() * PIECE, &x, &staged[piece.stage()], s * WIDTH + p * WARP, m0);
                        }
                        piece.advance(PLACES);
                    }
                    if (s == 0 && item == blockIdx.x) wait_for_predecessor();
                    const Segment segment = cells[s * CONSUMERS + lane % CONSUMERS];
                    mbarrier_wait(&empty[at.stage()], at.parity());
                    const int first = __shfl_sync(~0u, segment.start, 0);
                    const int end = __shfl_sync(~0u, segment.start + segment.units, CONSUMERS - 1);
                    if (lane < CONSUMERS) starts[at.stage()][lane] = (segment.start - first) * 16;
                    if (lane == 0) {
                        mbarrier_expect_bytes(&full[at.stage()], (end - first) * 16);
                        bulk_load(ring + at.stage() * stage_bytes + SLAB, records + first, (end - first) * 16, &full[at.stage()]);
                    } else if (lane < CONSUMERS) {
                        mbarrier_arrive(&full[at.stage()]);
                    }
                    __syncwarp();
                    at.advance(stages);
                }
            }
        } else {
            Place piece = {0};
            for (int item = blockIdx.x; item < items; item += gridDim.x)
                for (int s = 0; s < slabs; ++s) {
                    mbarrier_wait(&empty[at.stage()], at.parity());
                    for (int p = 0; p < PIECES; ++p) {
                        mbarrier_wait(&staged[piece.stage()], piece.parity());
                        turn(ring + at.stage() * stage_bytes + p * PIECE, shared + piece.stage() * PIECE, warp - CONSUMERS);
                        mbarrier_arrive(&taken[piece.stage()]);
                        piece.advance(PLACES);
                    }
                    mbarrier_arrive(&full[at.stage()]);
                    at.advance(stages);
                }
        }
    } else {
        take_registers<104>();
        unsigned columns = kept(shared_address(ring) + lane * 16), record = kept(shared_address(ring) + SLAB);
        const unsigned zeros = kept(shared_address(&nothing));
        float4* const buffer = reinterpret_cast<float4*>(ring + stages * stage_bytes) + warp * (16 * GROUP / 4);
        Place at = {0};
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            const long long m0 = static_cast<long long>(item / row_blocks) * step;
            const int n0 = (item % row_blocks * CONSUMERS + warp) * GROUP;
            float sums[GROUP][V] = {};
            for (int left = slabs; left > 0; --left) {
                mbarrier_wait(&full[at.stage()], at.parity());
                if (n0 < y.N) consume(sums, record + starts[at.stage()][warp], columns, zeros);
                mbarrier_arrive(&empty[at.stage()]);
                columns += stage_bytes, record += stage_bytes;
                if (at.advance(stages)) columns -= stages * stage_bytes, record -= stages * stage_bytes;
            }
            if (n0 < y.N) put_out(sums, buffer, y, n0, m0, static_cast<int>(min(static_cast<long long>(step), y.M - m0)));
        }
    }
}
