// Direct preference optimisation of pairs of a chosen and a rejected answer.
//
//   reward = beta (reference - loss);  margin = reward_chosen - reward_rejected
//   l = (1 - s) ln(1 + e^-margin) + s ln(1 + e^margin);  dl/dloss_chosen = -beta (σ(margin) - (1 - s)) dl
//
// Shapes    losses, reference, dlosses f64 [samples, answers], of each pair the chosen answer first; pairs i32 [samples],
//           how many a sample has; out, dloss f64 [samples]: sums over its pairs. `number` is the one to give: 0 the
//           loss, 1 and 2 the rewards, 3 the margin, 4 whether it is above 0.
// Geometry  one thread per sample.
// Bytes     32 read per pair, 12 a sample; of the gradient 32 read and 16 written per pair.
// Bits      as on the CPU, but for exp and log1p of the library: crates/cpu/src/kernels/preference.rs.
#include "meshwork.cuh"

DEVICE double softplus(double x) {
    return fmax(x, 0.0) + log1p(exp(-fabs(x)));
}

KERNEL preference_forward(const double* losses, const double* reference, const int* pairs, double* out, double beta, double smoothing,
                          i64 number, i64 answers, i64 samples) {
    i64 sample = global_thread();
    if (sample >= samples) return;
    double sum = 0.0;
    for (i64 pair = 0; pair < pairs[sample] && 2 * pair + 1 < answers; pair++) {
        i64 at = sample * answers + 2 * pair;
        double chosen = beta * (reference[at] - losses[at]), rejected = beta * (reference[at + 1] - losses[at + 1]);
        double margin = chosen - rejected;
        double l = (1.0 - smoothing) * softplus(-margin) + smoothing * softplus(margin);
        sum += number == 0 ? l : number == 1 ? chosen : number == 2 ? rejected : number == 3 ? margin : margin > 0.0 ? 1.0 : 0.0;
    }
    out[sample] = sum;
}

KERNEL preference_backward(const double* losses, const double* reference, const int* pairs, const double* dloss, double* dlosses, double beta,
                           double smoothing, i64 answers, i64 samples) {
    i64 sample = global_thread();
    if (sample >= samples) return;
    for (i64 answer = 0; answer < answers; answer++) {
        i64 pair = answer / 2, at = sample * answers + 2 * pair;
        double gradient = 0.0;
        if (pair < pairs[sample] && 2 * pair + 1 < answers) {
            double chosen = beta * (reference[at] - losses[at]), rejected = beta * (reference[at + 1] - losses[at + 1]);
            double sigmoid = 1.0 / (1.0 + exp(rejected - chosen));
            double slope = (sigmoid - (1.0 - smoothing)) * beta * dloss[sample];
            gradient = answer % 2 == 0 ? -slope : slope;
        }
        dlosses[sample * answers + answer] = gradient;
    }
}
