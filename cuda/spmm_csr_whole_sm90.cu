// y = act(x · Wᵀ + bias), W (N, K) in CSR, for a handful of batch rows on Hopper, where all of their columns fit shared
// memory.
//
//   x (M, K) with rows of whole 16 bytes, y (M, N) in any strides; values (nnz,) of x's type, cols (nnz,) int or unsigned
//   short; sums in float.
//
// As in spmm_csr_small, a warp takes a row of W, its lanes share out the entries, read side by side and a chunk ahead, and
// add up by shuffles. But x comes as it is, [m][k], by the copy engine, while offsets and entries are on their way. A row
// of more than LONG entries, fewer in blocks of few rows, is shared out among all warps.

#include "common/sm90.cuh"
#include "common/spmm.cuh"

constexpr int WARPS = 32;
constexpr int LONG = 2048;
constexpr int AHEAD = 4;  // entries that a lane reads before it needs them

template <typename T, typename I, int MB>
__global__ void __launch_bounds__(WARPS* WARP, 1)
spmm_csr_whole(const T* __restrict__ x, long long x_m, const T* __restrict__ values, const I* __restrict__ cols,
             const int* __restrict__ row_offsets, const T* __restrict__ bias, T* __restrict__ y, long long y_m,
             long long y_n, long long M, int N, int K, int block_rows, int row_blocks, int relu) {
    extern __shared__ __align__(128) char shared[];
    __shared__ unsigned long long arrived;
    __shared__ float sums_of_warps[WARPS][MB];
    T* const xs = reinterpret_cast<T*>(shared);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int n0 = blockIdx.x % row_blocks * block_rows, rows = min(block_rows, N - n0);
    const long long m0 = static_cast<long long>(blockIdx.x / row_blocks) * MB;
    const int batch = static_cast<int>(min(static_cast<long long>(MB), M - m0));

    struct Span { int begin, end; };
    const auto span_of = [&](int r) {
        if (r >= rows) return Span{0, 0};
        return Span{row_offsets[n0 + r], row_offsets[n0 + r + 1]};
    };
    Span span = span_of(warp), span_after = span_of(warp + WARPS);
    if (threadIdx.x == 0) {
        mbarrier_init(&arrived, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warp == 0) {
        if (lane == 0) mbarrier_expect_bytes(&arrived, batch * K * static_cast<int>(sizeof(T)));
        __syncwarp();
        const int m = (lane + blockIdx.x) % MB;  // not all blocks the same row at a time
        if (lane < MB && m < batch) bulk_load(xs + m * K, x + (m0 + m) * x_m, K * sizeof(T), &arrived);
    }
    const auto is_long = [&](const Span& span) { return span.end - span.begin > min(LONG, LONG / 8 * rows); };
    // What is on its way: entries of a row, whether they are its last, and whether the row is a long one, which waits.
    struct Chunk {
        EntriesAhead<T, AHEAD> entries;
        bool last, waits;
    } next;
    int next_row = warp, from = span.begin, to = is_long(span) ? from : span.end;  // where the chunk after it begins
    const auto fetch = [&](Chunk& chunk) {
        chunk.entries.load(values, cols, from + lane, to, WARP);
        from += AHEAD * WARP;
        chunk.last = from >= to;
        chunk.waits = is_long(span);
        if (!chunk.last) return;
        next_row += WARPS;
        span = span_after, span_after = span_of(next_row + WARPS);
        from = span.begin, to = is_long(span) ? from : span.end;
    };
    fetch(next);
    mbarrier_wait(&arrived, 0);

    const auto add = [&](float (&sums)[MB], const EntriesAhead<T, AHEAD>& entries) {
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (entries.cols[u] < K) {
                const float factor = to_float(entries.values[u]);
#pragma unroll
                for (int m = 0; m < MB; ++m)
                    sums[m] = fmaf(factor, to_float(xs[min(m, batch - 1) * K + entries.cols[u]]), sums[m]);
            }
    };
    float sums[MB] = {};
    bool any_long = false;
    for (int r = warp; r < rows;) {
        const Chunk now = next;
        fetch(next);
        add(sums, now.entries);
        if (!now.last) continue;
        any_long |= now.waits;
        const float sum = add_lanes(sums, lane);
        const int m = lane / (WARP / MB);
        if (lane % (WARP / MB) == 0 && m < batch && !now.waits)
            finish(&y[(m0 + m) * y_m + (n0 + r) * y_n], sum, bias, n0 + r, relu);
#pragma unroll
        for (int q = 0; q < MB; ++q) sums[q] = 0.0f;
        r += WARPS;
    }
    if (!__syncthreads_or(any_long)) return;
    for (int r = 0; r < rows; ++r) {
        const Span row = span_of(r);
        if (!is_long(row)) continue;  // for all threads alike
        for (int i = row.begin + threadIdx.x; i - lane < row.end; i += AHEAD * WARPS * WARP) {
            EntriesAhead<T, AHEAD> some;
            some.load(values, cols, i, row.end, WARPS * WARP);
            add(sums, some);
        }
        const float sum = add_lanes(sums, lane);
#pragma unroll
        for (int m = 0; m < MB; ++m) sums[m] = 0.0f;
        if (lane % (WARP / MB) == 0) sums_of_warps[warp][lane / (WARP / MB)] = sum;
        __syncthreads();
        if (threadIdx.x < batch) {
            float all = 0.0f;
            for (int w = 0; w < WARPS; ++w) all += sums_of_warps[w][threadIdx.x];
            finish(&y[(m0 + threadIdx.x) * y_m + (n0 + r) * y_n], all, bias, n0 + r, relu);
        }
        __syncthreads();
    }
}
