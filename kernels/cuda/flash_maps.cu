// The maps of the operands of flash attention for sm_90a (bulk_copy.cuh), written before the kernels that copy by them.
//
// Shapes    q [batch, seq, heads, head_dim], tokens q_row and samples `rows` tokens apart; k and v [batch, keys,
//           kv_heads, head_dim], tokens kv_row apart; dout like q, its tokens contiguous, or null; maps [4, 16] words
//           at a multiple of 64 bytes: of q, k, v and dout. Addresses at multiples of 16 bytes, rows of multiples of 8 elements.
// Geometry  one warp, one lane per operand.
// Bytes     128 for each operand.
// Bits      the hardware's format for maps, which only TMA reads.
#include "bulk_copy.cuh"

KERNEL flash_maps(const u16* q, i64 q_row, const u16* k, const u16* v, i64 kv_row, const u16* dout, u64* maps, i64 batch, i64 seq, i64 heads,
                  i64 kv_heads, int head_dim, i64 keys, i64 rows) {
    int operand = static_cast<int>(threadIdx.x);
    const u16* from = operand == 0 ? q : operand == 1 ? k : operand == 2 ? v : dout;
    if (operand > 3 || !from) return;
    bool of_queries = operand == 0 || operand == 3;
    i64 row = operand == 0 ? q_row : of_queries ? heads * head_dim : kv_row;
    write_map(maps + operand * MAP_WORDS, from, batch, of_queries ? seq : keys, of_queries ? heads : kv_heads, head_dim, row, (of_queries ? rows : keys) * row);
}
