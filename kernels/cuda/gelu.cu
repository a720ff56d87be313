// GELU in its tanh form, fused with a bias (Hendrycks and Gimpel, arXiv:1606.08415).
//
//   u = √(2/π) (x + 0.044715 x³),  σ = 1/(1 + e^(-2u)),  gelu(x) = x σ,  gelu'(x) = σ + x σ (1 - σ) 2 du/dx
//   out = gelu(x + bias);  dx = dy gelu'(x + bias) in place of dy;  without a bias: bias null
//
// Shapes    x, out, dy [rows, n]; bias [n]. The gradient of the bias is the sum over the rows of dx (bias.cu).
// Geometry  a thread an element, or eight of 16 bits (_16).
// Bytes     4 read and 4 written an element (2 if out is bf16); backward 8 read, 4 written; all half in 16 bits, by 16 bytes.
// Bits      those of the CPU: crates/tensor/src/cpu/kernels/gelu.rs, which has the polynomial (float.rs) and its error.
#include "math.cuh"
#include "halves.cuh"

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

// x plus the bias, if there is one.
DEVICE Vector<float, EIGHT> gelu_input(Halves x, const u16* bias, i64 at, i64 count, i64 n) {
    Vector<float, EIGHT> y = load_vector<EIGHT>(x, at, count);
    if (!bias) return y;
    Vector<float, EIGHT> b = load_vector<EIGHT>(beside(halves(bias, x.f16), n), at, count);
    for (int j = 0; j < EIGHT; j++) y.of[j] = y.of[j] + b.of[j];
    return y;
}

KERNEL gelu_forward_16(const u16* x, const u16* bias, u16* out, i64 count, i64 n, int f16) {
    i64 at = global_thread() * EIGHT;
    if (at >= count) return;
    Vector<float, EIGHT> y = gelu_input(halves(x, f16), bias, at, count, n);
    for (int j = 0; j < EIGHT; j++) y.of[j] = gelu_value(y.of[j]);
    store_vector(halves(out, f16), at, count, y);
}

// The same, and for each part, of the rows starts[part] .. starts[part + 1], the sum of dx before it is rounded, one row after another: the gradient of
// the bias, whose parts sum_parts adds up.
KERNEL gelu_backward_parts_16(const u16* x, const u16* bias, u16* dy, const i64* starts, float* sums, i64 n, int f16) {
    i64 part = blockIdx.x, column = static_cast<i64>(blockIdx.y) * THREADS + threadIdx.x;
    if (column >= n) return;
    Halves of = halves(x, f16), g = halves(dy, f16);
    float b = halves(bias, f16)[column], sum = 0.0f;
    for (i64 row = starts[part]; row < starts[part + 1]; row++) {
        i64 at = row * n + column;
        float dx = g[at] * gelu_derivative(of[at] + b);
        sum += dx;
        store(g, at, dx);
    }
    sums[part * n + column] = sum;
}

KERNEL gelu_backward_16(const u16* x, const u16* bias, u16* dy, i64 count, i64 n, int f16) {
    i64 at = global_thread() * EIGHT;
    if (at >= count) return;
    Vector<float, EIGHT> y = gelu_input(halves(x, f16), bias, at, count, n), g = load_vector<EIGHT>(halves(dy, f16), at, count);
    for (int j = 0; j < EIGHT; j++) g.of[j] = g.of[j] * gelu_derivative(y.of[j]);
    store_vector(halves(dy, f16), at, count, g);
}
