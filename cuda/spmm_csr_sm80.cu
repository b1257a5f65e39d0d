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
// A plan, made once for a pattern of W, says which entries of a row lie in a slab. Values may change.

#include "common/spmm.cuh"

constexpr int CONSUMERS = 12, PRODUCERS = 4;
constexpr int BLOCK_WARPS = CONSUMERS + PRODUCERS;
constexpr int PLAN_BLOCK = 1024;

// --- the plan -------------------------------------------------------------------------------------------------------

// Entries [begin, end). Of a row in one slab; or of a row what the slabs leave over: its last ones where they fill no
// group, all of a row whose columns do not ascend.
struct Segment {
    int begin, end;
};

template <typename I> __device__ int first_not_below(const I* cols, int begin, int end, long long column) {
    while (begin < end) {
        const int middle = begin + (end - begin) / 2;
        if (cols[middle] < column) begin = middle + 1;
        else end = middle;
    }
    return begin;
}

// A warp a row: segments[slab * N + n], and left_over[n].
template <typename I>
__global__ void __launch_bounds__(PLAN_BLOCK)
spmm_csr_segments(const I* __restrict__ cols, const int* __restrict__ row_offsets, Segment* __restrict__ left_over,
                  Segment* __restrict__ segments, long long N, int slabs, int width, int grouped) {
    const long long n = static_cast<long long>(blockIdx.x) * (PLAN_BLOCK / WARP) + threadIdx.x / WARP;
    if (n >= N) return;
    const int lane = threadIdx.x % WARP;
    const int begin = row_offsets[n], end = row_offsets[n + 1];
    bool falls = false;
    for (int i = begin + 1 + lane; i < end; i += WARP) falls |= cols[i] < cols[i - 1];
    const bool ascending = !__any_sync(~0u, falls);
    if (lane == 0) left_over[n] = {ascending ? max(min(end, grouped), begin) : begin, end};
    for (int s = lane; s < slabs; s += WARP) {
        int from = 0, to = 0;
        if (ascending) {
            from = first_not_below(cols, begin, end, static_cast<long long>(s) * width);
            to = first_not_below(cols, from, end, static_cast<long long>(s + 1) * width);
        }
        segments[s * N + n] = {min(from, grouped), min(to, grouped)};
    }
}

// --- the product ----------------------------------------------------------------------------------------------------

struct Weights {  // without its values
    const void* cols;
    const int* row_offsets;
    const Segment* segments;
    const Segment* left_over;
    long long N, K;
    int nnz, slabs, width;
};

template <typename T> struct Output {
    T* data;
    const T* bias;
    long long m_step, n_step, M;
    int relu;
};

template <typename T, typename I, int V, int R>
__global__ void __launch_bounds__(BLOCK_WARPS* WARP, 1)
spmm_csr_tiles(const __grid_constant__ Matrix<T> x, const T* __restrict__ values,
               const __grid_constant__ Weights w, const __grid_constant__ Output<T> y, int row_blocks, int block_rows,
               int stages) {
    using L = Lane<T, V>;
    extern __shared__ __align__(128) char shared[];
    __shared__ unsigned long long full[4], empty[4];
    __shared__ Segment left_over[CONSUMERS * R];

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int n0 = blockIdx.x % row_blocks * block_rows;
    const long long m0 = static_cast<long long>(blockIdx.x / row_blocks) * L::BATCH;
    const int rows = static_cast<int>(min(static_cast<long long>(block_rows), w.N - n0));
    const int slab_bytes = w.width * L::LINE;
    const int grouped = w.nnz / GROUP * GROUP;

    bool stored = false, any_left = false;
    if (static_cast<int>(threadIdx.x) < rows) {
        const int n = n0 + threadIdx.x;
        const Segment left = w.left_over[n];
        left_over[threadIdx.x] = left;
        stored = w.row_offsets[n] < min(w.row_offsets[n + 1], grouped);
        any_left = left.begin < left.end;
    }
    if (threadIdx.x < stages) {
        pipe_init(&full[threadIdx.x], PRODUCERS);
        pipe_init(&empty[threadIdx.x], CONSUMERS);
    }
    const int slabs = __syncthreads_or(stored) ? w.slabs : 0;
    any_left = __syncthreads_or(any_left);

    float* const tile = reinterpret_cast<float*>(shared);  // of outputs: [row][m], once the slabs are done with
    constexpr int PITCH = L::BATCH + 1;
    constexpr int AT_ONCE = GROUP;  // pieces of lines in registers

    if (warp >= CONSUMERS) {
        for (int s = 0; s < slabs; ++s) {
            const int stage = s % stages;
            if (s >= stages) pipe_wait(&empty[stage], (s / stages - 1) & 1);
            const long long k0 = static_cast<long long>(s) * w.width;
            const int width = static_cast<int>(min(static_cast<long long>(w.width), w.K - k0));
            fill_slab<T, V, PRODUCERS>(shared + stage * slab_bytes, x, m0, k0, width, warp - CONSUMERS, lane);
            pipe_arrive(&full[stage], lane);
        }
        __syncthreads();
    } else {
        const int mine = rows * warp / CONSUMERS;
        const int count = rows * (warp + 1) / CONSUMERS - mine;
        const Segment* segments = w.segments + n0 + mine + lane;
        const I* cols = static_cast<const I*>(w.cols);
        const unsigned piece = shared_address(shared) + lane * L::BYTES;
        const int last_group = grouped - GROUP;
        const Segment nothing = {0, 0};

        float sums[R][V] = {};
        Segment segment = lane < count && slabs ? segments[0] : nothing;
        typename Four<T>::type four_values = {};  // of the next group to be added
        typename Four<I>::type four_cols = {};
        const auto load = [&](int i) { four_values = four(values + i), four_cols = four(cols + i); };
        if (slabs) load(min(__shfl_sync(~0u, segment.begin, 0), last_group) & -GROUP);

#pragma unroll 1
        for (int s = 0; s < slabs; ++s) {
            const int stage = s % stages, k0 = s * w.width;
            Segment next = nothing;
            if (s + 1 < slabs && lane < count) next = segments[(s + 1) * w.N];
            pipe_wait(&full[stage], (s / stages) & 1);
            // column k's line lies at k * LINE from here, the lane's piece of it turned by k
            const unsigned place = piece + stage * slab_bytes - static_cast<unsigned>(k0) * L::LINE;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                if (r >= count) continue;
                const int begin = __shfl_sync(~0u, segment.begin, r), end = __shfl_sync(~0u, segment.end, r);
                // the group after this row's is the next row's first
                int after = __shfl_sync(~0u, r + 1 < count ? segment.begin : next.begin, r + 1 < count ? r + 1 : 0);
                after = min(after, last_group) & -GROUP;
                if (begin >= end) {
                    load(after);
                    continue;
                }
                int i = begin & -GROUP;
#pragma unroll 1
                do {
                    float factors[GROUP];
                    unpack<T>(factors, four_values);
                    const int columns[GROUP] = {static_cast<int>(four_cols.x), static_cast<int>(four_cols.y),
                                                static_cast<int>(four_cols.z), static_cast<int>(four_cols.w)};
                    load(i + GROUP < end ? i + GROUP : after);
#pragma unroll
                    for (int j0 = 0; j0 < GROUP; j0 += AT_ONCE) {
                        Piece<T, V> pieces[AT_ONCE];
                        bool wanted[AT_ONCE];
#pragma unroll
                        for (int j = 0; j < AT_ONCE; ++j) {
                            const unsigned k = columns[j0 + j];
                            wanted[j] = i + j0 + j >= begin && i + j0 + j < end;
                            pieces[j].load(k * L::LINE + (turn<T>(k) ^ place), wanted[j]);
                        }
#pragma unroll
                        for (int j = 0; j < AT_ONCE; ++j) pieces[j].add_to(sums[r], factors[j0 + j], wanted[j]);
                    }
                    i += GROUP;
                } while (i < end);
            }
            pipe_arrive(&empty[stage], lane);
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
    if (any_left) {  // entry by entry, from x itself
        for (int v = warp; v < rows; v += BLOCK_WARPS)
            for (int i = left_over[v].begin; i < left_over[v].end; ++i) {
                const float factor = to_float(values[i]);
                const I k = static_cast<const I*>(w.cols)[i];
                for (int m = lane; m < left; m += WARP)
                    tile[v * PITCH + m] = fmaf(factor, to_float(x.at(m0 + m, k)), tile[v * PITCH + m]);
            }
        __syncthreads();
    }
    const auto write = [&](int v, int m) {
        finish(&y.data[(m0 + m) * y.m_step + (n0 + v) * y.n_step], tile[v * PITCH + m], y.bias, n0 + v, y.relu);
    };
    if (y.n_step == 1) {
        for (int m = warp; m < left; m += BLOCK_WARPS)
            for (int v = lane; v < rows; v += WARP) write(v, m);
    } else {
        for (int v = warp; v < rows; v += BLOCK_WARPS)
            for (int m = lane; m < left; m += WARP) write(v, m);
    }
}
