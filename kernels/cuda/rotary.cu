// Rotary position embeddings (Su et al., arXiv:2104.09864), with tables of cosines and sines.
//
//   (x, y) = features (i, i + head_dim/2);  (x, y) -> (x cos - y sin, y cos + x sin);  backward: by the angle's negative
//
// Shapes    from, to: `rows` rows `from_row` and `to_row` elements apart, each of `heads` heads of head_dim; angles [positions, 2, head_dim/2]:
//           cosines, then sines; row r is at positions[r], or without positions at r % seq. Backward: from may be to.
// Geometry  a thread a pair of features.
// Bytes     16 read (half of them angles, which the heads of a row share in the cache) and 8 written a pair; in 16 bits (_16) 12 and 4.
// Bits      those of the CPU: crates/tensor/src/cpu/kernels/attention/rotary.rs.
#include "halves.cuh"

struct Pair {
    i64 from, to, angle, half;
};

DEVICE Pair pair_of(i64 at, const int* positions, i64 seq, i64 heads, i64 head_dim, i64 from_row, i64 to_row) {
    i64 half = head_dim / 2, i = at % half, head = at / half % heads, row = at / half / heads;
    i64 position = positions ? positions[row] : row % seq;
    return {row * from_row + head * head_dim + i, row * to_row + head * head_dim + i, position * head_dim + i, half};
}

template <class In, class Out>
DEVICE void rotary_forward_of(In from, i64 from_row, const float* angles, const int* positions, Out to, i64 to_row, i64 rows, i64 seq, i64 heads,
                              i64 head_dim) {
    i64 at = global_thread();
    if (at >= rows * heads * (head_dim / 2)) return;
    Pair pair = pair_of(at, positions, seq, heads, head_dim, from_row, to_row);
    float x = from[pair.from], y = from[pair.from + pair.half];
    float cos = angles[pair.angle], sin = angles[pair.angle + pair.half];
    store(to, pair.to, x * cos - y * sin);
    store(to, pair.to + pair.half, y * cos + x * sin);
}

KERNEL rotary_forward(const float* from, i64 from_row, const float* angles, const int* positions, float* to, i64 to_row, i64 rows, i64 seq,
                      i64 heads, i64 head_dim) {
    rotary_forward_of(from, from_row, angles, positions, to, to_row, rows, seq, heads, head_dim);
}

KERNEL rotary_forward_16(const u16* from, i64 from_row, const float* angles, const int* positions, u16* to, i64 to_row, i64 rows, i64 seq,
                         i64 heads, i64 head_dim, int f16) {
    rotary_forward_of(halves(from, f16), from_row, angles, positions, halves(to, f16), to_row, rows, seq, heads, head_dim);
}

// In place: the gradient before the rotation from that after it.
template <class X>
DEVICE void rotary_backward_of(X x, i64 row, const float* angles, const int* positions, i64 rows, i64 seq, i64 heads, i64 head_dim) {
    i64 at = global_thread();
    if (at >= rows * heads * (head_dim / 2)) return;
    Pair pair = pair_of(at, positions, seq, heads, head_dim, row, row);
    float a = x[pair.to], b = x[pair.to + pair.half];
    float cos = angles[pair.angle], sin = angles[pair.angle + pair.half];
    store(x, pair.to, a * cos + b * sin);
    store(x, pair.to + pair.half, b * cos - a * sin);
}

KERNEL rotary_backward(float* x, i64 row, const float* angles, const int* positions, i64 rows, i64 seq, i64 heads, i64 head_dim) {
    rotary_backward_of(x, row, angles, positions, rows, seq, heads, head_dim);
}

KERNEL rotary_backward_16(u16* x, i64 row, const float* angles, const int* positions, i64 rows, i64 seq, i64 heads, i64 head_dim, int f16) {
    rotary_backward_of(halves(x, f16), row, angles, positions, rows, seq, heads, head_dim);
}
