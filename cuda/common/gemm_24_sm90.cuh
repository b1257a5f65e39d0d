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
//   a stage    holds 128 bytes of each row of x (128-byte swizzled) and the 64 of w that meet them (64-byte swizzled).
//   metadata   never see shared memory. They lie as `pack_24` leaves them, so that a thread fetches its own of a wgmma
//              tile and BLOCK stages in one piece of 16 bytes, straight into registers, AHEAD pieces ahead of use.
//              The instruction reads its register of metadata when it runs, not when it is issued, and the compiler does
//              not know: stages take turns with two sets of registers, and a set is used once more (`& nothing`) when
//              it is written anew, so that it lives until its products are done.
//
// The EPILOGUE has
//   Sum, Value, Out        as in gemm_sm90.cuh;
//   ROW_BYTES              the shared memory it wants for each batch row of a tile and consumer;
//   begin(rows, m0, ...)   before a tile's products: fetch what its batch rows need into that memory;
//   outputs(n)             the same for this thread's outputs, n + 64 i + 8 h for i < MI and h < 2;
//   correct(sums, row)     change the whole sums, row being this thread's first batch row in the tile;
//   finish(i, h, row, a, b, low, high)   the values of two neighbouring batch rows' sums a and b;
//   out, pair              one value, or two, as they are stored.
#pragma once
#include "gemm_sm90.cuh"
#include "wgmma_24.cuh"

constexpr int KEPT = ROW / 2;       // bytes of w in a stage, of each row
constexpr int BLOCK = 2;            // stages whose metadata a thread fetches at once
constexpr int STEPS_24 = ROW / 64;  // one wgmma takes 64 bytes of a row of x
constexpr int PANEL_ROWS = 32;      // batch rows that leave at once

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

// Metadata are packed in pieces of 16 bytes, so many for 64 outputs and a block of stages.
template <int SIZE> constexpr int PIECES = SIZE == 1 ? 128 : 64;

// Pack metadata (n, bytes), rows `stride` bytes apart, for values of SIZE bytes: piece p of block b of wgmma tile t is
// packed[(t * blocks + b) * PIECES + p]. A piece holds what a thread hands to the four instructions of a block; with g
// for row 16 * (its warp) + (lane / 4) of the tile and q for lane % 4, that is
//   SIZE 1   word 2 j + q / 2 of row g + q % 2 * 8;                                            p = thread
//   SIZE 2   half-word 2 j + q % 2 of row g, and above it that of row g + 8;                   p = thread / 4 * 2 + q % 2
// for j = 0 to 3 (PTX ISA, "Matrix fragments for sparse wgmma"). Beyond the matrix columns 0 and 1 are kept.
template <int SIZE>
__global__ void __launch_bounds__(256)
pack_24(const unsigned char* __restrict__ metadata, long long stride, uint4* __restrict__ packed, int n, int bytes,
        int blocks) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int p = at % PIECES<SIZE>, b = at / PIECES<SIZE> % blocks;
    const long long t = at / PIECES<SIZE> / blocks;
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
    unsigned words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int unit = (b * 4 + j) * 2;
        words[j] = SIZE == 1 ? bits(q % 2 * 8, (unit + q / 2) * 4)
                             : bits(0, (unit + q) * 2) | bits(8, (unit + q) * 2) << 16;
    }
    packed[at] = make_uint4(words[0], words[1], words[2], words[3]);
}

// T and U are the types of w and x.
template <typename T, typename U, int BO, int BB, int CONSUMERS, int STAGES, int CO, int SPLIT, int PANELS,
          class Epilogue>
struct Pipeline24 {
    using O = typename Epilogue::Out;
    using Sum = typename Epilogue::Sum;
    using Value = typename Epilogue::Value;
    static constexpr int MI = BO / (64 * CONSUMERS);
    static constexpr int CLUSTER = CO * SPLIT;
    static constexpr int BK = ROW / sizeof(U);
    static constexpr int AHEAD = MI == 1 ? 2 : 1;  // blocks of metadata that are fetched ahead
    static constexpr int X_BYTES = BB * ROW, W_BYTES = BO * KEPT, STAGE_BYTES = X_BYTES + W_BYTES;
    static constexpr int PR = BB < PANEL_ROWS ? BB : PANEL_ROWS;
    static constexpr int PANEL_BYTES = PR * 64 * sizeof(O);  // 64 outputs wide
    static constexpr int Y_BYTES = SPLIT == 1 ? CONSUMERS * PANELS * PANEL_BYTES : 0;
    static constexpr int SHARED =
        STAGES * (STAGE_BYTES + 16) + Y_BYTES + CONSUMERS * BB * Epilogue::ROW_BYTES + 1024;
    static_assert(CONSUMERS <= 2, "the registers are divided among two consumers at most");
    static_assert(BO == 64 * CONSUMERS * MI, "consumers divide the tile into whole 64-output wgmma tiles");
    static_assert(MI * BB <= 256, "a consumer's accumulators must fit its registers");
    static_assert(SPLIT == 1 || CO == 1, "a cluster either splits K or multicasts");
    static_assert(SPLIT == 1 || BO * BB * 4 <= STAGES * STAGE_BYTES, "split sums reuse the stages' memory");
    static_assert(BB % PR == 0 && BB / CO % 8 == 0, "whole swizzle atoms are loaded and stored");
    static_assert(SHARED <= 227 * 1024, "more shared memory than Hopper gives a block");

    static __device__ __forceinline__ void run(const TensorMap& x_map, const TensorMap& w_map, const uint4* e,
                                               const TensorMap& y_map, O* y, int M, int N, int K, int flags, int group,
                                               Epilogue epilogue) {
        extern __shared__ char raw[];
        char* const shared = raw + (1024 - shared_address(raw) % 1024) % 1024;  // swizzle atoms are 1,024 bytes
        char* const x_tiles = shared;
        char* const w_tiles = x_tiles + STAGES * X_BYTES;
        char* const y_tile = w_tiles + STAGES * W_BYTES;
        char* const rows = y_tile + Y_BYTES;  // BB times ROW_BYTES a consumer
        auto* const full = reinterpret_cast<unsigned long long*>(rows + CONSUMERS * BB * Epilogue::ROW_BYTES);
        auto* const empty = full + STAGES;

        const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0;
        const int co = SPLIT > 1 ? 0 : rank;
        if (threadIdx.x == 0) {
            tma_prefetch(&x_map);
            tma_prefetch(&w_map);
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(&full[s], 1);
                mbarrier_init(&empty[s], CONSUMERS * CO);
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
        const int k_blocks = (k_tiles + BLOCK - 1) / BLOCK;
        const int k_share = (k_blocks + SPLIT - 1) / SPLIT * BLOCK;  // whole blocks of metadata
        const int k_first = SPLIT > 1 ? static_cast<int>(rank) * k_share : 0;
        const int k_count = max(0, min(k_share, k_tiles - k_first)), k_end = k_first + k_count;

        if (warpgroup == 0) {
            if (CONSUMERS > 1) give_registers<40>();
            if (threadIdx.x == 0) {
                int stage = 0;
                unsigned phase = 0;
                for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += clusters) {
                    int m, n;
                    place(tile, m, n);
                    for (int k = k_first; k < k_end; ++k) {
                        mbarrier_wait(&empty[stage], phase ^ 1);
                        mbarrier_expect_bytes(&full[stage], STAGE_BYTES);
                        char* const x_tile = x_tiles + stage * X_BYTES + co * (BB / CO) * ROW;
                        const int row = m + co * (BB / CO);
                        if (CO == 1) tma_load(x_tile, &x_map, &full[stage], k * BK, row);
                        else tma_load_multicast(x_tile, &x_map, &full[stage], k * BK, row, (1 << CO) - 1);
                        tma_load(w_tiles + stage * W_BYTES, &w_map, &full[stage], k * BK / 2, n);
                        if (++stage == STAGES) stage = 0, phase ^= 1;
                    }
                }
            }
        } else {
            if (CONSUMERS > 1) take_registers<232>();
            const int consumer = warpgroup - 1;
            const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, warp = thread / 32;
            int stage = 0;
            unsigned phase = 0;
            // Memory is free once every consumer that read it, here and where this block sends to, has said so.
            auto release = [&](unsigned long long* barrier) {
                if (CLUSTER == 1 || SPLIT > 1) {
                    if (thread == 0) mbarrier_arrive(barrier);
                } else if (thread < CLUSTER) {
                    mbarrier_arrive_at(barrier, thread);
                }
            };

            const int output = consumer * MI * 64 + 16 * warp + lane / 4;  // of the block's tile, for i = h = 0 (see acc)
            const int row = 2 * (lane % 4);
            // This thread's piece of a wgmma tile's metadata: see pack_24.
            e += sizeof(T) == 1 ? thread : warp * 16 + lane / 4 * 2 + lane % 2;
            const int last = (N + 63) / 64 - 1;
            uint4 coming[AHEAD][MI];
            auto fetch = [&](uint4 (&to)[MI], int n0, int block) {
#pragma unroll
                for (int i = 0; i < MI; ++i)
                    to[i] = __ldg(e + (static_cast<long long>(min(n0 / 64 + consumer * MI + i, last)) * k_blocks +
                                       min(block, k_blocks - 1)) * PIECES<sizeof(T)>);
            };
            auto fetch_first = [&](int tile) {
                if (tile >= tiles || k_count == 0) return;
                int m, n;
                place(tile, m, n);
#pragma unroll
                for (int p = 0; p < AHEAD; ++p) fetch(coming[p], n, k_first / BLOCK + p);
            };
            fetch_first(blockIdx.x / CLUSTER);
            const unsigned nothing = flags >> 31;  // zero, which the compiler does not know
            unsigned even[MI][STEPS_24], odd[MI][STEPS_24];
            zero(even), zero(odd);
            for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += clusters) {
                int m0, n0;
                place(tile, m0, n0);
                Sum acc[MI][BB / 2];
                if (k_count == 0) zero(acc);
                auto together = [&] { barrier_sync(OWN + consumer, WARPGROUP); };
                epilogue.begin(rows + consumer * BB * Epilogue::ROW_BYTES, m0, thread, together);
                epilogue.outputs(n0 + output);
                int previous = 0;
                // Begin the products of stage k, whose metadata are the first or the second half of a piece, and wait for
                // those before; this set of registers is theirs.
                auto multiply = [&](unsigned (&metadata)[MI][STEPS_24], const uint4 (&block)[MI], int half, int k) {
#pragma unroll
                    for (int i = 0; i < MI; ++i) {
                        metadata[i][0] = (half ? block[i].z : block[i].x) | (metadata[i][0] & nothing);
                        metadata[i][1] = (half ? block[i].w : block[i].y) | (metadata[i][1] & nothing);
                    }
                    mbarrier_wait(&full[stage], phase);
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
#pragma unroll
                    for (int p = 0; p < AHEAD; ++p) {
                        multiply(even, coming[p], 0, k++);
                        if (k == k_end) goto begun;
                        multiply(odd, coming[p], 1, k++);
                        if (k == k_end) goto begun;
                        fetch(coming[p], n0, k / BLOCK + AHEAD - 1);
                    }
                }
            begun:
                fetch_first(tile + clusters);
                wgmma_wait<0>();
                if (k_count > 0) release(&empty[previous]);

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
                            const int n = first + 8 * h;
                            if (n >= N) continue;
                            O* const to = y + static_cast<long long>(m) * N + n;
                            if (m < M) to[0] = epilogue.out(low);
                            if (m + 1 < M) to[N] = epilogue.out(high);
                        }
                    }
                } else {
                    // Panels of PR batch rows and 64 outputs are a consumer's own, swizzled, PANELS of them in turn: one
                    // is written while the copy engine, which clips at the matrix's edge, reads the others.
                    char* const mine = y_tile + consumer * PANELS * PANEL_BYTES;
#pragma unroll
                    for (int p = 0; p < MI * BB / PR; ++p) {
                        const int i = p / (BB / PR), first = p % (BB / PR) * PR;
                        const int panel_m = m0 + first, panel_n = n0 + (consumer * MI + i) * 64;
                        char* const panel = mine + p % PANELS * PANEL_BYTES;
                        if (thread == 0) tma_store_wait_read<PANELS - 1>();
                        together();
                        auto two = [&](int h, int j, Value& low, Value& high) {
                            const Sum* d = &acc[i][first / 2 + j * 4 + h * 2];
                            epilogue.finish(i, h, first + row + j * 8, d[0], d[1], low, high);
                        };
                        if constexpr (sizeof(O) == 2) {
#pragma unroll
                            for (int j = 0; j < PR / 8; j += 2) {
                                unsigned r[4];
#pragma unroll
                                for (int h = 0; h < 4; ++h) {
                                    Value low, high;
                                    two(h % 2, j + h / 2, low, high);
                                    r[h] = packed(epilogue.pair(low, high));
                                }
                                const int to_row = 8 * (j + lane / 16) + lane % 8, chunk = 2 * warp + lane / 8 % 2;
                                stmatrix_x4_transposed(panel + to_row * 128 + (chunk ^ to_row % 8) * 16, r[0], r[1],
                                                       r[2], r[3]);
                            }
                        } else {
#pragma unroll
                            for (int e = 0; e < PR / 4; ++e) {
                                const int h = e % 2, j = e / 2;
                                Value low, high;
                                two(h, j, low, high);
                                const int byte = (16 * warp + 8 * h + lane / 4) * sizeof(O), chunk = byte / 16;
#pragma unroll
                                for (int c = 0; c < 2; ++c) {
                                    const int to_row = 8 * j + row + c;
                                    // 4-byte outputs fill two panels of 128-byte rows, single bytes one of 64-byte rows
                                    const int at = sizeof(O) == 4 ? chunk / 8 * PR * 128 + to_row * 128 +
                                                                        (chunk % 8 ^ to_row % 8) * 16
                                                                  : to_row * 64 + (chunk ^ to_row / 2 % 4) * 16;
                                    *reinterpret_cast<O*>(panel + at + byte % 16) = epilogue.out(c ? high : low);
                                }
                            }
                        }
                        fence_proxy_async();
                        together();
                        if (!(flags & TMA_STORE)) {
                            for (int e = thread; e < PR * 64; e += WARPGROUP) {
                                const int from_row = e / 64, byte = e % 64 * sizeof(O), chunk = byte / 16;
                                const int m = panel_m + from_row, n = panel_n + e % 64;
                                const int at = sizeof(O) == 1 ? from_row * 64 + (chunk ^ from_row / 2 % 4) * 16
                                                              : chunk / 8 * PR * 128 + from_row * 128 +
                                                                    (chunk % 8 ^ from_row % 8) * 16;
                                if (m < M && n < N)
                                    y[static_cast<long long>(m) * N + n] =
                                        *reinterpret_cast<const O*>(panel + at + byte % 16);
                            }
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
