// GELU in its tanh form, fused with a bias (Hendrycks and Gimpel, arXiv:1606.08415).
//
//   u = √(2/π) (x + 0.044715 x³),  σ = 1/(1 + e^(-2u)),  gelu(x) = x σ,  gelu'(x) = σ + x σ (1 - σ) 2 du/dx
//   out = gelu(x + bias);  dx = dy gelu'(x + bias) in place of dy;  without a bias: bias null
//
// Shapes    x, out, dy [rows, n]; bias [n]. The gradient of the bias is the sum over the rows of dx (bias.cu).
// Geometry  one thread per four elements, eight where tensors have 16 bits, by 16 bytes (neighbours.cuh); with the
//           gradient of the bias (_parts_16) one thread per eight columns of a part.
// Bytes     4 read and 4 written per element (2 if out is bf16); backward 8 read, 4 written; all half in 16 bits (_16).
// Bits      as on the CPU: crates/cpu/src/kernels/gelu.rs, which has the polynomial (float.rs) and its error.
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
    // Beyond ±30, σ is 0 or 1; clamping avoids its slope of zero times infinity. NaN passes.
    x = -30.0f > x ? -30.0f : x;
    x = 30.0f < x ? 30.0f : x;
    Gate gate = gelu_gate(x);
    float two_du = fmaf(static_cast<float>(6.0 * GELU_SLOPE * GELU_CUBE), x * x, static_cast<float>(2.0 * GELU_SLOPE));
    return fmaf(x * gate.slope, two_du, gate.sigma);
}

// x plus the bias, if there is one.
template <int N, class In> DEVICE Vector<float, N> gelu_input(In x, In bias, bool biased, i64 at, i64 count, i64 n) {
    Vector<float, N> y = load_vector<N>(x, at, count);
    if (!biased) return y;
    Vector<float, N> b = load_vector<N>(beside(bias, n), at, count);
#pragma unroll
    for (int j = 0; j < N; j++) y.of[j] = y.of[j] + b.of[j];
    return y;
}

template <int N, class In, class Out> DEVICE void gelu_forward(In x, In bias, bool biased, Out out, i64 count, i64 n) {
    i64 at = global_thread() * N;
    if (at >= count) return;
    Vector<float, N> y = gelu_input<N>(x, bias, biased, at, count, n);
#pragma unroll
    for (int j = 0; j < N; j++) y.of[j] = gelu_value(y.of[j]);
    store_vector(out, at, count, y);
}

template <int N, class In, class Out> DEVICE void gelu_backward_of(In x, In bias, bool biased, Out dy, i64 count, i64 n) {
    i64 at = global_thread() * N;
    if (at >= count) return;
    Vector<float, N> y = gelu_input<N>(x, bias, biased, at, count, n), g = load_vector<N>(dy, at, count);
#pragma unroll
    for (int j = 0; j < N; j++) g.of[j] = g.of[j] * gelu_derivative(y.of[j]);
    store_vector(dy, at, count, g);
}

KERNEL gelu_forward_f32(const float* x, const float* bias, float* out, i64 count, i64 n) {
    gelu_forward<FOUR>(x, bias, bias != nullptr, out, count, n);
}

KERNEL gelu_forward_bf16(const float* x, const float* bias, u16* out, i64 count, i64 n) {
    gelu_forward<EIGHT>(x, bias, bias != nullptr, out, count, n);
}

KERNEL gelu_forward_16(const u16* x, const u16* bias, u16* out, i64 count, i64 n, int f16) {
    in_type(f16, [&](auto of) { gelu_forward<EIGHT>(of(x), of(bias), bias != nullptr, of(out), count, n); });
}

KERNEL gelu_backward(const float* x, const float* bias, float* dy, i64 count, i64 n) {
    gelu_backward_of<FOUR>(x, bias, bias != nullptr, dy, count, n);
}

KERNEL gelu_backward_16(const u16* x, const u16* bias, u16* dy, i64 count, i64 n, int f16) {
    in_type(f16, [&](auto of) { gelu_backward_of<EIGHT>(of(x), of(bias), bias != nullptr, of(dy), count, n); });
}

// The same; and for each part the sum of unrounded dx over the rows starts[part] .. starts[part + 1], one row after
// another. sum_blocks adds up the parts to the gradient of the bias.
template <int N, class In, class Out> DEVICE void gelu_parts(In x, In bias, Out dy, const i64* starts, float* sums, i64 parts, i64 n) {
    RowPlace at = row_place<N>(parts, n);
    if (!at.there) return;
    Vector<float, N> b = load_vector<N>(bias, at.column, n), sum = {};
    auto load = [=](i64 row) { return load_two<N>(x + row * n, dy + row * n, at.column, n); };
    in_order<2>(starts[at.row], starts[at.row + 1], load, [&](i64 row, const auto& bits) {
        Vector<float, N> y = numbers_of(x, bits.first), dx = numbers_of(dy, bits.second);
#pragma unroll
        for (int j = 0; j < N; j++) {
            dx.of[j] = dx.of[j] * gelu_derivative(y.of[j] + b.of[j]);
            sum.of[j] += dx.of[j];
        }
        store_vector(dy + row * n, at.column, n, dx);
    });
    store_vector(sums + at.row * n, at.column, n, sum);
}

#undef RESIDENT
#define RESIDENT 3  // as many as hide the time of its loads
KERNEL gelu_backward_parts_16(const u16* x, const u16* bias, u16* dy, const i64* starts, float* sums, i64 parts, i64 n, int f16) {
    in_type(f16, [&](auto of) { gelu_parts<EIGHT>(of(x), of(bias), of(dy), starts, sums, parts, n); });
}
#undef RESIDENT
#define RESIDENT 1
