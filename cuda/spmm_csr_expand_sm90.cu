// Before and after a product on dense tensor cores: W (N, K) from CSR to dense, and the outputs that such a product gets
// wrong.
//
//   values (nnz,), cols (nnz,) int or unsigned short, row_offsets (N + 1,); w (N, stride), rows of whole 16 bytes;
//   x (M, K) in any strides, y (M, N) row-major.
//
// A structural zero contributes nothing, but in a dense W it makes NaN of NaN and Inf in x. Whatever a dense product gets
// wrong that way is NaN, so `repair` looks for NaN among the outputs and computes those again, entry by entry. And where
// a column repeats within a row, `expand` writes NaN: then all outputs of that row are computed again.
// (spmm_csr_product_sm90.cu sees to both before it stores.) Where x is much smaller than y, and lies in one piece, the
// first blocks of `expand`, the lookers, look at x instead: unless one of all blocks has `found` something, there is
// nothing to repair.
//
//   expand   a warp has a row at a time, in shared memory, which the copy engine writes to W in one piece. Meanwhile the
//            entries of the warp's next row are on their way, ROUNDS of 32.

#include "common/dependent.cuh"
#include "common/numeric.cuh"
#include "common/sm90.cuh"

constexpr int WARP = 32;
constexpr int WARPS = 4;
template <typename T> constexpr int VECTOR = 16 / static_cast<int>(sizeof(T));
constexpr int REPAIR_BLOCK = 256;

template <int BYTES> struct MarkType { using type = unsigned; };
template <> struct MarkType<2> { using type = unsigned short; };

template <typename T> __device__ __forceinline__ void clear(T* room, int width, int lane) {
    for (int i = lane; i < width / VECTOR<T>; i += WARP) reinterpret_cast<uint4*>(room)[i] = make_uint4(0, 0, 0, 0);
}

// Columns k0 to k0 + width of a row whose columns do not ascend. Does one repeat? An entry that finds another's mark in
// its place knows; then the row has a NaN.
template <typename T, typename I>
__device__ __noinline__ bool write_unordered(T* room, int k0, int width, const T* values, const I* cols, int begin,
                                             int end, int lane) {
    using Mark = typename MarkType<sizeof(T)>::type;
    auto* const marks = reinterpret_cast<Mark*>(room);
    auto each = [&](auto visit) {
        for (int i = begin + lane; i < end; i += WARP) {
            const unsigned k = static_cast<unsigned>(cols[i]) - k0;
            if (k < width) visit(k, i);
        }
        __syncwarp();
    };
    bool repeats = sizeof(T) == 2 && end - begin > 65536;  // more than there are marks
    each([&](unsigned k, int i) { marks[k] = static_cast<Mark>(i - begin); });
    each([&](unsigned k, int i) { repeats |= marks[k] != static_cast<Mark>(i - begin); });
    clear(room, width, lane);
    __syncwarp();
    each([&](unsigned k, int i) { room[k] = values[i]; });
    repeats = __any_sync(~0u, repeats);
    if (repeats && lane == 0) room[0] = from_float<T>(not_a_number());
    return repeats;
}

// Whether something among these `pieces` of 16 bytes is not finite: this thread's part of `threads`.
template <typename T>
__device__ __forceinline__ bool look(const T* x, long long pieces, long long thread, long long threads) {
    float zero = 0.0f;  // until something is not finite
#pragma unroll 8
    for (long long i = thread; i < pieces; i += threads) {
        union { uint4 vector; T parts[VECTOR<T>]; } part;
        part.vector = reinterpret_cast<const uint4*>(x)[i];
#pragma unroll
        for (int e = 0; e < VECTOR<T>; ++e) zero = fmaf(to_float(part.parts[e]), 0.0f, zero);
    }
    return zero != zero;
}

template <typename T, typename I>
__global__ void __launch_bounds__(WARPS * WARP, 4)
spmm_csr_expand(const T* __restrict__ values, const I* __restrict__ cols, const int* __restrict__ row_offsets,
                T* __restrict__ w, int N, int stride, int most_width, const T* __restrict__ x, long long pieces,
                int lookers, int* __restrict__ found) {
    extern __shared__ __align__(16) char shared[];
    constexpr int BLOCK = WARPS * WARP, ROUNDS = 20, NO_COLUMN = 0x7fffffff;
    let_successor_start();
    if (blockIdx.x < lookers) {
        const bool any = look(x, pieces, blockIdx.x * BLOCK + threadIdx.x, static_cast<long long>(lookers) * BLOCK);
        const int of_block = __syncthreads_or(any);
        if (threadIdx.x == 0) found[blockIdx.x] = of_block;
        return;
    }
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, step = (gridDim.x - lookers) * WARPS;
    T* const room = reinterpret_cast<T*>(shared) + warp * most_width;
    int n = (blockIdx.x - lookers) * WARPS + warp;

    int col[ROUNDS], before;  // before: the column of the entry before these
    T value[ROUNDS];
    auto load = [&](int from, int begin, int end) {
#pragma unroll
        for (int u = 0; u < ROUNDS; ++u) {
            const int i = from + u * WARP + lane;
            col[u] = i < end ? static_cast<int>(cols[i]) : NO_COLUMN;
            value[u] = i < end ? values[i] : from_float<T>(0.0f);
        }
        before = from > begin && from < end ? static_cast<int>(cols[from - 1]) : -1;
    };
    int begin = 0, end = 0;
    if (n < N) begin = row_offsets[n], end = row_offsets[n + 1];
    load(begin, begin, end);
    bool repeats = false;
    for (; n < N; n += step) {
        const int after = min(n + step, N - 1), next_begin = row_offsets[after], next_end = row_offsets[after + 1];
        for (int k0 = 0; k0 < stride; k0 += most_width) {
            const int width = min(most_width, stride - k0);
            clear(room, width, lane);
            __syncwarp();
            bool ascend = true;
            for (int from = begin;;) {
#pragma unroll
                for (int u = 0; u < ROUNDS; ++u) {
                    const int left = __shfl_up_sync(~0u, col[u], 1);
                    ascend &= (lane == 0 ? before : left) < col[u] || col[u] == NO_COLUMN;
                    before = __shfl_sync(~0u, col[u], WARP - 1);
                    const unsigned k = static_cast<unsigned>(col[u]) - k0;
                    if (k < width) room[k] = value[u];
                }
                from += ROUNDS * WARP;
                if (from >= end) break;
                load(from, begin, end);
            }
            if (k0 + width < stride) load(begin, begin, end);
            else load(next_begin, next_begin, next_end);
            __syncwarp();
            if (!__all_sync(~0u, ascend)) repeats |= write_unordered(room, k0, width, values, cols, begin, end, lane);
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) {
                T* const to = w + static_cast<long long>(n) * stride + k0;
                bulk_store(to, room, width * static_cast<int>(sizeof(T)));
                tma_store_commit();
                tma_store_wait_read<0>();
            }
            __syncwarp();
        }
        begin = next_begin, end = next_end;
    }
    if (found) {
        const int of_block = __syncthreads_or(repeats);
        if (threadIdx.x == 0) found[blockIdx.x] = of_block;
    }
}

template <typename T, typename I>
__global__ void __launch_bounds__(REPAIR_BLOCK)
spmm_csr_repair(T* __restrict__ y, const T* __restrict__ x, long long x_m, long long x_k, const T* __restrict__ values,
                const I* __restrict__ cols, const int* __restrict__ row_offsets, const T* __restrict__ bias, long long M,
                long long N, int relu, const int* __restrict__ found, int blocks) {
    if (found) {
        bool any = false;
        for (int i = threadIdx.x; i < blocks; i += REPAIR_BLOCK) any |= found[i];
        if (!__syncthreads_or(any)) return;
    }
    const int lane = threadIdx.x % WARP;
    const long long all = M * N, step = static_cast<long long>(gridDim.x) * REPAIR_BLOCK * VECTOR<T>;
    const long long first = (static_cast<long long>(blockIdx.x) * REPAIR_BLOCK + threadIdx.x) * VECTOR<T>;
    for (long long at = first; at - lane * VECTOR<T> < all; at += step) {  // a warp stays together
        union { uint4 vector; T parts[VECTOR<T>]; } part;
        part.vector = make_uint4(0, 0, 0, 0);
        if (at + VECTOR<T> <= all) part.vector = *reinterpret_cast<const uint4*>(y + at);
        else
            for (int i = 0; i < VECTOR<T>; ++i)
                if (at + i < all) part.parts[i] = y[at + i];
        unsigned wrong = 0;
#pragma unroll
        for (int i = 0; i < VECTOR<T>; ++i) {
            const float v = to_float(part.parts[i]);
            wrong |= static_cast<unsigned>(v != v) << i;
        }
        for (unsigned lanes = __ballot_sync(~0u, wrong); lanes; lanes &= lanes - 1) {
            const int holder = __ffs(lanes) - 1;
            for (unsigned left = __shfl_sync(~0u, wrong, holder); left; left &= left - 1) {
                const long long output = at + (holder - lane) * VECTOR<T> + __ffs(left) - 1;
                const long long m = output / N, n = output % N;
                float sum = 0.0f;
                for (int i = row_offsets[n] + lane; i < row_offsets[n + 1]; i += WARP)
                    sum = fmaf(to_float(values[i]), to_float(x[m * x_m + static_cast<long long>(cols[i]) * x_k]), sum);
                for (int half = WARP / 2; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
                if (bias) sum += to_float(bias[n]);
                if (lane == 0) y[output] = from_float<T>(relu ? relu_of(sum) : sum);
            }
        }
    }
}
