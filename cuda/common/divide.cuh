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
    int low, high;
    float s, r, least, most;
    bool quick;

    // Quotients by `by` are clipped to [low, high], within -256..256.
    __device__ __forceinline__ Divider(float by, int low, int high)
        : low(low), high(high), s(by), r(__frcp_rn(by)), least(low * by), most(high * by),
          quick(by >= 7.888609e-31f && by <= 1.2676506e30f) {}  // 2^-100 to 2^100

    // clip(rint(x / s)), ties to even, of any x and s; 0 where the quotient is NaN.
    __device__ __forceinline__ int nearest(float x) const {
        if (quick && x == x) return nearest_quickly(x);
        return min(max(__float2int_rn(__fdiv_rn(x, s)), low), high);
    }

    // The same where `quick` holds, for any x but NaN.
    __device__ __forceinline__ int nearest_quickly(float x) const {
        x = fminf(fmaxf(x, least), most);  // low * s / s still rounds to low
        float q = __fmul_rn(x, r);
        q = fmaf(fmaf(-q, s, x), r, q);
        q = fmaf(fmaf(-q, s, x), r, q);
        // 1.5 * 2^23 + q is rounded to an integer, which then stands in the low bits.
        return __float_as_int(__fadd_rn(q, 12582912.0f)) - 0x4b400000;
    }
};
