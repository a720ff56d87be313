// Squared errors of samples, and the number of rows with a correct prediction.
//
//   loss[b, s] = scale Σ (x - t)² over block b of the elements of sample s;  dx = 2 scale dloss[s] (x - t)
//   right[s] = the rows of sample s whose target has the largest logit, ties to the first
//
// Shapes    x, t, dx [samples, elements]; loss f64 [blocks, samples]; the elements are in segments, block b is the b-th
//           of `blocks` slices of every segment, with boundaries rounded down. logits [rows, width]; targets [rows], a
//           negative one masks its row; right f64 [samples].
// Geometry  one thread per sum, and per element of dx; one warp per row of logits, and one warp per sample that counts
//           its rows.
// Bytes     8 read per element, once for each sum; dx 8 read and 4 written; logits once.
// Bits      as on the CPU, sums in f64 and in order: crates/cpu/src/kernels/reduction.rs, cpu/loss.rs.
#include "warp.cuh"

KERNEL squared_error(const float* x, const float* targets, double* loss, double scale, i64 samples, i64 elements, i64 segments, i64 blocks) {
    i64 at = global_thread();
    if (at >= samples * blocks) return;
    i64 first = at % samples * elements, block = at / samples, segment = elements / segments;
    double sum = 0.0;
    for (i64 s = 0; s < segments; s++) {
        i64 begin = s * segment + segment * block / blocks, end = s * segment + segment * (block + 1) / blocks;
        for (i64 i = first + begin; i < first + end; i++) {
            double error = static_cast<double>(x[i]) - static_cast<double>(targets[i]);
            sum += error * error;
        }
    }
    loss[at] = scale * sum;
}

KERNEL squared_error_backward(const float* x, const float* targets, const double* dloss, double scale, float* dx, i64 count, i64 elements) {
    i64 at = global_thread();
    if (at < count) dx[at] = static_cast<float>(2.0 * scale * dloss[at / elements]) * (x[at] - targets[at]);
}

// 1 for each correct row, else 0. A row with NaN as the target's logit is never correct.
KERNEL correct_rows(const float* logits, const int* targets, i64 width, int* right, i64 rows) {
    i64 row = global_thread() / WARP;
    if (row >= rows) return;
    i64 target = targets[row], wrong = 0;
    if (target >= 0 && target < width) {
        const float* of = logits + row * width;
        for (i64 i = lane_of_warp(); i < width; i += WARP) wrong += (i < target ? of[i] < of[target] : of[i] <= of[target]) ? 0 : 1;
    } else {
        wrong = 1;
    }
    wrong = sum_of_warp(wrong);
    if (lane_of_warp() == 0) right[row] = wrong == 0 ? 1 : 0;
}

KERNEL correct_counts(const int* right, double* out, i64 samples, i64 each) {
    i64 sample = global_thread() / WARP;
    if (sample >= samples) return;
    i64 count = 0;
    for (i64 i = lane_of_warp(); i < each; i += WARP) count += right[sample * each + i];
    count = sum_of_warp(count);
    if (lane_of_warp() == 0) out[sample] = static_cast<double>(count);
}
