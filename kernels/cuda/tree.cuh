// The balanced tree of crates/core/src/tree.rs: values that arrive in order, joined as a binary counter carries.
#pragma once
#include "meshwork.cuh"

// Up to 2^LEVELS - 1 leaves: more than ranks of a group, samples of a batch, or heads of a group.
#define TREE_LEVELS 16

// Slots are in registers: every index is known when it is compiled.
struct Tree {
    float slot[TREE_LEVELS];
    u32 count;

    __device__ __forceinline__ Tree() : count(0) {
#pragma unroll
        for (int level = 0; level < TREE_LEVELS; level++) slot[level] = 0.0f;
    }

    // Adds the next leaf.
    __device__ __forceinline__ void push(float sum) {
        bool carry = true;
#pragma unroll
        for (int level = 0; level < TREE_LEVELS; level++) {
            bool full = count >> level & 1u;
            if (carry && full) sum = slot[level] + sum;
            if (carry && !full) slot[level] = sum;
            carry = carry && full;
        }
        count++;
    }

    // The sum of all leaves; 0 if there are none.
    __device__ __forceinline__ float finish() const {
        float sum = 0.0f;
        bool any = false;
#pragma unroll
        for (int level = 0; level < TREE_LEVELS; level++) {
            if (!(count >> level & 1u)) continue;
            sum = any ? slot[level] + sum : slot[level];
            any = true;
        }
        return sum;
    }
};
