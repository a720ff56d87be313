// Adam with 8-bit states, quantised in blocks by the largest value of each (Dettmers et al., arXiv:2110.02861).
//
//   m, v = codes × largest of their block;  m += (1 - β₁)(g - m),  v = β₂ v + (1 - β₂) g²,  g = grad_scale grad
//   w = w keep - lr_hat m / (√v / root_hat + ε);  codes = the nearest to m, v / the new largest of their block
//
// Shapes    weights, grads (f32), means, squares (codes): flat vectors, whose elements runs.cuh lists; of_means,
//           of_squares [count]; largest values in f32 and, before the step, f64 [blocks of `block` elements of a matrix
//           of `each`]. code: 256 numbers for means, their 255 middles, and the same for squares.
// Geometry  one thread per element; at the end of the pass, one thread per block.
// Bytes     6 read and 8 written per element, then 10 and 6; codes from the cache.
// Bits      as on the CPU: crates/optim/src/adam8bit.rs.
#include "runs.cuh"

#define CODES 256
#define MIDDLES 255

struct Moments {
    float mean, square;
};

DEVICE Moments moments(float g, float mean, float square, float mean_new, float square_old, float square_new) {
    return {mean + mean_new * (g - mean), square_old * square + square_new * (g * g)};
}

// The code nearest to x / largest: the number of middles below it; `zero` in a block of zeros.
DEVICE u8 nearest(const float* middles, float x, float largest, int zero) {
    if (!(largest > 0.0f)) return static_cast<u8>(zero);
    float share = x / largest;
    int low = 0, high = MIDDLES;
    while (low < high) {
        int middle = (low + high) / 2;
        if (middles[middle] < share) low = middle + 1;
        else high = middle;
    }
    return static_cast<u8>(low);
}

// The block of an element: each matrix of `each` elements is cut into blocks, the last of which may be shorter.
DEVICE i64 block_of(i64 element, i64 block, i64 each) {
    return element / each * ((each + block - 1) / block) + element % each / block;
}

KERNEL adam8bit_measure(const i64* runs, i64 run_count, const float* grads, const u8* means, const u8* squares, const float* mean_largest,
                        const float* square_largest, const float* code, i64 block, i64 each, float grad_scale, float mean_new, float square_old,
                        float square_new, float* of_means, float* of_squares, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    Spot spot = LocalRuns{runs, run_count}.spot(at);
    i64 set = block_of(spot.element, block, each);
    float mean = code[means[spot.place]] * mean_largest[set];
    float square = code[CODES + MIDDLES + squares[spot.place]] * square_largest[set];
    Moments now = moments(grad_scale * grads[spot.place], mean, square, mean_new, square_old, square_new);
    of_means[at] = now.mean;
    of_squares[at] = now.square;
}

// Stores the new largest values in the state, and keeps the old ones in the places of the totals until the update.
KERNEL adam8bit_settle(float* largest, double* totals, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    double now = totals[i];
    totals[i] = static_cast<double>(largest[i]);
    largest[i] = static_cast<float>(now);
}

KERNEL adam8bit_update(const i64* runs, i64 run_count, float* weights, const float* grads, u8* means, u8* squares,
                       const float* mean_largest, const float* square_largest, const double* mean_before, const double* square_before,
                       const float* code, int mean_zero, int square_zero, i64 block, i64 each, float grad_scale, float mean_new,
                       float square_old, float square_new, float keep, float lr_hat, float root_hat, float eps, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    Spot spot = LocalRuns{runs, run_count}.spot(at);
    i64 set = block_of(spot.element, block, each), place = spot.place;
    const float* squares_code = code + CODES + MIDDLES;
    float mean = code[means[place]] * static_cast<float>(mean_before[set]);
    float square = squares_code[squares[place]] * static_cast<float>(square_before[set]);
    Moments now = moments(grad_scale * grads[place], mean, square, mean_new, square_old, square_new);
    weights[place] = weights[place] * keep - lr_hat * (now.mean / (sqrtf(now.square) / root_hat + eps));
    means[place] = nearest(code + CODES, now.mean, mean_largest[set], mean_zero);
    squares[place] = nearest(squares_code + CODES, now.square, square_largest[set], square_zero);
}
