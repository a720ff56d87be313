// Documents packed into a sequence: the first token of each token's document.
//
//   first[t] = max(0, t - positions[t]);  positions are relative to the document: 0 begins one, and each other position is its predecessor plus one
//
// Shapes    positions, checked, first [batch, seq] in i32. A sequence may begin at any position below seq. `checked`
//           are the positions, with 0 in place of a position that is not below seq.
// Geometry  one thread per token; the check: one block.
// Bytes     8 read and 8 written per token.
// Bits      integers.
#include "checked.cuh"

DEVICE bool fits(i64 position, i64 seq) { return position >= 0 && position < seq; }

// Reports the first position that is neither 0 nor its predecessor plus one. One block.
KERNEL check_positions(const int* positions, i64* found, i64 count, i64 seq) {
    SHARED(i64, firsts, CHECK_WARPS);
    find_first(positions, count, seq, found, firsts, [&](i64 at) {
        i64 position = positions[at];
        bool follows = at % seq == 0 || position == 0 || position == static_cast<i64>(positions[at - 1]) + 1;
        return !follows || !fits(position, seq);
    });
}

KERNEL document_starts(const int* positions, int* checked, int* first, i64 count, i64 seq) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 place = at % seq, position = positions[at];
    bool inside = fits(position, seq);
    checked[at] = inside ? static_cast<int>(position) : 0;
    first[at] = static_cast<int>(inside && place > position ? place - position : 0);
}
