// y = act(x · Wᵀ + bias), W (N, K) in CSR, for a handful of batch rows: the time to read W's entries once is all there is.
//
//   x (M, K), y (M, N) in any strides; values (nnz,) of x's type, cols (nnz,) int or unsigned short; sums in float.
//
// A block keeps its MB rows of x in shared memory, turned to [k][m], and owns `block_rows` rows of W. A warp takes a row:
// its lanes share out the entries, read side by side, meet each with the MB values of column k, and add up by shuffles.
// The first entries of its next row are on their way meanwhile. A row of more than LONG entries is shared out among all
// warps, and so are the rows of a block that has few. Where x is wider than shared memory, it comes in chunks of `width`
// columns, and a row's entries outside the chunk wait for theirs.

#include "common/spmm.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = WARPS * WARP;
constexpr int LONG = 2048;
constexpr int AHEAD = 7;  // entries that a lane reads before it needs them

// Where column k's values begin, in elements; for lines of 32 bytes, the halves of every second four lines swap, so that
// any 8 lines spread over all banks.
template <typename T, int MB> struct Column {
    static constexpr int PART = MB * sizeof(T) > 16 ? VECTOR<T> : MB;  // elements read at once
    static __device__ __forceinline__ int at(int k, int part) {
        return k * MB + (PART == MB ? 0 : (part ^ (k >> 2 & 1)) * PART);
    }
};

template <typename T, int MB>
__device__ __forceinline__ void add_column(float (&sums)[MB], const T* columns, int k, float factor) {
    using C = Column<T, MB>;
#pragma unroll
    for (int part = 0; part < MB / C::PART; ++part) {
        const T* from = columns + C::at(k, part);
        struct alignas(C::PART * sizeof(T)) Values { T v[C::PART]; };
        const Values x = *reinterpret_cast<const Values*>(from);
#pragma unroll
        for (int j = 0; j < C::PART; ++j)
            sums[part * C::PART + j] = fmaf(factor, to_float(x.v[j]), sums[part * C::PART + j]);
    }
}

// The block's part of an array is on its way to the L2 cache from now on.
template <typename A> __device__ __forceinline__ void prefetch(const A* array, int begin, int end) {
    constexpr int STEP = 128 / sizeof(A);  // elements of a line
    for (int i = begin + threadIdx.x * STEP; i < end; i += THREADS * STEP)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(array + i));
}

template <typename T, typename I, int MB>
__global__ void __launch_bounds__(THREADS, 1)
spmm_csr_small(const T* __restrict__ x, long long x_m, long long x_k, const T* __restrict__ values,
               const I* __restrict__ cols, const int* __restrict__ row_offsets, const T* __restrict__ bias,
               T* __restrict__ y, long long y_m, long long y_n, long long M, long long N, long long K, int block_rows,
               int width, int relu) {
    extern __shared__ __align__(128) char shared[];
    T* const columns = reinterpret_cast<T*>(shared);
    float* const sums_of_rows = reinterpret_cast<float*>(shared + width * MB * sizeof(T));  // [row][m]
    __shared__ float sums_of_warps[WARPS][MB];

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long row_blocks = (N + block_rows - 1) / block_rows;
    const long long n0 = blockIdx.x % row_blocks * block_rows;
    const long long m0 = blockIdx.x / row_blocks * MB;
    const int rows = static_cast<int>(min(static_cast<long long>(block_rows), N - n0));
    const int batch = static_cast<int>(min(static_cast<long long>(MB), M - m0));

    for (int i = threadIdx.x; i < rows * MB; i += THREADS) sums_of_rows[i] = 0.0f;
    // Row r of the block: its entries; none beyond the block.
    struct Span { int begin, end; };
    const auto span_of = [&](int r) {
        if (r >= rows) return Span{0, 0};
        return Span{row_offsets[n0 + r], row_offsets[n0 + r + 1]};
    };
    int ways = 1;  // warps that share out a row, where there are more of them than rows
    while (2 * ways * rows <= WARPS) ways *= 2;
    const int first_row = warp / ways, offset = warp % ways * WARP + lane, step = ways * WARP;
    const auto load_first = [&](EntriesAhead<T, AHEAD>& to, const Span& span) {
        to.load(values, cols, span.begin + offset, span.end, step);
    };
    Span span = span_of(first_row), span_after = span_of(first_row + WARPS);
    EntriesAhead<T, AHEAD> first;  // of the warp's first row: on their way while x is
    load_first(first, span);
    const int block_begin = row_offsets[n0], block_end = row_offsets[n0 + rows];
    prefetch(values, block_begin, block_end);
    prefetch(cols, block_begin, block_end);
    for (long long k0 = 0; k0 < K; k0 += width) {
        const int here = static_cast<int>(min(static_cast<long long>(width), K - k0));
        __syncthreads();
#pragma unroll 4
        for (int k = threadIdx.x; k < here; k += THREADS) {
            T v[MB];
#pragma unroll
            for (int m = 0; m < MB; ++m) v[m] = m < batch ? x[(m0 + m) * x_m + (k0 + k) * x_k] : from_float<T>(0.0f);
            using C = Column<T, MB>;
#pragma unroll
            for (int part = 0; part < MB / C::PART; ++part) {
                struct alignas(C::PART * sizeof(T)) Values { T v[C::PART]; } packed;
#pragma unroll
                for (int j = 0; j < C::PART; ++j) packed.v[j] = v[part * C::PART + j];
                *reinterpret_cast<Values*>(columns + C::at(k, part)) = packed;
            }
        }
        __syncthreads();

        // Entries from `from` on, every `step`-th, of this chunk's columns; the first AHEAD are read already.
        const auto add_entries = [&](float (&sums)[MB], EntriesAhead<T, AHEAD> now, int from, int end, int step) {
            for (int i = from; i < end; i += AHEAD * step) {
                EntriesAhead<T, AHEAD> next;
                next.load(values, cols, i + AHEAD * step, end, step);
#pragma unroll
                for (int u = 0; u < AHEAD; ++u) {
                    const unsigned k = now.cols[u] - static_cast<unsigned>(k0);
                    if (k < here) add_column<T, MB>(sums, columns, k, to_float(now.values[u]));
                }
                now = next;
            }
        };
        bool any_long = false;
        if (k0) {
            span = span_of(first_row), span_after = span_of(first_row + WARPS);
            load_first(first, span);
        }
        for (int r = first_row; r < rows; r += WARPS) {
            EntriesAhead<T, AHEAD> first_after;  // of the next row: on their way while this one is added up
            load_first(first_after, span_after);
            const Span mine = span;
            span = span_after;
            span_after = span_of(r + 2 * WARPS);
            if (ways == 1 && mine.end - mine.begin > LONG) {
                any_long = true;
            } else {
                float sums[MB] = {};
                add_entries(sums, first, mine.begin + offset, mine.end, step);
                const float sum = add_lanes(sums, lane);
                if (lane % (WARP / MB) == 0) {
                    if (ways > 1) sums_of_warps[warp][lane / (WARP / MB)] = sum;
                    else sums_of_rows[r * MB + lane / (WARP / MB)] += sum;
                }
            }
            first = first_after;
        }
        any_long = __syncthreads_or(any_long);
        if (ways > 1)
            for (int i = threadIdx.x; i < rows * MB; i += THREADS)
                for (int way = 0; way < ways; ++way) sums_of_rows[i] += sums_of_warps[i / MB * ways + way][i % MB];
        if (!any_long) continue;
        for (int r = 0; r < rows; ++r) {
            const int begin = row_offsets[n0 + r], end = row_offsets[n0 + r + 1];
            if (end - begin <= LONG) continue;  // for all threads alike
            float sums[MB] = {};
            EntriesAhead<T, AHEAD> now;
            now.load(values, cols, begin + threadIdx.x, end, THREADS);
            add_entries(sums, now, begin + threadIdx.x, end, THREADS);
            const float sum = add_lanes(sums, lane);
            if (lane % (WARP / MB) == 0) sums_of_warps[warp][lane / (WARP / MB)] = sum;
            __syncthreads();
            if (threadIdx.x < MB)
                for (int w = 0; w < WARPS; ++w) sums_of_rows[r * MB + threadIdx.x] += sums_of_warps[w][threadIdx.x];
            __syncthreads();
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * batch; i += THREADS) {
        const int r = i % rows, m = i / rows;
        finish(&y[(m0 + m) * y_m + (n0 + r) * y_n], sums_of_rows[r * MB + m], bias, n0 + r, relu);
    }
}
