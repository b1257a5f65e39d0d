// y = act(x · Wᵀ + bias), W (N, K) in CSR, for batches of more than a few rows.
//
//   x (M, K), y (M, N) with either direction contiguous; values (nnz,) of x's type, cols (nnz,) int or unsigned short;
//   sums in float, in the order of the entries.
//
// Without reuse every multiply-add would fetch 4 bytes of x. So a block owns BATCH = 32 V batch rows and some rows of W,
// and takes x slab by slab (`width` columns) through shared memory, turned to [k][m]: one stored entry (n, k, v) then
// meets a whole line of x, V batch rows a lane, and adds v times the line to the row's V sums a lane, which stay in
// registers over all slabs. What bounds the kernel is reading these lines: 128 bytes a clock and multiprocessor.
//
//   PRODUCERS warps fill the slabs, a ring of `stages`; CONSUMERS warps own up to R rows of W each.
//
// A plan, made once for a W, says which entries of a row lie in a slab. It works on virtual rows: a row with more than
// `limit` entries is split into parts, so that one long row among short ones keeps no warp waiting. A part's sums go to
// `partial`, and spmm_csr_join adds them in order: no atomics, the same bits every run.

#include "common/spmm.cuh"

constexpr int CONSUMERS = 12, PRODUCERS = 4;
constexpr int BLOCK_WARPS = CONSUMERS + PRODUCERS;
constexpr int PLAN_BLOCK = 1024, SEGMENTS_BLOCK = 256;

// --- the plan -------------------------------------------------------------------------------------------------------

// One block. parts[first[n]] up to parts[first[n + 1]] are row n's; first[N] counts the virtual rows.
__global__ void __launch_bounds__(PLAN_BLOCK)
spmm_csr_parts(const int* __restrict__ row_offsets, Part* __restrict__ parts, int* __restrict__ first, long long N,
               int limit) {
    __shared__ int sums[PLAN_BLOCK / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int before_all = 0;
    for (long long n0 = 0; n0 < N; n0 += PLAN_BLOCK) {
        const long long n = n0 + threadIdx.x;
        const int count = n < N ? (row_offsets[n + 1] - row_offsets[n] - 1) / limit + 1 : 0;  // 1 of an empty row
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
            for (int p = 0; p < count; ++p)
                parts[before + p] = {static_cast<int>(n), count == 1 ? -1 : 2 * (before - static_cast<int>(n)) + p, 0, 0};
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) first[N] = before_all;
}

template <typename I> __device__ int first_not_below(const I* cols, int begin, int end, long long column) {
    while (begin < end) {
        const int middle = begin + (end - begin) / 2;
        if (cols[middle] < column) begin = middle + 1;
        else end = middle;
    }
    return begin;
}

// A warp a row: its segments, at [slab * stride + virtual row], and what they leave over.
template <typename I>
__global__ void __launch_bounds__(SEGMENTS_BLOCK)
spmm_csr_segments(const I* __restrict__ cols, const int* __restrict__ row_offsets, const int* __restrict__ first,
                  Part* __restrict__ parts, Segment* __restrict__ segments, long long N, int slabs, int width,
                  long long stride) {
    const long long n = static_cast<long long>(blockIdx.x) * (SEGMENTS_BLOCK / WARP) + threadIdx.x / WARP;
    if (n >= N) return;
    const int lane = threadIdx.x % WARP;
    const int begin = row_offsets[n], end = row_offsets[n + 1];
    bool falls = false;
    for (unsigned i = begin + 1u + lane; i < end; i += WARP) falls |= cols[i] < cols[i - 1];
    const bool ascending = !__any_sync(~0u, falls);
    const int v0 = first[n], count = first[n + 1] - v0;
    for (int p = lane; p < count; p += WARP) {
        const int from = ascending ? end : begin;
        const auto cut = [&](int part) { return from + static_cast<int>(static_cast<long long>(end - from) * part / count); };
        parts[v0 + p].begin = cut(p);
        parts[v0 + p].end = cut(p + 1);
    }
    for (int s = lane; s < slabs; s += WARP) {
        int from = 0, to = 0;
        if (ascending) {
            from = first_not_below(cols, begin, end, static_cast<long long>(s) * width);
            to = first_not_below(cols, from, end, static_cast<long long>(s + 1) * width);
        }
        for (int p = 0; p < count; ++p) {
            const auto cut = [&](int part) { return from + static_cast<int>(static_cast<long long>(to - from) * part / count); };
            segments[s * stride + v0 + p] = {cut(p), cut(p + 1)};
        }
    }
}

// --- the product ----------------------------------------------------------------------------------------------------

template <typename T> struct Output {
    T* data;
    const T* bias;
    float* partial;  // [slot][m]
    long long m_step, n_step, M;
    int relu;
};

template <typename T, typename I, int V, int R>
__global__ void __launch_bounds__(BLOCK_WARPS* WARP, 1)
spmm_csr_tiles(const __grid_constant__ Matrix<T> x, const T* __restrict__ values,
               const __grid_constant__ Weights w, const __grid_constant__ Output<T> y, int row_blocks, int block_rows,
               int stages) {
    using L = Lane<T, V>;
    extern __shared__ __align__(1024) char shared[];  // a line's address has no bits in common with a piece's place in it
    __shared__ unsigned long long full[4], empty[4];
    __shared__ Part parts[CONSUMERS * R];
    __shared__ __align__(16) Entry chunks[CONSUMERS][2][WARP];

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int v0 = blockIdx.x % row_blocks * block_rows;
    const long long m0 = static_cast<long long>(blockIdx.x / row_blocks) * L::BATCH;
    const int rows = min(block_rows, w.first[w.N] - v0);
    if (rows <= 0) return;
    const int slab_bytes = w.width * L::LINE;

    bool stored = false, left_over = false;
    if (static_cast<int>(threadIdx.x) < rows) {
        const Part part = w.parts[v0 + threadIdx.x];
        parts[threadIdx.x] = part;
        stored = w.row_offsets[part.n] < w.row_offsets[part.n + 1];
        left_over = part.begin < part.end;
    }
    if (threadIdx.x < stages) {
        pipe_init(&full[threadIdx.x], PRODUCERS * WARP);
        pipe_init(&empty[threadIdx.x], CONSUMERS * WARP);
    }
    const int slabs = __syncthreads_or(stored) ? w.slabs : 0;
    const bool any_left_over = __syncthreads_or(left_over);

    float* const tile = reinterpret_cast<float*>(shared);  // of outputs: [virtual row][m], once the slabs are done with
    constexpr int PITCH = L::BATCH + 1;
    constexpr int AT_ONCE = V * sizeof(T) > 16 ? 2 : 4;  // pieces of lines in registers

    if (warp >= CONSUMERS) {
        for (int s = 0; s < slabs; ++s) {
            const int stage = s % stages;
            if (s >= stages) pipe_wait(&empty[stage], (s / stages - 1) & 1);
            const long long k0 = static_cast<long long>(s) * w.width;
            const int width = static_cast<int>(min(static_cast<long long>(w.width), w.K - k0));
            const bool copies =
                fill_slab<T, V, PRODUCERS>(shared + stage * slab_bytes, x, m0, k0, width, warp - CONSUMERS, lane);
            pipe_arrive(&full[stage], copies);
        }
        __syncthreads();
    } else {
        const int mine = rows * warp / CONSUMERS;
        const int count = rows * (warp + 1) / CONSUMERS - mine;
        const Segment* segments = w.segments + v0 + mine + lane;
        const I* cols = static_cast<const I*>(w.cols);
        const unsigned piece = lane * L::BYTES;
        const Segment nothing = {0, 0};

        float sums[R][V] = {};
        Segment segment = lane < count && slabs ? segments[0] : nothing;
        // A lane's entry of the chunk that comes next; its chunk is the first of the next row, or follows in the row.
        T value = from_float<T>(0.0f);
        int col = 0;
        const auto load = [&](int begin, int end) {
            if (begin + lane < end) value = values[begin + lane], col = static_cast<int>(cols[begin + lane]);
        };
        load(__shfl_sync(~0u, segment.begin, 0), __shfl_sync(~0u, segment.end, 0));
        int turns = 0;  // chunks take turns in two places

        for (int s = 0; s < slabs; ++s) {
            const int stage = s % stages, k0 = s * w.width;
            Segment next = nothing;
            if (s + 1 < slabs && lane < count) next = segments[(s + 1) * w.stride];
            pipe_wait(&full[stage], (s / stages) & 1);
            const unsigned slab = shared_address(shared) + stage * slab_bytes - static_cast<unsigned>(k0) * L::LINE;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                if (r >= count) continue;
                int begin = __shfl_sync(~0u, segment.begin, r);
                const int end = __shfl_sync(~0u, segment.end, r);
                const bool more = r + 1 < count;
                const int next_begin = __shfl_sync(~0u, more ? segment.begin : next.begin, more ? r + 1 : 0);
                const int next_end = __shfl_sync(~0u, more ? segment.end : next.end, more ? r + 1 : 0);
                if (begin >= end) {
                    load(next_begin, next_end);
                    continue;
                }
#pragma unroll 1
                do {
                    Entry* const chunk = chunks[warp][turns++ % 2];
                    chunk[lane] = {to_float(value), slab + static_cast<unsigned>(col) * L::LINE + turn<T>(col)};
                    __syncwarp();
                    const int here = min(end - begin, WARP);
                    begin += here;
                    load(begin < end ? begin : next_begin, begin < end ? end : next_end);
                    unsigned at = shared_address(chunk);
                    int left = here;
#pragma unroll 1
                    for (; left >= AT_ONCE; left -= AT_ONCE) {
                        Entry entries[AT_ONCE / 2][2];
                        Piece<T, V> pieces[AT_ONCE];
#pragma unroll
                        for (int j = 0; j < AT_ONCE; j += 2) load_entries(entries[j / 2], at + j * sizeof(Entry));
#pragma unroll
                        for (int j = 0; j < AT_ONCE; ++j) pieces[j].load(entries[j / 2][j % 2].line ^ piece);
#pragma unroll
                        for (int j = 0; j < AT_ONCE; ++j) pieces[j].add_to(sums[r], entries[j / 2][j % 2].value);
                        at += AT_ONCE * sizeof(Entry);
                    }
#pragma unroll 1
                    for (; left > 0; --left) {
                        unsigned entry[2];
                        load_words(entry, at);
                        Piece<T, V> one;
                        one.load(entry[1] ^ piece);
                        one.add_to(sums[r], __uint_as_float(entry[0]));
                        at += sizeof(Entry);
                    }
                } while (begin < end);
            }
            pipe_arrive(&empty[stage]);
            segment = next;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < R; ++r)
            if (r < count)
#pragma unroll
                for (int j = 0; j < V; ++j) tile[(mine + r) * PITCH + L::row(lane, j)] = sums[r][j];
    }
    __syncthreads();

    const long long left = min(static_cast<long long>(L::BATCH), y.M - m0);
    if (any_left_over) {  // entry by entry, from x itself
        for (int v = warp; v < rows; v += BLOCK_WARPS)
            for (int i = parts[v].begin; i < parts[v].end; ++i) {
                const float factor = to_float(values[i]);
                const I k = static_cast<const I*>(w.cols)[i];
                for (int m = lane; m < left; m += WARP)
                    tile[v * PITCH + m] = fmaf(factor, to_float(x.at(m0 + m, k)), tile[v * PITCH + m]);
            }
        __syncthreads();
    }
    const auto write = [&](int v, int m) {
        const Part part = parts[v];
        const float sum = tile[v * PITCH + m];
        if (part.slot >= 0) y.partial[part.slot * y.M + m0 + m] = sum;
        else finish(&y.data[(m0 + m) * y.m_step + part.n * y.n_step], sum, y.bias, part.n, y.relu);
    };
    if (y.n_step == 1) {
        for (int m = warp; m < left; m += BLOCK_WARPS)
            for (int v = lane; v < rows; v += WARP) write(v, m);
    } else {
        for (int v = warp; v < rows; v += BLOCK_WARPS)
            for (int m = lane; m < left; m += WARP) write(v, m);
    }
}

// The rows in parts: y = act(their partial sums, in order, + bias).
template <typename T>
__global__ void __launch_bounds__(PLAN_BLOCK)
spmm_csr_join(const int* __restrict__ first, long long N, const __grid_constant__ Output<T> y) {
    if (first[N] == N) return;
    for (long long n = blockIdx.x; n < N; n += gridDim.x) {
        const int v0 = first[n], count = first[n + 1] - v0;
        if (count == 1) continue;
        const float* partial = y.partial + 2 * (v0 - n) * y.M;
        for (long long m = threadIdx.x; m < y.M; m += PLAN_BLOCK) {
            float sum = 0.0f;
            for (int p = 0; p < count; ++p) sum += partial[p * y.M + m];
            finish(&y.data[m * y.m_step + n * y.n_step], sum, y.bias, n, y.relu);
        }
    }
}
