// What the mlp_int8 kernels of many rows on Hopper share: a network's layers, products turned around (outputs are the 64
// rows of a wgmma, the batch is its N), weights whose rows arrive in pairs.
#pragma once
#include "divide.cuh"
#include "wgmma.cuh"

constexpr int LAYERS = 4;
constexpr int HEAD = 64;  // rows of a last layer's weights that are loaded
constexpr int ROW = 128;  // bytes of K in a stage and in a panel: the width of a swizzled row
constexpr int WARPGROUP = 128;
constexpr int LONGEST = 1024;  // elements of a row of x

struct Maps { TensorMap w[LAYERS]; };

struct Layer {
    const float* scale_w;  // (N,), or one for step_w == 0
    const float* bias;     // (N,) or null
    const float* scale_x;  // static scale of the input, or null
    int N, K, step_w, unused;
};

__device__ __forceinline__ int panels_of(int K) { return (K + ROW - 1) / ROW; }

#define QSPARSE_NUMBERS_4 "%0, %1, %2, %3"
#define QSPARSE_NUMBERS_8 QSPARSE_NUMBERS_4 ", %4, %5, %6, %7"
#define QSPARSE_NUMBERS_12 QSPARSE_NUMBERS_8 ", %8, %9, %10, %11"
#define QSPARSE_NUMBERS_40 \
    QSPARSE_NUMBERS_12 ", %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, " \
                      "%27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define QSPARSE_ACC4(R, d, i) R(d[i]), R(d[i + 1]), R(d[i + 2]), R(d[i + 3])
#define QSPARSE_WGMMA_S8(n, count, a_at, b_at, onto, ...) \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" #onto ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" QSPARSE_NUMBERS_##count "}, %" #a_at ", %" #b_at \
        ", p;\n}" \
        : __VA_ARGS__ \
        : "l"(a), "l"(b), "r"(accumulate))

// d (64 x N) += a (64 x 32) · b (N x 32), as the wrappers of common/wgmma.cuh, for the N that divide a batch evenly.
template <int N>
__device__ __forceinline__ void wgmma_s8(int (&d)[N / 2], unsigned long long a, unsigned long long b, int accumulate) {
    if constexpr (N == 8) QSPARSE_WGMMA_S8(8, 4, 4, 5, 6, QSPARSE_ACC4("+r", d, 0));
    else if constexpr (N == 16) QSPARSE_WGMMA_S8(16, 8, 8, 9, 10, QSPARSE_ACC8("+r", d, 0));
    else if constexpr (N == 24) QSPARSE_WGMMA_S8(24, 12, 12, 13, 14, QSPARSE_ACC8("+r", d, 0), QSPARSE_ACC4("+r", d, 8));
    else if constexpr (N == 80) QSPARSE_WGMMA_S8(80, 40, 40, 41, 42, QSPARSE_ACC32("+r", d, 0), QSPARSE_ACC8("+r", d, 32));
    else wgmma<signed char, N, 0, 0>(d, a, b, accumulate);
}

// The box at column k of w whose rows, in groups of 16, arrive as 0, 2, ..., 14, 1, 3, ..., 15; `group` is the first.
__device__ __forceinline__ void tma_load_pairs(void* to, const TensorMap* map, unsigned long long* barrier, int k,
                                               int group) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(0), "r"(group)
        : "memory");
}

// Two 8x8 matrices of 16-bit values, transposed on their way to shared memory; lane i < 16 gives the address of row
// i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x2_transposed(void* to, unsigned a, unsigned b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(to)), "r"(a),
                 "r"(b)
                 : "memory");
}

__device__ __forceinline__ unsigned packed(unsigned a, unsigned b, unsigned c, unsigned d) {  // of their low bytes
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
