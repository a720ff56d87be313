// Many vectors in one launch: a table has, for each vector, its addresses, its count, and the number of its first
// piece. A block, a warp or a thread processes a piece. The table does not change from step to step; the step's scalars
// are arguments (crates/cuda/src/device/vectors.rs).
#pragma once
#include "meshwork.cuh"

struct Piece {
    i64 vector, number;
};

// The piece with this number: its vector, and its number in that vector. `starts` has the first piece of each vector;
// an empty vector has none.
DEVICE Piece piece_of(const i64* starts, i64 vectors, i64 piece) {
    i64 vector = range_of(starts, vectors, piece);
    return Piece{vector, piece - starts[vector]};
}
