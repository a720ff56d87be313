// PTX instructions for tensor cores: products of 16 × 8 × 16, or of 16 × 8 × 8 in TF32, loads of their operands from
// shared memory, and copies that overlap with computation.
//
// Each function has a device form, instructions of sm_80 and newer, and a host twin in ../host/tensor_core_host.h with
// the same places of elements in lanes, so that a kernel runs unchanged on the host. The host reports a chunk that is
// accessed between the start of its copy and the wait for it.
//
// Places    (PTX ISA, "Matrix Fragments for mma.m16n8k16") of lane = 4 g + t, two neighbouring elements to a word:
//           A [16, 16]  word 0: row g, k = 2t; 1: row g + 8, k = 2t; 2: row g, k = 2t + 8; 3: row g + 8, k = 2t + 8
//           B [16, 8]   word 0: k = 2t, column g; 1: k = 2t + 8, column g
//           C [16, 8]   0, 1: row g, columns 2t, 2t + 1; 2, 3: row g + 8
//           So two neighbouring tiles of C, rounded, are one A: a product feeds the next without shared memory.
// TF32      A [16, 8]  word 0: row g, k = t; 1: row g + 8, k = t; 2: row g, k = t + 4; 3: row g + 8, k = t + 4
//           B [8, 8]   word 0: k = t, column g; 1: k = t + 4, column g
//           A word is one element, so ldmatrix, which moves words, loads both as in 16 bits. One tile of C is one A whose
//           terms have another order: as_operand_tf32.
// Tiles     rows of WIDTH places of 16 bits, a multiple of 64, in chunks of 8 (16 bytes); an f32 takes two places. Chunk
//           c of row r lies at c ^ (r & 7): the 8 rows of one matrix that ldmatrix reads, and the 8 chunks that 8 lanes
//           of a copy write, are in 8 different groups of 4 banks, so that neither has a conflict of banks.
#pragma once
#include "halves.cuh"
#include "warp.cuh"

#define CHUNK 8  // places of 16 bytes

struct alignas(16) Chunk {
    u32 word[4];
};

// Operands of TF32, which are f32 in memory and rounded in registers.
struct Tf32Type {
    using Element = float;
};

template <class Operand> constexpr bool IS_TF32 = sizeof(typename Operand::Element) == 4;

// Places of DIM elements in a row of a tile.
template <class Operand, int DIM> constexpr int WIDTH_OF = DIM * static_cast<int>(sizeof(typename Operand::Element)) / 2;

#ifndef TENSOR_CORE_TWINS

// A tile in dynamic shared memory: TILES takes all of it, once in a kernel.
#define TILES(name, count) extern __shared__ __align__(1024) u16 name[]

using Tiles = u16*;

DEVICE u32 shared_address(const u16* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// d += a b, of Bf16Type, F16Type or Tf32Type, summed in f32.
template <class Operand> DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <> DEVICE void mma<Bf16Type>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <> DEVICE void mma<F16Type>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <> DEVICE void mma<Tf32Type>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 × 8, where lane l gives the place of row l % 8 of matrix l / 8. Word m of lane 4 g + t: row g,
// columns 2t and 2t + 1 of matrix m.
DEVICE void load_matrices(u32 (&words)[4], Tiles tiles, int at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(tiles + at))
                 : "memory");
}

// The same, transposed: rows 2t and 2t + 1, column g.
DEVICE void load_matrices_transposed(u32 (&words)[4], Tiles tiles, int at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(tiles + at))
                 : "memory");
}

// x, computed here: what depends on it is not computed before a loop, and kept in registers of its own.
DEVICE int here(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The same at place (at ^ column) + offset, where the bits of `column` are within a row: one instruction for each
// column, none for an offset.
DEVICE void load_matrices(u32 (&words)[4], Tiles tiles, int at, int column, int offset) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"((shared_address(tiles + at) ^ static_cast<u32>(2 * column)) + static_cast<u32>(2 * offset))
                 : "memory");
}

DEVICE void load_matrices_transposed(u32 (&words)[4], Tiles tiles, int at, int column, int offset) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"((shared_address(tiles + at) ^ static_cast<u32>(2 * column)) + static_cast<u32>(2 * offset))
                 : "memory");
}

// Starts to copy a chunk to shared memory; zeros if it is not `inside`. `from` must be a readable address at a multiple
// of 16 bytes.
DEVICE void copy_begin(Tiles tiles, int at, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(tiles + at)), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// Ends a group of copies of this thread.
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread but the last PENDING. A barrier then makes them visible to the other threads.
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// 2^x, with a relative error of up to 2^-22; 0 of -infinity.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE void write_word(Tiles tiles, int at, u32 word) { *reinterpret_cast<u32*>(tiles + at) = word; }
DEVICE u32 read_word(Tiles tiles, int at) { return *reinterpret_cast<const u32*>(tiles + at); }
DEVICE Chunk read_chunk(Tiles tiles, int at) { return *reinterpret_cast<const Chunk*>(tiles + at); }
DEVICE void write_chunk(Tiles tiles, int at, const Chunk& chunk) { *reinterpret_cast<Chunk*>(tiles + at) = chunk; }

#endif

template <class Element> DEVICE Chunk load_chunk(const Element* from) { return *reinterpret_cast<const Chunk*>(from); }
template <class Element> DEVICE void store_chunk(Element* to, const Chunk& chunk) { *reinterpret_cast<Chunk*>(to) = chunk; }

// Elements of a chunk.
template <class Element> constexpr int CHUNK_OF = 16 / static_cast<int>(sizeof(Element));

// Words of elements become those of operands: f32 is rounded.
template <class Operand, int N> DEVICE void round_words(u32 (&words)[N]) {
    if constexpr (IS_TF32<Operand>) {
#pragma unroll
        for (int i = 0; i < N; i++) words[i] = pack_tf32(__uint_as_float(words[i]));
    }
}

DEVICE int thread_here() { return here(static_cast<int>(threadIdx.x)); }

// The start of chunk `chunk` of row `row` of a tile.
template <int WIDTH> DEVICE int place(int row, int chunk) { return row * WIDTH + ((chunk ^ (row & 7)) * CHUNK); }

// The place of chunk `half` of row `row`, of this lane, in a piece of a tile that begins at a row that is a multiple of
// 8. For column 16 e, XOR the place with 16 e: one instruction for each load, and one register for all.
template <int WIDTH> DEVICE int lane_place(int row, int half, int column) { return place<WIDTH>(row, half) ^ column; }

// A of rows row .. row + 16 and columns column .. column + 16 of a tile. Rows are multiples of 8, columns of 16, here
// and below.
template <int WIDTH> DEVICE void load_a(u32 (&a)[4], Tiles tiles, int tile, int row, int column) {
    int lane = lane_of_warp();
    load_matrices(a, tiles, tile + row * WIDTH + lane_place<WIDTH>(lane % 16, lane / 16, column));
}

// The same from a tile whose rows are k: rows column .. column + 16 of A, k = row .. row + 16.
template <int WIDTH> DEVICE void load_a_transposed(u32 (&a)[4], Tiles tiles, int tile, int row, int column) {
    int lane = lane_of_warp();
    load_matrices_transposed(a, tiles, tile + row * WIDTH + lane_place<WIDTH>(lane / 16 * 8 + lane % 8, lane / 8 % 2, column));
}

// Two B from a tile whose rows are columns of B: words 0, 1 of columns row .. row + 8; 2, 3 of the next 8. k = column
// .. column + 16.
template <int WIDTH> DEVICE void load_b(u32 (&b)[4], Tiles tiles, int tile, int row, int column) {
    int lane = lane_of_warp();
    load_matrices(b, tiles, tile + row * WIDTH + lane_place<WIDTH>(lane / 16 * 8 + lane % 8, lane / 8 % 2, column));
}

// Two B from a tile whose rows are k: words 0, 1 of columns column .. column + 8; 2, 3 of the next 8. k = row .. row +
// 16.
template <int WIDTH> DEVICE void load_b_transposed(u32 (&b)[4], Tiles tiles, int tile, int row, int column) {
    int lane = lane_of_warp();
    load_matrices_transposed(b, tiles, tile + row * WIDTH + lane_place<WIDTH>(lane % 16, lane / 16, column));
}

// Sets all sums to zero.
template <int N> DEVICE void clear(float (&c)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.0f;
}

// A from two neighbouring tiles of C.
template <class Operand> DEVICE void as_operand(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = Operand::operands(left[0], left[1]), a[1] = Operand::operands(left[2], left[3]);
    a[2] = Operand::operands(right[0], right[1]), a[3] = Operand::operands(right[2], right[3]);
}

// A from all pairs of neighbouring tiles of C.
template <class Operand, int K> DEVICE void as_operands(u32 (&a)[K][4], const float (&c)[2 * K][4]) {
#pragma unroll
    for (int k = 0; k < K; k++) as_operand<Operand>(a[k], c[2 * k], c[2 * k + 1]);
}

// A of TF32 from one tile of C: lane 4 g + t has terms 2t and 2t + 1 of a row, which become terms t and t + 4. B has
// the same order of terms: load_terms.
DEVICE void as_operand_tf32(u32 (&a)[4], const float (&of)[4]) {
    a[0] = pack_tf32(of[0]), a[1] = pack_tf32(of[2]), a[2] = pack_tf32(of[1]), a[3] = pack_tf32(of[3]);
}

// This lane's place in the first 8 × 32 elements of a tile for load_terms.
template <int WIDTH> DEVICE int place_of_terms(int tile) { return here(tile + place<WIDTH>(lane_of_warp() % 4 * 2, lane_of_warp() / 4)); }

// Four B of TF32 from a tile whose rows are k: 8 rows and 32 columns, from `offset` places behind `at` on. Column g of
// the i-th B is column 4 g + i here, so that a lane reads whole chunks: of row 2t term t (`upper`), of row 2t + 1 term
// t + 4 (`lower`). The 8 chunks that 8 lanes read are in 8 different groups of 4 banks.
template <int WIDTH> DEVICE void load_terms(u32 (&upper)[4], u32 (&lower)[4], Tiles tiles, int at, int offset) {
    Chunk even = read_chunk(tiles, at + offset), odd = read_chunk(tiles, (at ^ CHUNK) + WIDTH + offset);
#pragma unroll
    for (int i = 0; i < 4; i++) upper[i] = even.word[i], lower[i] = odd.word[i];
    round_words<Tf32Type>(upper), round_words<Tf32Type>(lower);
}

// Sum and maximum over the four lanes that share a row of C.
DEVICE float sum_of_row(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

DEVICE float largest_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

// Each of a block's TEAM threads copies the same chunk of every so many rows.
template <int WIDTH, int TEAM> constexpr int STEP_OF = TEAM * CHUNK / WIDTH;

// The place of a chunk of row r + i, where `at` is that of row r < STEP and i a multiple of STEP.
template <int WIDTH, int STEP> DEVICE int place_below(int at, int i) {
    static_assert(STEP > 0 && (STEP & (STEP - 1)) == 0, "r and i have no common bits");
    if constexpr (STEP % 8 == 0) return at + i * WIDTH;
    else return (at ^ (i & 7) * CHUNK) + i * WIDTH;
}

// Starts to copy ROWS rows, `row` apart in memory from `from` on, into a tile; zeros beyond row `end` and beyond column
// `width`.
template <int ROWS, int WIDTH, int TEAM, class Element>
DEVICE void copy_rows(int thread, Tiles tiles, int tile, const Element* from, i64 row, int first, int end, int width) {
    constexpr int STEP = STEP_OF<WIDTH, TEAM>, EACH = CHUNK_OF<Element>;
    static_assert(ROWS % STEP == 0, "each thread copies as many rows");
    int r = thread / (WIDTH / CHUNK), chunk = thread % (WIDTH / CHUNK);
    int at = tile + place<WIDTH>(r, chunk), rows = end - first - r;
    if (chunk * EACH >= width) rows = 0;
    const Element* next = from + (first + r) * row + chunk * EACH;
#pragma unroll 1
    for (int i = 0; i < ROWS; i += STEP) {
        copy_begin(tiles, place_below<WIDTH, STEP>(at, i), i < rows ? next : from, i < rows);
        next += STEP * row;
    }
}

template <int ROWS, int WIDTH> DEVICE void copy_rows(Tiles tiles, int tile, const u16* from, i64 row, int first, int end, int width) {
    copy_rows<ROWS, WIDTH, THREADS>(static_cast<int>(threadIdx.x), tiles, tile, from, row, first, end, width);
}

// Rounds what this thread has copied of a tile, and waited for.
template <class Operand, int ROWS, int WIDTH, int TEAM> DEVICE void round_rows(int thread, Tiles tiles, int tile) {
    constexpr int STEP = STEP_OF<WIDTH, TEAM>;
    int at = tile + place<WIDTH>(thread / (WIDTH / CHUNK), thread % (WIDTH / CHUNK));
#pragma unroll 1
    for (int i = 0; i < ROWS; i += STEP) {
        int there = place_below<WIDTH, STEP>(at, i);
        Chunk chunk = read_chunk(tiles, there);
        round_words<Operand>(chunk.word);
        write_chunk(tiles, there, chunk);
    }
}

// Writes a warp's tiles of C, times `upper` (rows g) and `lower` (rows g + 8) of the lane, to rows row .. row + 16 and
// the columns from chunk `chunk` on of a tile. Of TF32 they are sums of products by load_terms, whose order of columns
// they have: of 32 a lane has two whole chunks of a row, and they are not rounded.
template <int WIDTH, class Operand, int N> DEVICE void put_rows(Tiles tiles, int tile, const float (&c)[N][4], float upper, float lower, int row, int chunk) {
    int lane = lane_of_warp(), g = row + lane / 4, t = lane % 4;
    if constexpr (IS_TF32<Operand>) {
#pragma unroll
        for (int j = 0; j < N; j += 4) {
#pragma unroll
            for (int at = 0; at < 4; at++) {
                Chunk four;
#pragma unroll
                for (int i = 0; i < 4; i++) four.word[i] = __float_as_uint(c[j + i][at] * (at < 2 ? upper : lower));
                write_chunk(tiles, tile + place<WIDTH>(g + at / 2 * 8, chunk + 2 * (j + t) + at % 2), four);
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) {
            write_word(tiles, tile + place<WIDTH>(g, chunk + j) + 2 * t, Operand::operands(c[j][0] * upper, c[j][1] * upper));
            write_word(tiles, tile + place<WIDTH>(g + 8, chunk + j) + 2 * t, Operand::operands(c[j][2] * lower, c[j][3] * lower));
        }
    }
}

// Writes a tile of ROWS rows to memory, by whole chunks, with the block's TEAM threads.
template <int ROWS, int WIDTH, int TEAM = THREADS, class Element>
DEVICE void store_tile(Tiles tiles, int tile, Element* to, i64 row, int first, int end, int width) {
    constexpr int EACH = CHUNK_OF<Element>;
    for (int at = static_cast<int>(threadIdx.x); at < ROWS * WIDTH / CHUNK; at += TEAM) {
        int r = at / (WIDTH / CHUNK), chunk = at % (WIDTH / CHUNK);
        if (first + r >= end || chunk * EACH >= width) continue;
        store_chunk(to + (first + r) * row + chunk * EACH, read_chunk(tiles, tile + place<WIDTH>(r, chunk)));
    }
}

// Writes each warp's tiles of C for its 16 rows through a tile to memory: in whole chunks, where 4 lanes of a row would
// otherwise write 16 bytes in 4 pieces. Contains barriers of the block.
template <int WIDTH, class Operand>
DEVICE void store_rows(Tiles tiles, int tile, const float (&c)[WIDTH / 8][4], float upper, float lower, u16* to, i64 row, int first, int end, int width) {
    __syncthreads();  // the old contents of the tile have been read
    put_rows<WIDTH, Operand>(tiles, tile, c, upper, lower, static_cast<int>(threadIdx.x) / WARP * 16, 0);
    __syncthreads();
    store_tile<THREADS / WARP * 16, WIDTH>(tiles, tile, to, row, first, end, width);
}
