// y = x · wᵀ, tensor cores.   x (M, K), w (N, K), y (M, N), half, row-major, sums in float; M, N, K multiples of the
// tile, the arrays 16-byte aligned.
//
// The new idea: half-precision inputs, and a warp instead of a thread as the worker. `mma.sync` multiplies a 16 x 16 by
// a 16 x 8 matrix in one instruction, the operands spread over the registers of the 32 lanes; `ldmatrix` loads them
// from shared memory in that arrangement. Tiles, two buffers and 16-byte accesses are as before.

#include <cuda_fp16.h>

constexpr int BM = 128, BN = 128, BK = 32;
constexpr int WM = 64, WN = 32;  // the part of a warp
constexpr int MI = WM / 16, NI = WN / 8;
constexpr int WARP = 32, THREADS = (BM / WM) * (BN / WN) * WARP;
constexpr int CHUNKS = BM * BK / 8 / THREADS;  // 16-byte chunks that a thread moves of each slice
static_assert(BM == BN && CHUNKS * THREADS * 8 == BM * BK, "every thread moves the same number of chunks");

// 80 bytes from row to row: the 8 rows of 16 bytes that ldmatrix reads at once lie in different banks.
using Tile = __half[BM][BK + 8];

__device__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8, and gets elements (i / 4, 2 * (i % 4))
// and the one after it of each.
__device__ void ldmatrix(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

__device__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Add the product of one slice to the warp's part of y.
__device__ void multiply(float (&acc)[MI][NI][4], const Tile& xs, const Tile& ws, int wm, int wn, int lane) {
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
        unsigned a[MI][4], b[NI / 2][4];  // b: two neighbouring 8-column matrices at once
#pragma unroll
        for (int i = 0; i < MI; ++i) ldmatrix(a[i], &xs[wm + i * 16 + lane % 16][k + lane / 16 * 8]);
#pragma unroll
        for (int j = 0; j < NI / 2; ++j)
            ldmatrix(b[j], &ws[wn + j * 16 + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
            for (int j = 0; j < NI; ++j) mma(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}

// acc[i][j] holds (lane / 4, 2 * (lane % 4)) and its right neighbour, then the same 8 rows below.
__device__ void store(const float (&acc)[MI][NI][4], __half* y, int N, int m, int n, int lane) {
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int j = 0; j < NI; ++j) {
            __half* const at = y + (m + i * 16 + lane / 4) * N + n + j * 8 + lane % 4 * 2;
            *reinterpret_cast<__half2*>(at) = __floats2half2_rn(acc[i][j][0], acc[i][j][1]);
            *reinterpret_cast<__half2*>(at + 8 * N) = __floats2half2_rn(acc[i][j][2], acc[i][j][3]);
        }
}

__global__ void __launch_bounds__(THREADS)
tensor_cores(const __half* __restrict__ x, const __half* __restrict__ w, __half* __restrict__ y, int M, int N, int K) {
    alignas(16) __shared__ Tile xs[2], ws[2];
    const int m0 = blockIdx.x / (N / BN) * BM, n0 = blockIdx.x % (N / BN) * BN;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int wm = warp / (BN / WN) * WM, wn = warp % (BN / WN) * WN;

    uint4 next_x[CHUNKS], next_w[CHUNKS];
    auto fetch = [&](int k0) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int i = threadIdx.x + c * THREADS, row = i / (BK / 8), k = k0 + i % (BK / 8) * 8;
            next_x[c] = *reinterpret_cast<const uint4*>(x + (m0 + row) * K + k);
            next_w[c] = *reinterpret_cast<const uint4*>(w + (n0 + row) * K + k);
        }
    };
    auto put = [&](int buffer) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int i = threadIdx.x + c * THREADS, row = i / (BK / 8), k = i % (BK / 8) * 8;
            *reinterpret_cast<uint4*>(&xs[buffer][row][k]) = next_x[c];
            *reinterpret_cast<uint4*>(&ws[buffer][row][k]) = next_w[c];
        }
    };
    fetch(0);
    put(0);
    __syncthreads();

    float acc[MI][NI][4] = {};
    for (int k0 = 0, buffer = 0; k0 < K; k0 += BK, buffer ^= 1) {
        const bool more = k0 + BK < K;
        if (more) fetch(k0 + BK);
        multiply(acc, xs[buffer], ws[buffer], wm, wn, lane);
        if (more) put(buffer ^ 1);
        __syncthreads();
    }
    store(acc, y, N, m0 + wm, n0 + wn, lane);
}
