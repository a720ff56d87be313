// Elements chosen along a dim by indices (crates/tensor/src/kernel/indexing.rs).
//
//   argmax: out[o, i] = the first e with the largest x[o, e, i], or with a NaN
//   pick: out[o, j, i] = x[o, index[o, j, i], i];  dx[o, e, i] = Σ_j dy[o, j, i] over the j with index e, in order
//
// Shapes    x, dx [outer, extent, inner]; out of argmax [outer, inner]; out of pick, dy [outer, taken, inner]; index of
//           their shape if `each` is not 0, else [taken].
// Geometry  one thread per element of the result. A thread of argmax reads its dim in order, one of the gradient all
//           indices of its dim: with many indices along one dim it is slow.
// Bytes     argmax x once; pick two words read and one written per element; the gradient one word written per element
//           and one read per element of dy, and the indices from the caches.
// Bits      as on the CPU: crates/cpu/src/kernels/indexing.rs. An index outside of the dim picks zero, and is a fault
//           that check_ids reports.
#include "meshwork.cuh"

// The place in `index` of the element (o, j, i).
DEVICE i64 place_of(i64 o, i64 j, i64 i, i64 taken, i64 inner, int each) { return each ? (o * taken + j) * inner + i : j; }

KERNEL argmax_dim(const float* x, int* out, i64 count, i64 extent, i64 inner) {
    i64 at = global_thread();
    if (at >= count) return;
    const float* from = x + at / inner * extent * inner + at % inner;
    float best = from[0];
    i64 found = 0;
    for (i64 e = 1; e < extent; e++) {
        float next = from[e * inner];
        // A NaN is larger than all, and equal to none: the first stays.
        if (next > best || (next != next && best == best)) best = next, found = e;
    }
    out[at] = static_cast<int>(found);
}

KERNEL pick_forward(const float* x, const int* index, float* out, i64 count, i64 extent, i64 inner, i64 taken, int each) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 i = at % inner, j = at / inner % taken, o = at / inner / taken;
    i64 e = index[place_of(o, j, i, taken, inner, each)];
    out[at] = e >= 0 && e < extent ? x[(o * extent + e) * inner + i] : 0.0f;
}

KERNEL pick_backward(const float* dy, const int* index, float* dx, i64 count, i64 extent, i64 inner, i64 taken, int each) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 i = at % inner, e = at / inner % extent, o = at / inner / extent;
    float sum = 0.0f;
    for (i64 j = 0; j < taken; j++) {
        if (index[place_of(o, j, i, taken, inner, each)] == e) sum += dy[(o * taken + j) * inner + i];
    }
    dx[at] = sum;
}
