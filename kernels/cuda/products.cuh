// One element of a matrix product in the CPU's order of sums: crates/cpu/src/kernels/gemm/mod.rs.
#pragma once
#include "float16.cuh"
#include "tree.cuh"

#define K_BLOCK 256

DEVICE float term_of(const float* x, i64 i) { return x[i]; }
DEVICE float term_of(const u16* x, i64 i) { return from_bf16(x[i]); }

// The sum so far, if any: the first run is not added to a zero, which could change the sign of a zero.
struct Runs {
    float sum;
    bool any;

    // Adds the terms begin .. end of a row and a column, in runs of 256, each a chain of fused multiplications and
    // additions from zero on.
    template <class T> DEVICE void add(const T* a, i64 a_term, const T* b, i64 b_term, i64 begin, i64 end) {
        for (i64 from = begin; from < end; from += K_BLOCK) {
            float chain = 0.0f;
            for (i64 l = from; l < smaller(end, from + K_BLOCK); l++) {
                chain = fmaf(term_of(a, l * a_term), term_of(b, l * b_term), chain);
            }
            sum = any ? sum + chain : chain;
            any = true;
        }
        if (!any) sum = 0.0f;  // a run without terms is a sum of zero
        any = true;
    }
};

// An element of a product: the starts of its row of a and its column of b, their strides, and how the k terms are cut
// into blocks.
template <class T> struct Terms {
    const T* a;
    i64 a_term;
    const T* b;
    i64 b_term, k, segments, blocks;

    // Adds the terms of a block.
    DEVICE void add_to(Runs& runs, i64 block) const {
        i64 segment = k / segments;
        for (i64 s = 0; s < segments; s++) {
            i64 begin = s * segment + segment * block / blocks, end = s * segment + segment * (block + 1) / blocks;
            runs.add(a, a_term, b, b_term, begin, end);
        }
    }
};
