// y = act(x · Wᵀ + bias) in float, W (N, K) in CSR, for batches of more than a few rows.
//
//   x (M, K), contiguous along one of the two; y (M, N) in any strides; values (nnz,), cols (nnz,) int or unsigned short.
//
// Every multiply-add reads 4 bytes of x: from shared memory, at 128 bytes a clock, or nothing else can keep up; so what
// counts is that a warp does nothing but read lines of x. A warp owns a group of 12 rows of W and BATCH = 256 batch rows, 8
// a lane, all sums in registers. x comes slab by slab (WIDTH columns, turned to lines of batch rows) through a ring of
// shared memory that PRODUCERS warps fill, and with each slab come the entries that lie in it: group by group, row after
// row, each its value and the address of its column's line. A group's rows are spelled out, so that sums have registers,
// each with as little code as there can be: where few entries lie in a slab, instructions come slower than they run.
//
// x that is contiguous along k is turned on the way to shared memory, 4 bytes a copy, or, where many blocks of rows read
// the same x, once for all by spmm_csr_group_turn: then 16 bytes a copy do.
//
// A cluster of `split` blocks shares out the slabs of the same outputs, and adds up through distributed shared memory, in
// order: the same bits every run.
//
// A plan, made once for a W, holds the entries in that order (`sources`) and how many there are of each row in each slab
// (`segments`). It works on virtual rows: a row of more than `limit` entries is split into parts, so that a long row keeps
// no warp waiting; their sums go to `partial`, and spmm_csr_group_join adds them in order. A part in which a column
// repeats is left to the end, entry by entry.

#include "common/numeric.cuh"
#include "common/shared.cuh"

constexpr int WARP = 32;
constexpr int GROUP = 12;  // rows of W
constexpr int V = 8, BATCH = WARP * V, LINE = BATCH * 4;  // batch rows of a lane and of a block; a line's bytes
constexpr int CONSUMERS = 12, PRODUCERS = 4, WARPS = CONSUMERS + PRODUCERS;
constexpr int MOST_STAGES = 8, MOST_SPLIT = 8;
constexpr int STAGE_ALIGN = 1024;  // no bit of a line's address but those of its turn are in a lane's place in it
constexpr int PLAN_BLOCK = 1024, ORDER_BLOCK = 256, TURN_BLOCK = 256;
constexpr int TILE = 64;  // of x that is turned at once
constexpr int LEAST_WINDOW = 4096;  // columns that are put in order at once, or a few more: whole slabs

struct Part {  // a virtual row: entries [begin, end) of row n, whose sums go to y (slot -1) or to partial[slot]
    int n, slot, begin, end, repeats;
};

struct __align__(16) Segment {  // a group's entries in a slab: where they start, and how many there are of each row
    int start;
    unsigned char counts[GROUP];
};

struct __align__(8) Source {  // of an entry: where its value is, and its column within the slab
    int index;
    unsigned column;
};

struct __align__(8) Entry {  // a value, and the address of its column's line, turned
    float value;
    unsigned line;
};

// --- the plan -------------------------------------------------------------------------------------------------------

// One block. parts[first[n]] up to parts[first[n + 1]] are row n's; first[N] counts the virtual rows.
__global__ void __launch_bounds__(PLAN_BLOCK)
spmm_csr_group_parts(const int* __restrict__ row_offsets, Part* __restrict__ parts, int* __restrict__ first,
                     long long N, int limit) {
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

// use(i, r, k) for each entry i of a group's parts, r, whose column is k0 + k, in the window; the block's warps share them.
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

// A block a group: sources (nnz,), segments [group][slab], and in `most` the entries of the largest segment.
template <typename I, int WIDTH>
__global__ void __launch_bounds__(ORDER_BLOCK, 4)
spmm_csr_group_order(const I* __restrict__ cols, const int* __restrict__ first, Part* __restrict__ parts,
                     Source* __restrict__ sources, Segment* __restrict__ segments, int* __restrict__ most, long long N,
                     long long K, int slabs) {
    constexpr int SLABS = (LEAST_WINDOW + WIDTH - 1) / WIDTH, WINDOW = SLABS * WIDTH;
    static_assert(WIDTH <= 64 && SLABS <= ORDER_BLOCK, "a bit a column, a thread a slab");
    __shared__ unsigned long long masks[SLABS][GROUP];  // the columns with an entry
    __shared__ int starts[SLABS][GROUP];
    __shared__ int sums[ORDER_BLOCK / WARP];
    __shared__ unsigned repeats;
    const int v0 = blockIdx.x * GROUP, count = min(GROUP, first[N] - v0);
    if (count <= 0) return;
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    parts += v0;
    segments += static_cast<long long>(blockIdx.x) * slabs;
    int position = parts[0].begin;
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

    for (long long k0 = 0; k0 < K; k0 += WINDOW) {
        if (K > WINDOW) {
            clear();
            each_entry<WINDOW>(cols, parts, count, k0, mark);
            __syncthreads();
        }
        Segment segment = {};
        int own = 0;
        if (thread < SLABS)
            for (int r = 0; r < GROUP; ++r) {
                const int here = out >> r & 1 ? 0 : __popcll(masks[thread][r]);
                segment.counts[r] = static_cast<unsigned char>(here);
                starts[thread][r] = own;
                own += here;
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
            for (int r = 0; r < GROUP; ++r) starts[thread][r] += before;
            segment.start = before;
            if (k0 / WIDTH + thread < slabs) segments[k0 / WIDTH + thread] = segment;
            if (own) atomicMax(most, own);
        }
        __syncthreads();
        each_entry<WINDOW>(cols, parts, count, k0, [&](int i, int r, int k) {
            const auto before_k = masks[k / WIDTH][r] & ((1ull << k % WIDTH) - 1);
            if (!(out >> r & 1)) sources[starts[k / WIDTH][r] + __popcll(before_k)] = {i, static_cast<unsigned>(k % WIDTH)};
        });
    }
}

// --- the product ----------------------------------------------------------------------------------------------------

// xt (K, stride) = xᵀ of x (M, K) in any strides, a TILE x TILE square a block; zeros beyond M.
__global__ void __launch_bounds__(TURN_BLOCK)
spmm_csr_group_turn(const float* __restrict__ x, long long m_step, long long k_step, float* __restrict__ xt,
                    long long stride, long long M, long long K) {
    constexpr int WARPS = TURN_BLOCK / WARP;
    __shared__ float square[TILE][TILE + 1];  // [k][m]
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long squares = (K + TILE - 1) / TILE;
    const long long m0 = blockIdx.x / squares * TILE, k0 = blockIdx.x % squares * TILE;
#pragma unroll
    for (int i = 0; i < TILE / WARPS; ++i)
#pragma unroll
        for (int half = 0; half < TILE; half += WARP) {
            const int m = warp + i * WARPS, k = half + lane;
            square[k][m] = m0 + m < M && k0 + k < K ? x[(m0 + m) * m_step + (k0 + k) * k_step] : 0.0f;
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE / WARPS; ++i)
#pragma unroll
        for (int half = 0; half < TILE; half += WARP) {
            const int m = half + lane, k = warp + i * WARPS;
            if (m0 + m < stride && k0 + k < K) xt[(k0 + k) * stride + m0 + m] = square[k][m];
        }
}

struct Lines {  // x (M, K): one of the steps is 1; where it is m_step, lines are whole vectors of 16 bytes
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
    long long N, K;
    int slabs, narrow;  // narrow: cols are unsigned short
};

struct Output {
    float* data;
    const float* bias;
    float* partial;  // [slot][m]
    long long m_step, n_step, M;
    int relu;
};

// A line holds the batch rows of one column in chunks of 16 bytes; chunk c of column k is moved to place c XOR k % 8, so
// that a warp that turns 8 columns of 4 batch rows touches every bank once.
__device__ __forceinline__ unsigned turn(unsigned k) { return k % 8 * 16; }

// The batch row of a lane's value j: four neighbours, and the next four half a line away.
__device__ __forceinline__ int row_of(int lane, int j) { return j / 4 * (WARP * 4) + lane * 4 + j % 4; }

// The lane's part of a line. Volatile: no load passes a wait.
__device__ __forceinline__ void load_line(float (&x)[V], unsigned from) {
#pragma unroll
    for (int j = 0; j < V; j += 4)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[j]), "=f"(x[j + 1]), "=f"(x[j + 2]), "=f"(x[j + 3])
                     : "r"(from + j / 4 * (LINE / 2)));
}

__device__ __forceinline__ void load_entry(Entry& to, unsigned from) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(reinterpret_cast<unsigned&>(to.value)), "=r"(to.line) : "r"(from));
}

__device__ __forceinline__ void add(float (&sums)[V], float factor, const float (&x)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) sums[j] = fmaf(factor, x[j], sums[j]);
}

template <int BYTES> __device__ __forceinline__ void start_copy(unsigned to, const void* from) {
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void pipe_init(unsigned long long* barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// This thread is done with what it wrote, or will be once its copies have arrived.
__device__ __forceinline__ void pipe_arrive(unsigned long long* barrier, bool copies = false) {
    if (copies)
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
    else
        asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
                     : "memory");
}

// A barrier alternates between two phases; wait until the phase of this parity is over.
__device__ __forceinline__ void pipe_wait(unsigned long long* barrier, unsigned parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
                 ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// What another block of the cluster has at the same place of shared memory.
__device__ __forceinline__ float load_of_peer(const float* here, int peer) {
    unsigned there;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(peer));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there));
    return value;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

template <int WIDTH>
__global__ void __launch_bounds__(WARPS* WARP, 1)
spmm_csr_groups(const __grid_constant__ Lines x, const __grid_constant__ Groups w, const __grid_constant__ Output y,
                int row_blocks, int block_groups, int split, int stages, int room) {
    constexpr int PITCH = BATCH + 1;
    static_assert(CONSUMERS <= WARP, "a lane a group");
    extern __shared__ __align__(STAGE_ALIGN) char shared[];
    __shared__ unsigned long long full[MOST_STAGES], empty[MOST_STAGES];
    __shared__ uint4 counts[MOST_STAGES][CONSUMERS];  // segments
    __shared__ int2 where[CONSUMERS * GROUP];         // of a virtual row: n, slot
    __shared__ int any_repeats;
    float* const tile = reinterpret_cast<float*>(shared);  // of outputs: [virtual row][m], once the slabs are done with

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int rank = blockIdx.x % split, block = blockIdx.x / split;
    const int v0 = block % row_blocks * block_groups * GROUP;
    const long long m0 = static_cast<long long>(block / row_blocks) * BATCH;
    const int rows = min(block_groups * GROUP, w.first[w.N] - v0);
    if (rows <= 0) return;  // for the whole cluster alike
    const int slab_begin = w.slabs * rank / split, slab_end = w.slabs * (rank + 1) / split;
    const int entries_bytes = block_groups * room * static_cast<int>(sizeof(Entry));
    const int stage_bytes = WIDTH * LINE + (entries_bytes + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN;

    if (threadIdx.x < stages) {
        pipe_init(&full[threadIdx.x], 2 * PRODUCERS * WARP);  // what a thread writes, and what it has copied
        pipe_init(&empty[threadIdx.x], CONSUMERS);
    }
    if (threadIdx.x == 0) any_repeats = 0;
    __syncthreads();
    for (int v = threadIdx.x; v < rows; v += WARPS * WARP) {
        const Part part = w.parts[v0 + v];
        where[v] = {part.n, part.slot};
        if (part.repeats) any_repeats = 1;
    }

    if (warp >= CONSUMERS) {
        constexpr int GROUPS = CONSUMERS / PRODUCERS, AHEAD = WIDTH / 16 - 1;  // groups of the warp; rounds of entries
        const int groups = (rows + GROUP - 1) / GROUP, producer = warp - CONSUMERS;
        const uint4* segments = reinterpret_cast<const uint4*>(w.segments) +
                                static_cast<long long>(v0 / GROUP + min(lane, groups - 1)) * w.slabs;
        const auto segment_of = [&](int s) { return s < slab_end && lane < groups ? segments[s] : make_uint4(0, 0, 0, 0); };
        const auto length_of = [](const uint4& segment) {
            constexpr unsigned ONES = 0x01010101u;
            return static_cast<int>(__dp4a(segment.y, ONES, __dp4a(segment.z, ONES, __dp4a(segment.w, ONES, 0u))));
        };
        // Of the slab that comes next: the segment of the lane's group, and the lane's entries of each of the warp's groups.
        Source ahead[GROUPS][AHEAD];
        const auto load_ahead = [&](const uint4& segment) {
            const int length = length_of(segment);
#pragma unroll
            for (int u = 0; u < GROUPS; ++u) {
                const int g = u * PRODUCERS + producer;
                const int start = __shfl_sync(~0u, static_cast<int>(segment.x), g), here = __shfl_sync(~0u, length, g);
#pragma unroll
                for (int t = 0; t < AHEAD; ++t)
                    if (t * WARP + lane < here) ahead[u][t] = w.sources[start + t * WARP + lane];
            }
        };
        uint4 segment = segment_of(slab_begin), next = segment_of(slab_begin + 1);
        load_ahead(segment);
        unsigned parity = 1;  // of the phase before the first, which is over
        for (int s = slab_begin, stage = 0; s < slab_end; ++s) {
            pipe_wait(&empty[stage], parity);
            const unsigned slab = shared_address(shared) + stage * stage_bytes;
            if (producer == 0 && lane < groups) counts[stage][lane] = segment;
            const int length = length_of(segment);
            const auto start_entry = [&](unsigned to, const Source& source) {
                start_copy<4>(to, w.values + source.index);
                const unsigned line = slab + source.column * LINE + turn(source.column);
                asm volatile("st.shared.u32 [%0 + 4], %1;" ::"r"(to), "r"(line));
            };
            constexpr int ENTRY = static_cast<int>(sizeof(Entry));
            unsigned to = slab + WIDTH * LINE + (producer * room + lane) * ENTRY;
#pragma unroll
            for (int u = 0; u < GROUPS; ++u) {
                const int g = u * PRODUCERS + producer;
                const int start = __shfl_sync(~0u, static_cast<int>(segment.x), g), here = __shfl_sync(~0u, length, g);
#pragma unroll
                for (int t = 0; t < AHEAD; ++t)
                    if (t * WARP + lane < here) start_entry(to + t * WARP * ENTRY, ahead[u][t]);
#pragma unroll 1
                for (int i = AHEAD * WARP + lane; i < here; i += WARP)
                    start_entry(to + (i - lane) * ENTRY, w.sources[start + i]);
                to += PRODUCERS * room * ENTRY;
            }
            segment = next;
            next = segment_of(s + 2);
            load_ahead(segment);
            const long long k0 = static_cast<long long>(s) * WIDTH;
            if (x.k_step != 1) {
                constexpr int CHUNKS = LINE / 16, AT_ONCE = PRODUCERS * WARP / CHUNKS;  // lines
                const int chunk = threadIdx.x % CHUNKS, line = (threadIdx.x - CONSUMERS * WARP) / CHUNKS;
                const float* from = x.data + (k0 + line) * x.k_step + m0 + chunk * 4;
                const bool inside = m0 + chunk * 4 < x.M;  // what lies beyond meets no output
#pragma unroll 8
                for (int k = 0; k < WIDTH; k += AT_ONCE) {
                    if (inside && k0 + k + line < x.K)
                        start_copy<16>(slab + (k + line) * LINE + (chunk * 16 ^ turn(k + line)), from);
                    from += AT_ONCE * x.k_step;
                }
            } else {  // 8 columns of 4 batch rows at once
                constexpr int QUADS = BATCH / 4;
                const int k = lane % 8, here = static_cast<int>(min(static_cast<long long>(WIDTH), x.K - k0)) - k;
                long long m = m0 + producer * 4 + lane / 8;
                const float* from = x.data + m * x.m_step + k0 + k;
                const unsigned line = slab + k * LINE + lane / 8 * 4;
#pragma unroll 2
                for (int quad = producer; quad < QUADS; quad += PRODUCERS) {
                    const unsigned to = line + (quad * 16 ^ turn(k));
                    if (m < x.M)
#pragma unroll
                        for (int j = 0; j < WIDTH; j += 8)
                            if (j < here) start_copy<4>(to + j * LINE, from + j);
                    m += PRODUCERS * 4, from += PRODUCERS * 4 * x.m_step;
                }
            }
            pipe_arrive(&full[stage], true);
            pipe_arrive(&full[stage]);
            if (++stage == stages) stage = 0, parity ^= 1;
        }
        __syncthreads();
    } else {
        float sums[GROUP][V] = {};
        const unsigned place = lane * 16;
        unsigned entries = shared_address(shared) + WIDTH * LINE + warp * room * static_cast<int>(sizeof(Entry));
        unsigned parity = 0;
        for (int s = slab_begin, stage = 0; s < slab_end; ++s) {
            pipe_wait(&full[stage], parity);
            if (warp * GROUP < rows) {
                const uint4 segment = counts[stage][warp];
                const unsigned numbers[GROUP / 4] = {segment.y, segment.z, segment.w};
                unsigned at = entries + stage * stage_bytes;
                Entry next;
                load_entry(next, at);
#pragma unroll
                for (int r = 0; r < GROUP; ++r)
#pragma unroll 1
                    for (int left = numbers[r / 4] >> r % 4 * 8 & 255; left > 0; --left) {
                        float line[V];
                        load_line(line, next.line ^ place);
                        const float factor = next.value;
                        load_entry(next, at += sizeof(Entry));  // beyond the last one, of what lies there
                        add(sums[r], factor, line);
                    }
            }
            __syncwarp();
            if (lane == 0) pipe_arrive(&empty[stage]);
            if (++stage == stages) stage = 0, parity ^= 1;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < GROUP; ++r)
            if (warp * GROUP + r < rows)
#pragma unroll
                for (int j = 0; j < V; ++j) tile[(warp * GROUP + r) * PITCH + row_of(lane, j)] = sums[r][j];
    }
    __syncthreads();

    const int batch = static_cast<int>(min(static_cast<long long>(BATCH), y.M - m0));
    if (any_repeats && rank == 0) {  // entry by entry, from x itself
        for (int v = warp; v < rows; v += WARPS) {
            const Part part = w.parts[v0 + v];
            if (!part.repeats) continue;
            for (int i = part.begin; i < part.end; ++i) {
                const int k = w.narrow ? static_cast<const unsigned short*>(w.cols)[i] : static_cast<const int*>(w.cols)[i];
                for (int m = lane; m < batch; m += WARP)
                    tile[v * PITCH + m] = fmaf(w.values[i], x.data[k * x.k_step + (m0 + m) * x.m_step], tile[v * PITCH + m]);
            }
        }
        __syncthreads();
    }
    // The block's share of the rows: what its peers have of them comes line by line, in their order.
    const int v_begin = rows * rank / split, v_end = rows * (rank + 1) / split;
    if (split > 1) {
        cluster_sync();
        for (int v = v_begin + warp; v < v_end; v += WARPS)
#pragma unroll 2
            for (int m = lane; m < BATCH; m += WARP) {
                float* const here = &tile[v * PITCH + m];
                float parts[MOST_SPLIT];
#pragma unroll
                for (int peer = 0; peer < MOST_SPLIT; ++peer)
                    if (peer < split) parts[peer] = peer == rank ? *here : load_of_peer(here, peer);
                float sum = parts[0];
#pragma unroll
                for (int peer = 1; peer < MOST_SPLIT; ++peer)
                    if (peer < split) sum += parts[peer];
                *here = sum;  // which no other block reads
            }
        cluster_sync();  // nobody leaves while others read its tile
    }
    const bool by_rows = y.n_step == 1;  // lanes take what is side by side in y
    const int v_first = v_begin + (by_rows ? lane : warp), v_step = by_rows ? WARP : WARPS;
    const int m_first = by_rows ? warp : lane, m_step = by_rows ? WARPS : WARP;
    for (int v = v_first; v < v_end; v += v_step) {
        const int2 at = where[v];
        const float bias = y.bias ? y.bias[at.x] : 0.0f;
#pragma unroll 4
        for (int m = m_first; m < batch; m += m_step) {
            const float sum = tile[v * PITCH + m];
            if (at.y >= 0) y.partial[at.y * y.M + m0 + m] = sum;
            else y.data[(m0 + m) * y.m_step + at.x * y.n_step] = y.relu ? relu_of(sum + bias) : sum + bias;
        }
    }
}

// The rows in parts: y = act(their partial sums, in order, + bias).
__global__ void __launch_bounds__(PLAN_BLOCK)
spmm_csr_group_join(const int* __restrict__ first, long long N, const __grid_constant__ Output y) {
    if (first[N] == N) return;
    for (long long n = blockIdx.x; n < N; n += gridDim.x) {
        const int v0 = first[n], count = first[n + 1] - v0;
        if (count == 1) continue;
        const float* partial = y.partial + 2 * (v0 - n) * y.M;
        for (long long m = threadIdx.x; m < y.M; m += PLAN_BLOCK) {
            float sum = 0.0f;
            for (int p = 0; p < count; ++p) sum += partial[p * y.M + m];
            if (y.bias) sum += y.bias[n];
            y.data[m * y.m_step + n * y.n_step] = y.relu ? relu_of(sum) : sum;
        }
    }
}
