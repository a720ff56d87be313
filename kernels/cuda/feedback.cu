// Error feedback: the values to compress instead of the inputs, and the sender's state:
// crates/compress/src/feedback.rs.
//
//   ef: out = x + e, e = target - sent;  ef21: out = x - g, g += sent;  ef21m: v = (1-η) v + η x, at first x; out = v - g
//
// Shapes    all [count]; e, g and v are the sender's residual, estimate and momentum.
// Geometry  one thread per four elements, by 16 bytes (neighbours.cuh).
// Bytes     8 to 12 read and 4 or 8 written per element.
// Bits      as on the CPU.
#include "neighbours.cuh"

struct Minus {
    DEVICE float operator()(float a, float b) const { return a - b; }
};

KERNEL feedback_residual(const float* x, const float* residual, float* out, i64 count) {
    join_vectors<FOUR>(x, residual, out, count, [](float x, float e) { return x + e; });
}

KERNEL feedback_difference(const float* x, const float* estimate, float* out, i64 count) {
    join_vectors<FOUR>(x, estimate, out, count, Minus());
}

KERNEL feedback_momentum(const float* x, const float* estimate, float* momentum, int first, float eta, float kept, float* out, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Vector<float, FOUR> v = load_vector<FOUR>(x, at, count), g = load_vector<FOUR>(estimate, at, count);
    if (!first) {
        Vector<float, FOUR> old = load_vector<FOUR>(momentum, at, count);
#pragma unroll
        for (int j = 0; j < FOUR; j++) v.of[j] = kept * old.of[j] + eta * v.of[j];
    }
    store_vector(momentum, at, count, v);
#pragma unroll
    for (int j = 0; j < FOUR; j++) v.of[j] = v.of[j] - g.of[j];
    store_vector(out, at, count, v);
}

KERNEL feedback_kept(const float* target, const float* sent, float* residual, i64 count) {
    join_vectors<FOUR>(target, sent, residual, count, Minus());
}
