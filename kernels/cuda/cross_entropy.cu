// Softmax cross entropy, whole or with the vocabulary sharded over ranks, in steps between which the ranks reduce.
//
//   max = max_j x_j,  sum = Σ_j e^(x_j - max),  lse = max + ln sum,  loss = Σ_rows (lse - x_target),  dx = (e^(x - lse) - onehot) scale
//
// Shapes    logits [rows, pitch], whose columns skipped .. skipped + width are this shard: first `valid` words, from
//           word `first` on, then padding; targets, max, sum, target, lse [rows]; loss and scale f64 [samples], of rows
//           / samples rows each. A negative target masks its row.
// Geometry  statistics and gradient: one team of half warps per row (rows.cuh), by 16 bytes (neighbours.cuh); for
//           statistics of more than 16,384 words one block of 512 threads per row, of more than 32,768 one block of
//           1024. Rescaling and lse: one thread per row; the loss: one warp per sample.
// Bytes     statistics 4 valid read per element, gradient 4 read and 4 written; half where logits have 16 bits (_16).
//           Exponentials need the maximum of the row first, so a row is kept in shared memory between the search for
//           the maximum and the sum: its first 25,152 words, or 50,304 of 16 bits. The rest is read once more. Rows in
//           work at the same time, two on each of 132 SMs, are then 53 MB of f32 at 50,304 words, of which the second
//           half comes from the L2 cache.
// Bits      as on the CPU (crates/cpu/src/kernels/loss.rs), with two exceptions. lse and the loss need a logarithm in
//           f64, which the CPU takes from its C library and CUDA from its own: neither promises the last bit. lse is
//           rounded to f32 afterwards, so it differs where the f64 lies within 1e-16 of the middle of two f32; the loss
//           may differ by a relative 1e-15. If the maximum is zero, its sign may differ.
#include "halves.cuh"
#include "rows.cuh"

#define WARP 32

// Largest number of bytes of shared memory for rows: together with the static shared memory it fits every GPU with
// 99 KiB. src/geometry.rs has the same number.
#define HELD_BYTES 100608
#define HELD_THREADS 1024
#define HELD_HALVES (HELD_THREADS / ROW_LANES)

// 16 bytes of numbers as words, and a number from its word.
DEVICE u32 word_of(const Vector<float, FOUR>& bits, int word) { return __float_as_uint(bits.of[word]); }
DEVICE u32 word_of(const Pairs<EIGHT>& bits, int word) { return bits.of[word]; }

DEVICE float number_of(const float*, u32 word, i64) { return __uint_as_float(word); }
template <class Type> DEVICE float number_of(const Halves<Type>&, u32 word, i64 i) {
    return Type::wide(static_cast<u16>(word >> (i % 2 * 16)));
}

// The column of a target, -1 if it is not held here.
DEVICE i64 column_of(int target, i64 first, i64 valid) {
    i64 column = static_cast<i64>(target) - first;
    return target >= 0 && column >= 0 && column < valid ? column : -1;
}

template <int N, class In>
DEVICE void cross_entropy_stats_of(In logits, const int* targets, i64 pitch, i64 skipped, i64 valid, i64 first, float* max, float* sum,
                                   float* target, i64 rows) {
    GIVEN(u32, held, HELD_BYTES / 4);
    SHARED(float, partial, HELD_HALVES);
    Team team = team_of(rows, valid);
    In row = logits + (team.live ? team.row * pitch + skipped : 0);
    // The kept elements, and the place of the 16 bytes around an element: in odd blocks of 1024, the parts that two
    // half warps read are swapped, so that the halves of a warp have no bank conflicts.
    i64 kept = smaller((valid + 31) / 32 * 32, HELD_BYTES / 16 * N), before = team.first / team.halves * (kept / N);
    auto place = [=](i64 i) { return 4 * (before + (i / N ^ (i / ROW_BLOCK % 2 * (ROW_LANES / N)))); };
    float largest = row_max_of<N>(team, valid, partial, [&](i64 i) {
        auto bits = load_vector<N>(bits_of(row), i, valid);
        Vector<float, N> of;
        i64 at = place(i);
#pragma unroll
        for (int word = 0; word < 4; word++) {
            if (i < kept) held[at + word] = word_of(bits, word);
        }
#pragma unroll
        for (int j = 0; j < N; j++) of.of[j] = number_of(row, word_of(bits, j * 4 / N), j);
        return of;
    });
    __syncthreads();  // the rows are in shared memory
    // If all words have probability zero, exponentials relative to zero add up to 0 and not to NaN.
    float from = largest > -INFINITE ? largest : 0.0f;
    float total[1];
    row_sums<1>(team, valid, partial, total, [&](i64 i, float(&term)[1]) {
        float x = i < kept ? number_of(row, held[place(i) + i % N * 4 / N], i) : row[i];
        term[0] = exp_bits(x - from);
    });
    if (!team.live || team.half != 0 || team.lane != 0) return;
    i64 column = column_of(targets[team.row], first, valid);
    max[team.row] = largest;
    sum[team.row] = total[0];
    target[team.row] = column < 0 ? 0.0f : row[column];
}

#undef MOST_THREADS
#define MOST_THREADS HELD_THREADS

KERNEL cross_entropy_stats(const float* logits, const int* targets, i64 pitch, i64 skipped, i64 valid, i64 first, float* max, float* sum,
                           float* target, i64 rows) {
    cross_entropy_stats_of<FOUR>(logits, targets, pitch, skipped, valid, first, max, sum, target, rows);
}

KERNEL cross_entropy_stats_16(const u16* logits, const int* targets, i64 pitch, i64 skipped, i64 valid, i64 first, float* max, float* sum,
                              float* target, i64 rows, int f16) {
    in_type(f16, [&](auto of) { cross_entropy_stats_of<EIGHT>(of(logits), targets, pitch, skipped, valid, first, max, sum, target, rows); });
}

#undef MOST_THREADS
#define MOST_THREADS THREADS

KERNEL cross_entropy_larger(float* max, const float* other, i64 rows) {
    i64 i = global_thread();
    if (i < rows) max[i] = max[i] > other[i] ? max[i] : other[i];
}

// Rescales a shard's sum from its own maximum to the maximum of all shards.
KERNEL cross_entropy_rescale(const float* local, const float* global, float* sum, i64 rows) {
    i64 i = global_thread();
    if (i < rows) sum[i] = sum[i] * exp_bits(local[i] - global[i]);
}

KERNEL cross_entropy_lse(const float* max, const float* sum, float* lse, i64 rows) {
    i64 i = global_thread();
    if (i < rows) lse[i] = static_cast<float>(static_cast<double>(max[i]) + log(static_cast<double>(sum[i])));
}

// For each sample the sum over its unmasked rows, in order: each lane computes the term of a row, and the terms are
// added one after another.
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
    in_type(f16, [&](auto of) {
        cross_entropy_backward_of<EIGHT>(of(logits), targets, lse, scale, pitch, skipped, width, valid, first, samples, rows);
    });
}
