// Update rules on many vectors at once: AdamW (Loshchilov and Hutter, arXiv:1711.05101) and SGD with and without
// momentum.
//
//   AdamW  g = grad_scale grad,  m += (1 - β₁)(g - m),  v = β₂ v + (1 - β₂) g²,  w = w (1 - lr decay) - lr/(1 - β₁ᵗ) m / (√v / √(1 - β₂ᵗ) + ε)
//   SGD    b = momentum b + (grad_scale grad + decay w),  w -= lr b
//
// Shapes    weights, grads, states: [vectors] addresses of f32; counts their elements, starts the first block of each,
//           then the number of blocks (vectors.cuh). Scalars are the same for all vectors, computed on the host in f64
//           and rounded once (crates/optim/src/adamw.rs, sgd.rs).
// Geometry  one block per 1024 neighbours of one vector, one thread per four of them, by 16 bytes (neighbours.cuh).
//           `items` are 1024 for each block.
// Launches  one for all parameters with the same rule and factors: two for GPT-2, with and without weight decay.
// Bytes     AdamW 16 read, 12 written per element; SGD 8 and 4; with momentum 12 and 8; and a few words of the table
//           per block, from the cache.
// Bits      as on the CPU: crates/optim/src/adamw.rs, crates/optim/src/sgd.rs.
#include "neighbours.cuh"
#include "vectors.cuh"

using Four = Vector<float, FOUR>;

// The elements of a thread: their vector, and the first of them.
struct Own {
    i64 vector, at, count;
};

DEVICE Own own_of(const i64* starts, const i64* counts, i64 vectors) {
    Piece piece = piece_of(starts, vectors, blockIdx.x);
    return Own{piece.vector, (piece.number * THREADS + threadIdx.x) * FOUR, counts[piece.vector]};
}

// keep = 1 - lr decay, lr_hat = lr / (1 - β₁ᵗ), root_hat = √(1 - β₂ᵗ), mean_new = 1 - β₁, square_old = β₂, square_new =
// 1 - β₂.
KERNEL adamw(float* const* weights, const float* const* grads, float* const* mean, float* const* square, const i64* starts, const i64* counts,
             i64 vectors, float grad_scale, float keep, float lr_hat, float root_hat, float mean_new, float square_old, float square_new,
             float eps) {
    auto [vector, at, count] = own_of(starts, counts, vectors);
    if (at >= count) return;
    float *of_w = weights[vector], *of_m = mean[vector], *of_v = square[vector];
    Four w = load_vector<FOUR>(of_w, at, count), g = load_vector<FOUR>(grads[vector], at, count), m = load_vector<FOUR>(of_m, at, count), v = load_vector<FOUR>(of_v, at, count);
#pragma unroll
    for (int j = 0; j < FOUR; j++) {
        float scaled = grad_scale * g.of[j];
        m.of[j] += mean_new * (scaled - m.of[j]);
        v.of[j] = square_old * v.of[j] + square_new * (scaled * scaled);
        w.of[j] = w.of[j] * keep - lr_hat * (m.of[j] / (sqrtf(v.of[j]) / root_hat + eps));
    }
    store_vector(of_m, at, count, m);
    store_vector(of_v, at, count, v);
    store_vector(of_w, at, count, w);
}

KERNEL sgd(float* const* weights, const float* const* grads, const i64* starts, const i64* counts, i64 vectors, float grad_scale, float decay,
           float lr) {
    auto [vector, at, count] = own_of(starts, counts, vectors);
    if (at >= count) return;
    float* of_w = weights[vector];
    Four w = load_vector<FOUR>(of_w, at, count), g = load_vector<FOUR>(grads[vector], at, count);
#pragma unroll
    for (int j = 0; j < FOUR; j++) w.of[j] = w.of[j] - lr * (grad_scale * g.of[j] + decay * w.of[j]);
    store_vector(of_w, at, count, w);
}

KERNEL sgd_momentum(float* const* weights, const float* const* grads, float* const* buffer, const i64* starts, const i64* counts, i64 vectors,
                    float grad_scale, float decay, float lr, float momentum) {
    auto [vector, at, count] = own_of(starts, counts, vectors);
    if (at >= count) return;
    float *of_w = weights[vector], *of_b = buffer[vector];
    Four w = load_vector<FOUR>(of_w, at, count), g = load_vector<FOUR>(grads[vector], at, count), b = load_vector<FOUR>(of_b, at, count);
#pragma unroll
    for (int j = 0; j < FOUR; j++) {
        b.of[j] = momentum * b.of[j] + (grad_scale * g.of[j] + decay * w.of[j]);
        w.of[j] = w.of[j] - lr * b.of[j];
    }
    store_vector(of_b, at, count, b);
    store_vector(of_w, at, count, w);
}
