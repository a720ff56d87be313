// Causal self attention on tensor cores, forward: operands of bf16, f16 or TF32, sums in f32, without the matrix of all
// pairs (FlashAttention-2, Dao, arXiv:2307.08691), heads of queries in groups that share keys and values (Ainslie et
// al., arXiv:2305.13245).
//
//   S = Q Kᵀ for first_query + i - window < j <= first_query + i,  m = max of the keys so far,  P = 2^((S - m) scale log₂e),  Σ P and O scaled by 2^((m_old - m) scale log₂e) as m grows,
//   O = P V / Σ P,  lse = m scale + ln Σ P
//
// Shapes    as in attention_forward.cu, with q, k, v and out of 16 bits: head_dim a multiple of 8 up to 64 (_64), 128
//           (_128) or 256 (_256), q_row and kv_row multiples of 8, q, k, v and out at multiples of 16 bytes. Kernels
//           with `dropout` in their names multiply P∘M by V, M the factors of attention_forward.cu. For TF32 q, k, v
//           and out are f32: queries are rounded once, keys, values and P∘M as products read them, out is not.
// Geometry  one block per head and 128 queries, from the first visible key to the diagonal. _64 and _128: 32 queries
//           for each of 4 warps, over the keys by 32; _256: 16 for each of 8, over the keys by 16. With dropout _128 has
//           16 for each of 8, over the keys by 64. The last queries have the most keys and are launched first. Shared
//           memory: a tile of queries and two of keys and of values, one of which is copied while the other is
//           multiplied: 2 head_dim (128 + 4·32) = 32 KiB, of 128 features 64 KiB, with dropout 2·128 (128 + 4·64) = 96
//           KiB, and of 256 features 2·256 (128 + 4·16) = 96 KiB. Of TF32 4 head_dim (128 + 4·32) = 64 KiB, of 128
//           features over the keys by 16 96 KiB, and of 256 features 192 KiB.
// Registers of a lane: of 32 queries O head_dim, S 32, and of _64 Q 32; of 16 O head_dim / 2 and S 32; operands of
//           products 12 and more in flight, then maxima, sums and addresses. _128 has none to spare: what is read once a
//           step is computed again (`here`). 8 warps on an SM (kernels/report.md), in two blocks of 4 or one of 8.
// Banks     tiles are laid out so that ldmatrix, copies and the output, which passes through the queries' tile, have no
//           conflicts: tensor_core.cuh.
// Work      2 seq² head_dim operations per head, half of 4 seq² head_dim, and seq² / 2 powers of two. An SM of an H100
//           does 4096 operations of bf16 and 16 powers of two per clock: a pair of _64 takes 4·64 / 4096 = 1/16 of a
//           clock of products and as much of powers, a pair of _128 twice the products. One ldmatrix of keys or values
//           feeds two products of 16 × 8 × 16 for each 16 rows of a warp. An H100 (132 SMs, 1.755 GHz): 2.2 µs for each
//           head of 4096 tokens of 64 features.
// Bytes     a head 2 head_dim (2 seq + seq² / 128) + 4 seq, keys and values from the L2 cache: 1/128 byte per
//           operation, which is not the limit.
// Bits      not the CPU's: the tensor cores decide the order of sums. Tests hold 1e-2 of the norm against f32, in f16
//           and in TF32, against the CPU's TF32, an eighth of it.
#include "flash.cuh"

// bf16, or another type where src/operands.rs compiles this file once more.
#ifndef OPERAND_TYPE
#define OPERAND_TYPE Bf16Type
#endif

using FlashElement = OPERAND_TYPE::Element;

// T: 16 rows of a warp. HELD: whether the queries stay in registers; otherwise each product reads them from shared
// memory. Drop: Drops or KeepsAll.
template <class Operand, int DIM, int STEP, int T, bool HELD, class Drop>
DEVICE void flash_forward(const typename Operand::Element* q, i64 q_row, const typename Operand::Element* k, const typename Operand::Element* v, i64 kv_row,
                          typename Operand::Element* out, float* lse, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys_in_memory, i64 past, i64 in_memory, i64 window, const Drop& drops) {
    constexpr int WIDTH = WIDTH_OF<Operand, DIM>, PAIR = FLASH_ROWS * WIDTH, VALUES = STEP * WIDTH, PAIRS = 2 * STEP * WIDTH;  // places and sizes of tiles
    constexpr int TEAM = TEAM_OF<FLASH_ROWS, T>;
    TILES(tiles, FLASH_ROWS * WIDTH + 4 * STEP * WIDTH);
    HeadOfBlock head = head_of_block(heads, group, first_kv);
    int count = static_cast<int>(seq), first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * FLASH_ROWS;
    Tokens tokens = {static_cast<int>(past), static_cast<int>(keys_in_memory)};
    int end = tokens.end_of_keys(smaller(count, first + FLASH_ROWS));
    const auto* q_head = q + head.sample * in_memory * q_row + head.head * head_dim;
    i64 kv_at = head.sample * keys_in_memory * kv_row + head.kv_head * head_dim;
    int warp_row = static_cast<int>(threadIdx.x) / WARP * 16 * T;
    Seen sees = seen_of_sample(firsts, head.sample, keys_in_memory, window);
    int own = first + warp_row + lane_of_warp() / 4;  // the first row of this lane
    int begin = tokens.first_tile<STEP>(sees, first, end), of_warp = tokens.past + first + warp_row;
    bool hides = firsts || window < past + seq;

    copy_rows<FLASH_ROWS, WIDTH, TEAM>(thread_here(), tiles, 0, q_head, q_row, first, count, head_dim);
    copy_pairs<STEP, WIDTH, TEAM>(thread_here(), tiles, PAIR, k, v, kv_at, kv_row, begin, tokens.keys, head_dim);
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
    } else if (IS_TF32<Operand>) {
        copy_wait<0>();
        round_rows<Operand, FLASH_ROWS, WIDTH, TEAM>(thread_here(), tiles, 0);
    }
    OnlineSoftmax softmax[T];
#pragma unroll
    for (int t = 0; t < T; t++) softmax[t] = {-INFINITE, -INFINITE, 0.0f, 0.0f};
    float o[T][DIM / 8][4];
    clear(o);
    int stage = 0;
    for (int keys = begin; keys < end; keys += STEP) {
        copy_wait<0>();
        __syncthreads();  // these keys have arrived, and the previous keys have been read
        int pair = PAIR + stage * PAIRS;
        stage = 1 - stage;
        if (keys + STEP < end) {
            copy_pairs<STEP, WIDTH, TEAM>(thread_here(), tiles, PAIR + stage * PAIRS, k, v, kv_at, kv_row, keys + STEP, tokens.keys, head_dim);
            copy_commit();
        }
        if (keys > of_warp + 16 * T - 1) continue;  // the last query of this warp precedes them

        float s[T][STEP / 8][4];
        clear(s);
        if (HELD) add_product<WIDTH, Operand>(s, held, tiles, pair);
        else add_product<WIDTH, Operand>(s, tiles, 0, warp_row, pair);
        if (hides || keys + STEP > smaller(of_warp + 1, tokens.keys)) {
#pragma unroll
            for (int t = 0; t < T; t++) {
                Seen again = seen_of_sample(firsts, here(head.sample), keys_in_memory, window);  // not kept in registers
                mask(s[t], query_pair(again, tokens, here(own) + 16 * t, count), keys, -INFINITE);
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            online_softmax(softmax[t], s[t], o[t], scale * static_cast<float>(LOG2_E));
            drop(s[t], drops.of(head.sample, head.head), tokens.past + own + 16 * t, keys);
        }
        add_product_of<WIDTH, Operand>(o, s, tiles, pair + VALUES);
    }
    int sample = here(head.sample);  // of the head nothing else is kept in registers
    HeadOfBlock written = {sample, static_cast<int>(blockIdx.x) - sample * static_cast<int>(heads), 0};
    store_outputs<DIM, Operand>(softmax, tiles, o, written, own, out, lse, heads, first, count, in_memory, head_dim, scale);
}

#define FLASH_FORWARD(DIM, STEP, T, HELD, ...) \
    flash_forward<OPERAND_TYPE, DIM, STEP, T, HELD>(q, q_row, k, v, kv_row, out, lse, seq, heads, group, first_kv, head_dim, scale, firsts, keys, \
                                              first_query, rows, window, __VA_ARGS__)

// Overridden by src/variants.rs and src/operands.rs: keys of a tile, 16 rows of a warp.
#ifndef FORWARD_64_KEYS
#define FORWARD_64_KEYS 32
#endif
#ifndef FORWARD_64_T
#define FORWARD_64_T 2
#endif
#ifndef FORWARD_64_HELD
#define FORWARD_64_HELD 1
#endif
#ifndef FORWARD_128_KEYS
#define FORWARD_128_KEYS 32
#endif
#ifndef FORWARD_128_T
#define FORWARD_128_T 2
#endif
#ifndef DROPOUT_FORWARD_128_KEYS
#define DROPOUT_FORWARD_128_KEYS 64
#endif

#undef RESIDENT
#define RESIDENT 2
#undef MOST_THREADS
#define MOST_THREADS TEAM_OF<FLASH_ROWS, FORWARD_64_T>
KERNEL flash_forward_64(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, FlashElement* out, float* lse, i64 seq, i64 heads, i64 group,
                        i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys, i64 first_query, i64 rows, i64 window) {
    FLASH_FORWARD(64, FORWARD_64_KEYS, FORWARD_64_T, FORWARD_64_HELD, KeepsAll{});
}

#undef RESIDENT
#define RESIDENT 1
#undef MOST_THREADS
#define MOST_THREADS TEAM_OF<FLASH_ROWS, FORWARD_128_T>
KERNEL flash_forward_128(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, FlashElement* out, float* lse, i64 seq, i64 heads, i64 group,
                         i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys, i64 first_query, i64 rows, i64 window) {
    FLASH_FORWARD(128, FORWARD_128_KEYS, FORWARD_128_T, false, KeepsAll{});
}

#undef MOST_THREADS
#define MOST_THREADS THREADS
KERNEL flash_forward_256(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, FlashElement* out, float* lse, i64 seq, i64 heads, i64 group,
                         i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys, i64 first_query, i64 rows, i64 window) {
    FLASH_FORWARD(256, 16, 1, false, KeepsAll{});
}

#undef MOST_THREADS
#define MOST_THREADS TEAM_OF<FLASH_ROWS, 2>
KERNEL flash_dropout_forward_64(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, FlashElement* out, float* lse, i64 seq, i64 heads, i64 group,
                        i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    FLASH_FORWARD(64, 32, 2, true, FLASH_DROPS);
}

#undef MOST_THREADS
#define MOST_THREADS THREADS
KERNEL flash_dropout_forward_128(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, FlashElement* out, float* lse, i64 seq, i64 heads, i64 group,
                         i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                 float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    FLASH_FORWARD(128, DROPOUT_FORWARD_128_KEYS, 1, false, FLASH_DROPS);
}

KERNEL flash_dropout_forward_256(const FlashElement* q, i64 q_row, const FlashElement* k, const FlashElement* v, i64 kv_row, FlashElement* out, float* lse, i64 seq, i64 heads, i64 group,
                         i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys, i64 first_query, i64 rows, i64 window, u32 key0, u32 key1, float p,
                                 float kept, i64 first_sample, i64 first_head, i64 global_heads, i64 first_key, i64 sequence) {
    FLASH_FORWARD(256, 16, 1, false, FLASH_DROPS);
}
