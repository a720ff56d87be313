// Causal self attention on tensor cores, backward, by the products of sm_90a: the equations of flash_backward.cu, whose
// `flash_dots` gives D.
//
// Shapes    as in flash_backward.cu, but q, k, v and dout are given by their maps (flash_maps.cu).
// Geometry  as flash_forward_sm90.cu: one block per head and 128 rows, 64 for each of 2 groups of four warps, tiles
//           copied one tile ahead by one thread. dQ: over the keys by STEP, 128 (_64) or 64 (_128). dK and dV: one
//           block per head of keys and 128 keys, over the heads of its group and their queries by 64; they use Sᵀ = K
//           Qᵀ, so that results of products serve directly as the operands Pᵀ and dSᵀ in registers, and only final
//           results pass through shared memory. 64 threads read lse and D of the next 64 queries while a tile is
//           multiplied, into two buffers in turn. Two kernels with 7 products instead of 5, because sums of dQ over
//           blocks of keys would need atomics, whose order differs from run to run. Shared memory: 2 head_dim (256 + 4
//           STEP) bytes of tiles, dQ 96 and 128 KiB, dK and dV 64 and 128 KiB; 1 KiB of numbers; barriers.
// Registers of a lane: dQ head_dim / 2, S and dP STEP: 160 and 128; dK and dV head_dim, Sᵀ and dPᵀ 64, as operands 32
//           more: 160 and 224; then descriptors and numbers of rows. 205 and 188, 225 and 255 (kernels/report.md): one
//           block on an SM, 8 warps, nothing spilled.
// Banks     panels in the 128-byte swizzle, which the copies write, and 8 lanes read each number of a column: no
//           conflicts.
// Work      dQ 3 seq² head_dim, dK and dV 4 seq² head_dim operations per head, one power of two per pair in both. An SM
//           does 4096 operations and 16 powers per clock: a pair of 64 features takes 14·64 / 4096 = 0.22 clocks of
//           products and 2 / 16 of powers of two, of 128 twice the products. A product of 64 × 64 × 16 takes 32 clocks
//           and reads 4 KiB, 32 clocks of shared memory; with the left operand in registers, or of 128 columns, less:
//           only Sᵀ and dPᵀ of 64 queries are limited by shared memory.
// Bytes     as in flash_backward.cu.
// Bits      not the CPU's, but deterministic from run to run. Tests hold 1e-2 of the norm against f32.
#include "flash_sm90.cuh"

template <int DIM, int STEP, int STAGES>
DEVICE void flash_backward_q_of_groups(const FlashMaps& maps, const float* lse, const float* dots, u16* dq, i64 dq_row, i64 seq, i64 heads, i64 group,
                                       i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys_in_memory, i64 past,
                                       i64 in_memory, i64 window) {
    constexpr int DOUT = FLASH_ROWS * DIM, PAIRS = 2 * FLASH_ROWS * DIM, VALUES = STEP * DIM;
    constexpr int BARRIERS = PAIRS + 2 * STAGES * STEP * DIM;
    using Pairs = Ring<STEP, DIM, STAGES>;
    TILES(tiles, BARRIERS + Pairs::BARRIERS);
    HeadOfBlock head = head_of_block(heads, group, first_kv);
    int count = static_cast<int>(seq), first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * FLASH_ROWS;
    Tokens tokens = {static_cast<int>(past), static_cast<int>(keys_in_memory)};
    int end = tokens.end_of_keys(smaller(count, first + FLASH_ROWS));
    int sample = static_cast<int>(head.sample), group_row = static_cast<int>(threadIdx.x) / (THREADS / 2) * GROUP_ROWS;
    int query = first + static_cast<int>(threadIdx.x) / WARP * 16 + lane_of_warp() / 4;
    i64 numbers = (head.sample * heads + head.head) * in_memory;
    Seen sees = seen_of_sample(firsts, head.sample, keys_in_memory, window);
    QueryPair rows = query_pair(sees, tokens, query, count);
    RowNumbers row = row_numbers(lse + numbers, dots + numbers, query, count - 1);
    int begin = tokens.first_tile<STEP>(sees, first, end), of_group = tokens.past + first + group_row;
    bool leads = threadIdx.x == 0, hides = firsts || window < past + seq;

    Pairs ring = {PAIRS, BARRIERS, maps.k, maps.v};
    TileOf of = {static_cast<int>(head.kv_head), sample};
    if (leads) {
        ring.begin(tiles, {maps.q, maps.dout}, {static_cast<int>(head.head), sample}, first);
        for (int n = 0; n < STAGES - 1 && begin + n * STEP < end; n++) ring.copy(tiles, n, of, begin + n * STEP);
    }
    __syncthreads();  // the barriers are visible to all threads
    wait_for_bytes(tiles, ring.own_barrier(), 0);
    float sum[DIM / 8][4];
    clear(sum);
    for (int n = 0, keys = begin; keys < end; n++, keys += STEP) {
        __syncthreads();  // the previous keys have been read
        int ahead = keys + (STAGES - 1) * STEP;
        if (leads && ahead < end) ring.copy(tiles, n + STAGES - 1, of, ahead);
        wait_for_bytes(tiles, ring.barrier(n), ring.parity(n));
        if (keys > of_group + GROUP_ROWS - 1) continue;  // the last query of this group precedes them

        float s[STEP / 8][4], dp[STEP / 8][4];
        warp_group_begin();
        multiply_groups<DIM, FLASH_ROWS>(s, tiles, 0, group_row, ring.place(n));
        multiply_groups<DIM, FLASH_ROWS>(dp, tiles, DOUT, group_row, ring.place(n) + VALUES);
        warp_group_commit();
        warp_group_wait<0>();
        score_gradients(s, dp, row, scale * static_cast<float>(LOG2_E));
        if (hides || keys + STEP > smaller(of_group + 1, tokens.keys)) mask(s, rows, keys, 0.0f);
        u32 ds[STEP / 16][4];
        as_operands<Bf16Type>(ds, s);
        warp_group_begin();
        add_groups(sum, tiles, ds, ring.place(n));
        warp_group_commit();
        warp_group_wait<0>();
    }
    u16* to = dq + head.sample * in_memory * dq_row + head.head * head_dim;
    store_rows<DIM, Bf16Type>(tiles, 0, sum, scale, scale, to, dq_row, first, count, head_dim);
}

// The numbers of STEP queries, which all groups of a block read: lse in powers of two, then D.
template <int STEP> struct ColumnNumbers {
    float lse, dot;

    // The numbers of this thread's query, from memory. For a query beyond the last, the probabilities must be 0.
    static DEVICE ColumnNumbers of(const float* lse, const float* dots, int from, int count) {
        int query = from + static_cast<int>(threadIdx.x);
        if (threadIdx.x >= STEP || query >= count) return {INFINITE, 0.0f};
        return {lse[query] * static_cast<float>(LOG2_E), dots[query]};
    }

    DEVICE void write(Tiles tiles, int at) const {
        if (threadIdx.x >= STEP) return;
        write_word(tiles, at + 2 * static_cast<int>(threadIdx.x), __float_as_uint(lse));
        write_word(tiles, at + 2 * (STEP + static_cast<int>(threadIdx.x)), __float_as_uint(dot));
    }
};

DEVICE float number(Tiles tiles, int at, int column) { return __uint_as_float(read_word(tiles, at + 2 * column)); }

// Writes zeros where a query (columns from `from` on) does not see a lane's keys, `key` and `key + 8`.
template <int N> DEVICE void mask_of_keys(float (&p)[N][4], const Seen& sees, const Tokens& tokens, int from, int key, int count) {
#pragma unroll
    for (int j = 0; j < N; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int row = from + 8 * j + lane_of_warp() % 4 * 2 + c, query = tokens.past + row;
            int own = sees.from(tokens.past + lesser(row, count - 1));
            if (query < key || key < own) p[j][c] = 0.0f;
            if (query < key + 8 || key + 8 < own) p[j][2 + c] = 0.0f;
        }
    }
}

template <int DIM, int STEP, int STAGES>
DEVICE void flash_backward_kv_of_groups(const FlashMaps& maps, const float* lse, const float* dots, u16* dk, u16* dv, i64 dkv_row, i64 seq, i64 heads,
                                        i64 group, i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys_in_memory, i64 past,
                                        i64 in_memory, i64 window) {
    constexpr int VALUES = FLASH_ROWS * DIM, PAIRS = 2 * FLASH_ROWS * DIM, DOUT = STEP * DIM, NUMBERS = PAIRS + 2 * STAGES * STEP * DIM;
    constexpr int OF_STAGE = 4 * STEP, BARRIERS = NUMBERS + 2 * OF_STAGE;
    using Pairs = Ring<STEP, DIM, STAGES>;
    TILES(tiles, BARRIERS + Pairs::BARRIERS);
    i64 groups = heads / group, own_head = blockIdx.x % groups;
    int sample = static_cast<int>(blockIdx.x / groups), row_count = static_cast<int>(seq), first = static_cast<int>(blockIdx.y) * FLASH_ROWS;
    Tokens tokens = {static_cast<int>(past), static_cast<int>(keys_in_memory)};
    int group_row = static_cast<int>(threadIdx.x) / (THREADS / 2) * GROUP_ROWS;
    int key = first + static_cast<int>(threadIdx.x) / WARP * 16 + lane_of_warp() / 4;
    Seen sees = {firsts ? firsts + sample * keys_in_memory : firsts, static_cast<int>(window)};
    float scale_2 = scale * static_cast<float>(LOG2_E);
    // Tile n of queries belongs to head n / each of the group.
    QueryRows seeing = queries_of<STEP>(sees, tokens, first, row_count);
    int each = (seeing.end - seeing.begin + STEP - 1) / STEP, count = static_cast<int>(group) * each;
    int head = static_cast<int>(own_head * group), kv_head = static_cast<int>(first_kv + own_head);
    bool leads = threadIdx.x == 0, hides = firsts || window < past + seq;

    Pairs ring = {PAIRS, BARRIERS, maps.q, maps.dout};
    if (leads) {
        ring.begin(tiles, {maps.k, maps.v}, {kv_head, sample}, first);
        for (int n = 0; n < STAGES - 1 && n < count; n++) ring.copy(tiles, n, {head + n / each, sample}, seeing.begin + n % each * STEP);
    }
    auto numbers_of = [&](int n) {
        i64 at = (static_cast<i64>(sample) * heads + head + n / each) * in_memory;
        return ColumnNumbers<STEP>::of(lse + at, dots + at, seeing.begin + n % each * STEP, row_count);
    };
    numbers_of(0).write(tiles, NUMBERS);
    __syncthreads();  // the barriers are visible to all threads
    wait_for_bytes(tiles, ring.own_barrier(), 0);
    float k_sum[DIM / 8][4], v_sum[DIM / 8][4];
    clear(k_sum), clear(v_sum);
    for (int n = 0; n < count; n++) {
        __syncthreads();  // the previous queries have been read, and the numbers of these are written
        int ahead = n + STAGES - 1, from = seeing.begin + n % each * STEP, numbers = NUMBERS + n % 2 * OF_STAGE;
        if (leads && ahead < count) ring.copy(tiles, ahead, {head + ahead / each, sample}, seeing.begin + ahead % each * STEP);
        ColumnNumbers<STEP> next = numbers_of(smaller(n + 1, count - 1));  // loaded while this tile is multiplied
        wait_for_bytes(tiles, ring.barrier(n), ring.parity(n));
        if (tokens.past + from + STEP > first + group_row) {  // else they all precede the first key of this group
            int queries = ring.place(n);
            float p[STEP / 8][4], dp[STEP / 8][4];
            warp_group_begin();
            multiply_groups<DIM, FLASH_ROWS>(p, tiles, 0, group_row, queries);
            warp_group_commit();
            warp_group_begin();
            multiply_groups<DIM, FLASH_ROWS>(dp, tiles, VALUES, group_row, queries + DOUT);
            warp_group_commit();
            warp_group_wait<1>();
#pragma unroll
            for (int j = 0; j < STEP / 8; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float of_query = number(tiles, numbers, 8 * j + lane_of_warp() % 4 * 2 + c);
                    p[j][c] = exp2_fast(fmaf(p[j][c], scale_2, -of_query)), p[j][2 + c] = exp2_fast(fmaf(p[j][2 + c], scale_2, -of_query));
                }
            }
            if (hides || tokens.past + from < first + group_row + GROUP_ROWS - 1) mask_of_keys(p, sees, tokens, from, key, row_count);
            u32 weights[STEP / 16][4], ds[STEP / 16][4];
            as_operands<Bf16Type>(weights, p);
            warp_group_wait<0>();
#pragma unroll
            for (int j = 0; j < STEP / 8; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float of_query = number(tiles, numbers + 2 * STEP, 8 * j + lane_of_warp() % 4 * 2 + c);
                    dp[j][c] = p[j][c] * (dp[j][c] - of_query), dp[j][2 + c] = p[j][2 + c] * (dp[j][2 + c] - of_query);
                }
            }
            as_operands<Bf16Type>(ds, dp);
            warp_group_begin();
            add_groups(v_sum, tiles, weights, queries + DOUT);
            add_groups(k_sum, tiles, ds, queries);
            warp_group_commit();
            warp_group_wait<0>();
        }
        next.write(tiles, NUMBERS + (n + 1) % 2 * OF_STAGE);
    }
    i64 to = sample * keys_in_memory * dkv_row + kv_head * head_dim;
    store_rows<DIM, Bf16Type>(tiles, 0, k_sum, scale, scale, dk + to, dkv_row, first, tokens.keys, head_dim);
    store_rows<DIM, Bf16Type>(tiles, VALUES, v_sum, 1.0f, 1.0f, dv + to, dkv_row, first, tokens.keys, head_dim);
}

// Keys, or queries, of a tile, and pairs of tiles.
#ifndef BACKWARD_SM90_64_KEYS
#define BACKWARD_SM90_64_KEYS 128
#endif
#ifndef BACKWARD_SM90_128_KEYS
#define BACKWARD_SM90_128_KEYS 64
#endif
#ifndef BACKWARD_SM90_QUERIES
#define BACKWARD_SM90_QUERIES 64
#endif
#ifndef BACKWARD_SM90_STAGES
#define BACKWARD_SM90_STAGES 2
#endif

#define FLASH_BACKWARD_Q_OF_GROUPS(DIM, KEYS) \
    flash_backward_q_of_groups<DIM, KEYS, BACKWARD_SM90_STAGES>( \
        flash_maps_at(maps), lse, dots, dq, dq_row, seq, heads, group, first_kv, head_dim, scale, firsts, keys, first_query, rows, \
        window)

KERNEL flash_backward_sm90_q_64(const u64* maps, const float* lse, const float* dots, u16* dq, i64 dq_row, i64 seq, i64 heads, i64 group,
                                i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys, i64 first_query, i64 rows, i64 window) {
    FLASH_BACKWARD_Q_OF_GROUPS(64, BACKWARD_SM90_64_KEYS);
}

KERNEL flash_backward_sm90_q_128(const u64* maps, const float* lse, const float* dots, u16* dq, i64 dq_row, i64 seq, i64 heads, i64 group,
                                 i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys, i64 first_query, i64 rows, i64 window) {
    FLASH_BACKWARD_Q_OF_GROUPS(128, BACKWARD_SM90_128_KEYS);
}

#define FLASH_BACKWARD_KV_OF_GROUPS(DIM) \
    flash_backward_kv_of_groups<DIM, BACKWARD_SM90_QUERIES, BACKWARD_SM90_STAGES>( \
        flash_maps_at(maps), lse, dots, dk, dv, dkv_row, seq, heads, group, first_kv, head_dim, scale, firsts, keys, first_query, rows, \
        window)

KERNEL flash_backward_sm90_kv_64(const u64* maps, const float* lse, const float* dots, u16* dk, u16* dv, i64 dkv_row, i64 seq, i64 heads,
                                 i64 group, i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys, i64 first_query, i64 rows, i64 window) {
    FLASH_BACKWARD_KV_OF_GROUPS(64);
}

KERNEL flash_backward_sm90_kv_128(const u64* maps, const float* lse, const float* dots, u16* dk, u16* dv, i64 dkv_row, i64 seq, i64 heads,
                                  i64 group, i64 first_kv, int head_dim, float scale, const int* firsts, i64 keys, i64 first_query, i64 rows, i64 window) {
    FLASH_BACKWARD_KV_OF_GROUPS(128);
}
