// y = x · wᵀ, TMA and wgmma (Hopper).   x (M, K), w (N, K), y (M, N), half, row-major, sums in float; M, N, K multiples
// of the tile.
//
// The new idea: two engines that one thread starts and that need no registers for their operands. The copy engine
// (TMA) fetches a whole slice from a description of the matrix, and a barrier in shared memory counts the bytes that
// have arrived. `wgmma` multiplies 64 x 16 by 16 x 256 for a warpgroup (4 warps) and reads both from shared memory.
// The block's tile doubles; what the threads still do is wait, start, and store y.
//
// Both engines agree on a swizzle: the 16-byte chunks of a row of 128 bytes are exchanged by the row's number, so that
// reading a column of chunks meets all banks. Nobody else looks at these bytes, so no code here computes it.

#include <cuda_fp16.h>

constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4;  // BK: 128 bytes, one swizzled row
constexpr int WARPGROUP = 128, THREADS = BM / 64 * WARPGROUP;
constexpr int X_BYTES = BM * BK * 2, W_BYTES = BN * BK * 2;
static_assert(STAGES * (X_BYTES + W_BYTES) + 1024 == 197632, "run.py asks for this much dynamic shared memory");

struct alignas(64) TensorMap {  // CUtensorMap: made on the host, read by the copy engine only
    char bytes[128];
};
using Barrier = unsigned long long;

__device__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ void init(Barrier* barrier) {  // one arrival a phase: that of the thread that expects the bytes
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
__device__ void expect(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
__device__ void wait(Barrier* barrier, unsigned parity) {  // until the phase of this parity is over
    unsigned over = 0;
    while (!over)
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(over)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
}
// Fetch the box of the tensor that begins at (row, k); its size is part of the map.
__device__ void fetch_box(char* to, const TensorMap& map, int row, int k, Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(k), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

// Where wgmma finds an operand: its address, 1,024 bytes between groups of 8 rows, and the 128-byte swizzle.
__device__ unsigned long long describe(const char* tile) {
    return (shared_address(tile) & 0x3ffff) >> 4 | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}
__device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
              "+f"(d[i + 6]), "+f"(d[i + 7])
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)

// d += a · b, or d = a · b for `add` 0. It runs on while the threads go on.
__device__ void wgmma(float (&d)[BN / 2], unsigned long long a, unsigned long long b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 0, 0;\n}"
        : D32(0), D32(32), D32(64), D32(96)
        : "l"(a), "l"(b), "r"(add));
}

__global__ void __launch_bounds__(THREADS, 1)
tma_wgmma(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, __half* __restrict__ y, int M,
          int N, int K) {
    extern __shared__ char raw[];
    __shared__ Barrier arrived[STAGES];
    char* const xs = raw + (1024 - shared_address(raw) % 1024) % 1024;  // the swizzle counts rows from there
    char* const ws = xs + STAGES * X_BYTES;
    const int m0 = blockIdx.x / (N / BN) * BM, n0 = blockIdx.x % (N / BN) * BN;
    const int warpgroup = threadIdx.x / WARPGROUP, warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
    const int slices = K / BK;

    auto fetch = [&](int slice) {
        const int s = slice % STAGES;
        expect(&arrived[s], X_BYTES + W_BYTES);
        fetch_box(xs + s * X_BYTES, x_map, m0, slice * BK, &arrived[s]);
        fetch_box(ws + s * W_BYTES, w_map, n0, slice * BK, &arrived[s]);
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) init(&arrived[s]);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // the copy engine sees them
        for (int slice = 0; slice < STAGES - 1 && slice < slices; ++slice) fetch(slice);
    }
    __syncthreads();

    float acc[BN / 2];  // of 64 rows and BN columns, over the 128 threads of a warpgroup
    for (int slice = 0; slice < slices; ++slice) {
        const int s = slice % STAGES;
        wait(&arrived[s], slice / STAGES % 2);
        begin_products();
#pragma unroll
        for (int k = 0; k < BK; k += 16)
            wgmma(acc, describe(xs + s * X_BYTES + warpgroup * 64 * BK * 2 + k * 2), describe(ws + s * W_BYTES + k * 2),
                  slice > 0 || k > 0);
        commit_products();
        wait_products<1>();  // those of the slice before are done, those of this one go on
        __syncthreads();     // in both warpgroups: the stage of the slice before is free
        if (threadIdx.x == 0 && slice + STAGES - 1 < slices) fetch(slice + STAGES - 1);
    }
    wait_products<0>();

    // A warp has 16 rows; acc[4 * j] is (lane / 4, 8 * j + 2 * (lane % 4)), then its neighbour, then 8 rows below.
    __half* const at = y + (m0 + warpgroup * 64 + warp * 16 + lane / 4) * N + n0 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        *reinterpret_cast<__half2*>(at + j * 8) = __floats2half2_rn(acc[4 * j], acc[4 * j + 1]);
        *reinterpret_cast<__half2*>(at + j * 8 + 8 * N) = __floats2half2_rn(acc[4 * j + 2], acc[4 * j + 3]);
    }
}
