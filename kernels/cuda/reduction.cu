// Sums over a dim, the spread of a gradient over it, and softmax along rows (crates/tensor/src/kernel/reduction.rs).
//
//   out[b, o, i] = scale Σ_e x[o, e, i], e in the b-th of `blocks` slices of the dim;  dx[o, e, i] = scale dy[o, i]
//   softmax: y = e^(x - max x) / Σ e^(x - max x);  dx = y (dy - Σ dy y), along rows
//
// Shapes    x, dx [outer, extent, inner]; out [blocks, outer, inner]; dy [outer, inner]. For softmax, all are [rows,
//           n].
// Geometry  one thread per sum, in order; one thread per four elements of dx, by 16 bytes where an inner row has them
//           (neighbours.cuh); one team of half warps per row of softmax (rows.cuh). Neighbouring threads of a sum read
//           neighbouring inner elements: with an inner extent of 1 and a long dim it is slow.
// Bytes     x once, out once; dy extent times, dx once. Softmax reads x three times and writes y once; backward reads
//           both twice.
// Bits      as on the CPU: sums over a dim in f64, rounded once (crates/cpu/src/kernels/reduction.rs, reduce.rs).
#include "rows.cuh"
#include "neighbours.cuh"

KERNEL sum_dim(const float* x, float* out, i64 count, i64 outer, i64 extent, i64 inner, i64 blocks, double scale) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 i = at % inner, o = at / inner % outer, block = at / inner / outer;
    double sum = 0.0;
    for (i64 e = extent * block / blocks; e < extent * (block + 1) / blocks; ++e)
        sum += static_cast<double>(x[(o * extent + e) * inner + i]);
    out[at] = static_cast<float>(sum * scale);
}

KERNEL spread_dim(const float* dy, float* dx, i64 count, i64 extent, i64 inner, float scale) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Vector<float, FOUR> four = load_rows<FOUR>(dy, at, count, inner, [=](i64 row) { return row / extent; });
#pragma unroll
    for (int j = 0; j < FOUR; j++) four.of[j] = four.of[j] * scale;
    store_vector(dx, at, count, four);
}

KERNEL softmax_forward(const float* x, float* y, i64 rows, i64 n) {
    SHARED(float, partial, ROW_HALVES);
    Team team = team_of(rows, n);
    const float* from = x + (team.live ? team.row * n : 0);
    float max = row_max<FOUR>(team, n, partial, from), sum[1];
    row_sums<1>(team, n, partial, sum, [&](i64 i, float(&terms)[1]) { terms[0] = exp_bits(from[i] - max); });
    if (!team.live) return;
    float by = 1.0f / sum[0];
    for (i64 i = first_of(team) * FOUR; i < n; i += stride_of(team) * FOUR) {
        Vector<float, FOUR> of = load_vector<FOUR>(from, i, n);
#pragma unroll
        for (int j = 0; j < FOUR; j++) of.of[j] = exp_bits(of.of[j] - max) * by;
        store_vector(y + team.row * n, i, n, of);
    }
}

KERNEL softmax_backward(const float* dy, const float* y, float* dx, i64 rows, i64 n) {
    SHARED(float, partial, ROW_HALVES);
    Team team = team_of(rows, n);
    i64 at = team.live ? team.row * n : 0;
    const float *dys = dy + at, *ys = y + at;
    float sum[1];
    row_sums<1>(team, n, partial, sum, [&](i64 i, float(&terms)[1]) { terms[0] = ys[i] * dys[i]; });
    if (!team.live) return;
    for (i64 i = first_of(team) * FOUR; i < n; i += stride_of(team) * FOUR) {
        Vector<float, FOUR> of = load_vector<FOUR>(ys, i, n), gradient = load_vector<FOUR>(dys, i, n);
#pragma unroll
        for (int j = 0; j < FOUR; j++) of.of[j] = of.of[j] * (gradient.of[j] - sum[0]);
        store_vector(dx + team.row * n, i, n, of);
    }
}
