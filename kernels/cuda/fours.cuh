// Vectors of four floats (neighbours.cuh), which are 16 bytes.
#pragma once
#include "neighbours.cuh"

using Four = Vector<float, FOUR>;

DEVICE Four load_four(const float* x, i64 at, i64 count) { return load_vector<FOUR>(x, at, count); }

DEVICE void store_four(float* x, i64 at, i64 count, const Four& four) { store_vector(x, at, count, four); }

// out = f(x).
template <class F> DEVICE void map_fours(const float* x, float* out, i64 count, F f) { map_vectors<FOUR>(x, out, count, f); }

// out = f(x, y).
template <class F> DEVICE void join_fours(const float* x, const float* y, float* out, i64 count, F f) { join_vectors<FOUR>(x, y, out, count, f); }
