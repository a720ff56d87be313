// Copies of strided rows: parts of tensors, and swaps of blocks.
//
//   to[i, j] = from[i, j]
//
// Shapes    from, to [rows, n] of elements of 8, 16 or 32 bits, whose rows begin from_row and to_row elements apart;
//           the two do not overlap.
// Geometry  one thread per 16 bytes of a row (neighbours.cuh): or per element, if the rows are not aligned to 16 bytes.
// Bytes     twice the bytes of an element.
// Bits      copied unchanged.
#include "neighbours.cuh"

template <int N, class T> DEVICE void copy_rows_of(const T* from, i64 from_row, T* to, i64 to_row, i64 rows, i64 n) {
    RowPlace at = row_place<N>(rows, n);
    if (at.there) store_vector(to + at.row * to_row, at.column, n, load_vector<N>(from + at.row * from_row, at.column, n));
}

KERNEL copy_rows_8(const u8* from, i64 from_row, u8* to, i64 to_row, i64 rows, i64 n) {
    copy_rows_of<SIXTEEN_BYTES(u8)>(from, from_row, to, to_row, rows, n);
}

KERNEL copy_rows_16(const u16* from, i64 from_row, u16* to, i64 to_row, i64 rows, i64 n) {
    copy_rows_of<EIGHT>(from, from_row, to, to_row, rows, n);
}

KERNEL copy_rows_32(const u32* from, i64 from_row, u32* to, i64 to_row, i64 rows, i64 n) {
    copy_rows_of<FOUR>(from, from_row, to, to_row, rows, n);
}
