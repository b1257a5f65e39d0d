// y = act(x · wᵀ + bias) on Hopper's tensor cores, where w (N, K) is a sparse matrix written out by spmm_csr_expand: the
// pipelines of common/gemm_sm90.cuh and gemm_single_sm90.cuh, and the right value where a dense product has none.
//
//   x (M, K) half or bfloat16, rows ldx apart, w (N, K) and y (M, N) row-major, bias (N,) or null;
//   values (nnz,), cols (nnz,) int or (narrow) unsigned short, row_offsets (N + 1,): w in CSR.
//
// A structural zero contributes nothing, but in a dense w it makes NaN of NaN and Inf in x, and a row in which a column
// repeats was written out as NaN. So a sum that comes out as NaN is computed again, entry by entry, before it is stored;
// but not without row_offsets: of a w that was written out from another format the zeros are multiplied.

#include "common/dependent.cuh"
#include "common/gemm_single_sm90.cuh"

template <typename T> struct Csr {
    const T* x;
    long long ldx;
    const T* values;
    const void* cols;
    const int* row_offsets;
    int narrow;

    // The product of row m of x and row n of w, by a whole warp.
    __device__ __forceinline__ float product(int m, int n, int lane) const {
        const T* const row = x + m * ldx;
        float sum = 0.0f;
        for (int i = row_offsets[n] + lane; i < row_offsets[n + 1]; i += 32) {
            const int k = narrow ? static_cast<const unsigned short*>(cols)[i] : static_cast<const int*>(cols)[i];
            sum = fmaf(to_float(values[i]), to_float(row[k]), sum);
        }
        for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
        return sum;
    }
};

template <typename T, int BN> struct CsrEpilogue : FloatEpilogue<T, T, BN, NO_MASK, 1> {
    const Csr<T>& csr;
    int m;

    __device__ __forceinline__ void rows(int first) { m = first; }

    // The sums of rows m + 64 i + 8 h and columns col + 8 j + c are acc[i][4 j + 2 h + c].
    template <int MI, int COUNT> __device__ __forceinline__ void correct(float (&acc)[MI][COUNT], int col) {
        if (!csr.row_offsets) return;
        constexpr int ALL_SUMS = MI * COUNT, PART = ALL_SUMS < 32 ? ALL_SUMS : 32;
        float zeros[2] = {};  // until something is not finite
#pragma unroll
        for (int i = 0; i < ALL_SUMS; ++i) zeros[i % 2] = fmaf(acc[i / COUNT][i % COUNT], 0.0f, zeros[i % 2]);
        const float zero = zeros[0] + zeros[1];
        if (!__any_sync(~0u, zero != zero)) return;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int first = 0; first < ALL_SUMS; first += PART) {
#pragma unroll 1
            for (int e = first; e < first + PART; ++e) {  // registers cannot be counted through: a turn looks at all
                float v = 0.0f;
#pragma unroll
                for (int i = first; i < first + PART; ++i) v = i == e ? acc[i / COUNT][i % COUNT] : v;
                const int row = m + e / COUNT * 64 + e / 2 % 2 * 8, column = this->n0 + col + e % COUNT / 4 * 8 + e % 2;
                unsigned wrong = __ballot_sync(~0u, v != v && row < this->M && column < this->N);
                for (; wrong; wrong &= wrong - 1) {
                    const int holder = __ffs(wrong) - 1;
                    const float sum = csr.product(__shfl_sync(~0u, row, holder), __shfl_sync(~0u, column, holder), lane);
                    if (lane == holder) v = sum;
                }
#pragma unroll
                for (int i = first; i < first + PART; ++i)
                    acc[i / COUNT][i % COUNT] = i == e ? v : acc[i / COUNT][i % COUNT];
            }
        }
    }
};

template <typename T, int BN>
__device__ __forceinline__ CsrEpilogue<T, BN> epilogue_of(const T* bias, int M, int N, int flags, const Csr<T>& csr) {
    return {{bias, nullptr, nullptr, nullptr, M, N, 1.0f, flags & RELU ? 0.0f : -infinity()}, csr};
}

struct JustWritten {
    static constexpr bool WAITS = true;
    __device__ __forceinline__ void begin() const { wait_for_predecessor(); }
};

template <typename T, int BM, int BN, int CONSUMERS, int STAGES, int CM, int CN, int SPLIT, int PANELS, bool PINGPONG>
__global__ void __cluster_dims__(CM * CN, 1, 1)
__launch_bounds__(WARPGROUP * (CONSUMERS + 1), CONSUMERS > 1 || BN > 128 ? 1 : 2)
spmm_csr_product(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                 const __grid_constant__ TensorMap y_map, const T* __restrict__ bias, T* y,
                 const __grid_constant__ Csr<T> csr, int M, int N, int K, int flags, int group) {
    static_assert(SPLIT == 1, "the pipeline shows sums before they are added up");
    const auto epilogue = epilogue_of<T, BN>(bias, M, N, flags, csr);
    Pipeline<T, true, true, BM, BN, CONSUMERS, STAGES, CM, CN, 1, PANELS, PINGPONG, 1, CsrEpilogue<T, BN>>::run(
        x_map, w_map, y_map, y, M, N, K, flags, group, epilogue, JustWritten{});
}

template <typename T, int BM, int BN, int CONSUMERS, int STAGES, int CM, int CN, int SPLIT>
__global__ void __cluster_dims__(CM * CN * SPLIT, 1, 1) __launch_bounds__(WARPGROUP * CONSUMERS + 32, 1)
spmm_csr_product_single(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                        const T* __restrict__ bias, T* y, const __grid_constant__ Csr<T> csr, int M, int N, int K,
                        int flags, int tiles_m, unsigned reciprocal) {
    const auto epilogue = epilogue_of<T, BN>(bias, M, N, flags, csr);
    run_single<T, true, true, BM, BN, CONSUMERS, STAGES, CM, CN, SPLIT>(x_map, w_map, y, M, N, K, flags, tiles_m,
                                                                       reciprocal, epilogue, JustWritten{});
}
