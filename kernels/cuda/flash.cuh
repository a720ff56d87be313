// Shared by the forms of flash attention: sizes of tiles, the rows of a lane, the mask, dropout, the online softmax,
// products of a warp, which has T times 16 rows: an operand of 16 × 16 that it loads, in TF32 of 16 × 8 or 8 × 16,
// feeds 2 T products. Rows of tiles have WIDTH places of 16 bits, and columns are counted in places: 16 of them are the
// terms of a product, 16 or 8.
#pragma once
#include "attention.cuh"
#include "tensor_core.cuh"

#define FLASH_ROWS 128  // queries or keys of a block

// Threads of a block of ROWS rows of which SHARE warps have the same 16 T.
template <int ROWS, int T, int SHARE = 1> constexpr int TEAM_OF = ROWS / (16 * T) * SHARE * WARP;

// This lane's place in the first 16 rows and 16 places of a tile for ldmatrix, as load_a, load_b and load_b_transposed
// of tensor_core.cuh have it.
template <int WIDTH> DEVICE int place_of_a(int tile) { return here(tile + place<WIDTH>(lane_of_warp() % 16, lane_of_warp() / 16)); }

template <int WIDTH> DEVICE int place_of_b(int tile) {
    int lane = lane_of_warp();
    return here(tile + place<WIDTH>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
}

// Starts to copy ROWS rows of keys and of values, with the same place `at` and rows `row` apart in both, into two
// neighbouring tiles; otherwise as copy_rows. One loop for both takes fewer registers.
template <int ROWS, int WIDTH, int TEAM, class Element>
DEVICE void copy_pairs(int thread, Tiles tiles, int tile, const Element* k, const Element* v, i64 at, i64 row, int first, int end, int width) {
    constexpr int STEP = STEP_OF<WIDTH, TEAM>, EACH = CHUNK_OF<Element>;
    static_assert(ROWS % STEP == 0, "each thread copies as many rows");
    int r = thread / (WIDTH / CHUNK), chunk = thread % (WIDTH / CHUNK);
    int to = tile + place<WIDTH>(r, chunk), rows = end - first - r;
    if (chunk * EACH >= width) rows = 0;
    i64 next = at + (first + r) * row + chunk * EACH;
#pragma unroll 1
    for (int i = 0; i < ROWS; i += STEP) {
        i64 from = i < rows ? next : 0;
        copy_begin(tiles, place_below<WIDTH, STEP>(to, i), k + from, i < rows);
        copy_begin(tiles, place_below<WIDTH, STEP>(to, i) + ROWS * WIDTH, v + from, i < rows);
        next += STEP * row;
    }
}

// Loads 16 columns of 16 T rows, of the tile of place_of_a, which are operands.
template <int WIDTH, int T> DEVICE void load_rows(u32 (&a)[T][4], Tiles tiles, int place, int column) {
#pragma unroll
    for (int t = 0; t < T; t++) load_matrices(a[t], tiles, place, column, 16 * t * WIDTH);
}

// c [16 T, 8 N] += A Bᵀ of 16 columns, from `column` on, of rows 0 .. 8 N of the tile of place_of_b.
template <int WIDTH, class Operand, int T, int N> DEVICE void add_columns(float (&c)[T][N][4], const u32 (&a)[T][4], Tiles tiles, int place, int column) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        u32 b[4];
        load_matrices(b, tiles, place, column, 8 * j * WIDTH);
        round_words<Operand>(b);
#pragma unroll
        for (int t = 0; t < T; t++) {
            mma<Operand>(c[t][j], a[t], b[0], b[1]);
            mma<Operand>(c[t][j + 1], a[t], b[2], b[3]);
        }
    }
}

// c [16 T, 8 N] += A Bᵀ of rows `row` of tile a, which are operands, and rows 0 .. 8 N of tile b.
template <int WIDTH, class Operand, int T, int N> DEVICE void add_product(float (&c)[T][N][4], Tiles tiles, int a_tile, int row, int b_tile) {
    int a_place = place_of_a<WIDTH>(a_tile + row * WIDTH), b_place = place_of_b<WIDTH>(b_tile);
#pragma unroll
    for (int e = 0; e < WIDTH / 16; e++) {
        u32 a[T][4];
        load_rows<WIDTH>(a, tiles, a_place, 16 * e);
        add_columns<WIDTH, Operand>(c, a, tiles, b_place, 16 * e);
    }
}

// The same with A in registers.
template <int WIDTH, class Operand, int T, int N>
DEVICE void add_product(float (&c)[T][N][4], const u32 (&a)[WIDTH / 16][T][4], Tiles tiles, int b_tile) {
    int b_place = place_of_b<WIDTH>(b_tile);
#pragma unroll
    for (int e = 0; e < WIDTH / 16; e++) add_columns<WIDTH, Operand>(c, a[e], tiles, b_place, 16 * e);
}

// add_product_of in 16 bits.
template <int WIDTH, class Operand, int T, int M, int N>
DEVICE void add_product_of_halves(float (&c)[T][M][4], const float (&left)[T][N][4], Tiles tiles, int b_tile, int column) {
    int b_place = place_of_a<WIDTH>(b_tile);
#pragma unroll
    for (int j = 0; j < N / 2; j++) {
        u32 a[T][4];
#pragma unroll
        for (int t = 0; t < T; t++) as_operand<Operand>(a[t], left[t][2 * j], left[t][2 * j + 1]);
#pragma unroll
        for (int e = 0; e < M / 2; e++) {
            u32 b[4];
            load_matrices_transposed(b, tiles, b_place, column + 16 * e, 16 * j * WIDTH);
#pragma unroll
            for (int t = 0; t < T; t++) {
                mma<Operand>(c[t][2 * e], a[t], b[0], b[1]);
                mma<Operand>(c[t][2 * e + 1], a[t], b[2], b[3]);
            }
        }
    }
}

// add_product_of in TF32: the columns of c have the order of load_terms.
template <int WIDTH, int T, int M, int N>
DEVICE void add_product_of_tf32(float (&c)[T][M][4], const float (&left)[T][N][4], Tiles tiles, int b_tile, int column) {
    int b_place = place_of_terms<WIDTH>(b_tile + column);
#pragma unroll
    for (int j = 0; j < N; j++) {
        u32 a[T][4];
#pragma unroll
        for (int t = 0; t < T; t++) as_operand_tf32(a[t], left[t][j]);
#pragma unroll
        for (int e = 0; e < M; e += 4) {
            u32 upper[4], lower[4];
            load_terms<WIDTH>(upper, lower, tiles, b_place, 8 * j * WIDTH + 16 * e);
#pragma unroll
            for (int t = 0; t < T; t++) {
#pragma unroll
                for (int i = 0; i < 4; i++) mma<Tf32Type>(c[t][e + i], a[t], upper[i], lower[i]);
            }
        }
    }
}

// c [16 T, 8 M] += A B, where A is 16 T rows of 8 N results of products, and B the rows 0 .. 8 N and the columns from
// `column` on, a multiple of 64, of a tile.
template <int WIDTH, class Operand, int T, int M, int N>
DEVICE void add_product_of(float (&c)[T][M][4], const float (&left)[T][N][4], Tiles tiles, int b_tile, int column = 0) {
    if constexpr (IS_TF32<Operand>) add_product_of_tf32<WIDTH>(c, left, tiles, b_tile, column);
    else add_product_of_halves<WIDTH, Operand>(c, left, tiles, b_tile, column);
}

// Sets all sums of a warp to zero.
template <int T, int N> DEVICE void clear(float (&c)[T][N][4]) {
#pragma unroll
    for (int t = 0; t < T; t++) clear(c[t]);
}

// The head of a block as in attention.cuh, in fewer registers.
struct HeadOfBlock {
    int sample, head, kv_head;
};

DEVICE HeadOfBlock head_of_block(i64 heads, i64 group, i64 first_kv) {
    Head of = head_of(heads, group, first_kv);
    return {static_cast<int>(of.sample), static_cast<int>(of.head), static_cast<int>(of.kv_head)};
}

DEVICE Seen seen_of_sample(const int* firsts, int sample, i64 keys, i64 window) {
    return {firsts ? firsts + sample * keys : firsts, static_cast<int>(window)};
}

// The tokens of a block of queries: row i of the queries is token past + i, and sees keys before `keys`.
struct Tokens {
    int past, keys;

    // The end of the keys that the queries before row `end` see.
    DEVICE int end_of_keys(int end) const { return lesser(keys, past + end); }

    // The tile of STEP keys with the first that query `row` sees, of those before `end`.
    template <int STEP> DEVICE int first_tile(const Seen& sees, int row, int end) const {
        return lesser(sees.from(past + row), end - 1) / STEP * STEP;
    }
};

// The rows of a lane in a tile of C, queries `row` and `row + 8` of `count`: the first key that each sees, and the
// last.
struct QueryPair {
    int own0, own1, last0, last1;
};

DEVICE QueryPair query_pair(const Seen& sees, const Tokens& tokens, int row, int count) {
    int last = tokens.keys - 1, token0 = tokens.past + lesser(row, count - 1), token1 = tokens.past + lesser(row + 8, count - 1);
    return {sees.from(token0), sees.from(token1), lesser(token0, last), lesser(token1, last)};
}

// Writes `value` where a query does not see the key: `scores` begin at key `keys`.
template <int N> DEVICE void mask(float (&scores)[N][4], const QueryPair& of, int keys, float value) {
    int until0 = of.last0 - keys, until1 = of.last1 - keys, from0 = of.own0 - keys, from1 = of.own1 - keys;
#pragma unroll
    for (int j = 0; j < N; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int key = 8 * j + lane_of_warp() % 4 * 2 + c;
            if (key > until0 || key < from0) scores[j][c] = value;
            if (key > until1 || key < from1) scores[j][2 + c] = value;
        }
    }
}

// Dropout of the probabilities of a head: element (token, key) of [sequence, sequence], from index `start` on of all
// heads of all samples, determines the random bits, as in attention_forward.cu. Tokens and keys are counted from the
// first key, whose own place is in `start`. A draw is some 70 instructions, 18 for an element where lanes share draws;
// a pair of a head of 64 takes 1/16 of a clock of products, in which an SM issues 8.
struct Dropout {
    u64 start, sequence;
    u32 key0, key1;
    float p, kept;

    // Four elements from a multiple of 4 on have one draw of random words. Where rows begin at such a multiple, lanes
    // share draws: a lane draws once for four elements, and otherwise for each.
    DEVICE bool shares() const { return (start | sequence) % 4 == 0; }

    DEVICE u64 index(int token, int key) const { return start + static_cast<u64>(token) * sequence + static_cast<u64>(key); }
    DEVICE float of_word(u32 word) const { return uniform(word) < p ? 0.0f : kept; }
    DEVICE float drawn(u64 index) const { return dropout_factor(philox(index / 4, key0, key1), index, p, kept); }

    // The factors of a lane's four elements of a tile of C whose rows are tokens: it has keys `key` and `key + 1` of
    // rows `token` and `token + 8`.
    DEVICE void of_tokens(float (&m)[4], int token, int key) const {
        u64 upper = index(token, key), lower = index(token + 8, key);
        if (!shares()) {
            m[0] = drawn(upper), m[1] = drawn(upper + 1), m[2] = drawn(lower), m[3] = drawn(lower + 1);
            return;
        }
        // Of two neighbouring lanes, which have four keys, the even one draws for the upper row.
        bool odd = lane_of_warp() % 2 != 0;
        Words words = philox((odd ? lower : upper) / 4, key0, key1);
        float left0 = of_word(words.word[0]), left1 = of_word(words.word[1]);
        float right0 = of_word(words.word[2]), right1 = of_word(words.word[3]);
        float other0 = __shfl_xor_sync(FULL_WARP, odd ? left0 : right0, 1), other1 = __shfl_xor_sync(FULL_WARP, odd ? left1 : right1, 1);
        m[0] = odd ? other0 : left0, m[1] = odd ? other1 : left1;
        m[2] = odd ? right0 : other0, m[3] = odd ? right1 : other1;
    }

    // The same where rows are keys, written over factors of 1: a lane has tokens `token` and `token + 1` of rows `key`
    // and `key + 8`.
    DEVICE void of_keys(float (&m)[4], int token, int key) const {
        u64 upper = index(token, key), next = upper + sequence;
        if (!shares()) {
            m[0] = drawn(upper), m[1] = drawn(next), m[2] = drawn(upper + 8), m[3] = drawn(next + 8);
            return;
        }
        // Each of the four lanes that have four neighbouring keys draws for one of the four elements, and they
        // transpose what they drew.
        int of_four = lane_of_warp() / 4 % 4;
        bool odd = of_four % 2 != 0, high = of_four >= 2;
        Words words = philox(((odd ? next : upper) + (high ? 8 : 0)) / 4, key0, key1);
#pragma unroll
        for (int i = 0; i < 4; i++) m[i] = of_word(words.word[i]);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            float other = __shfl_xor_sync(FULL_WARP, odd ? m[i] : m[i + 1], 4);
            m[i] = odd ? other : m[i], m[i + 1] = odd ? m[i + 1] : other;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float other = __shfl_xor_sync(FULL_WARP, high ? m[i] : m[i + 2], 8);
            m[i] = high ? other : m[i], m[i + 2] = high ? m[i + 2] : other;
        }
    }
};

// Multiplies a tile of C, whose rows are tokens, by its factors; its first row of this lane is `token`, its first key
// `keys`.
template <int N> DEVICE void drop(float (&c)[N][4], const Dropout& of, int token, int keys) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        float m[4];
        of.of_tokens(m, token, keys + 8 * j + lane_of_warp() % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; i++) c[j][i] *= m[i];
    }
}

// The arguments of dropout of the kernels that have it, and the dropout of a head.
struct Drops {
    u32 key0, key1;
    float p, kept;
    i64 first_sample, first_head, global_heads, first_key, sequence;

    DEVICE Dropout of(i64 sample, i64 head) const {
        u64 every = static_cast<u64>(sequence);
        u64 at = static_cast<u64>(first_sample + sample) * static_cast<u64>(global_heads) + static_cast<u64>(first_head + head);
        return {at * every * every + static_cast<u64>(first_key) * (every + 1), every, key0, key1, p, kept};
    }
};

// The same of kernels without dropout: all factors are 1.
struct KeepsAll {
    DEVICE KeepsAll of(i64, i64) const { return {}; }
    DEVICE void of_keys(float (&)[4], int, int) const {}
};

template <int N> DEVICE void drop(float (&)[N][4], const KeepsAll&, int, int) {}

#define FLASH_DROPS (Drops{key0, key1, p, kept, first_sample, first_head, global_heads, first_key, sequence})

// For a lane's two rows: the maximum of the scores so far, and the lane's part of the sum of their powers.
struct OnlineSoftmax {
    float max0, max1, total0, total1;
};

// Adds more scores, which are replaced by their powers, and rescales the outputs summed so far (Milakov and Gimelshein,
// arXiv:1805.02867). `scale_2` is the scale of the scores times log₂e.
template <int N, int M> DEVICE void online_softmax(OnlineSoftmax& of, float (&s)[N][4], float (&o)[M][4], float scale_2) {
    float max0 = of.max0, max1 = of.max1;
#pragma unroll
    for (int j = 0; j < N; j++) {
        max0 = fmaxf(max0, fmaxf(s[j][0], s[j][1]));
        max1 = fmaxf(max1, fmaxf(s[j][2], s[j][3]));
    }
    max0 = largest_of_row(max0), max1 = largest_of_row(max1);
    // For a row that has seen no key yet, the maximum counts as 0, so its powers are all 0.
    float shift0 = max0 == -INFINITE ? 0.0f : -(max0 * scale_2), shift1 = max1 == -INFINITE ? 0.0f : -(max1 * scale_2);
    float less0 = exp2_fast(fmaf(of.max0, scale_2, shift0)), less1 = exp2_fast(fmaf(of.max1, scale_2, shift1));
    of = {max0, max1, of.total0 * less0, of.total1 * less1};
#pragma unroll
    for (int j = 0; j < M; j++) o[j][0] *= less0, o[j][1] *= less0, o[j][2] *= less1, o[j][3] *= less1;
#pragma unroll
    for (int j = 0; j < N; j++) {
        s[j][0] = exp2_fast(fmaf(s[j][0], scale_2, shift0)), s[j][1] = exp2_fast(fmaf(s[j][1], scale_2, shift0));
        s[j][2] = exp2_fast(fmaf(s[j][2], scale_2, shift1)), s[j][3] = exp2_fast(fmaf(s[j][3], scale_2, shift1));
        of.total0 += s[j][0] + s[j][1], of.total1 += s[j][2] + s[j][3];
    }
}

// Divides the outputs of a block's rows by their sums, and writes the outputs (through the first tile) and lse. This
// lane's first row is `own`.
template <int DIM, class Operand, int T>
DEVICE void store_outputs(OnlineSoftmax (&softmax)[T], Tiles tiles, const float (&o)[T][DIM / 8][4], const HeadOfBlock& head, int own,
                          typename Operand::Element* out, float* lse, i64 heads, int first, int count, i64 in_memory, int head_dim, float scale) {
    constexpr int WIDTH = WIDTH_OF<Operand, DIM>;
    auto* to = out + (head.sample * in_memory * heads + head.head) * head_dim;
    float* lse_head = lse + (head.sample * heads + head.head) * in_memory;
    __syncthreads();  // the queries have been read
#pragma unroll
    for (int t = 0; t < T; t++) {
        OnlineSoftmax of = softmax[t];
        of.total0 = sum_of_row(of.total0), of.total1 = sum_of_row(of.total1);
        // A query that sees no key has no powers.
        float inverse0 = of.total0 > 0.0f ? 1.0f / of.total0 : 0.0f, inverse1 = of.total1 > 0.0f ? 1.0f / of.total1 : 0.0f;
        put_rows<WIDTH, Operand>(tiles, 0, o[t], inverse0, inverse1, (static_cast<int>(threadIdx.x) / WARP * T + t) * 16, 0);
        if (lane_of_warp() % 4 != 0) continue;
        int row = own + 16 * t;
        if (row < count) lse_head[row] = of.total0 > 0.0f ? of.max0 * scale + ln_bits(of.total0) : -INFINITE;
        if (row + 8 < count) lse_head[row + 8] = of.total1 > 0.0f ? of.max1 * scale + ln_bits(of.total1) : -INFINITE;
    }
    __syncthreads();
    store_tile<FLASH_ROWS, WIDTH, TEAM_OF<FLASH_ROWS, T>>(tiles, 0, to, heads * head_dim, first, count, head_dim);
}

// lse in powers of two, and D, of a lane's two rows, in backward.
struct RowNumbers {
    float lse0, lse1, dot0, dot1;
};

DEVICE RowNumbers row_numbers(const float* lse, const float* dots, int query, int last) {
    i64 i0 = smaller(query, last), i1 = smaller(query + 8, last);
    return {lse[i0] * static_cast<float>(LOG2_E), lse[i1] * static_cast<float>(LOG2_E), dots[i0], dots[i1]};
}

// Scores become dS = P∘(dP - D), without the scale.
template <int N> DEVICE void score_gradients(float (&s)[N][4], const float (&dp)[N][4], const RowNumbers& of, float scale_2) {
#pragma unroll
    for (int j = 0; j < N; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            s[j][c] = exp2_fast(fmaf(s[j][c], scale_2, -of.lse0)) * (dp[j][c] - of.dot0);
            s[j][2 + c] = exp2_fast(fmaf(s[j][2 + c], scale_2, -of.lse1)) * (dp[j][2 + c] - of.dot1);
        }
    }
}

// The queries that see one of the ROWS keys from `first` on: rows `begin` to `end`, at least one; `end` is found in
// steps of STEP.
struct QueryRows {
    int begin, end;
};

template <int STEP, int ROWS = FLASH_ROWS> DEVICE QueryRows queries_of(const Seen& sees, const Tokens& tokens, int first, int count) {
    int begin = lesser(greater(first - tokens.past, 0), count - 1), end = begin;
    while (end < count && (end == begin || sees.from(tokens.past + end) < first + ROWS)) end += STEP;
    return {begin, lesser(end, count)};
}
