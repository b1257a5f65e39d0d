// y = act(x · wᵀ + bias) on Hopper's tensor cores: TMA loads, wgmma, TMA stores. half or bfloat16 in, sums in float.
//
//   x (M, K), w (N, K), y (M, N) row-major, bias (N,) or null. X_K / W_K false: that operand lies transposed in
//   memory, (K, M) or (K, N), as the backward products need it.
//
// The ideas, outermost first:
//   persistent clusters   as many clusters as fit on the chip; each takes tile after tile, in groups of neighbouring
//                         rows so that what is in L2 is used again.
//   multicast             the CM x CN blocks of a cluster compute neighbouring tiles; each loads a share of the x tile
//                         (common to CN of them) and of the w tile (common to CM) and sends it to all that need it.
//   warp specialisation   one warpgroup only starts TMA loads, STAGES deep; CONSUMERS warpgroups only multiply. A
//                         `full` barrier a stage counts the bytes that arrive, an `empty` one the consumers that left.
//   split K               where there are too few tiles to fill the chip, the SPLIT blocks of a cluster share one tile
//                         and divide K; they add up through distributed shared memory, in a fixed order.

#include "common/wgmma.cuh"

constexpr int BK = 64;  // 128 bytes of 16-bit values: the width of a swizzled row
constexpr int WARPGROUP = 128;

template <typename T, typename O, bool X_K, bool W_K, int BM, int BN, int CONSUMERS, int STAGES, int CM, int CN,
          int SPLIT, int PANELS>
struct Config {
    static constexpr int MI = BM / (64 * CONSUMERS);  // 64-row wgmma tiles a consumer
    static constexpr int CLUSTER = CM * CN * SPLIT;
    static constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
    static constexpr int X_BYTES = BM * BK * 2, W_BYTES = BN * BK * 2;
    static constexpr bool STAGED = sizeof(O) == 2 && SPLIT == 1;  // y leaves through shared memory and TMA
    static constexpr int PANEL_BYTES = 64 * 128;                   // 64 rows of 64 16-bit values
    static constexpr int Y_BYTES = STAGED ? CONSUMERS * PANELS * PANEL_BYTES : 0;
    static constexpr int SHARED =
        STAGES * (X_BYTES + W_BYTES) + Y_BYTES + CONSUMERS * BN * 2 + 2 * STAGES * 8 + 1024;  // 1,024 to align
    static_assert(BM == 64 * CONSUMERS * MI, "consumers divide the tile into whole 64-row wgmma tiles");
    static_assert(MI * BN <= 256, "a consumer's accumulators must fit its registers");
    static_assert(SPLIT == 1 || (CM == 1 && CN == 1), "a cluster either splits K or multicasts");
    static_assert(SPLIT == 1 || BM * BN * 4 <= STAGES * (X_BYTES + W_BYTES), "split sums reuse the stages' memory");
    static_assert(BM / CN % 64 == 0 && BN / CM % 32 == 0, "each block of a cluster loads whole boxes");
    static_assert(W_K || BN / CM % 64 == 0, "an N-major box is 64 wide");
    static_assert(SHARED <= 227 * 1024, "more shared memory than Hopper gives a block");
};

// Load this block's share of a tile of ROWS rows (M or N) and BK columns, and send it to the blocks in `mask`.
// Both layouts put 64 x 64 elements in 8,192 contiguous bytes, so a share starts at the same offset either way.
template <bool K_MAJOR, int ROWS, int SHARES>
__device__ __forceinline__ void load_tile(char* tile, const TensorMap* map, unsigned long long* barrier, int row, int k,
                                          int share, unsigned short mask) {
    constexpr int MINE = ROWS / SHARES;
    row += share * MINE;
    tile += share * MINE * BK * 2;
    constexpr int BOX = K_MAJOR ? MINE : 64;
#pragma unroll
    for (int r = 0; r < MINE; r += BOX) {
        const int inner = K_MAJOR ? k : row + r, outer = K_MAJOR ? row + r : k;
        if (SHARES == 1) tma_load(tile + r * BK * 2, map, barrier, inner, outer);
        else tma_load_multicast(tile + r * BK * 2, map, barrier, inner, outer, mask);
    }
}

template <typename T> __device__ __forceinline__ unsigned pack(float low, float high) {
    const auto pair = pair_from<T>(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

template <typename T, typename O, bool X_K, bool W_K, int BM, int BN, int CONSUMERS, int STAGES, int CM, int CN,
          int SPLIT, int PANELS>
__global__ void __cluster_dims__(CM * CN * SPLIT, 1, 1) __launch_bounds__(WARPGROUP * (CONSUMERS + 1), CONSUMERS > 1 || BN > 128 ? 1 : 2)
gemm_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
          const __grid_constant__ TensorMap y_map, const T* __restrict__ bias, O* __restrict__ y, int M, int N, int K,
          int relu, int group, int tma_store_y) {
    using C = Config<T, O, X_K, W_K, BM, BN, CONSUMERS, STAGES, CM, CN, SPLIT, PANELS>;
    extern __shared__ char raw[];
    char* const shared = raw + (1024 - shared_address(raw) % 1024) % 1024;  // swizzle atoms are 1,024 bytes
    char* const x_tiles = shared;
    char* const w_tiles = x_tiles + STAGES * C::X_BYTES;
    char* const y_tile = w_tiles + STAGES * C::W_BYTES;
    auto* const biases = reinterpret_cast<T*>(y_tile + C::Y_BYTES);  // BN a consumer
    auto* const full = reinterpret_cast<unsigned long long*>(biases + CONSUMERS * BN);
    auto* const empty = full + STAGES;

    const unsigned rank = C::CLUSTER > 1 ? cluster_rank() : 0;
    const int cm = SPLIT > 1 ? 0 : rank % CM, cn = SPLIT > 1 ? 0 : rank / CM;
    if (threadIdx.x == 0) {
        tma_prefetch(&x_map);
        tma_prefetch(&w_map);
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], CONSUMERS * (SPLIT > 1 ? 1 : CM + CN - 1));
        }
        mbarrier_init_fence();
    }
    if (C::CLUSTER > 1) cluster_sync();
    else __syncthreads();

    // Every block of a cluster walks the same list of cluster tiles.
    const int tiles_m = (M + BM * CM - 1) / (BM * CM), tiles_n = (N + BN * CN - 1) / (BN * CN);
    const int tiles = tiles_m * tiles_n, clusters = gridDim.x / C::CLUSTER;
    auto place = [&](int tile, int& m, int& n) {
        const int first = tile / (group * tiles_n) * group;  // groups of `group` tile rows, walked column by column
        const int height = min(group, tiles_m - first);
        const int within = tile % (group * tiles_n);
        m = ((first + within % height) * CM + cm) * BM;
        n = ((within / height) * CN + cn) * BN;
    };
    const int k_tiles = (K + BK - 1) / BK;
    const int k_share = (k_tiles + SPLIT - 1) / SPLIT;
    const int k_first = SPLIT > 1 ? static_cast<int>(rank) * k_share : 0;
    const int k_count = max(0, min(k_share, k_tiles - k_first));

    const int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        if (CONSUMERS > 1) give_registers<40>();
        if (threadIdx.x == 0) {
            unsigned short x_mask = 0, w_mask = 0;
            for (int i = 0; i < CN; ++i) x_mask |= 1 << (i * CM + cm);
            for (int i = 0; i < CM; ++i) w_mask |= 1 << (cn * CM + i);
            int stage = 0;
            unsigned phase = 0;
            for (int tile = blockIdx.x / C::CLUSTER; tile < tiles; tile += clusters) {
                int m, n;
                place(tile, m, n);
                for (int k = 0; k < k_count; ++k) {
                    mbarrier_wait(&empty[stage], phase ^ 1);
                    mbarrier_expect_bytes(&full[stage], C::X_BYTES + C::W_BYTES);
                    const int at = (k_first + k) * BK;
                    load_tile<X_K, BM, CN>(x_tiles + stage * C::X_BYTES, &x_map, &full[stage], m, at, cn, x_mask);
                    load_tile<W_K, BN, CM>(w_tiles + stage * C::W_BYTES, &w_map, &full[stage], n, at, cm, w_mask);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
        }
    } else {
        if (CONSUMERS > 1) take_registers<CONSUMERS == 2 ? 232 : 160>();
        const int consumer = warpgroup - 1;
        const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, warp = thread / 32;
        const float bound = relu ? 0.0f : -infinity();
        int stage = 0;
        unsigned phase = 0;
        // The stage is free once every consumer that read it, here and where this block sends to, has said so.
        auto release = [&](int s) {
            if (C::CLUSTER == 1 || SPLIT > 1) {
                if (thread == 0) mbarrier_arrive(&empty[s]);
            } else if (thread < C::CLUSTER && (thread % CM == cm || thread / CM == cn)) {
                mbarrier_arrive_at(&empty[s], thread);
            }
        };

        for (int tile = blockIdx.x / C::CLUSTER; tile < tiles; tile += clusters) {
            int m0, n0;
            place(tile, m0, n0);
            float acc[C::MI][BN / 2];
            if (k_count == 0) {
#pragma unroll
                for (int i = 0; i < C::MI * BN / 2; ++i) acc[i / (BN / 2)][i % (BN / 2)] = 0.0f;
            }
            if (bias) {
                for (int i = thread; i < BN; i += WARPGROUP)
                    biases[consumer * BN + i] = n0 + i < N ? bias[n0 + i] : from_float<T>(0.0f);
                warpgroup_sync(1 + consumer);
            }
            int previous = 0;
            for (int k = 0; k < k_count; ++k) {
                mbarrier_wait(&full[stage], phase);
                const char* xs = x_tiles + stage * C::X_BYTES + consumer * C::MI * 64 * BK * 2;
                const char* ws = w_tiles + stage * C::W_BYTES;
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < BK / 16; ++kk) {
                    // 16 K are 32 bytes along a K-major row, or two groups of 8 rows of an M/N-major panel
                    const auto b = wgmma_descriptor(ws + kk * (W_K ? 32 : 2048), W_K ? 16 : 64 * BK * 2);
#pragma unroll
                    for (int i = 0; i < C::MI; ++i) {
                        const auto a = wgmma_descriptor(xs + i * 64 * BK * 2 + kk * (X_K ? 32 : 2048), 16);
                        wgmma<T, BN, !X_K, !W_K>(acc[i], a, b, k > 0 || kk > 0);
                    }
                }
                wgmma_commit();
                wgmma_wait<1>();  // the products of the previous stage are done, those of this one go on
                if (k > 0) release(previous);
                previous = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            wgmma_wait<0>();
            if (k_count > 0) release(previous);

            // acc[i][4 j + c + 2 h] is row 16 * warp + lane / 4 + 8 h, column 8 j + 2 * (lane % 4) + c of wgmma tile i.
            // Columns below are counted from the tile's first.
            auto finish = [&](int column, float& low, float& high) {
                if (bias) {
                    low += to_float(biases[consumer * BN + column]);
                    high += to_float(biases[consumer * BN + column + 1]);
                }
                low = max_nan(low, bound), high = max_nan(high, bound);
            };
            auto store = [&](int m, int column, float low, float high) {
                const int n = n0 + column;
                if (m >= M || n >= N) return;
                finish(column, low, high);
                O* const at = y + static_cast<long long>(m) * N + n;
                if (n + 1 < N && N % 2 == 0) {
                    *reinterpret_cast<typename Pair<O>::type*>(at) = pair_from<O>(low, high);
                } else {
                    at[0] = from_float<O>(low);
                    if (n + 1 < N) at[1] = from_float<O>(high);
                }
            };
            const int row = consumer * C::MI * 64 + 16 * warp + lane / 4;  // of the block's tile, for i = h = 0
            const int col = 2 * (lane % 4);

            if constexpr (SPLIT > 1) {
                // Lay the sums out by register and thread; each block then adds up its share of the registers over
                // the cluster, in rank order. The stages' memory is free: all loads of this (only) tile have landed.
                constexpr int QUADS = C::MI * BN / 8;
                auto* const sums = reinterpret_cast<float4*>(shared) + consumer * QUADS * WARPGROUP + thread;
                if (CONSUMERS > 1) asm volatile("bar.sync 8, %0;" ::"n"(CONSUMERS * WARPGROUP) : "memory");
#pragma unroll
                for (int q = 0; q < QUADS; ++q) {
                    const float* d = &acc[q / (BN / 8)][q % (BN / 8) * 4];
                    sums[q * WARPGROUP] = make_float4(d[0], d[1], d[2], d[3]);
                }
                cluster_sync();
                for (int q = rank; q < QUADS; q += SPLIT) {
                    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
                    for (int r = 0; r < SPLIT; ++r) {
                        const float4 part = cluster_load(sums + q * WARPGROUP, r);
                        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
                    }
                    const int m = m0 + row + q / (BN / 8) * 64, column = col + q % (BN / 8) * 8;
                    store(m, column, total.x, total.y);
                    store(m + 8, column, total.z, total.w);
                }
            } else if (C::STAGED && tma_store_y) {
                // Panels of 64 rows x 64 columns, 128-byte swizzled like the loads, PANELS of them in turn: one is
                // written while the copy engine reads the others. It clips at the matrix's edge.
                char* const mine = y_tile + consumer * PANELS * C::PANEL_BYTES;
#pragma unroll
                for (int p = 0; p < C::MI * (BN / 64); ++p) {
                    const int i = p / (BN / 64), first = p % (BN / 64) * 64;
                    char* const panel = mine + p % PANELS * C::PANEL_BYTES;
                    if (thread == 0) tma_store_wait_read<PANELS - 1>();
                    warpgroup_sync(1 + consumer);
#pragma unroll
                    for (int j = 0; j < 8; j += 2) {
                        unsigned r[4];
#pragma unroll
                        for (int h = 0; h < 4; ++h) {
                            const int column = first + (j + h / 2) * 8;
                            float low = acc[i][column / 2 + h % 2 * 2], high = acc[i][column / 2 + h % 2 * 2 + 1];
                            finish(col + column, low, high);
                            r[h] = pack<O>(low, high);
                        }
                        const int to_row = 16 * warp + lane % 16, chunk = j + lane / 16;
                        stmatrix_x4(panel + to_row * 128 + (chunk ^ to_row % 8) * 16, r[0], r[1], r[2], r[3]);
                    }
                    fence_proxy_async();
                    warpgroup_sync(1 + consumer);
                    if (thread == 0) {
                        tma_store(&y_map, panel, n0 + first, m0 + (consumer * C::MI + i) * 64);
                        tma_store_commit();
                    }
                }
            } else {
#pragma unroll
                for (int q = 0; q < C::MI * BN / 8; ++q) {
                    const float* d = &acc[q / (BN / 8)][q % (BN / 8) * 4];
                    const int m = m0 + row + q / (BN / 8) * 64, column = col + q % (BN / 8) * 8;
                    store(m, column, d[0], d[1]);
                    store(m + 8, column, d[2], d[3]);
                }
            }
        }
        if (C::STAGED && thread == 0) tma_store_wait_read<0>();
    }
    if (SPLIT > 1 && warpgroup == 0) cluster_sync();  // pairs with the consumers' before they add up
    if (C::CLUSTER > 1) cluster_sync();               // no block leaves while another may still reach its memory
}
