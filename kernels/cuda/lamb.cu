// LAMB: Adam whose step is scaled to the norm of each matrix (You et al., arXiv:1904.00962).
//
//   g = grad_scale grad,  m += (1 - β₁)(g - m),  v = β₂ v + (1 - β₂) g²,  u = m mean_hat / (√v / root_hat + ε) + decay w
//   ratio = ‖w‖ / ‖u‖, 1 if either is zero;  w -= lr ratio u
//
// Shapes    weights, grads, mean, square: flat vectors, whose elements runs.cuh lists; of_weights (w) and of_steps (u)
//           [count], indexed by element number; totals f64 [2, matrices]: ‖w‖² and ‖u‖², of which the first is
//           overwritten with the ratio; ratio [matrices], of `each` elements. Scalars are computed on the host in f64
//           and rounded once.
// Geometry  one thread per element; the ratio: one thread per matrix.
// Bytes     16 read and 16 written per element, then 12 and 4.
// Bits      as on the CPU: crates/optim/src/lamb.rs.
#include "runs.cuh"

DEVICE float direction(float w, float m, float v, float mean_hat, float root_hat, float eps, float decay) {
    return m * mean_hat / (sqrtf(v) / root_hat + eps) + decay * w;
}

KERNEL lamb_measure(const i64* runs, i64 run_count, const float* weights, const float* grads, float* mean, float* square, float grad_scale,
                    float mean_new, float square_old, float square_new, float mean_hat, float root_hat, float eps, float decay,
                    float* of_weights, float* of_steps, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 place = LocalRuns{runs, run_count}.spot(at).place;
    float w = weights[place], g = grad_scale * grads[place], m = mean[place], v = square[place];
    m += mean_new * (g - m);
    v = square_old * v + square_new * (g * g);
    mean[place] = m;
    square[place] = v;
    of_weights[at] = w;
    of_steps[at] = direction(w, m, v, mean_hat, root_hat, eps, decay);
}

KERNEL lamb_settle(double* totals, i64 matrices) {
    i64 i = global_thread();
    if (i >= matrices) return;
    double weights = sqrt(totals[i]), steps = sqrt(totals[matrices + i]);
    totals[i] = weights > 0.0 && steps > 0.0 ? weights / steps : 1.0;
}

KERNEL lamb_update(const i64* runs, i64 run_count, float* weights, const float* mean, const float* square, const double* ratio, i64 each,
                   double lr, float mean_hat, float root_hat, float eps, float decay, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    Spot spot = LocalRuns{runs, run_count}.spot(at);
    i64 place = spot.place;
    float w = weights[place], size = static_cast<float>(lr * ratio[spot.element / each]);
    weights[place] = w - size * direction(w, mean[place], square[place], mean_hat, root_hat, eps, decay);
}
