// y = x · wᵀ, asynchronous copies.   x (M, K), w (N, K), y (M, N), half, row-major, sums in float; M, N, K multiples of
// the tile, the arrays 16-byte aligned.
//
// The new idea: `cp.async` copies from global to shared memory without passing through registers and without waiting.
// A ring of STAGES buffers is filled STAGES - 1 slices ahead, so that the memory's latency is hidden behind several
// slices of products instead of one. The products are those of rung 6.

#include <cuda_fp16.h>

constexpr int BM = 128, BN = 128, BK = 32, STAGES = 4;
constexpr int WM = 64, WN = 32;
constexpr int MI = WM / 16, NI = WN / 8;
constexpr int WARP = 32, THREADS = (BM / WM) * (BN / WN) * WARP;
constexpr int CHUNKS = BM * BK / 8 / THREADS;
static_assert(BM == BN && CHUNKS * THREADS * 8 == BM * BK, "every thread moves the same number of chunks");

using Tile = __half[BM][BK + 8];

struct Stage {
    Tile x, w;
};
static_assert(STAGES * sizeof(Stage) == 81920, "run.py asks for this much dynamic shared memory");

__device__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most LEFT of this thread's newest groups of copies are still under way.
template <int LEFT> __device__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

__device__ void ldmatrix(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ void multiply(float (&acc)[MI][NI][4], const Tile& xs, const Tile& ws, int wm, int wn, int lane) {
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
        unsigned a[MI][4], b[NI / 2][4];
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
async_copies(const __half* __restrict__ x, const __half* __restrict__ w, __half* __restrict__ y, int M, int N, int K) {
    extern __shared__ __align__(16) char shared[];
    Stage* const stages = reinterpret_cast<Stage*>(shared);
    const int m0 = blockIdx.x / (N / BN) * BM, n0 = blockIdx.x % (N / BN) * BN;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int wm = warp / (BN / WN) * WM, wn = warp % (BN / WN) * WN;
    const int slices = K / BK;

    auto fetch = [&](int slice) {  // beyond the last slice: an empty group, so that groups and slices stay in step
        Stage& stage = stages[slice % STAGES];
#pragma unroll
        for (int c = 0; c < CHUNKS && slice < slices; ++c) {
            const int i = threadIdx.x + c * THREADS, row = i / (BK / 8), k = i % (BK / 8) * 8;
            copy_async(&stage.x[row][k], x + (m0 + row) * K + slice * BK + k);
            copy_async(&stage.w[row][k], w + (n0 + row) * K + slice * BK + k);
        }
        commit_copies();
    };
    for (int slice = 0; slice < STAGES - 1; ++slice) fetch(slice);

    float acc[MI][NI][4] = {};
    for (int slice = 0; slice < slices; ++slice) {
        wait_copies<STAGES - 2>();  // this thread's copies of `slice` have landed,
        __syncthreads();            // now everybody's have, and everybody is done with the slice before
        fetch(slice + STAGES - 1);  // whose stage this fills
        const Stage& stage = stages[slice % STAGES];
        multiply(acc, stage.x, stage.w, wm, wn, lane);
    }
    store(acc, y, N, m0 + wm, n0 + wn, lane);
}
