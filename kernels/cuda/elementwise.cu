// Functions of one and of two numbers, their derivatives, and the rectifier (crates/tensor/src/kernel/elementwise.rs).
//
//   out = f(x);  dx = dy f'(x);  out[o, e, i] = g(x[o, e, i], y[o, i])
//   relu: out = max(x, 0), NaN stays NaN; bit i % 8 of above[i / 8] says x > 0;  dx = dy where the bit is set, else 0
//
// Shapes    x, out, dy, dx [outer, extent, inner]; y [outer, inner]; above [(count + 7) / 8].
// Geometry  one thread per 16 bytes of each tensor (neighbours.cuh); for relu one thread per 8 neighbouring elements,
//           so that no two threads write one byte.
// Bytes     4 read and 4 written per element, 4 more read with dy, or with a y as long as x; the bits of relu 1/8.
// Bits      as on the CPU: crates/cpu/src/kernels/elementwise.rs and relu.rs.
#include "math.cuh"
#include "neighbours.cuh"

#define PER_BYTE 8

struct Sides {
    float at, against;
};

// σ(x) and σ(-x).
DEVICE Sides sigmoid(float x) {
    Logistic of = logistic_base_2(fabsf(x) * static_cast<float>(LOG2_E));
    return x > 0.0f ? Sides{of.near, of.far} : Sides{of.far, of.near};
}

DEVICE float tanh_bits(float x) {
    float size = fabsf(x);
    Logistic of = logistic_base_2(size * (2.0f * static_cast<float>(LOG2_E)));
    float z = x * x;
    float p = 3.592128e-3f;
    p = fmaf(p, z, -8.863235e-3f);
    p = fmaf(p, z, 2.186949e-2f);
    p = fmaf(p, z, -5.3968254e-2f);
    p = fmaf(p, z, 1.3333333e-1f);
    p = fmaf(p, z, -3.3333334e-1f);
    p = fmaf(p, z, 1.0f);
    return copysignf(size < 0.5f ? size * p : of.near - of.far, x);
}

// 1 - tanh² x = 4 σ(2x) σ(-2x), without the cancellation.
DEVICE float tanh_derivative(float x) {
    Sides of = sigmoid(x + x);
    return 4.0f * of.at * of.against;
}

// Φ(x), the share of a normal distribution below x, from its tail below -|x|.
DEVICE float normal(float x) {
    float z = fabsf(x) * 0.70710678f, of = 1.0f / fmaf(z, 0.3275911f, 1.0f);
    float p = 1.0614054f;
    p = fmaf(p, of, -1.453152f);
    p = fmaf(p, of, 1.4214137f);
    p = fmaf(p, of, -0.28449672f);
    p = fmaf(p, of, 0.2548296f);
    float tail = p * of * exp_bits(-z * z) * 0.5f;
    return x > 0.0f ? 1.0f - tail : tail;
}

// ln x, also of numbers that are subnormal; minus infinity of 0, NaN below it.
DEVICE float log_bits(float x) {
    bool small = x < 1.17549435e-38f;
    float ln = ln_bits(small ? x * 16777216.0f : x) - (small ? static_cast<float>(16.635532333438686) : 0.0f);
    float outside = x == 0.0f ? -INFINITE : __uint_as_float(0x7fc00000u);
    return x > 0.0f ? ln : outside;
}

KERNEL scale_forward(const float* x, float* out, i64 count, float factor) {
    map_vectors<FOUR>(x, out, count, [=](float x) { return x * factor; });
}

KERNEL scale_forward_f64(const double* x, double* out, i64 count, double factor) {
    map_vectors<2>(x, out, count, [=](double x) { return x * factor; });
}

KERNEL exp_forward(const float* x, float* out, i64 count) {
    map_vectors<FOUR>(x, out, count, [=](float x) { return exp_bits(x); });
}

KERNEL exp_backward(const float* dy, const float* x, float* dx, i64 count) {
    join_vectors<FOUR>(dy, x, dx, count, [](float dy, float x) {
        return dy * exp_bits(x);
    });
}

KERNEL tanh_forward(const float* x, float* out, i64 count) {
    map_vectors<FOUR>(x, out, count, [=](float x) { return tanh_bits(x); });
}

KERNEL tanh_backward(const float* dy, const float* x, float* dx, i64 count) {
    join_vectors<FOUR>(dy, x, dx, count, [](float dy, float x) { return dy * tanh_derivative(x); });
}

KERNEL sigmoid_forward(const float* x, float* out, i64 count) {
    map_vectors<FOUR>(x, out, count, [=](float x) { return sigmoid(x).at; });
}

KERNEL sigmoid_backward(const float* dy, const float* x, float* dx, i64 count) {
    join_vectors<FOUR>(dy, x, dx, count, [](float dy, float x) {
        Sides of = sigmoid(x);
        return dy * (of.at * of.against);
    });
}

KERNEL silu_forward(const float* x, float* out, i64 count) {
    map_vectors<FOUR>(x, out, count, [=](float x) { return x * sigmoid(x).at; });
}

KERNEL silu_backward(const float* dy, const float* x, float* dx, i64 count) {
    join_vectors<FOUR>(dy, x, dx, count, [](float dy, float x) {
        // Below -200, σ(x) σ(-x) is zero and x may be infinite. NaN passes.
        float near = -200.0f > x ? -200.0f : x;
        near = 200.0f < near ? 200.0f : near;
        Sides of = sigmoid(x);
        return dy * fmaf(near * of.at, of.against, of.at);
    });
}

KERNEL exact_gelu_forward(const float* x, float* out, i64 count) {
    map_vectors<FOUR>(x, out, count, [=](float x) { return x * normal(x); });
}

KERNEL exact_gelu_backward(const float* dy, const float* x, float* dx, i64 count) {
    join_vectors<FOUR>(dy, x, dx, count, [](float dy, float x) {
        // Below -200, the density is zero and x may be infinite. NaN passes.
        float near = -200.0f > x ? -200.0f : x;
        near = 200.0f < near ? 200.0f : near;
        float density = exp_bits(near * near * -0.5f) * 0.3989423f;
        return dy * fmaf(near, density, normal(x));
    });
}

KERNEL soft_cap_forward(const float* x, float* out, i64 count, float cap) {
    map_vectors<FOUR>(x, out, count, [=](float x) { return cap * tanh_bits(x / cap); });
}

KERNEL soft_cap_backward(const float* dy, const float* x, float* dx, i64 count, float cap) {
    join_vectors<FOUR>(dy, x, dx, count, [=](float dy, float x) { return dy * tanh_derivative(x / cap); });
}

KERNEL log_forward(const float* x, float* out, i64 count) {
    map_vectors<FOUR>(x, out, count, [=](float x) { return log_bits(x); });
}

KERNEL log_backward(const float* dy, const float* x, float* dx, i64 count) {
    join_vectors<FOUR>(dy, x, dx, count, [](float dy, float x) { return dy * (1.0f / x); });
}

KERNEL sqrt_forward(const float* x, float* out, i64 count) {
    map_vectors<FOUR>(x, out, count, [=](float x) { return sqrtf(x); });
}

KERNEL sqrt_backward(const float* dy, const float* x, float* dx, i64 count) {
    join_vectors<FOUR>(dy, x, dx, count, [](float dy, float x) { return dy * (0.5f / sqrtf(x)); });
}

KERNEL zip_add(const float* x, const float* y, float* out, i64 count, i64 extent, i64 inner) {
    join_vectors<FOUR>(x, repeated(y, extent, inner), out, count, [](float x, float y) { return x + y; });
}

KERNEL zip_sub(const float* x, const float* y, float* out, i64 count, i64 extent, i64 inner) {
    join_vectors<FOUR>(x, repeated(y, extent, inner), out, count, [](float x, float y) { return x - y; });
}

KERNEL zip_mul(const float* x, const float* y, float* out, i64 count, i64 extent, i64 inner) {
    join_vectors<FOUR>(x, repeated(y, extent, inner), out, count, [](float x, float y) { return x * y; });
}

KERNEL zip_div(const float* x, const float* y, float* out, i64 count, i64 extent, i64 inner) {
    join_vectors<FOUR>(x, repeated(y, extent, inner), out, count, [](float x, float y) { return x / y; });
}

KERNEL zip_keep(const float* x, const float* y, float* out, i64 count, i64 extent, i64 inner) {
    join_vectors<FOUR>(x, repeated(y, extent, inner), out, count, [](float x, float y) { return y == 0.0f ? 0.0f : x; });
}

KERNEL zip_drop(const float* x, const float* y, float* out, i64 count, i64 extent, i64 inner) {
    join_vectors<FOUR>(x, repeated(y, extent, inner), out, count, [](float x, float y) { return y == 0.0f ? x : 0.0f; });
}

KERNEL zip_second(const float* x, const float* y, float* out, i64 count, i64 extent, i64 inner) {
    join_vectors<FOUR>(x, repeated(y, extent, inner), out, count, [](float, float y) { return y; });
}

KERNEL zip_greater(const float* x, const float* y, float* out, i64 count, i64 extent, i64 inner) {
    join_vectors<FOUR>(x, repeated(y, extent, inner), out, count, [](float x, float y) { return x > y ? 1.0f : 0.0f; });
}

KERNEL relu_forward(const float* x, float* out, u8* above, i64 count) {
    i64 byte = global_thread(), at = byte * PER_BYTE;
    if (at >= count) return;
    Vector<float, PER_BYTE> values = load_vector<PER_BYTE>(x, at, count);  // zeros beyond the last, which are not above
    u32 bits = 0;
#pragma unroll
    for (int j = 0; j < PER_BYTE; j++) {
        bits |= (values.of[j] > 0.0f ? 1u : 0u) << j;
        values.of[j] = values.of[j] <= 0.0f ? 0.0f : values.of[j];
    }
    store_vector(out, at, count, values);
    above[byte] = static_cast<u8>(bits);
}

KERNEL relu_backward(const float* dy, const u8* above, float* dx, i64 count) {
    i64 byte = global_thread(), at = byte * PER_BYTE;
    if (at >= count) return;
    Vector<float, PER_BYTE> values = load_vector<PER_BYTE>(dy, at, count);
    u32 bits = above[byte];
#pragma unroll
    for (int j = 0; j < PER_BYTE; j++) values.of[j] = (bits >> j & 1u) ? values.of[j] : 0.0f;
    store_vector(dx, at, count, values);
}
