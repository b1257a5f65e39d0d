// Dividing many numbers by one and rounding to integers: exactly rint(x / s) of a true division, without the subroutine
// that a division is.
//
// With r the correctly rounded reciprocal of s, x * r is less than 2 units in the last place from x / s. One correction
// by the remainder brings it within 1; and then a second one gives x / s correctly rounded (P. Markstein, "Computation
// of elementary functions on the IBM RISC System/6000 processor", 1990, theorem 8.1). Both want remainders free of
// overflow and underflow, hence the bounds on s; where |x| is so small that its remainder underflows all the same, the
// quotient is far below a half.
#pragma once

struct Divider {
    float s, r;
    bool quick;

    __device__ __forceinline__ Divider(float by)
        : s(by), r(__frcp_rn(by)), quick(by >= 7.888609e-31f && by <= 1.2676506e30f) {}  // 2^-100 to 2^100

    // rint(x / s), ties to even, clipped to [LOW, HIGH], of any x but NaN and any s (0 where the quotient is NaN).
    template <int LOW, int HIGH> __device__ __forceinline__ int nearest(float x) const {
        static_assert(LOW >= -256 && HIGH <= 256, "the quotient must stay small for the trick below");
        if (!quick) return min(max(__float2int_rn(__fdiv_rn(x, s)), LOW), HIGH);
        x = fminf(fmaxf(x, LOW * s), HIGH * s);  // LOW * s / s still rounds to LOW
        float q = __fmul_rn(x, r);
        q = fmaf(fmaf(-q, s, x), r, q);
        q = fmaf(fmaf(-q, s, x), r, q);
        // 1.5 * 2^23 + q is rounded to an integer, which then stands in the low bits.
        return __float_as_int(__fadd_rn(q, 12582912.0f)) - 0x4b400000;
    }
};
