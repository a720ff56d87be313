// Causal self attention on tensor cores, backward, with the probabilities recomputed from lse (FlashAttention-2, Dao,
// arXiv:2307.08691).
//
//   P = 2^(S scale log₂e - lse log₂e),  dP = dO Vᵀ,  D_i = Σ_e dO_ie O_ie,  dS = P∘(dP - D)
//   dQ = scale dS K,  dK = scale dSᵀ Q,  dV = Pᵀ dO,  dK and dV over all queries of a group's heads
//   with dropout dS = P∘(dP∘M - D),  dV = (P∘M)ᵀ dO
//
// Shapes    as in flash_forward.cu and attention_backward.cu; all of 16 bits except lse and dots; dq rows dq_row apart,
//           dk and dv rows dkv_row apart, heads from first_kv on: groups are summed in this kernel, without a further
//           sum.
// Geometry  dots: head_dim / 8 lanes per row, rounded up to a power of two. dQ: one block per head and 128 queries,
//           over the keys by 64; dK and dV: one block per head of keys and 128 keys, over the heads of its group and
//           their queries by 32 (_64) or 16 (_128). Each of 8 warps has 16 rows. _256: dQ over the keys by 16; dK and dV
//           of 64 keys, over the queries by 16, where two warps have the same 16 keys, because the sums of both would
//           take 256 registers of a lane: one warp sums dK and the other dV, and both compute S. dK and dV use
//           Sᵀ = K Qᵀ, so that results of products serve directly as the operands Pᵀ and dSᵀ. Two kernels, with 7
//           products instead of 5, because sums of dQ over blocks of keys would need atomics, whose order differs from
//           run to run. Shared memory: two tiles of the block's own rows and two pairs of the others: dQ 2 head_dim (256
//           + 4·64), 64 and 128 KiB; dK and dV 48 and 80 KiB. _256: 160 and 96 KiB. With dropout dQ
//           of 128 goes over the keys by 32, and of 256 as its variant for little shared memory does: 96 KiB.
// Registers of a lane: dQ head_dim / 2, S and dP 64; dK and dV head_dim, Sᵀ and dPᵀ 32 or 16; operands of products 12
//           and more in flight. Q, dO, K and V come from shared memory for each product. 204, 235 and 252, 202, 244
//           and 254 (kernels/report.md): one block on an SM, 8 warps.
// Banks     as in flash_forward.cu: no conflicts.
// Work      dQ 3 seq² head_dim, dK and dV 4 seq² head_dim operations per head, and one power of two per pair in both:
//           3.5 times the forward.
// Bytes     a head: dQ 2 head_dim (3 seq + seq² / 128), dK and dV 2 head_dim (4 seq + seq² / 128), the quadratic part
//           from the L2 cache.
// Bits      not the CPU's, but deterministic from run to run. Tests hold 1e-2 of the norm against f32.
#include "flash.cuh"

// D of each row. Elements: `lanes` times the rows, lanes = head_dim / 8 rounded up to a power of two.
KERNEL flash_dots(const u16* dout, const u16* out, float* dots, i64 batch, i64 seq, i64 heads, i64 head_dim) {
    int lanes = 1;
    while (lanes * CHUNK < head_dim) lanes *= 2;
    i64 row = global_thread() / lanes;
    int lane = lane_of_warp() % lanes;
    float sum = 0.0f;
    if (row < batch * seq * heads && lane * CHUNK < head_dim) {
        Chunk x = load_chunk(dout + row * head_dim + lane * CHUNK), y = load_chunk(out + row * head_dim + lane * CHUNK);
        for (int i = 0; i < 4; i++) {
            sum = fmaf(from_bf16(static_cast<u16>(x.word[i])), from_bf16(static_cast<u16>(y.word[i])), sum);
            sum = fmaf(from_bf16(static_cast<u16>(x.word[i] >> 16)), from_bf16(static_cast<u16>(y.word[i] >> 16)), sum);
        }
    }
    for (int width = lanes / 2; width > 0; width /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, width);
    if (lane == 0 && row < batch * seq * heads) dots[(row / heads / seq * heads + row % heads) * seq + row / heads % seq] = sum;
}

struct FlashOperands {
    const u16 *q, *k, *v, *dout;
    const float *lse, *dots;
    i64 q_row, kv_row, seq, heads, group, first_kv;
    int head_dim;
    float scale;
    const int* firsts;
    i64 keys, past, rows, window;
};

// SHARE: warps with the same 16 rows. Both compute S and dP; each sums its part of the features.
template <int DIM, int STEP, int SHARE, class Drop>
DEVICE void flash_backward_q(const FlashOperands& of, u16* dq, i64 dq_row, const Drop& drops) {
    constexpr int ROWS = FLASH_ROWS / SHARE, DOUT = ROWS * DIM, PAIR = 2 * ROWS * DIM, VALUES = STEP * DIM, PAIRS = 2 * STEP * DIM;
    TILES(tiles, 2 * ROWS * DIM + 4 * STEP * DIM);
    Head head = head_of(of.heads, of.group, of.first_kv);
    int count = static_cast<int>(of.seq), first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * ROWS;
    Tokens tokens = {static_cast<int>(of.past), static_cast<int>(of.keys)};
    int end = tokens.end_of_keys(smaller(count, first + ROWS));
    i64 out_row = of.heads * of.head_dim;
    const u16* q_head = of.q + head.sample * of.rows * of.q_row + head.head * of.head_dim;
    i64 kv_at = head.sample * of.keys * of.kv_row + head.kv_head * of.head_dim;
    const u16* dout_head = of.dout + head.sample * of.rows * out_row + head.head * of.head_dim;
    i64 numbers = (head.sample * of.heads + head.head) * of.rows;
    int warp = static_cast<int>(threadIdx.x) / WARP, warp_row = warp % (ROWS / 16) * 16, lane = lane_of_warp();
    int column = warp / (ROWS / 16) * (DIM / SHARE);
    int i0 = first + warp_row + lane / 4;
    Seen sees = seen_of(of.firsts, head, of.keys, of.window);
    QueryPair rows = query_pair(sees, tokens, i0, count);
    int begin = tokens.first_tile<STEP>(sees, first, end), of_warp = tokens.past + first + warp_row;
    float scale_2 = of.scale * static_cast<float>(LOG2_E);
    RowNumbers row = row_numbers(of.lse + numbers, of.dots + numbers, i0, count - 1);

    copy_rows<ROWS, DIM>(tiles, 0, q_head, of.q_row, first, count, of.head_dim);
    copy_rows<ROWS, DIM>(tiles, DOUT, dout_head, out_row, first, count, of.head_dim);
    copy_rows<STEP, DIM>(tiles, PAIR, of.k + kv_at, of.kv_row, begin, tokens.keys, of.head_dim);
    copy_rows<STEP, DIM>(tiles, PAIR + VALUES, of.v + kv_at, of.kv_row, begin, tokens.keys, of.head_dim);
    copy_commit();
    float sum[DIM / SHARE / 8][4];
    clear(sum);
    int stage = 0;
    for (int keys = begin; keys < end; keys += STEP) {
        copy_wait<0>();
        __syncthreads();  // these keys have arrived, and the previous keys have been read
        int pair = PAIR + stage * PAIRS;
        stage = 1 - stage;
        if (keys + STEP < end) {
            copy_rows<STEP, DIM>(tiles, PAIR + stage * PAIRS, of.k + kv_at, of.kv_row, keys + STEP, tokens.keys, of.head_dim);
            copy_rows<STEP, DIM>(tiles, PAIR + stage * PAIRS + VALUES, of.v + kv_at, of.kv_row, keys + STEP, tokens.keys, of.head_dim);
            copy_commit();
        }
        if (keys > of_warp + 15) continue;  // the last query of this warp precedes them
        float s[STEP / 8][4], dp[STEP / 8][4];
        clear(s), clear(dp);
        add_product<DIM>(s, tiles, 0, warp_row, pair);
        add_product<DIM>(dp, tiles, DOUT, warp_row, pair + VALUES);
        drop(dp, drops.of(head.sample, head.head), tokens.past + i0, keys);
        score_gradients(s, dp, row, scale_2);
        mask(s, rows, keys, 0.0f);
        add_product_of<DIM>(sum, s, tiles, pair, column);
    }
    u16* to = dq + head.sample * of.rows * dq_row + head.head * of.head_dim;
    __syncthreads();  // the queries have been read
    put_rows<DIM>(tiles, 0, sum, of.scale, of.scale, warp_row, column / CHUNK);
    __syncthreads();
    store_tile<ROWS, DIM>(tiles, 0, to, dq_row, first, count, of.head_dim);
}

// SHARE: warps with the same 16 rows. Of two, one sums dK and the other dV; both compute S.
template <int DIM, int STEP, int SHARE, class Drop>
DEVICE void flash_backward_kv(const FlashOperands& of, u16* dk, u16* dv, i64 dkv_row, const Drop& drops) {
    constexpr int ROWS = FLASH_ROWS / SHARE, VALUES = ROWS * DIM, PAIR = 2 * ROWS * DIM, DOUT = STEP * DIM, PAIRS = 2 * STEP * DIM;
    TILES(tiles, 2 * ROWS * DIM + 4 * STEP * DIM);
    i64 groups = of.heads / of.group, sample = blockIdx.x / groups, own_head = blockIdx.x % groups, out_row = of.heads * of.head_dim;
    int count = static_cast<int>(of.seq), first = static_cast<int>(blockIdx.y) * ROWS;
    Tokens tokens = {static_cast<int>(of.past), static_cast<int>(of.keys)};
    i64 kv_at = (of.first_kv + own_head) * of.head_dim;
    const u16* q_sample = of.q + sample * of.rows * of.q_row;
    const u16* dout_sample = of.dout + sample * of.rows * out_row;
    // This lane has keys j0 and j0 + 8.
    int warp = static_cast<int>(threadIdx.x) / WARP, warp_row = warp % (ROWS / 16) * 16, lane = lane_of_warp();
    bool sums_k = SHARE == 1 || warp < ROWS / 16, sums_v = SHARE == 1 || !sums_k;
    int j0 = first + warp_row + lane / 4;
    Seen sees = {of.firsts ? of.firsts + sample * of.keys : of.firsts, static_cast<int>(of.window)};
    bool hides = of.firsts || of.window < of.past + of.seq;
    float scale_2 = of.scale * static_cast<float>(LOG2_E);
    QueryRows seeing = queries_of<STEP, ROWS>(sees, tokens, first, count);
    i64 head = own_head * of.group, behind = head + of.group;
    int queries = seeing.begin;

    copy_rows<ROWS, DIM>(tiles, 0, of.k + sample * of.keys * of.kv_row + kv_at, of.kv_row, first, tokens.keys, of.head_dim);
    copy_rows<ROWS, DIM>(tiles, VALUES, of.v + sample * of.keys * of.kv_row + kv_at, of.kv_row, first, tokens.keys, of.head_dim);
    copy_rows<STEP, DIM>(tiles, PAIR, q_sample + head * of.head_dim, of.q_row, queries, count, of.head_dim);
    copy_rows<STEP, DIM>(tiles, PAIR + DOUT, dout_sample + head * of.head_dim, out_row, queries, count, of.head_dim);
    copy_commit();
    float sums[2 / SHARE][DIM / 8][4];
    auto &k_sum = sums[0], &v_sum = sums[2 / SHARE - 1];  // one, of which a warp has either, where two share rows
    clear(k_sum), clear(v_sum);
    int stage = 0;
    while (head < behind) {
        copy_wait<0>();
        __syncthreads();  // these queries have arrived, and the previous queries have been read
        int pair = PAIR + stage * PAIRS;
        stage = 1 - stage;
        int from = queries;
        i64 numbers = (sample * of.heads + head) * of.rows + from;
        auto dropout = drops.of(sample, head);
        queries += STEP;
        if (queries >= seeing.end) queries = seeing.begin, head++;
        if (head < behind) {
            int next = PAIR + stage * PAIRS;
            copy_rows<STEP, DIM>(tiles, next, q_sample + head * of.head_dim, of.q_row, queries, count, of.head_dim);
            copy_rows<STEP, DIM>(tiles, next + DOUT, dout_sample + head * of.head_dim, out_row, queries, count, of.head_dim);
            copy_commit();
        }
        if (tokens.past + from + STEP <= first + warp_row) continue;  // they all precede the first key of this warp
        float p[STEP / 8][4], dp[STEP / 8][4];
        clear(p), clear(dp);
        add_product<DIM>(p, tiles, 0, warp_row, pair);
        if (sums_k) add_product<DIM>(dp, tiles, VALUES, warp_row, pair + DOUT);
        int rows = count - from, token = tokens.past + from, key = j0 - token;
#pragma unroll
        for (int j = 0; j < STEP / 8; j++) {
            float m[4] = {1.0f, 1.0f, 1.0f, 1.0f};
            dropout.of_keys(m, token + 8 * j + lane % 4 * 2, j0);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int i = 8 * j + lane % 4 * 2 + c, at = i < rows ? i : 0;
                int own = hides ? sees.from(token + at) - token : -0x40000000;
                float lse = of.lse[numbers + at] * static_cast<float>(LOG2_E), dot = of.dots[numbers + at];
                float p0 = exp2_fast(fmaf(p[j][c], scale_2, -lse)), p1 = exp2_fast(fmaf(p[j][2 + c], scale_2, -lse));
                if (i < key || i >= rows || key < own) p0 = 0.0f;
                if (i < key + 8 || i >= rows || key + 8 < own) p1 = 0.0f;
                dp[j][c] = p0 * (dp[j][c] * m[c] - dot), dp[j][2 + c] = p1 * (dp[j][2 + c] * m[2 + c] - dot);
                p[j][c] = p0 * m[c], p[j][2 + c] = p1 * m[2 + c];
            }
        }
        if (sums_v) add_product_of<DIM>(v_sum, p, tiles, pair + DOUT);
        if (sums_k) add_product_of<DIM>(k_sum, dp, tiles, pair);
    }
    i64 to = sample * of.keys * dkv_row + kv_at;
    __syncthreads();  // the keys and values have been read
    if (sums_k) put_rows<DIM>(tiles, 0, k_sum, of.scale, of.scale, warp_row, 0);
    if (sums_v) put_rows<DIM>(tiles, VALUES, v_sum, 1.0f, 1.0f, warp_row, 0);
    __syncthreads();
    store_tile<ROWS, DIM>(tiles, 0, dk + to, dkv_row, first, tokens.keys, of.head_dim);
    store_tile<ROWS, DIM>(tiles, VALUES, dv + to, dkv_row, first, tokens.keys, of.head_dim);
}

#ifndef BACKWARD_Q_256_SHARE
#define BACKWARD_Q_256_SHARE 1  // src/variants.rs overrides it
#endif

#define FLASH_OPERANDS {q, k, v, dout, lse, dots, q_row, kv_row, seq, heads, group, first_kv, head_dim, scale, firsts, keys, first_query, rows, window}

KERNEL flash_backward_q_64(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, const float* lse, const float* dots,
                           u16* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window) {
    flash_backward_q<64, FLASH_KEYS, 1>(FLASH_OPERANDS, dq, dq_row, KeepsAll{});
}

KERNEL flash_backward_q_128(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, const float* lse, const float* dots,
                            u16* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window) {
    flash_backward_q<128, FLASH_KEYS, 1>(FLASH_OPERANDS, dq, dq_row, KeepsAll{});
}

KERNEL flash_backward_q_256(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, const float* lse, const float* dots,
                            u16* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window) {
    flash_backward_q<256, 16, BACKWARD_Q_256_SHARE>(FLASH_OPERANDS, dq, dq_row, KeepsAll{});
}

KERNEL flash_backward_kv_64(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, const float* lse,
                            const float* dots, u16* dk, u16* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                            float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window) {
    flash_backward_kv<64, 32, 1>(FLASH_OPERANDS, dk, dv, dkv_row, KeepsAll{});
}

KERNEL flash_backward_kv_128(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, const float* lse,
                             const float* dots, u16* dk, u16* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                             float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window) {
    flash_backward_kv<128, 16, 1>(FLASH_OPERANDS, dk, dv, dkv_row, KeepsAll{});
}

KERNEL flash_backward_kv_256(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, const float* lse,
                             const float* dots, u16* dk, u16* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                             float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window) {
    flash_backward_kv<256, 16, 2>(FLASH_OPERANDS, dk, dv, dkv_row, KeepsAll{});
}

KERNEL flash_dropout_backward_q_64(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, const float* lse, const float* dots,
                           u16* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                   float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    flash_backward_q<64, 64, 1>(FLASH_OPERANDS, dq, dq_row, FLASH_DROPS);
}

KERNEL flash_dropout_backward_q_128(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, const float* lse, const float* dots,
                            u16* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                    float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    flash_backward_q<128, 32, 1>(FLASH_OPERANDS, dq, dq_row, FLASH_DROPS);
}

KERNEL flash_dropout_backward_q_256(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, const float* lse, const float* dots,
                            u16* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                    float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    flash_backward_q<256, 16, 2>(FLASH_OPERANDS, dq, dq_row, FLASH_DROPS);
}

KERNEL flash_dropout_backward_kv_64(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, const float* lse,
                            const float* dots, u16* dk, u16* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                            float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                    float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    flash_backward_kv<64, 32, 1>(FLASH_OPERANDS, dk, dv, dkv_row, FLASH_DROPS);
}

KERNEL flash_dropout_backward_kv_128(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, const float* lse,
                             const float* dots, u16* dk, u16* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                             float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                     float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    flash_backward_kv<128, 16, 1>(FLASH_OPERANDS, dk, dv, dkv_row, FLASH_DROPS);
}

KERNEL flash_dropout_backward_kv_256(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, const float* lse,
                             const float* dots, u16* dk, u16* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                             float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                     float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    flash_backward_kv<256, 16, 2>(FLASH_OPERANDS, dk, dv, dkv_row, FLASH_DROPS);
}
