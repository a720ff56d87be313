// Sums of squares that do not depend on their order: whole numbers wide enough for the square of every f32.
//
//   digits[at] += the digits of Σ x², of 32 bits each, the lowest first, as f64;  the last: how many x are infinite or NaN
//
// Shapes    x [count]; parts [pieces, 20] (i64), one for each piece of 4096 elements, digits below 2^32; digits [20] from place `at` on.
// Geometry  a thread a piece for the parts; one warp for their sum, of which a lane has a digit, and lane 0 carries.
// Bytes     4 read an element, 160 written and read a piece.
// Bits      those of the CPU: crates/core/src/exact.rs. Whole numbers add up to the same in any order.
#include "meshwork.cuh"

#define LIMBS 20
#define DIGITS 19
#define EXACT_PIECE 4096
#define LOW_BITS 0xffffffffull

// Makes digits below 2^32 of those above; the count of what is not finite stays.
DEVICE void carry(u64 (&digits)[LIMBS]) {
#pragma unroll
    for (int i = 0; i < DIGITS - 1; i++) {
        digits[i + 1] += digits[i] >> 32;
        digits[i] &= LOW_BITS;
    }
}

KERNEL exact_squares(const float* x, u64* parts, i64 count, i64 pieces) {
    i64 piece = global_thread();
    if (piece >= pieces) return;
    u64 digits[LIMBS];
#pragma unroll
    for (int i = 0; i < LIMBS; i++) digits[i] = 0;
    for (i64 i = piece * EXACT_PIECE; i < smaller(count, (piece + 1) * EXACT_PIECE); i++) {
        u32 bits = __float_as_uint(x[i]), exponent = bits >> 23 & 255u;
        u64 mantissa = (bits & 0x7fffffu) | (exponent > 0 ? 1u << 23 : 0u), square = mantissa * mantissa;
        u32 place = exponent > 0 ? 2 * (exponent - 1) : 0, digit = place / 32, shift = place % 32;
        // The square shifted, in three digits: 48 bits and up to 31 more.
        u64 low = square << shift, high = shift > 0 ? square >> (64 - shift) : 0;
        u64 first = low & LOW_BITS, second = low >> 32, third = high & LOW_BITS;
        // Every digit takes its share, mostly zero: an index known only now would put the digits into memory.
#pragma unroll
        for (int d = 0; d < DIGITS; d++) {
            int part = d - static_cast<int>(digit);
            u64 share = part == 0 ? first : part == 1 ? second : part == 2 ? third : 0;
            digits[d] += exponent == 255 ? 0 : share;
        }
        if (exponent == 255) digits[DIGITS]++;
    }
    carry(digits);
#pragma unroll
    for (int i = 0; i < LIMBS; i++) parts[piece * LIMBS + i] = digits[i];
}

// digits[at ..] += the sum of the parts, its digits below 2^32.
KERNEL exact_squares_sum(const u64* parts, i64 pieces, double* digits, i64 at) {
    int lane = static_cast<int>(threadIdx.x);
    u64 sum = 0;
    for (i64 piece = 0; lane < LIMBS && piece < pieces; piece++) sum += parts[piece * LIMBS + lane];
    u64 all[LIMBS];
#pragma unroll
    for (int i = 0; i < LIMBS; i++) all[i] = __shfl_sync(FULL_WARP, sum, i);
    carry(all);
    if (lane > 0) return;
#pragma unroll
    for (int i = 0; i < LIMBS; i++) digits[at + i] += static_cast<double>(all[i]);
}
