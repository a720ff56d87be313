// Tensors of 16 bits that a kernel reads and writes as they are, and computes on in f32: bf16, or f16 if `f16` is not 0. A result is rounded once.
//
// Bits      those of a copy in f32, the kernel for f32, and the result rounded: bf16 as operands of products are, with subnormals as zeros.
#pragma once
#include "float16.cuh"
#include "neighbours.cuh"

// Indexed as a pointer is.
struct Halves {
    u16* at;
    int f16;

    DEVICE float operator[](i64 i) const { return f16 ? from_f16(at[i]) : from_bf16(at[i]); }
    DEVICE Halves operator+(i64 i) const { return {at + i, f16}; }
};

DEVICE Halves halves(const u16* at, int f16) { return {const_cast<u16*>(at), f16}; }

DEVICE u16 narrow(float x, int f16) { return f16 ? to_f16(x) : to_operand(x); }

// Element i of a result, in the type that it has in memory.
DEVICE void store(float* to, i64 i, float x) { to[i] = x; }
DEVICE void store(u16* to, i64 i, float x) { to[i] = to_operand(x); }
DEVICE void store(const Halves& to, i64 i, float x) { to.at[i] = narrow(x, to.f16); }

// Neighbours, in f32 whatever they are in memory (neighbours.cuh).
template <int N> DEVICE Vector<float, N> load_vector(const Halves& x, i64 at, i64 count) {
    Vector<u16, N> from = load_vector<N>(x.at, at, count);
    Vector<float, N> vector;
#pragma unroll
    for (int j = 0; j < N; j++) vector.of[j] = x.f16 ? from_f16(from.of[j]) : from_bf16(from.of[j]);
    return vector;
}

template <int N> DEVICE void store_vector(const Halves& x, i64 at, i64 count, const Vector<float, N>& vector) {
    Vector<u16, N> to;
#pragma unroll
    for (int j = 0; j < N; j++) to.of[j] = narrow(vector.of[j], x.f16);
    store_vector(x.at, at, count, to);
}

template <int N> DEVICE void store_vector(u16* x, i64 at, i64 count, const Vector<float, N>& vector) {
    store_vector(halves(x, 0), at, count, vector);
}
