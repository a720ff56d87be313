// Products of groups of rows, each group with its own matrix, in the CPU's order of sums: the linear layers of experts.
//
//   y[r] = x[r] W_gᵀ, or x[r] W_g, for the rows r of group g;  dW_g = dY_gᵀ X_g in the balanced tree over the blocks of its rows
//   y[r] = x[r] + b_g;  db_g = Σ dy over its rows, likewise
//
// Shapes    x [rows, k], y [rows, n], W [groups, n, k] (or k and n exchanged); b, db [groups, n]. Group g has the rows
//           starts[g] .. starts[g + 1], and in gradients the blocks first[g] .. first[g + 1] - 1, of which block l has
//           the rows bounds[l] .. bounds[l + 1].
// Geometry  one launch for all groups, however uneven: one thread per element of y or dW; for gradients of biases one
//           thread per column of a group.
// Bytes     8 k read per element of y (8 rows for dW), half for bf16, most of them from the caches, and 4 written: an
//           oracle for library products; slow.
// Bits      as on the CPU with fused multiply-adds: crates/cpu/src/grouped.rs; bf16 as in product.cu.
#include "products.cuh"

template <class T>
DEVICE void grouped(const T* x, const T* w, i64 w_term, i64 w_column, const i64* starts, i64 groups, float* y, i64 k, i64 segments, i64 blocks,
                    i64 count, i64 n) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 row = at / n;
    const T* column = w + range_of(starts, groups, row) * n * k + at % n * w_column;
    Terms<T> terms = {x + row * k, 1, column, w_term, k, segments, blocks};
    Tree tree;
    for (i64 block = 0; block < blocks; block++) {
        Runs runs = {0.0f, false};
        terms.add_to(runs, block);
        tree.push(runs.sum);
    }
    y[at] = tree.finish();
}

// The strides of W go from one term to the next, and from one column of the result to the next.
KERNEL grouped_product_f32(const float* x, const float* w, i64 w_term, i64 w_column, const i64* starts, i64 groups, float* y, i64 k,
                           i64 segments, i64 blocks, i64 count, i64 n) {
    grouped(x, w, w_term, w_column, starts, groups, y, k, segments, blocks, count, n);
}

KERNEL grouped_product_bf16(const u16* x, const u16* w, i64 w_term, i64 w_column, const i64* starts, i64 groups, float* y, i64 k,
                            i64 segments, i64 blocks, i64 count, i64 n) {
    grouped(x, w, w_term, w_column, starts, groups, y, k, segments, blocks, count, n);
}

template <class T>
DEVICE void grouped_backward(const T* dy, const T* x, const i64* first, const i64* bounds, float* dw, int accumulate, i64 n, i64 k, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 group = at / (n * k), row = at / k % n, column = at % k;
    Tree tree;
    for (i64 block = first[group]; block + 1 < first[group + 1]; block++) {
        Runs runs = {accumulate ? dw[at] : 0.0f, accumulate != 0};
        runs.add(dy + row, n, x + column, k, bounds[block], bounds[block + 1]);
        tree.push(runs.sum);
    }
    dw[at] = tree.finish();
}

// dw is overwritten, or added to if `accumulate` is not 0, which requires sums of one block.
KERNEL grouped_product_backward_f32(const float* dy, const float* x, const i64* first, const i64* bounds, float* dw, int accumulate, i64 n,
                                    i64 k, i64 count) {
    grouped_backward(dy, x, first, bounds, dw, accumulate, n, k, count);
}

KERNEL grouped_product_backward_bf16(const u16* dy, const u16* x, const i64* first, const i64* bounds, float* dw, int accumulate, i64 n,
                                     i64 k, i64 count) {
    grouped_backward(dy, x, first, bounds, dw, accumulate, n, k, count);
}

KERNEL grouped_bias(const float* x, const float* bias, const i64* starts, i64 groups, float* y, i64 count, i64 n) {
    i64 at = global_thread();
    if (at < count) y[at] = x[at] + bias[range_of(starts, groups, at / n) * n + at % n];
}

KERNEL grouped_bias_backward(const float* dy, const i64* first, const i64* bounds, float* db, int accumulate, i64 n) {
    i64 group = blockIdx.x, column = static_cast<i64>(blockIdx.y) * THREADS + threadIdx.x;
    if (column >= n) return;
    Tree tree;
    for (i64 block = first[group]; block + 1 < first[group + 1]; block++) {
        float sum = 0.0f;
        for (i64 row = bounds[block]; row < bounds[block + 1]; row++) sum += dy[row * n + column];
        tree.push(sum);
    }
    float* to = db + group * n + column;
    *to = (accumulate ? *to : 0.0f) + tree.finish();
}
