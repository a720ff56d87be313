// Measures of whole parameters for update rules: the sum of squares, or the largest absolute value, of each set of
// elements.
//
//   sums[s] += Σ x²  or  sums[s] = max(sums[s], |x|)  over the numbers x of the local elements of set s
//
// Shapes    x [numbers], indexed by element number (runs.cuh); sums f64 [sets], or `LIMBS` digits per exact sum
//           (exact.cuh). A set is `length` consecutive elements of a matrix of `each` elements, whose last set is
//           shorter; or with rows > 0 a column of a matrix [rows, length].
// Geometry  one warp per set, whose lanes take every 32nd element; exact values of digits: one thread per sum;
//           quotients: one thread per element.
// Bytes     4 read per element; for columns, each from a separate cache line.
// Bits      exact sums and largest values as on the CPU (crates/cpu/src/whole.rs); sums in f64 are added in another
//           order, and not exact. Values of digits and quotients as on the CPU.
#include "exact.cuh"
#include "runs.cuh"
#include "warp.cuh"

// Calls visit(x) for this lane's share of a set.
template <class Visit>
DEVICE void for_set(const float* x, const LocalRuns& runs, i64 set, i64 length, i64 rows, i64 each, Visit visit) {
    int lane = lane_of_warp();
    if (rows > 0) {
        i64 matrix = set / length, column = set % length;
        for (i64 row = lane; row < rows; row += WARP) {
            i64 element = (matrix * rows + row) * length + column, run = runs.run_up_to(element), in_run = element - runs.first(run);
            if (in_run >= 0 && in_run < runs.length(run)) visit(x[runs.start(run) + in_run]);
        }
        return;
    }
    i64 sets = (each + length - 1) / length, matrix = set / sets;
    i64 begin = matrix * each + set % sets * length, end = smaller(begin + length, (matrix + 1) * each);
    for (i64 run = runs.run_up_to(begin); run < runs.count && runs.first(run) < end; run++) {
        i64 first = runs.first(run), last = smaller(end, first + runs.length(run));
        for (i64 element = (first > begin ? first : begin) + lane; element < last; element += WARP) {
            visit(x[runs.start(run) + element - first]);
        }
    }
}

KERNEL set_squares(const float* x, const i64* runs, i64 run_count, i64 length, i64 rows, i64 each, double* sums, i64 sets) {
    i64 set = global_thread() / WARP;
    if (set >= sets) return;
    double sum = 0.0;
    for_set(x, {runs, run_count}, set, length, rows, each, [&](float x) { sum += static_cast<double>(x) * static_cast<double>(x); });
    for (int width = WARP / 2; width > 0; width /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, width);
    if (lane_of_warp() == 0) sums[set] += sum;
}

KERNEL set_squares_exact(const float* x, const i64* runs, i64 run_count, i64 length, i64 rows, i64 each, double* digits, i64 sets) {
    i64 set = global_thread() / WARP;
    if (set >= sets) return;
    Digits own;
    own.clear();
    for_set(x, {runs, run_count}, set, length, rows, each, [&](float x) { own.add_square(x); });
#pragma unroll
    for (int i = 0; i < LIMBS; i++) {
        for (int width = WARP / 2; width > 0; width /= 2) own.of[i] += __shfl_xor_sync(FULL_WARP, own.of[i], width);
    }
    own.carry();
    if (lane_of_warp() == 0) own.add_to(digits + set * LIMBS);
}

// The larger of two; NaN if either is NaN.
DEVICE double larger(double most, double x) { return x > most || x != x ? x : most; }

KERNEL set_largest(const float* x, const i64* runs, i64 run_count, i64 length, i64 rows, i64 each, double* sums, i64 sets) {
    i64 set = global_thread() / WARP;
    if (set >= sets) return;
    double most = 0.0;
    for_set(x, {runs, run_count}, set, length, rows, each, [&](float x) { most = larger(most, static_cast<double>(fabsf(x))); });
    for (int width = WARP / 2; width > 0; width /= 2) most = larger(most, __shfl_xor_sync(FULL_WARP, most, width));
    if (lane_of_warp() == 0) sums[set] = larger(sums[set], most);
}

// The values of sums given by their digits, rounded; NaN if a term was not finite.
KERNEL exact_values(const double* digits, double* sums, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    Digits all;
#pragma unroll
    for (int i = 0; i < LIMBS; i++) all.of[i] = static_cast<u64>(digits[at * LIMBS + i]);
    all.carry();
    // The highest nonzero digit, and the two digits below it.
    u64 highest = 0, middle = 0, lowest = 0;
    int first = 0;
    bool found = false;
#pragma unroll
    for (int i = DIGITS - 1; i >= 2; i--) {
        if (found || (all.of[i] == 0 && i > 2)) continue;
        found = true, first = i - 2, highest = all.of[i], middle = all.of[i - 1], lowest = all.of[i - 2];
    }
    // 64 bits from the highest one bit on; lower bits are folded into the last bit.
    u64 high = highest << 32 | middle, low = lowest << 32;
    int shift = 0;
    if (high == 0) high = low, low = 0, shift = 64;
    while (high != 0 && high >> 63 == 0) high = high << 1 | low >> 63, low <<= 1, shift++;
    double value = static_cast<double>(low != 0 ? high | 1 : high);
    value = ldexp(value, 32 - shift - 298 + 32 * first);
    sums[at] = all.of[DIGITS] > 0 ? static_cast<double>(__uint_as_float(0x7fc00000u)) : value;
}

// x divided by the square root of *square, or by `least` if that is larger.
KERNEL divide_by_root(float* x, const double* square, double least, i64 count) {
    i64 i = global_thread();
    if (i < count) x[i] = x[i] / static_cast<float>(fmax(sqrt(*square), least));
}
