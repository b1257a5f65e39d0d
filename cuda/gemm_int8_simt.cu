// y = act(((float)(acc - zero_x[m] · sums_w[n]) · scale_x[m]) · scale_w[n] + bias[n]),  acc = x · wᵀ in exact integers
// (dp4a). common/int8_epilogue.cuh says what else may become of acc.
//
//   x (M, K) int8 or uint8, w (N, K) int8, rows contiguous and ldx, ldw bytes apart; y (M, N) row-major.
//
// The idea: four int8 values travel as one 32-bit word and dp4a multiplies and adds four pairs in one instruction.
// The tiling is gemm_simt.cu's general one with K counted in words.

#include "common/int8_epilogue.cuh"

constexpr int BM = 64, BN = 64, BK = 16;  // BK in words of four
constexpr int TM = 4, TN = 4;
constexpr int THREADS = (BM / TM) * (BN / TN);
static_assert(THREADS == 256, "the Python face launches 256 threads");

// Stage ROWS x BK words. A row that starts off a word boundary (an odd address or stride) is gathered byte by byte, and
// so is what is left of K beyond whole words; bytes beyond K are zero, which adds nothing.
template <bool WORDS, int ROWS>
__device__ void stage(int (&tile)[BK][ROWS + 1], const unsigned char* a, long long ld, long long row0, long long rows,
                      long long k0, long long K) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * BK; i += THREADS) {
        const int r = i / BK, word = i % BK;
        const long long k = k0 + 4 * word;
        unsigned packed = 0;
        if (row0 + r < rows && k < K) {
            const unsigned char* at = a + (row0 + r) * ld + k;
            if (WORDS && k + 4 <= K) {
                packed = *reinterpret_cast<const unsigned*>(at);
            } else {
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    if (k + b < K) packed |= static_cast<unsigned>(at[b]) << (8 * b);
            }
        }
        tile[word][r] = packed;
    }
}

// X says how the bytes of x are read; w's are signed.
template <typename X> __device__ __forceinline__ int dot(int x, int w, int sum) {
    if constexpr (is_same<X, signed char>) return __dp4a(x, w, sum);
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(x), "r"(w));
    return sum;
}

// ACC is int where K cannot overflow it, else long long: each BK step is summed in 32 bits and then widened.
template <typename X, typename ACC, bool WORDS>
__global__ void __launch_bounds__(THREADS, 2)
gemm_int8_simt(const unsigned char* __restrict__ x, long long ldx, const unsigned char* __restrict__ w, long long ldw,
               void* __restrict__ y, long long M, long long N, long long K, const Int8Epilogue epilogue) {
    __shared__ int xs[BK][BM + 1];
    __shared__ int ws[BK][BN + 1];
    __shared__ ACC sums[BM * BN];

    const long long tiles_n = (N + BN - 1) / BN;
    const long long m0 = blockIdx.x / tiles_n * BM;
    const long long n0 = blockIdx.x % tiles_n * BN;
    const int tm = threadIdx.x / (BN / TN);
    const int tn = threadIdx.x % (BN / TN);

    ACC acc[TM][TN] = {};
    for (long long k0 = 0; k0 < K; k0 += 4 * BK) {
        stage<WORDS, BM>(xs, x, ldx, m0, M, k0, K);
        stage<WORDS, BN>(ws, w, ldw, n0, N, k0, K);
        __syncthreads();
        int step[TM][TN] = {};
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            int a[TM], b[TN];
#pragma unroll
            for (int i = 0; i < TM; ++i) a[i] = xs[k][tm + i * (BM / TM)];
#pragma unroll
            for (int j = 0; j < TN; ++j) b[j] = ws[k][tn + j * (BN / TN)];
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) step[i][j] = dot<X>(a[i], b[j], step[i][j]);
        }
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) acc[i][j] += step[i][j];
        __syncthreads();
    }

    // Through shared memory, so that one loop does all outputs of a thread, and neighbours are stored together.
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) sums[(tm + i * (BM / TM)) * BN + tn + j * (BN / TN)] = acc[i][j];
    __syncthreads();
    with_output(epilogue.out, [&](auto type) {
        using O = decltype(type);
        const Divider by = int8_divider<O>(epilogue.scale_y ? *epilogue.scale_y : 1.0f);
#pragma unroll 1
        for (int i = threadIdx.x; i < BM * BN; i += THREADS) {
            const long long m = m0 + i / BN, n = n0 + i % BN;
            if (m >= M || n >= N) continue;
            static_cast<O*>(y)[m * N + n] =
                int8_finish<O>(sums[i], Int8Row(epilogue, m), Int8Column(epilogue, n), epilogue.relu, by);
        }
    });
}
