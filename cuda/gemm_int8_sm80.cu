// y = act(((float)(acc - zero_x[m] · sums_w[n]) · scale_x[m]) · scale_w[n] + bias[n]),  acc = x · wᵀ in exact integers, on
// the tensor cores of Ampere and later. common/int8_epilogue.cuh says what else may become of acc.
//
//   x (M, K) int8 or uint8, w (N, K) int8, rows contiguous and ldx, ldw bytes apart, all multiples of 16, as K is and
//   the addresses are; K so short that int sums are exact; y (M, N) row-major of any output type but long long.
//
// common/sm80_tile.cuh has the product: 8-bit values, four to a register, take the way of gemm_sm80.cu's 16-bit ones,
// with twice as many in the same bytes.
//
// The epilogue works on the sums where they are, in registers, and leaves 32 bits an output in shared memory, from where
// a lane takes as many neighbours as fill 16 bytes of y: no int32 tensor is ever written. Where K is split, the blocks
// of a tile do leave their sums, and a second kernel adds them up: integers, so in any order the same.

#include "common/int8_epilogue.cuh"
#include "common/sm80_tile.cuh"

// Sixteen bytes of y, from as many of its neighbours in shared memory as make them: floats, or ints where O is int.
template <typename O> struct Line {
    static constexpr int COUNT = 16 / sizeof(O);
    using Value = typename Int8Value<O>::type;
    alignas(16) O at[COUNT];

    __device__ __forceinline__ Line(const char* from, const Divider& by) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const uint4 words = reinterpret_cast<const uint4*>(from)[i / 4];
            const unsigned four[] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) at[i + e] = int8_output<O>(reinterpret_cast<const Value&>(four[e]), by);
        }
    }
};

template <typename X, int BM, int BN, int BK, int WM, int WN, int STAGES>
__global__ void __launch_bounds__(Config<X, BM, BN, BK, WM, WN, STAGES>::THREADS,
                                  Config<X, BM, BN, BK, WM, WN, STAGES>::BLOCKS)
gemm_int8_sm80(const X* __restrict__ x, long long ldx, const signed char* __restrict__ w, long long ldw,
               char* __restrict__ y, int* __restrict__ sums, const Int8Epilogue epilogue, int M, int N, int K,
               int group, int split) {
    using C = Config<X, BM, BN, BK, WM, WN, STAGES>;
    extern __shared__ __align__(128) char shared[];

    const Block<C> block(M, N, K, group, split);
    int acc[WM / 16][WN / 8][4] = {};
    multiply<X, true, true>(acc, block, x, ldx, w, ldw, M, N, block.end(K), shared_address(shared));

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int m0 = block.m0 + block.m_warp, n0 = block.n0 + block.n_warp;  // the warp's corner
    if (split > 1) {
        const long long rows = static_cast<long long>(block.part) * M;
#pragma unroll
        for (int i = 0; i < WM / 16; ++i)
#pragma unroll
            for (int j = 0; j < WN / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int m = m0 + i * 16 + g + e / 2 * 8, n = n0 + j * 8 + t * 2 + e % 2;
                    if (m < M && n < N) sums[(rows + m) * N + n] = acc[i][j][e];
                }
        return;
    }

    // The stages' memory, once nobody reads or writes slices any more: first what belongs to the tile's columns, then a
    // part for each warp, PASS rows of its tile at a time, each padded by 16 bytes against bank conflicts.
    constexpr int PASS = WM < 32 ? WM : 32, PITCH = WN * 4 + 16;
    static_assert(BN * 12 + C::WARPS * PASS * PITCH <= STAGES * C::STAGE_BYTES, "y leaves through the stages' memory");
    float* const scales = reinterpret_cast<float*>(shared);
    float* const biases = scales + BN;
    int* const corrections = reinterpret_cast<int*>(biases + BN);
    char* const mine = shared + BN * 12 + warp * (PASS * PITCH);
    copy_wait<0>();
    __syncthreads();
    for (int i = threadIdx.x; i < BN; i += C::THREADS) {
        const Int8Column column(epilogue, min(block.n0 + i, N - 1));
        scales[i] = column.scale, biases[i] = column.bias, corrections[i] = column.sum;
    }
    __syncthreads();

    const bool bare = epilogue.out == OUT_INT, relu = epilogue.relu;
#pragma unroll
    for (int pass = 0; pass < WM / PASS; ++pass) {
        float scale_x[PASS / 8];
        int zero[PASS / 8];
#pragma unroll
        for (int h = 0; h < PASS / 8; ++h) {
            const Int8Row row(epilogue, min(m0 + pass * PASS + h * 8 + g, M - 1));
            scale_x[h] = row.scale, zero[h] = row.zero;
        }
#pragma unroll
        for (int j = 0; j < WN / 8; ++j) {
            const int n = block.n_warp + j * 8 + t * 2;
            const float2 scale_w = *reinterpret_cast<const float2*>(scales + n);
            const float2 bias = *reinterpret_cast<const float2*>(biases + n);
            const int2 sum = *reinterpret_cast<const int2*>(corrections + n);
#pragma unroll
            for (int h = 0; h < PASS / 8; ++h) {
                const int(&pair)[4] = acc[pass * (PASS / 16) + h / 2][j];
                const int even = int8_corrected(pair[h % 2 * 2], zero[h], sum.x);
                const int odd = int8_corrected(pair[h % 2 * 2 + 1], zero[h], sum.y);
                char* const to = mine + (h * 8 + g) * PITCH + j * 32 + t * 8;
                if (bare)
                    *reinterpret_cast<int2*>(to) = {relu ? max(even, 0) : even, relu ? max(odd, 0) : odd};
                else
                    *reinterpret_cast<float2*>(to) = {int8_value(even, scale_x[h], scale_w.x, bias.x, relu),
                                                      int8_value(odd, scale_x[h], scale_w.y, bias.y, relu)};
            }
        }
        __syncwarp();
        with_output(epilogue.out, [&](auto type) {
            using O = decltype(type);
            if constexpr (sizeof(O) <= 4) {
                constexpr int COUNT = Line<O>::COUNT, CHUNKS = WN / COUNT;  // chunks of 16 bytes in a row of the warp's
                const Divider by = int8_divider<O>(epilogue.scale_y ? *epilogue.scale_y : 1.0f);
                const bool aligned = N % COUNT == 0 && reinterpret_cast<unsigned long long>(y) % 16 == 0;
#pragma unroll 1
                for (int at = lane; at < PASS * CHUNKS; at += WARP) {
                    const int m = m0 + pass * PASS + at / CHUNKS, n = n0 + at % CHUNKS * COUNT;
                    if (m >= M || n >= N) continue;
                    const Line<O> line(mine + at / CHUNKS * PITCH + at % CHUNKS * (COUNT * 4), by);
                    O* const to = reinterpret_cast<O*>(y) + static_cast<long long>(m) * N + n;
                    if (aligned) {
                        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(line.at);
                    } else {
#pragma unroll
                        for (int e = 0; e < COUNT; ++e)
                            if (n + e < N) to[e] = line.at[e];
                    }
                }
            }
        });
        __syncwarp();
    }
}

// The epilogue on the sum of `split` partial sums (M, N).
__global__ void __launch_bounds__(256)
gemm_int8_sm80_sum(const int* __restrict__ sums, void* __restrict__ y, const Int8Epilogue epilogue, long long M, int N,
                   int split) {
    const long long size = M * N, at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= size) return;
    int sum = 0;
    for (int part = 0; part < split; ++part) sum += sums[part * size + at];
    const Int8Row row(epilogue, at / N);
    const Int8Column column(epilogue, at % N);
    with_output(epilogue.out, [&](auto type) {
        using O = decltype(type);
        const Divider by = int8_divider<O>(epilogue.scale_y ? *epilogue.scale_y : 1.0f);
        static_cast<O*>(y)[at] = int8_finish<O>(sum, row, column, epilogue.relu, by);
    });
}
