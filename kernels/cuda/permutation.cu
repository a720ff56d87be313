// Rows moved to where they are computed, and back: the permutations of a mixture of experts
// (crates/tensor/src/kernel/permutation.rs).
//
//   order = the positions of the choices with ids in a range, by id and then in order;  slots[order[i]] = i, -1 elsewhere
//   out[i] = x[index[i] / per];  y[t] = Σ_j w[t, j] rows[slots[t, j]] in the balanced tree over the ids of the choices that have a slot
//   drows[i] = w[order[i]] dy[order[i] / k];  dw[t, j] = dy[t] · rows[slots[t, j]], 0 without a slot
//
// Shapes    choices, slots, w, dw [tokens, k] (i32 and f32), ids ascending along a token, -1 in unused places; order
//           [choices in range]; x, rows, drows [rows, width]; y, dy [tokens, width].
// Geometry  counting and sorting: one warp per part of the choices, 32 at a time; lanes with the same id find each
//           other by ballots, one per bit of the ids, and the first of them counts: no atomics, and the order of the
//           choices is kept. Sums over parts, inversion and groups: one thread per place. Moved rows, sums and their
//           gradients: one thread per 16 bytes (neighbours.cuh); products of rows: one team of half warps per choice
//           (rows.cuh).
// Launches  two for a sort with its inverse; for counting one if each sample is one part, else two.
// Bytes     a sort reads the choices twice and writes order and slots once; with p parts it writes and reads 2 p
//           numbers per id, and each part reads p of them from the L2 cache. Counts read the choices once. Rows are
//           read and written once; a sum reads a row for each choice.
// Bits      as on the CPU: crates/cpu/src/kernels/permutation.rs. Ids are below 2^16.
#include "rows.cuh"
#include "tree.cuh"
#include "neighbours.cuh"
#include "warp.cuh"

// Counts each id among a warp's choices. A part has `part` of the `each` choices of a sample; the last part may be
// smaller. counts [samples, parts, ids].
KERNEL choice_parts(const int* choices, i64 each, i64 part, i64 parts, i64 first, i64 ids, int* counts, i64 samples) {
    i64 at = global_thread() / WARP;
    if (at >= samples * parts) return;
    int* own = counts + at * ids;
    int lane = lane_of_warp();
    for (i64 id = lane; id < ids; id += WARP) own[id] = 0;
    __syncwarp();
    i64 sample = at / parts, begin = sample * each + at % parts * part;
    count_numbers(own, begin, smaller(begin + part, (sample + 1) * each), ids, [=](i64 i) { return choices[i] - first; }, [](i64, i64) {});
}

// The sum over the parts of a sample.
DEVICE int sum_over_parts(const int* counts, i64 sample, i64 id, i64 parts, i64 ids) {
    int sum = 0;
    for (i64 part = 0; part < parts; part++) sum += counts[(sample * parts + part) * ids + id];
    return sum;
}

KERNEL choice_counts(const int* parts_counts, i64 parts, i64 ids, int* counts, i64 count) {
    i64 at = global_thread();
    if (at < count) counts[at] = sum_over_parts(parts_counts, at / ids, at % ids, parts, ids);
}

KERNEL choice_loads(const int* parts_counts, i64 parts, float* loads, i64 ids) {
    i64 id = global_thread();
    if (id < ids) loads[id] = static_cast<float>(sum_over_parts(parts_counts, 0, id, parts, ids));
}

// Writes both the order and its inverse. Each warp has a part. From the counts of all parts it starts each id after all
// smaller ids and after the same id in earlier parts, and keeps the next place of each id in `next` [parts, ids]. If
// the choices with these ids are not `total`, found[0] becomes 1 and missing entries of `order` are 0.
KERNEL choice_places(const int* choices, i64 count, i64 part, i64 parts, i64 first, i64 ids, const int* counts, int* next, int* order, i64 total,
                     int* slots, i64* found) {
    i64 at = global_thread() / WARP;
    if (at >= parts) return;
    int lane = lane_of_warp(), *own = next + at * ids;
    i64 before = 0;  // choices with smaller ids
    for (i64 begin = 0; begin < ids; begin += WARP) {
        i64 id = begin + lane, earlier = 0, all = 0;
        for (i64 p = 0; id < ids && p < parts; p++) {
            i64 here = counts[p * ids + id];
            earlier += p < at ? here : 0;
            all += here;
        }
        i64 place = before + earlier;
        for (int l = 0; l < WARP; l++) {
            i64 of_lane = __shfl_sync(FULL_WARP, all, l);
            place += l < lane ? of_lane : 0;
            before += of_lane;
        }
        if (id < ids) own[id] = static_cast<int>(place);
    }
    __syncwarp();
    auto id_of = [=](i64 i) { return choices[i] - first; };
    count_numbers(own, at * part, smaller(count, (at + 1) * part), ids, id_of, [=](i64 i, i64 slot) {
        if (slot >= total) slot = -1;
        if (slot >= 0) order[slot] = static_cast<int>(i);
        slots[i] = static_cast<int>(slot);
    });
    if (at != 0 || before == total) return;
    for (i64 i = before + lane; i < total; i += WARP) order[i] = 0;
    if (lane == 0) *found = 1;
}

KERNEL invert_fill(int* slots, i64 n) {
    i64 i = global_thread();
    if (i < n) slots[i] = -1;
}

KERNEL invert(const int* order, int* slots, i64 count) {
    i64 i = global_thread();
    if (i < count) slots[order[i]] = static_cast<int>(i);
}

KERNEL group_ids(const int* choices, i64 k, i64 size, int once, int* groups, i64 tokens) {
    i64 token = global_thread();
    if (token >= tokens) return;
    int last = -1;
    for (i64 i = token * k; i < (token + 1) * k; i++) {
        int group = choices[i] < 0 ? -1 : static_cast<int>(choices[i] / size);
        if (once && group == last) group = -1;
        groups[i] = group;
        last = group > last ? group : last;
    }
}

// Gathers rows of `width` words of one size; an index outside the `rows` rows of x gives zeros.
template <class T> DEVICE void gather(const T* x, const int* index, i64 rows, i64 per, i64 width, T* out, i64 count) {
    constexpr int N = SIXTEEN_BYTES(T);
    i64 at = global_thread() * N;
    if (at >= count) return;
    auto source = [&](i64 i) { return index[i] >= 0 && index[i] / per < rows ? index[i] / per : -1; };
    store_vector(out, at, count, load_rows<N>(x, at, count, width, source));
}

KERNEL gather_8(const u8* x, const int* index, i64 rows, i64 per, i64 width, u8* out, i64 count) {
    gather(x, index, rows, per, width, out, count);
}

KERNEL gather_16(const u16* x, const int* index, i64 rows, i64 per, i64 width, u16* out, i64 count) {
    gather(x, index, rows, per, width, out, count);
}

KERNEL gather_32(const u32* x, const int* index, i64 rows, i64 per, i64 width, u32* out, i64 count) {
    gather(x, index, rows, per, width, out, count);
}

// The index of the highest one bit.
DEVICE int level_of(u32 bits) {
    int level = 0;
    for (; bits > 1; bits >>= 1) level++;
    return level;
}

// The sum in the tree over the ids, of which only some are present. Two neighbours separate at the highest bit that
// differs; a left sum waits at that level until everything to its right below that level is summed.
template <int N>
DEVICE Vector<float, N> combine(const float* rows, const int* ids, const int* slots, const float* weights, i64 k, i64 width, i64 token, i64 column) {
    Vector<float, N> waiting[TREE_LEVELS], sum = {};
#pragma unroll
    for (int level = 0; level < TREE_LEVELS; level++) waiting[level] = {};
    u32 full = 0;
    int last = -1;
    for (i64 i = token * k; i < (token + 1) * k; i++) {
        if (slots[i] < 0) continue;
        Vector<float, N> term = load_vector<N>(rows + slots[i] * width, column, width);
        if (weights) {
#pragma unroll
            for (int j = 0; j < N; j++) term.of[j] = weights[i] * term.of[j];
        }
        if (last >= 0) {
            int apart = level_of(static_cast<u32>(last ^ ids[i]));
#pragma unroll
            for (int level = 0; level < TREE_LEVELS; level++) {
#pragma unroll
                for (int j = 0; j < N; j++) {
                    if (level < apart && (full >> level & 1u)) sum.of[j] = waiting[level].of[j] + sum.of[j];
                    if (level == apart) waiting[level].of[j] = sum.of[j];
                }
            }
            full = (full & ~((1u << apart) - 1u)) | 1u << apart;
        }
        sum = term;
        last = ids[i];
    }
#pragma unroll
    for (int level = 0; level < TREE_LEVELS; level++) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (full >> level & 1u) sum.of[j] = waiting[level].of[j] + sum.of[j];
        }
    }
    return sum;
}

KERNEL combine_forward(const float* rows, const int* ids, const int* slots, const float* weights, i64 k, i64 width, float* out, i64 count) {
    i64 at = global_thread() * FOUR, column = at % width;
    if (at >= count) return;
    if (column + FOUR <= width) {
        store_vector(out, at, count, combine<FOUR>(rows, ids, slots, weights, k, width, at / width, column));
        return;
    }
    for (i64 i = at; i < smaller(at + FOUR, count); i++) out[i] = combine<1>(rows, ids, slots, weights, k, width, i / width, i % width).of[0];
}

KERNEL combine_backward_rows(const float* dout, const int* order, const float* weights, i64 k, i64 width, float* drows, i64 count) {
    i64 at = global_thread() * FOUR, row = at / width, column = at % width;
    if (at >= count) return;
    Vector<float, FOUR> four = load_rows<FOUR>(dout, at, count, width, [=](i64 i) { return order[i] / k; });
#pragma unroll
    for (int j = 0; j < FOUR; j++) {
        if (at + j >= count) break;
        four.of[j] = weights[order[row]] * four.of[j];
        if (++column == width) column = 0, row++;
    }
    store_vector(drows, at, count, four);
}

KERNEL combine_backward_weights(const float* dout, const float* rows, const int* slots, i64 k, float* dweights, i64 choices, i64 width) {
    SHARED(float, partial, ROW_HALVES);
    Team team = team_of(choices, width);
    i64 slot = team.live ? slots[team.row] : -1;
    const float* x = dout + (team.live ? team.row / k * width : 0);
    const float* y = rows + (slot < 0 ? 0 : slot * width);
    float dot[1];
    row_sums<1>(team, width, partial, dot, [&](i64 i, float(&term)[1]) { term[0] = slot < 0 ? 0.0f : x[i] * y[i]; });
    if (team.live && team.half == 0 && team.lane == 0) dweights[team.row] = slot < 0 ? 0.0f : dot[0];
}
