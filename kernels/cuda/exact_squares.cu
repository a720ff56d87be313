// Sums of squares that do not depend on their order: whole numbers wide enough for the square of every f32.
//
//   digits[at] += the digits of Σ x², of 32 bits each, the lowest first, as f64;  the last: how many x are infinite or NaN
//
// Shapes    x [count]; parts [pieces, 20] (i64), one for each piece of 4096 elements, digits below 2^32; digits [20] from place `at` on.
// Geometry  a thread a piece for the parts; one warp for their sum, of which a lane has a digit, and lane 0 carries.
// Bytes     4 read an element, 160 written and read a piece.
// Bits      those of the CPU: crates/core/src/exact.rs. Whole numbers add up to the same in any order.
#include "exact.cuh"

#define EXACT_PIECE 4096

KERNEL exact_squares(const float* x, u64* parts, i64 count, i64 pieces) {
    i64 piece = global_thread();
    if (piece >= pieces) return;
    Digits own;
    own.clear();
    for (i64 i = piece * EXACT_PIECE; i < smaller(count, (piece + 1) * EXACT_PIECE); i++) own.add_square(x[i]);
    own.carry();
#pragma unroll
    for (int i = 0; i < LIMBS; i++) parts[piece * LIMBS + i] = own.of[i];
}

// digits[at ..] += the sum of the parts, its digits below 2^32.
KERNEL exact_squares_sum(const u64* parts, i64 pieces, double* digits, i64 at) {
    int lane = static_cast<int>(threadIdx.x);
    u64 sum = 0;
    for (i64 piece = 0; lane < LIMBS && piece < pieces; piece++) sum += parts[piece * LIMBS + lane];
    Digits all;
#pragma unroll
    for (int i = 0; i < LIMBS; i++) all.of[i] = __shfl_sync(FULL_WARP, sum, i);
    all.carry();
    if (lane == 0) all.add_to(digits + at);
}
