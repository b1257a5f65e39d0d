// Ampere's asynchronous copies, matrix loads and warp-level matrix multiply, one thin wrapper an instruction, and the
// swizzle that keeps them free of bank conflicts. Names follow the PTX ISA, sections "cp.async", "ldmatrix", "mma".
#pragma once
#include "numeric.cuh"
#include "shared.cuh"

// Tiles lie in shared memory line after line, each BYTES long, in chunks of 16 bytes. Chunk c of a line is moved to
// place c XOR (line's number), so that the same chunk of 8 neighbouring lines, which is what ldmatrix reads at once,
// falls into 8 different groups of 4 banks. Lines of 64 bytes share 128 bytes by twos, so there every second line
// turns. The result is an offset in bytes. XOR also means that an offset's chunk moves by another XOR: for c a multiple
// of d's power of two, swizzled(line, c + d) == swizzled(line, c) ^ d * 16.
template <int BYTES> __device__ __forceinline__ int swizzled(int line, int chunk) {
    constexpr int TURNS = BYTES >= 128 ? 8 : BYTES / 16;
    static_assert(BYTES % 128 == 0 || BYTES == 64, "a line is half or whole 128-byte rows of the banks");
    return line * BYTES + (chunk ^ line / (8 / TURNS) % TURNS) * 16;
}

// --- cp.async -----------------------------------------------------------------------------------------------------

// Start copying 16 bytes from global to shared memory; zeros arrive, and nothing is read, where `inside` is false.
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until all but the LEFT newest groups of this thread's copies have arrived.
template <int LEFT> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// --- ldmatrix, mma ------------------------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit values; lane i gives the address of line i % 8 of matrix i / 8. Lane i then holds, in
// r[q], elements 2 (i % 4) and + 1 of line i / 4 of matrix q; with TRANSPOSED, of column i / 4.
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned from) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(from)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(from)
                     : "memory");
}

// d (16 x 8) += a (16 x 16) · b (16 x 8). With g = lane / 4 and t = lane % 4 a lane holds
//   a: rows g, g + 8, g, g + 8, columns 2 t and + 1, the last two registers 8 columns further;
//   b: rows 2 t and + 1, and 8 further, of column g;      d: columns 2 t, + 1 of row g, then of row g + 8.
#define QSPARSE_MMA(TYPE) \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <>
__device__ __forceinline__ void mma<__half>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    QSPARSE_MMA("f16");
}
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    QSPARSE_MMA("bf16");
}
#undef QSPARSE_MMA

// The same of 8-bit integers, d (16 x 8) += a (16 x 32) · b (32 x 8): a register holds four neighbours along K where it
// held two. T is the type of a; b is signed.
#define QSPARSE_MMA(TYPE) \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." TYPE \
                 ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <typename T>
__device__ __forceinline__ void mma(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (is_same<T, signed char>) QSPARSE_MMA("s8");
    else QSPARSE_MMA("u8");
}
#undef QSPARSE_MMA
