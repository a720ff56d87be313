// Muon: momentum with orthogonalised matrices (Jordan et al., 2024); the orthogonalisation itself runs as matrix
// products.
//
//   g = grad_scale grad,  m += (1 - μ)(g - m),  u = g + μ (m - g);  w = w keep - size X, X the orthogonal matrix near u
//
// Shapes    weights, grads, mean: flat vectors, whose elements runs.cuh lists; values and matrices: whole matrices, one
//           after the other.
// Geometry  one thread per element.
// Bytes     8 read and 8 written per element, then 8 and 4.
// Bits      as on the CPU: crates/optim/src/muon.rs.
#include "runs.cuh"

// `values` may be null.
KERNEL muon_measure(const i64* runs, i64 run_count, const float* grads, float* mean, float grad_scale, float old, float now,
                    float* values, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    Spot spot = LocalRuns{runs, run_count}.spot(at);
    float g = grad_scale * grads[spot.place], m = mean[spot.place];
    m += now * (g - m);
    mean[spot.place] = m;
    if (values) values[spot.element] = g + old * (m - g);
}

KERNEL muon_update(const i64* runs, i64 run_count, float* weights, const float* matrices, float keep, float size, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    Spot spot = LocalRuns{runs, run_count}.spot(at);
    weights[spot.place] = weights[spot.place] * keep - size * matrices[spot.element];
}
