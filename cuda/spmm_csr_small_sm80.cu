// y = act(x · Wᵀ + bias), W (N, K) in CSR, for a handful of batch rows: the time to read W's entries once is all there is.
//
//   x (M, K), y (M, N) in any strides; values (nnz,) of x's type, cols (nnz,) int or unsigned short; sums in float.
//
// A block keeps its MB rows of x in shared memory, turned to [k][m], and owns `block_rows` rows of W. A warp takes a row:
// its lanes share out the entries, read side by side, meet each with the MB values of column k, and add up by shuffles.
// Where x is wider than shared memory, it comes in chunks
// of `width` columns, and a row's entries outside the chunk wait for theirs.

#include "common/spmm.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = WARPS * WARP;
constexpr int UNROLL = 4;  // entries of a lane in flight

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

// The sums of all lanes, sum m in lanes m * 32 / MB and on: at each step half of the sums goes to the other half of lanes.
template <int MB> __device__ __forceinline__ float add_lanes(float (&sums)[MB], int lane) {
    int step = WARP / 2;
#pragma unroll
    for (int half = MB / 2; half > 0; half /= 2, step /= 2)
#pragma unroll
        for (int j = 0; j < half; ++j) {
            const float kept = lane & step ? sums[j + half] : sums[j], given = lane & step ? sums[j] : sums[j + half];
            sums[j] = kept + __shfl_xor_sync(~0u, given, step);
        }
    for (; step > 0; step /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], step);
    return sums[0];
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

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long row_blocks = (N + block_rows - 1) / block_rows;
    const long long n0 = blockIdx.x % row_blocks * block_rows;
    const long long m0 = blockIdx.x / row_blocks * MB;
    const int rows = static_cast<int>(min(static_cast<long long>(block_rows), N - n0));
    const int batch = static_cast<int>(min(static_cast<long long>(MB), M - m0));

    for (int i = threadIdx.x; i < rows * MB; i += THREADS) sums_of_rows[i] = 0.0f;
    for (long long k0 = 0; k0 < K; k0 += width) {
        const int here = static_cast<int>(min(static_cast<long long>(width), K - k0));
        __syncthreads();
#pragma unroll 2
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

        // Entries from `from` on, every `step`-th, of this chunk's columns.
        const auto add_entries = [&](float (&sums)[MB], int from, int end, int step) {
            for (int i = from; i < end; i += UNROLL * step) {
                T value[UNROLL];
                unsigned k[UNROLL];
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    const bool there = i + u * step < end;
                    k[u] = there ? cols[i + u * step] - static_cast<unsigned>(k0) : ~0u;
                    if (there) value[u] = values[i + u * step];
                }
#pragma unroll
                for (int u = 0; u < UNROLL; ++u)
                    if (k[u] < here) add_column<T, MB>(sums, columns, k[u], to_float(value[u]));
            }
        };
        for (int r = warp; r < rows; r += WARPS) {
            float sums[MB] = {};
            add_entries(sums, row_offsets[n0 + r] + lane, row_offsets[n0 + r + 1], WARP);
            const float sum = add_lanes<MB>(sums, lane);
            if (lane % (WARP / MB) == 0) sums_of_rows[r * MB + lane / (WARP / MB)] += sum;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * batch; i += THREADS) {
        const int r = i % rows, m = i / rows;
        finish(&y[(m0 + m) * y_m + (n0 + r) * y_n], sums_of_rows[r * MB + m], bias, n0 + r, relu);
    }
}
