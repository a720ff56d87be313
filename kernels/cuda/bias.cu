// Sums of tensors, biases and residuals, and the sums over rows that are gradients of biases and gains.
//
//   out = a + b;  a += b;  out = x + bias;  out = (x + bias) + residual;  dbias = Σ_rows dy
//
// Shapes    a, b, out, x, residual, dy [rows, n]; bias, dbias [n]; parts [parts, n]; sums [blocks, n].
// Geometry  a thread an element; for sums over rows a thread a column and part (of up to 64 rows), then a column and block of parts.
// Bytes     4 for each element of each tensor named; of parts, 4 parts n more written and read.
// Bits      those of the CPU: crates/tensor/src/cpu/kernels/pointwise.rs, RowSums in crates/tensor/src/cpu/mod.rs.
#include "meshwork.cuh"

KERNEL add(const float* a, const float* b, float* out, i64 count) {
    i64 i = global_thread();
    if (i < count) out[i] = a[i] + b[i];
}

KERNEL add_f64(const double* a, const double* b, double* out, i64 count) {
    i64 i = global_thread();
    if (i < count) out[i] = a[i] + b[i];
}

KERNEL add_assign(float* a, const float* b, i64 count) {
    i64 i = global_thread();
    if (i < count) a[i] += b[i];
}

// The losses of samples.
KERNEL add_assign_f64(double* a, const double* b, i64 count) {
    i64 i = global_thread();
    if (i < count) a[i] += b[i];
}

KERNEL bias(const float* x, const float* bias, float* out, i64 count, i64 n) {
    i64 i = global_thread();
    if (i < count) out[i] = x[i] + bias[i % n];
}

KERNEL bias_residual(const float* x, const float* bias, const float* residual, float* out, i64 count, i64 n) {
    i64 i = global_thread();
    if (i < count) out[i] = (x[i] + bias[i % n]) + residual[i];
}

// Sums of the rows starts[i] .. starts[i + 1], one after another, from zero. First of the rows of each part, then of the parts of
// each block.
KERNEL sum_parts(const float* x, const i64* starts, float* sums, i64 n) {
    i64 part = blockIdx.x, column = static_cast<i64>(blockIdx.y) * THREADS + threadIdx.x;
    if (column >= n) return;
    float sum = 0.0f;
    for (i64 row = starts[part]; row < starts[part + 1]; row++) sum += x[row * n + column];
    sums[part * n + column] = sum;
}
