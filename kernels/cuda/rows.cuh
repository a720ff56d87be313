// Sums and maxima along rows, in the order of crates/cpu/src/kernels/reduce.rs.
//
// The CPU cuts a row into blocks of 1024 elements, adds element i of a block to lane i % 16, the lanes as a balanced
// tree (8, 4, 2, 1 apart), and the blocks one after another in f64. Here half a warp plays the 16 lanes: it reads 64
// bytes at a time, and shuffles are the tree. A team of `halves` half warps has a row, a power of two that grows with
// the row's blocks, so that a block of 256 threads has 16 rows of up to 1024 elements or one of more than 8192. Each
// half warp takes every halves-th block of the row, and all threads of the team add the sums of the blocks in order.
//
// The maximum is taken in another order, which matters only if the maximum is zero: it may be -0 or 0.
#pragma once
#include "math.cuh"
#include "neighbours.cuh"

#define ROW_BLOCK 1024
#define ROW_LANES 16
#define ROW_HALVES (THREADS / ROW_LANES)

struct Team {
    i64 row;      // its row
    bool live;    // whether the row exists
    int halves;   // half warps of the team
    int half;     // this thread's half warp
    int lane;     // this thread's lane in its half warp
    int first;    // the team's first half warp, in the block of threads
};

// The number of half warps for rows of n elements, of `most` in a block of threads; src/geometry.rs computes the same.
DEVICE int team_halves(i64 n, int most) {
    int halves = 1;
    while (halves < most && static_cast<i64>(halves) * ROW_BLOCK < n) halves *= 2;
    return halves;
}

// LANES: the threads of a half warp, or fewer if each has several lanes.
template <int LANES = ROW_LANES> DEVICE Team team_of(i64 rows, i64 n) {
    Team team;
    int most = static_cast<int>(blockDim.x) / LANES;
    team.halves = team_halves(n, most);
    int half = static_cast<int>(threadIdx.x) / LANES;
    team.lane = static_cast<int>(threadIdx.x) % LANES;
    team.half = half % team.halves;
    team.first = half - team.half;
    team.row = static_cast<i64>(blockIdx.x) * (most / team.halves) + half / team.halves;
    team.live = team.row < rows;
    return team;
}

// Elements of its row for this thread, in steps: for (i64 i = first_of(team); i < n; i += stride_of(team)); both times
// N for N neighbours a step.
DEVICE i64 first_of(const Team& team) { return static_cast<i64>(team.half) * ROW_LANES + team.lane; }
DEVICE i64 stride_of(const Team& team) { return static_cast<i64>(team.halves) * ROW_LANES; }

// sums[k] of the terms of term(i, terms) over the elements of the row; all threads of the team get the same sums.
// `partial` is shared memory of K * ROW_HALVES floats; for K = 1, one float per half warp. All threads of the block
// must call it, also threads without a row.
template <int K, class Partial, class Term>
DEVICE void row_sums(const Team& team, i64 n, Partial& partial, float (&sums)[K], Term term) {
    i64 blocks = (n + ROW_BLOCK - 1) / ROW_BLOCK;
    double total[K];
    for (int k = 0; k < K; k++) total[k] = 0.0;
    for (i64 round = 0; round < blocks; round += team.halves) {
        i64 block = round + team.half;
        float lane[K], terms[K];
        for (int k = 0; k < K; k++) lane[k] = 0.0f;
        if (team.live && block < blocks) {
            i64 end = smaller(n, (block + 1) * ROW_BLOCK);
            for (i64 i = block * ROW_BLOCK + team.lane; i < end; i += ROW_LANES) {
                term(i, terms);
                for (int k = 0; k < K; k++) lane[k] += terms[k];
            }
        }
        for (int k = 0; k < K; k++) {
            for (int width = ROW_LANES / 2; width > 0; width /= 2) lane[k] += __shfl_xor_sync(FULL_WARP, lane[k], width);
        }
        if (team.halves == 1) {
            for (int k = 0; k < K; k++) total[k] += lane[k];
            continue;
        }
        if (team.lane == 0) {
            for (int k = 0; k < K; k++) partial[k * ROW_HALVES + team.first + team.half] = lane[k];
        }
        __syncthreads();  // the sums are written
        for (int half = 0; half < team.halves && round + half < blocks; half++) {
            for (int k = 0; k < K; k++) total[k] += static_cast<double>(partial[k * ROW_HALVES + team.first + half]);
        }
        __syncthreads();  // they have been read: the next round, or the next call, may write
    }
    for (int k = 0; k < K; k++) sums[k] = static_cast<float>(total[k]);
}

// The largest of the threads' numbers in a team. To be called like row_sums.
template <int LANES, class Partial> DEVICE float max_of_team(const Team& team, Partial& partial, float max) {
    for (int width = LANES / 2; width > 0; width /= 2) {
        float other = __shfl_xor_sync(FULL_WARP, max, width);
        max = max > other ? max : other;
    }
    if (team.halves == 1) return max;
    if (team.lane == 0) partial[team.first + team.half] = max;
    __syncthreads();  // the maxima are written
    for (int half = 0; half < team.halves; half++) {
        float other = partial[team.first + half];
        max = max > other ? max : other;
    }
    __syncthreads();  // they have been read
    return max;
}

// The largest element of a row in memory, minus infinity if it is empty; NaN is skipped. To be called like row_sums.
template <int N, class Partial, class Row> DEVICE float row_max(const Team& team, i64 n, Partial& partial, Row row) {
    float max = -INFINITE;
    if (team.live) {
        for (i64 i = first_of(team) * N; i < n; i += stride_of(team) * N) {
            Vector<float, N> of = load_vector<N>(row, i, n);
#pragma unroll
            for (int j = 0; j < N; j++) max = i + j < n && of.of[j] > max ? of.of[j] : max;
        }
    }
    return max_of_team<ROW_LANES>(team, partial, max);
}
