// Dividing many numbers by one and rounding to integers: exactly rint(x / s) of a true division, without the subroutine
// that a division is.
//
// With r the correctly rounded reciprocal of s, q = x * r is less than 2 units in the last place from x / s, and one
// correction by the remainder x - q * s brings it so near that it lies on the same side of every half-integer up to 256
// as x / s rounded correctly, or on it: true of all 2^23 mantissas of s and all x within 3 units of a half-integer times
// s, which were tried one by one. Elsewhere there is nothing to decide. (P. Markstein, "Computation of elementary
// functions on the IBM RISC System/6000 processor", 1990, has the method.) Remainders must not overflow or underflow:
// where s is very large or small, x and s are multiplied by a power of two first. Where |x| is so small that its
// remainder underflows all the same, the quotient is far below a half.
#pragma once

struct Divider {
    float factor, s, r, least, most;  // x / by = x * factor / s
    bool special;                     // by is no positive number: negative, 0, infinite or NaN

    Divider() = default;

    // Quotients by `by`, any number, are clipped to [low, high], within -256..256.
    __device__ __forceinline__ Divider(float by, int low, int high) {
        const float size = fabsf(by), infinite = __uint_as_float(0x7f800000u);
        special = !(by > 0.0f && by < infinite);
        if (size == 0.0f || !(size < infinite)) {
            factor = size == 0.0f ? infinite : 0.0f;  // x / 0 is infinite, or NaN; x / Inf is 0
            s = 1.0f;
        } else {
            factor = size < 7.888609e-31f ? 1.2676506e30f : size > 1.2676506e30f ? 7.888609e-31f : 1.0f;  // 2^-100, 2^100
            s = size * factor;
        }
        factor = copysignf(factor, by);
        r = __frcp_rn(s);
        least = low * s;  // low * s / s still rounds to low
        most = high * s;
    }

    // The same for x >= 0 and high = 127, from a reciprocal and a factor that an earlier one of `by` has worked out; where
    // the quotient is NaN, `nearest_finite` gives 0 if `by` is not negative.
    __device__ __forceinline__ Divider(float by, float factor, float r) : factor(factor), r(r) {
        s = fabsf(by * factor);
        if (!(s == s)) s = 1.0f;  // 0 and Inf
        least = by < 0.0f ? -127.0f * s : 0.0f;
        most = 127.0f * s;
        special = false;
    }

    // clip(rint(x / by)), ties to even, of any x; 0 where the quotient is NaN.
    __device__ __forceinline__ int nearest(float x) const {
        x = __fmul_rn(x, factor);
        return static_cast<int>(rounded(x == x ? fminf(fmaxf(x, least), most) : 0.0f) - 0x4b400000u);
    }

    // The same in the low byte of the result, of a finite x and a `by` that is not special; without CLIP, of a quotient
    // within -256..256.
    template <bool CLIP> __device__ __forceinline__ unsigned nearest_finite(float x) const {
        x = __fmul_rn(x, factor);
        return rounded(CLIP ? fminf(fmaxf(x, least), most) : x);
    }

    // The same without CLIP, where `factor` is 1: of all scales but very large and small ones.
    __device__ __forceinline__ unsigned nearest_as_it_is(float x) const { return rounded(x); }

  private:
    // The bits of 1.5 * 2^23 + rint(x / s): the integer stands in the low ones.
    __device__ __forceinline__ unsigned rounded(float x) const {
        const float q = __fmul_rn(x, r);
        return __float_as_uint(__fadd_rn(fmaf(fmaf(-q, s, x), r, q), 12582912.0f));
    }
};
