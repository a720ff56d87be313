// Matrix products in the CPU's order of sums, for canonical numerics.
//
//   s = fma(a[i, last], b[last, j], .. fma(a[i, first], b[first, j], 0) ..)  over 256 terms,  run = s₀ + s₁ + ..
//   c[i, j] = the sum in the balanced tree over the blocks, each the sum of its runs of terms;  or c[i, j] + s₀ + s₁ + ..
//   the sum of two products: block l has the runs of block l of the first, then of the second
//
// Shapes    a [m, k], b [k, n] with any strides between rows and columns, so that transposes need no copy; c [m, n].
//           The k terms are in segments; block l is the l-th of `blocks` slices of every segment, with boundaries
//           rounded down.
// Geometry  one thread per element of c, neighbours in a row.
// Bytes     8 k read per element of c (4 k for bf16), most of them from the caches, and 4 written: an oracle for
//           cuBLAS; slow.
// Bits      as on the CPU with fused multiply-adds: crates/cpu/src/kernels/gemm/mod.rs, matmul/reduction_blocks.rs.
//           Operands of bf16 are rounded as float16.cuh's to_operand does; where the CPU has an instruction for pairs
//           of them, partial sums below 2^-126 are zero there and not here.
#include "products.cuh"

template <class T>
DEVICE void product(const T* a, i64 a_row, i64 a_term, const T* b, i64 b_term, i64 b_column, float* c, int accumulate, i64 k,
                    i64 segments, i64 blocks, i64 count, i64 n) {
    i64 at = global_thread();
    if (at >= count) return;
    Terms<T> terms = {a + at / n * a_row, a_term, b + at % n * b_column, b_term, k, segments, blocks};
    Tree tree;
    for (i64 block = 0; block < blocks; block++) {
        Runs runs = {accumulate ? c[at] : 0.0f, accumulate != 0};
        terms.add_to(runs, block);
        tree.push(runs.sum);
    }
    c[at] = tree.finish();
}

// c is overwritten, or added to if `accumulate` is not 0, which requires sums of one block.
KERNEL product_f32(const float* a, i64 a_row, i64 a_term, const float* b, i64 b_term, i64 b_column, float* c, int accumulate, i64 k,
                   i64 segments, i64 blocks, i64 count, i64 n) {
    product(a, a_row, a_term, b, b_term, b_column, c, accumulate, k, segments, blocks, count, n);
}

KERNEL product_bf16(const u16* a, i64 a_row, i64 a_term, const u16* b, i64 b_term, i64 b_column, float* c, int accumulate, i64 k,
                    i64 segments, i64 blocks, i64 count, i64 n) {
    product(a, a_row, a_term, b, b_term, b_column, c, accumulate, k, segments, blocks, count, n);
}

template <class T> DEVICE void product_sum(Terms<T> first, Terms<T> second, i64 blocks, float* c) {
    Tree tree;
    for (i64 block = 0; block < blocks; block++) {
        Runs runs = {0.0f, false};
        first.add_to(runs, block);
        second.add_to(runs, block);
        tree.push(runs.sum);
    }
    *c = tree.finish();
}

#define PRODUCT_SUM(T) \
    i64 at = global_thread(); \
    if (at >= count) return; \
    i64 row = at / n, column = at % n; \
    Terms<T> first = {a + row * a_row, a_term, b + column * b_column, b_term, k, segments, blocks}; \
    Terms<T> second = {a2 + row * a2_row, a2_term, b2 + column * b2_column, b2_term, k2, segments2, blocks}; \
    product_sum(first, second, blocks, c + at)

KERNEL product_sum_f32(const float* a, i64 a_row, i64 a_term, const float* b, i64 b_term, i64 b_column, i64 k, i64 segments,
                       const float* a2, i64 a2_row, i64 a2_term, const float* b2, i64 b2_term, i64 b2_column, i64 k2, i64 segments2,
                       i64 blocks, float* c, i64 count, i64 n) {
    PRODUCT_SUM(float);
}

KERNEL product_sum_bf16(const u16* a, i64 a_row, i64 a_term, const u16* b, i64 b_term, i64 b_column, i64 k, i64 segments,
                        const u16* a2, i64 a2_row, i64 a2_term, const u16* b2, i64 b2_term, i64 b2_column, i64 k2, i64 segments2,
                        i64 blocks, float* c, i64 count, i64 n) {
    PRODUCT_SUM(u16);
}
