// Root mean square norm over the last dim (Zhang and Sennrich, arXiv:1910.07467).
//
//   rstd = 1/√(Σ x² / n + eps),  y = x rstd weight
//   x̂ = x rstd,  g = dy weight,  dx = rstd (g - x̂ Σ (g x̂) / n),  dweight = Σ_rows dy x̂
//
// Shapes    x, y, dy, dx [rows, n]; weight [n]; rstd [rows]; the parts of dweight [parts, n].
// Geometry  as in layer_norm.cu.
// Bytes     forward 4 rows n read, and as many written, half if y is bf16; backward 8 rows n read, 4 written (4 more
//           read to accumulate); all half where tensors have 16 bits (_16): x, weight, y, dy and dx. Wide rows as in
//           layer_norm.cu.
// Bits      as on the CPU: crates/cpu/src/kernels/rms_norm.rs; parts as in layer_norm.cu.
#include "norm.cuh"

template <int N, class In, class Out>
DEVICE void rms_norm_forward_of(In x, In weight, float eps, Out y, float* rstd, i64 rows, i64 n) {
    if (n <= NORM_WIDTH) {
        norm_forward<false>(x, weight, weight, eps, y, nullptr, rstd, rows, static_cast<int>(n));
        return;
    }
    SHARED(float, partial, ROW_HALVES);
    Team team = team_of(rows, n);
    In row = x + (team.live ? team.row * n : 0);
    float sum[1];
    row_sums<1>(team, n, partial, sum, [&](i64 i, float(&term)[1]) { term[0] = row[i] * row[i]; });
    float r = 1.0f / sqrtf(sum[0] / static_cast<float>(n) + eps);
    if (!team.live) return;
    if (team.half == 0 && team.lane == 0) rstd[team.row] = r;
    for (i64 i = first_of(team) * N; i < n; i += stride_of(team) * N) {
        Vector<float, N> of = load_vector<N>(row, i, n), gain = load_vector<N>(weight, i, n);
#pragma unroll
        for (int j = 0; j < N; j++) of.of[j] = of.of[j] * r * gain.of[j];
        store_vector(y + team.row * n, i, n, of);
    }
}

#undef MOST_THREADS
#define MOST_THREADS NORM_THREADS

KERNEL rms_norm_forward_f32(const float* x, const float* weight, float eps, float* y, float* rstd, i64 rows, i64 n) {
    rms_norm_forward_of<FOUR>(x, weight, eps, y, rstd, rows, n);
}

KERNEL rms_norm_forward_bf16(const float* x, const float* weight, float eps, u16* y, float* rstd, i64 rows, i64 n) {
    rms_norm_forward_of<EIGHT>(x, weight, eps, y, rstd, rows, n);
}

KERNEL rms_norm_forward_16(const u16* x, const u16* weight, float eps, u16* y, float* rstd, i64 rows, i64 n, int f16) {
    in_type(f16, [&](auto of) { rms_norm_forward_of<EIGHT>(of(x), of(weight), eps, of(y), rstd, rows, n); });
}

// dx is overwritten, or added to if `accumulate` is not 0.
KERNEL rms_norm_backward(const float* dy, const float* x, const float* weight, const float* rstd, const i64* starts, float* dx, int accumulate,
                         float* dweight, i64 n) {
    norm_backward<false>(dy, x, weight, nullptr, rstd, starts, dx, accumulate, dweight, nullptr, static_cast<int>(n));
}

KERNEL rms_norm_backward_16(const u16* dy, const u16* x, const u16* weight, const float* rstd, const i64* starts, u16* dx, int accumulate,
                            float* dweight, i64 n, int f16) {
    in_type(f16, [&](auto of) {
        norm_backward<false>(of(dy), of(x), of(weight), nullptr, rstd, starts, of(dx), accumulate, dweight, nullptr, static_cast<int>(n));
    });
}

#undef MOST_THREADS
#define MOST_THREADS THREADS

template <int N, class In, class Out>
DEVICE void rms_norm_backward_wide_of(In dy, In x, In weight, const float* rstd, Out dx, int accumulate, i64 rows, i64 n) {
    SHARED(float, partial, ROW_HALVES);
    Team team = team_of(rows, n);
    i64 at = team.live ? team.row * n : 0;
    float r = team.live ? rstd[team.row] : 0.0f, sum[1];
    row_sums<1>(team, n, partial, sum,
                [&](i64 i, float(&term)[1]) { term[0] = dy[at + i] * weight[i] * (x[at + i] * r); });
    if (!team.live) return;
    float gx_mean = sum[0] / static_cast<float>(n);
    for (i64 i = first_of(team) * N; i < n; i += stride_of(team) * N) {
        Vector<float, N> of = load_vector<N>(x + at, i, n), share = load_vector<N>(dy + at, i, n), gain = load_vector<N>(weight, i, n), old = {};
        if (accumulate) old = load_vector<N>(dx + at, i, n);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float normal = of.of[j] * r;
            share.of[j] = r * (share.of[j] * gain.of[j] - normal * gx_mean);
            if (accumulate) share.of[j] = old.of[j] + share.of[j];
        }
        store_vector(dx + at, i, n, share);
    }
}

KERNEL rms_norm_backward_wide(const float* dy, const float* x, const float* weight, const float* rstd, float* dx, int accumulate,
                              i64 rows, i64 n) {
    rms_norm_backward_wide_of<FOUR>(dy, x, weight, rstd, dx, accumulate, rows, n);
}

KERNEL rms_norm_backward_wide_16(const u16* dy, const u16* x, const u16* weight, const float* rstd, u16* dx, int accumulate, i64 rows,
                                 i64 n, int f16) {
    in_type(f16, [&](auto of) { rms_norm_backward_wide_of<EIGHT>(of(dy), of(x), of(weight), rstd, of(dx), accumulate, rows, n); });
}

// For each part, the sum of dy x̂ over the rows starts[part] .. starts[part + 1], one row after another.
template <int N, class In>
DEVICE void rms_norm_parts(In dy, In x, const float* rstd, const i64* starts, float* dweight, i64 parts, i64 n) {
    RowPlace at = row_place<N>(parts, n);
    if (!at.there) return;
    Vector<float, N> sum = {};
    auto load = [=](i64 row) { return load_two<N>(dy + row * n, x + row * n, at.column, n); };
    in_order(starts[at.row], starts[at.row + 1], load, [&](i64 row, const auto& bits) {
        Vector<float, N> g = numbers_of(dy, bits.first), of = numbers_of(x, bits.second);
        float r = rstd[row];
#pragma unroll
        for (int j = 0; j < N; j++) sum.of[j] += g.of[j] * (of.of[j] * r);
    });
    store_vector(dweight + at.row * n, at.column, n, sum);
}

KERNEL rms_norm_backward_parts(const float* dy, const float* x, const float* rstd, const i64* starts, float* dweight, i64 parts, i64 n) {
    rms_norm_parts<FOUR>(dy, x, rstd, starts, dweight, parts, n);
}

KERNEL rms_norm_backward_parts_16(const u16* dy, const u16* x, const float* rstd, const i64* starts, float* dweight, i64 parts, i64 n, int f16) {
    in_type(f16, [&](auto of) { rms_norm_parts<EIGHT>(of(dy), of(x), rstd, starts, dweight, parts, n); });
}
