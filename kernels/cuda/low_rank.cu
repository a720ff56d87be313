// A matrix as the product of two thin ones (PowerSGD; Vogels, Karimireddy and Jaggi 2019):
// crates/compress/src/low_rank.rs.
//
//   P = M Q, its columns made orthonormal (Gram-Schmidt), Q = Mᵀ P;  M ≈ P Qᵀ
//
// Shapes    m, out [rows, cols]; p [rows, rank]; q [rank, cols], columns of Q one after the other.
// Geometry  draws: one block of threads per column of Q; P: 16 threads per element; orthonormal columns: one warp,
//           whose lane l has every 32nd row from l on; Q and out: one thread per element.
// Bytes     M once per column of Q.
// Bits      as on the CPU: P in 16 lanes that are added one after another, dots of columns in f64 in the order of the
//           rows.
#include "message.cuh"
#include "random.cuh"

#define HALF_LANES 16

// Fills the columns of q that are zero with random values from -1 to 1.
KERNEL low_rank_start(float* q, i64 cols, u32 key0, u32 key1, u64 start) {
    SHARED(i64, parts, BLOCK_WARPS);
    float* column = q + static_cast<i64>(blockIdx.x) * cols;
    i64 own = 0;
    for (i64 i = threadIdx.x; i < cols; i += THREADS) own += column[i] == 0.0f ? 0 : 1;
    if (over_block(own, parts, [](i64 a, i64 b) { return a + b; }) > 0) return;
    for (i64 i = threadIdx.x; i < cols; i += THREADS) {
        u64 index = start + static_cast<u64>(static_cast<i64>(blockIdx.x) * cols + i);
        column[i] = 2.0f * uniform(philox(index / 4, key0, key1), index) - 1.0f;
    }
}

KERNEL low_rank_times(const float* m, const float* q, float* p, i64 cols, i64 rank, i64 count) {
    i64 at = global_thread() / HALF_LANES, lane = global_thread() % HALF_LANES;
    bool live = at < count;
    const float* x = m + (live ? at / rank * cols : 0);
    const float* y = q + (live ? at % rank * cols : 0);
    float own = 0.0f, sum = 0.0f;
    for (i64 i = lane; live && i < cols; i += HALF_LANES) own += x[i] * y[i];
    for (int l = 0; l < HALF_LANES; l++) sum += __shfl_sync(FULL_WARP, own, lane_of_warp() / HALF_LANES * HALF_LANES + l);
    if (live && lane == 0) p[at] = sum;
}

// The dot product of two columns; all lanes get it.
DEVICE double dot_of_columns(const float* p, i64 rows, i64 rank, i64 a, i64 b) {
    double sum = -0.0;
    for (i64 first = 0; first < rows; first += WARP) {
        i64 row = first + lane_of_warp();
        double term = row < rows ? static_cast<double>(p[row * rank + a]) * static_cast<double>(p[row * rank + b]) : 0.0;
        for (int l = 0; l < WARP; l++) {
            double next = __shfl_sync(FULL_WARP, term, l);
            if (first + l < rows) sum += next;
        }
    }
    return sum;
}

// `lengths` [rank] is scratch.
KERNEL low_rank_orthonormal(float* p, i64 rows, i64 rank, double* lengths) {
    int lane = lane_of_warp();
    // A lane reads only its own writes: all lanes write the same values.
    for (i64 column = 0; column < rank; column++) lengths[column] = dot_of_columns(p, rows, rank, column, column);
    for (i64 column = 0; column < rank; column++) {
        double left = dot_of_columns(p, rows, rank, column, column);
        // A column in the span of the others leaves only rounding errors.
        double factor = left <= 1e-10 * lengths[column] ? 0.0 : 1.0 / sqrt(left);
        for (i64 row = lane; row < rows; row += WARP) {
            p[row * rank + column] = static_cast<float>(static_cast<double>(p[row * rank + column]) * factor);
        }
        for (i64 other = column + 1; other < rank; other++) {
            double along = dot_of_columns(p, rows, rank, column, other);
            for (i64 row = lane; row < rows; row += WARP) {
                float* to = p + row * rank + other;
                *to = static_cast<float>(static_cast<double>(*to) - along * static_cast<double>(p[row * rank + column]));
            }
        }
    }
}

KERNEL low_rank_transposed(const float* m, const float* p, float* q, i64 rows, i64 cols, i64 rank) {
    i64 at = global_thread();
    if (at >= rank * cols) return;
    i64 column = at / cols, j = at % cols;
    float sum = 0.0f;
    for (i64 row = 0; row < rows; row++) sum += m[row * cols + j] * p[row * rank + column];
    q[at] = sum;
}

KERNEL low_rank_join(const float* p, const float* q, float* out, i64 cols, i64 rank, float among, i64 count) {
    i64 at = global_thread();
    if (at >= count) return;
    i64 row = at / cols, j = at % cols;
    float sum = 0.0f;
    for (i64 column = 0; column < rank; column++) sum += p[row * rank + column] * q[column * cols + j];
    out[at] = among > 1.0f ? sum / among : sum;
}
