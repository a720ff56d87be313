// What feedback compresses in place of a value, and what it keeps of it: crates/compress/src/feedback.rs.
//
//   ef: out = x + e, e = target - sent;  ef21: out = x - g, g += sent;  ef21m: v = (1-η) v + η x, at first x; out = v - g
//
// Shapes    all [count]; e, g and v are the sender's residual, estimate and momentum.
// Geometry  a thread an element.
// Bytes     8 to 12 read and 4 or 8 written an element.
// Bits      those of the CPU.
#include "meshwork.cuh"

KERNEL feedback_residual(const float* x, const float* residual, float* out, i64 count) {
    i64 i = global_thread();
    if (i < count) out[i] = x[i] + residual[i];
}

KERNEL feedback_difference(const float* x, const float* estimate, float* out, i64 count) {
    i64 i = global_thread();
    if (i < count) out[i] = x[i] - estimate[i];
}

KERNEL feedback_momentum(const float* x, const float* estimate, float* momentum, int first, float eta, float kept, float* out, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    float v = first ? x[i] : kept * momentum[i] + eta * x[i];
    momentum[i] = v;
    out[i] = v - estimate[i];
}

KERNEL feedback_kept(const float* target, const float* sent, float* residual, i64 count) {
    i64 i = global_thread();
    if (i < count) residual[i] = target[i] - sent[i];
}
