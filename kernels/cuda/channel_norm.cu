// Norms over channels that come last, batch norm and group norm (Ioffe and Szegedy, arXiv:1502.03167; Wu and He, arXiv:1803.08494).
//
//   y = (x - mean) rstd gamma + beta,  rstd = 1/√(variance + eps),  mean and variance of all rows and channels of a group in a block
//   dx = rstd (dy gamma - mean(g) - x̂ mean(g x̂)),  g = dy gamma,  x̂ = (x - mean) rstd;  dgamma = Σ dy x̂,  dbeta = Σ dy over the rows of a block
//
// Shapes    x, y, dy, dx [blocks, rows, n]; mean, variance, and the means of g and g x̂ [blocks, groups]; gamma, beta [n]; sums over rows
//           [blocks, n], by way of parts of 64 rows, from starts[part] on (`sum_parts` of bias.cu adds them up).
// Geometry  parts: a block of threads a part and 256 channels, a thread a channel; groups: a thread each; the rest: a thread an element.
// Bytes     statistics 4 read an element twice; y 4 read and 4 written; backward 8 read twice and 4 written.
// Bits      those of the CPU: crates/tensor/src/cpu/channel_norm.rs. Channels of a group are added one after another.
#include "meshwork.cuh"

// The number of the statistics of a row's channel.
DEVICE i64 group_at(i64 row, i64 rows, i64 channel, i64 n, i64 groups) { return row / rows * groups + channel / (n / groups); }

DEVICE float rstd_of(float variance, float eps) { return 1.0f / sqrtf(variance + eps); }

// (x - mean)², by parts.
KERNEL channel_squares_parts(const float* x, const float* mean, const i64* starts, float* sums, i64 rows, i64 groups, i64 n) {
    i64 part = blockIdx.x, column = static_cast<i64>(blockIdx.y) * THREADS + threadIdx.x;
    if (column >= n) return;
    float center = mean[group_at(starts[part], rows, column, n, groups)], sum = 0.0f;
    for (i64 row = starts[part]; row < starts[part + 1]; row++) {
        float difference = x[row * n + column] - center;
        sum += difference * difference;
    }
    sums[part * n + column] = sum;
}

// Of each group of channels of each block the sum of `sums`, divided by `members`.
KERNEL channel_means(const float* sums, float members, float* means, i64 count, i64 groups, i64 n) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 each = n / groups, first = at / groups * n + at % groups * each;
    float sum = 0.0f;
    for (i64 channel = first; channel < first + each; channel++) sum += sums[channel];
    means[at] = sum / members;
}

KERNEL channel_norm_forward(const float* x, const float* mean, const float* variance, float eps, const float* gamma, const float* beta,
                            float* y, i64 count, i64 rows, i64 groups, i64 n) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 channel = at % n, group = group_at(at / n, rows, channel, n, groups);
    y[at] = (x[at] - mean[group]) * rstd_of(variance[group], eps) * gamma[channel] + beta[channel];
}

KERNEL channel_norm_backward_parts(const float* dy, const float* x, const float* mean, const float* variance, float eps, const i64* starts,
                                   float* dgamma, float* dbeta, i64 rows, i64 groups, i64 n) {
    i64 part = blockIdx.x, column = static_cast<i64>(blockIdx.y) * THREADS + threadIdx.x;
    if (column >= n) return;
    i64 group = group_at(starts[part], rows, column, n, groups);
    float center = mean[group], rstd = rstd_of(variance[group], eps), gain = 0.0f, sum = 0.0f;
    for (i64 row = starts[part]; row < starts[part + 1]; row++) {
        float d = dy[row * n + column];
        gain += d * ((x[row * n + column] - center) * rstd);
        sum += d;
    }
    dgamma[part * n + column] = gain;
    dbeta[part * n + column] = sum;
}

// Of each group of channels of each block `scale` Σ sums gamma.
KERNEL channel_gradient_means(const float* sums, const float* gamma, float scale, float* means, i64 count, i64 groups, i64 n) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 each = n / groups, first = at % groups * each;
    const float* row = sums + at / groups * n;
    float sum = 0.0f;
    for (i64 channel = first; channel < first + each; channel++) sum += row[channel] * gamma[channel];
    means[at] = sum * scale;
}

// `g` and `gx` are the means of g and of g x̂.
KERNEL channel_norm_backward(const float* dy, const float* x, const float* mean, const float* variance, float eps, const float* gamma,
                             const float* g, const float* gx, float* dx, i64 count, i64 rows, i64 groups, i64 n) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 channel = at % n, group = group_at(at / n, rows, channel, n, groups);
    float rstd = rstd_of(variance[group], eps);
    dx[at] = rstd * (dy[at] * gamma[channel] - g[group] - (x[at] - mean[group]) * rstd * gx[group]);
}
