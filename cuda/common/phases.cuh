// What the train_mlp kernels of the whole grid share: matrices in halves, and the barrier between two phases of a step.
#pragma once
#include "halves.cuh"

// A matrix in halves: PARTS matrices, one behind the other.
struct Halves {
    __half* data;
    int ld;
    long long part;  // distance between the parts
};

template <int PARTS, typename T = __half>
__device__ __forceinline__ void put(Halves to, long long row, int column, float a, float b) {
    unsigned parts[PARTS];
    split<PARTS, T>(a, b, parts);
    for (int part = 0; part < PARTS; ++part)
        *reinterpret_cast<unsigned*>(to.data + part * to.part + row * to.ld + column) = parts[part];
}

// A barrier of all blocks in two halves: what the others wrote before theirs is seen behind `grid_wait`. `arrived` counts
// up from 0 all the launch long.
__device__ __forceinline__ void grid_arrive(unsigned* arrived, unsigned& target) {
    __syncthreads();
    target += gridDim.x;
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
}

__device__ __forceinline__ void grid_wait(const unsigned* arrived, unsigned target) {
    if (threadIdx.x == 0) {
        unsigned seen;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
        while (static_cast<int>(seen - target) < 0);  // both may wrap
    }
    __syncthreads();
}

__device__ __forceinline__ void grid_barrier(unsigned* arrived, unsigned& target) {
    grid_arrive(arrived, target);
    grid_wait(arrived, target);
}
