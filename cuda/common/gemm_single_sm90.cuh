// The pipeline of products of halves where every block has one tile: so small that what a kernel costs before and after
// its loop counts as much as the loop. Layouts, X_K, W_K, the sizes and what an EPILOGUE has: gemm_sm90.cuh; here it is
// FloatEpilogue or one made of it.
//
//   no roles              nothing but the refilling of stages, and the biases, are left to a warp of its own: the first
//                         loads, which are often all, are started by the block's first thread as its first deed.
//   no descriptor of y    rows leave by way of shared memory, 16 bytes a thread. A descriptor costs a way to DRAM when
//                         it is used for the first time.
//   a rehearsal           (where the end is short) it is gone through twice, the first time without sums and rows while
//                         the first tiles are on their way: instructions, too, come from DRAM at first.
//   the short tile first  of K; what lies beyond K is not multiplied.
//   split K               the SPLIT blocks of a cluster share a tile and divide K. Each finishes its share of the
//                         columns; the others send it their sums, which are added in the order of the blocks.
#pragma once
#include "float_epilogue.cuh"

enum SingleFlag { WIDE = 16 };  // beside gemm_sm90.cuh's: rows of y are whole, aligned pieces of 16 bytes

// Without a branch, so that the instruction is there in the rehearsal, too.
__device__ __forceinline__ void store_if(bool really, void* to, uint4 v) {
    asm volatile(
        "{\n"
        ".reg .pred really;\n"
        "setp.ne.b32 really, %5, 0;\n"
        "@really st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
        "}" ::"l"(to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(really))
        : "memory");
}

template <typename T, bool X_K, bool W_K, int BM, int BN, int CONSUMERS, int STAGES, int CM, int CN, int SPLIT,
          class Epilogue, class Source = Given>
__device__ __forceinline__ void run_single(const TensorMap& x_map, const TensorMap& w_map, T* y, int M, int N, int K,
                                           int flags, int tiles_m, unsigned reciprocal, Epilogue epilogue,
                                           const Source& source = {}) {
    constexpr int MI = BM / (64 * CONSUMERS), CLUSTER = CM * CN * SPLIT, BK = ROW / sizeof(T);
    constexpr int X_BYTES = BM * ROW, W_BYTES = BN * ROW, THREADS = WARPGROUP * CONSUMERS + 32;
    constexpr int MINE = BN / SPLIT, GROUPS = MINE / 8;            // columns that a block finishes, by eights
    constexpr int SLOT = CONSUMERS * MI * GROUPS * WARPGROUP;      // four sums each, that one block sends another
    constexpr int PANELS = MINE % 64 == 0 ? MI * (MINE / 64) : 0;  // of 16 rows of 128 bytes, a warp's own
    constexpr int BUFFERS = PANELS < 2 ? PANELS : 2, PANEL_BYTES = 16 * 128;
    constexpr bool REHEARSED = SPLIT == 1 && BM * BN <= 64 * 128;  // a longer one would keep the loop waiting: measured
    static_assert(BM == 64 * CONSUMERS * MI, "consumers divide the tile into whole 64-row wgmma tiles");
    static_assert(MI * BN <= 256, "a consumer's accumulators must fit its registers");
    static_assert(SPLIT == 1 || (CM == 1 && CN == 1), "a cluster either splits K or multicasts");

    extern __shared__ char raw[];
    char* const x_tiles = raw + (1024 - shared_address(raw) % 1024) % 1024;  // swizzle atoms are 1,024 bytes
    char* const w_tiles = x_tiles + STAGES * X_BYTES;
    auto* const received = reinterpret_cast<uint4*>(w_tiles + STAGES * W_BYTES);
    char* const panels = reinterpret_cast<char*>(received + (SPLIT - 1) * SLOT);
    char* const columns = panels + CONSUMERS * 4 * BUFFERS * PANEL_BYTES;
    auto* const full = reinterpret_cast<unsigned long long*>(columns + 2 * BN * sizeof(T));
    auto* const empty = full + STAGES;
    auto* const arrived = empty + STAGES;

    const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int cm = SPLIT > 1 ? 0 : rank % CM, cn = SPLIT > 1 ? 0 : rank / CM;
    const unsigned tile = blockIdx.x / CLUSTER, tile_n = reciprocal ? __umulhi(tile, reciprocal) : tile;
    const int m0 = ((tile - tile_n * tiles_m) * CM + cm) * BM, n0 = (tile_n * CN + cn) * BN;
    const int k_tiles = (K + BK - 1) / BK;
    const int k_first = SPLIT > 1 ? k_tiles * rank / SPLIT : 0;
    const int k_count = (SPLIT > 1 ? k_tiles * (rank + 1) / SPLIT : k_tiles) - k_first;  // at least one

    auto load = [&](int k, int stage, bool of_x = true, bool of_w = true) {
        unsigned short x_mask = 0, w_mask = 0;
        for (int i = 0; i < CN; ++i) x_mask |= 1 << (i * CM + cm);
        for (int i = 0; i < CM; ++i) w_mask |= 1 << (cn * CM + i);
        const int at = (k_first + (k == 0 ? k_count : k) - 1) * BK;  // the last tile first
        if (of_x) {
            mbarrier_expect_bytes(&full[stage], X_BYTES + W_BYTES);
            load_tile<X_K, BM, CN>(x_tiles + stage * X_BYTES, &x_map, &full[stage], m0, at, cn, x_mask);
        }
        if (of_w) load_tile<W_K, BN, CM>(w_tiles + stage * W_BYTES, &w_map, &full[stage], n0, at, cm, w_mask);
    };
    auto first_loads = [&] {
        if constexpr (Source::WAITS) {
#pragma unroll 1
            for (int k = 0; k < min(k_count, STAGES); ++k) load(k, k, true, false);
            source.begin();
        }
#pragma unroll 1
        for (int k = 0; k < min(k_count, STAGES); ++k) load(k, k, !Source::WAITS);
    };
    if (threadIdx.x == 0) {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) mbarrier_init(&full[s], 1);
        if (CM * CN == 1) {
            mbarrier_init_fence();
            first_loads();
        }
        if (k_count > STAGES) {
#pragma unroll
            for (int s = 0; s < STAGES; ++s) mbarrier_init(&empty[s], CONSUMERS * (CM + CN - 1));
        }
        if (SPLIT > 1) mbarrier_init(arrived, 1);
        mbarrier_init_fence();
        if (SPLIT > 1) mbarrier_expect_bytes(arrived, (SPLIT - 1) * SLOT * 16);
    }
    __syncwarp();
    if (CLUSTER > 1) cluster_arrive();
    if (CM * CN > 1) {  // whoever shares its loads waits for all barriers
        cluster_wait();
        if (threadIdx.x == 0) first_loads();
        __syncwarp();
    }

    T* const biases = reinterpret_cast<T*>(columns);
    epilogue.n0 = n0, epilogue.biases = biases;
    const int lane = threadIdx.x % 32;
    if (threadIdx.x >= WARPGROUP * CONSUMERS) {
        if (epilogue.bias) epilogue.fetch(lane, 32);
        barrier_sync(READY, THREADS);
        if (lane == 0) {
            int stage = 0;
            unsigned phase = 0;
            for (int k = STAGES; k < k_count; ++k) {
                mbarrier_wait(&empty[stage], phase);
                load(k, stage);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        __syncwarp();
        if (SPLIT > 1) cluster_wait();
        return;
    }

    const int consumer = CONSUMERS == 1 ? 0 : threadIdx.x / WARPGROUP;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32;
    const int row = consumer * MI * 64 + 16 * warp + lane / 4, col = 2 * (lane % 4);
#pragma unroll 1
    for (int rehearsed = !REHEARSED; rehearsed < 2; ++rehearsed) {
        epilogue.biases = biases + (rehearsed ? 0 : BN);  // which nobody writes: the biases are still on their way
        float acc[MI][BN / 2];
        zero(acc);
        if (rehearsed) {
            barrier_sync(READY, THREADS);
            // A stage that will be filled again is free once all consumers that read it, here and where this block
            // sends to, have said so.
            auto release = [&](int s) {
                if (CM * CN == 1) {
                    if (thread == 0) mbarrier_arrive(&empty[s]);
                } else if (thread < CLUSTER && (thread % CM == cm || thread / CM == cn)) {
                    mbarrier_arrive_at(&empty[s], thread);
                }
            };
            const auto x_first = wgmma_descriptor(x_tiles + consumer * MI * 64 * ROW, 16);
            const auto w_first = wgmma_descriptor(w_tiles, W_K ? 16 : 64 * ROW);
            int stage = 0;
            unsigned phase = 0;
            auto multiply = [&](bool fresh, int from, int to) {
                const auto xs = x_first + stage * (X_BYTES / 16), ws = w_first + stage * (W_BYTES / 16);
                wgmma_fence();
#pragma unroll
                for (int kk = from; kk < to; ++kk) {
                    // one wgmma takes 32 bytes along a K-major row, or two groups of 8 rows of an M/N-major panel
                    const auto b = ws + kk * (W_K ? 32 : 2048) / 16;
#pragma unroll
                    for (int i = 0; i < MI; ++i) {
                        const auto a = xs + (i * 64 * ROW + kk * (X_K ? 32 : 2048)) / 16;
                        wgmma<T, BN, !X_K, !W_K>(acc[i], a, b, kk > from || !fresh);
                    }
                }
                wgmma_commit();
            };
            auto next = [&] {
                if (++stage == STAGES) stage = 0, phase ^= 1;
            };
            constexpr int STEP = 32 / sizeof(T);
            const int left = K - (k_tiles - 1) * BK, steps = (left + STEP - 1) / STEP;
            mbarrier_wait(&full[0], 0);
            if (k_first + k_count < k_tiles || steps == STEPS) {
                multiply(true, 0, STEPS);
            } else {
                multiply(true, 0, 1);
#pragma unroll 1
                for (int kk = 1; kk < steps; ++kk) multiply(false, kk, kk + 1);
            }
            int previous = 0;
            next();
#pragma unroll 1
            for (int k = 1; k < k_count; ++k) {
                mbarrier_wait(&full[stage], phase);
                multiply(false, 0, STEPS);
                wgmma_wait<1>();  // the products of the previous stage are done, those of this one go on
                if (k - 1 + STAGES < k_count) release(previous);
                previous = stage;
                next();
            }
            wgmma_wait<0>();
            settle(acc);
            if (SPLIT > 1) cluster_wait();  // the others' barriers are there
        }

        // acc[i][4 j + c + 2 h] is row 16 * warp + lane / 4 + 8 h, column 8 j + 2 * (lane % 4) + c of wgmma tile i.
        const int rows = rehearsed ? M : 0, first_column = MINE * rank * (SPLIT > 1);
        float own[MI][MINE / 2];
#pragma unroll
        for (int i = 0; i < MI; ++i) {
#pragma unroll
            for (int e = 0; e < MINE / 2; ++e) {
                own[i][e] = acc[i][e];
#pragma unroll
                for (int r = 1; r < SPLIT; ++r) own[i][e] = r == rank ? acc[i][r * (MINE / 2) + e] : own[i][e];
            }
        }
        if constexpr (SPLIT > 1) {
            const unsigned index = consumer * MI * GROUPS * WARPGROUP + thread;
#pragma unroll
            for (int r = 0; r < SPLIT; ++r) {
                if (r == rank) continue;
                const unsigned to = cluster_address(received + (rank < r ? rank : rank - 1) * SLOT + index, r);
                const unsigned barrier = cluster_address(arrived, r);
#pragma unroll
                for (int q = 0; q < MI * GROUPS; ++q) {
                    const float* d = &acc[q / GROUPS][r * (MINE / 2) + q % GROUPS * 4];
                    const auto sums = make_uint4(bits_of(d[0]), bits_of(d[1]), bits_of(d[2]), bits_of(d[3]));
                    cluster_send(to + q * WARPGROUP * 16, sums, barrier);
                }
            }
            mbarrier_wait(arrived, 0);
#pragma unroll
            for (int q = 0; q < MI * GROUPS; ++q) {
                float* const d = &own[q / GROUPS][q % GROUPS * 4];
#pragma unroll
                for (int r = 0; r < SPLIT - 1; ++r) {
                    const uint4 sums = received[r * SLOT + index + q * WARPGROUP];
                    d[0] += of_bits<float>(sums.x), d[1] += of_bits<float>(sums.y);
                    d[2] += of_bits<float>(sums.z), d[3] += of_bits<float>(sums.w);
                }
            }
        }
        epilogue.rows(m0 + row);
        if (rehearsed) epilogue.correct(own, first_column + col);
        auto finished = [&](int i, int h, int j) {  // the two values of this thread in row h and group j, as stored
            const float* d = &own[i][j * 4 + h * 2];
            float low, high;
            epilogue.finish(i, h, m0 + row + i * 64 + h * 8, first_column + col + j * 8, d[0], d[1], low, high);
            return epilogue.pair(low, high);
        };
        if constexpr (PANELS > 0) {
            char* const mine = panels + (consumer * 4 + warp) * BUFFERS * PANEL_BYTES;
#pragma unroll
            for (int p = 0; p < PANELS; ++p) {
                const int i = p / (MINE / 64), first = p % (MINE / 64) * 64;
                const int panel_m = m0 + (consumer * MI + i) * 64 + 16 * warp, panel_n = n0 + first_column + first;
                char* const panel = mine + p % 2 * PANEL_BYTES;
                __syncwarp();
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    unsigned r[4];
#pragma unroll
                    for (int h = 0; h < 4; ++h) r[h] = packed(finished(i, h % 2, first / 8 + j + h / 2));
                    const int to_row = lane % 16, chunk = j + lane / 16;
                    stmatrix_x4(panel + to_row * 128 + (chunk ^ to_row % 8) * 16, r[0], r[1], r[2], r[3]);
                }
                __syncwarp();
                if (flags & WIDE) {
                    const int first_row = lane / 8, chunk = lane % 8, n = panel_n + chunk * 8;
                    T* at = y + static_cast<long long>(panel_m + first_row) * N + n;
#pragma unroll
                    for (int r = first_row; r < first_row + 16; r += 4, at += 4ll * N) {
                        const auto piece = *reinterpret_cast<const uint4*>(panel + r * 128 + (chunk ^ r % 8) * 16);
                        store_if(panel_m + r < rows && n < N, at, piece);
                    }
                } else {
                    copy_panel<true>(panel, y, panel_m, panel_n, rows, N, flags & ACCUMULATE, lane);
                }
            }
        } else {
#pragma unroll
            for (int q = 0; q < MI * GROUPS * 2; ++q) {
                const int i = q / (GROUPS * 2), j = q / 2 % GROUPS, h = q % 2;
                const auto two = finished(i, h, j);
                const int m = m0 + row + i * 64 + 8 * h, n = n0 + first_column + col + 8 * j;
                if (m >= rows || n >= N) continue;
                T* const at = y + static_cast<long long>(m) * N + n;
                if (flags & PAIRS && !(flags & ACCUMULATE)) {
                    *reinterpret_cast<typename Pair<T>::type*>(at) = two;
                } else {
                    at[0] = flags & ACCUMULATE ? from_float<T>(to_float(two.x) + to_float(at[0])) : two.x;
                    if (n + 1 >= N) continue;
                    at[1] = flags & ACCUMULATE ? from_float<T>(to_float(two.y) + to_float(at[1])) : two.y;
                }
            }
        }
    }
}
