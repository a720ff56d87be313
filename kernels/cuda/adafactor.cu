// Adafactor: squared gradients of matrices, stored only by rows and by columns (Shazeer and Stern, arXiv:1804.04235).
//
//   matrices  R += share (mean over columns of g² + ε - R),  C likewise over rows,  u = g √(mean R / R) / √C
//   others    v += share (g² + ε - v),  u = g / √v;  g = grad_scale grad
//   size = step size / max(1, rms u / clip),  w = w keep - size u
//
// Shapes    weights, grads, variance: flat vectors, whose elements runs.cuh lists; numbers [count], indexed by element
//           number. row and col_var f32 and their totals f64 [matrices, rows] and [matrices, columns]: sums of squares
//           become the factors √(mean R / R) and 1 / √C; size f64 [matrices], of `each` elements.
// Geometry  one thread per element, row or column; for means of rows and the step size, one thread per matrix.
// Bytes     8 read and 8 written per element, then 8 and 4.
// Bits      as on the CPU: crates/optim/src/adafactor.rs.
#include "runs.cuh"

KERNEL adafactor_scaled(const i64* runs, i64 run_count, const float* grads, float grad_scale, float* numbers, i64 count) {
    i64 at = global_thread();
    if (at < count) numbers[at] = grad_scale * grads[LocalRuns{runs, run_count}.spot(at).place];
}

// The step of an element of a matrix before it is clipped.
DEVICE float step_of(Spot spot, const float* grads, float grad_scale, const double* row_factors, const double* column_factors, i64 rows,
                     i64 columns) {
    i64 row = spot.element / columns, column = row / rows * columns + spot.element % columns;
    float of_row = grad_scale * static_cast<float>(row_factors[row]);
    return of_row * grads[spot.place] * static_cast<float>(column_factors[column]);
}

KERNEL adafactor_measure(const i64* runs, i64 run_count, const float* weights, const float* grads, float grad_scale,
                         const double* row_factors, const double* column_factors, i64 rows, i64 columns, float* of_steps,
                         float* of_weights, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    Spot spot = LocalRuns{runs, run_count}.spot(at);
    of_steps[at] = step_of(spot, grads, grad_scale, row_factors, column_factors, rows, columns);
    of_weights[at] = weights[spot.place];
}

KERNEL adafactor_update(const i64* runs, i64 run_count, float* weights, const float* grads, float grad_scale, const double* row_factors,
                        const double* column_factors, i64 rows, i64 columns, const double* size, float keep, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    Spot spot = LocalRuns{runs, run_count}.spot(at);
    float step = step_of(spot, grads, grad_scale, row_factors, column_factors, rows, columns);
    weights[spot.place] = weights[spot.place] * keep - static_cast<float>(size[spot.element / (rows * columns)]) * step;
}

// Parameters that are not matrices.
KERNEL adafactor_vector_measure(const i64* runs, i64 run_count, const float* weights, const float* grads, float* variance,
                                float grad_scale, float share, float eps, float* of_steps, float* of_weights, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 place = LocalRuns{runs, run_count}.spot(at).place;
    float g = grad_scale * grads[place], v = variance[place];
    v += share * (g * g + eps - v);
    variance[place] = v;
    of_steps[at] = g / sqrtf(v);
    of_weights[at] = weights[place];
}

KERNEL adafactor_vector_update(const i64* runs, i64 run_count, float* weights, const float* grads, const float* variance,
                               float grad_scale, const double* size, i64 each, float keep, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    Spot spot = LocalRuns{runs, run_count}.spot(at);
    i64 place = spot.place;
    float step = grad_scale * grads[place] / sqrtf(variance[place]);
    weights[place] = weights[place] * keep - static_cast<float>(size[spot.element / each]) * step;
}

// Running means of the squares of rows or columns, each of `terms` elements; the means also overwrite the sums.
KERNEL adafactor_means(float* variance, double* totals, double terms, double share, double eps, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    double old = static_cast<double>(variance[i]), mean = totals[i] / terms + eps;
    float now = static_cast<float>(old + share * (mean - old));
    variance[i] = now;
    totals[i] = static_cast<double>(now);
}

// The mean of the rows of each matrix, in order.
KERNEL adafactor_row_means(const double* totals, i64 rows, double* means, i64 matrices) {
    i64 matrix = global_thread();
    if (matrix >= matrices) return;
    double sum = -0.0;
    for (i64 row = 0; row < rows; row++) sum += totals[matrix * rows + row];
    means[matrix] = sum / static_cast<double>(rows);
}

KERNEL adafactor_row_factors(double* totals, const double* means, i64 rows, i64 count) {
    i64 i = global_thread();
    if (i < count) totals[i] = sqrt(means[i / rows] / totals[i]);
}

KERNEL adafactor_column_factors(double* totals, i64 count) {
    i64 i = global_thread();
    if (i < count) totals[i] = 1.0 / sqrt(totals[i]);
}

// Reads the sums of the squares of u and of w for each of `matrices` matrices or vectors of `elements` elements, and
// overwrites the sums for u with the step size. `lr`: for relative steps, the largest fraction of the root mean square
// of w; else the step size.
KERNEL adafactor_settle(double* totals, double elements, int relative, double lr, double eps_scale, double clip, i64 matrices) {
    i64 i = global_thread();
    if (i >= matrices) return;
    double size = relative ? fmax(sqrt(totals[matrices + i] / elements), eps_scale) * lr : lr;
    totals[i] = size / fmax(sqrt(totals[i] / elements) / clip, 1.0);
}
