// Tensors of 16 bits that a kernel reads and writes directly, and computes on in f32: bf16, or f16 if `f16` is not
// 0. A result is rounded once.
//
// Bits      as with a copy in f32, the kernel for f32, and rounding of the result: bf16 like operands of products, with
//           subnormals flushed to zero.
#pragma once
#include "float16.cuh"
#include "neighbours.cuh"

// Indexed like a pointer.
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

// A tensor as stored, and the values of stored neighbours (neighbours.cuh).
DEVICE const float* bits_of(const float* x) { return x; }
DEVICE const u16* bits_of(const Halves& x) { return x.at; }

template <int N> DEVICE const Vector<float, N>& numbers_of(const float*, const Vector<float, N>& bits) { return bits; }

template <int N> DEVICE Vector<float, N> numbers_of(const Halves& x, const Vector<u16, N>& bits) {
    Vector<float, N> vector;
#pragma unroll
    for (int j = 0; j < N; j++) vector.of[j] = x.f16 ? from_f16(bits.of[j]) : from_bf16(bits.of[j]);
    return vector;
}

// Neighbours, in f32 whatever their stored type.
template <int N> DEVICE Vector<float, N> load_vector(const Halves& x, i64 at, i64 count) { return numbers_of(x, load_vector<N>(x.at, at, count)); }

// Neighbours of two tensors of one type, as stored: the loads of one step of in_order.
template <class Bits> struct TwoOf {
    Bits first, second;
};

template <int N, class In> DEVICE auto load_two(const In& first, const In& second, i64 at, i64 count) {
    auto bits = load_vector<N>(bits_of(first), at, count);
    return TwoOf<decltype(bits)>{bits, load_vector<N>(bits_of(second), at, count)};
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
