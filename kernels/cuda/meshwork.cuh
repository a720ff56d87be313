// Common to all kernels: types with fixed sizes, and the keywords that differ between a GPU and the host.
//
// Compiled with -fmad=false (-ffp-contract=off on the host): a product and a sum are fused only by an explicit fmaf,
// because results must be bitwise equal to the CPU kernels in crates/cpu/src/kernels. Indices of elements have 64 bits.
#pragma once

using i64 = long long;
using u64 = unsigned long long;
using u32 = unsigned int;
using u16 = unsigned short;
using u8 = unsigned char;

// Threads of every block, unless a kernel's head says otherwise.
#define THREADS 256
// The most threads of a block. A file that needs more for a kernel redefines this before it and restores it after it.
#define MOST_THREADS THREADS
#define FULL_WARP 0xffffffffu

// Resident blocks for which an SM must have registers. A file that needs more for a kernel redefines this before it and
// restores it after it.
#define RESIDENT 1
#define KERNEL extern "C" __global__ void __launch_bounds__(MOST_THREADS, RESIDENT)
#define DEVICE __device__ __forceinline__

#ifndef SHARED
#define SHARED(type, name, count) __shared__ type name[count]
#endif
// Dynamic shared memory of the launch: `count` elements at most, once in a kernel.
#ifndef GIVEN
#define GIVEN(type, name, count) extern __shared__ __align__(16) type name[]
#endif

// The index of this thread in a one-dimensional grid.
DEVICE i64 global_thread() { return static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; }

DEVICE i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// The index of the range, of `count` ranges, that holds i: the last that starts at or before i. Among ranges with the
// same start, all but the last are empty.
DEVICE i64 range_of(const i64* starts, i64 count, i64 i) {
    i64 low = 0, high = count;
    while (high - low > 1) {
        i64 middle = (low + high) / 2;
        if (starts[middle] <= i) low = middle;
        else high = middle;
    }
    return low;
}
