// Token and position embeddings; a table may be a shard with the rows from first_row on.
//
//   out[i] = table[ids[i] - first_row], zeros for ids outside;  dtable[ids[i] - first_row] += dout[i], in the order of i
//   out[b, s] = x[b, s] + table[first + s];                     dtable[first + s] += Σ_b dout[b, s]
//
// Shapes    ids [count] (i32); table, dtable [rows, h]; out, dout [count, h]; positions: x, out, dout [batch, seq, h].
// Geometry  lookups and additions of positions: one thread per 16 bytes (neighbours.cuh). Checks of ids: one block.
//           Gradients of a table without atomics: the places of the ids are sorted by buckets of 64 ids (`group_ids`,
//           `choice_parts` and `choice_places` of permutation.cu), in order within each. One block of threads per row
//           of the table and 256 vectors of columns finds the places of its own id in its bucket, and adds them in that
//           order. Positions: one thread per four elements of dtable.
// Launches  four for the gradient of a table, including the sort.
// Bytes     lookup 4 read and 4 written per element; gradient 4 read per element, 4 written per element of the table,
//           or 4 read and 4 written per element of each row that occurs; an id is read twice by the sort, and a place
//           with its id by each row of its bucket, from the caches. For x, out, dout and, in lookups, the table, half
//           of that where they have 16 bits (_16); gradients of tables are f32.
// Bits      as on the CPU: crates/cpu/src/kernels/embedding.rs. Several blocks of ids (canonical numerics) are each
//           summed from zero and added in the balanced tree.
#include "checked.cuh"
#include "halves.cuh"
#include "tree.cuh"
#include "warp.cuh"

#define TABLE_ROWS 64

template <int N, class In, class Out>
DEVICE void embedding_forward_of(const int* ids, In table, i64 first_row, i64 rows, Out out, i64 count, i64 h) {
    i64 at = global_thread() * N;
    if (at >= count * h) return;
    auto held = [&](i64 i) {
        i64 row = static_cast<i64>(ids[i]) - first_row;
        return row < rows ? row : -1;
    };
    store_vector(out, at, count * h, load_rows<N>(table, at, count * h, h, held));
}

KERNEL embedding_forward(const int* ids, const float* table, i64 first_row, i64 rows, float* out, i64 count, i64 h) {
    embedding_forward_of<FOUR>(ids, table, first_row, rows, out, count, h);
}

KERNEL embedding_forward_16(const int* ids, const u16* table, i64 first_row, i64 rows, u16* out, i64 count, i64 h, int f16) {
    in_type(f16, [&](auto of) { embedding_forward_of<EIGHT>(ids, of(table), first_row, rows, of(out), count, h); });
}

// Reports the first id that is not below `vocab`, or is negative although `masked` is 0. One block.
KERNEL check_ids(const int* ids, i64 vocab, int masked, i64* found, i64 count) {
    SHARED(i64, firsts, CHECK_WARPS);
    find_first(ids, count, vocab, found, firsts, [&](i64 i) { return ids[i] >= vocab || (ids[i] < 0 && !masked); });
}

// Calls add(i, bits), in order, for the places i at which `ids` has `id`, with the elements of dout at i from `column`
// on. `order` has the places of the id's bucket from begin to end.
template <int N, class In, class Add>
DEVICE void for_places(const int* ids, i64 id, const int* order, i64 begin, i64 end, const In& dout, i64 column, i64 h, Add add) {
    SHARED(u32, masks, THREADS / WARP);
    SHARED(int, places, THREADS);
    int lane = lane_of_warp(), warp = static_cast<int>(threadIdx.x) / WARP;
    for (i64 first = begin; first < end; first += THREADS) {
        i64 at = first + threadIdx.x;
        int place = at < end ? order[at] : -1;
        bool mine = place >= 0 && ids[place] == id;
        u32 mask = __ballot_sync(FULL_WARP, mine);
        if (lane == 0) masks[warp] = mask;
        __syncthreads();  // the masks are written, and the places before these are read
        int before = 0, found = 0;
        for (int other = 0; other < THREADS / WARP; other++) {
            int of_warp = __popc(masks[other]);
            before += other < warp ? of_warp : 0;
            found += of_warp;
        }
        if (mine) places[before + __popc(mask & lanes_below(lane))] = place;
        __syncthreads();  // the places are written, and the masks are read
        if (column >= h) continue;
        auto load = [&](i64 i) { return load_vector<N>(bits_of(dout + places[i] * h), column, h); };
        in_order(0, found, load, [&](i64 i, const auto& bits) { add(static_cast<i64>(places[i]), numbers_of(dout, bits)); });
    }
}

// The range of the bucket of row `row` in `order`: `ends` has the end of each bucket.
struct Bucket {
    i64 begin, end;
};

DEVICE Bucket bucket_of(const int* ends, i64 first_row, i64 row) {
    i64 bucket = (first_row + row) / TABLE_ROWS - first_row / TABLE_ROWS;
    return {bucket > 0 ? ends[bucket - 1] : 0, ends[bucket]};
}

// dtable is overwritten, or added to if `accumulate` is not 0.
template <int N, class In>
DEVICE void embedding_backward_of(const int* ids, const int* order, const int* ends, In dout, i64 first_row, float* dtable, int accumulate, i64 h) {
    i64 row = blockIdx.x, column = (static_cast<i64>(blockIdx.y) * THREADS + threadIdx.x) * N;
    Bucket bucket = bucket_of(ends, first_row, row);
    float* to = dtable + row * h;
    Vector<float, N> sum = {};
    bool any = false;
    for_places<N>(ids, first_row + row, order, bucket.begin, bucket.end, dout, column, h, [&](i64, const Vector<float, N>& next) {
        if (accumulate && !any) sum = load_vector<N>(to, column, h);
        any = true;
#pragma unroll
        for (int j = 0; j < N; j++) sum.of[j] += next.of[j];
    });
    if (column < h && (any || !accumulate)) store_vector(to, column, h, sum);
}

KERNEL embedding_backward(const int* ids, const int* order, const int* ends, const float* dout, i64 first_row, float* dtable, int accumulate, i64 h) {
    embedding_backward_of<FOUR>(ids, order, ends, dout, first_row, dtable, accumulate, h);
}

KERNEL embedding_backward_16(const int* ids, const int* order, const int* ends, const u16* dout, i64 first_row, float* dtable, int accumulate, i64 h,
                             int f16) {
    in_type(f16, [&](auto of) { embedding_backward_of<EIGHT>(ids, order, ends, of(dout), first_row, dtable, accumulate, h); });
}

// The same with the ids cut into `runs` runs of `run`: each run is summed from zero, the runs are added up in the tree,
// and the sum is added to dtable.
template <class In>
DEVICE void embedding_tree_of(const int* ids, const int* order, const int* ends, In dout, i64 first_row, float* dtable, int accumulate, i64 runs, i64 run,
                              i64 h) {
    i64 row = blockIdx.x, column = (static_cast<i64>(blockIdx.y) * THREADS + threadIdx.x) * FOUR;
    Bucket bucket = bucket_of(ends, first_row, row);
    float* to = dtable + row * h;
    Tree trees[FOUR];
    Vector<float, FOUR> sum = {};
    i64 at = 0;  // the run that is being summed
    bool any = false;
    // Runs without the word would add zeros and change no bits, because no such sum is a negative zero.
    auto up_to = [&](i64 next) {
        for (; at < next; at++) {
#pragma unroll
            for (int j = 0; j < FOUR; j++) trees[j].push(sum.of[j]), sum.of[j] = 0.0f;
        }
    };
    for_places<FOUR>(ids, first_row + row, order, bucket.begin, bucket.end, dout, column, h, [&](i64 i, const Vector<float, FOUR>& next) {
        up_to(i / run);
        any = true;
#pragma unroll
        for (int j = 0; j < FOUR; j++) sum.of[j] += next.of[j];
    });
    if (column >= h || (accumulate && !any)) return;
    up_to(any ? runs : 0);
    Vector<float, FOUR> total = {};
    if (accumulate) total = load_vector<FOUR>(to, column, h);
#pragma unroll
    for (int j = 0; j < FOUR; j++) total.of[j] = any ? total.of[j] + trees[j].finish() : 0.0f;
    store_vector(to, column, h, total);
}

KERNEL embedding_backward_tree(const int* ids, const int* order, const int* ends, const float* dout, i64 first_row, float* dtable, int accumulate, i64 runs,
                               i64 run, i64 h) {
    embedding_tree_of(ids, order, ends, dout, first_row, dtable, accumulate, runs, run, h);
}

KERNEL embedding_backward_tree_16(const int* ids, const int* order, const int* ends, const u16* dout, i64 first_row, float* dtable, int accumulate,
                                  i64 runs, i64 run, i64 h, int f16) {
    in_type(f16, [&](auto of) { embedding_tree_of(ids, order, ends, of(dout), first_row, dtable, accumulate, runs, run, h); });
}

template <int N, class In, class Out> DEVICE void positions_forward_of(In x, In table, i64 first, i64 seq, Out out, i64 count, i64 h) {
    i64 at = global_thread() * N;
    if (at >= count) return;
    Vector<float, N> y = load_vector<N>(x, at, count);
    Vector<float, N> held = load_rows<N>(table, at, count, h, [=](i64 i) { return first + i % seq; });
#pragma unroll
    for (int j = 0; j < N; j++) y.of[j] = y.of[j] + held.of[j];
    store_vector(out, at, count, y);
}

KERNEL positions_forward(const float* x, const float* table, i64 first, i64 seq, float* out, i64 count, i64 h) {
    positions_forward_of<FOUR>(x, table, first, seq, out, count, h);
}

KERNEL positions_forward_16(const u16* x, const u16* table, i64 first, i64 seq, u16* out, i64 count, i64 h, int f16) {
    in_type(f16, [&](auto of) { positions_forward_of<EIGHT>(of(x), of(table), first, seq, of(out), count, h); });
}

// Rows `first` .. `first + seq` of dtable, which are overwritten, or added to if `accumulate` is not 0. The samples are
// cut into runs of `run`: each run is summed in order from zero, and the runs are added up in the tree.
template <class In>
DEVICE void positions_backward_of(In dout, i64 first, i64 seq, float* dtable, int accumulate, i64 batch, i64 run, i64 h) {
    i64 at = global_thread() * FOUR, count = seq * h;
    if (at >= count) return;
    Tree trees[FOUR];
    for (i64 begin = 0; begin < batch; begin += run) {
        Vector<float, FOUR> sum = {};
        auto load = [=](i64 sample) { return load_vector<FOUR>(bits_of(dout + sample * count), at, count); };
        in_order(begin, smaller(batch, begin + run), load, [&](i64, const auto& bits) {
            Vector<float, FOUR> next = numbers_of(dout, bits);
#pragma unroll
            for (int j = 0; j < FOUR; j++) sum.of[j] += next.of[j];
        });
#pragma unroll
        for (int j = 0; j < FOUR; j++) trees[j].push(sum.of[j]);
    }
    Vector<float, FOUR> total = {};
    if (accumulate) total = load_vector<FOUR>(dtable + first * h, at, count);
#pragma unroll
    for (int j = 0; j < FOUR; j++) total.of[j] = total.of[j] + trees[j].finish();
    store_vector(dtable + first * h, at, count, total);
}

KERNEL positions_backward(const float* dout, i64 first, i64 seq, float* dtable, int accumulate, i64 batch, i64 run, i64 h) {
    positions_backward_of(dout, first, seq, dtable, accumulate, batch, run, h);
}

KERNEL positions_backward_16(const u16* dout, i64 first, i64 seq, float* dtable, int accumulate, i64 batch, i64 run, i64 h, int f16) {
    in_type(f16, [&](auto of) { positions_backward_of(of(dout), first, seq, dtable, accumulate, batch, run, h); });
}
