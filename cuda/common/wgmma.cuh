// D (64 x N, float registers) += A (64 x k) · B (k x N), both in shared memory, k being 32 bytes: one wgmma.
// The instruction takes its accumulators as a written-out list, so there is one wrapper for each N.
#pragma once
#include "numeric.cuh"
#include "sm90.cuh"

// R is "+f" for float accumulators, "+r" for int.
#define QSPARSE_ACC8(R, d, i) \
    R(d[i]), R(d[i + 1]), R(d[i + 2]), R(d[i + 3]), R(d[i + 4]), R(d[i + 5]), R(d[i + 6]), R(d[i + 7])
#define QSPARSE_ACC32(R, d, i) \
    QSPARSE_ACC8(R, d, i), QSPARSE_ACC8(R, d, i + 8), QSPARSE_ACC8(R, d, i + 16), QSPARSE_ACC8(R, d, i + 24)

#define QSPARSE_WGMMA_32(SHAPE_TYPE, R, OPTIONS, d, a, b, accumulate, ...) \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n32" SHAPE_TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
        "}, %16, %17, p" OPTIONS(19, 20) ";\n}" \
        : QSPARSE_ACC8(R, d, 0), QSPARSE_ACC8(R, d, 8) \
        : "l"(a), "l"(b), "r"(accumulate) __VA_ARGS__)

#define QSPARSE_WGMMA_64(SHAPE_TYPE, R, OPTIONS, d, a, b, accumulate, ...) \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n64" SHAPE_TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
        "}, %32, %33, p" OPTIONS(35, 36) ";\n}" \
        : QSPARSE_ACC32(R, d, 0) \
        : "l"(a), "l"(b), "r"(accumulate) __VA_ARGS__)

#define QSPARSE_WGMMA_128(SHAPE_TYPE, R, OPTIONS, d, a, b, accumulate, ...) \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n128" SHAPE_TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
        "}, %64, %65, p" OPTIONS(67, 68) ";\n}" \
        : QSPARSE_ACC32(R, d, 0), QSPARSE_ACC32(R, d, 32) \
        : "l"(a), "l"(b), "r"(accumulate) __VA_ARGS__)

#define QSPARSE_WGMMA_256(SHAPE_TYPE, R, OPTIONS, d, a, b, accumulate, ...) \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n256" SHAPE_TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
        "}, %128, %129, p" OPTIONS(131, 132) ";\n}" \
        : QSPARSE_ACC32(R, d, 0), QSPARSE_ACC32(R, d, 32), QSPARSE_ACC32(R, d, 64), QSPARSE_ACC32(R, d, 96) \
        : "l"(a), "l"(b), "r"(accumulate) __VA_ARGS__)

struct E4m3 {  // an 8-bit float of 4 exponent and 3 mantissa bits: only the tensor cores look inside
    unsigned char bits;
};

// T is the type of A; B is of the same, but int8 beside uint8. Accumulators are int for these two, else float. TA and TB
// are 1 for an operand that is M- or N-major in shared memory (16-bit types only).
template <typename T, int N, int TA, int TB, typename Sum>
__device__ __forceinline__ void wgmma(Sum (&d)[N / 2], unsigned long long a, unsigned long long b, int accumulate) {
    static_assert(N == 32 || N == 64 || N == 128 || N == 256, "a wrapper for this N is not written yet");
#define QSPARSE_LAYOUTS(a, b) ", 1, 1, %" #a ", %" #b
#define QSPARSE_SIGNS(a, b) ", 1, 1"
#define QSPARSE_NONE(a, b) ""
#define QSPARSE_WGMMA_CASE(n) \
    if constexpr (N == n && is_same<T, __half>) \
        QSPARSE_WGMMA_##n("k16.f32.f16.f16", "+f", QSPARSE_LAYOUTS, d, a, b, accumulate, , "n"(TA), "n"(TB)); \
    if constexpr (N == n && is_same<T, __nv_bfloat16>) \
        QSPARSE_WGMMA_##n("k16.f32.bf16.bf16", "+f", QSPARSE_LAYOUTS, d, a, b, accumulate, , "n"(TA), "n"(TB)); \
    if constexpr (N == n && is_same<T, float>) \
        QSPARSE_WGMMA_##n("k8.f32.tf32.tf32", "+f", QSPARSE_SIGNS, d, a, b, accumulate); \
    if constexpr (N == n && is_same<T, E4m3>) \
        QSPARSE_WGMMA_##n("k32.f32.e4m3.e4m3", "+f", QSPARSE_SIGNS, d, a, b, accumulate); \
    if constexpr (N == n && is_same<T, signed char>) \
        QSPARSE_WGMMA_##n("k32.s32.s8.s8", "+r", QSPARSE_NONE, d, a, b, accumulate); \
    if constexpr (N == n && is_same<T, unsigned char>) \
        QSPARSE_WGMMA_##n("k32.s32.u8.s8", "+r", QSPARSE_NONE, d, a, b, accumulate);
    QSPARSE_WGMMA_CASE(32)
    QSPARSE_WGMMA_CASE(64)
    QSPARSE_WGMMA_CASE(128)
    QSPARSE_WGMMA_CASE(256)
#undef QSPARSE_WGMMA_CASE
#undef QSPARSE_LAYOUTS
#undef QSPARSE_SIGNS
#undef QSPARSE_NONE
}
