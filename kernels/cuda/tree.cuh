// The balanced tree of crates/core/src/tree.rs: values that arrive in order are combined as a binary counter carries.
#pragma once
#include "meshwork.cuh"

// Up to 2^LEVELS - 1 leaves: more than the ranks of a group, the samples of a batch, or the heads of a group.
#define TREE_LEVELS 16

// Integers wrap around.
struct Sum {
    DEVICE static float join(float a, float b) { return a + b; }
    DEVICE static double join(double a, double b) { return a + b; }
    DEVICE static int join(int a, int b) { return static_cast<int>(static_cast<u32>(a) + static_cast<u32>(b)); }
    DEVICE static i64 join(i64 a, i64 b) { return static_cast<i64>(static_cast<u64>(a) + static_cast<u64>(b)); }
};

// Comparisons with NaN are false, so that a NaN on either side wins.
struct Max {
    template <class T> DEVICE static T join(T a, T b) { return a > b || a != a ? a : b; }
};

struct Min {
    template <class T> DEVICE static T join(T a, T b) { return a < b || a != a ? a : b; }
};

// Slots are in registers: every index is known at compile time.
template <class Join, class T, int LEVELS = TREE_LEVELS> struct TreeOf {
    T slot[LEVELS];
    u32 count;

    __device__ __forceinline__ TreeOf() : count(0) {
#pragma unroll
        for (int level = 0; level < LEVELS; level++) slot[level] = T(0);
    }

    // Adds the next leaf.
    __device__ __forceinline__ void push(T x) {
        bool carry = true;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            bool full = count >> level & 1u;
            if (carry && full) x = Join::join(slot[level], x);
            if (carry && !full) slot[level] = x;
            carry = carry && full;
        }
        count++;
    }

    // The result over all leaves; 0 if there are none.
    __device__ __forceinline__ T finish() const {
        T x = T(0);
        bool any = false;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (!(count >> level & 1u)) continue;
            x = any ? Join::join(slot[level], x) : slot[level];
            any = true;
        }
        return x;
    }
};

using Tree = TreeOf<Sum, float>;
