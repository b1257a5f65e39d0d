// A kernel that follows another may start while that one still runs (programmatic dependent launch, PTX ISA
// "griddepcontrol"): its blocks are then in place when what they wait for is there. Where it was launched in the ordinary
// way, and before Hopper, neither of these does anything.
#pragma once

// All that the kernel before has written can be read from here on, and what it read can be written.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// As soon as all blocks have said so, those of the kernel after may take the place of blocks that leave.
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
