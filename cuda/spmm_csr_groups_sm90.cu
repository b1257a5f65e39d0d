// y = act(x · Wᵀ + bias) in float, W (N, K) in CSR, for batches of more than a few rows.
//
//   x (M, K) and y (M, N) in any strides; values (nnz,), cols (nnz,) int or unsigned short.
//
// Every multiply-add reads 4 bytes of x: from shared memory, at 128 bytes a clock, or nothing else can keep up; so
// what counts is that warps do nothing but read x. A warp owns a group of 8 rows of W and BATCH = 256 batch rows, 8 a
// lane, all sums in registers. x comes slab by slab (WIDTH columns, lines of batch rows) through a ring of shared
// memory, and with each slab a record for each group: the entries that lie in it, row after row, two to a load, each
// its value and where its column's line is. A group's rows are spelled out, so that sums have registers.
//
// One warp asks for all that: the copy engine brings a slab in one piece from x turned, which spmm_csr_group_prepare
// does where x does not lie so; or some warps turn x on its way, where few blocks of rows read it (TURNED false). A
// cluster of `split` blocks shares out the slabs of the same outputs, and adds up through distributed shared memory,
// in order: the same bits every run.
//
// A plan, made once for a W, holds the order of the records (`sources`) and how many entries there are of each row in
// each slab (`segments`); spmm_csr_group_prepare writes records of the values of each call. It works on virtual rows:
// a row of more than `limit` entries is split into parts, so that a long row keeps no warp waiting; their sums go to
// `partial`, and spmm_csr_group_join adds them in order. It does parts in which a column repeats, too, entry by entry.

#include "common/numeric.cuh"
#include "common/sm90.cuh"
#include "common/dependent.cuh"

constexpr int WARP = 32;
constexpr int GROUP = 8;  // rows of W
constexpr int V = 8, BATCH = WARP * V, LINE = BATCH * 4;  // batch rows of a lane and of a block; a line's bytes
constexpr int CONSUMERS = 16;  // a warp a group
constexpr int MOST_STAGES = 8, MOST_SPLIT = 8;
constexpr int PLAN_BLOCK = 1024, ORDER_BLOCK = 256, PREPARE_BLOCK = 256;
constexpr int TILE = 64;  // of x that is turned at once
constexpr int LEAST_WINDOW = 4096;  // columns that are put in order at once, or a few more: whole slabs

struct Part {  // a virtual row: entries [begin, end) of row n, whose sums go to y (slot -1) or to partial[slot]
    int n, slot, begin, end, repeats;
};

// Of a group and a slab: where its record starts, in units of 16 bytes, and how many entries there are of each row. A
// record begins with it; then come each row's entries, in twos.
struct __align__(16) Segment {
    int start;
    unsigned char counts[12];  // GROUP of them, then zeros
};
constexpr int SPARE = 1 + GROUP / 2;  // units of a record beyond a half for each entry, at most

struct __align__(8) Source {  // of an entry: where its value is (-1: of none), and its column within the slab
    int index;
    unsigned column;
};

// --- the plan -------------------------------------------------------------------------------------------------------

// One block. parts[first[n]] up to parts[first[n + 1]] are row n's; first[N] counts the virtual rows.
__global__ void __launch_bounds__(PLAN_BLOCK)
spmm_csr_group_parts(const int* __restrict__ row_offsets, Part* __restrict__ parts, int* __restrict__ first,
                     long long N, int limit) {
    wait_for_predecessor();
    __shared__ int sums[PLAN_BLOCK / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int before_all = 0;
    for (long long n0 = 0; n0 < N; n0 += PLAN_BLOCK) {
        const long long n = n0 + threadIdx.x;
        const int begin = n < N ? row_offsets[n] : 0, length = n < N ? row_offsets[n + 1] - begin : 0;
        const int count = n < N ? (length - 1) / limit + 1 : 0;  // 1 of an empty row
        int sum = count;  // over the warp up to this lane, then over the block up to this warp
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == WARP - 1) sums[warp] = sum;
        __syncthreads();
        int before = before_all + sum - count;
        for (int w = 0; w < PLAN_BLOCK / WARP; ++w) {
            if (w < warp) before += sums[w];
            before_all += sums[w];
        }
        if (n < N) {
            first[n] = before;
            const auto cut = [&](int p) { return begin + static_cast<int>(static_cast<long long>(length) * p / count); };
            for (int p = 0; p < count; ++p)
                parts[before + p] = {static_cast<int>(n), count == 1 ? -1 : 2 * (before - static_cast<int>(n)) + p,
                                     cut(p), cut(p + 1), 0};
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) first[N] = before_all;
}

// use(i, r, k) for each entry i of a group's parts, r, whose column is k0 + k, in the window; the block's warps share
// them.
template <int WINDOW, typename I, typename USE>
__device__ __forceinline__ void each_entry(const I* cols, const Part* parts, int count, long long k0, const USE& use) {
    for (int r = threadIdx.x / WARP; r < count; r += ORDER_BLOCK / WARP) {
        const Part part = parts[r];
        for (unsigned i = part.begin + threadIdx.x % WARP; i < part.end; i += WARP) {
            const long long k = static_cast<long long>(cols[i]) - k0;
            if (k >= 0 && k < WINDOW) use(i, r, static_cast<int>(k));
        }
    }
}

// A block a group: sources, where their entries will be in records, and segments [group][slab]. found: the units of
// the largest record, and whether a column repeats in a part. Records take half a unit for an entry and SPARE, or one
// for an entry and 1.
template <typename I, int WIDTH>
__global__ void __launch_bounds__(ORDER_BLOCK, 4)
spmm_csr_group_order(const I* __restrict__ cols, const int* __restrict__ first, Part* __restrict__ parts,
                     Source* __restrict__ sources, Segment* __restrict__ segments, int* __restrict__ found, long long N,
                     long long K, int slabs, int in_twos) {
    constexpr int SLABS = (LEAST_WINDOW + WIDTH - 1) / WIDTH, WINDOW = SLABS * WIDTH;
    static_assert(WIDTH <= 64 && SLABS <= ORDER_BLOCK, "a bit a column, a thread a slab");
    __shared__ unsigned long long masks[SLABS][GROUP];  // the columns with an entry
    __shared__ unsigned starts[SLABS][GROUP];  // twice as many as units
    __shared__ int sums[ORDER_BLOCK / WARP];
    __shared__ unsigned repeats;
    wait_for_predecessor();
    const int v0 = blockIdx.x * GROUP, count = min(GROUP, first[N] - v0);
    if (count <= 0) return;
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    parts += v0, segments += static_cast<long long>(blockIdx.x) * slabs;
    int position = in_twos ? (parts[0].begin + 1) / 2 + blockIdx.x * (SPARE * slabs + 1)
                           : parts[0].begin + blockIdx.x * slabs;
    if (thread == 0) repeats = 0;
    const auto mark = [&](int, int r, int k) {
        if (atomicOr(&masks[k / WIDTH][r], 1ull << k % WIDTH) >> k % WIDTH & 1) atomicOr(&repeats, 1u << r);
    };
    const auto clear = [&]() {
        __syncthreads();
        for (int i = thread; i < SLABS * GROUP; i += ORDER_BLOCK) (&masks[0][0])[i] = 0;
        __syncthreads();
    };
    // A part in which a column repeats is out for all windows: look before anything is written.
    for (long long k0 = 0; k0 < K; k0 += WINDOW) {
        clear();
        each_entry<WINDOW>(cols, parts, count, k0, mark);
    }
    __syncthreads();
    const unsigned out = repeats;
    if (thread < count) parts[thread].repeats = out >> thread & 1;
    if (thread == 0 && out) found[1] = 1;

    for (long long k0 = 0; k0 < K; k0 += WINDOW) {
        if (K > WINDOW) {
            clear();
            each_entry<WINDOW>(cols, parts, count, k0, mark);
            __syncthreads();
        }
        Segment segment = {};
        int own = 0;  // in units of 16 bytes
        if (thread < SLABS) {
            own = 1;
            for (int r = 0; r < GROUP; ++r) {
                const int here = out >> r & 1 ? 0 : __popcll(masks[thread][r]);
                segment.counts[r] = static_cast<unsigned char>(here);
                starts[thread][r] = 2u * own;
                own += (here + 1) / 2;
            }
        }
        int sum = own;
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == WARP - 1) sums[warp] = sum;
        __syncthreads();
        int before = position + sum - own;
        for (int w = 0; w < ORDER_BLOCK / WARP; ++w) {
            if (w < warp) before += sums[w];
            position += sums[w];
        }
        if (thread < SLABS) {
            for (int r = 0; r < GROUP; ++r) {
                starts[thread][r] += 2u * before;
                if (segment.counts[r] % 2) sources[starts[thread][r] + segment.counts[r]] = {-1, 0};
            }
            segment.start = before;
            if (k0 / WIDTH + thread < slabs) {
                segments[k0 / WIDTH + thread] = segment;
                atomicMax(&found[0], own);
            }
        }
        __syncthreads();
        each_entry<WINDOW>(cols, parts, count, k0, [&](int i, int r, int k) {
            const auto before_k = masks[k / WIDTH][r] & ((1ull << k % WIDTH) - 1);
            if (!(out >> r & 1)) sources[starts[k / WIDTH][r] + __popcll(before_k)] = {i, static_cast<unsigned>(k % WIDTH)};
        });
    }
}

// --- the product ----------------------------------------------------------------------------------------------------

struct Lines {  // x (M, K)
    const float* data;
    long long m_step, k_step, M, K;
};

struct Groups {  // W
    const void* cols;
    const Part* parts;
    const int* first;
    const Segment* segments;
    const float* values;
    const Source* sources;
    const int* found;
    long long N, K;
    int slabs, narrow;  // narrow: cols are unsigned short
};

struct Output {
    float* data;
    const float* bias;
    float* partial;  // [slot][m]
    long long m_step, n_step, M;
    int relu, vectors;  // vectors: columns are contiguous and start on 16 bytes
};

__device__ __forceinline__ int units_of(const uint4& segment) {
    const auto twos = [](unsigned four) { return __dp4a(four + 0x01010101u >> 1 & 0x7f7f7f7fu, 0x01010101u, 0u); };
    return 1 + twos(segment.y) + twos(segment.z) + twos(segment.w);
}

// A warp a record.
__device__ __forceinline__ void make_records(const Groups& w, uint4* __restrict__ records, int block, int blocks) {
    const int lane = threadIdx.x % WARP, warps = PREPARE_BLOCK / WARP;
    const long long count = static_cast<long long>((w.first[w.N] + GROUP - 1) / GROUP) * w.slabs;
    for (long long i = static_cast<long long>(block) * warps + threadIdx.x / WARP; i < count; i += blocks * warps) {
        const uint4 segment = reinterpret_cast<const uint4*>(w.segments)[i];
        const int units = units_of(segment);
        const long long start = static_cast<int>(segment.x);
        const auto value = [&](int index) { return index < 0 ? 0u : bits_of(w.values[index]); };
        if (lane == 0) records[start] = segment;
        for (int u = 1 + lane; u < units; u += WARP) {
            const uint4 two = reinterpret_cast<const uint4*>(w.sources)[start + u];
            records[start + u] = {value(two.x), two.y * LINE, value(two.z), two.w * LINE};
        }
    }
}

// xt (K, stride) = xᵀ, a TILE x TILE square a block; zeros beyond M.
__device__ __forceinline__ void turn_square(const Lines& x, float* __restrict__ xt, long long stride, int block) {
    constexpr int WARPS = PREPARE_BLOCK / WARP;
    __shared__ float square[TILE][TILE + 1];  // [k][m]
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long squares = (x.K + TILE - 1) / TILE;
    const long long m0 = block / squares * TILE, k0 = block % squares * TILE;
#pragma unroll
    for (int i = 0; i < TILE / WARPS; ++i)
#pragma unroll
        for (int half = 0; half < TILE; half += WARP) {
            const int m = warp + i * WARPS, k = half + lane;
            square[k][m] = m0 + m < x.M && k0 + k < x.K ? x.data[(m0 + m) * x.m_step + (k0 + k) * x.k_step] : 0.0f;
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE / WARPS; ++i)
#pragma unroll
        for (int half = 0; half < TILE; half += WARP) {
            const int m = half + lane, k = warp + i * WARPS;
            if (m0 + m < stride && k0 + k < x.K) xt[(k0 + k) * stride + m0 + m] = square[k][m];
        }
}

// What the product takes: W's records, by the first blocks, and x turned, by the others, if there are any.
__global__ void __launch_bounds__(PREPARE_BLOCK)
spmm_csr_group_prepare(const __grid_constant__ Groups w, const __grid_constant__ Lines x, uint4* __restrict__ records,
                       float* __restrict__ xt, long long stride, int blocks) {
    wait_for_predecessor();  // before the successor starts: it reads x and what was found out about W at once
    let_successor_start();
    if (blockIdx.x < blocks) make_records(w, records, blockIdx.x, blocks);
    else turn_square(x, xt, stride, blockIdx.x - blocks);
}

// x by slabs, lines of batch rows. TURNED: it is already. Else TURNERS warps turn it, in halves, from where the copy
// engine puts it as it lies: rows of 128 bytes, swizzled. A lane takes 16 bytes of four rows and leaves four columns
// of 16 bytes; so that eight lanes touch all banks on both sides, the rows are 8 apart, and lines have their batch
// rows in such fours.
template <int WIDTH, bool TURNED> struct Slab {
    static constexpr int BYTES = WIDTH * LINE, HALF = WARP * LINE, STAGING = TURNED ? 0 : 2 * HALF;
    static constexpr int TURNERS = TURNED ? 0 : 3, WARPS = CONSUMERS + TURNERS + 1;
    static_assert(TURNED || 2 * HALF == BYTES, "a barrier a half");

    // The batch row of word w of a line, and how far apart the four from there on are, for w a multiple of 4.
    static constexpr int APART = TURNED ? 1 : 8;
    static __device__ __forceinline__ int row(int w) { return TURNED ? w : w / 32 * 32 + w / 4 % 8; }

    // Turn half a slab: this is warp `turner`.
    static __device__ __forceinline__ void turn(char* to, const char* from, int turner) {
        const int lane = threadIdx.x % WARP, p = lane % 8;
#pragma unroll 2
        for (int part = turner; part < 16; part += TURNERS) {
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
};

// A lane's part of a line: four words, and the next four half a line away. Volatile: no load passes a wait.
__device__ __forceinline__ void load_line(float (&x)[V], unsigned from) {
#pragma unroll
    for (int j = 0; j < V; j += 4)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[j]), "=f"(x[j + 1]), "=f"(x[j + 2]), "=f"(x[j + 3])
                     : "r"(from + j / 4 * (LINE / 2)));
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

// Add up what a record says, of columns that lie from `columns` on: two entries a load, and both columns at once.
__device__ __forceinline__ void consume(float (&sums)[GROUP][V], unsigned record, unsigned columns) {
    const uint4 segment = load_unit(record);
    uint4 two = load_unit(record += 16);
    const unsigned counts[] = {segment.y, segment.z, segment.w};
#pragma unroll
    for (int r = 0; r < GROUP; ++r) {
        int left = counts[r / 4] >> r % 4 * 8 & 255;
#pragma unroll 1
        for (; left > 1; left -= 2) {
            float one[V], other[V];
            load_line(one, columns + two.y);
            load_line(other, columns + two.w);
            const unsigned first = two.x, second = two.z;
            two = load_unit(record += 16);  // beyond the last ones, of what lies there
            add(sums[r], first, one);
            add(sums[r], second, other);
        }
        if (left) {
            float one[V];
            load_line(one, columns + two.y);
            const unsigned first = two.x;
            two = load_unit(record += 16);
            add(sums[r], first, one);
        }
    }
}

// Where a warp is in the ring: at which stage, and in a phase of which parity.
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

// Four sums at the same place of block `rank`'s shared memory.
__device__ __forceinline__ float4 sums_of(const float* here, int rank) {
    const uint4 v = cluster_load(reinterpret_cast<const uint4*>(here), rank);
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

// The value itself, from the lane that has it: the compiler does not work it out again and again.
__device__ __forceinline__ unsigned kept(unsigned v) { return __shfl_sync(~0u, v, threadIdx.x % WARP); }

// A block, or a cluster of `split`, for each block of rows and each BATCH batch rows.
template <int WIDTH, bool TURNED>
__global__ void __launch_bounds__(Slab<WIDTH, TURNED>::WARPS* WARP, 1)
spmm_csr_groups(const __grid_constant__ TensorMap x, const __grid_constant__ Groups w, const __grid_constant__ Output y,
                const uint4* __restrict__ records, int virtuals, int row_blocks, int split, int stages, int stage_bytes,
                int room) {
    using S = Slab<WIDTH, TURNED>;
    constexpr int PITCH = BATCH + 4, WARPS = S::WARPS, PRODUCER = WARPS - 1;
    static_assert(CONSUMERS <= WARP, "a lane a group");
    extern __shared__ __align__(1024) char shared[];
    char* const ring = shared + S::STAGING;
    float* const tile = reinterpret_cast<float*>(shared);  // of sums: [virtual row][word], once the slabs are done with
    __shared__ unsigned long long full[MOST_STAGES], empty[MOST_STAGES], staged[2], taken[2];
    __shared__ int2 where[CONSUMERS * GROUP];  // of a virtual row: n, slot
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int rank = blockIdx.x % split, slab_begin = w.slabs * rank / split, slab_end = w.slabs * (rank + 1) / split;
    const int block = blockIdx.x / split, row_block = block % row_blocks, m0 = block / row_blocks * BATCH;
    if (virtuals < 0) virtuals = w.first[w.N];
    const int all_groups = (virtuals + GROUP - 1) / GROUP;
    const auto group_of = [&](int i) { return static_cast<int>(static_cast<long long>(all_groups) * i / row_blocks); };
    const int g0 = group_of(row_block), groups = group_of(row_block + 1) - g0;
    const int v0 = g0 * GROUP, rows = min(groups * GROUP, virtuals - v0);

    if (threadIdx.x < stages) {
        mbarrier_init(&full[threadIdx.x], 1 + (TURNED ? 1 : S::TURNERS * WARP));
        mbarrier_init(&empty[threadIdx.x], CONSUMERS * WARP);
    }
    if (!TURNED && threadIdx.x < 2) {
        mbarrier_init(&staged[threadIdx.x], 1);
        mbarrier_init(&taken[threadIdx.x], S::TURNERS * WARP);
    }
    mbarrier_init_fence();
    __syncthreads();

    if (warp == PRODUCER) {
        const uint4* const segments = reinterpret_cast<const uint4*>(w.segments) +
                                      static_cast<long long>(g0 + min(lane, max(groups - 1, 0))) * w.slabs;
        const auto segment_of = [&](int s) {
            return s < slab_end && lane < groups ? segments[s] : make_uint4(0, 0, 0, 0);
        };
        uint4 segment = segment_of(slab_begin), next = segment_of(slab_begin + 1);
        Place at = {1};  // the phase before the first is over
        unsigned staged_parity = 1;
        if (TURNED) wait_for_predecessor();
        for (int s = slab_begin; s < slab_end; ++s) {
            if (!TURNED) {
                for (int h = 0; h < 2; ++h) {
                    mbarrier_wait(&taken[h], staged_parity);
                    if (lane == 0) {
                        mbarrier_expect_bytes(&staged[h], S::HALF);
                        tma_load(shared + h * S::HALF, &x, &staged[h], s * WIDTH + h * WARP, m0);
                    }
                }
                staged_parity ^= 1;
                if (s == slab_begin) wait_for_predecessor();
            }
            mbarrier_wait(&empty[at.stage()], at.parity());
            unsigned long long* const arrived = &full[at.stage()];
            char* const to = ring + at.stage() * stage_bytes;
            if (TURNED && lane == 0) {
                mbarrier_expect_bytes(arrived, S::BYTES);
                tma_load(to, &x, arrived, m0, s * WIDTH);
            }
            const int bytes = lane < groups ? units_of(segment) * 16 : 0;
            const int all = __reduce_add_sync(~0u, bytes);
            if (lane == 0) mbarrier_expect_bytes(arrived, all);
            __syncwarp();
            if (lane < groups)
                bulk_load(to + S::BYTES + lane * room, records + static_cast<int>(segment.x), bytes, arrived);
            segment = next;
            next = segment_of(s + 2);
            at.advance(stages);
        }
        __syncthreads();
    } else if (warp >= CONSUMERS) {
        Place at = {1};
        unsigned staged_parity = 0;
        for (int s = slab_begin; s < slab_end; ++s) {
            mbarrier_wait(&empty[at.stage()], at.parity());
            for (int h = 0; h < 2; ++h) {
                mbarrier_wait(&staged[h], staged_parity);
                S::turn(ring + at.stage() * stage_bytes + h * S::HALF, shared + h * S::HALF, warp - CONSUMERS);
                mbarrier_arrive(&taken[h]);
            }
            mbarrier_arrive(&full[at.stage()]);
            staged_parity ^= 1;
            at.advance(stages);
        }
        __syncthreads();
    } else {
        for (int v = threadIdx.x; v < rows; v += CONSUMERS * WARP)
            where[v] = {w.parts[v0 + v].n, w.parts[v0 + v].slot};
        float sums[GROUP][V] = {};
        unsigned columns = kept(shared_address(ring) + lane * 16);
        unsigned record = kept(shared_address(ring) + S::BYTES + warp * room);
        Place at = {0};
        for (int left = slab_end - slab_begin; left > 0; --left) {
            mbarrier_wait(&full[at.stage()], at.parity());
            if (warp < groups) consume(sums, record, columns);
            mbarrier_arrive(&empty[at.stage()]);
            columns += stage_bytes, record += stage_bytes;
            if (at.advance(stages)) columns -= stages * stage_bytes, record -= stages * stage_bytes;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < GROUP; ++r)
            if (warp * GROUP + r < rows)
#pragma unroll
                for (int j = 0; j < V; j += 4)
                    reinterpret_cast<float4*>(&tile[(warp * GROUP + r) * PITCH])[j / 4 * WARP + lane] = {
                        sums[r][j], sums[r][j + 1], sums[r][j + 2], sums[r][j + 3]};
    }
    __syncthreads();

    // The block's share of the rows: what its peers have of them comes line by line, in their order.
    const int v_begin = rows * rank / split, v_end = rows * (rank + 1) / split;
    if (split > 1) {
        cluster_sync();
        constexpr int FOURS = BATCH / 4;
#pragma unroll 4
        for (int i = v_begin * FOURS + threadIdx.x; i < v_end * FOURS; i += WARPS * WARP) {
            float* const here = &tile[i / FOURS * PITCH + i % FOURS * 4];
            float4 parts[MOST_SPLIT];
#pragma unroll
            for (int peer = 0; peer < MOST_SPLIT; ++peer)
                if (peer < split) parts[peer] = sums_of(here, peer);
            float4 sum = parts[0];
#pragma unroll
            for (int peer = 1; peer < MOST_SPLIT; ++peer)
                if (peer < split)
                    sum = {sum.x + parts[peer].x, sum.y + parts[peer].y, sum.z + parts[peer].z, sum.w + parts[peer].w};
            *reinterpret_cast<float4*>(here) = sum;  // which no other block reads
        }
        cluster_sync();  // nobody leaves while others read its tile
    }
    // Lanes take what is side by side in y, and four words each.
    const bool by_rows = y.n_step == 1;
    const int v_first = v_begin + (by_rows ? lane : warp), v_step = by_rows ? WARP : WARPS;
    const int w_first = (by_rows ? warp : lane) * 4, w_step = (by_rows ? WARPS : WARP) * 4;
    const int batch = static_cast<int>(min(static_cast<long long>(BATCH), y.M - m0));
    const bool vectors = S::APART == 1 && y.vectors && batch == BATCH;
    for (int v = v_first; v < v_end; v += v_step) {
        const int2 at = where[v];
        const bool apart = at.y >= 0;
        const float bias = y.bias && !apart ? y.bias[at.x] : 0.0f, least = y.relu && !apart ? 0.0f : -infinity();
        float* const to = apart ? y.partial + at.y * y.M + m0 : y.data + m0 * y.m_step + at.x * y.n_step;
        const long long step = apart ? 1 : y.m_step;
#pragma unroll 4
        for (int i = w_first; i < BATCH; i += w_step) {
            const float4 four = *reinterpret_cast<const float4*>(&tile[v * PITCH + i]);
            const float sums[] = {max_nan(four.x + bias, least), max_nan(four.y + bias, least),
                                  max_nan(four.z + bias, least), max_nan(four.w + bias, least)};
            const int m = S::row(i);
            if (vectors) *reinterpret_cast<float4*>(&to[m]) = {sums[0], sums[1], sums[2], sums[3]};
            else
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (m + j * S::APART < batch) to[(m + j * S::APART) * step] = sums[j];
        }
    }
}

// What the product leaves: rows in parts, y = act(their sums, in order, + bias), and parts in which a column repeats,
// entry by entry.
__global__ void __launch_bounds__(PLAN_BLOCK)
spmm_csr_group_join(const __grid_constant__ Lines x, const __grid_constant__ Groups w, const __grid_constant__ Output y) {
    wait_for_predecessor();
    if (!w.found[1] && w.first[w.N] == w.N) return;
    for (long long n = blockIdx.x; n < w.N; n += gridDim.x) {
        const int v0 = w.first[n], count = w.first[n + 1] - v0;
        if (count == 1 && !w.parts[v0].repeats) continue;
        for (long long m = threadIdx.x; m < y.M; m += PLAN_BLOCK) {
            float sum = 0.0f;
            for (int v = v0; v < v0 + count; ++v) {
                const Part part = w.parts[v];
                if (!part.repeats) sum += y.partial[part.slot * y.M + m];
                else
                    for (int i = part.begin; i < part.end; ++i) {
                        const int k = w.narrow ? static_cast<const unsigned short*>(w.cols)[i]
                                               : static_cast<const int*>(w.cols)[i];
                        sum = fmaf(w.values[i], x.data[m * x.m_step + k * x.k_step], sum);
                    }
            }
            if (y.bias) sum += y.bias[n];
            y.data[m * y.m_step + n * y.n_step] = y.relu ? relu_of(sum) : sum;
        }
    }
}
