// Rotary position embeddings (Su et al., arXiv:2104.09864), with tables of cosines and sines.
//
//   (x, y) = features (i, i + head_dim/2);  (x, y) -> (x cos - y sin, y cos + x sin);  backward: by the angle's negative
//
// Shapes    from, to: `rows` rows `from_row` and `to_row` elements apart, each of `heads` heads of head_dim; angles [positions, 2, head_dim/2]:
//           cosines, then sines; row r is at positions[r], or without positions at r % seq. Backward: from may be to.
// Geometry  a thread a pair of features.
// Bytes     16 read (half of them angles, which the heads of a row share in the cache) and 8 written a pair.
// Bits      those of the CPU: crates/tensor/src/cpu/kernels/attention/rotary.rs.
#include "meshwork.cuh"

struct Pair {
    i64 from, to, angle, half;
};

DEVICE Pair pair_of(i64 at, const int* positions, i64 seq, i64 heads, i64 head_dim, i64 from_row, i64 to_row) {
    i64 half = head_dim / 2, i = at % half, head = at / half % heads, row = at / half / heads;
    i64 position = positions ? positions[row] : row % seq;
    return {row * from_row + head * head_dim + i, row * to_row + head * head_dim + i, position * head_dim + i, half};
}

KERNEL rotary_forward(const float* from, i64 from_row, const float* angles, const int* positions, float* to, i64 to_row, i64 rows, i64 seq,
                      i64 heads, i64 head_dim) {
    i64 at = global_thread();
    if (at >= rows * heads * (head_dim / 2)) return;
    Pair pair = pair_of(at, positions, seq, heads, head_dim, from_row, to_row);
    float x = from[pair.from], y = from[pair.from + pair.half];
    float cos = angles[pair.angle], sin = angles[pair.angle + pair.half];
    to[pair.to] = x * cos - y * sin;
    to[pair.to + pair.half] = y * cos + x * sin;
}

// In place: the gradient before the rotation from that after it.
KERNEL rotary_backward(float* x, i64 row, const float* angles, const int* positions, i64 rows, i64 seq, i64 heads, i64 head_dim) {
    i64 at = global_thread();
    if (at >= rows * heads * (head_dim / 2)) return;
    Pair pair = pair_of(at, positions, seq, heads, head_dim, row, row);
    float a = x[pair.to], b = x[pair.to + pair.half];
    float cos = angles[pair.angle], sin = angles[pair.angle + pair.half];
    x[pair.to] = a * cos + b * sin;
    x[pair.to + pair.half] = b * cos - a * sin;
}
