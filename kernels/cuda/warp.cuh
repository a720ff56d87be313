// Counting within warps.
#pragma once
#include "meshwork.cuh"

#ifndef WARP
#define WARP 32
#endif

DEVICE int lane_of_warp() { return static_cast<int>(threadIdx.x) % WARP; }

// A mask of the lanes before this one.
DEVICE u32 lanes_below(int lane) { return (1u << lane) - 1u; }

// The sum over the warp; all lanes get it.
DEVICE i64 sum_of_warp(i64 x) {
    for (int width = WARP / 2; width > 0; width /= 2) x += __shfl_xor_sync(FULL_WARP, x, width);
    return x;
}

// A mask of the lanes with `there` and the same number as this lane; numbers are from 0 to end - 1. All lanes of a warp
// must call it.
DEVICE u32 lanes_with(bool there, i64 number, i64 end) {
    u32 lanes = __ballot_sync(FULL_WARP, there);
    for (i64 bit = 1; bit < end; bit *= 2) {
        u32 set = __ballot_sync(FULL_WARP, (number & bit) != 0);
        lanes &= (number & bit) != 0 ? set : ~set;
    }
    return lanes;
}

// Adds the numbers of begin .. end to the warp's counts [numbers], which the warp has initialised. number_of(i) is a
// number below `numbers`, or none. Goes in the order of i, 32 at a time, and calls of(i, count) with the count of i's
// number before i, or -1 if i has none. All lanes of a warp must call it.
template <class Number, class Of> DEVICE void count_numbers(int* counts, i64 begin, i64 end, i64 numbers, Number number_of, Of of) {
    int lane = lane_of_warp();
    for (i64 next = begin; next < end; next += WARP) {
        i64 i = next + lane, number = i < end ? static_cast<i64>(number_of(i)) : -1;
        bool there = number >= 0 && number < numbers;
        u32 lanes = lanes_with(there, number, numbers), before = lanes & lanes_below(lane);
        i64 count = there ? counts[number] + __popc(before) : -1;
        __syncwarp();
        if (there && before == 0) counts[number] += __popc(lanes);
        __syncwarp();
        if (i < end) of(i, count);
    }
}
