// Shared by the forward and the backward of attention: places of heads, dropout of probabilities, and tiles of rows in
// shared memory.
#pragma once
#include "float16.cuh"
#include "math.cuh"
#include "random.cuh"

// The head of this block: sample and head from blockIdx.x; `group` query heads share one head of keys and values.
struct Head {
    i64 sample, head, kv_head;
};

DEVICE Head head_of(i64 heads, i64 group, i64 first_kv) {
    i64 head = blockIdx.x % heads;
    return {static_cast<i64>(blockIdx.x) / heads, head, first_kv + head / group};
}

DEVICE int lesser(int a, int b) { return a < b ? a : b; }
DEVICE int greater(int a, int b) { return a > b ? a : b; }

// What a token of a sample sees, counted from the first key. `first` has the first token of each token's document, none
// if the sample is one document; `before` tokens are before the first key. At most `window` keys up to its own are
// seen; a window of all tokens hides none.
struct Seen {
    const int* first;
    int window;
    int before = 0;

    // The first key of a token's document, where sums over keys begin.
    DEVICE int document(i64 token) const { return first ? greater(first[token] - before, 0) : 0; }

    // The first key that a token sees.
    DEVICE int from(i64 token) const { return greater(document(token), static_cast<int>(token) + 1 - window); }
};

DEVICE Seen seen_of(const int* firsts, const Head& head, i64 sequence, i64 window, i64 first_key = 0) {
    return {firsts ? firsts + head.sample * sequence + first_key : firsts, static_cast<int>(window), static_cast<int>(first_key)};
}

// Dropout of the probabilities of one row: element (sample, head, i, j) of the global [samples, heads, seq, seq]
// determines the random bits. Keys are visited in order, and counted from the first.
struct RowDropout {
    u64 start, block;
    Words words;
    u32 key0, key1;
    float p, kept;

    __device__ __forceinline__ RowDropout(u64 start, u32 key0, u32 key1, float p, float kept)
        : start(start), block(~0ull), words{}, key0(key0), key1(key1), p(p), kept(kept) {}

    __device__ __forceinline__ float factor(i64 key) {
        if (p <= 0.0f) return 1.0f;
        u64 index = start + static_cast<u64>(key);
        if (index / 4 != block) {
            block = index / 4;
            words = philox(block, key0, key1);
        }
        return dropout_factor(words, index, p, kept);
    }
};

// The value that a product reads: x, or x rounded to bf16.
DEVICE float as_read(float x, int rounded) { return rounded ? from_bf16(to_operand(x)) : x; }

// Copies rows first .. first + ROWS of one head, `row` apart in memory, to a tile whose rows are `stride` apart; zeros
// beyond the last row. `from` is the head's first row; `rounded`: as operands of bf16. The caller places barriers
// before and after.
template <int ROWS, class Tile>
DEVICE void load_rows(Tile& tile, int stride, const float* from, i64 row, i64 first, i64 seq, int head_dim, int rounded) {
    for (int at = static_cast<int>(threadIdx.x); at < ROWS * head_dim; at += THREADS) {
        int r = at / head_dim, e = at % head_dim;
        tile[r * stride + e] = first + r < seq ? as_read(from[(first + r) * row + e], rounded) : 0.0f;
    }
}

// One chain of fused multiply-adds over the features, from zero.
template <class A, class B> DEVICE float chain(A& a, int a_at, B& b, int b_at, int head_dim) {
    float sum = 0.0f;
    for (int e = 0; e < head_dim; e++) sum = fmaf(a[a_at + e], b[b_at + e], sum);
    return sum;
}
