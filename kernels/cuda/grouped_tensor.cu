// Products of groups of rows on tensor cores, all groups in one launch: the linear layers of experts without capacity
// (Gale et al., MegaBlocks, arXiv:2211.15841).
//
//   y[r] = x[r] W_gᵀ,  dx[r] = dy[r] W_g  for the rows r of group g;  dW_g = dY_gᵀ X_g, the sum over the rows of g
//
// Shapes    x, dx [rows, k], y, dy [rows, n], W, dW [groups, n, k]. Operands of 16 bits at multiples of 16 bytes, n and
//           k multiples of 8; results in f32, results for rows also in bf16, rounded once, at multiples of 8 bytes.
//           Group g has the rows starts[g] .. starts[g + 1]; in dW bounds[first[g]] .. bounds[first[g + 1] - 1], as in
//           grouped.cu. Groups may be empty: then dW is zero, or unchanged if accumulated.
// Geometry  one block per tile of one group's result, 128 × COLUMNS = 256, 64 × 64 for each of 8 warps. Tiles do not
//           cross groups: y has Σ ⌈rows_g / 128⌉ × ⌈n / 256⌉ tiles, dW groups × ⌈n / 128⌉ × ⌈k / 256⌉; for 64 experts
//           with 4096 rows each and 2048 × 2048 features, 16384 and 8192. Each warp finds the group of its block from
//           the starts, 32 groups at a time; blocks beyond the last tile return at once, so that the launch need not
//           know the rows. Tiles are in the order of groups, and in a group in bands of 8 tiles of rows, column after
//           column of a band: the 108 or 132 blocks that run at a time cover 8 tiles of rows and 16 of columns, which
//           share 8 · 128 rows of x and all of a W_g of up to 4096 columns in the L2 cache. A warp whose rows or
//           columns are all beyond the group only copies. Sums run in steps of 64 terms; STAGES = 3 tiles of both
//           operands are in shared memory, two of which are copied while one is multiplied: 3 · 2 · 64 (128 + 256) =
//           144 KiB.
// Registers of a lane: sums 128, A 16, B 4 and more in flight, addresses and places: 215, 218 and 226
//           (kernels/report.md). 256 threads of more than 128: one block on an SM, 8 warps.
// Banks     tiles are laid out as in tensor_core.cuh: neither copies nor ldmatrix, transposed or not, have conflicts.
//           Results go from registers to memory, 4 lanes to each 32 bytes: whole sectors.
// Work      2 rows n k operations. 64 terms of a tile are 128 · 256 · 64 = 2 Mi multiplications: 2048 clocks of an SM
//           of an A100 (1024 a clock), 1024 of one of an H100 at its peak, which the mma instructions of sm_80 do not
//           reach there. Meanwhile ldmatrix, each of which feeds four products, reads 8 · 4 · (64 + 64) · 32 bytes =
//           128 KiB, 1024 clocks of shared memory, and copies write 48 KiB, 384 clocks. There is no form with the
//           products of sm_90a.
// Bytes     of a tile 2 · 64 (128 + 256) = 48 KiB for 64 terms, from the L2 cache: 24 bytes per clock of an SM of an
//           A100, 1/85 byte per operation. From memory at least both operands, 2 rows k + 2 groups n k in forward, and
//           once 4 bytes, or 2, per element of the result: kernels/floors.md.
// Bits      not the CPU's: the tensor cores decide the order of sums. Deterministic from run to run, and a row does not
//           depend on the other rows. Tests hold 1e-5 of the norm against sums in f32 of the same operands.
#include "halves.cuh"
#include "products.cuh"
#include "tensor_core.cuh"

// Overridden by src/variants.rs: columns of a tile, tiles of each operand in shared memory, and blocks on an SM.
#ifndef GROUPED_COLUMNS
#define GROUPED_COLUMNS 256
#endif
#ifndef GROUPED_STAGES
#define GROUPED_STAGES 3
#endif
#ifndef GROUPED_RESIDENT
#define GROUPED_RESIDENT 1
#endif

#define GROUPED_ROWS 128
#define TERMS 64  // of a sum in a tile
#define BAND 8    // tiles of rows that follow each other
// Rows and columns of each of the 2 × 4 warps.
#define WARP_ROWS 64
#define WARP_COLUMNS (GROUPED_COLUMNS / 4)

using Sums = float[WARP_ROWS / 16][WARP_COLUMNS / 8][4];

// First row and column of this warp's part of a tile.
DEVICE int warp_row() { return static_cast<int>(threadIdx.x) / WARP / 4 * WARP_ROWS; }
DEVICE int warp_column() { return static_cast<int>(threadIdx.x) / WARP % 4 * WARP_COLUMNS; }

// A tile of a group's result, in tiles.
struct Place {
    i64 row, column;
};

// The tile with this number of `rows` × `columns`.
DEVICE Place place_of(i64 number, i64 rows, i64 columns) {
    i64 band = number / (BAND * columns), in_band = number - band * BAND * columns, height = smaller(BAND, rows - band * BAND);
    return {band * BAND + in_band % height, in_band / height};
}

// A group's rows, and this block's tile among the tiles of the results. A block beyond the last tile has no rows.
struct GroupRows {
    i64 group, first, end;
    Place tile;
};

DEVICE GroupRows rows_of_block(const i64* starts, i64 groups) {
    i64 columns = gridDim.y, number = static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x, row = number / columns, before = 0;
    int lane = lane_of_warp();
    for (i64 base = 0; base < groups; base += WARP) {
        i64 group = base + lane, first = group < groups ? starts[group] : 0, end = group < groups ? starts[group + 1] : 0;
        i64 tiles = (end - first + GROUPED_ROWS - 1) / GROUPED_ROWS, until = before + tiles;  // tiles of this group, and up to its end
        for (int width = 1; width < WARP; width *= 2) {
            i64 lower = __shfl_sync(FULL_WARP, until, (lane + WARP - width) % WARP) - before;
            if (lane >= width) until += lower;
        }
        int here = __popc(__ballot_sync(FULL_WARP, until <= row));
        if (here < WARP) {
            tiles = __shfl_sync(FULL_WARP, tiles, here), until = __shfl_sync(FULL_WARP, until, here);
            first = __shfl_sync(FULL_WARP, first, here), end = __shfl_sync(FULL_WARP, end, here);
            return {base + here, first, end, place_of(number - (until - tiles) * columns, tiles, columns)};
        }
        before = __shfl_sync(FULL_WARP, until, WARP - 1);
    }
    return {0, 0, 0, {0, 0}};
}

// An operand of a tile: the start of its first row or column, the distance between stored rows, and the number of rows
// or columns left from there on.
struct Side {
    const u16* at;
    i64 row;
    int left;
};

// Rows `first` to `end` of `of`, whose rows are `row` elements apart.
DEVICE Side side_of_rows(const u16* of, i64 row, i64 first, i64 end) { return {of + first * row, row, static_cast<int>(end - first)}; }

// Columns `first` to `end` of `of`: its stored rows are the terms of the sum.
DEVICE Side side_of_columns(const u16* of, i64 row, i64 first, i64 end) { return {of + first, row, static_cast<int>(smaller(row, end) - first)}; }

// Starts to copy the terms from `term` on of COUNT rows or columns.
template <bool OF_COLUMNS, int COUNT> DEVICE void copy_side(Tiles tiles, int tile, const Side& side, int term, int terms) {
    if (OF_COLUMNS) copy_rows<TERMS, COUNT>(tiles, tile, side.at, side.row, term, terms, side.left);
    else copy_rows<COUNT, TERMS>(tiles, tile, side.at + term, side.row, 0, side.left, terms - term);
}

// The tile's sums of `terms` products: A of rows or of columns of its operand, B likewise.
template <bool A_OF_COLUMNS, bool B_OF_COLUMNS> DEVICE void add_up(Sums& c, const Side& a, const Side& b, int terms) {
    constexpr int B_TILE = GROUPED_ROWS * TERMS, STAGE = B_TILE + GROUPED_COLUMNS * TERMS;
    TILES(tiles, GROUPED_STAGES * (GROUPED_ROWS + GROUPED_COLUMNS) * TERMS);
    int steps = (terms + TERMS - 1) / TERMS;
    bool works = warp_row() < a.left && warp_column() < b.left;
#pragma unroll
    for (int i = 0; i < WARP_ROWS / 16; i++) clear(c[i]);
    for (int step = 1 - GROUPED_STAGES; step < steps; step++) {
        if (step >= 0) {
            copy_wait<GROUPED_STAGES - 2>();
            __syncthreads();  // this step's tiles have arrived, and the previous tiles have been read
        }
        int ahead = step + GROUPED_STAGES - 1;
        if (ahead < steps) {
            int to = ahead % GROUPED_STAGES * STAGE;
            copy_side<A_OF_COLUMNS, GROUPED_ROWS>(tiles, to, a, ahead * TERMS, terms);
            copy_side<B_OF_COLUMNS, GROUPED_COLUMNS>(tiles, to + B_TILE, b, ahead * TERMS, terms);
        }
        copy_commit();
        if (step < 0 || !works) continue;

        int a_tile = step % GROUPED_STAGES * STAGE, b_tile = a_tile + B_TILE;
#pragma unroll
        for (int k = 0; k < TERMS; k += 16) {
            u32 rows[WARP_ROWS / 16][4];
#pragma unroll
            for (int i = 0; i < WARP_ROWS / 16; i++) {
                if (A_OF_COLUMNS) load_a_transposed<GROUPED_ROWS>(rows[i], tiles, a_tile, k, warp_row() + 16 * i);
                else load_a<TERMS>(rows[i], tiles, a_tile, warp_row() + 16 * i, k);
            }
#pragma unroll
            for (int j = 0; j < WARP_COLUMNS / 8; j += 2) {
                u32 columns[4];
                if (B_OF_COLUMNS) load_b_transposed<GROUPED_COLUMNS>(columns, tiles, b_tile, k, warp_column() + 8 * j);
                else load_b<TERMS>(columns, tiles, b_tile, warp_column() + 8 * j, k);
#pragma unroll
                for (int i = 0; i < WARP_ROWS / 16; i++) {
                    mma<Bf16Type>(c[i][j], rows[i], columns[0], columns[1]);
                    mma<Bf16Type>(c[i][j + 1], rows[i], columns[2], columns[3]);
                }
            }
        }
    }
}

// Writes two neighbouring elements of a result, rounded once to the stored type, or adds them to the old contents.
template <class T> DEVICE void store_two(T* to, float left, float right, bool accumulate) {
    Vector<T, 2>* two = reinterpret_cast<Vector<T, 2>*>(to);
    if (accumulate) left += term_of(two->of, 0), right += term_of(two->of, 1);
    Vector<T, 2> sums;
    store(sums.of, 0, left), store(sums.of, 1, right);
    *two = sums;
}

// Stores the sums to rows of `row` elements; the group has `rows` rows and `columns` columns from here on.
template <class T> DEVICE void store_sums(const Sums& c, T* to, i64 row, int rows, int columns, bool accumulate) {
    int first_row = warp_row() + lane_of_warp() / 4, first_column = warp_column() + lane_of_warp() % 4 * 2;
#pragma unroll
    for (int half = 0; half < WARP_ROWS / 8; half++) {
        int r = first_row + 8 * half;
        if (r >= rows) continue;
        T* at = to + r * row + first_column;
#pragma unroll
        for (int j = 0; j < WARP_COLUMNS / 8; j++) {
            const float* sums = c[half / 2][j] + half % 2 * 2;
            if (first_column + 8 * j < columns) store_two(at + 8 * j, sums[0], sums[1], accumulate);
        }
    }
}

// Rows of x times the matrix of their group, stored as [to, from] or [from, to].
template <bool OF_COLUMNS, class T>
DEVICE void grouped_rows(const u16* x, const u16* w, const i64* starts, i64 groups, T* y, i64 from, i64 to) {
    GroupRows of = rows_of_block(starts, groups);
    if (of.first == of.end) return;
    i64 row = of.first + of.tile.row * GROUPED_ROWS, column = of.tile.column * GROUPED_COLUMNS;
    const u16* matrix = w + of.group * from * to;
    Side a = side_of_rows(x, from, row, of.end);
    Side b = OF_COLUMNS ? side_of_columns(matrix, to, column, to) : side_of_rows(matrix, from, column, to);
    Sums sums;
    add_up<false, OF_COLUMNS>(sums, a, b, static_cast<int>(from));
    store_sums(sums, y + row * to + column, to, a.left, b.left, false);
}

#undef RESIDENT
#define RESIDENT GROUPED_RESIDENT

// Launched for at least the row tiles of all groups, and n columns.
KERNEL grouped_tensor_forward(const u16* x, const u16* w, const i64* starts, i64 groups, float* y, i64 n, i64 k) {
    grouped_rows<false>(x, w, starts, groups, y, k, n);
}

KERNEL grouped_tensor_forward_bf16(const u16* x, const u16* w, const i64* starts, i64 groups, u16* y, i64 n, i64 k) {
    grouped_rows<false>(x, w, starts, groups, y, k, n);
}

// The same, with k columns.
KERNEL grouped_tensor_backward_x(const u16* dy, const u16* w, const i64* starts, i64 groups, float* dx, i64 n, i64 k) {
    grouped_rows<true>(dy, w, starts, groups, dx, n, k);
}

KERNEL grouped_tensor_backward_x_bf16(const u16* dy, const u16* w, const i64* starts, i64 groups, u16* dx, i64 n, i64 k) {
    grouped_rows<true>(dy, w, starts, groups, dx, n, k);
}

// Launched for ⌈n / 128⌉ tiles of each group, and k columns. dw is overwritten, or added to if `accumulate` is not 0.
KERNEL grouped_tensor_backward_w(const u16* dy, const u16* x, const i64* first, const i64* bounds, float* dw, int accumulate, i64 n, i64 k) {
    i64 rows = (n + GROUPED_ROWS - 1) / GROUPED_ROWS, columns = gridDim.y, number = static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x;
    i64 group = number / (rows * columns);
    Place tile = place_of(number - group * rows * columns, rows, columns);
    i64 row = tile.row * GROUPED_ROWS, column = tile.column * GROUPED_COLUMNS, begin = bounds[first[group]], end = bounds[first[group + 1] - 1];
    if (accumulate && begin == end) return;
    Side a = side_of_columns(dy + begin * n, n, row, n), b = side_of_columns(x + begin * k, k, column, k);
    Sums sums;
    add_up<true, true>(sums, a, b, static_cast<int>(end - begin));
    store_sums(sums, dw + (group * n + row) * k + column, k, a.left, b.left, accumulate != 0);
}

#undef RESIDENT
#define RESIDENT 1
