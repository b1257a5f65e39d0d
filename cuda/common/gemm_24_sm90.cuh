// The pipeline of products with 2:4 weights on Hopper's sparse tensor cores, yᵀ = epilogue(w · xᵀ).
//
//   x (M, K), values (N, K / 2), y (M, N), all row-major: M batch rows, N outputs, K inputs. Four bits of metadata say
//   which two of four neighbouring columns a row of w keeps: first | second << 2.
//
// Only the left operand of a wgmma may be sparse, so w comes first, a tile of sums is BO outputs x BB batch rows, and the
// epilogue turns it over on its way out. The ideas (persistent clusters, multicast of x, warp specialisation, split K) are
// those of gemm_sm90.cuh. What is different:
//   bytes      an instruction does twice the work on the same 32 bytes of a row of w, and reads 64 of each row of x. So
//              shared memory, not arithmetic, is the limit: BB is as wide as an instruction can be.
//   a stage    holds 128 bytes of each row of x (128-byte swizzled), the 64 of w that meet them (64-byte swizzled), and
//              the metadata of these.
//   metadata   lie as `pack_24` leaves them: a thread reads its own of a wgmma tile and a stage in one piece. The
//              instruction reads its register of metadata when it runs, not when it is issued, and the compiler does
//              not know: stages take turns with two sets of registers, and a set is used once more (`& nothing`) when
//              it is written anew, so that it lives until its products are done.
//   y          leaves in panels. Where the stages leave them no room, they lie in the last stage of their tile, which
//              is given back to the loads when the copy engine has read them, during the next tile.
//
// The EPILOGUE has
//   Sum, Value, Out        as in gemm_sm90.cuh;
//   ROW_BYTES              the shared memory it wants for each batch row of a tile and consumer;
//   begin(rows, m0, ...)   before a tile's products: fetch what its batch rows need into that memory;
//   outputs(n)             the same for this thread's outputs, n + 64 i + 8 h for i < MI and h < 2;
//   correct(sums, row)     change the whole sums, row being this thread's first batch row in the tile;
//   finish(i, h, row, a, b, low, high)   the values of two neighbouring batch rows' sums a and b;
//   activates, activated(i, h, value)    whether there is more to do, and that, which is asked once for many values;
//   out, pair              one value, or two, as they are stored.
#pragma once
#include "gemm_sm90.cuh"
#include "wgmma_24.cuh"

constexpr int KEPT = ROW / 2;       // bytes of w in a stage, of each row
constexpr int STEPS_24 = ROW / 64;  // one wgmma takes 64 bytes of a row of x
constexpr int LIMIT = 227 * 1024;   // bytes of shared memory that Hopper gives a block

// The descriptor of a K-major tile in 64-byte swizzled rows: atoms of 8 rows x 64 bytes.
__device__ __forceinline__ unsigned long long wgmma_descriptor_64(const void* tile) {
    constexpr unsigned long long STRIDE = 512, SWIZZLE_64B = 2;
    return (static_cast<unsigned long long>(shared_address(tile)) & 0x3ffff) >> 4 | (STRIDE >> 4) << 32 |
           SWIZZLE_64B << 62;
}

// As stmatrix_x4, but each 8 x 8 matrix is turned over: row i of it goes to column i.
__device__ __forceinline__ void stmatrix_x4_transposed(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Metadata are packed in pieces of 8 bytes, so many for 64 outputs and a stage.
template <int SIZE> constexpr int PIECES = SIZE == 1 ? 128 : 64;
template <int SIZE> constexpr int PIECE_BYTES = PIECES<SIZE> * 8;

// Pack metadata (n, bytes), rows `stride` bytes apart, for values of SIZE bytes: piece p of stage s of wgmma tile t is
// packed[(t * stages + s) * PIECES + p]. A piece holds what a thread hands to the two instructions of a stage; with g
// for row 16 * (its warp) + (lane / 4) of the tile and q for lane % 4, that is
//   SIZE 1   word 2 j + q / 2 of row g + q % 2 * 8;                                            p = thread
//   SIZE 2   half-word 2 j + q % 2 of row g, and above it that of row g + 8;                   p = thread / 4 * 2 + q % 2
// for j = 0 and 1 (PTX ISA, "Matrix fragments for sparse wgmma"). Beyond the matrix columns 0 and 1 are kept.
template <int SIZE>
__global__ void __launch_bounds__(256)
pack_24(const unsigned char* __restrict__ metadata, long long stride, uint2* __restrict__ packed, int n, int bytes,
        int stages) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int p = at % PIECES<SIZE>, s = at / PIECES<SIZE> % stages;
    const long long t = at / PIECES<SIZE> / stages;
    if (t * 64 >= n) return;
    constexpr int LANES = PIECES<SIZE> / 32, WIDTH = 4 / SIZE;  // threads of a quad that differ, bytes of one row
    const int q = p % LANES, g = p / LANES;                      // g / 8 is the warp, g % 8 the row
    auto bits = [&](int row, int first) {
        const long long from = t * 64 + g / 8 * 16 + g % 8 + row;
        unsigned value = 0;
        for (int i = 0; i < WIDTH; ++i) {
            const bool inside = from < n && first + i < bytes;
            value |= (inside ? metadata[from * stride + first + i] : 0x44u) << 8 * i;
        }
        return value;
    };
    unsigned words[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int unit = (s * 2 + j) * 2;
        words[j] = SIZE == 1 ? bits(q % 2 * 8, (unit + q / 2) * 4)
                             : bits(0, (unit + q) * 2) | bits(8, (unit + q) * 2) << 16;
    }
    packed[at] = make_uint2(words[0], words[1]);
}

// Where the copy engine cannot store y (its rows are not multiples of 16 bytes), the consumer does, element by element.
template <int PR, typename O>
__device__ __noinline__ void copy_panel_24(const char* panel, O* y, int m0, int n0, int M, int N, int thread) {
    for (int e = thread; e < PR * 64; e += WARPGROUP) {
        const int row = e / 64, byte = e % 64 * sizeof(O), chunk = byte / 16;
        const int m = m0 + row, n = n0 + e % 64;
        const int at = sizeof(O) == 1 ? row * 64 + (chunk ^ row / 2 % 4) * 16
                                      : chunk / 8 * PR * 128 + row * 128 + (chunk % 8 ^ row % 8) * 16;
        if (m < M && n < N)
            y[static_cast<long long>(m) * N + n] = *reinterpret_cast<const O*>(panel + at + byte % 16);
    }
}

// T and U are the types of w and x.
template <typename T, typename U, int BO, int BB, int CONSUMERS, int STAGES, int CO, int SPLIT, class Epilogue>
struct Pipeline24 {
    using O = typename Epilogue::Out;
    using Sum = typename Epilogue::Sum;
    using Value = typename Epilogue::Value;
    static constexpr int MI = BO / (64 * CONSUMERS);
    static constexpr int CLUSTER = CO * SPLIT;
    static constexpr int BK = ROW / sizeof(U);
    static constexpr int X_BYTES = BB * ROW, W_BYTES = BO * KEPT, E_BYTES = BO / 64 * PIECE_BYTES<sizeof(T)>;
    static constexpr int STAGE_BYTES = X_BYTES + W_BYTES + E_BYTES;
    static constexpr int LOADS = STAGES * (STAGE_BYTES + 16) + CONSUMERS * BB * Epilogue::ROW_BYTES + 1024;
    // Panels of y, 64 outputs by PR batch rows: where two for each consumer find no room, a stage of x holds them.
    static constexpr int ROW_OF_Y = 64 * sizeof(O), ROOM = CONSUMERS * 2 * 32 * ROW_OF_Y;
    static constexpr bool APART = SPLIT == 1 && LOADS + ROOM <= LIMIT;
    static constexpr int FIT = X_BYTES / (CONSUMERS * 2 * ROW_OF_Y);
    static constexpr int PR = APART ? 32 : FIT < 64 ? FIT : 64, PANEL_BYTES = PR * ROW_OF_Y;
    static_assert(CONSUMERS <= 2, "the registers are divided among two consumers at most");
    static_assert(BO == 64 * CONSUMERS * MI, "consumers divide the tile into whole 64-output wgmma tiles");
    static_assert(MI * BB <= 256, "a consumer's accumulators must fit its registers");
    static_assert(SPLIT == 1 || CO == 1, "a cluster either splits K or multicasts");
    static_assert(SPLIT == 1 || BO * BB * 4 <= STAGES * (X_BYTES + W_BYTES), "split sums reuse the stages' memory");
    static_assert(BB / CO % 8 == 0, "whole swizzle atoms are loaded");
    static_assert(SPLIT > 1 || PR % 16 == 0 && BB % PR == 0, "whole swizzle atoms are stored");
    static_assert(!APART || MI * BB / PR % 2 == 0, "panels take turns over all tiles");
    static_assert(LOADS <= LIMIT, "more shared memory than Hopper gives a block");

    static __device__ __forceinline__ void run(const TensorMap& x_map, const TensorMap& w_map, const char* e,
                                               const TensorMap& y_map, O* y, int M, int N, int K, int flags, int group,
                                               Epilogue epilogue) {
        extern __shared__ char raw[];
        char* const shared = raw + (1024 - shared_address(raw) % 1024) % 1024;  // swizzle atoms are 1,024 bytes
        char* const x_tiles = shared;
        char* const w_tiles = x_tiles + STAGES * X_BYTES;
        char* const y_tile = w_tiles + STAGES * W_BYTES;
        char* const e_tiles = y_tile + (APART ? ROOM : 0);
        char* const rows = e_tiles + STAGES * E_BYTES;  // BB times ROW_BYTES a consumer
        auto* const full = reinterpret_cast<unsigned long long*>(rows + CONSUMERS * BB * Epilogue::ROW_BYTES);
        auto* const empty = full + STAGES;

        const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0;
        const int co = SPLIT > 1 ? 0 : rank;
        if (threadIdx.x == 0) {
            tma_prefetch(&x_map);
            tma_prefetch(&w_map);
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(&full[s], 1);
                mbarrier_init(&empty[s], CONSUMERS * CO * WARPGROUP);
            }
            mbarrier_init_fence();
        }
        // Alone, the initialising thread, which also loads, need not wait for anybody.
        const int warpgroup = threadIdx.x / WARPGROUP;
        if (CLUSTER > 1) cluster_sync();
        else if (warpgroup > 0) barrier_sync(READY, 32 + CONSUMERS * WARPGROUP);
        else if (threadIdx.x < 32) barrier_arrive(READY, 32 + CONSUMERS * WARPGROUP);

        // Every block of a cluster walks the same list of cluster tiles, in groups of `group` along the batch.
        const int tiles_b = (M + BB - 1) / BB, tiles_o = (N + BO * CO - 1) / (BO * CO);
        const int tiles = tiles_b * tiles_o, clusters = gridDim.x / CLUSTER;
        auto place = [&](int tile, int& m, int& n) {
            const int first = tile / (group * tiles_o) * group;
            const int height = min(group, tiles_b - first);
            const int within = tile % (group * tiles_o);
            m = (first + within % height) * BB;
            n = ((within / height) * CO + co) * BO;
        };
        const int k_tiles = (K + BK - 1) / BK;
        const int k_share = (k_tiles + SPLIT - 1) / SPLIT;
        const int k_first = SPLIT > 1 ? static_cast<int>(rank) * k_share : 0;
        const int k_count = max(0, min(k_share, k_tiles - k_first)), k_end = k_first + k_count;

        if (warpgroup == 0) {
            if (CONSUMERS > 1) give_registers<40>();
            if (threadIdx.x == 0) {
                const int last = (N + 63) / 64 - 1;
                int stage = 0;
                unsigned phase = 0;
                for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += clusters) {
                    int m, n;
                    place(tile, m, n);
#pragma unroll 1
                    for (int k = k_first; k < k_end; ++k) {
                        mbarrier_wait(&empty[stage], phase ^ 1);
                        mbarrier_expect_bytes(&full[stage], STAGE_BYTES);
                        char* const x_tile = x_tiles + stage * X_BYTES + co * (BB / CO) * ROW;
                        const int row = m + co * (BB / CO);
                        if (CO == 1) tma_load(x_tile, &x_map, &full[stage], k * BK, row);
                        else tma_load_multicast(x_tile, &x_map, &full[stage], k * BK, row, (1 << CO) - 1);
                        tma_load(w_tiles + stage * W_BYTES, &w_map, &full[stage], k * BK / 2, n);
                        constexpr int PIECE = PIECE_BYTES<sizeof(T)>;
#pragma unroll
                        for (int i = 0; i < BO / 64; ++i) {
                            const long long tile_64 = min(n / 64 + i, last);
                            bulk_load(e_tiles + stage * E_BYTES + i * PIECE, e + (tile_64 * k_tiles + k) * PIECE, PIECE,
                                      &full[stage]);
                        }
                        if (++stage == STAGES) stage = 0, phase ^= 1;
                    }
                }
            }
        } else {
            if (CONSUMERS > 1) take_registers<232>();
            const int consumer = warpgroup - 1;
            const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, warp = thread / 32;
            int stage = 0, held = -1;  // the stage that y still leaves from
            unsigned phase = 0;
            // Memory is free once every thread that read it, here and where this block sends to, has said so: one that has
            // waited for its products knows nothing of the metadata that others fetch.
            auto release = [&](unsigned long long* barrier) {
                if (CLUSTER == 1 || SPLIT > 1) {
                    mbarrier_arrive(barrier);
                } else {
                    for (int r = 0; r < CLUSTER; ++r) mbarrier_arrive_at(barrier, r);
                }
            };

            auto give_back = [&] {  // once the copy engine has read what this consumer wrote
                if (thread == 0) {
                    tma_store_wait_read<0>();
                    if (CLUSTER == 1) mbarrier_arrive(&empty[held], WARPGROUP);
                    else for (int r = 0; r < CLUSTER; ++r) mbarrier_arrive_at(&empty[held], r, WARPGROUP);
                }
                held = -1;
            };

            const int output = consumer * MI * 64 + 16 * warp + lane / 4;  // of the block's tile, for i = h = 0 (see acc)
            const int row = 2 * (lane % 4);
            // This thread's piece of a wgmma tile's metadata: see pack_24.
            const char* const pieces = e_tiles + consumer * MI * PIECE_BYTES<sizeof(T)> +
                                       (sizeof(T) == 1 ? thread : warp * 16 + lane / 4 * 2 + lane % 2) * 8;
            const unsigned nothing = flags >> 31;  // zero, which the compiler does not know
            unsigned even[MI][STEPS_24], odd[MI][STEPS_24];
            zero(even), zero(odd);
            for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += clusters) {
                int m0, n0;
                place(tile, m0, n0);
                Sum acc[MI][BB / 2];
                auto together = [&] { barrier_sync(OWN + consumer, WARPGROUP); };
                if (k_count == 0) zero(acc);
                epilogue.begin(rows + consumer * BB * Epilogue::ROW_BYTES, m0, thread, together);
                epilogue.outputs(n0 + output);
                int previous = 0;
                // Begin the products of stage k, and wait for those before; this set of registers is theirs.
                auto multiply = [&](unsigned (&metadata)[MI][STEPS_24], int k) {
                    mbarrier_wait(&full[stage], phase);
#pragma unroll
                    for (int i = 0; i < MI; ++i) {
                        const uint2 piece = *reinterpret_cast<const uint2*>(pieces + stage * E_BYTES +
                                                                            i * PIECE_BYTES<sizeof(T)>);
                        metadata[i][0] = piece.x | (metadata[i][0] & nothing);
                        metadata[i][1] = piece.y | (metadata[i][1] & nothing);
                    }
                    const char* const xs = x_tiles + stage * X_BYTES;
                    const char* const ws = w_tiles + stage * W_BYTES + consumer * MI * 64 * KEPT;
                    wgmma_fence();
#pragma unroll
                    for (int kk = 0; kk < STEPS_24; ++kk) {
                        const auto b = wgmma_descriptor(xs + kk * 64, 16);
#pragma unroll
                        for (int i = 0; i < MI; ++i) {
                            const auto a = wgmma_descriptor_64(ws + i * 64 * KEPT + kk * 32);
                            wgmma_24<T, U, BB>(acc[i], a, b, metadata[i][kk], kk > 0 || k > k_first);
                        }
                    }
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (k > k_first) release(&empty[previous]);
                    previous = stage;
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                };
                for (int k = k_first; k < k_end;) {
                    multiply(even, k++);
                    if (!APART && k == k_first + 1 && held >= 0) give_back();
                    if (k == k_end) break;
                    multiply(odd, k++);
                }
                wgmma_wait<0>();
                if (APART && k_count > 0) release(&empty[previous]);

                // acc[i][4 j + c + 2 h] is output 16 * warp + lane / 4 + 8 h of wgmma tile i, batch row
                // 8 j + 2 * (lane % 4) + c of the tile.
                if (SPLIT == 1 || rank == 0) epilogue.correct(acc, row);

                if constexpr (SPLIT > 1) {
                    // Lay the sums out by register and thread; each block then adds up its share of the registers over
                    // the cluster, in rank order. The stages' memory is free: all loads of this (only) tile have landed.
                    constexpr int QUADS = MI * BB / 8;
                    auto* const sums = reinterpret_cast<uint4*>(shared) + consumer * QUADS * WARPGROUP + thread;
                    barrier_sync(ALL, CONSUMERS * WARPGROUP);
#pragma unroll
                    for (int q = 0; q < QUADS; ++q) {
                        const Sum* d = &acc[q / (BB / 8)][q % (BB / 8) * 4];
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
                        const int at = row + q % (BB / 8) * 8, m = m0 + at;
                        const int first = n0 + output + q / (BB / 8) * 64;
                        epilogue.outputs(first);
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            Value low, high;
                            epilogue.finish(0, h, at, total[2 * h], total[2 * h + 1], low, high);
                            if (epilogue.activates)
                                low = epilogue.activated(0, h, low), high = epilogue.activated(0, h, high);
                            const int n = first + 8 * h;
                            if (n >= N) continue;
                            O* const to = y + static_cast<long long>(m) * N + n;
                            if (m < M) to[0] = epilogue.out(low);
                            if (m + 1 < M) to[N] = epilogue.out(high);
                        }
                    }
                } else {
                    // Two panels are a consumer's own, swizzled: one is written while the copy engine, which clips at
                    // the matrix's edge, reads the other.
                    if (!APART) {
                        barrier_sync(ALL, CONSUMERS * WARPGROUP);  // all products of the last stage are done
                        held = previous;
                    }
                    char* const mine = (APART ? y_tile : x_tiles + previous * X_BYTES) + consumer * 2 * PANEL_BYTES;
#pragma unroll
                    for (int p = 0; p < MI * BB / PR; ++p) {
                        const int i = p / (BB / PR), first = p % (BB / PR) * PR;
                        const int panel_m = m0 + first, panel_n = n0 + (consumer * MI + i) * 64;
                        char* const panel = mine + p % 2 * PANEL_BYTES;
                        Value values[PR / 8][2][2];  // by groups of eight batch rows, outputs, batch rows
#pragma unroll
                        for (int j = 0; j < PR / 8; ++j) {
#pragma unroll
                            for (int h = 0; h < 2; ++h) {
                                const Sum* d = &acc[i][first / 2 + j * 4 + h * 2];
                                Value* const v = values[j][h];
                                epilogue.finish(i, h, first + row + j * 8, d[0], d[1], v[0], v[1]);
                            }
                        }
                        if (epilogue.activates) {  // asking at each value would cost those that have none
#pragma unroll
                            for (int j = 0; j < PR / 8; ++j) {
#pragma unroll
                                for (int h = 0; h < 2; ++h) {
                                    values[j][h][0] = epilogue.activated(i, h, values[j][h][0]);
                                    values[j][h][1] = epilogue.activated(i, h, values[j][h][1]);
                                }
                            }
                        }
                        if constexpr (sizeof(O) == 2) {
#pragma unroll
                            for (int j = 0; j < PR / 8; j += 2) {
                                unsigned r[4];
#pragma unroll
                                for (int h = 0; h < 4; ++h) {
                                    const Value* v = values[j + h / 2][h % 2];
                                    r[h] = packed(epilogue.pair(v[0], v[1]));
                                }
                                const int to_row = 8 * (j + lane / 16) + lane % 8, chunk = 2 * warp + lane / 8 % 2;
                                stmatrix_x4_transposed(panel + to_row * 128 + (chunk ^ to_row % 8) * 16, r[0], r[1],
                                                       r[2], r[3]);
                            }
                        } else {
#pragma unroll
                            for (int e = 0; e < PR / 4; ++e) {
                                const int h = e % 2, j = e / 2;
                                const int byte = (16 * warp + 8 * h + lane / 4) * sizeof(O), chunk = byte / 16;
#pragma unroll
                                for (int c = 0; c < 2; ++c) {
                                    const int to_row = 8 * j + row + c;
                                    // 4-byte outputs fill two panels of 128-byte rows, single bytes one of 64-byte rows
                                    const int at = sizeof(O) == 4 ? chunk / 8 * PR * 128 + to_row * 128 +
                                                                        (chunk % 8 ^ to_row % 8) * 16
                                                                  : to_row * 64 + (chunk ^ to_row / 2 % 4) * 16;
                                    *reinterpret_cast<O*>(panel + at + byte % 16) = epilogue.out(values[j][h][c]);
                                }
                            }
                        }
                        fence_proxy_async();
                        // Behind this barrier the panel is whole, and the next one may be written.
                        if (thread == 0) tma_store_wait_read<0>();
                        together();
                        if (!(flags & TMA_STORE)) {
                            copy_panel_24<PR>(panel, y, panel_m, panel_n, M, N, thread);
                            if (!APART) together();  // before thread 0 gives the stage back
                        } else if (thread == 0) {
                            tma_store(&y_map, panel, panel_n, panel_m);
                            if (sizeof(O) == 4) tma_store(&y_map, panel + PR * 128, panel_n + 32, panel_m);
                            tma_store_commit();
                        }
                    }
                }
            }
            if (SPLIT == 1 && thread == 0) tma_store_wait_read<0>();
        }
        if (SPLIT > 1 && warpgroup == 0) cluster_sync();  // pairs with the consumers' before they add up
        if (CLUSTER > 1) cluster_sync();               // no block leaves while another may still reach its memory
    }
};
