// Tensors of 16 bits that a kernel reads and writes as they are, and computes on in f32: bf16, or f16 if `f16` is not 0. A result is rounded once.
//
// Bits      those of a copy in f32, the kernel for f32, and the result rounded: bf16 as operands of products are, with subnormals as zeros.
#pragma once
#include "float16.cuh"

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

// Neighbours that a thread has, one access of 16 bytes.
#define EIGHT 8

struct Eight {
    float of[EIGHT];
};

struct alignas(16) EightHalves {
    u16 of[EIGHT];
};

// Whether the elements from `at` on are eight at a multiple of 16 bytes. At the end of a tensor, or in a part of one, they are taken one by one.
DEVICE bool are_eight(const Halves& x, i64 at, i64 count) { return at + EIGHT <= count && (reinterpret_cast<u64>(x.at + at) & 15u) == 0; }

// The elements from `at` on, zeros beyond the last.
DEVICE Eight load_eight(const Halves& x, i64 at, i64 count) {
    Eight eight;
    if (are_eight(x, at, count)) {
        EightHalves from = *reinterpret_cast<const EightHalves*>(x.at + at);
#pragma unroll
        for (int j = 0; j < EIGHT; j++) eight.of[j] = x.f16 ? from_f16(from.of[j]) : from_bf16(from.of[j]);
        return eight;
    }
#pragma unroll
    for (int j = 0; j < EIGHT; j++) eight.of[j] = at + j < count ? x[at + j] : 0.0f;
    return eight;
}

DEVICE void store_eight(const Halves& x, i64 at, i64 count, const Eight& eight) {
    if (are_eight(x, at, count)) {
        EightHalves to;
#pragma unroll
        for (int j = 0; j < EIGHT; j++) to.of[j] = narrow(eight.of[j], x.f16);
        *reinterpret_cast<EightHalves*>(x.at + at) = to;
        return;
    }
#pragma unroll
    for (int j = 0; j < EIGHT; j++) {
        if (at + j < count) store(x, at + j, eight.of[j]);
    }
}

// The elements of a row of n that stand beside those from `at` on, of rows of that length; begins again where a row ends.
DEVICE Eight load_beside(const Halves& row, i64 at, i64 n) {
    i64 column = at % n;
    if (column + EIGHT <= n) return load_eight(row, column, n);
    Eight eight;
#pragma unroll
    for (int j = 0; j < EIGHT; j++) {
        eight.of[j] = row[column];
        column = column + 1 == n ? 0 : column + 1;
    }
    return eight;
}
