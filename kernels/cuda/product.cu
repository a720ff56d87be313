// Matrix products in the CPU's order of sums, for canonical numerics.
//
//   s = fma(a[i, last], b[last, j], .. fma(a[i, first], b[first, j], 0) ..)  over 256 terms,  run = s₀ + s₁ + ..
//   c[i, j] = the sum in the balanced tree over the blocks, each the sum of its runs of terms;  or c[i, j] + s₀ + s₁ + ..
//
// Shapes    a [m, k], b [k, n] with any strides between rows and columns, so that transposes need no copy; c [m, n]. The k terms are in segments;
//           block l is the l-th of `blocks` slices of every segment, with boundaries rounded down.
// Geometry  a thread an element of c, neighbours in a row.
// Bytes     8 k read an element of c (4 k of bf16), most of them from the caches, and 4 written: an oracle for cuBLAS, and slow.
// Bits      those of the CPU with fused multiply-adds: crates/tensor/src/cpu/kernels/gemm/mod.rs, matmul/reduction_blocks.rs. Operands of bf16 are
//           rounded as float16.cuh's to_operand does; where the CPU has an instruction for pairs of them, partial sums below 2^-126 are zero
//           there and not here.
#include "float16.cuh"
#include "tree.cuh"

#define K_BLOCK 256

DEVICE float term_of(const float* x, i64 i) { return x[i]; }
DEVICE float term_of(const u16* x, i64 i) { return from_bf16(x[i]); }

template <class T>
DEVICE void product(const T* a, i64 a_row, i64 a_term, const T* b, i64 b_term, i64 b_column, float* c, int accumulate, i64 k,
                    i64 segments, i64 blocks, i64 count, i64 n) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 row = at / n * a_row, column = at % n * b_column, segment = k / segments;
    Tree tree;
    for (i64 block = 0; block < blocks; block++) {
        float sum = accumulate ? c[at] : 0.0f;
        bool any = accumulate != 0;
        for (i64 s = 0; s < segments; s++) {
            i64 begin = s * segment + segment * block / blocks, end = s * segment + segment * (block + 1) / blocks;
            for (i64 from = begin; from < end; from += K_BLOCK) {
                float chain = 0.0f;
                for (i64 l = from; l < smaller(end, from + K_BLOCK); l++) {
                    chain = fmaf(term_of(a, row + l * a_term), term_of(b, l * b_term + column), chain);
                }
                sum = any ? sum + chain : chain;
                any = true;
            }
            any = true;  // a run without terms is a sum of zero
        }
        tree.push(sum);
    }
    c[at] = tree.finish();
}

// c is overwritten, or added to if `accumulate` is not 0, which only sums of one block are.
KERNEL product_f32(const float* a, i64 a_row, i64 a_term, const float* b, i64 b_term, i64 b_column, float* c, int accumulate, i64 k,
                   i64 segments, i64 blocks, i64 count, i64 n) {
    product(a, a_row, a_term, b, b_term, b_column, c, accumulate, k, segments, blocks, count, n);
}

KERNEL product_bf16(const u16* a, i64 a_row, i64 a_term, const u16* b, i64 b_term, i64 b_column, float* c, int accumulate, i64 k,
                    i64 segments, i64 blocks, i64 count, i64 n) {
    product(a, a_row, a_term, b, b_term, b_column, c, accumulate, k, segments, blocks, count, n);
}
