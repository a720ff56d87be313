// Token and position embeddings; a table may be a shard, the rows from first_row on.
//
//   out[i] = table[ids[i] - first_row], zeros for ids outside;  dtable[ids[i] - first_row] += dout[i], in the order of i
//   out[b, s] = x[b, s] + table[first + s];                     dtable[first + s] += Σ_b dout[b, s]
//
// Shapes    ids [count] (i32); table, dtable [rows, h]; out, dout [count, h]; positions: x, out, dout [batch, seq, h].
// Geometry  lookups, and what is added to positions: a thread 16 bytes (neighbours.cuh). Checks of ids: one block. Gradients of a table without atomics: a block of threads for 64 of its rows (`embedding_backward`) or for
//           one (`embedding_backward_tree`) and 256 columns reads all ids, 256 at a time through shared memory; a thread has a column, and adds
//           what belongs to its rows in the order of the ids. Positions: a thread four elements of dtable.
// Bytes     lookup 4 read and 4 written an element; gradient 4 read an element, 4 read and 4 written for each of a row that occurs, and the
//           ids once for each 64 rows (or each row) and 256 columns, from the L2 cache.
//           Half of what is read and written of x, out, dout and, in lookups, the table, where they have 16 bits (_16); gradients of tables are f32.
// Bits      those of the CPU: crates/tensor/src/cpu/kernels/embedding.rs. Several blocks of ids (canonical numerics) are each summed from zero and
//           added in the balanced tree.
#include "checked.cuh"
#include "halves.cuh"
#include "tree.cuh"

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
    embedding_forward_of<EIGHT>(ids, halves(table, f16), first_row, rows, halves(out, f16), count, h);
}

// Finds the first id that is not below `vocab`, or is negative and `masked` is 0. One block.
KERNEL check_ids(const int* ids, i64 vocab, int masked, i64* found, i64 count) {
    SHARED(i64, firsts, CHECK_WARPS);
    find_first(ids, count, vocab, found, firsts, [&](i64 i) { return ids[i] >= vocab || (ids[i] < 0 && !masked); });
}

// dtable is overwritten, or added to if `accumulate` is not 0.
template <class In>
DEVICE void embedding_backward_of(const int* ids, In dout, i64 first_row, i64 rows, float* dtable, int accumulate, i64 count, i64 h) {
    SHARED(int, shared_ids, THREADS);
    i64 begin = static_cast<i64>(blockIdx.x) * TABLE_ROWS, end = smaller(rows, begin + TABLE_ROWS);
    i64 column = static_cast<i64>(blockIdx.y) * THREADS + threadIdx.x;
    if (!accumulate && column < h) {
        for (i64 row = begin; row < end; row++) dtable[row * h + column] = 0.0f;
    }
    for (i64 first = 0; first < count; first += THREADS) {
        __syncthreads();  // the ids before these are read
        if (first + threadIdx.x < count) shared_ids[threadIdx.x] = ids[first + threadIdx.x];
        __syncthreads();
        for (i64 i = 0; column < h && i < smaller(THREADS, count - first); i++) {
            i64 row = static_cast<i64>(shared_ids[i]) - first_row;
            if (row >= begin && row < end) dtable[row * h + column] += dout[(first + i) * h + column];
        }
    }
}

KERNEL embedding_backward(const int* ids, const float* dout, i64 first_row, i64 rows, float* dtable, int accumulate, i64 count, i64 h) {
    embedding_backward_of(ids, dout, first_row, rows, dtable, accumulate, count, h);
}

KERNEL embedding_backward_16(const int* ids, const u16* dout, i64 first_row, i64 rows, float* dtable, int accumulate, i64 count, i64 h,
                             int f16) {
    embedding_backward_of(ids, halves(dout, f16), first_row, rows, dtable, accumulate, count, h);
}

// The same with the ids cut into runs of `run`, each summed from zero, which are added up in the tree, and the sum to dtable.
template <class In>
DEVICE void embedding_tree_of(const int* ids, In dout, i64 first_row, float* dtable, int accumulate, i64 count, i64 run, i64 h) {
    SHARED(int, shared_ids, THREADS);
    i64 row = blockIdx.x, column = static_cast<i64>(blockIdx.y) * THREADS + threadIdx.x;
    Tree tree;
    float sum = 0.0f;
    bool any = false;
    for (i64 first = 0; first < count; first += THREADS) {
        __syncthreads();  // the ids before these are read
        if (first + threadIdx.x < count) shared_ids[threadIdx.x] = ids[first + threadIdx.x];
        __syncthreads();
        for (i64 i = first; i < smaller(first + THREADS, count); i++) {
            if (static_cast<i64>(shared_ids[i - first]) - first_row == row && column < h) {
                sum += dout[i * h + column];
                any = true;
            }
            if ((i + 1) % run == 0) {
                // A run without the word adds zeros, which changes no bits: no such sum is a negative zero.
                tree.push(sum);
                sum = 0.0f;
            }
        }
    }
    if (column >= h) return;
    float old = accumulate ? dtable[row * h + column] : 0.0f;
    dtable[row * h + column] = any ? old + tree.finish() : old;
}

KERNEL embedding_backward_tree(const int* ids, const float* dout, i64 first_row, float* dtable, int accumulate, i64 count, i64 run,
                               i64 h) {
    embedding_tree_of(ids, dout, first_row, dtable, accumulate, count, run, h);
}

KERNEL embedding_backward_tree_16(const int* ids, const u16* dout, i64 first_row, float* dtable, int accumulate, i64 count, i64 run, i64 h,
                                  int f16) {
    embedding_tree_of(ids, halves(dout, f16), first_row, dtable, accumulate, count, run, h);
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
    positions_forward_of<EIGHT>(halves(x, f16), halves(table, f16), first, seq, halves(out, f16), count, h);
}

// Rows `first` .. `first + seq` of dtable, which are overwritten, or added to if `accumulate` is not 0. The samples are cut into runs of
// `run`, each summed in order from zero, which are added up in the tree.
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
    positions_backward_of(halves(dout, f16), first, seq, dtable, accumulate, batch, run, h);
}
