// y = act(x · (scale · q)ᵀ + bias) for up to 16 rows of x on Hopper. The weights q are int8, or int4 packed two to a byte,
// and are read once: their way from memory is all that costs.
//
//   x (M, K) half or bfloat16, rows ldx apart; q (N, K) int8, or (N, K / 2) bytes of which column 2 j is the low half and
//   2 j + 1 the high one, rows ldw bytes apart, all on 16 bytes and multiples of them; scale (N, groups) float, one for
//   each `group` half pieces (0: one a row); bias (N,) or null; y (M, N) row-major.
//
// The ideas, outermost first:
//   split K               the `split` blocks of a cluster divide K and add up their sums through distributed shared
//                         memory, in a fixed order: no second kernel and no memory in between.
//   streams               a warp copies the pieces of its own 16 rows of q to shared memory, RING ahead of use. No
//                         other warp needs them, so there is no barrier, and a warp that waits holds up nobody.
//   first to go           what is read once need not stay in L2, and must not drive out of it what will be wanted.
//   x once                what a block needs of x lies in shared memory, paired and ordered as it will be read.
//   weights first         q is mma's left operand, 16 outputs high, and x the right one, 8 rows wide.
//   columns at will       a sum has no order. So a lane takes the 16 bytes that lie side by side in a row of q and
//                         the x that belongs to them, wherever mma thinks they are.
//   scales in float       a group's sum of products of integers is scaled once, in float, and then added.

#include "common/sm80.cuh"
#include "common/sm90.cuh"
#include "common/weight_only.cuh"

constexpr int WARP = 32;
constexpr int PIECE = 128;          // bytes of a row of q that are copied at once, and
constexpr int HALF = 64;            // those that the four lanes of a quad read at once
constexpr int SLOT = 16 * PIECE;    // bytes of a warp's piece

// Copy 16 bytes that nobody will want again, or none but zeros.
__device__ __forceinline__ void copy_once(char* to, const char* from, bool inside, unsigned long long policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared_address(to)),
                 "l"(from), "r"(inside ? 16 : 0), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ unsigned long long first_to_go() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
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

// `group` is counted in halves of pieces, `inverse` is 2^32 / group rounded up, or 0 for groups of one. `phase` pieces of x
// fit shared memory at a time.
template <typename T, int BITS, int COLUMNS, int WARPS, int RING>
__global__ void __launch_bounds__(WARPS * WARP, 1)
gemm_weight_only_sm90(const T* __restrict__ x, long long ldx, int aligned, const char* __restrict__ w, long long ldw,
                      const float* __restrict__ scale, int groups, int group, unsigned inverse,
                      const T* __restrict__ bias, T* __restrict__ y, int M, int N, int K, int relu, int split,
                      int phase) {
    constexpr int THREADS = WARPS * WARP, BN = WARPS * 16, PITCH = BN + 4;  // of the sums: 2 rows are 8 banks apart
    // Columns of half a piece; eights of columns that a lane has of these.
    constexpr int COLS = HALF * 8 / BITS, UNITS = 16 / BITS;
    extern __shared__ __align__(128) char shared[];

    const int part = split > 1 ? cluster_rank() : 0, n0 = blockIdx.x / split * BN;
    const int pieces = (K + 2 * COLS - 1) / (2 * COLS), share = (pieces + split - 1) / split;
    const int begin = min(part * share, pieces), end = min(begin + share, pieces);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;

    // A lane copies the same 16 bytes of every fourth row. Odd rows have their halves swapped: a quad's four lanes and
    // those of the next row then read from different banks.
    const int copy_row = lane / 8, chunk = lane % 8;
    const char* from[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        from[i] = w + static_cast<long long>(min(n0 + warp * 16 + i * 4 + copy_row, N - 1)) * ldw +
                  static_cast<long long>(begin) * PIECE + chunk * 16;
    char* const slots = shared + warp * (RING * SLOT);
    const int copy_to = copy_row * PIECE + (chunk ^ copy_row % 2 * 4) * 16;
    int left = min(K, end * 2 * COLS) - begin * 2 * COLS - chunk * (128 / BITS);  // columns from there to the end
    const unsigned long long policy = first_to_go();
    auto copy = [&](char* slot) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            copy_once(slot + copy_to + i * 4 * PIECE, from[i], left > 0, policy);
            from[i] += PIECE;
        }
        copy_commit();
        left -= 2 * COLS;
    };
#pragma unroll
    for (int i = 0; i < RING; ++i) copy(slots + i * SLOT);

    const float* row_scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
        row_scale[h] = scale + static_cast<long long>(min(n0 + warp * 16 + h * 8 + g, N - 1)) * groups;
    float next[2][2] = {};  // scales of the coming piece's halves, for two rows
    auto load_scales = [&](int piece) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 2 * piece + half;
            const int at = min(inverse ? static_cast<int>(__umulhi(i, inverse)) : i, groups - 1);
#pragma unroll
            for (int h = 0; h < 2; ++h) next[half][h] = row_scale[h][at];
        }
    };
    if (group) load_scales(begin);

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
        const int last = min(first + phase, end), units = (last - first) * (8 * UNITS);
        if (first > begin) __syncthreads();
        // Side by side as many threads as a row has units, and so many rows at once.
        const int wide = min(32 - __clz(units - 1), 31 - __clz(THREADS)), rows = THREADS >> wide;
        for (int i = threadIdx.x & ((1 << wide) - 1); i < units; i += 1 << wide) {
            const int half = i / (4 * UNITS), quad = i % 4, u = i / 4 % UNITS;
            const int k = (2 * first + half) * COLS + quad * (8 * UNITS) + u * 8, m0 = threadIdx.x >> wide;
            const T* from = x + m0 * ldx + k;
            char* to = x_units + (half * UNITS + u) * line + m0 * 64 + quad * 16;
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
#pragma unroll 1
        for (int piece = first; piece < last; ++piece) {
            copy_wait<RING - 1>();
            __syncwarp();
            float scales[2][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) scales[i / 2][i % 2] = next[i / 2][i % 2];
            if (group) load_scales(piece + 1);
            using Eight = typename Words<BITS>::type;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Eight q[2][UNITS];
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *reinterpret_cast<uint4*>(q[h]) = *reinterpret_cast<const uint4*>(
                        slot + (g + 8 * h) * PIECE + (t + 4 * half ^ g % 2 * 4) * 16);
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
                            total[j][e] = fmaf(scales[half][e / 2], sum[j][e], total[j][e]);
                            sum[j][e] = 0.0f;
                        }
                }
            }
            __syncwarp();
            copy(slot);
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
