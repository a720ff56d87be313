// Update rules on flat buffers: AdamW (Loshchilov and Hutter, arXiv:1711.05101) and SGD with and without momentum.
//
//   AdamW  g = grad_scale grad,  m += (1 - β₁)(g - m),  v = β₂ v + (1 - β₂) g²,  w = w (1 - lr decay) - lr/(1 - β₁ᵗ) m / (√v / √(1 - β₂ᵗ) + ε)
//   SGD    b = momentum b + (grad_scale grad + decay w),  w -= lr b
//
// Shapes    all [count]; scalars are computed on the host in f64 and rounded once (crates/optim/src/adamw.rs, sgd.rs).
// Geometry  a thread an element.
// Bytes     AdamW 16 read, 12 written an element; SGD 8 and 4; with momentum 12 and 8.
// Bits      those of the CPU: crates/optim/src/adamw.rs, crates/optim/src/sgd.rs.
#include "meshwork.cuh"

// keep = 1 - lr decay, lr_hat = lr / (1 - β₁ᵗ), root_hat = √(1 - β₂ᵗ), mean_new = 1 - β₁, square_old = β₂, square_new = 1 - β₂.
KERNEL adamw(float* weights, const float* grads, float* mean, float* square, float grad_scale, float keep, float lr_hat,
             float root_hat, float mean_new, float square_old, float square_new, float eps, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    float g = grad_scale * grads[i], m = mean[i], v = square[i], w = weights[i];
    m += mean_new * (g - m);
    v = square_old * v + square_new * (g * g);
    mean[i] = m;
    square[i] = v;
    weights[i] = w * keep - lr_hat * (m / (sqrtf(v) / root_hat + eps));
}

KERNEL sgd(float* weights, const float* grads, float grad_scale, float decay, float lr, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    float w = weights[i];
    weights[i] = w - lr * (grad_scale * grads[i] + decay * w);
}

KERNEL sgd_momentum(float* weights, const float* grads, float* buffer, float grad_scale, float decay, float lr, float momentum,
                    i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    float w = weights[i], b = momentum * buffer[i] + (grad_scale * grads[i] + decay * w);
    buffer[i] = b;
    weights[i] = w - lr * b;
}
