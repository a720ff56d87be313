// What every kernel starts from: types with fixed sizes, and the words that differ between a GPU and the host.
//
// Compiled with -fmad=false (-ffp-contract=off on the host): a product and a sum are fused where fmaf says so and
// nowhere else, because the bits of the results are those of the CPU kernels in crates/cpu/src/kernels. Indices of
// elements are 64 bits wide.
#pragma once

using i64 = long long;
using u64 = unsigned long long;
using u32 = unsigned int;
using u16 = unsigned short;
using u8 = unsigned char;

// Threads of every block, unless a kernel's head says otherwise.
#define THREADS 256
// The most that a block has: a file that wants more for a kernel defines this anew before it, and as it was behind.
#define MOST_THREADS THREADS
#define FULL_WARP 0xffffffffu

// Blocks for which an SM shall have registers at the same time: a file that wants more for a kernel defines this anew
// before it, and as it was behind.
#define RESIDENT 1
#define KERNEL extern "C" __global__ void __launch_bounds__(MOST_THREADS, RESIDENT)
#define DEVICE __device__ __forceinline__

#ifndef SHARED
#define SHARED(type, name, count) __shared__ type name[count]
#endif
// Shared memory that the launch gives: `count` elements at most, once in a kernel.
#ifndef GIVEN
#define GIVEN(type, name, count) extern __shared__ __align__(16) type name[]
#endif

// The number of this thread in the grid, of one dim.
DEVICE i64 global_thread() { return static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; }

DEVICE i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// Which of `count` ranges holds i: the last that starts at or before it. Of ranges with the same start all but the last
// are empty.
DEVICE i64 range_of(const i64* starts, i64 count, i64 i) {
    i64 low = 0, high = count;
    while (high - low > 1) {
        i64 middle = (low + high) / 2;
        if (starts[middle] <= i) low = middle;
        else high = middle;
    }
    return low;
}
