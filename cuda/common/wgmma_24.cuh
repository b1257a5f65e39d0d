// D (64 x N, registers) += A (64 x 2k, of which two of every four columns are stored) · B (2k x N), both in shared memory,
// k being 32 bytes: one wgmma of the sparse kind. `metadata` says which columns are stored (PTX ISA, "Sparse matrix
// storage" of wgmma.mma_async.sp).
#pragma once
#include "wgmma.cuh"

#define QSPARSE_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QSPARSE_D32 \
    QSPARSE_D8 ", %8, %9, %10, %11, %12, %13, %14, %15, " \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define QSPARSE_D64 \
    QSPARSE_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
                "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define QSPARSE_D128 \
    QSPARSE_D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
                "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
                "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
                "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define QSPARSE_SUMS8(R, d) QSPARSE_ACC8(R, d, 0)
#define QSPARSE_SUMS32(R, d) QSPARSE_ACC32(R, d, 0)
#define QSPARSE_SUMS64(R, d) QSPARSE_SUMS32(R, d), QSPARSE_ACC32(R, d, 32)
#define QSPARSE_SUMS128(R, d) QSPARSE_SUMS64(R, d), QSPARSE_ACC32(R, d, 64), QSPARSE_ACC32(R, d, 96)

// COUNT accumulators, then operands A, B, metadata and accumulate, numbered from COUNT on.
#define QSPARSE_WGMMA_SP(COUNT, NA, NB, NM, NP, SHAPE_TYPE, R, OPTIONS) \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" #NP ", 0;\n" \
        "wgmma.mma_async.sp.sync.aligned." SHAPE_TYPE " {" QSPARSE_D##COUNT "}, %" #NA ", %" #NB ", %" #NM \
        ", 0, p" OPTIONS ";\n}" \
        : QSPARSE_SUMS##COUNT(R, d) \
        : "l"(a), "l"(b), "r"(metadata), "r"(accumulate))

// T is the type of A, U that of B: both half, both bfloat16, or int8 with int8 or uint8. All operands are K-major.
template <typename T, typename U, int N, typename Sum>
__device__ __forceinline__ void wgmma_24(Sum (&d)[N / 2], unsigned long long a, unsigned long long b, unsigned metadata,
                                         int accumulate) {
#define QSPARSE_WGMMA_SP_CASE(n, COUNT, NA, NB, NM, NP) \
    if constexpr (N == n && is_same<T, __half>) \
        QSPARSE_WGMMA_SP(COUNT, NA, NB, NM, NP, "m64n" #n "k32.f32.f16.f16", "+f", ", 1, 1, 0, 0"); \
    if constexpr (N == n && is_same<T, __nv_bfloat16>) \
        QSPARSE_WGMMA_SP(COUNT, NA, NB, NM, NP, "m64n" #n "k32.f32.bf16.bf16", "+f", ", 1, 1, 0, 0"); \
    if constexpr (N == n && is_same<U, signed char>) \
        QSPARSE_WGMMA_SP(COUNT, NA, NB, NM, NP, "m64n" #n "k64.s32.s8.s8", "+r", ""); \
    if constexpr (N == n && is_same<U, unsigned char>) \
        QSPARSE_WGMMA_SP(COUNT, NA, NB, NM, NP, "m64n" #n "k64.s32.s8.u8", "+r", "");
    static_assert(N == 16 || N == 64 || N == 128 || N == 256, "no wrapper for this N yet");
    QSPARSE_WGMMA_SP_CASE(16, 8, 8, 9, 10, 11)
    QSPARSE_WGMMA_SP_CASE(64, 32, 32, 33, 34, 35)
    QSPARSE_WGMMA_SP_CASE(128, 64, 64, 65, 66, 67)
    QSPARSE_WGMMA_SP_CASE(256, 128, 128, 129, 130, 131)
#undef QSPARSE_WGMMA_SP_CASE
}
