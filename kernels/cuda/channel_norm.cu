// Norms over channels that come last, batch norm and group norm (Ioffe and Szegedy, arXiv:1502.03167; Wu and He,
// arXiv:1803.08494).
//
//   y = (x - mean) rstd gamma + beta,  rstd = 1/√(variance + eps),  mean and variance of all rows and channels of a group in a block
//   dx = rstd (dy gamma - mean(g) - x̂ mean(g x̂)),  g = dy gamma,  x̂ = (x - mean) rstd;  dgamma = Σ dy x̂,  dbeta = Σ dy over the rows of a block
//
// Shapes    x, y, dy, dx [blocks, rows, n]; mean, variance, and the means of g and g x̂ [blocks, groups]; gamma, beta
//           [n]; sums over rows [blocks, n], through parts of 64 rows, from starts[part] on (`sum_blocks` of bias.cu
//           adds them up).
// Geometry  parts: one thread per 16 bytes of the channels of a part; groups: one thread per group; the rest: one
//           thread per 16 bytes of a row (neighbours.cuh).
// Bytes     statistics 4 read per element, twice; y 4 read and 4 written; backward 8 read twice and 4 written.
// Bits      as on the CPU: crates/cpu/src/channel_norm.rs. Channels of a group are added one after another.
#include "halves.cuh"

// The index of the statistics for a row's channel.
DEVICE i64 group_at(i64 row, i64 rows, i64 channel, i64 n, i64 groups) { return row / rows * groups + channel / (n / groups); }

DEVICE float rstd_of(float variance, float eps) { return 1.0f / sqrtf(variance + eps); }

// Loads from a table the numbers of the groups of neighbouring channels of a row.
DEVICE Vector<float, FOUR> of_groups(const float* table, i64 row, i64 rows, i64 channel, i64 n, i64 groups) {
    Vector<float, FOUR> four = {};
#pragma unroll
    for (int j = 0; j < FOUR; j++) {
        if (channel + j < n) four.of[j] = table[group_at(row, rows, channel + j, n, groups)];
    }
    return four;
}

// (x - mean)², by parts.
KERNEL channel_squares_parts(const float* x, const float* mean, const i64* starts, float* sums, i64 parts, i64 rows, i64 groups, i64 n) {
    RowPlace at = row_place<FOUR>(parts, n);
    if (!at.there) return;
    Vector<float, FOUR> center = of_groups(mean, starts[at.row], rows, at.column, n, groups), sum = {};
    auto load = [=](i64 row) { return load_vector<FOUR>(x + row * n, at.column, n); };
    in_order(starts[at.row], starts[at.row + 1], load, [&](i64, const auto& of) {
#pragma unroll
        for (int j = 0; j < FOUR; j++) {
            float difference = of.of[j] - center.of[j];
            sum.of[j] += difference * difference;
        }
    });
    store_vector(sums + at.row * n, at.column, n, sum);
}

// For each group of channels of each block, the sum of `sums` divided by `members`.
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
    RowPlace at = row_place<FOUR>(count / n, n);
    if (!at.there) return;
    i64 first = at.row * n, channel = at.column;
    Vector<float, FOUR> of = load_vector<FOUR>(x + first, channel, n), gain = load_vector<FOUR>(gamma, channel, n), shift = load_vector<FOUR>(beta, channel, n);
    Vector<float, FOUR> m = of_groups(mean, at.row, rows, channel, n, groups), v = of_groups(variance, at.row, rows, channel, n, groups);
#pragma unroll
    for (int j = 0; j < FOUR; j++) of.of[j] = (of.of[j] - m.of[j]) * rstd_of(v.of[j], eps) * gain.of[j] + shift.of[j];
    store_vector(y + first, channel, n, of);
}

KERNEL channel_norm_backward_parts(const float* dy, const float* x, const float* mean, const float* variance, float eps, const i64* starts,
                                   float* dgamma, float* dbeta, i64 parts, i64 rows, i64 groups, i64 n) {
    RowPlace at = row_place<FOUR>(parts, n);
    if (!at.there) return;
    Vector<float, FOUR> center = of_groups(mean, starts[at.row], rows, at.column, n, groups), gain = {}, sum = {};
    Vector<float, FOUR> rstd = of_groups(variance, starts[at.row], rows, at.column, n, groups);
#pragma unroll
    for (int j = 0; j < FOUR; j++) rstd.of[j] = rstd_of(rstd.of[j], eps);
    auto load = [=](i64 row) { return load_two<FOUR>(dy + row * n, x + row * n, at.column, n); };
    in_order(starts[at.row], starts[at.row + 1], load, [&](i64, const auto& of) {
#pragma unroll
        for (int j = 0; j < FOUR; j++) {
            gain.of[j] += of.first.of[j] * ((of.second.of[j] - center.of[j]) * rstd.of[j]);
            sum.of[j] += of.first.of[j];
        }
    });
    store_vector(dgamma + at.row * n, at.column, n, gain);
    store_vector(dbeta + at.row * n, at.column, n, sum);
}

// For each group of channels of each block, `scale` Σ sums gamma.
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
    RowPlace at = row_place<FOUR>(count / n, n);
    if (!at.there) return;
    i64 first = at.row * n, channel = at.column;
    Vector<float, FOUR> of = load_vector<FOUR>(x + first, channel, n), share = load_vector<FOUR>(dy + first, channel, n);
    Vector<float, FOUR> gain = load_vector<FOUR>(gamma, channel, n);
    auto table = [=](const float* numbers) { return of_groups(numbers, at.row, rows, channel, n, groups); };
    Vector<float, FOUR> m = table(mean), v = table(variance), g_mean = table(g), gx_mean = table(gx);
#pragma unroll
    for (int j = 0; j < FOUR; j++) {
        float rstd = rstd_of(v.of[j], eps);
        share.of[j] = rstd * (share.of[j] * gain.of[j] - g_mean.of[j] - (of.of[j] - m.of[j]) * rstd * gx_mean.of[j]);
    }
    store_vector(dx + first, channel, n, share);
}
