// Tensors of 16 bits that a kernel reads and writes directly, and computes on in f32: bf16 or f16. A result is rounded
// once.
//
// A kernel is told the type by a number, `f16`, and chooses its code by it once, at its start: in_type.
//
// Bits      as with a copy in f32, the kernel for f32, and rounding of the result: bf16 like operands of products, with
//           subnormals flushed to zero.
#pragma once
#include "float16.cuh"
#include "neighbours.cuh"

// A tensor of `Type`, indexed like a pointer.
template <class Type> struct Halves {
    u16* at;

    DEVICE float operator[](i64 i) const { return Type::wide(at[i]); }
    DEVICE Halves operator+(i64 i) const { return {at + i}; }
};

// A type of 16 bits: its elements in memory, the values of a word in f32, two numbers rounded to a word (of NaN some
// NaN), for tensor cores (subnormals stay), one number, NaN alone, and tensors of it.
struct Bf16Type {
    using Element = u16;

    DEVICE static float wide(u16 x) { return from_bf16(x); }
    DEVICE static float low(u32 word) { return __uint_as_float(word << 16); }
    DEVICE static float high(u32 word) { return __uint_as_float(word & 0xffff0000u); }
    DEVICE static u32 narrow(float low, float high) { return pack(flushed(low), flushed(high)); }
    DEVICE static u32 operands(float low, float high) { return pack(low, high); }
    DEVICE static u16 narrow(float x) { return to_operand(x); }
    DEVICE static u16 nan(float x) { return nan_bf16(x); }
    DEVICE Halves<Bf16Type> operator()(const u16* at) const { return {const_cast<u16*>(at)}; }
};

struct F16Type {
    using Element = u16;

    DEVICE static float wide(u16 x) { return from_f16(x); }
    DEVICE static float low(u32 word) { return from_f16(static_cast<u16>(word)); }
    DEVICE static float high(u32 word) { return from_f16(static_cast<u16>(word >> 16)); }
    DEVICE static u32 narrow(float low, float high) { return pack_f16(low, high); }
    DEVICE static u32 operands(float low, float high) { return pack_f16(low, high); }
    DEVICE static u16 narrow(float x) { return to_f16(x); }
    DEVICE static u16 nan(float x) { return nan_f16(x); }
    DEVICE Halves<F16Type> operator()(const u16* at) const { return {const_cast<u16*>(at)}; }
};

// Calls kernel(F16Type()) if `f16` is not 0, else kernel(Bf16Type()).
template <class Kernel> DEVICE void in_type(int f16, Kernel kernel) {
    if (f16) kernel(F16Type());
    else kernel(Bf16Type());
}

// Element i of a result, in the type that it has in memory.
DEVICE void store(float* to, i64 i, float x) { to[i] = x; }
DEVICE void store(u16* to, i64 i, float x) { to[i] = to_operand(x); }
template <class Type> DEVICE void store(const Halves<Type>& to, i64 i, float x) { to.at[i] = Type::narrow(x); }

// A tensor as stored, and the values of stored neighbours.
struct Stored {
    const u16* at;
};

DEVICE const float* bits_of(const float* x) { return x; }
template <class Type> DEVICE Stored bits_of(const Halves<Type>& x) { return {x.at}; }

template <int N> DEVICE Pairs<N> load_vector(const Stored& x, i64 at, i64 count) { return load_pairs<N>(x.at, at, count); }

template <int N> DEVICE const Vector<float, N>& numbers_of(const float*, const Vector<float, N>& bits) { return bits; }

template <int N, class Type> DEVICE Vector<float, N> numbers_of(const Halves<Type>&, const Pairs<N>& bits) {
    Vector<float, N> vector;
#pragma unroll
    for (int j = 0; j < N; j += 2) vector.of[j] = Type::low(bits.of[j / 2]), vector.of[j + 1] = Type::high(bits.of[j / 2]);
    return vector;
}

// Neighbours, in f32 whatever their stored type.
template <int N, class Type> DEVICE Vector<float, N> load_vector(const Halves<Type>& x, i64 at, i64 count) {
    return numbers_of(x, load_pairs<N>(x.at, at, count));
}

// Neighbours of two tensors of one type, as stored: the loads of one step of in_order.
template <class Bits> struct TwoOf {
    Bits first, second;
};

template <int N, class In> DEVICE auto load_two(const In& first, const In& second, i64 at, i64 count) {
    auto bits = load_vector<N>(bits_of(first), at, count);
    return TwoOf<decltype(bits)>{bits, load_vector<N>(bits_of(second), at, count)};
}

template <int N, class Type> DEVICE void store_vector(const Halves<Type>& x, i64 at, i64 count, const Vector<float, N>& vector) {
    Pairs<N> to;
#pragma unroll
    for (int j = 0; j < N; j += 2) to.of[j / 2] = Type::narrow(vector.of[j], vector.of[j + 1]);
    bool number = true;
#pragma unroll
    for (int j = 0; j < N; j++) number = number && vector.of[j] == vector.of[j];
    if (!number) {  // one branch for all: NaN is rare
#pragma unroll
        for (int j = 0; j < N; j++) {
            u32 shift = j % 2 * 16, bits = static_cast<u32>(Type::nan(vector.of[j])) << shift;
            if (vector.of[j] != vector.of[j]) to.of[j / 2] = (to.of[j / 2] & 0xffff0000u >> shift) | bits;
        }
    }
    store_pairs(x.at, at, count, to);
}

template <int N> DEVICE void store_vector(u16* x, i64 at, i64 count, const Vector<float, N>& vector) { store_vector(Bf16Type()(x), at, count, vector); }
