// Hopper's asynchronous machinery, one thin wrapper an instruction: mbarriers, the bulk tensor copy engine (TMA),
// warpgroup matrix multiply (wgmma), clusters. Names follow the PTX ISA, sections "mbarrier", "cp.async.bulk.tensor",
// "wgmma" and "barrier.cluster".
#pragma once
#include "shared.cuh"

struct alignas(64) TensorMap {  // CUtensorMap, opaque: the host encodes it
    char bytes[128];
};

// --- mbarriers: `full` barriers count bytes that arrive, `empty` ones count consumers that have left ------------------

__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

// Makes the inits visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_expect_bytes(unsigned long long* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Arrive for `count` threads.
__device__ __forceinline__ void mbarrier_arrive(unsigned long long* barrier, int count = 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Arrive on the barrier at the same place in block `rank` of the cluster. No cluster-wide fence: what it orders are
// reads by wgmma, already waited for, and a fence here costs a third of the kernel's speed.
__device__ __forceinline__ void mbarrier_arrive_at(unsigned long long* barrier, unsigned rank, int count = 1) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote], %2;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(rank), "r"(count)
        : "memory");
}

// A barrier alternates between two phases; wait until the phase of this parity is over.
__device__ __forceinline__ void mbarrier_wait(unsigned long long* barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// --- TMA ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Load the box at (inner, outer) of a 2-D tensor; what lies outside it arrives as zeros and is counted as bytes.
__device__ __forceinline__ void tma_load(void* to, const TensorMap* map, unsigned long long* barrier, int inner,
                                         int outer) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(inner), "r"(outer)
        : "memory");
}

// The same box to the same place in every block of the cluster that `mask` names; each one's own barrier counts it.
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap* map, unsigned long long* barrier,
                                                   int inner, int outer, unsigned short mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(inner), "r"(outer), "h"(mask)
        : "memory");
}

// Copy plain bytes, a multiple of 16 from and to multiples of 16.
__device__ __forceinline__ void bulk_load(void* to, const void* from, int bytes, unsigned long long* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// The same to the same place in every block that `mask` names; each one's own barrier counts them.
__device__ __forceinline__ void bulk_load_multicast(void* to, const void* from, int bytes, unsigned long long* barrier,
                                                    unsigned short mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(mask)
        : "memory");
}

// The same from shared memory to global memory.
__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, int inner, int outer) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(inner), "r"(outer)
                 : "memory");
}

// Add the box to what is there, element by element in the tensor's own type.
__device__ __forceinline__ void tma_add(const TensorMap* map, const void* from, int inner, int outer) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(inner), "r"(outer)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until the copy engine has read all but the LEFT newest groups, so that their shared memory may be written again.
template <int LEFT> __device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// Ordinary stores to shared memory before this are seen by the copy engine and by wgmma after it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- clusters, warpgroups -----------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The two halves of `cluster_sync`: to arrive early and wait late costs little.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Read 16 bytes from the same place in block `rank`'s shared memory.
__device__ __forceinline__ uint4 cluster_load(const uint4* p, unsigned rank) {
    uint4 v;
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %4, %5;\n"
        "ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [remote];\n"
        "}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "r"(shared_address(p)), "r"(rank)
        : "memory");
    return v;
}

// The same place in block `rank`'s shared memory, as an address for the whole cluster.
__device__ __forceinline__ unsigned cluster_address(const void* p, unsigned rank) {
    unsigned remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(rank));
    return remote;
}

// Store into another block's shared memory; a barrier of the cluster orders it.
__device__ __forceinline__ void cluster_store(unsigned to, float4 v) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

// Store into another block's shared memory, without waiting; the barrier there counts the bytes as they arrive.
__device__ __forceinline__ void cluster_send(unsigned to, float a, float b, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "f"(a), "f"(b), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void cluster_send(unsigned to, uint4 v, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
                 : "memory");
}

template <int REGISTERS> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Named barriers among some threads of a block; ids 1 to 15 are free (0 is __syncthreads). `barrier_arrive` counts
// without waiting.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The larger of two, NaN if either is: with -infinity as the bound this is no operation, with 0 it is ReLU.
__device__ __forceinline__ float max_nan(float v, float bound) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(v), "f"(bound));
    return result;
}

// Four 8x8 matrices of 16-bit values from registers to shared memory; lane i gives the address of row i % 8 of
// matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Turn an 8 x 8 matrix of halves that lies in the warp's registers as ldmatrix leaves it.
__device__ __forceinline__ unsigned transposed(unsigned v) {
    unsigned result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(v));
    return result;
}

// --- wgmma --------------------------------------------------------------------------------------------------------

// A matrix descriptor for 128-byte swizzled tiles, made of atoms of 8 rows x 128 bytes (1,024 bytes).
//   K-major operand:  rows are M (or N); STRIDE is the distance between groups of 8 rows, 1,024.
//   M/N-major:        rows are K, 64 elements of M (or N) wide; STRIDE is the distance between groups of 8 K, 1,024,
//                     and `leading` the distance between neighbouring panels of 64 M (or N).
__device__ __forceinline__ unsigned long long wgmma_descriptor(const void* tile, int leading) {
    constexpr unsigned long long STRIDE = 1024, SWIZZLE_128B = 1;
    return (static_cast<unsigned long long>(shared_address(tile)) & 0x3ffff) >> 4 |
           static_cast<unsigned long long>(leading >> 4) << 16 | (STRIDE >> 4) << 32 | SWIZZLE_128B << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The sums may be read from here on, after a wait; without a word the compiler reads them earlier at times, for which
// it makes the products wait for each other (warning C7514).
template <int A, int B> __device__ __forceinline__ void settle(float (&sums)[A][B]) {
#pragma unroll
    for (int i = 0; i < A * B; ++i) asm volatile("" : "+f"(sums[i / B][i % B])::"memory");
}
