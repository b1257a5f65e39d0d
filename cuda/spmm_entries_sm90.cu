// y = act(x · wᵀ + bias) for some dozens of rows of x and w in tiles of entries, on Hopper's tensor cores.
//
//   x_map: x (M, K), half or bfloat16, in boxes of `box` rows and 64 columns; entries, offsets: tiles of w (N, K), see
//   qsparse/kernels/_entry_tiles.py; bias (N,) or null; y (M, N) row-major, of x's type or float.
//
// The ideas:
//   once for all rows   a block has 64 rows of w and 64 of x: a tile is written out in shared memory once, and is the
//                       right operand as it lies there. What all blocks read of x is what limits such products, so a
//                       block has two tiles on top of each other, and where blocks are few the SPLIT blocks of a
//                       cluster divide K. They add up through distributed shared memory, in a fixed order.
//   roles               16 warps write tiles out, each into rooms of its own; a warp starts the loads of x; two
//                       warpgroups do nothing but multiply, K's parts in turns, the first tile of each part before the
//                       second.
//   late returns        to wait for a product before the next is under way would cost as much as the product. So a room
//                       is given back when LATE further products have begun.

#include "common/dependent.cuh"
#include "common/weight_tiles_sm80.cuh"
#include "common/wgmma.cuh"

constexpr int ROWS = 64;                                // of x and of w, of a block
constexpr int WRITERS = 16, PARTS = WRITERS / 2;        // warps that write tiles out, two for each part of K
constexpr int GROUPS = 2, MULTIPLIERS = 128 * GROUPS;   // warpgroups that multiply, and their threads
constexpr int ROOMS = 2, PANEL_BYTES = 2 * TILE_BYTES;  // two tiles, for each part and room
constexpr int X_BYTES = ROWS * TILE_COLUMNS * 2;        // for each part
constexpr int ROUNDS = 2;                               // of 32 chunks of 4 entries, that are fetched ahead
constexpr int LATE = 2;
static_assert(PARTS / GROUPS > LATE, "a room is given back before it is wanted again");

struct Barriers {
    unsigned long long full[PARTS * ROOMS], empty[PARTS * ROOMS], x_full[PARTS], x_empty[PARTS], sums;
};

// As `mbarrier_wait` and `mbarrier_arrive`, by addresses, which are found once: from a pointer each would ask again for
// the block's place in its cluster.
__device__ __forceinline__ void wait_at(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void arrive_at(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// All threads of a block are here before one of the cluster's sends it something.
template <int SPLIT> __device__ __forceinline__ void arrive_in_cluster() {
    if constexpr (SPLIT > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
template <int SPLIT> __device__ __forceinline__ void wait_for_cluster() {
    if constexpr (SPLIT > 1) cluster_wait();
}

// Where an entry belongs in a tile that is a right operand: rows of 128 bytes, whose chunks of 16 are swizzled. It says
// so for mma's left operand, see `place` in qsparse/kernels/_weight_tiles_sm80.py.
__device__ __forceinline__ unsigned place_of(unsigned entry) {
    const unsigned place = entry >> 16, row = place & 0x1c0;  // modulo 8
    return ((place & 0x832) | row << 1 | (place & 4) << 8 | (place & 8) >> 1 | (place >> 6 & 8) | (place >> 4 & 0x40)) ^
           row >> 2;
}

// A warp's tiles, `share` that follow each other along K; lane i knows where tile i `starts`, in chunks. Its first room
// is `room0`; `full` and `empty` are the barriers of its part.
__device__ __forceinline__ void write_out(const uint4* __restrict__ entries, int starts, unsigned room0, unsigned full,
                                          unsigned empty, int share) {
    const int lane = threadIdx.x % WARP;
    const auto begin_of = [&](int t) { return __shfl_sync(~0u, starts, t); };
    uint4 now[ROUNDS], next[ROUNDS];
    const auto load = [&](uint4 (&to)[ROUNDS], int t) {
        const int start = begin_of(t), size = begin_of(t + 1) - start;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (r * WARP + lane < size) to[r] = __ldg(entries + start + r * WARP + lane);
    };
    clear_tile(room0);
    load(now, 0);
#pragma unroll
    for (int r = 1; r < ROOMS; ++r) clear_tile(room0 + r * PANEL_BYTES);
    if (share > 1) load(next, 1);
    __syncwarp();
#pragma unroll 1
    for (int t = 0; t < share; ++t) {
        const unsigned room = room0 + t % ROOMS * PANEL_BYTES;
        if (t >= ROOMS) {
            wait_at(empty + t % ROOMS * 8, t / ROOMS - 1 & 1);
            clear_tile(room);
            __syncwarp();
        }
        const auto put = [&](uint4 e) {
            store_half(room + place_of(e.x), e.x), store_half(room + place_of(e.y), e.y);
            store_half(room + place_of(e.z), e.z), store_half(room + place_of(e.w), e.w);
        };
        const int start = begin_of(t), size = begin_of(t + 1) - start;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
            if (r * WARP + lane < size) put(now[r]);
#pragma unroll 1
        for (int at = ROUNDS * WARP + lane; at < size; at += WARP) put(__ldg(entries + start + at));
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) arrive_at(full + t % ROOMS * 8);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) now[r] = next[r];
        if (t + 2 < share) load(next, t + 2);
    }
}

// A warpgroup's parts of K: the sums of 64 rows of x and 64 of w, as wgmma leaves them.
template <typename T>
__device__ __forceinline__ void multiply(float (&sums)[1][ROWS / 2], const char* panels, const char* x_tiles,
                                         const Barriers& barriers, int group, int share) {
    const unsigned long long x0 = wgmma_descriptor(x_tiles + group * X_BYTES, 16);
    const unsigned long long w0 = wgmma_descriptor(panels + group * ROOMS * PANEL_BYTES, 16);
    const unsigned full0 = shared_address(&barriers.full[group * ROOMS]);
    const unsigned x_full0 = shared_address(&barriers.x_full[group]);
    unsigned late[LATE][2] = {};  // barriers of the products begun last: of w's room, of x
#pragma unroll 1
    for (int t = 0; t < share; ++t) {
        const int room = t % ROOMS;
#pragma unroll
        for (int part = 0; part < PARTS; part += GROUPS) {  // of the group, whose first is `group`
            const unsigned full = full0 + (part * ROOMS + room) * 8, x_full = x_full0 + part * 8;
            wait_at(x_full, t & 1);
            wait_at(full, t / ROOMS & 1);
            __syncwarp();
            const unsigned long long x = x0 + part * (X_BYTES / 16);
            const unsigned long long w = w0 + (part * ROOMS + room) * (PANEL_BYTES / 16);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < TILE_COLUMNS / 16; ++step)
                wgmma<T, ROWS, 0, 0>(sums[0], x + 2 * step, w + 2 * step, 1);
            wgmma_commit();
            wgmma_wait<LATE>();
            if (threadIdx.x % WARP == 0 && late[0][0]) arrive_at(late[0][0]), arrive_at(late[0][1]);
#pragma unroll
            for (int i = 0; i + 1 < LATE; ++i) late[i][0] = late[i + 1][0], late[i][1] = late[i + 1][1];
            late[LATE - 1][0] = full + sizeof(barriers.full), late[LATE - 1][1] = x_full + sizeof(barriers.x_full);
        }
    }
    wgmma_wait<0>();
    settle(sums);
}

template <typename T, typename O, int SPLIT>
__global__ void __launch_bounds__(MULTIPLIERS + WARP * (WRITERS + 1), 1)
spmm_entries_sm90(const __grid_constant__ TensorMap x_map, int box, const uint4* __restrict__ entries,
                  const int* __restrict__ offsets, const T* __restrict__ bias, O* __restrict__ y, int M, int N, int K,
                  int relu, int strips, int share) {
    constexpr int SOURCES = SPLIT * GROUPS, ACROSS = ROWS / 8 / SPLIT;  // eights of columns that a block adds up
    extern __shared__ __align__(1024) char memory[];
    __shared__ Barriers barriers;
    char* const panels = memory + (1024 - (shared_address(memory) & 1023) & 1023);
    char* const x_tiles = panels + PARTS * ROOMS * PANEL_BYTES;
    float4* const sums = reinterpret_cast<float4*>(x_tiles + PARTS * X_BYTES);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int wide = (K + TILE_COLUMNS - 1) / TILE_COLUMNS, tall = (strips + 1) / 2;
    const int rank = SPLIT > 1 ? cluster_rank() : 0;
    int strip = blockIdx.x / SPLIT, m0 = 0;  // in pairs; blocks of the same rows of x are neighbours
    for (; strip >= tall; strip -= tall) m0 += ROWS;

    if (warp == MULTIPLIERS / WARP + WRITERS) {
        for (int i = lane; i < PARTS * ROOMS; i += WARP)
            mbarrier_init(&barriers.full[i], 2), mbarrier_init(&barriers.empty[i], 4);
        if (lane == 0) {
            for (int i = 0; i < PARTS; ++i)
                mbarrier_init(&barriers.x_full[i], 1), mbarrier_init(&barriers.x_empty[i], 4);
            mbarrier_init(&barriers.sums, 1);
        }
        mbarrier_init_fence();
        if (lane == 0) {
            mbarrier_expect_bytes(&barriers.sums, SOURCES * ACROSS * 16 * WARP * min(4, (M - m0 + 15) / 16));
            tma_prefetch(&x_map);
        }
        __syncthreads();
        arrive_in_cluster<SPLIT>();
        let_successor_start();
        wait_for_predecessor();
        if (lane == 0) {
#pragma unroll 1
            for (int t = 0; t < share; ++t)
#pragma unroll 1
                for (int part = 0; part < PARTS; ++part) {
                    if (t) wait_at(shared_address(&barriers.x_empty[part]), t - 1 & 1);
                    mbarrier_expect_bytes(&barriers.x_full[part], box * TILE_COLUMNS * 2);
                    tma_load(x_tiles + part * X_BYTES, &x_map, &barriers.x_full[part],
                             ((rank * PARTS + part) * share + t) * TILE_COLUMNS, m0);
                }
        }
        __syncwarp();
        wait_for_cluster<SPLIT>();
        return;
    }
    if (warp >= MULTIPLIERS / WARP) {
        const int part = (warp - MULTIPLIERS / WARP) / 2, mine = strip * 2 + warp % 2;
        const int first = (rank * PARTS + part) * share;
        int starts = 0;  // lane i: where tile i begins, in chunks
        if (mine < strips && first < wide)
            starts = __ldg(offsets + static_cast<long long>(mine) * wide + min(first + min(lane, share), wide));
        __syncthreads();
        arrive_in_cluster<SPLIT>();
        let_successor_start();
        write_out(entries, starts, shared_address(panels) + part * ROOMS * PANEL_BYTES + warp % 2 * TILE_BYTES,
                  shared_address(&barriers.full[part * ROOMS]), shared_address(&barriers.empty[part * ROOMS]), share);
        wait_for_cluster<SPLIT>();
        return;
    }
    __syncthreads();
    arrive_in_cluster<SPLIT>();
    let_successor_start();
    const int group = warp / 4, thread = threadIdx.x % 128;
    float mine[1][ROWS / 2] = {};
    multiply<T>(mine, panels, x_tiles, barriers, group, share);
    wait_for_cluster<SPLIT>();
    if (m0 + warp % 4 * 16 < M) {
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
            float4* const to = sums + ((rank * GROUPS + group) * ACROSS + j % ACROSS) * 128 + thread;
            const float* const four = &mine[0][j * 4];
            if constexpr (SPLIT == 1) *to = make_float4(four[0], four[1], four[2], four[3]);
            else
                cluster_send(cluster_address(to, j / ACROSS),
                             make_uint4(bits_of(four[0]), bits_of(four[1]), bits_of(four[2]), bits_of(four[3])),
                             cluster_address(&barriers.sums, j / ACROSS));
        }
    }
    __syncwarp();
    if constexpr (SPLIT == 1) barrier_sync(1, MULTIPLIERS);
    else wait_at(shared_address(&barriers.sums), 0);
#pragma unroll
    for (int i = group; i < ACROSS; i += GROUPS) {
        const int m = m0 + warp % 4 * 16 + lane / 4, n = strip * ROWS + (rank * ACROSS + i) * 8 + lane % 4 * 2;
        if (m >= M || n >= N) continue;
        float4 sum = sums[i * 128 + thread];
#pragma unroll
        for (int source = 1; source < SOURCES; ++source) {
            const float4 v = sums[(source * ACROSS + i) * 128 + thread];
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        const float2 add = {bias ? to_float(bias[n]) : 0.0f, bias && n + 1 < N ? to_float(bias[n + 1]) : 0.0f};
        const auto store = [&](int row, float a, float b) {
            a += add.x, b += add.y;
            if (relu) a = relu_of(a), b = relu_of(b);
            O* const to = y + static_cast<long long>(row) * N + n;
            if (N % 2 == 0) *reinterpret_cast<typename Pair<O>::type*>(to) = pair_from<O>(a, b);
            else {
                to[0] = from_float<O>(a);
                if (n + 1 < N) to[1] = from_float<O>(b);
            }
        };
        store(m, sum.x, sum.y);
        if (m + 8 < M) store(m + 8, sum.z, sum.w);
    }
}
