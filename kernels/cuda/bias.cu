// Sums of tensors, biases and residuals, and the sums over rows that are gradients of biases and gains.
//
//   out = a + b;  a += b;  out = x + bias;  out = (x + bias) + residual;  dbias = Σ_rows dy
//
// Shapes    a, b, out, x, residual, dy [rows, n]; bias, dbias [n]; parts [parts, n]; sums [blocks, n].
// Geometry  a thread an element, or eight of 16 bits; for sums over rows a thread a column and part (of up to 64 rows), then a column and block of parts.
// Bytes     4 for each element of each tensor named, 2 in 16 bits (_16), by 16 bytes; of parts, 4 parts n more written and read.
// Bits      those of the CPU: crates/tensor/src/cpu/kernels/pointwise.rs, RowSums in crates/tensor/src/cpu/mod.rs.
#include "halves.cuh"

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
template <class In> DEVICE void parts_of(In x, const i64* starts, float* sums, i64 n) {
    i64 part = blockIdx.x, column = static_cast<i64>(blockIdx.y) * THREADS + threadIdx.x;
    if (column >= n) return;
    float sum = 0.0f;
    for (i64 row = starts[part]; row < starts[part + 1]; row++) sum += x[row * n + column];
    sums[part * n + column] = sum;
}

KERNEL sum_parts(const float* x, const i64* starts, float* sums, i64 n) { parts_of(x, starts, sums, n); }

KERNEL sum_parts_16(const u16* x, const i64* starts, float* sums, i64 n, int f16) { parts_of(halves(x, f16), starts, sums, n); }

KERNEL add_16(const u16* a, const u16* b, u16* out, i64 count, int f16) {
    i64 at = global_thread() * EIGHT;
    if (at >= count) return;
    Vector<float, EIGHT> x = load_vector<EIGHT>(halves(a, f16), at, count), y = load_vector<EIGHT>(halves(b, f16), at, count);
    for (int j = 0; j < EIGHT; j++) x.of[j] = x.of[j] + y.of[j];
    store_vector(halves(out, f16), at, count, x);
}

KERNEL add_assign_16(u16* a, const u16* b, i64 count, int f16) {
    i64 at = global_thread() * EIGHT;
    if (at >= count) return;
    Vector<float, EIGHT> x = load_vector<EIGHT>(halves(a, f16), at, count), y = load_vector<EIGHT>(halves(b, f16), at, count);
    for (int j = 0; j < EIGHT; j++) x.of[j] = x.of[j] + y.of[j];
    store_vector(halves(a, f16), at, count, x);
}

KERNEL bias_16(const u16* x, const u16* bias, u16* out, i64 count, i64 n, int f16) {
    i64 at = global_thread() * EIGHT;
    if (at >= count) return;
    Vector<float, EIGHT> y = load_vector<EIGHT>(halves(x, f16), at, count), b = load_vector<EIGHT>(beside(halves(bias, f16), n), at, count);
    for (int j = 0; j < EIGHT; j++) y.of[j] = y.of[j] + b.of[j];
    store_vector(halves(out, f16), at, count, y);
}

KERNEL bias_residual_16(const u16* x, const u16* bias, const u16* residual, u16* out, i64 count, i64 n, int f16) {
    i64 at = global_thread() * EIGHT;
    if (at >= count) return;
    Vector<float, EIGHT> y = load_vector<EIGHT>(halves(x, f16), at, count), b = load_vector<EIGHT>(beside(halves(bias, f16), n), at, count);
    Vector<float, EIGHT> r = load_vector<EIGHT>(halves(residual, f16), at, count);
    for (int j = 0; j < EIGHT; j++) y.of[j] = (y.of[j] + b.of[j]) + r.of[j];
    store_vector(halves(out, f16), at, count, y);
}
