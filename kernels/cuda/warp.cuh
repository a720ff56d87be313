// Warps that count.
#pragma once
#include "meshwork.cuh"

#ifndef WARP
#define WARP 32
#endif

DEVICE int lane_of_warp() { return static_cast<int>(threadIdx.x) % WARP; }

// The bits of the lanes before this one.
DEVICE u32 lanes_below(int lane) { return (1u << lane) - 1u; }

// The same in all lanes.
DEVICE i64 sum_of_warp(i64 x) {
    for (int width = WARP / 2; width > 0; width /= 2) x += __shfl_xor_sync(FULL_WARP, x, width);
    return x;
}
