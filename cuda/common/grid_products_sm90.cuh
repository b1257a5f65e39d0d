// The products of train_mlp_grid_sm90.cu by wgmma: tiles of the whole grid, whose operands others may still be writing.
#pragma once
#include "phases.cuh"
#include "sm90.cuh"
#include "wgmma.cuh"

constexpr int WARP = 32;
constexpr int CLUSTER = 2;
constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int GROUP = 16;                    // so many images are summed at once for a bias
constexpr int BK = 64, PANEL = BK * BK * 2;  // a slice of K; an operand's 64 lines of 128 bytes, as wgmma reads them
using Half = __half;

// A tile BM x BN by two warpgroups, which divide M where a warpgroup's 64 rows allow it, else N. AHEAD slices are on
// their way while one multiplies.
template <int BM_, int BN_, int STAGES_, int AHEAD_> struct Tile {
    static constexpr int BM = BM_, BN = BN_, STAGES = STAGES_, AHEAD = AHEAD_;
    static constexpr bool BY_M = BM == 128;
    static constexpr int COLUMNS = BY_M ? BN : BN / 2, SUMS = COLUMNS / 2;  // of a warpgroup; of a thread
    static constexpr int X_BYTES = BM * BK * 2, STAGE_BYTES = X_BYTES + BN * BK * 2;
    int m0, n0, begin, count, end;  // the tile's corner; the block's slices; the last one may end early

    __device__ __forceinline__ static int group() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }
    // A warp has 16 rows, in mma's layout of sums.
    __device__ __forceinline__ static int m_warp() { return threadIdx.x / WARP % 4 * 16 + (BY_M ? group() * 64 : 0); }
    __device__ __forceinline__ static int n_warp() { return BY_M ? 0 : group() * COLUMNS; }
};
using Wide = Tile<64, 64, 5, 3>;       // forward and backward
using Square = Tile<128, 128, 3, 2>;   // weights
constexpr int STAGES_BYTES = 96 * 1024, WEIGHTS = Square::BM * Square::BN;
constexpr int EXCHANGE = Wide::STAGES * Wide::STAGE_BYTES;  // behind the stages, what the other block sends
constexpr int EXCHANGE_BYTES = Wide::BM * Wide::BN * 4 / CLUSTER;
static_assert(EXCHANGE + EXCHANGE_BYTES <= STAGES_BYTES && Square::STAGES * Square::STAGE_BYTES <= STAGES_BYTES,
              "the stages have room");
static_assert(Wide::COLUMNS / 8 % CLUSTER == 0, "a block finishes whole tiles of 8 columns of every warp");

// Lines hold whole chunks of 16 bytes.
__host__ __device__ constexpr int line(long long width) { return static_cast<int>((width + 7) / 8 * 8); }

// One thread's share of an operand's slice, ROWS of M or N by BK of K. In shared memory are lines of 128 bytes: a row's
// BK, or, where the operand lies transposed in memory, 64 rows' k, panels of 64 rows one behind the other.
template <bool K_MAJOR, int ROWS> struct Loader {
    static constexpr int STEP = THREADS / 8, COUNT = ROWS / STEP;
    const char* from;
    long long stride, panel, advance;  // in bytes: to the thread's next line, panel, slice
    int lines, inner;                  // what is left of the matrix there, in lines, and in elements along a line
    int to;

    __device__ __forceinline__ Loader(const Half* a, long long ld, int row, int rows, int k, int K) {
        const int line = threadIdx.x / 8, chunk = threadIdx.x % 8;
        const int first_line = (K_MAJOR ? row : k) + line, first = (K_MAJOR ? k : row) + chunk * 8;
        from = reinterpret_cast<const char*>(a + first_line * ld + first);
        stride = ld * (STEP * 2), panel = 128;
        advance = K_MAJOR ? BK * 2 : ld * (BK * 2);
        lines = (K_MAJOR ? rows : K) - first_line;
        inner = (K_MAJOR ? K : rows) - first;
        to = swizzled<128>(line, chunk);
    }

    // Beyond the matrix nothing is read, and zeros arrive, which add nothing to any sum.
    __device__ __forceinline__ void copy(unsigned stage) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int p = K_MAJOR ? 0 : i / (64 / STEP), line = K_MAJOR ? i : i % (64 / STEP);
            copy_async(stage + to + i * STEP * 128, from + line * stride + p * panel,
                       line * STEP < lines && p * 64 < inner);
        }
        from += advance;
        (K_MAJOR ? inner : lines) -= BK;
    }
};

// acc += x · wᵀ of one tile over the block's slices of K. X_K / W_K false: that operand lies transposed in memory, (K, M)
// or (K, N).
template <typename T, bool X_K, bool W_K, typename C>
__device__ __forceinline__ void multiply(float (&acc)[1][C::SUMS], const C& tile, const Half* x, long long ldx,
                                         const Half* w, long long ldw, int M, int N, char* stages) {
    Loader<X_K, C::BM> x_loader(x, ldx, tile.m0, M, tile.begin * BK, tile.end);
    Loader<W_K, C::BN> w_loader(w, ldw, tile.n0, N, tile.begin * BK, tile.end);
    const unsigned first = shared_address(stages);
    const int group = C::group();
    const auto copy = [&](int stage) {
        x_loader.copy(first + stage * C::STAGE_BYTES);
        w_loader.copy(first + stage * C::STAGE_BYTES + C::X_BYTES);
        copy_commit();
    };
#pragma unroll
    for (int s = 0; s < C::AHEAD; ++s) copy(s);
    int reading = 0, writing = C::AHEAD;
#pragma unroll 1
    for (int slice = 0; slice < tile.count; ++slice) {
        copy_wait<C::AHEAD - 1>();
        fence_proxy_async();
        __syncthreads();  // the slice is here, and the stage to write has been read
        char* const xs = stages + reading * C::STAGE_BYTES + (C::BY_M ? group * (64 * 128) : 0);
        char* const ws = stages + reading * C::STAGE_BYTES + C::X_BYTES +
                         (C::BY_M ? 0 : W_K ? group * (C::COLUMNS * 128) : group * (C::COLUMNS * 2));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BK / 16; ++k)
            wgmma<T, C::COLUMNS, !X_K, !W_K>(acc[0], wgmma_descriptor(xs + k * (X_K ? 32 : 2048), X_K ? 16 : PANEL),
                                             wgmma_descriptor(ws + k * (W_K ? 32 : 2048), W_K ? 16 : PANEL), 1);
        wgmma_commit();
        copy(writing);  // beyond the last slice this reads nothing
        reading = reading + 1 == C::STAGES ? 0 : reading + 1;
        writing = writing + 1 == C::STAGES ? 0 : writing + 1;
        wgmma_wait<C::STAGES - 1 - C::AHEAD>();
    }
    wgmma_wait<0>();
    settle(acc);
    copy_wait<0>();
    __syncthreads();
}

// The same in PARTS.
template <int PARTS, typename T, bool X_K, bool W_K, typename C>
__device__ __forceinline__ void multiply_all(float (&acc)[1][C::SUMS], const C& tile, Halves x, Halves w, int M, int N,
                                             char* stages) {
#pragma unroll
    for (int i = 0; i < C::SUMS; ++i) acc[0][i] = 0.0f;
#pragma unroll 1
    for (int pass = 0; pass < (PARTS == 2 ? 3 : 1); ++pass)  // high · high, high · low, low · high
        multiply<T, X_K, W_K>(acc, tile, x.data + pass / 2 * x.part, x.ld, w.data + pass % 2 * w.part, w.ld, M, N,
                              stages);
}

// The sum over the warp's rows of an operand's tile, for the four lanes that share a column.
__device__ __forceinline__ float column_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 4);
    v += __shfl_xor_sync(~0u, v, 8);
    return v + __shfl_xor_sync(~0u, v, 16);
}

// The part of a tile of 64 x 64 outputs, N to a row, that this block of a cluster adds up.
__device__ __forceinline__ Wide share_of(int tile, int N, int K) {
    const int across = (N + Wide::BN - 1) / Wide::BN, slices = (K + BK - 1) / BK;
    const int share = (slices + CLUSTER - 1) / CLUSTER, begin = cluster_rank() * share;
    const int count = min(share, slices - begin);
    return {tile / across * Wide::BM, tile % across * Wide::BN, begin, count, min(K, (begin + count) * BK)};
}

// What counts the bytes of the other block's sums, one tile after the other.
struct Exchange {
    unsigned long long* received;
    int turn = 0;

    __device__ __forceinline__ explicit Exchange(unsigned long long* received) : received(received) {
        if (threadIdx.x > 0) return;
        mbarrier_init(received, 1);
        mbarrier_init_fence();
        mbarrier_expect_bytes(received, EXCHANGE_BYTES);
    }

    __device__ __forceinline__ void wait() {
        mbarrier_wait(received, turn);
        turn ^= 1;
        if (threadIdx.x == 0) mbarrier_expect_bytes(received, EXCHANGE_BYTES);
    }
};

// f(row, column, value, next column's value, before) for all of x · wᵀ (M, N), N even, by all clusters; `before` is
// what prepare(row, column) loaded. With SUMS, what f returns is summed over every GROUP rows, into `groups` of N
// columns. W_K as in multiply.
template <int PARTS, typename T, bool W_K, bool SUMS, typename P, typename F>
__device__ __forceinline__ void product(Halves x, Halves w, int M, int N, int K, char* shared, Exchange& exchange,
                                        float* groups, P prepare, F f) {
    using C = Wide;
    constexpr int TILES = C::COLUMNS / 8 / CLUSTER;  // of 8 columns, that a block finishes of a warp's
    static_assert(CLUSTER == 2 && GROUP == 16, "two blocks exchange halves, a warp has a group of rows");
    const int tiles_n = (N + C::BN - 1) / C::BN, tiles = (M + C::BM - 1) / C::BM * tiles_n;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int rank = cluster_rank();
    auto* const sums = reinterpret_cast<float4(*)[TILES][WARP]>(shared + EXCHANGE);  // [warp], from the other block
    const int m_warp = C::m_warp(), n_warp = C::n_warp();
    for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += gridDim.x / CLUSTER) {
        const C block = share_of(tile, N, K);
        float acc[1][C::SUMS];
        multiply_all<PARTS, T, true, W_K>(acc, block, x, w, M, N, shared);
        if (tile >= gridDim.x / CLUSTER) cluster_sync();  // the sums of the tile before are read
        float4 sum[TILES];
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            const float* const low = &acc[0][j * 4];
            const float* const high = &acc[0][(TILES + j) * 4];
            const float4 first = {low[0], low[1], low[2], low[3]}, second = {high[0], high[1], high[2], high[3]};
            const float4 give = rank ? first : second;
            cluster_send(cluster_address(&sums[warp][j][lane], rank ^ 1),
                         uint4{__float_as_uint(give.x), __float_as_uint(give.y), __float_as_uint(give.z),
                               __float_as_uint(give.w)},
                         cluster_address(exchange.received, rank ^ 1));
            sum[j] = rank ? second : first;
        }
        using Before = decltype(prepare(0, 0));
        Before before[TILES][2];
        const auto each = [&](auto f) {
#pragma unroll
            for (int j = 0; j < TILES; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int m = block.m0 + m_warp + g + h * 8;
                    const int n = block.n0 + n_warp + (rank * TILES + j) * 8 + t * 2;
                    if (m < M && n < N) f(j, h, m, n);
                }
        };
        each([&](int j, int h, int m, int n) { before[j][h] = prepare(m, n); });
        exchange.wait();  // the other block's sums are here
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            const float4 v = sums[warp][j][lane];
            sum[j].x += v.x, sum[j].y += v.y, sum[j].z += v.z, sum[j].w += v.w;
        }
        float2 results[TILES] = {};
        each([&](int j, int h, int m, int n) {
            const float2 v = f(m, n, h ? sum[j].z : sum[j].x, h ? sum[j].w : sum[j].y, before[j][h]);
            results[j].x += v.x, results[j].y += v.y;
        });
        if constexpr (SUMS) {
            const int group = (block.m0 + m_warp) / GROUP;
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const float2 all = {column_sum(results[j].x), column_sum(results[j].y)};
                const int n = block.n0 + n_warp + (rank * TILES + j) * 8 + t * 2;
                if (g == 0 && group * GROUP < M && n < N)
                    *reinterpret_cast<float2*>(groups + static_cast<long long>(group) * N + n) = all;
            }
        }
        __syncthreads();  // the sums are read
    }
}
