// SwiGLU (Shazeer, arXiv:2002.05202) of pairs (gate, up) that are next to each other.
//
//   σ(x) = 1/(1 + e^(-x)),  silu(x) = x σ(x),  out = silu(gate) up
//   dgate = dy up σ (1 + gate (1 - σ)),  dup = dy silu(gate), in place of gate and up
//
// Shapes    x [count, 2]; out, dy [count].
// Geometry  a thread a pair.
// Bytes     8 read, 4 written a pair (2 if out is bf16); backward 12 read, 8 written.
// Bits      those of the CPU: crates/tensor/src/cpu/kernels/swiglu.rs.
#include "math.cuh"
#include "float16.cuh"

// σ(x) and 1 - σ(x).
DEVICE Logistic logistic(float x) {
    Logistic sides = logistic_base_2(fabsf(x * static_cast<float>(LOG2_E)));
    if (x > 0.0f) return sides;
    return {sides.far, sides.near};
}

DEVICE float swiglu_value(const float* x, i64 i) { return x[2 * i] * logistic(x[2 * i]).near * x[2 * i + 1]; }

KERNEL swiglu_forward_f32(const float* x, float* out, i64 count) {
    i64 i = global_thread();
    if (i < count) out[i] = swiglu_value(x, i);
}

KERNEL swiglu_forward_bf16(const float* x, u16* out, i64 count) {
    i64 i = global_thread();
    if (i < count) out[i] = to_operand(swiglu_value(x, i));
}

KERNEL swiglu_backward(const float* dy, float* x, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    float gate = x[2 * i], up = x[2 * i + 1], g = dy[i];
    Logistic sides = logistic(gate);
    x[2 * i] = g * up * (sides.near * (gate * sides.far + 1.0f));
    x[2 * i + 1] = g * (gate * sides.near);
}
