// Sums of squares as whole numbers: crates/core/src/exact.rs.
#pragma once
#include "meshwork.cuh"

#define LIMBS 20
#define DIGITS 19
#define LOW_BITS 0xffffffffull

// 19 digits of 32 bits, the lowest first, which may exceed 32 bits until `carry`; and a count of terms that were not
// finite.
struct Digits {
    u64 of[LIMBS];

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < LIMBS; i++) of[i] = 0;
    }

    DEVICE void add_square(float x) {
        u32 bits = __float_as_uint(x), exponent = bits >> 23 & 255u;
        u64 mantissa = (bits & 0x7fffffu) | (exponent > 0 ? 1u << 23 : 0u), square = mantissa * mantissa;
        u32 place = exponent > 0 ? 2 * (exponent - 1) : 0, digit = place / 32, shift = place % 32;
        // The square shifted, in three digits: 48 bits and up to 31 more.
        u64 low = square << shift, high = shift > 0 ? square >> (64 - shift) : 0;
        u64 first = low & LOW_BITS, second = low >> 32, third = high & LOW_BITS;
        // Every digit gets an addition, mostly of zero: a runtime index would move the digits from registers to local
        // memory.
#pragma unroll
        for (int d = 0; d < DIGITS; d++) {
            int part = d - static_cast<int>(digit);
            u64 share = part == 0 ? first : part == 1 ? second : part == 2 ? third : 0;
            of[d] += exponent == 255 ? 0 : share;
        }
        if (exponent == 255) of[DIGITS]++;
    }

    // Carries, so that digits are below 2^32; the count of terms that were not finite stays.
    DEVICE void carry() {
#pragma unroll
        for (int i = 0; i < DIGITS - 1; i++) {
            of[i + 1] += of[i] >> 32;
            of[i] &= LOW_BITS;
        }
    }

    // Adds the digits to `digits`, which may be summed over ranks.
    DEVICE void add_to(double* digits) const {
#pragma unroll
        for (int i = 0; i < LIMBS; i++) digits[i] += static_cast<double>(of[i]);
    }
};
