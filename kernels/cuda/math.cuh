// The functions of crates/cpu/src/kernels/float.rs, operation by operation, so that the bits are the same. Errors are
// stated there.
#pragma once
#include "meshwork.cuh"

#define LOG2_E 1.44269504088896340736
#define INFINITE __uint_as_float(0x7f800000u)

// 1.5 * 2^23 + 127: added to a small number it leaves the nearest integer, with the bias of an exponent, in the low
// bits.
#define ROUND 12583039.0f

// e^x for x of at most 89. NaN passes.
DEVICE float exp_below(float x) {
    x = -88.0f > x ? -88.0f : x;
    float shifted = fmaf(x, static_cast<float>(LOG2_E), ROUND);
    float n = shifted - ROUND;
    float r = fmaf(n, 2.1219444e-4f, fmaf(n, -(355.0f / 512.0f), x));
    float p = 1.3838812e-3f;
    p = fmaf(p, r, 8.369192e-3f);
    p = fmaf(p, r, 4.1668102e-2f);
    p = fmaf(p, r, 1.6666517e-1f);
    p = fmaf(p, r, 0.49999994f);
    float exp_r = fmaf(p, r * r, r) + 1.0f;
    return exp_r * __uint_as_float(__float_as_uint(shifted) << 23);
}

// e^x. NaN passes.
DEVICE float exp_bits(float x) { return exp_below(89.0f < x ? 89.0f : x); }

// ln x of a positive number that is not subnormal. Nothing is fused.
DEVICE float ln_bits(float x) {
    u32 bits = __float_as_uint(x) - 0x3f3504f3u;
    float e = static_cast<float>(static_cast<int>(bits) >> 23);
    float f = __uint_as_float((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    float z = f * f;
    float p = 7.0376836e-2f;
    p = p * f + -1.151461e-1f;
    p = p * f + 1.1676999e-1f;
    p = p * f + -1.2420141e-1f;
    p = p * f + 1.4249323e-1f;
    p = p * f + -1.6668058e-1f;
    p = p * f + 2.0000715e-1f;
    p = p * f + -2.4999994e-1f;
    p = p * f + 3.333333e-1f;
    float ln = (f + (f * z * p + e * -2.1219444e-4f - 0.5f * z)) + e * (355.0f / 512.0f);
    return x < INFINITE ? ln : x;
}

#ifndef FLOAT16_TWINS
// 1/x with an error of at most one unit in the last place.
DEVICE float reciprocal_near(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// The bits of 1/x for x from 1 to 2, from `near`, which is one unit in the last place off at most: steps of Newton,
// without the branches of a division. The steps miss one number, the last before 2, whose reciprocal lies almost
// halfway between two numbers (Markstein, 1990). NaN passes.
DEVICE float reciprocal_from(float near, float x) {
    float y = fmaf(near, fmaf(-x, near, 1.0f), near);
    y = fmaf(y, fmaf(-x, y, 1.0f), y);
    return x == __uint_as_float(0x3fffffffu) ? __uint_as_float(0x3f000001u) : y;
}

struct Logistic {
    float near, far;
};

// 1/(1 + 2^-t) and 1/(1 + 2^t) for t of at least 0. NaN passes.
DEVICE Logistic logistic_base_2(float t) {
    float x = -127.0f > -t ? -127.0f : -t;
    float shifted = x + ROUND;
    float f = x - (shifted - ROUND);
    float p = 1.3276472e-3f;
    p = fmaf(p, f, 9.675541e-3f);
    p = fmaf(p, f, 5.550713e-2f);
    p = fmaf(p, f, 0.2402212f);
    p = fmaf(p, f, 0.69314694f);
    p = fmaf(p, f, 1.0000001f);
    float e = p * __uint_as_float(__float_as_uint(shifted) << 23);
    float near = reciprocal_from(reciprocal_near(1.0f + e), 1.0f + e);
    return {near, e * near};
}

DEVICE float tanh_bits(float x) {
    float size = fabsf(x);
    Logistic of = logistic_base_2(size * (2.0f * static_cast<float>(LOG2_E)));
    float z = x * x;
    float p = 3.592128e-3f;
    p = fmaf(p, z, -8.863235e-3f);
    p = fmaf(p, z, 2.186949e-2f);
    p = fmaf(p, z, -5.3968254e-2f);
    p = fmaf(p, z, 1.3333333e-1f);
    p = fmaf(p, z, -3.3333334e-1f);
    p = fmaf(p, z, 1.0f);
    return copysignf(size < 0.5f ? size * p : of.near - of.far, x);
}
