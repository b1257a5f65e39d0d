// y = act(x · (scale · q)ᵀ + bias) for few rows of x and weights in int8 or int4, by cp.async and mma.sync (Ampere and
// later). The weights are read once: with few rows their bytes are nearly all that costs.
//
//   x (M, K) half or bfloat16, rows ldx apart; q (N, K) int8, or (N, ceil(K / 2)) bytes of which column 2 j is the low
//   half and 2 j + 1 the high one, rows ldw bytes apart; scale (N, groups) float, one for each `group` columns, a
//   multiple of 32 (one group: one scale a row); bias (N,) or null; y (M, N) row-major.
//
// The ideas, outermost first:
//   weights first         q is mma's left operand, 16 outputs high, and x the right one, 8 rows wide: a batch of one
//                         wastes seven eighths of the products, which are plenty, and none of the bytes.
//   split K               twice: WK warps divide each slice of a tile's columns, so that enough of them run, and where
//                         there are still too few tiles to fill the chip, `split` blocks divide K. They leave float
//                         sums, and a second kernel, which is in place by then, adds them up in a fixed order.
//   pipeline              both operands go straight from global to shared memory, STAGES - 1 slices ahead of use. A
//                         slice holds ROW neighbouring bytes of each weight row.
//   exponents             an integer becomes a float by putting its bits under a suitable exponent, two at a time, and
//                         subtracting that exponent's value: exact, and about one instruction a weight.
//   columns at will       a sum has no order. So a lane takes the 8 columns that lie side by side in both operands,
//                         wherever mma thinks they are; only pairs within a register must agree (see int4 below).
//   scales in float       a group's sum of products of integers is scaled once, in float, and then added. The scales
//                         travel with the slice: loaded when they are wanted, each group would wait for memory.

#include "common/dependent.cuh"
#include "common/sm80.cuh"

constexpr int WARP = 32;
constexpr int BLOCK = 32;  // columns that a warp multiplies at a time, in two mma
constexpr int UNIT = 4;    // blocks between two looks at the groups

template <int BITS, int BM, int WN, int TILES, int WK, int ROW, int STAGES> struct Config {
    static constexpr int THREADS = WARP * WN * WK, BN = WN * TILES * 16, COLUMNS = BM / 8;  // of mma's
    static constexpr int BK = ROW * 8 / BITS, X_ROW = BK * 2, UNITS = BK / WK / (UNIT * BLOCK);
    static constexpr int SLICE_UNITS = WK * UNITS;  // of all warps
    static constexpr int W_BYTES = BN * ROW, X_BYTES = BM * X_ROW, SCALE_BYTES = BN * SLICE_UNITS * 4;
    static constexpr int STAGE_BYTES = W_BYTES + X_BYTES + SCALE_BYTES;
    static constexpr int PITCH = BN + 4;  // floats from row to row of the sums: 2 rows are 8 banks apart
    static constexpr int BLOCKS = (BM <= 16 ? 512 : 256) / THREADS;  // that fit a multiprocessor's registers
    static_assert(BITS == 8 || BITS == 4, "int8 or int4");
    static_assert(BM % 8 == 0, "mma is 8 rows of x wide");
    static_assert(BK % (WK * UNIT * BLOCK) == 0, "each warp has whole units of a slice");
    static_assert(WK * BM * PITCH * 4 <= STAGES * STAGE_BYTES, "the sums leave through the stages' memory");
    static_assert(STAGES >= 2, "one slice is on its way while another is multiplied");
};

// Where chunk (16 bytes) c of a row lies, so that a warp's reads of fragments fall into different banks: 8 rows of q
// by 4 bytes of one chunk (int4), 4 rows by 32 bytes (int8), or 2 rows of x by 64 bytes.
template <int BITS, int ROW> __device__ __forceinline__ int w_place(int row, int c) {
    return row * ROW + (c ^ (BITS == 4 ? row % 8 : row % 4 * 2)) * 16;
}
template <int X_ROW> __device__ __forceinline__ int x_place(int row, int c) {
    return row * X_ROW + (c ^ row % 2 * 4) * 16;
}

// One thread's share of an operand's slice (ROWS rows of CHUNKS chunks): the same chunk of every STEP-th row.
template <int ROWS, int CHUNKS, int THREADS, int TURN> struct Loader {
    static constexpr int STEP = THREADS / CHUNKS, COUNT = (ROWS + STEP - 1) / STEP;
    static_assert(THREADS % CHUNKS == 0 && (ROWS % STEP == 0 || COUNT == 1), "all threads copy as much, or once");
    static_assert(STEP % TURN == 0 || COUNT == 1, "a thread's rows are swizzled alike");

    const char* from;  // the thread's first chunk of the coming slice
    long long stride;  // from one of its rows to the next, in bytes
    int rows, bytes;   // what is left of the matrix there, in rows and in bytes of a row; none if <= 0
    int unit;          // 16, 8, 4, 2 or 1 bytes, which divide every address
    int to;            // the chunk's place in a stage

    __device__ __forceinline__ Loader(const char* a, long long ld, int unit, int row, int rows, int at, int length,
                                      int to)
        : from(a + row * ld + at), stride(ld * STEP), rows(rows - row), bytes(length - at), unit(unit), to(to) {}

    // `whole`: all of the slice exists. What lies beyond the matrix is not read, and zeros arrive, which add nothing to
    // any sum.
    __device__ __forceinline__ void copy(char* stage, bool whole) const {
        if (ROWS < STEP && threadIdx.x >= ROWS * CHUNKS) return;
        if (unit == 16 && whole) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(
                                 shared_address(stage + to + i * STEP * CHUNKS * 16)),
                             "l"(from + i * stride)
                             : "memory");
        } else if (unit == 16) {
            const int valid = min(max(bytes, 0), 16);
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                                 shared_address(stage + to + i * STEP * CHUNKS * 16)),
                             "l"(from + i * stride), "r"(i * STEP < rows ? valid : 0)
                             : "memory");
        } else {
#pragma unroll 1
            for (int i = 0; i < COUNT; ++i)
                slow_copy(stage + to + i * STEP * CHUNKS * 16, from + i * stride, i * STEP < rows ? bytes : 0);
        }
    }

    __device__ __forceinline__ void slow_copy(char* to, const char* from, int valid) const {
        if (unit >= 4) {
#pragma unroll 1
            for (int b = 0; b < 16; b += 4)
                asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to + b)),
                             "l"(from + b), "r"(min(max(valid - b, 0), 4))
                             : "memory");
        } else {
#pragma unroll 1
            for (int b = 0; b < 16; ++b) to[b] = b < valid ? from[b] : 0;
        }
    }

    // f(chunk) of all that this thread has copied.
    template <class F> __device__ __forceinline__ void for_each(char* stage, F f) const {
        if (ROWS < STEP && threadIdx.x >= ROWS * CHUNKS) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) f(*reinterpret_cast<uint4*>(stage + to + i * STEP * CHUNKS * 16));
    }

    __device__ __forceinline__ void next() { from += CHUNKS * 16, bytes -= CHUNKS * 16; }
};

// --- integers to floats -------------------------------------------------------------------------------------------

template <typename T> __device__ __forceinline__ unsigned minus(unsigned a, unsigned b) {
    using P = typename Pair<T>::type;
    const P difference = __hsub2(*reinterpret_cast<const P*>(&a), *reinterpret_cast<const P*>(&b));
    return *reinterpret_cast<const unsigned*>(&difference);
}

// (q & mask) ^ exponent. Written out, as the compiler would make two instructions of it.
template <unsigned MASK, unsigned EXPONENT> __device__ __forceinline__ unsigned under_exponent(unsigned q) {
    unsigned r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(q), "n"(MASK), "n"(EXPONENT));
    return r;
}

template <int BITS> struct Words;  // eight weights side by side
template <> struct Words<8> { using type = uint2; };
template <> struct Words<4> { using type = unsigned; };

// Four int8 as (0, 1) and (2, 3). half: 1024 + u is 0x6400 | u for a u below 1024, here the integer plus 128.
template <typename T> __device__ __forceinline__ void unpack_four(unsigned q, unsigned& p0, unsigned& p1);
template <> __device__ __forceinline__ void unpack_four<__half>(unsigned q, unsigned& p0, unsigned& p1) {
    const unsigned u = q ^ 0x80808080u;
    p0 = minus<__half>(__byte_perm(u, 0x64646464u, 0x4140), 0x64806480u);  // 1024 + 128
    p1 = minus<__half>(__byte_perm(u, 0x64646464u, 0x4342), 0x64806480u);
}
// bfloat16 has room for seven bits: 128 + u is 0x4300 | u. The eighth, the sign, is worth -128; and 0x4300 with it is
// 256 where it is set, else 128: just what is to be subtracted.
template <> __device__ __forceinline__ void unpack_four<__nv_bfloat16>(unsigned q, unsigned& p0, unsigned& p1) {
    const unsigned a = __byte_perm(q, 0x43434343u, 0x4140), b = __byte_perm(q, 0x43434343u, 0x4342);
    p0 = minus<__nv_bfloat16>(a & 0xff7fff7fu, a & 0xff80ff80u);
    p1 = minus<__nv_bfloat16>(b & 0xff7fff7fu, b & 0xff80ff80u);
}

// Eight int8 as (0, 1), (2, 3), (4, 5) and (6, 7).
template <typename T> __device__ __forceinline__ void unpack(uint2 q, unsigned (&p)[4]) {
    unpack_four<T>(q.x, p[0], p[1]);
    unpack_four<T>(q.y, p[2], p[3]);
}

// Eight int4 as (0, 4), (1, 5), (2, 6) and (3, 7): the halves of a register are 16 bits apart. Flipping an int4's sign
// bit adds 8, and one exclusive or does that and sets the exponent. half has room for the odd ones where they are, 16
// times as large.
template <typename T> __device__ __forceinline__ void unpack(unsigned q, unsigned (&p)[4]);
template <> __device__ __forceinline__ void unpack<__half>(unsigned q, unsigned (&p)[4]) {
    const __half2 sixteenth = __half2half2(__ushort_as_half(0x2c00)), minus72 = __half2half2(__ushort_as_half(0xd480));
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        p[i] = minus<__half>(under_exponent<0x000f000fu, 0x64086408u>(q), 0x64086408u);  // 1024 + 8
        const unsigned high = under_exponent<0x00f000f0u, 0x64806480u>(q);               // 1024 + 16 (8 + the integer)
        const __half2 pair = __hfma2(*reinterpret_cast<const __half2*>(&high), sixteenth, minus72);
        p[i + 1] = *reinterpret_cast<const unsigned*>(&pair);
        q >>= 8;
    }
}
template <> __device__ __forceinline__ void unpack<__nv_bfloat16>(unsigned q, unsigned (&p)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)  // 128 + 8
        p[i] = minus<__nv_bfloat16>(under_exponent<0x000f000fu, 0x43084308u>(q >> 4 * i), 0x43084308u);
}

// Eight values of x, paired as int4 weights are.
__device__ __forceinline__ uint4 paired(uint4 x) {
    return {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
            __byte_perm(x.y, x.w, 0x7632)};
}

// --- the product --------------------------------------------------------------------------------------------------

template <typename T> struct Product {
    const T* x;
    long long ldx;
    int x_unit;  // 16, 8, 4, 2 or 1 bytes, which divide the address of every row
    const char* w;
    long long ldw;
    int w_unit;
    const float* scale;
    int groups, group;  // of a row; in blocks, 0 where a whole row has one scale
    unsigned inverse;   // 2^32 / group rounded up
    const T* bias;
    T* y;
    int M, N, K, relu, split;

    // The sum of products `value` becomes the element `out` = (row, n) of y.
    __device__ __forceinline__ void finish(float value, long long out, int n) const {
        if (bias) value += to_float(bias[n]);
        y[out] = from_float<T>(relu ? relu_of(value) : value);
    }
};

// The sums of part `part` of K of the tile at (m0, n0), WK times BM rows of PITCH floats in shared memory, which all of
// the block may read; those of one scale a row are not scaled yet.
template <typename T, int BITS, int BM, int WN, int TILES, int WK, int ROW, int STAGES>
__device__ __forceinline__ float* tile_sums(const Product<T>& p, int part, int m0, int n0) {
    using C = Config<BITS, BM, WN, TILES, WK, ROW, STAGES>;
    extern __shared__ __align__(128) char shared[];
    const float* const scale = p.scale;
    const int M = p.M, N = p.N, K = p.K, groups = p.groups, group = p.group;
    const unsigned inverse = p.inverse;

    if (!group && threadIdx.x < C::BN / 32)  // what the end wants, into L2
        asm volatile("prefetch.global.L2 [%0];" ::"l"(scale + min(n0 + static_cast<int>(threadIdx.x) * 32, N - 1)));

    const int slices = (K + C::BK - 1) / C::BK, share = (slices + p.split - 1) / p.split;
    const int begin = min(part * share, slices), count = min(share, slices - begin);

    constexpr int W_CHUNKS = ROW / 16, X_CHUNKS = C::X_ROW / 16;
    const int w_row = threadIdx.x / W_CHUNKS, w_chunk = threadIdx.x % W_CHUNKS;
    const int x_row = threadIdx.x / X_CHUNKS, x_chunk = threadIdx.x % X_CHUNKS;
    Loader<C::BN, W_CHUNKS, C::THREADS, BITS == 4 ? 8 : 4> w_loader(
        p.w, p.ldw, p.w_unit, n0 + w_row, N, begin * ROW + w_chunk * 16, BITS == 8 ? K : (K + 1) / 2,
        w_place<BITS, ROW>(w_row, w_chunk));
    Loader<BM, X_CHUNKS, C::THREADS, 2> x_loader(reinterpret_cast<const char*>(p.x), p.ldx * 2, p.x_unit, m0 + x_row, M,
                                                 begin * C::X_ROW + x_chunk * 16, K * 2,
                                                 C::W_BYTES + x_place<C::X_ROW>(x_row, x_chunk));

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int n_warp = warp % WN * TILES * 16, k_warp = warp / WN;
    // Places of chunks differ by an XOR from block to block, places of rows by a sum.
    const int first_unit = k_warp * C::UNITS;
    const int w_lane = n_warp * ROW + (BITS == 4 ? w_place<4, ROW>(g, 0) + t * 4
                                                 : w_place<8, ROW>(g, t / 2) + t % 2 * 8);
    const int x_lane = C::W_BYTES + x_place<C::X_ROW>(g, t);
    constexpr int W_BLOCK = BLOCK * BITS / 8, X_BLOCK = BLOCK * 2;  // bytes of a row

    // total: what is scaled already, of the groups before; sum: of the present group.
    float total[TILES][C::COLUMNS][4] = {}, sum[TILES][C::COLUMNS][4] = {};
    auto multiply = [&](const char* stage, int w_at, int x_at) {
        unsigned q[TILES][2][4];
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                unpack<T>(*reinterpret_cast<const typename Words<BITS>::type*>(stage + w_at + (i * 16 + h * 8) * ROW),
                          q[i][h]);
#pragma unroll
        for (int j = 0; j < C::COLUMNS; ++j) {
            const uint4 b = *reinterpret_cast<const uint4*>(stage + x_at + j * 8 * C::X_ROW);
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                mma<T>(sum[i][j], {q[i][0][0], q[i][1][0], q[i][0][1], q[i][1][1]}, b.x, b.y);
                mma<T>(sum[i][j], {q[i][0][2], q[i][1][2], q[i][0][3], q[i][1][3]}, b.z, b.w);
            }
        }
    };

    // Scales come with a slice, one for each row and unit, or, where groups end within units, are loaded when wanted.
    const bool in_slice = group % UNIT == 0;
    const auto group_of = [&](int block) {
        return min(inverse ? static_cast<int>(__umulhi(block, inverse)) : block, groups - 1);
    };
    const auto scale_of_row = [&](int row) { return scale + static_cast<long long>(min(n0 + row, N - 1)) * groups; };
    const auto copy_scales = [&](char* stage, int slice) {
#pragma unroll
        for (int i = 0; i < C::BN * C::SLICE_UNITS; i += C::THREADS) {
            const int at = i + threadIdx.x, unit = at % C::SLICE_UNITS, row = at / C::SLICE_UNITS;
            if (C::BN * C::SLICE_UNITS % C::THREADS && at >= C::BN * C::SLICE_UNITS) break;
            const float* const from = scale_of_row(row) + group_of((begin + slice) * (C::BK / BLOCK) + unit * UNIT);
            float* const to = reinterpret_cast<float*>(stage + C::W_BYTES + C::X_BYTES) + unit * C::BN + row;
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
        }
    };
    const auto finish_group = [&](auto scale_of) {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float s = scale_of(n_warp + g + i * 16 + h * 8);
#pragma unroll
                for (int j = 0; j < C::COLUMNS; ++j)
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; ++e) {
                        total[i][j][e] = fmaf(s, sum[i][j][e], total[i][j][e]);
                        sum[i][j][e] = 0.0f;
                    }
            }
    };

    char *reading = shared, *writing = shared;
    for (int slice = 1 - STAGES; slice < count; ++slice) {  // the first rounds only copy
        if (slice >= 0) {
            copy_wait<STAGES - 2>();
            if (BITS == 4) x_loader.for_each(reading, [](uint4& eight) { eight = paired(eight); });
            __syncthreads();  // this slice is here for all, and all are done with the one before: the next to write
        }
        if (slice + STAGES - 1 < count) {
            const int end = (begin + slice + STAGES) * C::BK;  // behind the slice's last column
            w_loader.copy(writing, n0 + C::BN <= N && end <= K);
            x_loader.copy(writing, m0 + BM <= M && end <= K);
            w_loader.next(), x_loader.next();
            if (group && in_slice) copy_scales(writing, slice + STAGES - 1);
        }
        copy_commit();
        writing = writing == shared + (STAGES - 1) * C::STAGE_BYTES ? shared : writing + C::STAGE_BYTES;
        if (slice < 0) continue;

#pragma unroll 1
        for (int unit = 0; unit < C::UNITS; ++unit) {
            const int w_at = w_lane ^ (first_unit + unit) * (UNIT * W_BLOCK);
            const int x_at = x_lane ^ (first_unit + unit) * (UNIT * X_BLOCK);
            if (in_slice) {
#pragma unroll
                for (int i = 0; i < UNIT; ++i) multiply(reading, w_at ^ i * W_BLOCK, x_at ^ i * X_BLOCK);
                if (group)
                    finish_group([&](int row) {
                        const char* const scales = reading + C::W_BYTES + C::X_BYTES;
                        return reinterpret_cast<const float*>(scales)[(first_unit + unit) * C::BN + row];
                    });
            } else {
#pragma unroll 1
                for (int i = 0; i < UNIT; ++i) {
                    multiply(reading, w_at ^ i * W_BLOCK, x_at ^ i * X_BLOCK);
                    const int at = group_of((begin + slice) * (C::BK / BLOCK) + (first_unit + unit) * UNIT + i);
                    finish_group([&](int row) { return scale_of_row(row)[at]; });
                }
            }
        }
        reading = reading == shared + (STAGES - 1) * C::STAGE_BYTES ? shared : reading + C::STAGE_BYTES;
    }

    // The sums pass through the stages' memory: there the WK warps' meet, and they leave in whole lines of y.
    copy_wait<0>();
    __syncthreads();
    float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < C::COLUMNS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int m = j * 8 + t * 2 + e % 2, n = n_warp + i * 16 + g + e / 2 * 8;
                sums[(k_warp * BM + m) * C::PITCH + n] = group ? total[i][j][e] : sum[i][j][e];
            }
    __syncthreads();
    return sums;
}

template <typename T, int BITS, int BM, int WN, int TILES, int WK, int ROW, int STAGES>
__global__ void __launch_bounds__(Config<BITS, BM, WN, TILES, WK, ROW, STAGES>::THREADS,
                                  Config<BITS, BM, WN, TILES, WK, ROW, STAGES>::BLOCKS)
gemm_weight_only_sm80(const __grid_constant__ Product<T> p, float* __restrict__ sums) {
    using C = Config<BITS, BM, WN, TILES, WK, ROW, STAGES>;
    let_successor_start();
    wait_for_predecessor();
    const int tiles_m = (p.M + BM - 1) / BM, part = blockIdx.x % p.split, tile = blockIdx.x / p.split;
    const int m0 = tile % tiles_m * BM, n0 = tile / tiles_m * C::BN;  // neighbours share the weights
    const float* const mine = tile_sums<T, BITS, BM, WN, TILES, WK, ROW, STAGES>(p, part, m0, n0);
#pragma unroll 1
    for (int at = threadIdx.x; at < BM * C::BN; at += C::THREADS) {
        const int row = at / C::BN, column = at % C::BN, m = m0 + row, n = n0 + column;
        if (m >= p.M || n >= p.N) continue;
        float value = 0.0f;
#pragma unroll
        for (int k = 0; k < WK; ++k) value += mine[(k * BM + row) * C::PITCH + column];
        if (!p.group) value *= p.scale[n];
        const long long out = static_cast<long long>(m) * p.N + n;
        if (p.split > 1) sums[static_cast<long long>(part) * p.M * p.N + out] = value;
        else p.finish(value, out, n);
    }
}

// y = act(the sum of `split` partial products + bias), always added in the same order.
template <typename T>
__global__ void __launch_bounds__(256)
gemm_weight_only_sum(const float* __restrict__ sums, const T* __restrict__ bias, T* __restrict__ y, long long M, int N,
                     int relu, int split) {
    wait_for_predecessor();
    const long long size = M * N, i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    float sum = 0.0f;
#pragma unroll 4
    for (int part = 0; part < split; ++part) sum += sums[part * size + i];
    sum += bias ? to_float(bias[i % N]) : 0.0f;
    y[i] = from_float<T>(relu ? relu_of(sum) : sum);
}
