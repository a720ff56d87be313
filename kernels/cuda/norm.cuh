// Layer norm and RMS norm with one pass over memory, forward and backward, for rows of up to 8192. RMS norm is layer
// norm with a mean of zero and without beta.
//
// A block of threads takes rows in rounds. A round has as many rows as make 8 elements a thread; they are contiguous in
// memory and are read by 16 bytes. The block keeps them in shared memory, where half warps sum each row in the order of
// rows.cuh. Forward, a block has one round. Backward, it has a part of up to 64 rows and goes through its rounds in
// order: dy and x̂ stay in shared memory until dx is written, and each thread sums up to 8 columns, row after row, in
// the order of RowSums in crates/cpu/src/lib.rs.
//
// Occupancy Forward: 256 threads, 512 for rows of more than 2048, 1024 for more than 4096, with 8 to 33 KiB of shared
//           memory. An SM runs at least 1024 threads; their 32 KiB of loads are twice the amount that keeps memory
//           busy. Backward: 512 threads of 64 registers with 33 KiB, two blocks on an SM; for rows of more than 4096,
//           1024 threads with 66 KiB, one block.
// Time      On paper, backward on an H100. A round of 4096 elements reads 32 KiB and writes 16 KiB in f32, which takes
//           3400 cycles at an SM's share of 3.35 TB/s. A block waits 800 cycles for the first bytes and 700 for sums
//           (64 dependent additions, three barriers); the other block uses the memory meanwhile. The number of blocks
//           can be too small: 132 parts (8448 rows) give each SM one block. With fewer parts the time stays that of one
//           part: 64 rounds of about 1 µs at 4096 and 8192 columns, 32 at 2048, 13 at 768. Two passes, as for wider
//           rows, read dy and x twice more, from memory where they outgrow the L2 cache: twice the bytes in all. At 64
//           parts of 4096 columns they move 400 MB in 120 µs, and one pass takes 64 µs. At 16 parts of 2048 columns
//           they move 50 MB in 15 µs and three launches, and one pass takes 32 µs. One pass wins where a step takes
//           long, and loses microseconds elsewhere, so only widths above 8192 use two passes.
#pragma once
#include "halves.cuh"
#include "rows.cuh"

#define NORM_WIDTH 8192    // largest width of rows; the same as in src/families.rs
#define NORM_EACH 8        // elements of a thread at a time, and columns that it sums
#define NORM_THREADS 1024  // at most; src/geometry.rs chooses the number
#define NORM_ROWS 64       // rows of a round, at most, and hence blocks of 1024 elements
#define NORM_ROOM (NORM_EACH * NORM_THREADS)
#define NORM_HELD (NORM_ROOM + NORM_ROOM / 32)

// Place of a round's element in shared memory: a gap after every 32 elements, so that threads that each write 8
// neighbours have no bank conflicts.
DEVICE int spread(int at) { return at + at / 32; }

// The rows that a block of threads holds at a time.
struct Round {
    int threads, thread;
    int room;      // elements
    int together;  // rows, at most
    int blocks;    // blocks of 1024 elements in a row
    int at;        // this thread's first element
    int place;     // its place; the elements of a thread have no gap between them
};

DEVICE Round round_of(int n) {
    int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x), room = threads * NORM_EACH, at = thread * NORM_EACH;
    return {threads, thread, room, room / n < NORM_ROWS ? room / n : NORM_ROWS, (n + ROW_BLOCK - 1) / ROW_BLOCK, at, spread(at)};
}

// Writes partial[k * NORM_ROWS + task] for each block of each of `rows` rows: the sum of the terms of term(row, i,
// place, terms), where element i of the row is at `place`. All threads must call it, and may then read the sums.
template <int K, class Partial, class Term>
DEVICE void sum_held(const Round& round, int rows, int n, Partial& partial, Term term) {
    int tasks = rows * round.blocks, lane = round.thread % ROW_LANES;
    for (int first = 0; first < tasks; first += round.threads / ROW_LANES) {
        int task = first + round.thread / ROW_LANES;
        float sums[K], terms[K];
        for (int k = 0; k < K; k++) sums[k] = 0.0f;
        if (task < tasks) {
            int row = task / round.blocks, begin = task % round.blocks * ROW_BLOCK, end = n < begin + ROW_BLOCK ? n : begin + ROW_BLOCK;
            for (int i = begin + lane; i < end; i += ROW_LANES) {
                term(row, i, spread(row * n + i), terms);
                for (int k = 0; k < K; k++) sums[k] += terms[k];
            }
        }
        for (int k = 0; k < K; k++) {
            for (int width = ROW_LANES / 2; width > 0; width /= 2) sums[k] += __shfl_xor_sync(FULL_WARP, sums[k], width);
            if (task < tasks && lane == 0) partial[k * NORM_ROWS + task] = sums[k];
        }
    }
    __syncthreads();  // the sums of blocks are written
}

// Sum k of a row by n.
template <class Partial> DEVICE float mean_of_held(const Round& round, Partial& partial, int k, int row, int n) {
    double sum = 0.0;
    for (int block = 0; block < round.blocks; block++) sum += static_cast<double>(partial[k * NORM_ROWS + row * round.blocks + block]);
    return static_cast<float>(sum) / static_cast<float>(n);
}

template <bool CENTERED, class In, class Out>
DEVICE void norm_forward(In x, In gamma, In beta, float eps, Out y, float* mean, float* rstd, i64 all, int n) {
    GIVEN(float, held, NORM_HELD);
    SHARED(float, partial, NORM_ROWS);
    SHARED(float, stats, 2 * NORM_ROWS);  // means, then rstd
    Round round = round_of(n);
    i64 first = static_cast<i64>(blockIdx.x) * round.together;
    int rows = static_cast<int>(smaller(round.together, all - first)), count = rows * n;
    if (round.at < count) {
        Vector<float, NORM_EACH> value = load_vector<NORM_EACH>(x + first * n, round.at, count);
#pragma unroll
        for (int j = 0; j < NORM_EACH; j++) {
            if (round.at + j < count) held[round.place + j] = value.of[j];
        }
    }
    __syncthreads();  // the rows are in shared memory
    if (CENTERED) {
        sum_held<1>(round, rows, n, partial, [&](int, int, int place, float(&term)[1]) { term[0] = held[place]; });
        if (round.thread < rows) stats[round.thread] = mean_of_held(round, partial, 0, round.thread, n);
        __syncthreads();  // the means are written
    }
    sum_held<1>(round, rows, n, partial, [&](int row, int, int place, float(&term)[1]) {
        float from_mean = held[place];
        if (CENTERED) from_mean -= stats[row];
        term[0] = from_mean * from_mean;
    });
    if (round.thread < rows) {
        float r = 1.0f / sqrtf(mean_of_held(round, partial, 0, round.thread, n) + eps);
        stats[NORM_ROWS + round.thread] = r;
        rstd[first + round.thread] = r;
        if (CENTERED) mean[first + round.thread] = stats[round.thread];
    }
    __syncthreads();  // rstd is written
    if (round.at >= count) return;
    int row = round.at / n, column = round.at % n;
    Vector<float, NORM_EACH> gain = load_around<NORM_EACH>(gamma, column, n), shift = {}, result = {};
    if (CENTERED) shift = load_around<NORM_EACH>(beta, column, n);
    float m = 0.0f, r = 0.0f;
#pragma unroll
    for (int j = 0; j < NORM_EACH; j++) {
        if (round.at + j >= count) break;
        if (j == 0 || column == 0) {
            r = stats[NORM_ROWS + row];
            if (CENTERED) m = stats[row];
        }
        float value = held[round.place + j];
        if (CENTERED) result.of[j] = (value - m) * r * gain.of[j] + shift.of[j];
        else result.of[j] = value * r * gain.of[j];
        if (++column == n) column = 0, row++;
    }
    store_vector(y + first * n, round.at, count, result);
}

// dx is overwritten, or added to if `accumulate` is not 0.
template <bool CENTERED, class In, class Out>
DEVICE void norm_backward(In dy, In x, In gamma, const float* mean, const float* rstd, const i64* starts, Out dx, int accumulate, float* dgamma,
                          float* dbeta, int n) {
    constexpr int G = 0, GX = CENTERED ? 1 : 0, SUMS = GX + 1;  // of g, if there is a mean, and of g x̂
    GIVEN(float, held, 2 * NORM_HELD);  // dy, then x̂
    SHARED(float, partial, SUMS * NORM_ROWS);
    SHARED(float, means, SUMS * NORM_ROWS);
    Round round = round_of(n);
    int behind = spread(round.room);
    float gamma_sums[NORM_EACH], beta_sums[NORM_EACH];
#pragma unroll
    for (int c = 0; c < NORM_EACH; c++) gamma_sums[c] = beta_sums[c] = 0.0f;
    i64 end = starts[blockIdx.x + 1];
    for (i64 first = starts[blockIdx.x]; first < end; first += round.together) {
        int rows = static_cast<int>(smaller(round.together, end - first)), count = rows * n;
        if (round.at < count) {
            auto stored = load_two<NORM_EACH>(dy + first * n, x + first * n, round.at, count);
            Vector<float, NORM_EACH> gradient = numbers_of(dy, stored.first), value = numbers_of(x, stored.second);
            int row = round.at / n, column = round.at % n;
            float m = 0.0f, r = 0.0f;
#pragma unroll
            for (int j = 0; j < NORM_EACH; j++) {
                if (round.at + j >= count) break;
                if (j == 0 || column == 0) {
                    r = rstd[first + row];
                    if (CENTERED) m = mean[first + row];
                }
                held[round.place + j] = gradient.of[j];
                held[behind + round.place + j] = (value.of[j] - m) * r;
                if (++column == n) column = 0, row++;
            }
        }
        __syncthreads();  // the rows are in shared memory
        sum_held<SUMS>(round, rows, n, partial, [&](int, int i, int place, float(&terms)[SUMS]) {
            float g = held[place] * gamma[i];
            terms[G] = g;
            terms[GX] = g * held[behind + place];
        });
        if (round.thread < rows) {
            for (int k = 0; k < SUMS; k++) means[k * NORM_ROWS + round.thread] = mean_of_held(round, partial, k, round.thread, n);
        }
        __syncthreads();  // the means of rows are written
        if (round.at < count) {
            int row = round.at / n, column = round.at % n;
            Vector<float, NORM_EACH> gain = load_around<NORM_EACH>(gamma, column, n), share = {};
            float g_mean = 0.0f, gx_mean = 0.0f, r = 0.0f;
#pragma unroll
            for (int j = 0; j < NORM_EACH; j++) {
                if (round.at + j >= count) break;
                if (j == 0 || column == 0) {
                    r = rstd[first + row], gx_mean = means[GX * NORM_ROWS + row];
                    if (CENTERED) g_mean = means[row];
                }
                float g = held[round.place + j] * gain.of[j];
                if (CENTERED) g = g - g_mean;
                share.of[j] = r * (g - held[behind + round.place + j] * gx_mean);
                if (++column == n) column = 0, row++;
            }
            if (accumulate) {
                Vector<float, NORM_EACH> old = load_vector<NORM_EACH>(dx + first * n, round.at, count);
#pragma unroll
                for (int j = 0; j < NORM_EACH; j++) share.of[j] = old.of[j] + share.of[j];
            }
            store_vector(dx + first * n, round.at, count, share);
        }
#pragma unroll
        for (int c = 0; c < NORM_EACH; c++) {
            int column = c * round.threads + round.thread;
            for (int row = 0; column < n && row < rows; row++) {
                float g = held[spread(row * n + column)];
                gamma_sums[c] += g * held[behind + spread(row * n + column)];
                if (CENTERED) beta_sums[c] += g;
            }
        }
        __syncthreads();  // the rows have been read
    }
#pragma unroll
    for (int c = 0; c < NORM_EACH; c++) {
        i64 column = c * round.threads + round.thread, to = static_cast<i64>(blockIdx.x) * n + column;
        if (column >= n) continue;
        dgamma[to] = gamma_sums[c];
        if (CENTERED) dbeta[to] = beta_sums[c];
    }
}
