// Many vectors in one launch: a table has the addresses of each, its count, and its first piece among the pieces of
// all. A block, a warp or a thread has a piece. The table does not change from step to step, and the numbers of the
// step are arguments (crates/cuda/src/device/vectors.rs).
#pragma once
#include "meshwork.cuh"

struct Piece {
    i64 vector, number;
};

// The piece with this number of all: which vector's, and which of its own. `starts` has the first piece of each vector;
// an empty one has none.
DEVICE Piece piece_of(const i64* starts, i64 vectors, i64 piece) {
    i64 vector = range_of(starts, vectors, piece);
    return Piece{vector, piece - starts[vector]};
}
