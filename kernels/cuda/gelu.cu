// GELU in its tanh form, fused with a bias (Hendrycks and Gimpel, arXiv:1606.08415).
//
//   u = √(2/π) (x + 0.044715 x³),  σ = 1/(1 + e^(-2u)),  gelu(x) = x σ,  gelu'(x) = σ + x σ (1 - σ) 2 du/dx
//   out = gelu(x + bias);  dx = dy gelu'(x + bias) in place of dy;  without a bias: bias null
//
// Shapes    x, out, dy [rows, n]; bias [n]. The gradient of the bias is the sum over the rows of dx (bias.cu).
// Geometry  a thread an element.
// Bytes     4 read and 4 written an element (2 if out is bf16); backward 8 read, 4 written.
// Bits      those of the CPU: crates/tensor/src/cpu/kernels/gelu.rs, which has the polynomial (float.rs) and its error.
#include "math.cuh"
#include "float16.cuh"

#define GELU_SLOPE 0.7978845608028654
#define GELU_CUBE 0.044715
#define GELU_BITS (2.0 * GELU_SLOPE * LOG2_E)

struct Gate {
    float sigma, slope;
};

DEVICE Gate gelu_gate(float x) {
    float two_u = x * fmaf(static_cast<float>(GELU_BITS * GELU_CUBE), x * x, static_cast<float>(GELU_BITS));
    Logistic sigma = logistic_base_2(fabsf(two_u));
    return {x > 0.0f ? sigma.near : sigma.far, sigma.far * sigma.near};
}

DEVICE float gelu_value(float x) { return x * gelu_gate(x).sigma; }

DEVICE float gelu_derivative(float x) {
    // Beyond ±30 σ is 0 or 1, and its slope of zero is not multiplied by infinity. NaN passes.
    x = -30.0f > x ? -30.0f : x;
    x = 30.0f < x ? 30.0f : x;
    Gate gate = gelu_gate(x);
    float two_du = fmaf(static_cast<float>(6.0 * GELU_SLOPE * GELU_CUBE), x * x, static_cast<float>(2.0 * GELU_SLOPE));
    return fmaf(x * gate.slope, two_du, gate.sigma);
}

KERNEL gelu_forward_f32(const float* x, const float* bias, float* out, i64 count, i64 n) {
    i64 i = global_thread();
    if (i < count) out[i] = gelu_value(bias ? x[i] + bias[i % n] : x[i]);
}

KERNEL gelu_forward_bf16(const float* x, const float* bias, u16* out, i64 count, i64 n) {
    i64 i = global_thread();
    if (i < count) out[i] = to_operand(gelu_value(bias ? x[i] + bias[i % n] : x[i]));
}

KERNEL gelu_backward(const float* x, const float* bias, float* dy, i64 count, i64 n) {
    i64 i = global_thread();
    if (i < count) dy[i] = dy[i] * gelu_derivative(bias ? x[i] + bias[i % n] : x[i]);
}
