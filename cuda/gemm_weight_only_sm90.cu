// y = act(x · (scale · q)ᵀ + bias) for up to 16 rows of x on Hopper. The weights q are int8, or int4 packed two to a byte,
// and are read once: their way from memory is all that costs.
//
//   x (M, K) half or bfloat16, rows ldx apart; q (N, K) int8, or (N, K / 2) bytes of which column 2 j is the low half and
//   2 j + 1 the high one, rows ldw bytes apart, all on 16 bytes and multiples of them; scale (N, groups) float, one for
//   each `group` pieces (0: one a row); bias (N,) or null; y (M, N) row-major.
//
// The ideas, outermost first:
//   split K               the `split` blocks of a cluster divide K and add up their sums through distributed shared
//                         memory, in a fixed order: no second kernel and no memory in between.
//   streams               each lane copies what it needs of its warp's 16 rows of q to a place of its own in shared
//                         memory, RING pieces ahead of use. Nobody else reads it, so there is no barrier, and a warp
//                         that waits holds up no other.
//   x once                what a block needs of x lies in shared memory, paired and ordered as it will be read.
//   weights first         q is mma's left operand, 16 outputs high, and x the right one, 8 rows wide.
//   columns at will       a sum has no order. So a lane takes the 16 bytes that lie side by side in a row of q and
//                         the x that belongs to them, wherever mma thinks they are.
//   scales in float       a group's sum of products of integers is scaled once, in float, and then added.

#include "common/sm80.cuh"
#include "common/sm90.cuh"
#include "common/weight_only.cuh"

constexpr int WARP = 32;
constexpr int PIECE = 64;  // bytes of a row of q that the four lanes of a quad read at once

constexpr int SLOT = 2 * WARP * (16 + 4);  // bytes of a warp's piece: 16 rows, and a scale each for every lane

// Copy 16 bytes, or none but zeros; and 4 bytes that others will want too.
__device__ __forceinline__ void copy_once(char* to, const char* from, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_scale(char* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ float cluster_load(const float* p, unsigned rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(cluster_address(p, rank)) : "memory");
    return v;
}

// Eight values of a row of x, which may start anywhere. Rare, and not inlined where it would be in the way.
__device__ __noinline__ uint4 load_eight_slowly(const void* from) {
    const unsigned short* const one = static_cast<const unsigned short*>(from);
    return {one[0] | static_cast<unsigned>(one[1]) << 16, one[2] | static_cast<unsigned>(one[3]) << 16,
            one[4] | static_cast<unsigned>(one[5]) << 16, one[6] | static_cast<unsigned>(one[7]) << 16};
}

// `group` is counted in pieces, `inverse` is 2^32 / group rounded up, or 0 for groups of one piece. `phase` pieces of x
// fit shared memory at a time.
template <typename T, int BITS, int COLUMNS, int WARPS, int RING>
__global__ void __launch_bounds__(WARPS * WARP, 1)
gemm_weight_only_sm90(const T* __restrict__ x, long long ldx, int aligned, const char* __restrict__ w, long long ldw,
                      const float* __restrict__ scale, int groups, int group, unsigned inverse,
                      const T* __restrict__ bias, T* __restrict__ y, int M, int N, int K, int relu, int split,
                      int phase) {
    constexpr int THREADS = WARPS * WARP, BN = WARPS * 16, PITCH = BN + 4;  // of the sums: 2 rows are 8 banks apart
    constexpr int COLS = PIECE * 8 / BITS, UNITS = 16 / BITS;  // columns of a piece; eights of columns that a lane has
    extern __shared__ __align__(128) char shared[];

    const int part = split > 1 ? cluster_rank() : 0, n0 = blockIdx.x / split * BN;
    const int pieces = (K + COLS - 1) / COLS, share = (pieces + split - 1) / split;
    const int begin = min(part * share, pieces), end = min(begin + share, pieces);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;

    const char* row[2];  // where this lane reads next, and its rows' scales
    const float* row_scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const long long n = min(n0 + warp * 16 + h * 8 + g, N - 1);
        row[h] = w + n * ldw + begin * PIECE + t * 16;
        row_scale[h] = scale + n * groups;
    }
    int left = min(K, end * COLS) - begin * COLS - t * (COLS / 4);  // columns from there to the end
    // Start copying the next piece, whose number this is; beyond the end zeros, which add nothing.
    char* const slots = shared + warp * (RING * SLOT) + lane * 16;
    auto copy = [&](char* slot, int piece) {
        const bool inside = left > 0;
        copy_once(slot, row[0], inside);
        copy_once(slot + WARP * 16, row[1], inside);
        if (group) {
            const int at = min(inverse ? static_cast<int>(__umulhi(piece, inverse)) : piece, groups - 1);
            copy_scale(slot + WARP * 32 - lane * 12, row_scale[0] + at);
            copy_scale(slot + WARP * 36 - lane * 12, row_scale[1] + at);
        }
        copy_commit();
        row[0] += PIECE, row[1] += PIECE, left -= COLS;
    };
#pragma unroll
    for (int i = 0; i < RING; ++i) copy(slots + i * SLOT, begin + i);

    // Eight columns of a row are a unit of 16 bytes. Those that the lanes of a warp read at once lie side by side.
    const int line = (M | 1) * 64;  // an odd number of 64 bytes: units are also written without bank conflicts
    char* const x_units = shared + WARPS * RING * SLOT;
    const char* x_lane[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) x_lane[j] = x_units + min(j * 8 + g, M - 1) * 64 + t * 16;

    // total: what is scaled already, of the groups before; sum: of the present piece, or of all where a row has one scale.
    float total[COLUMNS][4] = {}, sum[COLUMNS][4] = {};
    char* slot = slots;
    for (int first = begin; first < end; first += phase) {
        const int last = min(first + phase, end), units = (last - first) * (4 * UNITS);
        if (first > begin) __syncthreads();
        // Side by side as many threads as a row has units, and so many rows at once.
        const int wide = min(32 - __clz(units - 1), 31 - __clz(THREADS)), rows = THREADS >> wide;
        for (int i = threadIdx.x & ((1 << wide) - 1); i < units; i += 1 << wide) {
            const int piece = i / (4 * UNITS), quad = i % 4, u = i / 4 % UNITS;
            const int k = (first + piece) * COLS + quad * (8 * UNITS) + u * 8, m0 = threadIdx.x >> wide;
            const T* from = x + m0 * ldx + k;
            char* to = x_units + (piece * UNITS + u) * line + m0 * 64 + quad * 16;
#pragma unroll 8
            for (int m = m0; m < M; m += rows) {
                uint4 eight = {0, 0, 0, 0};
                if (k < K) eight = aligned ? *reinterpret_cast<const uint4*>(from) : load_eight_slowly(from);
                *reinterpret_cast<uint4*>(to) = paired<BITS>(eight);
                from += rows * ldx, to += rows * 64;
            }
        }
        __syncthreads();
        int at = 0;
#pragma unroll 2
        for (int piece = first; piece < last; ++piece) {
            copy_wait<RING - 1>();
            using Eight = typename Words<BITS>::type;
            Eight q[2][UNITS];
            float scales[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                *reinterpret_cast<uint4*>(q[h]) = *reinterpret_cast<const uint4*>(slot + h * WARP * 16);
                scales[h] = *reinterpret_cast<const float*>(slot + WARP * (32 + 4 * h) - lane * 12);
            }
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                unsigned a[2][4];
                unpack<T>(q[0][u], a[0]);
                unpack<T>(q[1][u], a[1]);
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    const uint4 b = *reinterpret_cast<const uint4*>(x_lane[j] + at);
                    mma<T>(sum[j], {a[0][0], a[1][0], a[0][1], a[1][1]}, b.x, b.y);
                    mma<T>(sum[j], {a[0][2], a[1][2], a[0][3], a[1][3]}, b.z, b.w);
                }
                at += line;
            }
            if (group) {
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        total[j][e] = fmaf(scales[e / 2], sum[j][e], total[j][e]);
                        sum[j][e] = 0.0f;
                    }
            }
            copy(slot, piece + RING);
            slot = slot == slots + (RING - 1) * SLOT ? slots : slot + SLOT;
        }
    }

    // The sums take the place of x; the blocks of the cluster share out what is to be added up.
    copy_wait<0>();
    __syncthreads();
    float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            sums[(j * 8 + t * 2 + e % 2) * PITCH + warp * 16 + g + e / 2 * 8] = group ? total[j][e] : sum[j][e];
    if (split > 1) cluster_sync();
    else __syncthreads();
#pragma unroll 1
    for (int i = part * THREADS + threadIdx.x; i < M * BN; i += split * THREADS) {
        const int m = i / BN, c = i % BN, n = n0 + c;
        if (n >= N) continue;
        float value = 0.0f;
        if (split > 1) {
#pragma unroll 4
            for (int p = 0; p < split; ++p) value += cluster_load(sums + m * PITCH + c, p);
        } else {
            value = sums[m * PITCH + c];
        }
        if (!group) value *= scale[n];
        if (bias) value += to_float(bias[n]);
        y[static_cast<long long>(m) * N + n] = from_float<T>(relu ? relu_of(value) : value);
    }
    if (split > 1) cluster_sync();  // others read this block's sums
}
