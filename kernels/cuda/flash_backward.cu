// Causal self attention on tensor cores, backward, with the probabilities recomputed from lse (FlashAttention-2, Dao,
// arXiv:2307.08691).
//
//   P = 2^(S scale log₂e - lse log₂e),  dP = dO Vᵀ,  D_i = Σ_e dO_ie O_ie,  dS = P∘(dP - D)
//   dQ = scale dS K,  dK = scale dSᵀ Q,  dV = Pᵀ dO,  dK and dV over all queries of a group's heads
//   with dropout dS = P∘(dP∘M - D),  dV = (P∘M)ᵀ dO
//
// Shapes    as in flash_forward.cu and attention_backward.cu; all of 16 bits, or of f32 for TF32, except lse and dots;
//           dq rows dq_row apart, dk and dv rows dkv_row apart, heads from first_kv on: groups are summed in this
//           kernel, without a further sum.
// Geometry  dots: head_dim / 8 lanes per row, rounded up to a power of two. dQ: one block per head and 128 queries,
//           over the keys by 32; dK and dV: one block per head of keys and 128 keys, over the heads of its group and
//           their queries by 32. Each warp has 32 rows: 4 warps. Where the sums dK and dV would take 256 registers of a
//           lane (_128, _256), two warps have the same keys, one sums dK and the other dV, and both compute S: 8 warps.
//           _256: 8 warps of 16 rows, dQ over the keys by 16, dK and dV of 64 keys, over the queries by 16. dK and dV use
//           Sᵀ = K Qᵀ, so that results of products serve directly as the operands Pᵀ and dSᵀ. Two kernels, with 7
//           products instead of 5, because sums of dQ over blocks of keys would need atomics, whose order differs from
//           run to run. Shared memory: two tiles of the block's own rows and two pairs of the others: 2 head_dim (256 +
//           4·32) = 48 and 96 KiB. _256: 160 and 96 KiB. With dropout 8 warps of 16 rows, but dQ of 64 features: the
//           queries of dK and dV by 32 (_64) or 16 (_128), dQ of 256 features as its variant for little shared memory.
//           TF32 goes by 16 everywhere: 4 head_dim (256 + 4·16) = 80 and 160 KiB, and of _256, of 64 queries or keys,
//           192 KiB.
// Registers of a lane: dQ head_dim, S and dP 64, and of _64 the queries 32; dK and dV 128 together, Sᵀ and dPᵀ 64;
//           operands of products 12 and more in flight. At most 255 (kernels/report.md), so 8 warps on an SM, in one
//           block or two.
// Banks     as in flash_forward.cu: no conflicts.
// Work      dQ 3 seq² head_dim, dK and dV 4 seq² head_dim operations per head, and one power of two per pair in both:
//           3.5 times the forward.
// Bytes     a head: dQ 2 head_dim (3 seq + seq² / 128), dK and dV 2 head_dim (4 seq + seq² / 128), the quadratic part
//           from the L2 cache.
// Bits      not the CPU's, but deterministic from run to run. Tests hold 1e-2 of the norm against f32, in f16 and in
//           TF32, against the CPU's TF32, an eighth of it.
#include "flash.cuh"

// bf16, or another type where src/operands.rs compiles this file once more.
#ifndef OPERAND_TYPE
#define OPERAND_TYPE Bf16Type
#endif

using FlashElement = OPERAND_TYPE::Element;

// The sum with the products of the elements of two words.
template <class Operand> DEVICE float add_products(u32 x, u32 y, float sum) {
    if constexpr (IS_TF32<Operand>) return fmaf(__uint_as_float(x), __uint_as_float(y), sum);
    else return fmaf(Operand::high(x), Operand::high(y), fmaf(Operand::low(x), Operand::low(y), sum));
}

// D of each row. Elements: `lanes` times the rows, lanes = head_dim / 8 rounded up to a power of two.
KERNEL flash_dots(const FlashElement* dout, const FlashElement* out, float* dots, i64 batch, i64 seq, i64 heads, i64 head_dim) {
    constexpr int OF_LANE = 8;  // neighbours
    int lanes = 1;
    while (lanes * OF_LANE < head_dim) lanes *= 2;
    i64 row = global_thread() / lanes;
    int lane = lane_of_warp() % lanes;
    float sum = 0.0f;
    if (row < batch * seq * heads && lane * OF_LANE < head_dim) {
#pragma unroll
        for (int at = 0; at < OF_LANE; at += CHUNK_OF<FlashElement>) {
            i64 from = row * head_dim + lane * OF_LANE + at;
            Chunk x = load_chunk(dout + from), y = load_chunk(out + from);
            for (int i = 0; i < 4; i++) sum = add_products<OPERAND_TYPE>(x.word[i], y.word[i], sum);
        }
    }
    for (int width = lanes / 2; width > 0; width /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, width);
    if (lane == 0 && row < batch * seq * heads) dots[(row / heads / seq * heads + row % heads) * seq + row / heads % seq] = sum;
}

template <class Operand> struct FlashOperands {
    const typename Operand::Element *q, *k, *v, *dout;
    const float *lse, *dots;
    i64 q_row, kv_row, seq, heads, group, first_kv;
    int head_dim;
    float scale;
    const int* firsts;
    i64 keys, past, rows, window;
};

// ROWS: rows of a block. T: 16 rows of a warp. SHARE: warps with the same rows. Both compute S and dP; each sums its
// part of the features. HELD: whether the queries stay in registers.
template <class Operand, int DIM, int ROWS, int STEP, int T, int SHARE, bool HELD, class Drop>
DEVICE void flash_backward_q(const FlashOperands<Operand>& of, typename Operand::Element* dq, i64 dq_row, const Drop& drops) {
    constexpr int WIDTH = WIDTH_OF<Operand, DIM>, TEAM = TEAM_OF<ROWS, T, SHARE>;
    constexpr int DOUT = ROWS * WIDTH, PAIR = 2 * ROWS * WIDTH, VALUES = STEP * WIDTH, PAIRS = 2 * STEP * WIDTH;  // places and sizes of tiles
    TILES(tiles, 2 * ROWS * WIDTH + 4 * STEP * WIDTH);
    HeadOfBlock head = head_of_block(of.heads, of.group, of.first_kv);
    int count = static_cast<int>(of.seq), first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * ROWS;
    Tokens tokens = {static_cast<int>(of.past), static_cast<int>(of.keys)};
    int end = tokens.end_of_keys(smaller(count, first + ROWS));
    i64 out_row = of.heads * of.head_dim;
    const auto* q_head = of.q + head.sample * of.rows * of.q_row + head.head * of.head_dim;
    i64 kv_at = head.sample * of.keys * of.kv_row + head.kv_head * of.head_dim;
    const auto* dout_head = of.dout + head.sample * of.rows * out_row + head.head * of.head_dim;
    i64 numbers = (head.sample * of.heads + head.head) * of.rows;
    int warp = static_cast<int>(threadIdx.x) / WARP, warp_row = warp % (ROWS / 16 / T) * 16 * T;
    int column = warp / (ROWS / 16 / T) * (WIDTH / SHARE);
    int i0 = first + warp_row + lane_of_warp() / 4;
    Seen sees = seen_of_sample(of.firsts, head.sample, of.keys, of.window);
    bool hides = of.firsts || of.window < of.past + of.seq;
    RowNumbers row[T];
#pragma unroll
    for (int t = 0; t < T; t++) row[t] = row_numbers(of.lse + numbers, of.dots + numbers, i0 + 16 * t, count - 1);
    int begin = tokens.first_tile<STEP>(sees, first, end), of_warp = tokens.past + first + warp_row;
    float scale_2 = of.scale * static_cast<float>(LOG2_E);

    copy_rows<ROWS, WIDTH, TEAM>(thread_here(), tiles, 0, q_head, of.q_row, first, count, of.head_dim);
    copy_rows<ROWS, WIDTH, TEAM>(thread_here(), tiles, DOUT, dout_head, out_row, first, count, of.head_dim);
    copy_rows<STEP, WIDTH, TEAM>(thread_here(), tiles, PAIR, of.k + kv_at, of.kv_row, begin, tokens.keys, of.head_dim);
    copy_rows<STEP, WIDTH, TEAM>(thread_here(), tiles, PAIR + VALUES, of.v + kv_at, of.kv_row, begin, tokens.keys, of.head_dim);
    copy_commit();
    u32 held[WIDTH / 16][T][4];
    if (HELD) {
        copy_wait<0>();
        __syncthreads();  // the queries have arrived
#pragma unroll
        for (int e = 0; e < WIDTH / 16; e++) {
            load_rows<WIDTH>(held[e], tiles, place_of_a<WIDTH>(warp_row * WIDTH), 16 * e);
#pragma unroll
            for (int t = 0; t < T; t++) round_words<Operand>(held[e][t]);
        }
    }
    if (IS_TF32<Operand>) {
        copy_wait<0>();
        if (!HELD) round_rows<Operand, ROWS, WIDTH, TEAM>(thread_here(), tiles, 0);
        round_rows<Operand, ROWS, WIDTH, TEAM>(thread_here(), tiles, DOUT);
    }
    float sum[T][DIM / SHARE / 8][4];
    clear(sum);
    int stage = 0;
    for (int keys = begin; keys < end; keys += STEP) {
        copy_wait<0>();
        __syncthreads();  // these keys have arrived, and the previous keys have been read
        int pair = PAIR + stage * PAIRS;
        stage = 1 - stage;
        if (keys + STEP < end) {
            copy_rows<STEP, WIDTH, TEAM>(thread_here(), tiles, PAIR + stage * PAIRS, of.k + kv_at, of.kv_row, keys + STEP, tokens.keys, of.head_dim);
            copy_rows<STEP, WIDTH, TEAM>(thread_here(), tiles, PAIR + stage * PAIRS + VALUES, of.v + kv_at, of.kv_row, keys + STEP, tokens.keys, of.head_dim);
            copy_commit();
        }
        if (keys > of_warp + 16 * T - 1) continue;  // the last query of this warp precedes them
        float s[T][STEP / 8][4], dp[T][STEP / 8][4];
        clear(s), clear(dp);
        if (HELD) add_product<WIDTH, Operand>(s, held, tiles, pair);
        else add_product<WIDTH, Operand>(s, tiles, 0, warp_row, pair);
        add_product<WIDTH, Operand>(dp, tiles, DOUT, warp_row, pair + VALUES);
#pragma unroll
        for (int t = 0; t < T; t++) {
            drop(dp[t], drops.of(head.sample, head.head), tokens.past + i0 + 16 * t, keys);
            score_gradients(s[t], dp[t], row[t], scale_2);
        }
        if (hides || keys + STEP > smaller(of_warp + 1, tokens.keys)) {
#pragma unroll
            for (int t = 0; t < T; t++) mask(s[t], query_pair(sees, tokens, here(i0) + 16 * t, count), keys, 0.0f);
        }
        add_product_of<WIDTH, Operand>(sum, s, tiles, pair, column);
    }
    auto* to = dq + head.sample * of.rows * dq_row + head.head * of.head_dim;
    __syncthreads();  // the queries have been read
#pragma unroll
    for (int t = 0; t < T; t++) put_rows<WIDTH, Operand>(tiles, 0, sum[t], of.scale, of.scale, warp_row + 16 * t, column / CHUNK);
    __syncthreads();
    store_tile<ROWS, WIDTH, TEAM>(tiles, 0, to, dq_row, first, count, of.head_dim);
}

// ROWS, T, SHARE: as for dQ. Of two warps with the same rows, one sums dK and the other dV; both compute S.
template <class Operand, int DIM, int ROWS, int STEP, int T, int SHARE, class Drop>
DEVICE void flash_backward_kv(const FlashOperands<Operand>& of, typename Operand::Element* dk, typename Operand::Element* dv, i64 dkv_row, const Drop& drops) {
    constexpr int WIDTH = WIDTH_OF<Operand, DIM>, TEAM = TEAM_OF<ROWS, T, SHARE>;
    constexpr int VALUES = ROWS * WIDTH, PAIR = 2 * ROWS * WIDTH, DOUT = STEP * WIDTH, PAIRS = 2 * STEP * WIDTH;  // places and sizes of tiles
    TILES(tiles, 2 * ROWS * WIDTH + 4 * STEP * WIDTH);
    i64 groups = of.heads / of.group, out_row = of.heads * of.head_dim;
    int sample = static_cast<int>(blockIdx.x / groups), own_head = static_cast<int>(blockIdx.x % groups);
    int count = static_cast<int>(of.seq), first = static_cast<int>(blockIdx.y) * ROWS;
    Tokens tokens = {static_cast<int>(of.past), static_cast<int>(of.keys)};
    i64 kv_at = (of.first_kv + own_head) * of.head_dim;
    const auto* q_sample = of.q + sample * of.rows * of.q_row;
    const auto* dout_sample = of.dout + sample * of.rows * out_row;
    // This lane has keys j0 and j0 + 8, and those 16 behind each.
    int warp = static_cast<int>(threadIdx.x) / WARP, warp_row = warp % (ROWS / 16 / T) * 16 * T, lane = lane_of_warp();
    bool sums_k = SHARE == 1 || warp < ROWS / 16 / T, sums_v = SHARE == 1 || !sums_k;
    int j0 = first + warp_row + lane / 4;
    Seen sees = seen_of_sample(of.firsts, sample, of.keys, of.window);
    bool hides = of.firsts || of.window < of.past + of.seq;
    float scale_2 = of.scale * static_cast<float>(LOG2_E);
    QueryRows seeing = queries_of<STEP, ROWS>(sees, tokens, first, count);
    int head = own_head * static_cast<int>(of.group), behind = head + static_cast<int>(of.group);
    int queries = seeing.begin;

    copy_rows<ROWS, WIDTH, TEAM>(thread_here(), tiles, 0, of.k + sample * of.keys * of.kv_row + kv_at, of.kv_row, first, tokens.keys, of.head_dim);
    copy_rows<ROWS, WIDTH, TEAM>(thread_here(), tiles, VALUES, of.v + sample * of.keys * of.kv_row + kv_at, of.kv_row, first, tokens.keys, of.head_dim);
    copy_rows<STEP, WIDTH, TEAM>(thread_here(), tiles, PAIR, q_sample + head * of.head_dim, of.q_row, queries, count, of.head_dim);
    copy_rows<STEP, WIDTH, TEAM>(thread_here(), tiles, PAIR + DOUT, dout_sample + head * of.head_dim, out_row, queries, count, of.head_dim);
    copy_commit();
    if (IS_TF32<Operand>) {
        copy_wait<0>();
        round_rows<Operand, ROWS, WIDTH, TEAM>(thread_here(), tiles, 0);
        round_rows<Operand, ROWS, WIDTH, TEAM>(thread_here(), tiles, VALUES);
    }
    float sums[2 / SHARE][T][DIM / 8][4];
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
            copy_rows<STEP, WIDTH, TEAM>(thread_here(), tiles, next, q_sample + head * of.head_dim, of.q_row, queries, count, of.head_dim);
            copy_rows<STEP, WIDTH, TEAM>(thread_here(), tiles, next + DOUT, dout_sample + head * of.head_dim, out_row, queries, count, of.head_dim);
            copy_commit();
        }
        if (tokens.past + from + STEP <= first + warp_row) continue;  // they all precede the first key of this warp
        float p[T][STEP / 8][4], dp[T][STEP / 8][4];
        clear(p), clear(dp);
        add_product<WIDTH, Operand>(p, tiles, 0, warp_row, pair);
        if (sums_k) add_product<WIDTH, Operand>(dp, tiles, VALUES, warp_row, pair + DOUT);
        int rows = count - from, token = tokens.past + from, key = j0 - token;
#pragma unroll
        for (int j = 0; j < STEP / 8; j++) {
            float m[T][4];
#pragma unroll
            for (int t = 0; t < T; t++) {
                m[t][0] = m[t][1] = m[t][2] = m[t][3] = 1.0f;
                dropout.of_keys(m[t], token + 8 * j + lane % 4 * 2, j0 + 16 * t);
            }
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int i = 8 * j + lane % 4 * 2 + c, at = i < rows ? i : 0;
                int own = hides ? sees.from(token + at) - token : -0x40000000;
                float lse = of.lse[numbers + at] * static_cast<float>(LOG2_E), dot = of.dots[numbers + at];
#pragma unroll
                for (int half = 0; half < 2 * T; half++) {  // keys 8 apart
                    int t = half / 2, place = half % 2 * 2 + c, its = key + 8 * half;
                    float power = exp2_fast(fmaf(p[t][j][place], scale_2, -lse));
                    if (i < its || i >= rows || its < own) power = 0.0f;
                    dp[t][j][place] = power * (dp[t][j][place] * m[t][place] - dot);
                    p[t][j][place] = power * m[t][place];
                }
            }
        }
        if (sums_v) add_product_of<WIDTH, Operand>(v_sum, p, tiles, pair + DOUT);
        if (sums_k) add_product_of<WIDTH, Operand>(k_sum, dp, tiles, pair);
    }
    i64 to = sample * of.keys * dkv_row + kv_at;
    __syncthreads();  // the keys and values have been read
#pragma unroll
    for (int t = 0; t < T; t++) {
        if (sums_k) put_rows<WIDTH, Operand>(tiles, 0, k_sum[t], of.scale, of.scale, warp_row + 16 * t, 0);
        if (sums_v) put_rows<WIDTH, Operand>(tiles, VALUES, v_sum[t], 1.0f, 1.0f, warp_row + 16 * t, 0);
    }
    __syncthreads();
    store_tile<ROWS, WIDTH, TEAM>(tiles, 0, dk + to, dkv_row, first, tokens.keys, of.head_dim);
    store_tile<ROWS, WIDTH, TEAM>(tiles, VALUES, dv + to, dkv_row, first, tokens.keys, of.head_dim);
}

// Overridden by src/variants.rs and src/operands.rs: warps with the same rows, 16 rows of a warp, and keys or queries
// of a tile of heads of up to 128.
#ifndef BACKWARD_Q_256_SHARE
#define BACKWARD_Q_256_SHARE 1
#endif
#ifndef BACKWARD_KV_64_T
#define BACKWARD_KV_64_T 2
#endif
#ifndef BACKWARD_STEP
#define BACKWARD_STEP 32
#endif

#define FLASH_OPERANDS {q, k, v, dout, lse, dots, q_row, kv_row, seq, heads, group, first_kv, head_dim, scale, firsts, keys, first_query, rows, window}

#undef MOST_THREADS
#define MOST_THREADS TEAM_OF<FLASH_ROWS, 2>
KERNEL flash_backward_q_64(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, const FlashElement* dout, const float* lse, const float* dots,
                           FlashElement* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window) {
    flash_backward_q<OPERAND_TYPE, 64, FLASH_ROWS, BACKWARD_STEP, 2, 1, true>(FLASH_OPERANDS, dq, dq_row, KeepsAll{});
}

#undef MOST_THREADS
#define MOST_THREADS TEAM_OF<FLASH_ROWS, 2>
KERNEL flash_backward_q_128(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, const FlashElement* dout, const float* lse, const float* dots,
                            FlashElement* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window) {
    flash_backward_q<OPERAND_TYPE, 128, FLASH_ROWS, BACKWARD_STEP, 2, 1, false>(FLASH_OPERANDS, dq, dq_row, KeepsAll{});
}

#undef MOST_THREADS
#define MOST_THREADS THREADS
KERNEL flash_backward_q_256(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, const FlashElement* dout, const float* lse, const float* dots,
                            FlashElement* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window) {
    flash_backward_q<OPERAND_TYPE, 256, FLASH_ROWS / BACKWARD_Q_256_SHARE, 16, 1, BACKWARD_Q_256_SHARE, false>(FLASH_OPERANDS, dq, dq_row, KeepsAll{});
}

#undef MOST_THREADS
#define MOST_THREADS TEAM_OF<FLASH_ROWS, BACKWARD_KV_64_T>
KERNEL flash_backward_kv_64(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, const FlashElement* dout, const float* lse,
                            const float* dots, FlashElement* dk, FlashElement* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                            float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window) {
    flash_backward_kv<OPERAND_TYPE, 64, FLASH_ROWS, BACKWARD_STEP, BACKWARD_KV_64_T, 1>(FLASH_OPERANDS, dk, dv, dkv_row, KeepsAll{});
}

#undef MOST_THREADS
#define MOST_THREADS THREADS
KERNEL flash_backward_kv_128(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, const FlashElement* dout, const float* lse,
                             const float* dots, FlashElement* dk, FlashElement* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                             float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window) {
    flash_backward_kv<OPERAND_TYPE, 128, FLASH_ROWS, BACKWARD_STEP, 2, 2>(FLASH_OPERANDS, dk, dv, dkv_row, KeepsAll{});
}

KERNEL flash_backward_kv_256(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, const FlashElement* dout, const float* lse,
                             const float* dots, FlashElement* dk, FlashElement* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                             float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window) {
    flash_backward_kv<OPERAND_TYPE, 256, 64, 16, 1, 2>(FLASH_OPERANDS, dk, dv, dkv_row, KeepsAll{});
}

#undef MOST_THREADS
#define MOST_THREADS TEAM_OF<FLASH_ROWS, 2>
KERNEL flash_dropout_backward_q_64(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, const FlashElement* dout, const float* lse, const float* dots,
                           FlashElement* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                   float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    flash_backward_q<OPERAND_TYPE, 64, FLASH_ROWS, BACKWARD_STEP, 2, 1, false>(FLASH_OPERANDS, dq, dq_row, FLASH_DROPS);
}

#undef MOST_THREADS
#define MOST_THREADS THREADS
KERNEL flash_dropout_backward_q_128(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, const FlashElement* dout, const float* lse, const float* dots,
                            FlashElement* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                    float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    flash_backward_q<OPERAND_TYPE, 128, FLASH_ROWS, BACKWARD_STEP, 1, 1, false>(FLASH_OPERANDS, dq, dq_row, FLASH_DROPS);
}

KERNEL flash_dropout_backward_q_256(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, const FlashElement* dout, const float* lse, const float* dots,
                            FlashElement* dq, i64 dq_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                    float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    flash_backward_q<OPERAND_TYPE, 256, 64, 16, 1, 2, false>(FLASH_OPERANDS, dq, dq_row, FLASH_DROPS);
}

KERNEL flash_dropout_backward_kv_64(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, const FlashElement* dout, const float* lse,
                            const float* dots, FlashElement* dk, FlashElement* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                            float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                    float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    flash_backward_kv<OPERAND_TYPE, 64, FLASH_ROWS, BACKWARD_STEP, 1, 1>(FLASH_OPERANDS, dk, dv, dkv_row, FLASH_DROPS);
}

KERNEL flash_dropout_backward_kv_128(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, const FlashElement* dout, const float* lse,
                             const float* dots, FlashElement* dk, FlashElement* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                             float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                     float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    flash_backward_kv<OPERAND_TYPE, 128, FLASH_ROWS, 16, 1, 1>(FLASH_OPERANDS, dk, dv, dkv_row, FLASH_DROPS);
}

KERNEL flash_dropout_backward_kv_256(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, const FlashElement* dout, const float* lse,
                             const float* dots, FlashElement* dk, FlashElement* dv, i64 dkv_row, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim,
                             float scale, const int* firsts,
                           i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                     float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    flash_backward_kv<OPERAND_TYPE, 256, 64, 16, 1, 2>(FLASH_OPERANDS, dk, dv, dkv_row, FLASH_DROPS);
}
