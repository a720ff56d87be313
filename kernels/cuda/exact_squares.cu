// Sums of squares that do not depend on their order: whole numbers wide enough for the square of every f32.
//
//   digits += the digits of Σ x², of 32 bits each, the lowest first, as f64;  the last: how many x are infinite or NaN
//
// Shapes    x: [vectors] addresses of f32; counts their elements, starts the first piece of each and the number of all (vectors.cuh). parts [pieces, 20] (u64),
//           one for each piece of 4096 elements of a vector, digits below 2^32; digits [20].
// Geometry  a thread a piece for the parts; one warp for their sum, of which a lane has a digit, and lane 0 carries.
// Launches  two for all parameters.
// Bytes     4 read an element, 160 written and read a piece.
// Bits      those of the CPU: crates/core/src/exact.rs. Whole numbers add up to the same in any order.
#include "exact.cuh"
#include "vectors.cuh"

#define EXACT_PIECE 4096

KERNEL exact_squares(const float* const* x, const i64* starts, const i64* counts, i64 vectors, u64* parts) {
    i64 part = global_thread();
    if (part >= starts[vectors]) return;
    Piece piece = piece_of(starts, vectors, part);
    const float* vector = x[piece.vector];
    i64 begin = piece.number * EXACT_PIECE, end = smaller(counts[piece.vector], begin + EXACT_PIECE);
    Digits own;
    own.clear();
    for (i64 i = begin; i < end; i++) own.add_square(vector[i]);
    own.carry();
#pragma unroll
    for (int i = 0; i < LIMBS; i++) parts[part * LIMBS + i] = own.of[i];
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
