// Softmax cross entropy, whole or with the vocabulary cut over ranks, in steps between which the ranks reduce.
//
//   max = max_j x_j,  sum = Σ_j e^(x_j - max),  lse = max + ln sum,  loss = Σ_rows (lse - x_target),  dx = (e^(x - lse) - onehot) scale
//
// Shapes    logits [rows, pitch], of which columns skipped .. skipped + width are this shard's, the first `valid` of them words, from word `first`
//           on, the rest padding; targets, max, sum, target, lse [rows]; loss and scale f64 [samples], of rows / samples rows each. A
//           negative target masks its row.
// Geometry  statistics and gradient: a team of half warps a row (rows.cuh), by 16 bytes (neighbours.cuh) but for the sums; rescaling and lse: a thread a row; the loss: a warp a sample.
// Bytes     statistics 4 valid read an element (the second pass hits the cache), gradient 4 read and 4 written; half where logits have 16 bits (_16).
// Bits      those of the CPU (crates/tensor/src/cpu/kernels/loss.rs) but for two. lse and the loss need a logarithm in f64, which the CPU takes
//           from its C library and CUDA from its own: neither promises the last bit. lse is rounded to f32 afterwards, so it differs where
//           the f64 lies within 1e-16 of the middle of two f32; the loss may differ by 1e-15 of itself. And if the maximum is zero, its
//           sign may differ.
#include "halves.cuh"
#include "rows.cuh"

#define WARP 32

// The column of a target, -1 if it is not held here.
DEVICE i64 column_of(int target, i64 first, i64 valid) {
    i64 column = static_cast<i64>(target) - first;
    return target >= 0 && column >= 0 && column < valid ? column : -1;
}

template <int N, class In>
DEVICE void cross_entropy_stats_of(In logits, const int* targets, i64 pitch, i64 skipped, i64 valid, i64 first, float* max, float* sum,
                                   float* target, i64 rows) {
    SHARED(float, partial, ROW_HALVES);
    Team team = team_of(rows, valid);
    In row = logits + (team.live ? team.row * pitch + skipped : 0);
    float largest = row_max<N>(team, valid, partial, row);
    // If all words have probability zero, exponentials relative to zero add up to 0 and not to NaN.
    float from = largest > -INFINITE ? largest : 0.0f;
    float total[1];
    row_sums<1>(team, valid, partial, total, [&](i64 i, float(&term)[1]) { term[0] = exp_bits(row[i] - from); });
    if (!team.live || team.half != 0 || team.lane != 0) return;
    i64 column = column_of(targets[team.row], first, valid);
    max[team.row] = largest;
    sum[team.row] = total[0];
    target[team.row] = column < 0 ? 0.0f : row[column];
}

KERNEL cross_entropy_stats(const float* logits, const int* targets, i64 pitch, i64 skipped, i64 valid, i64 first, float* max, float* sum,
                           float* target, i64 rows) {
    cross_entropy_stats_of<FOUR>(logits, targets, pitch, skipped, valid, first, max, sum, target, rows);
}

KERNEL cross_entropy_stats_16(const u16* logits, const int* targets, i64 pitch, i64 skipped, i64 valid, i64 first, float* max, float* sum,
                              float* target, i64 rows, int f16) {
    cross_entropy_stats_of<EIGHT>(halves(logits, f16), targets, pitch, skipped, valid, first, max, sum, target, rows);
}

KERNEL cross_entropy_larger(float* max, const float* other, i64 rows) {
    i64 i = global_thread();
    if (i < rows) max[i] = max[i] > other[i] ? max[i] : other[i];
}

// A shard's sum, taken against the maximum of all shards instead of its own.
KERNEL cross_entropy_rescale(const float* local, const float* global, float* sum, i64 rows) {
    i64 i = global_thread();
    if (i < rows) sum[i] = sum[i] * exp_bits(local[i] - global[i]);
}

KERNEL cross_entropy_lse(const float* max, const float* sum, float* lse, i64 rows) {
    i64 i = global_thread();
    if (i < rows) lse[i] = static_cast<float>(static_cast<double>(max[i]) + log(static_cast<double>(sum[i])));
}

// For each sample the sum over its unmasked rows, in order: each lane has a row's term, and they are added one after another.
KERNEL cross_entropy_loss(const int* targets, const float* max, const float* sum, const float* target, double* loss, i64 samples,
                          i64 rows) {
    i64 sample = global_thread() / WARP, each = rows / samples;
    int lane = static_cast<int>(threadIdx.x) % WARP;
    bool live = sample < samples;
    double total = 0.0;
    for (i64 begin = 0; begin < each; begin += WARP) {
        i64 row = sample * each + begin + lane;
        bool counts = live && begin + lane < each && targets[row] >= 0;
        double term = 0.0;
        if (counts) {
            term = (static_cast<double>(max[row]) - static_cast<double>(target[row])) + log(static_cast<double>(sum[row]));
        }
        int counted = counts ? 1 : 0;
        for (int l = 0; l < WARP; l++) {
            double next = __shfl_sync(FULL_WARP, term, l);
            if (__shfl_sync(FULL_WARP, counted, l)) total += next;
        }
    }
    if (live && lane == 0) loss[sample] = total;
}

// The gradient, in place of the logits; zero in masked rows and padding.
template <int N, class Out>
DEVICE void cross_entropy_backward_of(Out logits, const int* targets, const float* lse, const double* scale, i64 pitch, i64 skipped,
                                      i64 width, i64 valid, i64 first, i64 samples, i64 rows) {
    Team team = team_of(rows, width);
    if (!team.live) return;
    i64 each = rows > samples ? rows / samples : 1, column = column_of(targets[team.row], first, valid);
    float factor = static_cast<float>(scale[team.row / each]), log_sum = lse[team.row];
    bool masked = targets[team.row] < 0;
    Out row = logits + team.row * pitch + skipped;
    for (i64 i = first_of(team) * N; i < width; i += stride_of(team) * N) {
        Vector<float, N> of = {};
        if (!masked && i < valid) of = load_vector<N>(row, i, width);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float gradient = exp_bits(of.of[j] - log_sum) * factor;
            if (i + j == column) gradient = gradient - factor;
            of.of[j] = !masked && i + j < valid ? gradient : 0.0f;
        }
        store_vector(row, i, width, of);
    }
}

KERNEL cross_entropy_backward(float* logits, const int* targets, const float* lse, const double* scale, i64 pitch, i64 skipped,
                              i64 width, i64 valid, i64 first, i64 samples, i64 rows) {
    cross_entropy_backward_of<FOUR>(logits, targets, lse, scale, pitch, skipped, width, valid, first, samples, rows);
}

KERNEL cross_entropy_backward_16(u16* logits, const int* targets, const float* lse, const double* scale, i64 pitch, i64 skipped, i64 width,
                                 i64 valid, i64 first, i64 samples, i64 rows, int f16) {
    cross_entropy_backward_of<EIGHT>(halves(logits, f16), targets, lse, scale, pitch, skipped, width, valid, first, samples, rows);
}
