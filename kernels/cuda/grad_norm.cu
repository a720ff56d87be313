// The sum of squares of gradients, for their norm, and the check of gradients that were scaled.
//
//   sums[at] += Σ x²;  x *= inverse scale, and whether any of them is infinite or NaN
//
// Shapes    x: `segments` segments of `len` elements, `pitch` apart; parts, one f64 for each piece of 32768 elements of a segment.
// Geometry  squares: a warp a piece; the sum of parts: one warp. Unscale: a thread an element.
// Bytes     squares 4 read an element, 8 written a piece; unscale 4 read and 4 written.
// Bits      those of the CPU: crates/tensor/src/cpu/optim.rs. Element i of a piece is added to lane i % 32 in f64, then the lanes one
//           after another, then the pieces one after another. The CPU has no unscale: each element is one product.
#include "meshwork.cuh"

#define PIECE 32768
#define WARP 32

// The lanes one after another, from lane 0, the same in all lanes.
DEVICE double in_order(double lane) {
    double sum = 0.0;
    for (int l = 0; l < WARP; l++) sum += __shfl_sync(FULL_WARP, lane, l);
    return sum;
}

KERNEL sum_of_squares(const float* x, i64 len, i64 segments, i64 pitch, double* parts) {
    i64 pieces = (len + PIECE - 1) / PIECE, part = global_thread() / WARP;
    int lane = static_cast<int>(threadIdx.x) % WARP;
    bool live = part < pieces * segments;
    double sum = 0.0;
    if (live) {
        const float* segment = x + part / pieces * pitch;
        i64 begin = part % pieces * PIECE, end = smaller(len, begin + PIECE);
        for (i64 i = begin + lane; i < end; i += WARP) {
            double value = static_cast<double>(segment[i]);
            sum += value * value;  // the product is exact
        }
    }
    sum = in_order(sum);
    if (live && lane == 0) parts[part] = sum;
}

// sums[at] += the sum of the parts, in order. One warp: it loads 32 at a time.
KERNEL sum_of_parts(const double* parts, i64 count, double* sums, i64 at) {
    int lane = static_cast<int>(threadIdx.x);
    double sum = 0.0;
    for (i64 first = 0; first < count; first += WARP) {
        double part = first + lane < count ? parts[first + lane] : 0.0;
        for (int l = 0; l < WARP; l++) {
            double next = __shfl_sync(FULL_WARP, part, l);
            if (first + l < count) sum += next;
        }
    }
    if (lane == 0) sums[at] += sum;
}

// x[i] *= inverse; *overflow becomes 1 if a product is infinite or NaN, and is left alone otherwise. All who write it write the same.
KERNEL unscale(float* x, float inverse, int* overflow, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    float value = x[i] * inverse;
    x[i] = value;
    if ((__float_as_uint(value) & 0x7f800000u) == 0x7f800000u) *overflow = 1;
}
