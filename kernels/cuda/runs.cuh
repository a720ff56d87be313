// The elements of a parameter in flat vectors, as runs: each run is consecutive in the vectors and in the whole
// parameter, which is numbered matrix by matrix.
//
// The elements are numbered 0, 1, .. over all runs. `table` has, for each run, the number of its first element, then
// the total number of elements; then, for each run, that element's index in the whole parameter; then its place in the
// vectors. Runs are sorted by index in the whole parameter.
#pragma once
#include "meshwork.cuh"

// The place of an element.
struct Spot {
    i64 element, place;
};

struct LocalRuns {
    const i64* table;
    i64 count;

    DEVICE i64 start(i64 run) const { return table[run]; }
    DEVICE i64 first(i64 run) const { return table[count + 1 + run]; }
    DEVICE i64 place(i64 run) const { return table[2 * count + 1 + run]; }
    DEVICE i64 length(i64 run) const { return table[run + 1] - table[run]; }

    // The last run whose number of(run) is not above `x`; 0 if there is none.
    template <class Of> DEVICE i64 last_up_to(i64 x, Of of) const {
        i64 low = 0, high = count;
        while (high - low > 1) {
            i64 middle = (low + high) / 2;
            if (of(middle) <= x) low = middle;
            else high = middle;
        }
        return low;
    }

    DEVICE Spot spot(i64 number) const {
        i64 run = last_up_to(number, [&](i64 run) { return start(run); }), in_run = number - start(run);
        return {first(run) + in_run, place(run) + in_run};
    }

    // The run that holds an element of the whole parameter, or the one before it.
    DEVICE i64 run_up_to(i64 element) const {
        return last_up_to(element, [&](i64 run) { return first(run); });
    }
};
