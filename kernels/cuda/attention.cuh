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

// The keys that a token of a sample sees where it also sees `ahead` keys behind its own, of those before `end`. Its
// window counts from the last of them.
struct Shown {
    Seen sees;
    int ahead, end;

    DEVICE int document(i64 token) const { return sees.document(token); }

    // The first key that a token sees.
    DEVICE int from(i64 token) const { return greater(document(token), static_cast<int>(token) + 1 + ahead - sees.window); }

    // The end of the keys that a token sees: of those of its document, whose tokens have the same first one.
    DEVICE int until(i64 token) const {
        int low = static_cast<int>(token) + 1, high = lesser(end, low + ahead);
        if (!sees.first || low >= high) return high;
        while (low < high) {
            int middle = low + (high - low) / 2;
            if (sees.first[middle] > sees.first[token]) high = middle;
            else low = middle + 1;
        }
        return low;
    }
};

// Which keys are seen: the kernels' arguments.
struct Reach {
    i64 window, ahead;
    const int* lengths;
};

// `keys` keys of a sample, of which a length may hide the last ones. Tokens are counted from the first key.
DEVICE Shown shown_of(const int* firsts, const Head& head, i64 sequence, i64 first_key, i64 keys, const Reach& reach) {
    i64 length = reach.lengths ? static_cast<i64>(reach.lengths[head.sample]) - first_key : keys;
    i64 end = smaller(keys, length > 0 ? length : 0);
    return {seen_of(firsts, head, sequence, reach.window, first_key), static_cast<int>(reach.ahead), static_cast<int>(end)};
}

// What becomes of the product of a query and a key: capped, times `scale`, and shifted by the distance and a bias.
struct ScoreShape {
    float cap_by, cap_back;  // scale / cap and cap / scale; 0: no cap
    const float *slopes, *bias;
};

// The same for a head. Scores that are not shifted are products: `of_scores` is the factor that they lack.
struct ScoreOf {
    float by, back, slope, scale, of_scores;
    const float* bias;
    i64 keys;
    bool shifted;

    DEVICE float capped(float product) const { return by > 0.0f ? back * tanh_bits(product * by) : product; }

    // The slope of a capped product.
    DEVICE float cap_slope(float capped) const {
        float tanh = capped * by;
        return 1.0f - tanh * tanh;
    }

    // Of row i of the queries, which is this token.
    DEVICE float of(float capped, i64 i, i64 token, i64 key) const {
        if (!shifted) return capped;
        i64 distance = token > key ? token - key : key - token;
        float shift = -slope * static_cast<float>(distance);
        if (bias) shift = shift + bias[i * keys + key];
        return capped * scale + shift;
    }
};

DEVICE ScoreOf score_of(const ScoreShape& of, const Head& head, i64 rows, i64 keys, float scale) {
    bool shifted = of.slopes || of.bias;
    return {of.cap_by, of.cap_back, of.slopes ? of.slopes[head.head] : 0.0f, scale, shifted ? 1.0f : scale,
            of.bias ? of.bias + head.head * rows * keys : of.bias, keys, shifted};
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

// The value that a product reads: x, or x rounded to bf16 (1) or to TF32 (2).
DEVICE float as_read(float x, int rounded) { return rounded == 0 ? x : rounded == 1 ? from_bf16(to_operand(x)) : to_tf32(x); }

// Copies rows first .. first + ROWS of one head, `row` apart in memory, to a tile that begins at `to` and whose rows
// are `stride` apart; zeros beyond the last row. `from` is the head's first row; `rounded`: as for as_read. The
// caller places barriers before and after.
template <int ROWS, class Tile>
DEVICE void load_rows(Tile& tile, int to, int stride, const float* from, i64 row, i64 first, i64 seq, int head_dim, int rounded) {
    for (int at = static_cast<int>(threadIdx.x); at < ROWS * head_dim; at += THREADS) {
        int r = at / head_dim, e = at % head_dim;
        tile[to + r * stride + e] = first + r < seq ? as_read(from[(first + r) * row + e], rounded) : 0.0f;
    }
}

// One chain of fused multiply-adds over the features, from zero.
template <class A, class B> DEVICE float chain(A& a, int a_at, B& b, int b_at, int head_dim) {
    float sum = 0.0f;
    for (int e = 0; e < head_dim; e++) sum = fmaf(a[a_at + e], b[b_at + e], sum);
    return sum;
}
