// The gradient of a sparse W (N, K) at its entries only: out[i] = sum over m of dy[m, n_i] * x[m, k_i], for few rows.
//
//   x (M, K) and dy (M, N) in any strides, M <= BATCH; cols (nnz,) int or unsigned short; row_offsets (N + 1,);
//   out (nnz,) float.
//
// Each entry is read and written once, and what else it needs is near: all of x, turned to lines of a column each, lies
// in shared memory, and dy of 32 rows of W, a row a lane, in a warp's registers. A warp has `share` neighbouring entries,
// wherever rows begin, so that no pattern is worse than another: it finds its first row by asking for 32 offsets at a
// time while x is on its way, and so it does where empty rows lie between; lanes take an entry each.

#include "common/numeric.cuh"
#include "common/shared.cuh"

constexpr int WARP = 32;
template <int BATCH> constexpr int FEW_THREADS = BATCH > 8 ? 512 : 1024;  // by the registers that a row of dy takes
// Chunks of 32 entries whose columns are asked for at once; ptxas for Blackwell has fewer registers left for them.
constexpr int AHEAD = __CUDA_ARCH__ >= 1000 ? 4 : 8;

// Lines are LINE bytes, in chunks of 16 which take turns, so that neighbouring lines are written without conflicts.
template <int LINE> __device__ __forceinline__ int chunk_of_line(unsigned k, int chunk) {
    constexpr int CHUNKS = LINE / 16;
    return k * LINE + (chunk ^ static_cast<int>(k / (8 / CHUNKS) % CHUNKS)) * 16;
}

template <typename T, typename I, int BATCH>
__global__ void __launch_bounds__(FEW_THREADS<BATCH>, 1)
sddmm_few(const T* __restrict__ x, long long x_row, long long x_column, const T* __restrict__ dy, long long dy_row,
          long long dy_column, const I* __restrict__ cols, const int* __restrict__ row_offsets, float* __restrict__ out,
          int M, int N, int K, int nnz, int share) {
    constexpr int THREADS = FEW_THREADS<BATCH>;
    constexpr int LINE = BATCH * sizeof(T), CHUNKS = LINE / 16, IN_CHUNK = 16 / sizeof(T);
    static_assert(CHUNKS >= 1 && CHUNKS <= 8, "a line is at most all the banks wide");
    extern __shared__ __align__(128) char shared[];
    const int lane = threadIdx.x % WARP;
    const long long first = (blockIdx.x * static_cast<long long>(THREADS / WARP) + threadIdx.x / WARP) * share;
    const int begin = static_cast<int>(min(first, static_cast<long long>(nnz)));
    const int end = static_cast<int>(min(first + share, static_cast<long long>(nnz))) - begin;
    cols += begin, out += begin;  // from here on the warp's first entry is entry 0: no sum goes beyond an int

    unsigned columns[AHEAD];
    const auto ask = [&](int from) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int at = from + i * WARP + lane;
            columns[i] = at < end ? static_cast<unsigned>(cols[at]) : 0;
        }
    };
    ask(0);

    for (int i = threadIdx.x; i < K * CHUNKS; i += THREADS) {
        const int k = i % K, chunk = i / K;
        alignas(16) T line[IN_CHUNK];
#pragma unroll
        for (int e = 0; e < IN_CHUNK; ++e) {
            const int m = chunk * IN_CHUNK + e;
            line[e] = m < M ? x[m * x_row + k * x_column] : from_float<T>(0.0f);
        }
        *reinterpret_cast<uint4*>(shared + chunk_of_line<LINE>(k, chunk)) = *reinterpret_cast<const uint4*>(line);
    }

    unsigned row = 0;  // of 32 that the warp looks at; not beyond the last row that begins at or before what it looks for
    // Move on until entry `at` is of one of the 32.
    const auto seek = [&](int at) {
        unsigned rest = N - row;
        while (rest > WARP) {
            const unsigned step = (rest + WARP - 1) / WARP, skip = step * (lane + 1);
            const bool before = skip < rest && row_offsets[row + skip] - begin <= at;
            const unsigned passed = __popc(__ballot_sync(~0u, before)) * step;
            rest = min(step, rest - passed);
            row += passed;
        }
    };
    int row_end = 0;  // of row `row` + lane; beyond the last row, as of the last
    T dys[BATCH];     // of that row
    const auto look = [&] {
        const unsigned n = row + lane;
        row_end = row_offsets[min(n, N - 1u) + 1] - begin;
#pragma unroll
        for (int m = 0; m < BATCH; ++m)
            dys[m] = m < M && n < N ? dy[m * dy_row + n * dy_column] : from_float<T>(0.0f);
    };
    float now[BATCH];
    int now_end = 0;
    // The row that entry `at` belongs to: its dy to every lane, and where it ends.
    const auto find = [&](int at) {
        unsigned after;
        for (bool near = true; !(after = __ballot_sync(~0u, row_end > at)); near = false) {
            row += WARP;
            if (!near) seek(at);  // nor the next 32: most likely they are empty
            look();
        }
        const int from = __ffs(after) - 1;
        now_end = __shfl_sync(~0u, row_end, from);
#pragma unroll
        for (int m = 0; m < BATCH; ++m) now[m] = __shfl_sync(~0u, to_float(dys[m]), from);
    };
    if (end > 0) seek(0), look(), find(0);
    __syncthreads();

    for (int base = 0; base < end; base += AHEAD * WARP) {
        unsigned here[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) here[i] = columns[i];
        if (base + AHEAD * WARP < end) ask(base + AHEAD * WARP);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int chunk_begin = base + i * WARP, chunk_end = min(chunk_begin + WARP, end), at = chunk_begin + lane;
            if (chunk_begin >= end) break;
            alignas(16) T line[BATCH];
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                *reinterpret_cast<uint4*>(line + c * IN_CHUNK) =
                    *reinterpret_cast<const uint4*>(shared + chunk_of_line<LINE>(here[i], c));
            float sum;
            const auto dot = [&] {
                sum = 0.0f;
#pragma unroll
                for (int m = 0; m < BATCH; ++m) sum = fmaf(now[m], to_float(line[m]), sum);
            };
            if (chunk_begin >= now_end) find(chunk_begin);
            dot();
            while (now_end < chunk_end) {  // rows that end inside the chunk
                const int from = now_end;
                const float before = sum;
                find(from);
                dot();
                if (at < from) sum = before;
            }
            if (at < chunk_end) out[at] = sum;
        }
    }
}
