// Attention, backward, with the probabilities recomputed from lse (as in Dao et al., arXiv:2205.14135).
//
//   P = e^(S - lse),  dP = (dO Vᵀ)∘M,  D_i = Σ_e dO_ie O_ie,  dS = P∘(dP - D) scale
//   dQ = dS K, where a cap has multiplied dS by its slope,  dK = dSᵀ Q,  dV = (P∘M)ᵀ dO;  for groups, dK and dV are summed over the heads of a group
//   dbias = Σ_samples dS / scale, before the slope of the cap
//
// Shapes    as in attention_forward.cu; dots (D) like lse; dq rows dq_row apart; dk and dv of each head of queries,
//           rows dkv_row apart: in place without groups, else in [batch, seq, heads, head_dim], which rotary_backward
//           rotates back and attention_group_sum adds up.
// Geometry  dots: half a warp per row. dQ: one block per head and 16 queries, over the keys by 16; dK and dV: one block
//           per head and 16 keys, over the queries by 16. A thread has one pair of a tile, then features. Shared memory,
//           given by the launch, for tiles of Q, dO, K, V and of P and dS: of 256 features 68 KiB.
// Bytes     dQ: 4 head_dim (3 + 2 seq / 32) per row; dK, dV: 4 head_dim (4 + 2 seq / 32), most of it from the L2 cache.
// Bits      as on the CPU; as in attention_forward.cu, with dO, P∘M and dS also rounded in the precision bf16: S and dP
//           are chains over the features, dQ is chained over the keys and dK and dV over the queries in blocks of 128;
//           groups are summed in the balanced tree; D is summed in 16 lanes, not fused.
#include "attention.cuh"
#include "tree.cuh"

#define TILE 16  // queries, keys, and threads of a query or key
#define BACKWARD_BLOCK 128
#define HALF_WARP 16

// Tiles of Q, dO, K and V, of rows of FEATURES numbers a thread, then of dS and P, in shared memory: all elements, and
// where each begins.
template <int FEATURES> struct Places {
    static constexpr int STRIDE = FEATURES * TILE + 1, ROWS = TILE * STRIDE, PAIRS = TILE * (TILE + 1);
    static constexpr int Q = 0, DOUT = ROWS, K = 2 * ROWS, V = 3 * ROWS, DS = 4 * ROWS, P = DS + PAIRS, ALL = P + PAIRS;
};

// D of each row. Elements: 16 times the rows.
KERNEL attention_dots(const float* dout, const float* out, float* dots, i64 batch, i64 seq, i64 heads, i64 head_dim) {
    i64 row = global_thread() / HALF_WARP, whole = head_dim / HALF_WARP * HALF_WARP;
    int lane = static_cast<int>(threadIdx.x) % HALF_WARP;
    bool live = row < batch * seq * heads;
    const float* x = dout + (live ? row * head_dim : 0);
    const float* y = out + (live ? row * head_dim : 0);
    float sum = 0.0f;
    for (i64 e = lane; live && e < whole; e += HALF_WARP) sum += x[e] * y[e];
    for (int width = HALF_WARP / 2; width > 0; width /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, width);
    if (!live || lane != 0) return;
    for (i64 e = whole; e < head_dim; e++) sum = sum + x[e] * y[e];
    i64 head = row % heads, at = row / heads;
    dots[(at / seq * heads + head) * seq + at % seq] = sum;
}

// The operands and sizes of one head. Rows of q are q_row apart, of k and v kv_row, of dO heads * head_dim.
struct Operands {
    const float *q, *k, *v, *dout, *lse, *dots;
    i64 q_row, kv_row, out_row, seq, keys, past, rows, sequence;
    int head_dim;
    float scale;
    Shown sees;
    int rounded;
    ScoreOf scores;
};

DEVICE Operands operands_of(const Head& head, const float* q, i64 q_row, const float* k, const float* v, i64 kv_row, const float* dout,
                            const float* lse, const float* dots, i64 seq, i64 heads, int head_dim, float scale,
                            const int* firsts, int rounded, i64 keys, i64 past, i64 rows, const Reach& reach,
                            i64 first_key, i64 sequence, const ScoreShape& shape) {
    i64 out_row = heads * head_dim, row = (head.sample * heads + head.head) * rows;
    return {q + head.sample * rows * q_row + head.head * head_dim, k + head.sample * keys * kv_row + head.kv_head * head_dim,
            v + head.sample * keys * kv_row + head.kv_head * head_dim, dout + head.sample * rows * out_row + head.head * head_dim,
            lse + row, dots + row, q_row, kv_row, out_row, seq, keys, past, rows, sequence, head_dim, scale,
            shown_of(firsts, head, sequence, first_key, keys, reach), rounded, score_of(shape, head, rows, keys, scale)};
}

struct Scores {
    float p, ds;
};

// P∘M and dS of query i and key j, rows `query` and `key` of the tiles, as products read them; zero where the mask
// hides it.
template <class At, class Tiles> DEVICE Scores scores_of(const Operands& of, Tiles& tiles, int query, int key, i64 i, i64 j, RowDropout dropout) {
    i64 token = of.past + i;
    if (i >= of.seq || j >= of.sees.until(token) || j < of.sees.from(token)) return {0.0f, 0.0f};
    int row = query * At::STRIDE, column = key * At::STRIDE;
    float capped = of.scores.capped(chain(tiles, At::Q + row, tiles, At::K + column, of.head_dim));
    float dp = chain(tiles, At::DOUT + row, tiles, At::V + column, of.head_dim);
    float p = exp_bits(of.scores.of(capped, i, token, j) * of.scores.of_scores - of.lse[i]), factor = 1.0f;
    if (dropout.p > 0.0f) {
        dropout.start += static_cast<u64>(token) * static_cast<u64>(of.sequence);
        factor = dropout.factor(j);
        dp = dp * factor;
    }
    float ds = p * (dp - of.dots[i]) * of.scale;
    if (of.scores.by > 0.0f) ds = ds * of.scores.cap_slope(capped);
    return {as_read(dropout.p > 0.0f ? p * factor : p, of.rounded), as_read(ds, of.rounded)};
}

template <int FEATURES> DEVICE void backward_q(const Head& head, const Operands& of, float* dq, i64 dq_row, const RowDropout& dropout) {
    using At = Places<FEATURES>;
    GIVEN(float, tiles, At::ALL);
    i64 first = static_cast<i64>(blockIdx.y) * TILE, end = smaller(of.sees.end, of.past + smaller(of.seq, first + TILE) + of.sees.ahead);
    int query = static_cast<int>(threadIdx.x) / TILE, lane = static_cast<int>(threadIdx.x) % TILE;
    i64 i = first + query, token = of.past + i;
    load_rows<TILE>(tiles, At::Q, At::STRIDE, of.q, of.q_row, first, of.seq, of.head_dim, of.rounded);
    load_rows<TILE>(tiles, At::DOUT, At::STRIDE, of.dout, of.out_row, first, of.seq, of.head_dim, of.rounded);
    float sum[FEATURES], part[FEATURES];
#pragma unroll
    for (int f = 0; f < FEATURES; f++) sum[f] = 0.0f, part[f] = 0.0f;
    // The first key of this query's document, the first that it sees, and the tile of the first that any of this block
    // sees.
    i64 at_least = of.past + first, here = i < of.seq ? token : at_least;
    i64 own = of.sees.document(here), low = of.sees.from(here), seen_end = of.sees.until(here);
    i64 begin = of.sees.from(at_least) / TILE * TILE, opened = ((low - own) / BACKWARD_BLOCK + 1) * BACKWARD_BLOCK;
    for (i64 keys = begin; keys < end; keys += TILE) {
        __syncthreads();  // the keys and scores before these are read
        load_rows<TILE>(tiles, At::K, At::STRIDE, of.k, of.kv_row, keys, of.keys, of.head_dim, of.rounded);
        load_rows<TILE>(tiles, At::V, At::STRIDE, of.v, of.kv_row, keys, of.keys, of.head_dim, of.rounded);
        __syncthreads();
        tiles[At::DS + query * (TILE + 1) + lane] = scores_of<At>(of, tiles, query, lane, i, keys + lane, dropout).ds;
        __syncthreads();
        for (int key = 0; key < TILE; key++) {
            i64 seen = keys + key - own;
            if (keys + key < low || keys + key >= seen_end) continue;
            if (seen % BACKWARD_BLOCK == 0 && keys + key > low) {
#pragma unroll
                for (int f = 0; f < FEATURES; f++) sum[f] = seen == opened ? part[f] : sum[f] + part[f], part[f] = 0.0f;
            }
            float gradient = tiles[At::DS + query * (TILE + 1) + key];
#pragma unroll
            for (int f = 0; f < FEATURES; f++) {
                int e = lane + TILE * f;
                if (e < of.head_dim) part[f] = fmaf(gradient, tiles[At::K + key * At::STRIDE + e], part[f]);
            }
        }
    }
    if (i >= of.seq) return;
    float* to = dq + (head.sample * of.rows + i) * dq_row + head.head * of.head_dim;
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        int e = lane + TILE * f;
        if (e < of.head_dim) to[e] = seen_end - own > opened ? sum[f] + part[f] : part[f];
    }
}

template <int FEATURES>
DEVICE void backward_kv(const Head& head, const Operands& of, float* dk, float* dv, i64 dkv_row, const RowDropout& dropout) {
    using At = Places<FEATURES>;
    GIVEN(float, tiles, At::ALL);
    i64 first = static_cast<i64>(blockIdx.y) * TILE;
    int row = static_cast<int>(threadIdx.x) / TILE, lane = static_cast<int>(threadIdx.x) % TILE;
    load_rows<TILE>(tiles, At::K, At::STRIDE, of.k, of.kv_row, first, of.keys, of.head_dim, of.rounded);
    load_rows<TILE>(tiles, At::V, At::STRIDE, of.v, of.kv_row, first, of.keys, of.head_dim, of.rounded);
    float k_sum[FEATURES], k_part[FEATURES], v_sum[FEATURES], v_part[FEATURES];
#pragma unroll
    for (int f = 0; f < FEATURES; f++) k_sum[f] = 0.0f, k_part[f] = 0.0f, v_sum[f] = 0.0f, v_part[f] = 0.0f;
    i64 key = first + row, own = of.sees.document(key < of.keys ? key : first);
    // The first query of this key's document, and the first that the sums of its block of keys begin with.
    i64 own_query = own > of.past ? own - of.past : 0;
    i64 before = (key - own) / BACKWARD_BLOCK * BACKWARD_BLOCK - (of.past + of.sees.ahead + own_query - own);
    i64 begin = own_query + (before > 0 ? before / 2 * 2 : 0);
    bool several = false;
    i64 past = of.past + of.sees.ahead;
    for (i64 queries = first > past ? (first - past) / TILE * TILE : 0; queries < of.seq; queries += TILE) {
        if (of.sees.from(of.past + queries) >= first + TILE) break;  // no query from here on sees these keys
        __syncthreads();  // the queries and scores before these are read
        load_rows<TILE>(tiles, At::Q, At::STRIDE, of.q, of.q_row, queries, of.seq, of.head_dim, of.rounded);
        load_rows<TILE>(tiles, At::DOUT, At::STRIDE, of.dout, of.out_row, queries, of.seq, of.head_dim, of.rounded);
        __syncthreads();
        // This thread as the owner of a pair: `row` is a query, `lane` a key.
        Scores scores = scores_of<At>(of, tiles, row, lane, queries + row, first + lane, dropout);
        tiles[At::P + row * (TILE + 1) + lane] = scores.p;
        tiles[At::DS + row * (TILE + 1) + lane] = scores.ds;
        __syncthreads();
        // This thread as the owner of features: `row` is a key.
        for (int query = 0; query < TILE; query++) {
            i64 i = queries + query;
            if (i >= of.seq || key >= of.sees.until(of.past + i) || of.sees.from(of.past + i) > key) continue;
            if ((i - begin) % BACKWARD_BLOCK == 0 && i > begin) {
#pragma unroll
                for (int f = 0; f < FEATURES; f++) {
                    k_sum[f] = several ? k_sum[f] + k_part[f] : k_part[f], k_part[f] = 0.0f;
                    v_sum[f] = several ? v_sum[f] + v_part[f] : v_part[f], v_part[f] = 0.0f;
                }
                several = true;
            }
            float probability = tiles[At::P + query * (TILE + 1) + row], gradient = tiles[At::DS + query * (TILE + 1) + row];
#pragma unroll
            for (int f = 0; f < FEATURES; f++) {
                int e = lane + TILE * f;
                if (e >= of.head_dim) continue;
                v_part[f] = fmaf(probability, tiles[At::DOUT + query * At::STRIDE + e], v_part[f]);
                k_part[f] = fmaf(gradient, tiles[At::Q + query * At::STRIDE + e], k_part[f]);
            }
        }
    }
    if (first + row >= of.keys) return;
    i64 to = (head.sample * of.keys + first + row) * dkv_row + head.head * of.head_dim;
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        int e = lane + TILE * f;
        if (e >= of.head_dim) continue;
        dk[to + e] = several ? k_sum[f] + k_part[f] : k_part[f];
        dv[to + e] = several ? v_sum[f] + v_part[f] : v_part[f];
    }
}

// Dropout as in attention_forward.cu.
#define ATTENTION_BACKWARD(CALL, ...) \
    Head head = head_of(heads, group, first_kv); \
    Operands of = operands_of(head, q, q_row, k, v, kv_row, dout, lse, dots, seq, heads, head_dim, scale, firsts, rounded, \
                               keys, first_query, rows, Reach{window, ahead, lengths}, first_key, sequence, \
                               ScoreShape{cap_by, cap_back, slopes, bias}); \
    u64 at = static_cast<u64>(first_sample + head.sample) * static_cast<u64>(global_heads) + static_cast<u64>(first_head + head.head); \
    u64 start = at * static_cast<u64>(sequence) * static_cast<u64>(sequence) + static_cast<u64>(first_key) * static_cast<u64>(sequence + 1); \
    CALL(head, of, __VA_ARGS__, RowDropout(start, key0, key1, p, kept))

KERNEL attention_backward_q_64(const float* q, i64 q_row, const float* k, const float* v, i64 kv_row, const float* dout, const float* lse,
                               const float* dots, float* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                               float scale, u32 key0, u32 key1, float p, float kept, i64 first_sample, i64 first_head,
                               i64 global_heads, const int* firsts, int rounded, i64 keys,
                               i64 first_query, i64 rows, i64 window, i64 first_key, i64 sequence, float cap_by, float cap_back,
                               const float* slopes, const float* bias, i64 ahead, const int* lengths) {
    ATTENTION_BACKWARD(backward_q<4>, dq, dq_row);
}

KERNEL attention_backward_q_128(const float* q, i64 q_row, const float* k, const float* v, i64 kv_row, const float* dout, const float* lse,
                                const float* dots, float* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                                float scale, u32 key0, u32 key1, float p, float kept, i64 first_sample, i64 first_head,
                                i64 global_heads, const int* firsts, int rounded, i64 keys,
                                i64 first_query, i64 rows, i64 window, i64 first_key, i64 sequence, float cap_by, float cap_back,
                               const float* slopes, const float* bias, i64 ahead, const int* lengths) {
    ATTENTION_BACKWARD(backward_q<8>, dq, dq_row);
}

KERNEL attention_backward_q_256(const float* q, i64 q_row, const float* k, const float* v, i64 kv_row, const float* dout, const float* lse,
                                const float* dots, float* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                                float scale, u32 key0, u32 key1, float p, float kept, i64 first_sample, i64 first_head,
                                i64 global_heads, const int* firsts, int rounded, i64 keys,
                                i64 first_query, i64 rows, i64 window, i64 first_key, i64 sequence, float cap_by, float cap_back,
                               const float* slopes, const float* bias, i64 ahead, const int* lengths) {
    ATTENTION_BACKWARD(backward_q<16>, dq, dq_row);
}

KERNEL attention_backward_kv_64(const float* q, i64 q_row, const float* k, const float* v, i64 kv_row, const float* dout, const float* lse,
                                const float* dots, float* dk, float* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv,
                                int head_dim, float scale, u32 key0, u32 key1, float p, float kept, i64 first_sample, i64 first_head,
                                i64 global_heads, const int* firsts, int rounded, i64 keys,
                                i64 first_query, i64 rows, i64 window, i64 first_key, i64 sequence, float cap_by, float cap_back,
                               const float* slopes, const float* bias, i64 ahead, const int* lengths) {
    ATTENTION_BACKWARD(backward_kv<4>, dk, dv, dkv_row);
}

KERNEL attention_backward_kv_128(const float* q, i64 q_row, const float* k, const float* v, i64 kv_row, const float* dout, const float* lse,
                                 const float* dots, float* dk, float* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv,
                                 int head_dim, float scale, u32 key0, u32 key1, float p, float kept, i64 first_sample, i64 first_head,
                                 i64 global_heads, const int* firsts, int rounded, i64 keys,
                                 i64 first_query, i64 rows, i64 window, i64 first_key, i64 sequence, float cap_by, float cap_back,
                               const float* slopes, const float* bias, i64 ahead, const int* lengths) {
    ATTENTION_BACKWARD(backward_kv<8>, dk, dv, dkv_row);
}

KERNEL attention_backward_kv_256(const float* q, i64 q_row, const float* k, const float* v, i64 kv_row, const float* dout, const float* lse,
                                 const float* dots, float* dk, float* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv,
                                 int head_dim, float scale, u32 key0, u32 key1, float p, float kept, i64 first_sample, i64 first_head,
                                 i64 global_heads, const int* firsts, int rounded, i64 keys,
                                 i64 first_query, i64 rows, i64 window, i64 first_key, i64 sequence, float cap_by, float cap_back,
                               const float* slopes, const float* bias, i64 ahead, const int* lengths) {
    ATTENTION_BACKWARD(backward_kv<16>, dk, dv, dkv_row);
}

// The gradient of the bias: the sums over the samples in `blocks` of equally many, which are added in the tree.
// Elements: heads seq keys.
KERNEL attention_bias_backward(const float* q, i64 q_row, const float* k, const float* v, i64 kv_row, const float* dout, const float* lse,
                               const float* dots, float* dbias, i64 batch, i64 blocks, int accumulate, i64 seq, i64 heads, i64 group,
                               i64 first_kv, int head_dim, float scale, u32 key0, u32 key1, float p, float kept, i64 first_sample,
                               i64 first_head, i64 global_heads, const int* firsts, int rounded, i64 keys, i64 first_query,
                               i64 rows, i64 window, i64 first_key, i64 sequence, float cap_by, float cap_back,
                               const float* slopes, const float* bias, i64 ahead, const int* lengths) {
    i64 element = global_thread();
    if (element >= heads * seq * keys) return;
    i64 key = element % keys, i = element / keys % seq, of_head = element / keys / seq, each = (batch + blocks - 1) / blocks;
    Tree tree;
    for (i64 block = 0; block < blocks; block++) {
        float part = 0.0f;
        for (i64 sample = block * each; sample < smaller(batch, (block + 1) * each); sample++) {
            Head head = {sample, of_head, first_kv + of_head / group};
            Operands of = operands_of(head, q, q_row, k, v, kv_row, dout, lse, dots, seq, heads, head_dim, scale, firsts, rounded, keys,
                                      first_query, rows, Reach{window, ahead, lengths}, first_key, sequence,
                                      ScoreShape{cap_by, cap_back, slopes, bias});
            i64 token = of.past + i;
            if (key >= of.sees.until(token) || key < of.sees.from(token)) continue;
            const float *q_row_i = of.q + i * of.q_row, *k_row_j = of.k + key * of.kv_row;
            const float *g_row_i = of.dout + i * of.out_row, *v_row_j = of.v + key * of.kv_row;
            float s = 0.0f, dp = 0.0f;
            for (int e = 0; e < head_dim; e++) {
                s = fmaf(as_read(q_row_i[e], rounded), as_read(k_row_j[e], rounded), s);
                dp = fmaf(as_read(g_row_i[e], rounded), as_read(v_row_j[e], rounded), dp);
            }
            u64 at = static_cast<u64>(first_sample + sample) * static_cast<u64>(global_heads) + static_cast<u64>(first_head + of_head);
            u64 start = (at * static_cast<u64>(sequence) + static_cast<u64>(first_key + token)) * static_cast<u64>(sequence) + static_cast<u64>(first_key);
            RowDropout dropout(start, key0, key1, p, kept);
            float score = of.scores.of(of.scores.capped(s), i, token, key) * of.scores.of_scores;
            part += exp_bits(score - of.lse[i]) * (dp * dropout.factor(key) - of.dots[i]);
        }
        tree.push(part);
    }
    dbias[element] = (accumulate ? dbias[element] : 0.0f) + tree.finish();
}

// Sums over the heads of each group, in the tree, from [rows, heads, head_dim] to the heads from `first` on of rows
// to_row apart.
KERNEL attention_group_sum(const float* from, float* to, i64 to_row, i64 rows, i64 heads, i64 group, i64 first, i64 head_dim) {
    i64 at = global_thread(), groups = heads / group;
    if (at >= rows * groups * head_dim) return;
    i64 e = at % head_dim, g = at / head_dim % groups, row = at / head_dim / groups;
    Tree tree;
    for (i64 head = g * group; head < (g + 1) * group; head++) tree.push(from[(row * heads + head) * head_dim + e]);
    to[row * to_row + (first + g) * head_dim + e] = tree.finish();
}

#undef TILE  // other files have tiles of their own
