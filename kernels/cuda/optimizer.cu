// Update rules on flat buffers: AdamW (Loshchilov and Hutter, arXiv:1711.05101) and SGD with and without momentum.
//
//   AdamW  g = grad_scale grad,  m += (1 - β₁)(g - m),  v = β₂ v + (1 - β₂) g²,  w = w (1 - lr decay) - lr/(1 - β₁ᵗ) m / (√v / √(1 - β₂ᵗ) + ε)
//   SGD    b = momentum b + (grad_scale grad + decay w),  w -= lr b
//
// Shapes    all [count]; scalars are computed on the host in f64 and rounded once (crates/optim/src/adamw.rs, sgd.rs).
// Geometry  a thread four elements, by 16 bytes (fours.cuh).
// Bytes     AdamW 16 read, 12 written an element; SGD 8 and 4; with momentum 12 and 8.
// Bits      those of the CPU: crates/optim/src/adamw.rs, crates/optim/src/sgd.rs.
#include "fours.cuh"

// keep = 1 - lr decay, lr_hat = lr / (1 - β₁ᵗ), root_hat = √(1 - β₂ᵗ), mean_new = 1 - β₁, square_old = β₂, square_new = 1 - β₂.
KERNEL adamw(float* weights, const float* grads, float* mean, float* square, float grad_scale, float keep, float lr_hat,
             float root_hat, float mean_new, float square_old, float square_new, float eps, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Four w = load_four(weights, at, count), g = load_four(grads, at, count), m = load_four(mean, at, count), v = load_four(square, at, count);
#pragma unroll
    for (int j = 0; j < FOUR; j++) {
        float scaled = grad_scale * g.of[j];
        m.of[j] += mean_new * (scaled - m.of[j]);
        v.of[j] = square_old * v.of[j] + square_new * (scaled * scaled);
        w.of[j] = w.of[j] * keep - lr_hat * (m.of[j] / (sqrtf(v.of[j]) / root_hat + eps));
    }
    store_four(mean, at, count, m);
    store_four(square, at, count, v);
    store_four(weights, at, count, w);
}

KERNEL sgd(float* weights, const float* grads, float grad_scale, float decay, float lr, i64 count) {
    join_fours(weights, grads, weights, count, [=](float w, float g) { return w - lr * (grad_scale * g + decay * w); });
}

KERNEL sgd_momentum(float* weights, const float* grads, float* buffer, float grad_scale, float decay, float lr, float momentum,
                    i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Four w = load_four(weights, at, count), g = load_four(grads, at, count), b = load_four(buffer, at, count);
#pragma unroll
    for (int j = 0; j < FOUR; j++) {
        b.of[j] = momentum * b.of[j] + (grad_scale * g.of[j] + decay * w.of[j]);
        w.of[j] = w.of[j] - lr * b.of[j];
    }
    store_four(buffer, at, count, b);
    store_four(weights, at, count, w);
}
