// SwiGLU (Shazeer, arXiv:2002.05202) of pairs (gate, up) that are next to each other.
//
//   σ(x) = 1/(1 + e^(-x)),  silu(x) = x σ(x),  out = silu(gate) up
//   dgate = dy up σ (1 + gate (1 - σ)),  dup = dy silu(gate), in place of gate and up
//
// Shapes    x [count, 2]; out, dy [count].
// Geometry  a thread a pair, or eight of 16 bits (_16).
// Bytes     8 read, 4 written a pair (2 if out is bf16); backward 12 read, 8 written; all half in 16 bits, by 16 bytes.
// Bits      those of the CPU: crates/tensor/src/cpu/kernels/swiglu.rs.
#include "math.cuh"
#include "halves.cuh"

// σ(x) and 1 - σ(x).
DEVICE Logistic logistic(float x) {
    Logistic sides = logistic_base_2(fabsf(x * static_cast<float>(LOG2_E)));
    if (x > 0.0f) return sides;
    return {sides.far, sides.near};
}

DEVICE float swiglu_of(float gate, float up) { return gate * logistic(gate).near * up; }

DEVICE float swiglu_value(const float* x, i64 i) { return swiglu_of(x[2 * i], x[2 * i + 1]); }

// The gradients of a pair, in place of it.
DEVICE void swiglu_gradient(float g, float& gate, float& up) {
    Logistic sides = logistic(gate);
    float dgate = g * up * (sides.near * (gate * sides.far + 1.0f));
    up = g * (gate * sides.near);
    gate = dgate;
}

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
    float gate = x[2 * i], up = x[2 * i + 1];
    swiglu_gradient(dy[i], gate, up);
    x[2 * i] = gate, x[2 * i + 1] = up;
}

KERNEL swiglu_forward_16(const u16* x, u16* out, i64 count, int f16) {
    i64 at = global_thread() * EIGHT;
    if (at >= count) return;
    Halves pairs = halves(x, f16);
    Vector<float, EIGHT> left = load_vector<EIGHT>(pairs, 2 * at, 2 * count), right = load_vector<EIGHT>(pairs, 2 * at + EIGHT, 2 * count), y;
    for (int j = 0; j < EIGHT / 2; j++) {
        y.of[j] = swiglu_of(left.of[2 * j], left.of[2 * j + 1]);
        y.of[EIGHT / 2 + j] = swiglu_of(right.of[2 * j], right.of[2 * j + 1]);
    }
    store_vector(halves(out, f16), at, count, y);
}

KERNEL swiglu_backward_16(const u16* dy, u16* x, i64 count, int f16) {
    i64 at = global_thread() * EIGHT;
    if (at >= count) return;
    Halves pairs = halves(x, f16);
    Vector<float, EIGHT> left = load_vector<EIGHT>(pairs, 2 * at, 2 * count), right = load_vector<EIGHT>(pairs, 2 * at + EIGHT, 2 * count);
    Vector<float, EIGHT> g = load_vector<EIGHT>(halves(dy, f16), at, count);
    for (int j = 0; j < EIGHT / 2; j++) {
        swiglu_gradient(g.of[j], left.of[2 * j], left.of[2 * j + 1]);
        swiglu_gradient(g.of[EIGHT / 2 + j], right.of[2 * j], right.of[2 * j + 1]);
    }
    store_vector(pairs, 2 * at, 2 * count, left);
    store_vector(pairs, 2 * at + EIGHT, 2 * count, right);
}
