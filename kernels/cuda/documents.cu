// Documents that follow each other in a sequence: where each token's document begins.
//
//   first[t] = max(0, t - positions[t]);  positions are those in the document: 0 begins one, and each other is one more than the one before
//
// Shapes    positions, checked, first [batch, seq] in i32. A sequence may begin at any position below seq. `checked` are the positions, 0 in the
//           place of one that is not below seq.
// Geometry  a thread a token.
// Bytes     8 read and 8 written a token.
// Bits      integers.
#include "meshwork.cuh"

// *misplaced becomes 1 if a position does not follow the one before, and is left alone otherwise. All who write it write the same.
KERNEL document_starts(const int* positions, int* checked, int* first, int* misplaced, i64 count, i64 seq) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 place = at % seq, position = positions[at];
    bool follows = place == 0 || position == 0 || position == static_cast<i64>(positions[at - 1]) + 1;
    bool fits = position >= 0 && position < seq;
    if (!follows || !fits) *misplaced = 1;
    checked[at] = fits ? static_cast<int>(position) : 0;
    first[at] = static_cast<int>(fits && place > position ? place - position : 0);
}
