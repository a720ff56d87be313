// Reductions of several ranks' buffers in the balanced tree (crates/core/src/tree.rs): three ranks give (a + b) + c.
//
//   out[i] = Σ_ranks inputs[rank][i];  or their maximum
//
// Shapes    inputs [ranks], the addresses of buffers [count]; out [count], which may be one of them.
// Geometry  a thread an element; the sums that wait are in registers.
// Bytes     4 ranks read and 4 written an element; half of that for 16 bits.
// Bits      those of the communicator of threads, crates/core/src/comm/thread/reduce.rs: 16-bit numbers are added in f32 and rounded once. A
//           maximum is NaN if any is.
#include "float16.cuh"
#include "tree.cuh"

KERNEL reduce_sum_f32(const float* const* inputs, i64 ranks, float* out, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    Tree tree;
    for (i64 rank = 0; rank < ranks; rank++) tree.push(inputs[rank][i]);
    out[i] = tree.finish();
}

KERNEL reduce_sum_bf16(const u16* const* inputs, i64 ranks, u16* out, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    Tree tree;
    for (i64 rank = 0; rank < ranks; rank++) tree.push(from_bf16(inputs[rank][i]));
    out[i] = to_bf16(tree.finish());
}

KERNEL reduce_sum_f16(const u16* const* inputs, i64 ranks, u16* out, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    Tree tree;
    for (i64 rank = 0; rank < ranks; rank++) tree.push(from_f16(inputs[rank][i]));
    out[i] = to_f16(tree.finish());
}

KERNEL reduce_max_f32(const float* const* inputs, i64 ranks, float* out, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    float max = inputs[0][i];
    for (i64 rank = 1; rank < ranks; rank++) {
        float next = inputs[rank][i];
        max = max > next || max != max ? max : next;
    }
    out[i] = max;
}

// The sum of `vectors` vectors of n elements that follow each other in x.
KERNEL tree_sum(const float* x, i64 vectors, float* out, i64 n) {
    i64 i = global_thread();
    if (i >= n) return;
    Tree tree;
    for (i64 vector = 0; vector < vectors; vector++) tree.push(x[vector * n + i]);
    out[i] = tree.finish();
}
