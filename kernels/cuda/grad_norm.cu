// The sum of squares of gradients, for their norm, and unscaling with an overflow check.
//
//   *sum += Σ x², vector after vector;  x *= inverse scale, and whether any result is infinite or NaN
//
// Shapes    x: [vectors] addresses of f32; counts their elements, starts the first piece of each, then the number of
//           pieces (vectors.cuh). parts, an f64 for each piece of 32768 elements of a vector; totals [vectors] (f64).
// Geometry  squares: one warp per piece; the sum of parts: one block, in which each warp has every eighth vector.
//           Unscale: one thread per 16 bytes (neighbours.cuh).
// Launches  two for all parameters.
// Bytes     squares 4 read per element, 8 written per piece; unscale 4 read and 4 written.
// Bits      as on the CPU: crates/cpu/src/optim.rs. Element i of a piece is added to lane i % 32 in f64, then the lanes
//           one after another, then the pieces one after another, then the vectors. The CPU has no unscale: each
//           element is one product.
#include "neighbours.cuh"
#include "vectors.cuh"

#define PIECE 32768
#define WARP 32

// Sums the lanes one after another, from lane 0; all lanes get the sum.
DEVICE double in_order(double lane) {
    double sum = 0.0;
    for (int l = 0; l < WARP; l++) sum += __shfl_sync(FULL_WARP, lane, l);
    return sum;
}

KERNEL sum_of_squares(const float* const* x, const i64* starts, const i64* counts, i64 vectors, double* parts) {
    i64 part = global_thread() / WARP;
    int lane = static_cast<int>(threadIdx.x) % WARP;
    bool live = part < starts[vectors];
    double sum = 0.0;
    if (live) {
        Piece piece = piece_of(starts, vectors, part);
        const float* vector = x[piece.vector];
        i64 begin = piece.number * PIECE, end = smaller(counts[piece.vector], begin + PIECE);
        for (i64 i = begin + lane; i < end; i += WARP) {
            double value = static_cast<double>(vector[i]);
            sum += value * value;  // the product is exact
        }
    }
    sum = in_order(sum);
    if (live && lane == 0) parts[part] = sum;
}

// sum + the numbers in order, by one warp, which loads 32 at a time.
DEVICE double sum_in_order(double sum, const double* numbers, i64 count) {
    int lane = static_cast<int>(threadIdx.x) % WARP;
    for (i64 first = 0; first < count; first += WARP) {
        double number = first + lane < count ? numbers[first + lane] : 0.0;
        for (int l = 0; l < WARP; l++) {
            double next = __shfl_sync(FULL_WARP, number, l);
            if (first + l < count) sum += next;
        }
    }
    return sum;
}

// totals[vector] = the sum of its parts, in order; *sum += the totals, in order.
KERNEL sum_of_parts(const double* parts, const i64* starts, i64 vectors, double* totals, double* sum) {
    int thread = static_cast<int>(threadIdx.x), warp = thread / WARP;
    for (i64 vector = warp; vector < vectors; vector += THREADS / WARP) {
        i64 first = starts[vector];
        double total = sum_in_order(0.0, parts + first, starts[vector + 1] - first);
        if (thread % WARP == 0) totals[vector] = total;
    }
    __syncthreads();
    if (warp != 0) return;
    double all = sum_in_order(*sum, totals, vectors);
    if (thread == 0) *sum = all;
}

// x[i] *= inverse; *overflow becomes 1 if a product is infinite or NaN, and is unchanged otherwise. All threads that
// write it write the same value.
KERNEL unscale(float* x, float inverse, int* overflow, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Vector<float, FOUR> four = load_vector<FOUR>(x, at, count);
#pragma unroll
    for (int j = 0; j < FOUR; j++) {
        four.of[j] = four.of[j] * inverse;
        if (at + j < count && (__float_as_uint(four.of[j]) & 0x7f800000u) == 0x7f800000u) *overflow = 1;
    }
    store_vector(x, at, count, four);
}
