// Rotary position embeddings (Su et al., arXiv:2104.09864), with tables of cosines and sines.
//
//   (x, y) = features (i, i + head_dim/2);  (x, y) -> (x cos - y sin, y cos + x sin);  backward: by the angle's negative
//
// Shapes    from, to: `rows` rows `from_row` and `to_row` elements apart, each of `heads` heads of head_dim; angles
//           [positions, 2, head_dim/2]: cosines, then sines; row r is at positions[r], or without positions at r % seq.
//           Backward: from may be to.
// Geometry  one thread per 16 bytes of the first features of a head's pairs, and of the second ones (neighbours.cuh).
// Bytes     16 read (half of them angles, which the heads of a row share in the cache) and 8 written per pair; in 16
//           bits (_16) 12 and 4.
// Bits      as on the CPU: crates/cpu/src/kernels/attention/rotary.rs.
#include "halves.cuh"

// The places of a thread's pairs, and the angles of N of them.
template <int N> struct Rotation {
    i64 from, to, first, half;
    Vector<float, N> cos, sin;
};

template <int N>
DEVICE Rotation<N> pairs_of(const RowPlace& at, const float* angles, const int* positions, i64 seq, i64 heads, i64 head_dim, i64 from_row, i64 to_row) {
    i64 half = head_dim / 2, head = at.row % heads, row = at.row / heads, position = positions ? positions[row] : row % seq;
    const float* of = angles + position * head_dim;
    return {row * from_row + head * head_dim, row * to_row + head * head_dim, at.column, half, load_vector<N>(of, at.column, half),
            load_vector<N>(of + half, at.column, half)};
}

template <int N, class In, class Out>
DEVICE void rotary_forward_of(In from, i64 from_row, const float* angles, const int* positions, Out to, i64 to_row, i64 rows, i64 seq, i64 heads,
                              i64 head_dim) {
    RowPlace at = row_place<N>(rows * heads, head_dim / 2);
    if (!at.there) return;
    Rotation<N> of = pairs_of<N>(at, angles, positions, seq, heads, head_dim, from_row, to_row);
    Vector<float, N> x = load_vector<N>(from + of.from, of.first, of.half), y = load_vector<N>(from + of.from + of.half, of.first, of.half), a, b;
#pragma unroll
    for (int j = 0; j < N; j++) {
        a.of[j] = x.of[j] * of.cos.of[j] - y.of[j] * of.sin.of[j];
        b.of[j] = y.of[j] * of.cos.of[j] + x.of[j] * of.sin.of[j];
    }
    store_vector(to + of.to, of.first, of.half, a);
    store_vector(to + of.to + of.half, of.first, of.half, b);
}

KERNEL rotary_forward(const float* from, i64 from_row, const float* angles, const int* positions, float* to, i64 to_row, i64 rows, i64 seq,
                      i64 heads, i64 head_dim) {
    rotary_forward_of<FOUR>(from, from_row, angles, positions, to, to_row, rows, seq, heads, head_dim);
}

KERNEL rotary_forward_16(const u16* from, i64 from_row, const float* angles, const int* positions, u16* to, i64 to_row, i64 rows, i64 seq,
                         i64 heads, i64 head_dim, int f16) {
    in_type(f16, [&](auto of) { rotary_forward_of<EIGHT>(of(from), from_row, angles, positions, of(to), to_row, rows, seq, heads, head_dim); });
}

// Computes, in place, the gradient before the rotation from the gradient after it.
template <int N, class X>
DEVICE void rotary_backward_of(X x, i64 row, const float* angles, const int* positions, i64 rows, i64 seq, i64 heads, i64 head_dim) {
    RowPlace at = row_place<N>(rows * heads, head_dim / 2);
    if (!at.there) return;
    Rotation<N> of = pairs_of<N>(at, angles, positions, seq, heads, head_dim, row, row);
    X first = x + of.to, second = x + of.to + of.half;
    Vector<float, N> a = load_vector<N>(first, of.first, of.half), b = load_vector<N>(second, of.first, of.half), before, after;
#pragma unroll
    for (int j = 0; j < N; j++) {
        before.of[j] = a.of[j] * of.cos.of[j] + b.of[j] * of.sin.of[j];
        after.of[j] = b.of[j] * of.cos.of[j] - a.of[j] * of.sin.of[j];
    }
    store_vector(first, of.first, of.half, before);
    store_vector(second, of.first, of.half, after);
}

KERNEL rotary_backward(float* x, i64 row, const float* angles, const int* positions, i64 rows, i64 seq, i64 heads, i64 head_dim) {
    rotary_backward_of<FOUR>(x, row, angles, positions, rows, seq, heads, head_dim);
}

KERNEL rotary_backward_16(u16* x, i64 row, const float* angles, const int* positions, i64 rows, i64 seq, i64 heads, i64 head_dim, int f16) {
    in_type(f16, [&](auto of) { rotary_backward_of<EIGHT>(of(x), row, angles, positions, rows, seq, heads, head_dim); });
}
