// Sums of tensors, biases and residuals, and the sums over rows that are gradients of biases and gains.
//
//   out = a + b;  a += b;  out = x + bias;  out = (x + bias) + residual;  dbias = Σ_rows dy
//
// Shapes    a, b, out, x, residual, dy [rows, n]; bias, dbias [n]; parts [parts, n]; sums [blocks, n].
// Geometry  one thread per 16 bytes of each tensor (neighbours.cuh): four elements, two of f64, or eight of 16 bits;
//           for sums over rows one thread per 16 bytes of the columns of a part (of up to 64 rows); then one block of
//           threads per 32 columns of the parts of a block of rows, of which 8 warps load 64 parts at a time and one
//           warp adds them, while the next are on their way.
// Bytes     4 for each element of each tensor named, 2 in 16 bits (_16); for sums by parts, 4 parts n more written and
//           read.
// Bits      as on the CPU: crates/cpu/src/kernels/pointwise.rs, RowSums in crates/cpu/src/lib.rs.
#include "halves.cuh"
#include "warp.cuh"

struct Plus {
    template <class T> DEVICE T operator()(T a, T b) const { return a + b; }
};

KERNEL add(const float* a, const float* b, float* out, i64 count) { join_vectors<FOUR>(a, b, out, count, Plus()); }

KERNEL add_f64(const double* a, const double* b, double* out, i64 count) { join_vectors<2>(a, b, out, count, Plus()); }

KERNEL add_16(const u16* a, const u16* b, u16* out, i64 count, int f16) {
    in_type(f16, [&](auto of) { join_vectors<EIGHT>(of(a), of(b), of(out), count, Plus()); });
}

KERNEL add_assign(float* a, const float* b, i64 count) { join_vectors<FOUR>(a, b, a, count, Plus()); }

// For the losses of samples.
KERNEL add_assign_f64(double* a, const double* b, i64 count) { join_vectors<2>(a, b, a, count, Plus()); }

KERNEL add_assign_16(u16* a, const u16* b, i64 count, int f16) {
    in_type(f16, [&](auto of) { join_vectors<EIGHT>(of(a), of(b), of(a), count, Plus()); });
}

KERNEL bias(const float* x, const float* bias, float* out, i64 count, i64 n) { join_vectors<FOUR>(x, beside(bias, n), out, count, Plus()); }

KERNEL bias_16(const u16* x, const u16* bias, u16* out, i64 count, i64 n, int f16) {
    in_type(f16, [&](auto of) { join_vectors<EIGHT>(of(x), beside(of(bias), n), of(out), count, Plus()); });
}

template <int N, class In, class Out> DEVICE void bias_residual_of(In x, In bias, In residual, Out out, i64 count, i64 n) {
    i64 at = global_thread() * N;
    if (at >= count) return;
    Vector<float, N> y = load_vector<N>(x, at, count), b = load_vector<N>(beside(bias, n), at, count), r = load_vector<N>(residual, at, count);
#pragma unroll
    for (int j = 0; j < N; j++) y.of[j] = (y.of[j] + b.of[j]) + r.of[j];
    store_vector(out, at, count, y);
}

KERNEL bias_residual(const float* x, const float* bias, const float* residual, float* out, i64 count, i64 n) {
    bias_residual_of<FOUR>(x, bias, residual, out, count, n);
}

KERNEL bias_residual_16(const u16* x, const u16* bias, const u16* residual, u16* out, i64 count, i64 n, int f16) {
    in_type(f16, [&](auto of) { bias_residual_of<EIGHT>(of(x), of(bias), of(residual), of(out), count, n); });
}

// For each part, the sum of the rows starts[part] .. starts[part + 1], one after another, from zero.
template <int N, class In> DEVICE void parts_of(In x, const i64* starts, float* sums, i64 parts, i64 n) {
    RowPlace at = row_place<N>(parts, n);
    if (!at.there) return;
    Vector<float, N> sum = {};
    auto load = [=](i64 row) { return load_vector<N>(bits_of(x + row * n), at.column, n); };
    in_order(starts[at.row], starts[at.row + 1], load, [&](i64, const auto& bits) {
        Vector<float, N> next = numbers_of(x, bits);
#pragma unroll
        for (int j = 0; j < N; j++) sum.of[j] += next.of[j];
    });
    store_vector(sums + at.row * n, at.column, n, sum);
}

KERNEL sum_parts(const float* x, const i64* starts, float* sums, i64 parts, i64 n) { parts_of<FOUR>(x, starts, sums, parts, n); }

KERNEL sum_parts_16(const u16* x, const i64* starts, float* sums, i64 parts, i64 n, int f16) {
    in_type(f16, [&](auto of) { parts_of<EIGHT>(of(x), starts, sums, parts, n); });
}

#define SUM_WARPS (THREADS / WARP)
#define SUM_EACH 8  // parts that a warp loads at a time
#define SUM_PARTS (SUM_WARPS * SUM_EACH)

// For each block, the sum of the parts starts[block] .. starts[block + 1], one after another, from zero. `parts` are
// those of one tensor, or of two, whose sums are then sums and second.
KERNEL sum_blocks(const float* parts, const i64* starts, float* sums, float* second, i64 blocks, i64 n) {
    SHARED(float, held, SUM_PARTS * WARP);
    int lane = lane_of_warp(), warp = static_cast<int>(threadIdx.x) / WARP;
    i64 tensor = blockIdx.x / blocks, block = blockIdx.x % blocks, column = static_cast<i64>(blockIdx.y) * WARP + lane;
    i64 begin = starts[block], end = starts[block + 1];
    const float* from = parts + tensor * starts[blocks] * n + column;
    float loaded[SUM_EACH], sum = 0.0f;
    auto load = [&](i64 first) {
#pragma unroll
        for (int i = 0; i < SUM_EACH; i++) {
            i64 part = first + warp * SUM_EACH + i;
            loaded[i] = part < end && column < n ? from[part * n] : 0.0f;
        }
    };
    load(begin);
    for (i64 first = begin; first < end; first += SUM_PARTS) {
#pragma unroll
        for (int i = 0; i < SUM_EACH; i++) held[(warp * SUM_EACH + i) * WARP + lane] = loaded[i];
        __syncthreads();  // the parts are in shared memory
        load(first + SUM_PARTS);
        int count = static_cast<int>(smaller(SUM_PARTS, end - first));
        for (int i = 0; warp == 0 && i < count; i++) sum += held[i * WARP + lane];
        __syncthreads();  // they have been read
    }
    if (warp == 0 && column < n) (tensor == 0 ? sums : second)[block * n + column] = sum;
}
