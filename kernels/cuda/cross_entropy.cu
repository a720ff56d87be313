// Softmax cross entropy, whole or with the vocabulary sharded over ranks, in steps between which the ranks reduce.
//
//   max = max_j x_j,  sum = Σ_j e^(x_j - max),  lse = max + ln sum,  loss = Σ_rows (lse - x_target),  dx = (e^(x - lse) - onehot) scale
//
// Shapes    logits [rows, pitch], whose columns skipped .. skipped + width are this shard: first `valid` words, from
//           word `first` on, then padding; targets, max, sum, target, lse [rows]; loss and scale f64 [samples], of rows
//           / samples rows each. A negative target masks its row. Of groups: values, ids [samples, places], sums
//           [samples, groups] in f64, where a negative id is of no group.
// Geometry gradient: one team of half warps per row (rows.cuh), by 16 bytes (neighbours.cuh). Statistics: the same with
//           8 threads in place of a half warp, two lanes each; blocks of 128 threads, of 256 for rows of more than
//           16,384 words, of 512 for more than 32,768: two such blocks fit on an SM with 228 KiB. Rescaling and lse: one
//           thread per row; the loss: one warp per sample; sums of groups: one thread per group, their gradient: one per
//           place.
// Bytes     statistics 4 valid read per element, gradient 4 read and 4 written; half where logits have 16 bits (_16).
//           Exponentials need the maximum of the row first, so a row is kept in shared memory between the search for
//           the maximum and the sum: its first 24,768 words, or 49,536 of 16 bits. The rest is read once more. Rows in
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
// 99 KiB. A gap of 16 elements follows each block of a row, so that the four blocks that a warp sums lie in different
// banks; without gaps there is room for HELD_ELEMENTS of 4 bytes. src/geometry.rs has the same numbers.
#define HELD_BYTES 100608
#define HELD_ELEMENTS 24768
#define HELD_GAP 16
#define HELD_THREADS 512
#define HELD_LANES (ROW_LANES / 2)  // threads that sum a block of a row, two lanes each
#define HELD_HALVES (HELD_THREADS / HELD_LANES)

// Word `word` of 16 bytes of numbers.
DEVICE u32 word_of(const Vector<float, FOUR>& bits, int word) { return __float_as_uint(bits.of[word]); }
DEVICE u32 word_of(const Pairs<EIGHT>& bits, int word) { return bits.of[word]; }

// Two neighbours, in shared memory from word `at` on.
struct Two {
    float first, second;
};

template <class Held> DEVICE Two two_of(const float*, Held& held, int at) { return {__uint_as_float(held[at]), __uint_as_float(held[at + 1])}; }
template <class Type, class Held> DEVICE Two two_of(const Halves<Type>&, Held& held, int at) {
    u32 word = held[at];
    return {Type::low(word), Type::high(word)};
}

// The column of a target, -1 if it is not held here.
DEVICE i64 column_of(int target, i64 first, i64 valid) {
    i64 column = static_cast<i64>(target) - first;
    return target >= 0 && column >= 0 && column < valid ? column : -1;
}

// A row has fewer than 2³¹ words, which are numbered by `int`.
template <int N, class In>
DEVICE void cross_entropy_stats_of(In logits, const int* targets, i64 pitch, i64 skipped, int valid, i64 first, float* max, float* sum,
                                   float* target, i64 rows) {
    constexpr int OF_WORD = N / FOUR;  // elements of a word
    GIVEN(u32, held, HELD_BYTES / 4);
    SHARED(float, partial, HELD_HALVES);
    Team team = team_of<HELD_LANES>(rows, valid);
    In row = logits + (team.live ? team.row * pitch + skipped : 0);
    int blocks = (valid + ROW_BLOCK - 1) / ROW_BLOCK, whole = (valid + 31) / 32 * 32;
    int kept = whole < OF_WORD * HELD_ELEMENTS ? whole : OF_WORD * HELD_ELEMENTS;
    int before = team.first / team.halves * ((whole + blocks * HELD_GAP) / OF_WORD);  // words of the rows before this one
    float largest = -INFINITE;
    if (team.live) {
        for (int i = (team.half * HELD_LANES + team.lane) * N; i < valid; i += team.halves * HELD_LANES * N) {
            auto bits = load_vector<N>(bits_of(row), i, valid);
            int at = before + 4 * (i / N + i / ROW_BLOCK * (HELD_GAP / N));
#pragma unroll
            for (int word = 0; word < 4; word++) {
                if (i < kept) held[at + word] = word_of(bits, word);
            }
            Vector<float, N> of = numbers_of(row, bits);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (i + N <= valid || i + j < valid) largest = fmaxf(largest, of.of[j]);
            }
        }
    }
    largest = max_of_team<HELD_LANES>(team, partial, largest);
    __syncthreads();  // the rows are in shared memory
    // If all words have probability zero, exponentials relative to zero add up to 0 and not to NaN. No element is
    // larger than `from`.
    float from = largest > -INFINITE ? largest : 0.0f;
    double total = 0.0;
    for (int round = 0; round < blocks; round += team.halves) {
        int block = round + team.half;
        float even = 0.0f, odd = 0.0f;  // the two lanes of this thread
        if (team.live && block < blocks) {
            int end = block + 1 < blocks ? (block + 1) * ROW_BLOCK : valid, here = end < kept ? end : kept;
            int i = block * ROW_BLOCK + 2 * team.lane, at = before + (i + block * HELD_GAP) / OF_WORD;
#pragma unroll 4
            for (; i + 1 < here; i += ROW_LANES, at += ROW_LANES / OF_WORD) {
                Two x = two_of(row, held, at);
                even += exp_below(x.first - from), odd += exp_below(x.second - from);
            }
            for (; i + 1 < end; i += ROW_LANES) even += exp_below(row[i] - from), odd += exp_below(row[i + 1] - from);
            if (i < end) even += exp_below(row[i] - from);
        }
        for (int width = HELD_LANES / 2; width > 0; width /= 2) {
            even += __shfl_xor_sync(FULL_WARP, even, width);
            odd += __shfl_xor_sync(FULL_WARP, odd, width);
        }
        even += odd;
        if (team.halves == 1) {
            total += even;
            continue;
        }
        if (team.lane == 0) partial[team.first + team.half] = even;
        __syncthreads();  // the sums are written
        for (int half = 0; half < team.halves && round + half < blocks; half++) total += static_cast<double>(partial[team.first + half]);
        __syncthreads();  // they have been read: the next round may write
    }
    if (!team.live || team.half != 0 || team.lane != 0) return;
    i64 column = column_of(targets[team.row], first, valid);
    max[team.row] = largest;
    sum[team.row] = static_cast<float>(total);
    target[team.row] = column < 0 ? 0.0f : row[column];
}

#undef MOST_THREADS
#define MOST_THREADS HELD_THREADS
#undef RESIDENT
#define RESIDENT 2

KERNEL cross_entropy_stats(const float* logits, const int* targets, i64 pitch, i64 skipped, i64 valid, i64 first, float* max, float* sum,
                           float* target, i64 rows) {
    cross_entropy_stats_of<FOUR>(logits, targets, pitch, skipped, static_cast<int>(valid), first, max, sum, target, rows);
}

KERNEL cross_entropy_stats_16(const u16* logits, const int* targets, i64 pitch, i64 skipped, i64 valid, i64 first, float* max, float* sum,
                              float* target, i64 rows, int f16) {
    in_type(f16, [&](auto of) {
        cross_entropy_stats_of<EIGHT>(of(logits), targets, pitch, skipped, static_cast<int>(valid), first, max, sum, target, rows);
    });
}

#undef MOST_THREADS
#define MOST_THREADS THREADS
#undef RESIDENT
#define RESIDENT 1

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

// For each group of each sample the sum over the places with its number, in order. `count` is of all groups.
KERNEL group_sums_forward(const double* values, const int* ids, double* sums, i64 places, i64 groups, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 first = at / groups * places, group = at % groups;
    double sum = 0.0;
    for (i64 place = first; place < first + places; place++) {
        if (ids[place] == group) sum += values[place];
    }
    sums[at] = sum;
}

// The gradient of the values: of each place its group's, 0 where it has none. `count` is of all places.
KERNEL group_sums_backward(const double* dsums, const int* ids, double* dvalues, i64 places, i64 groups, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 group = ids[at];
    dvalues[at] = group >= 0 && group < groups ? dsums[at / places * groups + group] : 0.0;
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
