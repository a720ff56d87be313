// Causal self attention on tensor cores, forward, by the products of sm_90a, in which four warps multiply from shared
// memory: the equations of flash_forward.cu.
//
// Shapes    as in flash_forward.cu, but q, k and v are given by their maps (flash_maps.cu).
// Geometry  one block per head and 128 queries, 64 for each of 2 groups of four warps, over the keys by STEP = 128 of
//           64 features and 64 of 128, from the first visible key to the diagonal. The tensor cores compute a group's
//           scores of the next keys while it computes powers of two, and the products of the other group. One thread
//           copies tiles (bulk_copy.cuh), keys and values STAGES - 1 = 2 tiles ahead, because the next keys are read
//           with these values: for a head of 64, copying a tile of 32 KiB of keys and values takes 1400 clocks at an
//           SM's share of an H100's L2 (some 5.5 TB/s, 24 bytes per clock), its products 2 · 2 · 128 · 128 · 64 / 4096 =
//           1024 and its powers of two 128 · 128 / 16 = 1024; of 128 features all but the powers double. Shared memory:
//           a tile of queries and STAGES of keys and of values, and barriers: 2 head_dim (128 + 2·3·STEP) + 32 bytes, 112
//           KiB for 64 and 128 KiB for 128, of 227.
// Registers of a lane: O head_dim / 2, S and the next S each STEP / 2, P STEP / 4: 192 and 144, then maxima, sums and
//           descriptors; 254 and 206 (kernels/report.md). With 128 keys at 128 features they would be 224 and 255, and
//           12 bytes would spill. 256 threads of more than 128 registers: one block on an SM.
// Banks     panels in the 128-byte swizzle, which the copies write: no conflicts.
// Work      as flash_forward.cu; products read Q, K and V from shared memory once for 64 rows instead of 16, and
//           without instructions for ldmatrix or copies. An SM does 2048 multiplications per clock: 64 × 128 × 16 of
//           them take 64 clocks, in which the other group has time for 1024 powers of two, 8 for each lane.
// Bytes     as in flash_forward.cu.
// Bits      not the CPU's. Tests hold 1e-2 of the norm against f32.
#include "flash_sm90.cuh"

template <int DIM, int STEP, int STAGES>
DEVICE void flash_forward_of_groups(const FlashMaps& maps, u16* out, float* lse, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale,
                                    const int* firsts, i64 keys_in_memory, i64 past, i64 in_memory, i64 window) {
    constexpr int PAIRS = FLASH_ROWS * DIM, VALUES = STEP * DIM, BARRIERS = PAIRS + 2 * STAGES * STEP * DIM;
    using Pairs = Ring<STEP, DIM, STAGES>;
    TILES(tiles, BARRIERS + Pairs::BARRIERS);
    HeadOfBlock head = head_of_block(heads, group, first_kv);
    int count = static_cast<int>(seq), first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * FLASH_ROWS;
    Tokens tokens = {static_cast<int>(past), static_cast<int>(keys_in_memory)};
    int end = tokens.end_of_keys(smaller(count, first + FLASH_ROWS));
    int sample = static_cast<int>(head.sample), group_row = static_cast<int>(threadIdx.x) / (THREADS / 2) * GROUP_ROWS;
    Seen sees = seen_of_sample(firsts, head.sample, keys_in_memory, window);
    int own = first + static_cast<int>(threadIdx.x) / WARP * 16 + lane_of_warp() / 4;  // the first row of this lane
    int begin = tokens.first_tile<STEP>(sees, first, end), of_group = tokens.past + first + group_row;
    bool leads = threadIdx.x == 0, hides = firsts || window < past + seq;

    Pairs ring = {PAIRS, BARRIERS, maps.k, maps.v};
    TileOf of = {static_cast<int>(head.kv_head), sample};
    if (leads) {
        ring.begin(tiles, {maps.q}, {static_cast<int>(head.head), sample}, first);
        for (int n = 0; n < STAGES - 1 && begin + n * STEP < end; n++) ring.copy(tiles, n, of, begin + n * STEP);
    }
    __syncthreads();  // the barriers are visible to all threads
    wait_for_bytes(tiles, ring.own_barrier(), 0);
    OnlineSoftmax softmax[1] = {{-INFINITE, -INFINITE, 0.0f, 0.0f}};
    float o[1][DIM / 8][4], s[STEP / 8][4];
    clear(o);
    wait_for_bytes(tiles, ring.barrier(0), ring.parity(0));
    warp_group_begin();
    multiply_groups<DIM, FLASH_ROWS>(s, tiles, 0, group_row, ring.place(0));
    warp_group_commit();
    warp_group_wait<0>();
    for (int n = 0, keys = begin; keys < end; n++, keys += STEP) {
        __syncthreads();  // the previous keys have been read
        int ahead = keys + (STAGES - 1) * STEP;
        if (leads && ahead < end) ring.copy(tiles, n + STAGES - 1, of, ahead);
        if (keys > of_group + GROUP_ROWS - 1) continue;  // the last query of this group precedes them

        // The tensor cores compute the next scores while this group computes powers.
        float next[STEP / 8][4];
        bool more = keys + STEP < smaller(end, of_group + GROUP_ROWS);
        if (more) {
            wait_for_bytes(tiles, ring.barrier(n + 1), ring.parity(n + 1));
            warp_group_begin();
            multiply_groups<DIM, FLASH_ROWS>(next, tiles, 0, group_row, ring.place(n + 1));
            warp_group_commit();
        }
        if (hides || keys + STEP > smaller(of_group + 1, tokens.keys)) mask(s, query_pair(sees, tokens, own, count), keys, -INFINITE);
        online_softmax(softmax[0], s, o[0], scale * static_cast<float>(LOG2_E));
        u32 p[STEP / 16][4];
        as_operands<Bf16Type>(p, s);
        warp_group_begin();
        add_groups(o[0], tiles, p, ring.place(n) + VALUES);
        warp_group_commit();
        warp_group_wait<0>();
        if (!more) continue;
#pragma unroll
        for (int j = 0; j < STEP / 8; j++) {
#pragma unroll
            for (int c = 0; c < 4; c++) s[j][c] = next[j][c];
        }
    }
    store_outputs<DIM, Bf16Type>(softmax, tiles, o, head, own, out, lse, heads, first, count, in_memory, head_dim, scale);
}

#define FLASH_FORWARD_OF_GROUPS(DIM, STEP) \
    flash_forward_of_groups<DIM, STEP, 3>(flash_maps_at(maps), out, lse, seq, heads, group, first_kv, head_dim, scale, firsts, keys, first_query, rows, window)

KERNEL flash_forward_sm90_64(const u64* maps, u16* out, float* lse, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale,
                             const int* firsts, i64 keys, i64 first_query, i64 rows, i64 window) {
    FLASH_FORWARD_OF_GROUPS(64, 128);
}

KERNEL flash_forward_sm90_128(const u64* maps, u16* out, float* lse, i64 seq, i64 heads, i64 group, i64 first_kv, int head_dim, float scale,
                              const int* firsts, i64 keys, i64 first_query, i64 rows, i64 window) {
    FLASH_FORWARD_OF_GROUPS(128, 64);
}
