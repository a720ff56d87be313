// Attention of new tokens to the tokens in a cache and to each other, row by row, for generation.
//
//   S = (q · k) scale for the keys up to the query's own,  P = e^(S - max S),  out = Σ P v / Σ P
//
// Shapes    kv [batch, seq, 2, kv_heads, head_dim] of the new tokens; cache [batch, capacity, 2, kv_heads, head_dim],
//           with the first `past` tokens filled, their keys rotated; q, out [batch, seq, heads, head_dim], q rotated;
//           scores [batch, seq, heads, past + seq]; angles [positions, 2, head_dim/2].
// Geometry  append: one thread per element. Scores: half a warp per query, head and key. Weights: one warp per row.
//           Values: one thread per element of out, which loops over the keys.
// Bytes     keys and values once per head (heads of a group share the GPU's cache); scores written once and read three
//           times.
// Bits      as on the CPU: crates/cpu/src/kernels/attention/decode.rs. A score is summed in 16 lanes, not fused; totals
//           and outputs over the keys in order, the outputs fused. Heads have at most 1024 features.
#include "math.cuh"
#include "warp.cuh"

#define HALF 16

// Without angles, keys are copied unrotated.
KERNEL decode_append(const float* kv, const float* angles, float* cache, i64 count, i64 seq, i64 past, i64 capacity, i64 kv_heads,
                     i64 head_dim) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 row = 2 * kv_heads * head_dim, e = at % head_dim, token = at / row, i = token % seq, half = head_dim / 2;
    float value = kv[at];
    if (angles && at % row < kv_heads * head_dim) {
        const float* turn = angles + (past + i) * head_dim;
        float cos = turn[e % half], sin = turn[half + e % half];
        value = e < half ? value * cos - kv[at + half] * sin : value * cos + kv[at - half] * sin;
    }
    cache[(token / seq * capacity + past + i) * row + at % row] = value;
}

// Elements: 16 times the scores.
KERNEL decode_scores(const float* q, const float* cache, float* scores, i64 rows, i64 seq, i64 past, i64 capacity, i64 heads, i64 group,
                     i64 first_kv, i64 kv_heads, i64 head_dim, float scale) {
    i64 at = global_thread() / HALF, keys = past + seq;
    int lane = static_cast<int>(threadIdx.x) % HALF;
    i64 row = at / keys, key = at % keys, i = row / heads % seq;
    bool live = row < rows && key <= past + i;
    float sum = 0.0f;
    if (live) {
        i64 sample = row / heads / seq, head = first_kv + row % heads / group;
        const float* x = q + row * head_dim;
        const float* y = cache + ((sample * capacity + key) * 2 * kv_heads + head) * head_dim;
        for (i64 e = lane; e < head_dim; e += HALF) sum += x[e] * y[e];
    }
    for (int width = HALF / 2; width > 0; width /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, width);
    // The CPU adds blocks of 1024 features, here one, to a zero.
    if (live && lane == 0) scores[at] = (sum + 0.0f) * scale;
}

// Turns scores into weights that are not yet divided by their sum.
KERNEL decode_weights(float* scores, i64 rows, i64 seq, i64 past, i64 heads) {
    i64 row = global_thread() / WARP;
    if (row >= rows) return;
    i64 keys = past + row / heads % seq + 1;
    float* of = scores + row * (past + seq);
    float max = -INFINITE;
    for (i64 key = lane_of_warp(); key < keys; key += WARP) max = of[key] > max ? of[key] : max;
    for (int width = WARP / 2; width > 0; width /= 2) {
        float other = __shfl_xor_sync(FULL_WARP, max, width);
        max = max > other ? max : other;
    }
    for (i64 key = lane_of_warp(); key < keys; key += WARP) of[key] = exp_bits(of[key] - max);
}

KERNEL decode_values(const float* weights, const float* cache, float* out, i64 count, i64 seq, i64 past, i64 capacity, i64 heads, i64 group,
                     i64 first_kv, i64 kv_heads, i64 head_dim) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 e = at % head_dim, row = at / head_dim, sample = row / heads / seq, keys = past + row / heads % seq + 1;
    i64 head = kv_heads + first_kv + row % heads / group, next = 2 * kv_heads * head_dim;
    const float* value = cache + sample * capacity * next + head * head_dim + e;
    const float* weight = weights + row * (past + seq);
    float total = 0.0f, sum = 0.0f;
    for (i64 key = 0; key < keys; key++) {
        total += weight[key];
        sum = fmaf(weight[key], value[key * next], sum);
    }
    out[at] = sum * (1.0f / total);
}
