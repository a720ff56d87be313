// Causal self attention on tensor cores, forward, by the products of sm_90a, in which four warps multiply from shared memory: the equations of flash_forward.cu.
//
// Shapes    those of flash_forward.cu.
// Geometry  a block a head and 128 queries, 64 for each of 2 groups of four warps, over the keys by 128, from the first that a query sees to the diagonal.
//           While one group computes powers of two, the tensor cores have the other's products. Shared memory: a tile of queries and two of keys and
//           of values: 2 head_dim (128 + 4·128) bytes, 80 KiB for 64 and 160 KiB for 128. Copies are those of 16 bytes (cp.async): bulk copies of tiles
//           would take a tensor map for each operand, which launches do not have.
// Registers of a lane: O head_dim / 2, S 64, which the 32 of P replace: 96 and 128, then maxima, sums and addresses; 174 and 207 (kernels/report.md). One
//           block on an SM.
// Banks     panels in the 128-byte swizzle: no conflicts.
// Work      as flash_forward.cu; products read Q, K and V from shared memory once for 64 rows instead of 16, and no ldmatrix is left. On an
//           SM 2048 multiplications a clock: 64 × 128 × 16 of them take 64 clocks, in which the other group has time for 1024 powers of two, 8 for each lane.
// Bytes     those of flash_forward.cu.
// Bits      none are promised. Tests hold 1e-2 of the norm against f32.
#include "flash.cuh"
#include "warp_group.cuh"

#define GROUP_ROWS 64
#define GROUP_KEYS 128

template <int DIM>
DEVICE void flash_forward_of_groups(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, u16* out, float* lse, i64 seq, i64 heads,
                                    i64 group, i64 first_kv, int head_dim, float scale, const int* firsts) {
    constexpr int PAIR = FLASH_ROWS * DIM, VALUES = GROUP_KEYS * DIM, PAIRS = 2 * GROUP_KEYS * DIM;  // places and sizes of tiles
    TILES(tiles, FLASH_ROWS * DIM + 4 * GROUP_KEYS * DIM);
    Head head = head_of(heads, group, first_kv);
    int tokens = static_cast<int>(seq), first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * FLASH_ROWS, end = smaller(tokens, first + FLASH_ROWS);
    const u16* q_head = q + head.sample * seq * q_row + head.head * head_dim;
    const u16* k_head = k + head.sample * seq * kv_row + head.kv_head * head_dim;
    const u16* v_head = v + head.sample * seq * kv_row + head.kv_head * head_dim;
    int group_row = static_cast<int>(threadIdx.x) / (THREADS / 2) * GROUP_ROWS, lane = lane_of_warp();
    Documents documents = documents_of(firsts, head, seq);
    QueryPair rows = query_pair(documents, first + static_cast<int>(threadIdx.x) / WARP * 16 + lane / 4, tokens);
    int begin = documents.of(first) / GROUP_KEYS * GROUP_KEYS;

    copy_panels<FLASH_ROWS, DIM>(tiles, 0, q_head, q_row, first, tokens, head_dim);
    copy_panels<GROUP_KEYS, DIM>(tiles, PAIR, k_head, kv_row, begin, tokens, head_dim);
    copy_panels<GROUP_KEYS, DIM>(tiles, PAIR + VALUES, v_head, kv_row, begin, tokens, head_dim);
    copy_commit();
    OnlineSoftmax softmax = {-INFINITE, -INFINITE, 0.0f, 0.0f};
    float o[DIM / 8][4];
    clear(o);
    int stage = 0;
    for (int keys = begin; keys < end; keys += GROUP_KEYS) {
        copy_wait<0>();
        copies_are_shown();
        __syncthreads();  // these keys are here, and those before them are read
        int pair = PAIR + stage * PAIRS;
        stage = 1 - stage;
        if (keys + GROUP_KEYS < end) {
            copy_panels<GROUP_KEYS, DIM>(tiles, PAIR + stage * PAIRS, k_head, kv_row, keys + GROUP_KEYS, tokens, head_dim);
            copy_panels<GROUP_KEYS, DIM>(tiles, PAIR + stage * PAIRS + VALUES, v_head, kv_row, keys + GROUP_KEYS, tokens, head_dim);
            copy_commit();
        }
        if (keys > first + group_row + GROUP_ROWS - 1) continue;  // the last query of this group is before them

        float s[GROUP_KEYS / 8][4];
        warp_group_begin();
#pragma unroll
        for (int e = 0; e < DIM / 16; e++) {
            int panel = e / (PANEL / 16), column = e % (PANEL / 16) * 16;
            u64 a = descriptor(tiles, (panel * FLASH_ROWS + group_row) * PANEL + column, 0);
            u64 b = descriptor(tiles, pair + panel * GROUP_KEYS * PANEL + column, 0);
            warp_group_product(s, tiles, a, b, e > 0);
        }
        warp_group_commit();
        warp_group_wait<0>();
        if (firsts || keys + GROUP_KEYS > first + group_row + 1) mask(s, rows, keys, -INFINITE);
        online_softmax(softmax, s, o, scale * static_cast<float>(LOG2_E));
        u32 p[GROUP_KEYS / 16][4];
#pragma unroll
        for (int j = 0; j < GROUP_KEYS / 16; j++) as_operand(p[j], s[2 * j], s[2 * j + 1]);
        warp_group_begin();
#pragma unroll
        for (int j = 0; j < GROUP_KEYS / 16; j++) {
            u64 b = descriptor(tiles, pair + VALUES + 16 * j * PANEL, GROUP_KEYS * PANEL);
            warp_group_product_of(o, tiles, p[j], b, true);
        }
        warp_group_commit();
        warp_group_wait<0>();
    }
    store_outputs<DIM>(softmax, tiles, o, head, rows, out, lse, heads, first, tokens, head_dim, scale);
}

#define FLASH_FORWARD_OF_GROUPS(DIM) \
    flash_forward_of_groups<DIM>(q, q_row, k, v, kv_row, out, lse, seq, heads, group, first_kv, head_dim, scale, firsts)

KERNEL flash_forward_sm90_64(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, u16* out, float* lse, i64 seq, i64 heads, i64 group,
                             i64 first_kv, int head_dim, float scale, const int* firsts) {
    FLASH_FORWARD_OF_GROUPS(64);
}

KERNEL flash_forward_sm90_128(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, u16* out, float* lse, i64 seq, i64 heads, i64 group,
                              i64 first_kv, int head_dim, float scale, const int* firsts) {
    FLASH_FORWARD_OF_GROUPS(128);
}
