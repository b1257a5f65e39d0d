// y = act(x · Wᵀ + bias) in float, W (N, K) in CSR, for batches of more than a few rows.
//
//   xt (K, stride): x turned, rows of whole 16 bytes; y (M, N) in any strides; values (nnz,), cols (nnz,) int or unsigned
//   short.
//
// Every multiply-add reads 4 bytes of x: from shared memory, at 128 bytes a clock, or nothing else can keep up; so what
// counts is that a warp does nothing but read lines of x. A warp owns G groups of 12 rows of W and BATCH = 32 V batch rows,
// all sums in registers. x comes slab by slab (WIDTH lines of xt) through a ring of shared memory that PRODUCERS warps
// fill, and with each slab come the entries that lie in it: group by group, row after row, each its value and the place of
// its column's line. A group's rows are spelled out, so that sums have registers.
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
constexpr int WIDTH = 32;  // columns of a slab
constexpr int MOST_STAGES = 8, MOST_SPLIT = 8;
constexpr int PRODUCERS = 4;
constexpr int PLAN_BLOCK = 1024, ORDER_BLOCK = 256, TURN_BLOCK = 256;
constexpr int TILE = 64;  // of x that is turned at once
constexpr int WINDOW = 4096;  // columns that are put in order at once

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

struct __align__(8) Entry {  // a value, and where in its slab the line of its column lies
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
        const int count = n < N ? max(1, (length + limit - 1) / limit) : 0;
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
template <typename I, typename USE>
__device__ __forceinline__ void each_entry(const I* cols, const Part* parts, int count, long long k0, const USE& use) {
    for (int r = threadIdx.x / WARP; r < count; r += ORDER_BLOCK / WARP) {
        const Part part = parts[r];
        for (int i = part.begin + threadIdx.x % WARP; i < part.end; i += WARP) {
            const long long k = static_cast<long long>(cols[i]) - k0;
            if (k >= 0 && k < WINDOW) use(i, r, static_cast<int>(k));
        }
    }
}

// A block a group: sources (nnz,), segments [group][slab], and in `most` the entries of the largest segment.
template <typename I>
__global__ void __launch_bounds__(ORDER_BLOCK)
spmm_csr_group_order(const I* __restrict__ cols, const int* __restrict__ first, Part* __restrict__ parts,
                     Source* __restrict__ sources, Segment* __restrict__ segments, int* __restrict__ most, long long N,
                     long long K, int slabs) {
    constexpr int SLABS = WINDOW / WIDTH;
    static_assert(WIDTH == 32 && SLABS <= ORDER_BLOCK, "a word a row and slab, a thread a slab");
    __shared__ unsigned masks[SLABS][GROUP];  // the columns with an entry
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
        if (atomicOr(&masks[k / WIDTH][r], 1u << k % WIDTH) >> k % WIDTH & 1) atomicOr(&repeats, 1u << r);
    };
    const auto clear = [&]() {
        __syncthreads();
        for (int i = thread; i < SLABS * GROUP; i += ORDER_BLOCK) (&masks[0][0])[i] = 0;
        __syncthreads();
    };
    // A part in which a column repeats is out for all windows: look before anything is written.
    for (long long k0 = 0; k0 < K; k0 += WINDOW) {
        clear();
        each_entry(cols, parts, count, k0, mark);
    }
    __syncthreads();
    const unsigned out = repeats;
    if (thread < count) parts[thread].repeats = out >> thread & 1;

    for (long long k0 = 0; k0 < K; k0 += WINDOW) {
        if (K > WINDOW) {
            clear();
            each_entry(cols, parts, count, k0, mark);
            __syncthreads();
        }
        Segment segment = {};
        int own = 0;
        if (thread < SLABS)
            for (int r = 0; r < GROUP; ++r) {
                const int here = out >> r & 1 ? 0 : __popc(masks[thread][r]);
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
        each_entry(cols, parts, count, k0, [&](int i, int r, int k) {
            const unsigned before_k = masks[k / WIDTH][r] & ((1u << k % WIDTH) - 1);
            if (!(out >> r & 1)) sources[starts[k / WIDTH][r] + __popc(before_k)] = {i, static_cast<unsigned>(k % WIDTH)};
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

struct Lines {  // xt
    const float* data;
    long long stride, M, K;
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

// V batch rows a lane, four neighbours, and the next four half a line away.
template <int V> struct Lane {
    static constexpr int BATCH = WARP * V, LINE = BATCH * 4;
    static constexpr int NEXT_TO = 4;

    static __device__ __forceinline__ int row(int lane, int j) {
        return j / NEXT_TO * (WARP * NEXT_TO) + lane * NEXT_TO + j % NEXT_TO;
    }
    // The lane's part of a line. Volatile: no load passes a wait.
    static __device__ __forceinline__ void load(float (&x)[V], unsigned from) {
#pragma unroll
        for (int j = 0; j < V; j += NEXT_TO)
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(x[j]), "=f"(x[j + 1]), "=f"(x[j + 2]), "=f"(x[j + 3])
                         : "r"(from + j / NEXT_TO * 512));
    }
};

__device__ __forceinline__ void load_entry(Entry& to, unsigned from) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(reinterpret_cast<unsigned&>(to.value)), "=r"(to.line) : "r"(from));
}

template <int V> __device__ __forceinline__ void add(float (&sums)[V], float factor, const float (&x)[V]) {
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

template <int V, int G, int CONSUMERS>
__global__ void __launch_bounds__((CONSUMERS + PRODUCERS) * WARP, 1)
spmm_csr_groups(const __grid_constant__ Lines x, const __grid_constant__ Groups w, const __grid_constant__ Output y,
                int row_blocks, int block_groups, int split, int stages, int room) {
    using L = Lane<V>;
    constexpr int WARPS = CONSUMERS + PRODUCERS, PITCH = L::BATCH + 1, ROWS = G * GROUP;
    static_assert(CONSUMERS * G <= WARP, "a lane a group");
    extern __shared__ __align__(1024) char shared[];
    __shared__ unsigned long long full[MOST_STAGES], empty[MOST_STAGES];
    __shared__ uint4 counts[MOST_STAGES][CONSUMERS * G];  // segments
    __shared__ int2 where[CONSUMERS * ROWS];              // of a virtual row: n, slot
    __shared__ int any_repeats;
    float* const tile = reinterpret_cast<float*>(shared);  // of outputs: [virtual row][m], once the slabs are done with

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int rank = blockIdx.x % split, block = blockIdx.x / split;
    const int v0 = block % row_blocks * block_groups * GROUP;
    const long long m0 = static_cast<long long>(block / row_blocks) * L::BATCH;
    const int rows = min(block_groups * GROUP, w.first[w.N] - v0);
    if (rows <= 0) return;  // for the whole cluster alike
    const int slab_begin = w.slabs * rank / split, slab_end = w.slabs * (rank + 1) / split;
    const int stage_bytes = WIDTH * L::LINE + (block_groups * room * static_cast<int>(sizeof(Entry)) + 127) / 128 * 128;

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
        constexpr int GROUPS = CONSUMERS * G / PRODUCERS;  // that a warp brings the entries of
        const int groups = (rows + GROUP - 1) / GROUP, producer = warp - CONSUMERS;
        const uint4* segments = reinterpret_cast<const uint4*>(w.segments) +
                                static_cast<long long>(v0 / GROUP + min(lane, groups - 1)) * w.slabs;
        const auto segment_of = [&](int s) { return s < slab_end && lane < groups ? segments[s] : make_uint4(0, 0, 0, 0); };
        const auto length_of = [](const uint4& segment) {
            return static_cast<int>(__dp4a(segment.y, 0x01010101u, __dp4a(segment.z, 0x01010101u, __dp4a(segment.w, 0x01010101u, 0u))));
        };
        // Of the slab that comes next: the segment of the lane's group, and the lane's entry of each of the warp's groups.
        Source ahead[GROUPS];
        const auto load_ahead = [&](const uint4& segment) {
            const int length = length_of(segment);
#pragma unroll
            for (int u = 0; u < GROUPS; ++u) {
                const int g = u * PRODUCERS + producer;
                const int start = __shfl_sync(~0u, static_cast<int>(segment.x), g);
                if (lane < __shfl_sync(~0u, length, g)) ahead[u] = w.sources[start + lane];
            }
        };
        uint4 segment = segment_of(slab_begin), next = segment_of(slab_begin + 1);
        load_ahead(segment);
        unsigned parity = 1;  // of the phase before the first, which is over
        for (int s = slab_begin, stage = 0; s < slab_end; ++s) {
            pipe_wait(&empty[stage], parity);
            char* const slab = shared + stage * stage_bytes;
            if (producer == 0 && lane < groups) counts[stage][lane] = segment;
            const int length = length_of(segment);
            const auto start_entry = [&](unsigned to, const Source& source) {
                start_copy<4>(to, w.values + source.index);
                asm volatile("st.shared.u32 [%0 + 4], %1;" ::"r"(to), "r"(source.column * L::LINE));
            };
            unsigned to = shared_address(slab) + WIDTH * L::LINE + (producer * room + lane) * static_cast<int>(sizeof(Entry));
#pragma unroll
            for (int u = 0; u < GROUPS; ++u) {
                const int g = u * PRODUCERS + producer;
                const int start = __shfl_sync(~0u, static_cast<int>(segment.x), g), here = __shfl_sync(~0u, length, g);
                if (lane < here) start_entry(to, ahead[u]);
                for (int i = WARP + lane; i < here; i += WARP)
                    start_entry(to + (i - lane) * static_cast<int>(sizeof(Entry)), w.sources[start + i]);
                to += PRODUCERS * room * static_cast<int>(sizeof(Entry));
            }
            segment = next;
            next = segment_of(s + 2);
            load_ahead(segment);
            constexpr int CHUNKS = L::LINE / 16, AT_ONCE = PRODUCERS * WARP / CHUNKS;  // lines
            const int chunk = threadIdx.x % CHUNKS, line = (threadIdx.x - CONSUMERS * WARP) / CHUNKS;
            const long long k0 = static_cast<long long>(s) * WIDTH;
            const float* from = x.data + (k0 + line) * x.stride + m0 + chunk * 4;
            const bool inside = m0 + chunk * 4 < x.M;  // what lies beyond meets no output
#pragma unroll
            for (int k = 0; k < WIDTH; k += AT_ONCE) {
                if (inside && k0 + k + line < x.K)
                    start_copy<16>(shared_address(slab) + (k + line) * L::LINE + chunk * 16, from);
                from += AT_ONCE * x.stride;
            }
            pipe_arrive(&full[stage], true);
            pipe_arrive(&full[stage]);
            if (++stage == stages) stage = 0, parity ^= 1;
        }
        __syncthreads();
    } else {
        float sums[ROWS][V] = {};
        const int v = warp * ROWS;
        unsigned slab = shared_address(shared);
        unsigned parity = 0;
        for (int s = slab_begin, stage = 0; s < slab_end; ++s) {
            pipe_wait(&full[stage], parity);
            const unsigned lines = slab + lane * L::NEXT_TO * 4;
#pragma unroll
            for (int g = 0; g < G; ++g) {
                if (v + g * GROUP >= rows) break;
                const uint4 segment = counts[stage][warp * G + g];
                const unsigned numbers[GROUP / 4] = {segment.y, segment.z, segment.w};
                unsigned at = slab + WIDTH * L::LINE + (warp * G + g) * room * static_cast<int>(sizeof(Entry));
                Entry next;
                load_entry(next, at);
#pragma unroll
                for (int r = 0; r < GROUP; ++r) {
                    int left = numbers[r / 4] >> r % 4 * 8 & 255;
                    float(&sum)[V] = sums[g * GROUP + r];
#pragma unroll 1
                    for (; left > 1; left -= 2) {
                        const Entry one = next;
                        Entry two;
                        float x_one[V], x_two[V];
                        load_entry(two, at + sizeof(Entry));
                        L::load(x_one, lines + one.line);
                        load_entry(next, at += 2 * sizeof(Entry));
                        L::load(x_two, lines + two.line);
                        add(sum, one.value, x_one);
                        add(sum, two.value, x_two);
                    }
                    if (left) {
                        const Entry one = next;
                        float x_one[V];
                        L::load(x_one, lines + one.line);
                        load_entry(next, at += sizeof(Entry));  // beyond the last one, of what lies there
                        add(sum, one.value, x_one);
                    }
                }
            }
            __syncwarp();
            if (lane == 0) pipe_arrive(&empty[stage]);
            slab += stage_bytes;
            if (++stage == stages) stage = 0, parity ^= 1, slab = shared_address(shared);
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (v + r < rows)
#pragma unroll
                for (int j = 0; j < V; ++j) tile[(v + r) * PITCH + L::row(lane, j)] = sums[r][j];
    }
    __syncthreads();

    const int batch = static_cast<int>(min(static_cast<long long>(L::BATCH), y.M - m0));
    if (any_repeats && rank == 0) {  // entry by entry, from x itself
        for (int v = warp; v < rows; v += WARPS) {
            const Part part = w.parts[v0 + v];
            if (!part.repeats) continue;
            for (int i = part.begin; i < part.end; ++i) {
                const int k = w.narrow ? static_cast<const unsigned short*>(w.cols)[i] : static_cast<const int*>(w.cols)[i];
                for (int m = lane; m < batch; m += WARP)
                    tile[v * PITCH + m] = fmaf(w.values[i], x.data[k * x.stride + m0 + m], tile[v * PITCH + m]);
            }
        }
        __syncthreads();
    }
    const auto write = [&](int m, const int2& at, float bias, const float* from) {
        float sum = *from;
        if (split > 1) {
            float sums[MOST_SPLIT];
#pragma unroll
            for (int peer = 0; peer < MOST_SPLIT; ++peer)
                if (peer < split) sums[peer] = load_of_peer(from, peer);
            sum = sums[0];
#pragma unroll
            for (int peer = 1; peer < MOST_SPLIT; ++peer)
                if (peer < split) sum += sums[peer];
        }
        if (at.y >= 0) {
            y.partial[at.y * y.M + m0 + m] = sum;
        } else {
            sum += bias;
            y.data[(m0 + m) * y.m_step + at.x * y.n_step] = y.relu ? relu_of(sum) : sum;
        }
    };
    if (split > 1) cluster_sync();
    const bool by_rows = y.n_step == 1;  // lanes take what is side by side in y
    const int v_begin = by_rows ? lane : rows * rank / split + warp, v_step = by_rows ? WARP : WARPS;
    const int v_end = by_rows ? rows : rows * (rank + 1) / split;
    const int m_begin = by_rows ? batch * rank / split + warp : lane, m_step = by_rows ? WARPS : WARP;
    const int m_end = by_rows ? batch * (rank + 1) / split : batch;
    for (int v = v_begin; v < v_end; v += v_step) {
        const int2 at = where[v];
        const float bias = y.bias ? y.bias[at.x] : 0.0f;
#pragma unroll 4
        for (int m = m_begin; m < m_end; m += m_step) write(m, at, bias, &tile[v * PITCH + m]);
    }
    if (split > 1) cluster_sync();  // nobody leaves while others read its tile
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
