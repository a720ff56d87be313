// Sums of squares that do not depend on their order: whole numbers wide enough for the square of every f32.
//
//   digits += the digits of Σ x², of 32 bits each, the lowest first, as f64;  the last: how many x are infinite or NaN
//
// Shapes    x: [vectors] addresses of f32; counts their elements, starts the first piece of each, then the number of
//           pieces (vectors.cuh). parts [pieces, 20] (u64), one for each piece of 16384 elements of a vector, digits
//           below 2^32; digits [20].
// Geometry  one warp per piece for the parts, 16 bytes per lane at a time (neighbours.cuh); one warp for their sum:
//           each lane has a digit, and lane 0 carries.
// Launches  two for all parameters.
// Bytes     4 read per element, 160 written and read per piece.
// Bits      as on the CPU: crates/core/src/exact.rs. Sums of integers do not depend on the order.
#include "exact.cuh"
#include "neighbours.cuh"
#include "vectors.cuh"
#include "warp.cuh"

#define EXACT_PIECE 16384

KERNEL exact_squares(const float* const* x, const i64* starts, const i64* counts, i64 vectors, u64* parts) {
    i64 part = global_thread() / WARP;
    if (part >= starts[vectors]) return;
    Piece piece = piece_of(starts, vectors, part);
    const float* vector = x[piece.vector];
    i64 begin = piece.number * EXACT_PIECE, end = smaller(counts[piece.vector], begin + EXACT_PIECE);
    Digits own;
    own.clear();
    int lane = lane_of_warp();
    for (i64 at = begin + lane * FOUR; at < end; at += WARP * FOUR) {
        Vector<float, FOUR> four = load_vector<FOUR>(vector, at, end);  // zeros beyond the end add nothing
#pragma unroll
        for (int j = 0; j < FOUR; j++) own.add_square(four.of[j]);
    }
    // One width after another: unrolling all widths would take all registers.
#pragma unroll 1
    for (int width = WARP / 2; width > 0; width /= 2) {
#pragma unroll
        for (int i = 0; i < LIMBS; i++) own.of[i] += __shfl_xor_sync(FULL_WARP, own.of[i], width);
    }
    own.carry();
#pragma unroll
    for (int i = 0; i < LIMBS; i++) {
        if (lane == i) parts[part * LIMBS + i] = own.of[i];
    }
}

// digits += the sum of the parts, its digits below 2^32.
KERNEL exact_squares_sum(const u64* parts, i64 pieces, double* digits) {
    int lane = static_cast<int>(threadIdx.x);
    u64 sum = 0;
    for (i64 piece = 0; lane < LIMBS && piece < pieces; piece++) sum += parts[piece * LIMBS + lane];
    Digits all;
#pragma unroll
    for (int i = 0; i < LIMBS; i++) all.of[i] = __shfl_sync(FULL_WARP, sum, i);
    all.carry();
    if (lane == 0) all.add_to(digits);
}
