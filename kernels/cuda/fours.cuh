// Vectors of floats that a thread reads and writes by 16 bytes: four neighbours, where they lie at a multiple of 16 bytes and there are four. At the end of a
// vector, or in a part of one, they are taken one by one. A thread's elements begin at four times its number.
#pragma once
#include "meshwork.cuh"

#define FOUR 4

struct alignas(16) Four {
    float of[FOUR];
};

DEVICE bool are_four(const float* x, i64 at, i64 count) { return at + FOUR <= count && (reinterpret_cast<u64>(x + at) & 15u) == 0; }

// The elements from `at` on, zeros beyond the last.
DEVICE Four load_four(const float* x, i64 at, i64 count) {
    if (are_four(x, at, count)) return *reinterpret_cast<const Four*>(x + at);
    Four four;
#pragma unroll
    for (int j = 0; j < FOUR; j++) four.of[j] = at + j < count ? x[at + j] : 0.0f;
    return four;
}

DEVICE void store_four(float* x, i64 at, i64 count, const Four& four) {
    if (are_four(x, at, count)) {
        *reinterpret_cast<Four*>(x + at) = four;
        return;
    }
#pragma unroll
    for (int j = 0; j < FOUR; j++) {
        if (at + j < count) x[at + j] = four.of[j];
    }
}

// The elements of a row of n beside those from `at` on, of rows of that length one behind the other.
DEVICE Four load_four_beside(const float* row, i64 at, i64 n) {
    i64 column = at % n;
    if (column + FOUR <= n) return load_four(row, column, n);
    Four four;
#pragma unroll
    for (int j = 0; j < FOUR; j++) {
        four.of[j] = row[column];
        column = column + 1 == n ? 0 : column + 1;
    }
    return four;
}

// out = f(x).
template <class F> DEVICE void map_fours(const float* x, float* out, i64 count, F f) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Four four = load_four(x, at, count);
#pragma unroll
    for (int j = 0; j < FOUR; j++) four.of[j] = f(four.of[j]);
    store_four(out, at, count, four);
}

// out = f(x, y).
template <class F> DEVICE void join_fours(const float* x, const float* y, float* out, i64 count, F f) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Four four = load_four(x, at, count), other = load_four(y, at, count);
#pragma unroll
    for (int j = 0; j < FOUR; j++) four.of[j] = f(four.of[j], other.of[j]);
    store_four(out, at, count, four);
}
