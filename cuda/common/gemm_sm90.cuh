// The pipeline of every matrix product on Hopper's tensor cores, y = epilogue(x · wᵀ): TMA loads, wgmma, TMA stores.
//
//   x (M, K), w (N, K), y (M, N) row-major. X_K / W_K false: that operand lies transposed in memory, (K, M) or (K, N).
//
// The ideas, outermost first:
//   persistent clusters   as many clusters as fit on the chip; each takes tile after tile, in groups of neighbouring
//                         rows so that what is in L2 is used again.
//   multicast             the CM x CN blocks of a cluster compute neighbouring tiles; each loads a share of the x tile
//                         (common to CN of them) and of the w tile (common to CM) and sends it to all that need it.
//   warp specialisation   one warpgroup only starts TMA loads, STAGES deep; CONSUMERS warpgroups only multiply. A
//                         `full` barrier a stage counts the bytes that arrive, an `empty` one the consumers that left.
//   sharing or turns      two consumers share one big tile, which needs the fewest bytes; or (PINGPONG) they take
//                         tiles in turn, so that one writes its results while the other multiplies.
//   deferred stores       two that share keep a tile's results in registers, as they will be stored, and let go of some
//                         after every few steps of the next tile. All multiprocessors end their tiles together: written
//                         at once, these would keep the tensor cores waiting.
//   parts                 (PARTS 2) float operands arrive as two halves each, high and low, that add up to 22 bits, and
//                         scaled by a power of two a row (gemm_split.cu). Three products are summed, the small ones
//                         first. The tensor cores truncate where they should round, which shrinks a sum of many steps;
//                         so every other step of the big product is moved to registers and added there.
//   split K               where there are too few tiles to fill the chip, the SPLIT blocks of a cluster share one tile
//                         and divide K; they add up through distributed shared memory, in a fixed order.
//
// What happens to a sum before it is stored is the EPILOGUE's business. It has
//   Sum, Value, Out        the tensor cores' type, what `finish` makes of it, and the type of y;
//   HOLDS                  whether it leaves registers for a tile's results beside the sums of the next;
//   COLUMN_BYTES           the shared memory it wants for each column of a tile and consumer;
//   begin(columns, ...)    before a tile's products: fetch what its columns need into that memory;
//   rows(m)                the same for this thread's rows, m + 64 i + 8 h for i < MI and h < 2;
//   correct(sums, column)  once they are there: change them, as whole products, before a split K adds them up;
//   finish(i, h, m, column, a, b, low, high)   the values of two neighbouring sums a and b;
//   out, pair              one value, or two, as they are stored.
#pragma once
#include "wgmma.cuh"

constexpr int ROW = 128;         // bytes of K in a stage: the width of a swizzled row
constexpr int STEPS = ROW / 32;  // one wgmma takes 32 of them
constexpr int WARPGROUP = 128;
// All consumers; a consumer's own (+ its number); whose turn it is (+ its number); barriers are initialised.
enum NamedBarrier { ALL = 1, OWN = 2, TURN = 6, READY = 9 };
// As in the Python faces. PAIRS: where K is split, two outputs may be stored at once.
enum Flag { RELU = 1, TMA_STORE = 2, ACCUMULATE = 4, PAIRS = 8 };

// Load this block's share of a tile of ROWS rows (M or N) and one step of K, and send it to the blocks in `mask`.
// Both layouts put 64 rows in 8,192 contiguous bytes, so a share starts at the same offset either way.
template <bool K_MAJOR, int ROWS, int SHARES>
__device__ __forceinline__ void load_tile(char* tile, const TensorMap* map, unsigned long long* barrier, int row, int k,
                                          int share, unsigned short mask) {
    constexpr int MINE = ROWS / SHARES;
    row += share * MINE;
    tile += share * MINE * ROW;
    constexpr int BOX = K_MAJOR ? MINE : 64;
#pragma unroll
    for (int r = 0; r < MINE; r += BOX) {
        const int inner = K_MAJOR ? k : row + r, outer = K_MAJOR ? row + r : k;
        if (SHARES == 1) tma_load(tile + r * ROW, map, barrier, inner, outer);
        else tma_load_multicast(tile + r * ROW, map, barrier, inner, outer, mask);
    }
}

template <typename T, int A, int B> __device__ __forceinline__ void zero(T (&values)[A][B]) {
#pragma unroll
    for (int i = 0; i < A * B; ++i) values[i / B][i % B] = 0;
}

template <typename T, int A, int B> __device__ __forceinline__ void add(T (&to)[A][B], const T (&values)[A][B]) {
#pragma unroll
    for (int i = 0; i < A * B; ++i) to[i / B][i % B] += values[i / B][i % B];
}

// Where the copy engine cannot store y (its rows are not multiples of 16 bytes), the warp does, element by element.
template <bool ACCUMULATES, typename O>
__device__ __noinline__ void copy_panel(const char* panel, O* y, int m0, int n0, int M, int N, bool accumulate,
                                        int lane) {
    constexpr int COLS = 128 / sizeof(O);
    for (int e = lane; e < 16 * COLS; e += 32) {
        const int row = e / COLS, column = e % COLS, byte = column * sizeof(O);
        if (m0 + row >= M || n0 + column >= N) continue;
        O value = *reinterpret_cast<const O*>(panel + row * 128 + (byte / 16 ^ row % 8) * 16 + byte % 16);
        O* const to = y + static_cast<long long>(m0 + row) * N + n0 + column;
        if constexpr (ACCUMULATES) {
            if (accumulate) value = from_float<O>(to_float(value) + to_float(*to));
        }
        *to = value;
    }
}

// Two 16-bit or 8-bit values as a word.
template <typename P> __device__ __forceinline__ unsigned packed(P pair) {
    if constexpr (sizeof(P) == 2) return *reinterpret_cast<const unsigned short*>(&pair);
    else return *reinterpret_cast<const unsigned*>(&pair);
}

// Lane c of a quad has columns 2 c and 2 c + 1 of four groups of 8 one-byte columns, packed as group[0..3]; it leaves
// with all eight of group c.
__device__ __forceinline__ uint2 gather_eight(const unsigned (&group)[4], int c) {
    const unsigned first = group[0] | group[1] << 16, second = group[2] | group[3] << 16;
    const unsigned theirs = __shfl_xor_sync(~0u, c < 2 ? second : first, 2);
    const unsigned low = c < 2 ? first : theirs, high = c < 2 ? theirs : second;  // from lanes c % 2 and c % 2 + 2
    const unsigned even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
    const unsigned other = __shfl_xor_sync(~0u, c % 2 ? even : odd, 1);
    const unsigned a = c % 2 ? other : even, b = c % 2 ? odd : other;  // from lanes 0 and 2, from lanes 1 and 3
    return make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
}

// Where w comes from: it is given. Of another source, which WAITS, nothing is loaded before `begin` has returned.
struct Given {
    static constexpr bool WAITS = false;
    __device__ __forceinline__ void begin() const {}
};

template <typename T, bool X_K, bool W_K, int BM, int BN, int CONSUMERS, int STAGES, int CM, int CN, int SPLIT,
          int PANELS, bool PINGPONG, int PARTS, class Epilogue>
struct Pipeline {
    using O = typename Epilogue::Out;
    using Sum = typename Epilogue::Sum;
    using Value = typename Epilogue::Value;
    static constexpr int SHARERS = PINGPONG ? 1 : CONSUMERS;  // consumers that share a tile, each its own rows
    static constexpr int MI = BM / (64 * SHARERS);            // 64-row wgmma tiles a consumer
    static constexpr int CLUSTER = CM * CN * SPLIT;
    static constexpr int BK = ROW / sizeof(T);
    static constexpr int X_BYTES = BM * ROW, W_BYTES = BN * ROW;
    static constexpr int PRODUCTS = PARTS == 2 ? 3 : 1;
    static constexpr int COLS = 128 / sizeof(O);  // y leaves by way of shared memory, in panels of 16 rows of 128 bytes
    static constexpr int PANEL_BYTES = 16 * 128;
    static constexpr int PIECES = MI * BN / COLS;  // panels of a warp
    static constexpr int ACROSS = BN < COLS ? 1 : BN / COLS;  // side by side (a narrower tile has none)
    static constexpr bool DEFERRED = SHARERS == 2 && SPLIT == 1 && sizeof(O) <= 2 && Epilogue::HOLDS;
    static constexpr int Y_BYTES = SPLIT == 1 ? CONSUMERS * 4 * PANELS * PANEL_BYTES : 0;
    static constexpr int SHARED = STAGES * (X_BYTES + W_BYTES) + Y_BYTES + CONSUMERS * BN * Epilogue::COLUMN_BYTES +
                                  2 * STAGES * 8 + 1024;  // 1,024 to align
    static_assert(CONSUMERS <= 2, "the registers are divided among two consumers at most");
    static_assert(BM == 64 * SHARERS * MI, "consumers divide the tile into whole 64-row wgmma tiles");
    static_assert(sizeof(T) == 2 || (X_K && W_K), "wgmma reads all but 16-bit types K-major only");
    static_assert(SPLIT > 1 || BN % COLS == 0, "a tile is made of whole panels");
    static_assert(PARTS == 1 || (sizeof(O) == 4 && SPLIT == 1 && MI * BN <= 128), "two sets of sums must fit");
    static_assert(MI * BN <= 256, "a consumer's accumulators must fit its registers");
    static_assert(SPLIT == 1 || (CM == 1 && CN == 1), "a cluster either splits K or multicasts");
    static_assert(SPLIT == 1 || BM * BN * 4 <= STAGES * (X_BYTES + W_BYTES), "split sums reuse the stages' memory");
    static_assert(!PINGPONG || (SPLIT == 1 && CONSUMERS == 2), "two consumers take turns at whole tiles");
    static_assert(BM / CN % (X_K ? 32 : 64) == 0 && BN / CM % (W_K ? 32 : 64) == 0,
                  "each block of a cluster loads whole boxes, 64 wide where M or N is contiguous");
    static_assert(SHARED <= 227 * 1024, "more shared memory than Hopper gives a block");

    template <class Source = Given>
    static __device__ __forceinline__ void run(const TensorMap& x_map, const TensorMap& w_map, const TensorMap& y_map,
                                               O* y, int M, int N, int K, int flags, int group, Epilogue epilogue,
                                               const Source& source = {}) {
        extern __shared__ char raw[];
        char* const shared = raw + (1024 - shared_address(raw) % 1024) % 1024;  // swizzle atoms are 1,024 bytes
        char* const x_tiles = shared;
        char* const w_tiles = x_tiles + STAGES * X_BYTES;
        char* const y_tile = w_tiles + STAGES * W_BYTES;
        char* const columns = y_tile + Y_BYTES;  // BN times COLUMN_BYTES a consumer
        auto* const full = reinterpret_cast<unsigned long long*>(columns + CONSUMERS * BN * Epilogue::COLUMN_BYTES);
        auto* const empty = full + STAGES;

        const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0;
        const int cm = SPLIT > 1 ? 0 : rank % CM, cn = SPLIT > 1 ? 0 : rank / CM;
        if (threadIdx.x == 0) {
            tma_prefetch(&x_map);
            tma_prefetch(&w_map);
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(&full[s], 1);
                mbarrier_init(&empty[s], SHARERS * (SPLIT > 1 ? 1 : CM + CN - 1));
            }
            mbarrier_init_fence();
        }
        // Alone, the initialising thread, which also loads, need not wait for anybody.
        const int warpgroup = threadIdx.x / WARPGROUP;
        if (CLUSTER > 1) cluster_sync();
        else if (warpgroup > 0) barrier_sync(READY, 32 + CONSUMERS * WARPGROUP);
        else if (threadIdx.x < 32) barrier_arrive(READY, 32 + CONSUMERS * WARPGROUP);

        // Every block of a cluster walks the same list of cluster tiles.
        const int tiles_m = (M + BM * CM - 1) / (BM * CM), tiles_n = (N + BN * CN - 1) / (BN * CN);
        const int tiles = tiles_m * tiles_n, clusters = gridDim.x / CLUSTER;
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
        const int k_count = max(0, min(k_share, k_tiles - k_first)) * PRODUCTS;

        if (warpgroup == 0) {
            if (CONSUMERS > 1) give_registers<40>();
            if (threadIdx.x == 0) {
                source.begin();
                unsigned short x_mask = 0, w_mask = 0;
                for (int i = 0; i < CN; ++i) x_mask |= 1 << (i * CM + cm);
                for (int i = 0; i < CM; ++i) w_mask |= 1 << (cn * CM + i);
                int stage = 0;
                unsigned phase = 0;
                for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += clusters) {
                    int m, n;
                    place(tile, m, n);
                    for (int k = 0; k < k_count; ++k) {
                        mbarrier_wait(&empty[stage], phase ^ 1);
                        mbarrier_expect_bytes(&full[stage], X_BYTES + W_BYTES);
                        int at = (k_first + k) * BK, x_row = m, w_row = n;
                        if (PARTS == 2) {  // the low part of an operand lies M (or N) rows below the high one
                            const int product = k / k_tiles;  // low · high, high · low, high · high
                            at = k % k_tiles * BK;
                            if (product == 0) x_row += M;
                            if (product == 1) w_row += N;
                        }
                        load_tile<X_K, BM, CN>(x_tiles + stage * X_BYTES, &x_map, &full[stage], x_row, at, cn, x_mask);
                        load_tile<W_K, BN, CM>(w_tiles + stage * W_BYTES, &w_map, &full[stage], w_row, at, cm, w_mask);
                        if (++stage == STAGES) stage = 0, phase ^= 1;
                    }
                }
            }
        } else {
            if (CONSUMERS > 1) take_registers<232>();
            const int consumer = warpgroup - 1, share = PINGPONG ? 0 : consumer;
            const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, warp = thread / 32;
            int stage = 0;
            unsigned phase = 0;
            auto next = [&] {
                if (++stage == STAGES) stage = 0, phase ^= 1;
            };
            // A stage is free once every consumer that read it, here and where this block sends to, has said so.
            auto release_previous = [&] {
                const int s = (stage == 0 ? STAGES : stage) - 1;
                if (CLUSTER == 1 || SPLIT > 1) {
                    if (thread == 0) mbarrier_arrive(&empty[s]);
                } else if (thread < CLUSTER && (thread % CM == cm || thread / CM == cn)) {
                    mbarrier_arrive_at(&empty[s], thread);
                }
            };

            // The last tile of K may be short: of what lies beyond K, zeros in shared memory, nothing is multiplied.
            constexpr int STEP = 32 / sizeof(T);
            const bool short_end = PARTS == 1 && k_count > 0 && k_first + k_count == k_tiles && (K - 1) % BK < BK - STEP;
            const int whole = PARTS == 2 ? k_count / 3 * 2 : k_count - short_end;

            const int row = share * MI * 64 + 16 * warp + lane / 4;  // of the block's tile, for i = h = 0 (see acc)
            const int col = 2 * (lane % 4);
            // Panels are a warp's own, 128-byte swizzled like the loads, PANELS of them in turn: one is written while
            // the copy engine, which clips at the matrix's edge, reads the others. `words` is what this thread puts into
            // a fourth of one, 32 bytes of every row.
            char* const mine = y_tile + (consumer * 4 + warp) * PANELS * PANEL_BYTES;
            auto put = [&](int p, int m0, int n0, auto words) {
                const int panel_m = m0 + (share * MI + p / ACROSS) * 64 + 16 * warp;
                const int panel_n = n0 + p % ACROSS * COLS;
                if (!(flags & TMA_STORE) && panel_n >= N) return;  // a head's few columns, say
                char* const panel = mine + p % PANELS * PANEL_BYTES;
                if (lane == 0) {
                    if (p == 0) tma_store_wait_read<0>();  // the tile before's, long read, left in any order of panels
                    else if (p >= PANELS) tma_store_wait_read<PANELS - 1>();
                }
                __syncwarp();
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const uint4 v = words(q);
                    if constexpr (sizeof(O) == 2) {
                        const int to_row = lane % 16, chunk = q * 2 + lane / 16;
                        stmatrix_x4(panel + to_row * 128 + (chunk ^ to_row % 8) * 16, v.x, v.y, v.z, v.w);
                    } else {
                        const int to_row = lane / 4, chunk = q * 2 + lane % 4 / 2;
                        char* const to = panel + to_row * 128 + (chunk ^ to_row) * 16 + lane % 2 * 8;
                        *reinterpret_cast<uint2*>(to) = make_uint2(v.x, v.y);
                        *reinterpret_cast<uint2*>(to + 8 * 128) = make_uint2(v.z, v.w);
                    }
                }
                fence_proxy_async();
                __syncwarp();
                if (!(flags & TMA_STORE)) {
                    copy_panel<Epilogue::ACCUMULATES>(panel, y, panel_m, panel_n, M, N, flags & ACCUMULATE, lane);
                    __syncwarp();
                } else if (lane == 0) {
                    if (flags & ACCUMULATE) tma_add(&y_map, panel, panel_n, panel_m);
                    else tma_store(&y_map, panel, panel_n, panel_m);
                    tma_store_commit();
                }
            };
            uint4 held[DEFERRED ? PIECES : 1][4];  // of the tile at held_m, held_n; from next_piece on still to be put
            int next_piece = PIECES, held_m = 0, held_n = 0;
            auto put_held = [&] {
#pragma unroll
                for (int p = 0; p < PIECES; ++p) {
                    if (p == next_piece) put(p, held_m, held_n, [&](int q) { return held[DEFERRED ? p : 0][q]; });
                }
                ++next_piece;
            };

            int turn = 0;
            if (PINGPONG && consumer == 1) barrier_arrive(TURN + 0, 2 * WARPGROUP);  // the first turn is consumer 0's
            for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += clusters) {
                if (PINGPONG && turn++ % 2 != consumer) {  // the other one's: step over its stages
                    stage += k_count;
                    phase ^= stage / STAGES % 2;
                    stage %= STAGES;
                    continue;
                }
                Sum acc[MI][BN / 2];
                // A block may have no part of a divided K. (Of PARTS, without a first value products wait for each other.)
                if ((SPLIT > 1 || PARTS == 2) && k_count == 0) zero(acc);
                // A parity tells two phases apart, no more: a consumer may not wait for its stages while the other's are
                // still to come.
                if (PINGPONG) barrier_sync(TURN + consumer, 2 * WARPGROUP);
                // Begin the products of wgmma steps FROM to TO of this stage; fresh: into, not onto, these sums.
                auto multiply = [&](Sum (&into)[MI][BN / 2], bool fresh, int from = 0, int to = STEPS) {
                    const char* xs = x_tiles + stage * X_BYTES + share * MI * 64 * ROW;
                    const char* ws = w_tiles + stage * W_BYTES;
                    wgmma_fence();
#pragma unroll
                    for (int kk = from; kk < to; ++kk) {
                        // one wgmma takes 32 bytes along a K-major row, or two groups of 8 rows of an M/N-major panel
                        const auto b = wgmma_descriptor(ws + kk * (W_K ? 32 : 2048), W_K ? 16 : 64 * ROW);
#pragma unroll
                        for (int i = 0; i < MI; ++i) {
                            const auto a = wgmma_descriptor(xs + i * 64 * ROW + kk * (X_K ? 32 : 2048), 16);
                            wgmma<T, BN, !X_K, !W_K>(into[i], a, b, kk > from || !fresh);
                        }
                    }
                    wgmma_commit();
                };
                for (int k = 0; k < whole; ++k) {
                    mbarrier_wait(&full[stage], phase);
                    multiply(acc, k == 0);
                    wgmma_wait<1>();  // the products of the previous stage are done, those of this one go on
                    if (k > 0) release_previous();
                    next();
                    if (DEFERRED && next_piece < PIECES && k * PIECES >= next_piece * whole) put_held();
                }
                if (short_end) {
                    mbarrier_wait(&full[stage], phase);
                    for (int kk = 0; kk < (K % BK + STEP - 1) / STEP; ++kk) multiply(acc, whole + kk == 0, kk, kk + 1);
                    if (whole > 0) {
                        wgmma_wait<1>();
                        release_previous();
                    }
                    next();
                }
                if (PINGPONG) barrier_arrive(TURN + 1 - consumer, 2 * WARPGROUP);
                while (DEFERRED && next_piece < PIECES) put_held();
                int m0, n0;  // what the epilogue needs is fetched while the last products are under way
                place(tile, m0, n0);
                epilogue.begin(columns + consumer * BN * Epilogue::COLUMN_BYTES, n0, thread,
                               [&] { barrier_sync(OWN + consumer, WARPGROUP); });
                epilogue.rows(m0 + row);
                wgmma_wait<0>();
                if (k_count > 0) release_previous();
                if constexpr (PARTS == 2) {  // the big product, in two sets of sums: one is added while the other runs
                    Sum sums[MI][BN / 2], other[MI][BN / 2];
                    zero(sums);
                    add(sums, acc);
                    for (int k = 0; k < k_count / 3; ++k) {
                        mbarrier_wait(&full[stage], phase);
                        multiply(acc, true, 0, STEPS / 2);
                        multiply(other, true, STEPS / 2, STEPS);
                        wgmma_wait<1>();
                        add(sums, acc);
                        wgmma_wait<0>();
                        next();
                        release_previous();
                        add(sums, other);
                    }
                    zero(acc);
                    add(acc, sums);
                }

                // acc[i][4 j + c + 2 h] is row 16 * warp + lane / 4 + 8 h, column 8 j + 2 * (lane % 4) + c of wgmma tile i.
                // Columns below are counted from the tile's first.
                auto store = [&](int i, int h, int m, int column, Sum a, Sum b) {
                    Value low, high;
                    epilogue.finish(i, h, m, column, a, b, low, high);
                    const int n = n0 + column;
                    if (m >= M || n >= N) return;
                    O* const at = y + static_cast<long long>(m) * N + n;
                    if constexpr (Epilogue::ACCUMULATES) {
                        if (flags & ACCUMULATE) {
                            low = to_float(from_float<O>(low)) + to_float(at[0]);
                            if (n + 1 < N) high = to_float(from_float<O>(high)) + to_float(at[1]);
                        }
                    }
                    if (flags & PAIRS) {
                        *reinterpret_cast<typename Pair<O>::type*>(at) = epilogue.pair(low, high);
                    } else {
                        at[0] = epilogue.out(low);
                        if (n + 1 < N) at[1] = epilogue.out(high);
                    }
                };
                if (SPLIT == 1 || rank == 0) epilogue.correct(acc, col);

                if constexpr (SPLIT > 1) {
                    // Lay the sums out by register and thread; each block then adds up its share of the registers over
                    // the cluster, in rank order. The stages' memory is free: all loads of this (only) tile have landed.
                    constexpr int QUADS = MI * BN / 8;
                    auto* const sums = reinterpret_cast<uint4*>(shared) + consumer * QUADS * WARPGROUP + thread;
                    barrier_sync(ALL, CONSUMERS * WARPGROUP);
#pragma unroll
                    for (int q = 0; q < QUADS; ++q) {
                        const Sum* d = &acc[q / (BN / 8)][q % (BN / 8) * 4];
                        sums[q * WARPGROUP] = make_uint4(bits_of(d[0]), bits_of(d[1]), bits_of(d[2]), bits_of(d[3]));
                    }
                    cluster_sync();
                    for (int q = rank; q < QUADS; q += SPLIT) {
                        Sum total[4] = {};
#pragma unroll
                        for (int r = 0; r < SPLIT; ++r) {
                            const uint4 part = cluster_load(sums + q * WARPGROUP, r);
                            total[0] += of_bits<Sum>(part.x), total[1] += of_bits<Sum>(part.y);
                            total[2] += of_bits<Sum>(part.z), total[3] += of_bits<Sum>(part.w);
                        }
                        const int m = m0 + row + q / (BN / 8) * 64, column = col + q % (BN / 8) * 8;
                        epilogue.rows(m);
                        store(0, 0, m, column, total[0], total[1]);
                        store(0, 1, m + 8, column, total[2], total[3]);
                    }
                } else {
                    // What this thread puts into a fourth q of panel p: two values of a row h of a wgmma tile and a
                    // group of 8 columns make a word of 16-bit values or two of wide ones; a quad of lanes gathers the
                    // 8-bit ones of four groups.
                    auto results = [&](int p, int q) {
                        auto two = [&](int h, int group) {
                            const int i = p / ACROSS, j = p % ACROSS * (COLS / 8) + group;
                            const Sum* d = &acc[i][j * 4 + h * 2];
                            Value low, high;
                            epilogue.finish(i, h, m0 + row + i * 64 + h * 8, col + j * 8, d[0], d[1], low, high);
                            return epilogue.pair(low, high);
                        };
                        if constexpr (sizeof(O) == 2) {
                            unsigned v[4];
#pragma unroll
                            for (int e = 0; e < 4; ++e) v[e] = packed(two(e % 2, q * 2 + e / 2));
                            return make_uint4(v[0], v[1], v[2], v[3]);
                        } else if constexpr (sizeof(O) == 4) {
                            const auto a = two(0, q), b = two(1, q);
                            return make_uint4(bits_of(a.x), bits_of(a.y), bits_of(b.x), bits_of(b.y));
                        } else {
                            unsigned a[4], b[4];
#pragma unroll
                            for (int g = 0; g < 4; ++g) {
                                a[g] = packed(two(0, q * 4 + g)), b[g] = packed(two(1, q * 4 + g));
                            }
                            const uint2 first = gather_eight(a, lane % 4), second = gather_eight(b, lane % 4);
                            return make_uint4(first.x, first.y, second.x, second.y);
                        }
                    };
                    const bool last = tile + clusters >= tiles;
#pragma unroll
                    for (int p = 0; p < PIECES; ++p) {
                        if constexpr (DEFERRED) {
#pragma unroll
                            for (int q = 0; q < 4; ++q) held[p][q] = results(p, q);
                            if (last) put(p, m0, n0, [&](int q) { return held[p][q]; });
                        } else {
                            put(p, m0, n0, [&](int q) { return results(p, q); });
                        }
                    }
                    if (DEFERRED && !last) next_piece = 0, held_m = m0, held_n = n0;
                }
            }
            if (SPLIT == 1 && lane == 0) tma_store_wait_read<0>();
        }
        if (SPLIT > 1 && warpgroup == 0) cluster_sync();  // pairs with the consumers' before they add up
        if (CLUSTER > 1) cluster_sync();               // no block leaves while another may still reach its memory
    }
};
