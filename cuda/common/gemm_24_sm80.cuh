// The product of a tile with 2:4 weights on the tensor cores of Ampere and later, by cp.async, ldmatrix and mma.sp: what
// gemm_24_sm80.cu and gemm_int8_24_sm80.cu share.
//
//   x (M, K), values (N, K / 2), metadata (N, K / 8 bytes): M batch rows, N outputs, K inputs, K % 32 == 0. Lines of x
//   and values start on 16 bytes, those of metadata on 4.
//
// Slices and fragments are those of sm80_tile.cuh. Only the left operand of mma.sp may be sparse, so a tile is BO outputs
// x BB batch rows, and is turned over in shared memory on its way out. A slice has 128 bytes of each row of x, and the 64
// of w that meet them. Metadata go from global memory to registers, a slice ahead; which word a lane wants is said in
// gemm_24_sm90.cuh, whose instruction does to each warp's 16 rows what mma.sp does.
#pragma once
#include "sm80_tile.cuh"

template <typename T_, int BO_, int BB_, int WO_, int WB_, int STAGES_> struct Config24 {
    using T = T_;
    static constexpr int BO = BO_, BB = BB_, WO = WO_, WB = WB_, STAGES = STAGES_;
    static constexpr int WARPS_B = BB / WB, THREADS = WARP * (BO / WO) * WARPS_B;
    static constexpr int BK = 128 / sizeof(T), X_BYTES = BB * 128, STAGE_BYTES = X_BYTES + BO * 64;
    static constexpr int PITCH = BO * 4 + 16;  // bytes of a batch row of sums
    static_assert(BO % WO == 0 && BB % WB == 0, "warp tiles divide the tile");
    static_assert(WO % 16 == 0 && WO <= 64 && WB % 16 == 0 && WB <= 64, "a warp tile is at most one swizzle period");
    static_assert(BB * PITCH <= STAGES * STAGE_BYTES, "sums leave through the stages' memory");
    static_assert(STAGES >= 3, "while one stage multiplies, the next has arrived and a third is on its way");
};

// d (16 x 8) += a (16 x 2k, of which k = 32 bytes a row are stored) · b (2k x 8). A is the type of a, B that of b.
#define QSPARSE_MMA_SP(SHAPE_TYPE, R) \
    asm volatile("mma.sp::ordered_metadata.sync.aligned." SHAPE_TYPE \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0x0;" \
                 : R(d[0]), R(d[1]), R(d[2]), R(d[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(b2), "r"(b3), "r"(metadata))
template <typename A, typename B, typename Sum>
__device__ __forceinline__ void mma_24(Sum (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, unsigned b2,
                                       unsigned b3, unsigned metadata) {
    if constexpr (is_same<A, __half>) QSPARSE_MMA_SP("m16n8k32.row.col.f32.f16.f16.f32", "+f");
    if constexpr (is_same<A, __nv_bfloat16>) QSPARSE_MMA_SP("m16n8k32.row.col.f32.bf16.bf16.f32", "+f");
    if constexpr (is_same<B, signed char>) QSPARSE_MMA_SP("m16n8k64.row.col.s32.s8.s8.s32", "+r");
    if constexpr (is_same<B, unsigned char>) QSPARSE_MMA_SP("m16n8k64.row.col.s32.s8.u8.s32", "+r");
}
#undef QSPARSE_MMA_SP

// A tile of w · xᵀ, and finish(m, n, sums) for each batch row m and eight neighbouring outputs n, n + 1, ... of it. U is
// the type of x. Blocks are numbered down groups of tiles along the batch.
template <typename C, typename U, typename Sum, typename Finish>
__device__ __forceinline__ void gemm_24_tile(const U* __restrict__ x, long long ldx,
                                             const typename C::T* __restrict__ values, long long ldv,
                                             const unsigned char* __restrict__ metadata, long long lde, int M, int N,
                                             int K, int group, char* shared, Finish finish) {
    using T = typename C::T;
    constexpr int WO = C::WO, WB = C::WB, STAGES = C::STAGES, BK = C::BK, STEPS = 2, STEP = BK / STEPS;
    const int tiles_o = (N + C::BO - 1) / C::BO, tiles_b = (M + C::BB - 1) / C::BB;
    const int first = blockIdx.x / (group * tiles_o) * group, height = min(group, tiles_b - first);
    const int within = blockIdx.x % (group * tiles_o);
    const int m0 = (first + within % height) * C::BB, n0 = within / height * C::BO;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int o_warp = warp / C::WARPS_B * WO, b_warp = warp % C::WARPS_B * WB;
    const unsigned stages = shared_address(shared);

    Loader<U, true, C::BB, BK, C::THREADS> x_loader(x, ldx, m0, M, 0, K);
    Loader<T, true, C::BO, BK / 2, C::THREADS> w_loader(values, ldv, n0, N, 0, K / 2);
    auto load_slice = [&](unsigned stage) {
        x_loader.template copy<1>(stage, 0);
        w_loader.template copy<1>(stage + C::X_BYTES, 0);
        copy_commit();
        x_loader.next(), w_loader.next();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) load_slice(stages + s * C::STAGE_BYTES);

    // Rows beyond N take the last one's metadata: their values are zeros.
    unsigned words[WO / 16][STEPS], coming[WO / 16][STEPS];
    auto load_metadata = [&](int slice) {
#pragma unroll
        for (int i = 0; i < WO / 16; ++i) {
#pragma unroll
            for (int kk = 0; kk < STEPS; ++kk) {
                const int row = n0 + o_warp + i * 16 + g;
                const int k = slice * BK + kk * STEP + (sizeof(T) == 1 ? t / 2 * 32 : 0);
                coming[i][kk] = 0x44444444u;
                if (k >= K) continue;
                auto word = [&](int n) {
                    return *reinterpret_cast<const unsigned*>(metadata + min(n, N - 1) * lde + k / 8);
                };
                if constexpr (sizeof(T) == 1) coming[i][kk] = word(row + t % 2 * 8);
                else coming[i][kk] = __byte_perm(word(row), word(row + 8), t % 2 ? 0x7632 : 0x5410);
            }
        }
    };
    load_metadata(0);

    const Fragments<T, true, false, C::BO, BK / 2> w_fragments(o_warp);
    const Fragments<U, true, true, C::BB, BK> x_fragments(b_warp);
    Sum acc[WO / 16][WB / 8][4] = {};
    const int slices = (K + BK - 1) / BK;
    unsigned reading = stages, writing = stages + (STAGES - 1) * C::STAGE_BYTES;
    for (int slice = 0; slice < slices; ++slice) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // this slice has arrived, for all; and all have read the one before, whose stage is written now
        load_slice(writing);
        writing = reading;
#pragma unroll
        for (int i = 0; i < WO / 16 * STEPS; ++i) words[i / STEPS][i % STEPS] = coming[i / STEPS][i % STEPS];
        load_metadata(slice + 1);
#pragma unroll
        for (int kk = 0; kk < STEPS; ++kk) {
            unsigned a[WO / 16][4], b[WB / 16][2][4];
#pragma unroll
            for (int i = 0; i < WO / 16; ++i) w_fragments.load(a[i], reading + C::X_BYTES, i, kk);
#pragma unroll
            for (int j = 0; j < WB / 16; ++j) {
#pragma unroll
                for (int half = 0; half < 2; ++half) x_fragments.load(b[j][half], reading, j, 2 * kk + half);
            }
#pragma unroll
            for (int j = 0; j < WB / 8; ++j) {
                const auto& low = b[j / 2][0];
                const auto& high = b[j / 2][1];
                const int at = j % 2 * 2;
#pragma unroll
                for (int i = 0; i < WO / 16; ++i)
                    mma_24<T, U>(acc[i][j], a[i], low[at], low[at + 1], high[at], high[at + 1], words[i][kk]);
            }
        }
        reading += C::STAGE_BYTES;
        if (reading == stages + STAGES * C::STAGE_BYTES) reading = stages;
    }

    // Turned over, once nobody reads or writes slices any more.
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WO / 16; ++i)
#pragma unroll
        for (int j = 0; j < WB / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int output = o_warp + i * 16 + g + e / 2 * 8, row = b_warp + j * 8 + t * 2 + e % 2;
                *reinterpret_cast<Sum*>(shared + row * C::PITCH + output * 4) = acc[i][j][e];
            }
    __syncthreads();
    constexpr int CHUNKS = C::BO / 8;
#pragma unroll 1
    for (int at = threadIdx.x; at < C::BB * CHUNKS; at += C::THREADS) {
        const int m = m0 + at / CHUNKS, n = n0 + at % CHUNKS * 8;
        if (m < M && n < N)
            finish(m, n, *reinterpret_cast<const Sum(*)[8]>(shared + at / CHUNKS * C::PITCH + at % CHUNKS * 32));
    }
}

// Eight neighbours of a row of y (M, N) from column n on; `whole` says that rows are whole aligned eights.
template <typename O> __device__ __forceinline__ void store_eight(O* y, const O (&eight)[8], int m, int n, int N, bool whole) {
    struct alignas(8 * sizeof(O) < 16 ? 8 * sizeof(O) : 16) Line {
        O at[8];
    };
    O* const to = y + static_cast<long long>(m) * N + n;
    if (whole) {
        Line line;
#pragma unroll
        for (int e = 0; e < 8; ++e) line.at[e] = eight[e];
        *reinterpret_cast<Line*>(to) = line;
    } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (n + e < N) to[e] = eight[e];
    }
}
