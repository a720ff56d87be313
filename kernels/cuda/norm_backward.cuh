// Backward of layer norm and of RMS norm with one pass over memory: dx, and the sums over the rows of each part that become dgamma and dbeta. RMS norm is layer norm
// with a mean of zero and without dbeta.
//
// A block of threads has a part, and walks its rows in order, as many at a time as it has 8 elements a thread for: they lie one behind the other in memory, and are read
// by 16 bytes. dy and x̂ stand in shared memory until dx is written: half warps sum the rows in the order of rows.cuh, and each thread adds up to 8 columns, one row after
// another, in the order of RowSums in crates/tensor/src/cpu/mod.rs.
//
// Blocks    512 threads of 64 registers with 33 KiB, two on an SM; 1024 threads with 66 KiB, one, for rows of more than 4096. On paper, for an H100: a round of 4096 elements
//           reads 32 KiB and writes 16 KiB in f32, for which an SM's share of 3.35 TB/s takes 3400 cycles; it waits some 800 for the first bytes and 700 for sums (64
//           additions one behind the other, and three barriers), in which the other block moves its own. Blocks are what can be too few: 132 parts, 8448 rows, give
//           each SM one. Below, a part takes as long as ever, 64 rounds of about a microsecond at 4096 or 8192 columns, 32 at 2048, 13 at 768.
//           Two passes, as for wider rows, read dy and x twice more: twice the bytes in all, from memory where dy and x outgrow the L2 cache. At 64 parts of
//           4096 columns they move 400 MB in 120 µs, one pass takes 64; at 16 parts of 2048, 50 MB in 15 µs and three launches against 32. So one pass gains
//           wherever a step takes long, and loses microseconds where it does not: there is no choice by size, but for rows of more than 8192.
#pragma once
#include "halves.cuh"
#include "rows.cuh"

#define NORM_EACH 8          // elements of a thread at a time, and columns that it sums
#define NORM_THREADS 1024    // at most: src/geometry.rs says how many
#define NORM_ROWS 64         // of a part, at most, and so blocks of 1024 elements in the rows of a round
#define NORM_ROOM (NORM_EACH * NORM_THREADS)

// Where an element of a round stands in shared memory: a gap behind each 32, so that threads that write 8 neighbours each meet in no bank.
DEVICE int spread(int at) { return at + at / 32; }

template <bool CENTERED, class In, class Out>
DEVICE void norm_backward(In dy, In x, In gamma, const float* mean, const float* rstd, const i64* starts, Out dx, int accumulate, float* dgamma,
                          float* dbeta, int n) {
    GIVEN(float, held, 2 * (NORM_ROOM + NORM_ROOM / 32));  // dy, and behind it x̂
    SHARED(float, partial, 2 * NORM_ROWS);                 // sums of blocks of 1024 elements: of g, and behind them of g x̂
    SHARED(float, means, 2 * NORM_ROWS);                   // the same of rows, by n
    int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x), room = threads * NORM_EACH, behind = spread(room);
    int blocks = (n + ROW_BLOCK - 1) / ROW_BLOCK, together = room / n < NORM_ROWS ? room / n : NORM_ROWS;
    int at = thread * NORM_EACH, place = spread(at);  // no gap among the elements of a thread
    float gamma_sums[NORM_EACH], beta_sums[NORM_EACH];
#pragma unroll
    for (int c = 0; c < NORM_EACH; c++) gamma_sums[c] = beta_sums[c] = 0.0f;
    i64 end = starts[blockIdx.x + 1];
    for (i64 first = starts[blockIdx.x]; first < end; first += together) {
        int rows = static_cast<int>(smaller(together, end - first)), count = rows * n;
        if (at < count) {
            Vector<float, NORM_EACH> gradient = load_vector<NORM_EACH>(dy + first * n, at, count), value = load_vector<NORM_EACH>(x + first * n, at, count);
            int row = at / n, column = at % n;
            float m = 0.0f, r = 0.0f;
#pragma unroll
            for (int j = 0; j < NORM_EACH; j++) {
                if (at + j >= count) break;
                if (j == 0 || column == 0) {
                    r = rstd[first + row];
                    if (CENTERED) m = mean[first + row];
                }
                held[place + j] = gradient.of[j];
                held[behind + place + j] = (value.of[j] - m) * r;
                if (++column == n) column = 0, row++;
            }
        }
        __syncthreads();  // the rows are held
        // A half warp has a block of a row.
        int tasks = rows * blocks, lane = thread % ROW_LANES;
        for (int round = 0; round < tasks; round += threads / ROW_LANES) {
            int task = round + thread / ROW_LANES;
            float g_sum = 0.0f, gx_sum = 0.0f;
            if (task < tasks) {
                int begin = task % blocks * ROW_BLOCK, stop = n < begin + ROW_BLOCK ? n : begin + ROW_BLOCK, of = task / blocks * n;
                for (int i = begin + lane; i < stop; i += ROW_LANES) {
                    float g = held[spread(of + i)] * gamma[i];
                    if (CENTERED) g_sum += g;
                    gx_sum += g * held[behind + spread(of + i)];
                }
            }
            for (int width = ROW_LANES / 2; width > 0; width /= 2) {
                if (CENTERED) g_sum += __shfl_xor_sync(FULL_WARP, g_sum, width);
                gx_sum += __shfl_xor_sync(FULL_WARP, gx_sum, width);
            }
            if (task < tasks && lane == 0) {
                if (CENTERED) partial[task] = g_sum;
                partial[NORM_ROWS + task] = gx_sum;
            }
        }
        __syncthreads();  // the sums of blocks are written
        if (thread < rows) {
            double g_sum = 0.0, gx_sum = 0.0;
            for (int task = thread * blocks; task < (thread + 1) * blocks; task++) {
                if (CENTERED) g_sum += static_cast<double>(partial[task]);
                gx_sum += static_cast<double>(partial[NORM_ROWS + task]);
            }
            if (CENTERED) means[thread] = static_cast<float>(g_sum) / static_cast<float>(n);
            means[NORM_ROWS + thread] = static_cast<float>(gx_sum) / static_cast<float>(n);
        }
        __syncthreads();  // the means of rows are written
        if (at < count) {
            int row = at / n, column = at % n;
            Vector<float, NORM_EACH> gain = load_around<NORM_EACH>(gamma, column, n), share = {};
            float g_mean = 0.0f, gx_mean = 0.0f, r = 0.0f;
#pragma unroll
            for (int j = 0; j < NORM_EACH; j++) {
                if (at + j >= count) break;
                if (j == 0 || column == 0) {
                    r = rstd[first + row], gx_mean = means[NORM_ROWS + row];
                    if (CENTERED) g_mean = means[row];
                }
                float g = held[place + j] * gain.of[j];
                if (CENTERED) g = g - g_mean;
                share.of[j] = r * (g - held[behind + place + j] * gx_mean);
                if (++column == n) column = 0, row++;
            }
            if (accumulate) {
                Vector<float, NORM_EACH> old = load_vector<NORM_EACH>(dx + first * n, at, count);
#pragma unroll
                for (int j = 0; j < NORM_EACH; j++) share.of[j] = old.of[j] + share.of[j];
            }
            store_vector(dx + first * n, at, count, share);
        }
#pragma unroll
        for (int c = 0; c < NORM_EACH; c++) {
            int column = c * threads + thread;
            for (int row = 0; column < n && row < rows; row++) {
                float g = held[spread(row * n + column)];
                gamma_sums[c] += g * held[behind + spread(row * n + column)];
                if (CENTERED) beta_sums[c] += g;
            }
        }
        __syncthreads();  // the rows are read
    }
#pragma unroll
    for (int c = 0; c < NORM_EACH; c++) {
        i64 column = c * threads + thread, to = static_cast<i64>(blockIdx.x) * n + column;
        if (column >= n) continue;
        dgamma[to] = gamma_sums[c];
        if (CENTERED) dbeta[to] = beta_sums[c];
    }
}
