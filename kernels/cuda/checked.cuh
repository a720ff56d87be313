// Checks of integers by a block of threads, and the report of the first invalid one.
//
// `found` has four numbers: 1 if an invalid integer was found, else 0; its index; its value; and the limit that it
// breaks. A report is not overwritten: launches of one stream run in order, so the first fault stays.
#pragma once
#include "warp.cuh"

#define CHECK_WARPS (THREADS / WARP)

#define CHECK_EACH 8  // places of a thread at a time, whose loads do not wait for each other

// Called by all threads of the only block: `wrong(i)` for the places below `count`. `firsts` is shared memory of
// CHECK_WARPS numbers.
template <class T, class Firsts, class Wrong>
DEVICE void find_first(const T* x, i64 count, i64 limit, i64* found, Firsts& firsts, Wrong wrong) {
    i64 first = count;
    for (i64 from = threadIdx.x; from < count && first == count; from += CHECK_EACH * THREADS) {
        bool found_at[CHECK_EACH];
#pragma unroll
        for (int each = 0; each < CHECK_EACH; each++) found_at[each] = wrong(smaller(from + each * THREADS, count - 1));
#pragma unroll
        for (int each = CHECK_EACH - 1; each >= 0; each--) first = found_at[each] ? smaller(from + each * THREADS, count - 1) : first;
    }
    for (int width = WARP / 2; width > 0; width /= 2) first = smaller(first, __shfl_xor_sync(FULL_WARP, first, width));
    if (lane_of_warp() == 0) firsts[threadIdx.x / WARP] = first;
    __syncthreads();  // the first of each warp is written
    if (threadIdx.x != 0 || found[0] != 0) return;
    for (int warp = 0; warp < CHECK_WARPS; warp++) first = smaller(first, firsts[warp]);
    if (first == count) return;
    found[0] = 1, found[1] = first, found[2] = static_cast<i64>(x[first]), found[3] = limit;
}
