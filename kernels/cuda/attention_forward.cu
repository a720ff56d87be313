// Attention, forward, without the matrix of all pairs (as in Dao et al., arXiv:2205.14135), heads of
// queries in groups that share keys and values (Ainslie et al., arXiv:2305.13245).
//
//   S = cap(Q Kᵀ) - slope |distance| + bias for first_query + i + ahead - window < j <= first_query + i + ahead,  P = e^((S - max) scale),  O = ((P∘M) V) / Σ P,  lse = max scale + ln Σ P,  M the factors of dropout
//
// Shapes    q: rows q_row apart, in each `heads` heads of head_dim; k, v: rows kv_row apart, head first_kv + h / group;
//           out [batch, seq, heads, head_dim]; lse [batch, heads, seq]; firsts [batch, seq] (i32), from documents.cu,
//           or null: tokens see only their own document, which has the same bits as a separate sequence. Rotated
//           queries and keys come from rotary.cu. `seq` queries of the `rows` of a sample in memory, tokens
//           first_query + i; a query whose window or document is behind the `keys` keys has out 0 and lse -∞. Tokens are
//           counted from the first key, which is token first_key of sequences of `sequence` tokens: firsts and dropout
//           refer to those. attention_join adds the attention over other keys, (part, part_lse), to out, before
//           attention_join_lse joins the sums of the rows. _64 is for head_dim up to 64, _128 up to 128, _256 up
//           to 256.
//           `ahead` is 0 in causal attention, and the number of keys where a query sees all of them. lengths [batch] in
//           i32: keys behind are hidden; slopes [heads]; bias [heads, rows, keys]; each may be null. Without slopes and
//           bias S is multiplied by the scale when it is exponentiated.
// Geometry  one block per head and 32 queries (_256: 16), which loops over the keys by as many twice; 8 threads per
//           query (_256: 16). Shared memory for tiles of queries and of keys or values, and two of probabilities.
// Bytes     per head 4 seq head_dim (1 + 3 seq / 64 + 1): queries once, keys twice and values once for each 32 queries,
//           half of them masked, most of it from the L2 cache; and the output. _256: 3 seq / 32.
// Bits      as on the CPU (crates/cpu/src/kernels/attention.rs) where it has fused multiply-adds (AVX2 or AVX-512). The
//           CPU subtracts the maximum of the whole row, which an online softmax does not know, so the scores are
//           computed twice, first for the maximum. S is one chain over the features; the total is summed and O is
//           chained over the keys in blocks of 256. In the precisions bf16 and TF32 (`rounded`) Q, K, V and P∘M are rounded
//           before they are multiplied; where the CPU has an instruction for pairs of bf16, partial sums below 2^-126
//           are zero there and not here. Tensor cores are not used.
#include "attention.cuh"

#define FORWARD_KEYS 256

// Heads of up to DIM features, tiles of TILE queries and as many keys. A query has LANES threads, and a thread the
// features e = lane + LANES j, and EACH neighbouring keys.
template <int DIM, int TILE>
DEVICE void attention_forward(const float* q, i64 q_row, const float* k, const float* v, i64 kv_row, float* out, float* lse, i64 seq, i64 heads,
                              i64 group, i64 first_kv, int head_dim, float scale, const int* firsts, i64 count, i64 past, i64 rows, const Reach& reach, i64 first_key,
                              i64 sequence, RowDropout dropout, u64 head_start, int rounded, const ScoreShape& shape) {
    constexpr int STRIDE = DIM + 1, LANES = THREADS / TILE, FEATURES = DIM / LANES, EACH = TILE / LANES;
    SHARED(float, queries, TILE * STRIDE);
    SHARED(float, tile, TILE * STRIDE);
    SHARED(float, plain, TILE * (TILE + 1));
    SHARED(float, dropped, TILE * (TILE + 1));
    Head head = head_of(heads, group, first_kv);
    i64 first = static_cast<i64>(blockIdx.y) * TILE;
    int query = static_cast<int>(threadIdx.x) / LANES, lane = static_cast<int>(threadIdx.x) % LANES;
    i64 i = first + query, token = past + i;
    const float* q_head = q + head.sample * rows * q_row + head.head * head_dim;
    const float* k_head = k + head.sample * count * kv_row + head.kv_head * head_dim;
    const float* v_head = v + head.sample * count * kv_row + head.kv_head * head_dim;
    load_rows<TILE>(queries, 0, STRIDE, q_head, q_row, first, seq, head_dim, rounded);
    // The first key that this query sees, and the tile of the first that any query of this block does.
    Shown sees = shown_of(firsts, head, sequence, first_key, count, reach);
    ScoreOf scores = score_of(shape, head, rows, count, scale);
    i64 at_least = past + first, here = i < seq ? token : at_least, own = sees.document(here), low = sees.from(here);
    i64 begin = sees.from(at_least) / TILE * TILE, seen_end = sees.until(here);
    i64 end = smaller(sees.end, past + smaller(seq, first + TILE) + reach.ahead);

    float max = -INFINITE;
    for (i64 keys = begin; keys < end; keys += TILE) {
        __syncthreads();  // the keys before these are read
        load_rows<TILE>(tile, 0, STRIDE, k_head, kv_row, keys, count, head_dim, rounded);
        __syncthreads();
        for (int j = 0; j < EACH; j++) {
            int key = lane * EACH + j;
            if (keys + key >= seen_end || keys + key < low || i >= seq) continue;
            float score = scores.of(scores.capped(chain(tile, key * STRIDE, queries, query * STRIDE, head_dim)), i, token, keys + key);
            max = score > max ? score : max;
        }
    }
    for (int width = LANES / 2; width > 0; width /= 2) {
        float other = __shfl_xor_sync(FULL_WARP, max, width);
        max = max > other ? max : other;
    }

    float sum[FEATURES], part[FEATURES], total = 0.0f, total_part = 0.0f;
    dropout.start = head_start + static_cast<u64>(token) * static_cast<u64>(sequence);
    i64 opened = ((low - own) / FORWARD_KEYS + 1) * FORWARD_KEYS;  // keys up to the end of the first block of sums
#pragma unroll
    for (int f = 0; f < FEATURES; f++) sum[f] = 0.0f, part[f] = 0.0f;
    for (i64 keys = begin; keys < end; keys += TILE) {
        __syncthreads();  // the values and probabilities before these are read
        load_rows<TILE>(tile, 0, STRIDE, k_head, kv_row, keys, count, head_dim, rounded);
        __syncthreads();
        for (int j = 0; j < EACH; j++) {
            int key = lane * EACH + j, at = query * (TILE + 1) + key;
            float p = 0.0f, factor = 0.0f;
            if (keys + key < seen_end && keys + key >= low && i < seq) {
                float capped = scores.capped(chain(tile, key * STRIDE, queries, query * STRIDE, head_dim));
                p = exp_bits((scores.of(capped, i, token, keys + key) - max) * scores.of_scores);
                factor = dropout.factor(keys + key);
            }
            plain[at] = p;
            dropped[at] = as_read(p * factor, rounded);
        }
        __syncthreads();  // the keys are read
        load_rows<TILE>(tile, 0, STRIDE, v_head, kv_row, keys, count, head_dim, rounded);
        __syncthreads();
        for (int key = 0; key < TILE; key++) {
            i64 seen = keys + key - own;
            if (keys + key < low || keys + key >= seen_end) continue;
            if (seen % FORWARD_KEYS == 0 && keys + key > low) {
                total += total_part, total_part = 0.0f;
#pragma unroll
                for (int f = 0; f < FEATURES; f++) sum[f] = seen == opened ? part[f] : sum[f] + part[f], part[f] = 0.0f;
            }
            total_part += static_cast<float>(plain[query * (TILE + 1) + key]);
            float p = dropped[query * (TILE + 1) + key];
#pragma unroll
            for (int f = 0; f < FEATURES; f++) {
                int e = lane + LANES * f;
                if (e < head_dim) part[f] = fmaf(p, tile[key * STRIDE + e], part[f]);
            }
        }
    }
    if (i >= seq) return;
    total += total_part;
    bool none = low >= seen_end, several = seen_end - own > opened;
    float inverse = none ? 0.0f : 1.0f / total;
    float* to = out + ((head.sample * rows + i) * heads + head.head) * head_dim;
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        int e = lane + LANES * f;
        if (e < head_dim) to[e] = (several ? sum[f] + part[f] : part[f]) * inverse;
    }
    if (lane == 0) lse[(head.sample * heads + head.head) * rows + i] = none ? -INFINITE : max * scores.of_scores + ln_bits(total);
}

// Dropout: p = 0 for none; kept = 1 / (1 - p); the global indices of this call's first sample and first head, and the
// number of heads over all ranks.
#define ATTENTION_FORWARD(DIM, TILE) \
    u64 sample = static_cast<u64>(first_sample) + blockIdx.x / static_cast<u64>(heads); \
    u64 start = (sample * static_cast<u64>(global_heads) + static_cast<u64>(first_head) + blockIdx.x % static_cast<u64>(heads)) * \
                    static_cast<u64>(sequence) * static_cast<u64>(sequence) + \
                static_cast<u64>(first_key) * static_cast<u64>(sequence + 1); \
    attention_forward<DIM, TILE>(q, q_row, k, v, kv_row, out, lse, seq, heads, group, first_kv, head_dim, scale, firsts, \
                                keys, first_query, rows, Reach{window, ahead, lengths}, first_key, sequence, \
                                RowDropout(0, key0, key1, p, kept), start, rounded, ScoreShape{cap_by, cap_back, slopes, bias})

KERNEL attention_forward_64(const float* q, i64 q_row, const float* k, const float* v, i64 kv_row, float* out, float* lse, i64 seq, i64 heads,
                            i64 group, i64 first_kv, int head_dim, float scale, u32 key0, u32 key1, float p, float kept,
                            i64 first_sample, i64 first_head, i64 global_heads, const int* firsts, int rounded, i64 keys,
                            i64 first_query, i64 rows, i64 window, i64 first_key, i64 sequence, float cap_by, float cap_back,
                            const float* slopes, const float* bias, i64 ahead, const int* lengths) {
    ATTENTION_FORWARD(64, 32);
}

KERNEL attention_forward_128(const float* q, i64 q_row, const float* k, const float* v, i64 kv_row, float* out, float* lse, i64 seq, i64 heads,
                             i64 group, i64 first_kv, int head_dim, float scale, u32 key0, u32 key1, float p, float kept,
                             i64 first_sample, i64 first_head, i64 global_heads, const int* firsts, int rounded, i64 keys,
                             i64 first_query, i64 rows, i64 window, i64 first_key, i64 sequence, float cap_by, float cap_back,
                            const float* slopes, const float* bias, i64 ahead, const int* lengths) {
    ATTENTION_FORWARD(128, 32);
}

KERNEL attention_forward_256(const float* q, i64 q_row, const float* k, const float* v, i64 kv_row, float* out, float* lse, i64 seq, i64 heads,
                             i64 group, i64 first_kv, int head_dim, float scale, u32 key0, u32 key1, float p, float kept,
                             i64 first_sample, i64 first_head, i64 global_heads, const int* firsts, int rounded, i64 keys,
                             i64 first_query, i64 rows, i64 window, i64 first_key, i64 sequence, float cap_by, float cap_back,
                             const float* slopes, const float* bias, i64 ahead, const int* lengths) {
    ATTENTION_FORWARD(256, 16);
}

// The shares of two blocks of keys with these log-sum-exps in the result over both, and its log-sum-exp.
struct Shares {
    float of_a, of_b, lse;
};

DEVICE Shares shares_of(float a, float b) {
    if (b == -INFINITE) return {1.0f, 0.0f, a};
    float max = b > a ? b : a, of_a = exp_bits(a - max), of_b = exp_bits(b - max), total = of_a + of_b;
    return {of_a / total, of_b / total, max + ln_bits(total)};
}

// Elements: those of out.
KERNEL attention_join(const float* part, const float* lse, const float* part_lse, float* out, i64 count, i64 seq, i64 heads, i64 head_dim) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 row = at / head_dim, head = row % heads, token = row / heads, of = (token / seq * heads + head) * seq + token % seq;
    if (part_lse[of] == -INFINITE) return;
    Shares shares = shares_of(lse[of], part_lse[of]);
    out[at] = out[at] * shares.of_a + part[at] * shares.of_b;
}

// Elements: the rows.
KERNEL attention_join_lse(const float* part_lse, float* lse, i64 rows) {
    i64 at = global_thread();
    if (at < rows) lse[at] = shares_of(lse[at], part_lse[at]).lse;
}
