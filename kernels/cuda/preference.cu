// Direct preference optimisation of pairs of a chosen and a rejected answer.
//
//   reward = beta (reference - loss);  margin = reward_chosen - reward_rejected
//   l = (1 - s) ln(1 + e^-margin) + s ln(1 + e^margin);  dl/dloss_chosen = -beta (σ(margin) - (1 - s)) dl
//
// Shapes    losses, reference, dlosses f64 [pairs, 2], the chosen answer first; out, dloss f64 [pairs]. `number` is the
//           one to give: 0 the loss, 1 and 2 the rewards, 3 the margin, 4 whether it is above 0.
// Geometry  one thread per pair.
// Bytes     32 read and 8 written per pair; of the gradient 40 and 16.
// Bits      as on the CPU, but for exp and log1p of the library: crates/cpu/src/kernels/preference.rs.
#include "meshwork.cuh"

DEVICE double softplus(double x) {
    return fmax(x, 0.0) + log1p(exp(-fabs(x)));
}

KERNEL preference_forward(const double* losses, const double* reference, double* out, double beta, double smoothing, i64 number, i64 pairs) {
    i64 pair = global_thread();
    if (pair >= pairs) return;
    double chosen = beta * (reference[2 * pair] - losses[2 * pair]);
    double rejected = beta * (reference[2 * pair + 1] - losses[2 * pair + 1]);
    double margin = chosen - rejected;
    double l = (1.0 - smoothing) * softplus(-margin) + smoothing * softplus(margin);
    out[pair] = number == 0 ? l : number == 1 ? chosen : number == 2 ? rejected : number == 3 ? margin : margin > 0.0 ? 1.0 : 0.0;
}

KERNEL preference_backward(const double* losses, const double* reference, const double* dloss, double* dlosses, double beta, double smoothing, i64 pairs) {
    i64 pair = global_thread();
    if (pair >= pairs) return;
    double chosen = beta * (reference[2 * pair] - losses[2 * pair]);
    double rejected = beta * (reference[2 * pair + 1] - losses[2 * pair + 1]);
    double sigmoid = 1.0 / (1.0 + exp(rejected - chosen));
    double slope = (sigmoid - (1.0 - smoothing)) * beta * dloss[pair];
    dlosses[2 * pair] = -slope;
    dlosses[2 * pair + 1] = slope;
}
