// SwiGLU (Shazeer, arXiv:2002.05202) of pairs (gate, up) that are next to each other.
//
//   σ(x) = 1/(1 + e^(-x)),  silu(x) = x σ(x),  out = silu(gate) up
//   dgate = dy up σ (1 + gate (1 - σ)),  dup = dy silu(gate), in place of gate and up
//
// Shapes    x [count, 2]; out, dy [count].
// Geometry  one thread per four pairs, eight where tensors have 16 bits, by 16 bytes (neighbours.cuh).
// Bytes     8 read, 4 written per pair (2 if out is bf16); backward 12 read, 8 written; all half in 16 bits (_16).
// Bits      as on the CPU: crates/cpu/src/kernels/swiglu.rs.
#include "math.cuh"
#include "halves.cuh"

// σ(x) and 1 - σ(x).
DEVICE Logistic logistic(float x) {
    Logistic sides = logistic_base_2(fabsf(x * static_cast<float>(LOG2_E)));
    if (x > 0.0f) return sides;
    return {sides.far, sides.near};
}

DEVICE float swiglu_of(float gate, float up) { return gate * logistic(gate).near * up; }

// The gradients of a pair, in place.
DEVICE void swiglu_gradient(float g, float& gate, float& up) {
    Logistic sides = logistic(gate);
    float dgate = g * up * (sides.near * (gate * sides.far + 1.0f));
    up = g * (gate * sides.near);
    gate = dgate;
}

template <int N, class In, class Out> DEVICE void swiglu_forward(In x, Out out, i64 count) {
    i64 at = global_thread() * N;
    if (at >= count) return;
    Vector<float, 2 * N> pairs = load_vector<2 * N>(x, 2 * at, 2 * count);
    Vector<float, N> y;
#pragma unroll
    for (int j = 0; j < N; j++) y.of[j] = swiglu_of(pairs.of[2 * j], pairs.of[2 * j + 1]);
    store_vector(out, at, count, y);
}

template <int N, class In, class Out> DEVICE void swiglu_backward_of(In dy, Out x, i64 count) {
    i64 at = global_thread() * N;
    if (at >= count) return;
    Vector<float, 2 * N> pairs = load_vector<2 * N>(x, 2 * at, 2 * count);
    Vector<float, N> g = load_vector<N>(dy, at, count);
#pragma unroll
    for (int j = 0; j < N; j++) swiglu_gradient(g.of[j], pairs.of[2 * j], pairs.of[2 * j + 1]);
    store_vector(x, 2 * at, 2 * count, pairs);
}

KERNEL swiglu_forward_f32(const float* x, float* out, i64 count) { swiglu_forward<FOUR>(x, out, count); }

KERNEL swiglu_forward_bf16(const float* x, u16* out, i64 count) { swiglu_forward<EIGHT>(x, out, count); }

KERNEL swiglu_forward_16(const u16* x, u16* out, i64 count, int f16) {
    in_type(f16, [&](auto of) { swiglu_forward<EIGHT>(of(x), of(out), count); });
}

KERNEL swiglu_backward(const float* dy, float* x, i64 count) { swiglu_backward_of<FOUR>(dy, x, count); }

KERNEL swiglu_backward_16(const u16* dy, u16* x, i64 count, int f16) {
    in_type(f16, [&](auto of) { swiglu_backward_of<EIGHT>(of(dy), of(x), count); });
}
