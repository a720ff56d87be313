// Bytes of messages at any alignment, and sums over the threads of a block.
#pragma once
#include "float16.cuh"
#include "neighbours.cuh"
#include "warp.cuh"

#define BLOCK_WARPS (THREADS / WARP)

DEVICE void put_u16(u8* to, u32 x) { to[0] = static_cast<u8>(x), to[1] = static_cast<u8>(x >> 8); }

DEVICE void put_float(u8* to, float x) {
    u32 bits = __float_as_uint(x);
    put_u16(to, bits), put_u16(to + 2, bits >> 16);
}

DEVICE u32 get_u16(const u8* from) { return from[0] | static_cast<u32>(from[1]) << 8; }
DEVICE u32 get_u32(const u8* from) { return get_u16(from) | get_u16(from + 2) << 16; }
DEVICE float get_float(const u8* from) { return __uint_as_float(get_u32(from)); }

// Stores a value, or adds it.
DEVICE void fold(float* to, float x, int add) { *to = add ? *to + x : x; }

// The same for neighbours.
template <int N> DEVICE void fold_vector(float* to, i64 at, i64 count, Vector<float, N> x, int add) {
    Vector<float, N> old = {};
    if (add) old = load_vector<N>(to, at, count);
#pragma unroll
    for (int j = 0; j < N; j++) x.of[j] = add ? old.of[j] + x.of[j] : x.of[j];
    store_vector(to, at, count, x);
}

// Calls of(j, number) for each of a thread's neighbours at + j below `count`, where `number` is number_of(part) for its
// part of `unit` elements.
template <int N, class Number, class Of> DEVICE void in_parts(i64 at, i64 count, i64 unit, Number number_of, Of of) {
    i64 part = at / unit, within = at % unit;
    auto number = number_of(part);
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (at + j >= count) break;
        if (within == unit) within = 0, number = number_of(++part);
        within++;
        of(j, number);
    }
}

// Reduces x by `op` over all threads of the block; all threads get the result. `parts` is shared memory of BLOCK_WARPS
// elements.
template <class T, class Parts, class Op> DEVICE T over_block(T x, Parts& parts, Op op) {
    for (int width = WARP / 2; width > 0; width /= 2) x = op(x, __shfl_xor_sync(FULL_WARP, x, width));
    __syncthreads();  // the previous contents have been read
    if (lane_of_warp() == 0) parts[threadIdx.x / WARP] = x;
    __syncthreads();
    x = parts[0];
    for (int warp = 1; warp < BLOCK_WARPS; warp++) x = op(x, static_cast<T>(parts[warp]));
    return x;
}

// The sum over the threads before this one, and over all threads.
struct Prefix {
    i64 before, all;
};

template <class Parts> DEVICE Prefix prefix_of_block(i64 x, Parts& parts) {
    int lane = lane_of_warp(), warp = static_cast<int>(threadIdx.x) / WARP;
    i64 sum = x;
    for (int step = 1; step < WARP; step *= 2) {
        i64 other = __shfl_sync(FULL_WARP, sum, lane >= step ? lane - step : lane);
        if (lane >= step) sum += other;
    }
    __syncthreads();  // the previous contents have been read
    if (lane == WARP - 1) parts[warp] = sum;
    __syncthreads();
    Prefix prefix = {sum - x, 0};
    for (int other = 0; other < BLOCK_WARPS; other++) {
        i64 part = parts[other];
        if (other < warp) prefix.before += part;
        prefix.all += part;
    }
    return prefix;
}
