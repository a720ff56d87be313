// Layer norm over the last dim (Ba, Kiros and Hinton, arXiv:1607.06450).
//
//   mean = Σ x / n,  rstd = 1/√(Σ (x - mean)² / n + eps),  y = (x - mean) rstd gamma + beta
//   x̂ = (x - mean) rstd,  g = dy gamma,  dx = rstd (g - Σ g / n - x̂ Σ (g x̂) / n),  dgamma = Σ_rows dy x̂,  dbeta = Σ_rows dy
//
// Shapes    x, y, dy, dx [rows, n]; gamma, beta [n]; mean, rstd [rows]; the parts of dgamma and dbeta [parts, n].
// Geometry  forward: a block of threads for as many rows as it holds; backward, with the parts: for a part of up to 64
//           rows (norm.cuh). Rows of more than 8192: one team of half warps per row (rows.cuh), and for the parts one
//           thread per 16 bytes of the columns of a part.
// Bytes     forward 4 rows n read, and as many written, half if y is bf16; backward 8 rows n read, 4 written (4 more
//           read to accumulate); all half where tensors have 16 bits (_16): x, gamma, beta, y, dy and dx. Wide rows are
//           read more than once, from the cache except in backward (_wide), and once more for the parts.
// Bits      as on the CPU: crates/cpu/src/kernels/norm.rs, and RowSums in crates/cpu/src/lib.rs for the parts, which
//           sum_blocks (bias.cu) adds up.
#include "norm.cuh"

template <int N, class In, class Out>
DEVICE void layer_norm_forward_of(In x, In gamma, In beta, float eps, Out y, float* mean, float* rstd, i64 rows, i64 n) {
    if (n <= NORM_WIDTH) {
        norm_forward<true>(x, gamma, beta, eps, y, mean, rstd, rows, static_cast<int>(n));
        return;
    }
    SHARED(float, partial, ROW_HALVES);
    Team team = team_of(rows, n);
    In row = x + (team.live ? team.row * n : 0);
    float count = static_cast<float>(n), sum[1];
    row_sums<1>(team, n, partial, sum, [&](i64 i, float(&term)[1]) { term[0] = row[i]; });
    float m = sum[0] / count;
    row_sums<1>(team, n, partial, sum, [&](i64 i, float(&term)[1]) { term[0] = (row[i] - m) * (row[i] - m); });
    float r = 1.0f / sqrtf(sum[0] / count + eps);
    if (!team.live) return;
    if (team.half == 0 && team.lane == 0) mean[team.row] = m, rstd[team.row] = r;
    for (i64 i = first_of(team) * N; i < n; i += stride_of(team) * N) {
        Vector<float, N> of = load_vector<N>(row, i, n), gain = load_vector<N>(gamma, i, n), shift = load_vector<N>(beta, i, n);
#pragma unroll
        for (int j = 0; j < N; j++) of.of[j] = (of.of[j] - m) * r * gain.of[j] + shift.of[j];
        store_vector(y + team.row * n, i, n, of);
    }
}

#undef MOST_THREADS
#define MOST_THREADS NORM_THREADS

KERNEL layer_norm_forward_f32(const float* x, const float* gamma, const float* beta, float eps, float* y, float* mean, float* rstd,
                              i64 rows, i64 n) {
    layer_norm_forward_of<FOUR>(x, gamma, beta, eps, y, mean, rstd, rows, n);
}

KERNEL layer_norm_forward_bf16(const float* x, const float* gamma, const float* beta, float eps, u16* y, float* mean, float* rstd,
                               i64 rows, i64 n) {
    layer_norm_forward_of<EIGHT>(x, gamma, beta, eps, y, mean, rstd, rows, n);
}

KERNEL layer_norm_forward_16(const u16* x, const u16* gamma, const u16* beta, float eps, u16* y, float* mean, float* rstd, i64 rows, i64 n,
                             int f16) {
    in_type(f16, [&](auto of) { layer_norm_forward_of<EIGHT>(of(x), of(gamma), of(beta), eps, of(y), mean, rstd, rows, n); });
}

// dx is overwritten, or added to if `accumulate` is not 0.
KERNEL layer_norm_backward(const float* dy, const float* x, const float* gamma, const float* mean, const float* rstd, const i64* starts, float* dx,
                           int accumulate, float* dgamma, float* dbeta, i64 n) {
    norm_backward<true>(dy, x, gamma, mean, rstd, starts, dx, accumulate, dgamma, dbeta, static_cast<int>(n));
}

KERNEL layer_norm_backward_16(const u16* dy, const u16* x, const u16* gamma, const float* mean, const float* rstd, const i64* starts, u16* dx,
                              int accumulate, float* dgamma, float* dbeta, i64 n, int f16) {
    in_type(f16, [&](auto of) {
        norm_backward<true>(of(dy), of(x), of(gamma), mean, rstd, starts, of(dx), accumulate, dgamma, dbeta, static_cast<int>(n));
    });
}

#undef MOST_THREADS
#define MOST_THREADS THREADS

template <int N, class In, class Out>
DEVICE void layer_norm_backward_wide_of(In dy, In x, In gamma, const float* mean, const float* rstd, Out dx, int accumulate, i64 rows, i64 n) {
    SHARED(float, partial, 2 * ROW_HALVES);
    Team team = team_of(rows, n);
    i64 at = team.live ? team.row * n : 0;
    float m = 0.0f, r = 0.0f, count = static_cast<float>(n), sums[2];
    if (team.live) m = mean[team.row], r = rstd[team.row];
    row_sums<2>(team, n, partial, sums, [&](i64 i, float(&terms)[2]) {
        float g = dy[at + i] * gamma[i];
        terms[0] = g;
        terms[1] = g * ((x[at + i] - m) * r);
    });
    if (!team.live) return;
    float g_mean = sums[0] / count, gx_mean = sums[1] / count;
    for (i64 i = first_of(team) * N; i < n; i += stride_of(team) * N) {
        Vector<float, N> of = load_vector<N>(x + at, i, n), share = load_vector<N>(dy + at, i, n), gain = load_vector<N>(gamma, i, n), old = {};
        if (accumulate) old = load_vector<N>(dx + at, i, n);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float normal = (of.of[j] - m) * r;
            share.of[j] = r * (share.of[j] * gain.of[j] - g_mean - normal * gx_mean);
            if (accumulate) share.of[j] = old.of[j] + share.of[j];
        }
        store_vector(dx + at, i, n, share);
    }
}

KERNEL layer_norm_backward_wide(const float* dy, const float* x, const float* gamma, const float* mean, const float* rstd, float* dx,
                                int accumulate, i64 rows, i64 n) {
    layer_norm_backward_wide_of<FOUR>(dy, x, gamma, mean, rstd, dx, accumulate, rows, n);
}

KERNEL layer_norm_backward_wide_16(const u16* dy, const u16* x, const u16* gamma, const float* mean, const float* rstd, u16* dx,
                                   int accumulate, i64 rows, i64 n, int f16) {
    in_type(f16, [&](auto of) { layer_norm_backward_wide_of<EIGHT>(of(dy), of(x), of(gamma), mean, rstd, of(dx), accumulate, rows, n); });
}

// For each part, the sums of dy x̂ and of dy over the rows starts[part] .. starts[part + 1], one row after another.
template <int N, class In>
DEVICE void layer_norm_parts(In dy, In x, const float* mean, const float* rstd, const i64* starts, float* dgamma, float* dbeta, i64 parts, i64 n) {
    RowPlace at = row_place<N>(parts, n);
    if (!at.there) return;
    Vector<float, N> gamma_sum = {}, beta_sum = {};
    auto load = [=](i64 row) { return load_two<N>(dy + row * n, x + row * n, at.column, n); };
    in_order(starts[at.row], starts[at.row + 1], load, [&](i64 row, const auto& bits) {
        Vector<float, N> g = numbers_of(dy, bits.first), of = numbers_of(x, bits.second);
        float m = mean[row], r = rstd[row];
#pragma unroll
        for (int j = 0; j < N; j++) {
            gamma_sum.of[j] += g.of[j] * ((of.of[j] - m) * r);
            beta_sum.of[j] += g.of[j];
        }
    });
    store_vector(dgamma + at.row * n, at.column, n, gamma_sum);
    store_vector(dbeta + at.row * n, at.column, n, beta_sum);
}

KERNEL layer_norm_backward_parts(const float* dy, const float* x, const float* mean, const float* rstd, const i64* starts,
                                 float* dgamma, float* dbeta, i64 parts, i64 n) {
    layer_norm_parts<FOUR>(dy, x, mean, rstd, starts, dgamma, dbeta, parts, n);
}

KERNEL layer_norm_backward_parts_16(const u16* dy, const u16* x, const float* mean, const float* rstd, const i64* starts, float* dgamma,
                                    float* dbeta, i64 parts, i64 n, int f16) {
    in_type(f16, [&](auto of) { layer_norm_parts<EIGHT>(of(dy), of(x), mean, rstd, starts, dgamma, dbeta, parts, n); });
}
