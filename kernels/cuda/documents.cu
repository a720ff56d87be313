// Documents that follow each other in a sequence: where each token's document begins.
//
//   first[t] = max(0, t - positions[t]);  positions are those in the document: 0 begins one, and each other is one more than the one before
//
// Shapes    positions, checked, first [batch, seq] in i32. A sequence may begin at any position below seq. `checked` are the positions, 0 in the
//           place of one that is not below seq.
// Geometry  a thread a token; the check: one block.
// Bytes     8 read and 8 written a token.
// Bits      integers.
#include "checked.cuh"

DEVICE bool fits(i64 position, i64 seq) { return position >= 0 && position < seq; }

// Finds the first position that does not follow the one before. One block.
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
