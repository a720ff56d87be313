// Reductions of several ranks' buffers in the balanced tree (crates/core/src/tree.rs): three ranks give (a + b) + c.
//
//   out[i] = Σ_ranks inputs[rank][i];  or their maximum or minimum
//
// Shapes    inputs [ranks], the addresses of buffers [count]; out [count], which may be one of them.
// Geometry  one thread per 16 bytes of each rank's buffer (neighbours.cuh), its elements side by side for fewer than 16
//           ranks, else one after another; pending sums are in registers. The same for sums of consecutive vectors in
//           place of ranks.
// Bytes     reads an element per rank and writes one.
// Bits      as in the communicator of threads, crates/core/src/comm/thread/reduce.rs: 16-bit numbers are added in f32
//           and rounded once, integers wrap around. A maximum or minimum is NaN if any is.
#include "float16.cuh"
#include "tree.cuh"
#include "neighbours.cuh"

// A type of elements: its stored type, and its type in reductions.
template <class T> struct Exact {
    using Stored = T;
    using Wide = T;
    DEVICE static T load(T x) { return x; }
    DEVICE static T store(T x) { return x; }
};

using F32 = Exact<float>;
using F64 = Exact<double>;
using I32 = Exact<int>;
using I64 = Exact<i64>;
using U8 = Exact<u8>;

struct Bf16 {
    using Stored = u16;
    using Wide = float;
    DEVICE static float load(u16 x) { return from_bf16(x); }
    DEVICE static u16 store(float x) { return to_bf16(x); }
};

struct F16 {
    using Stored = u16;
    using Wide = float;
    DEVICE static float load(u16 x) { return from_f16(x); }
    DEVICE static u16 store(float x) { return to_f16(x); }
};

// Levels of the tree for fewer than 16 ranks.
#define FEW_LEVELS 4

// `input_of(rank)` is the start of a rank's buffer.
template <class Join, class Of, class Inputs>
DEVICE void reduce_inputs(Inputs input_of, i64 ranks, typename Of::Stored* out, i64 count) {
    using Stored = typename Of::Stored;
    constexpr int N = SIXTEEN_BYTES(Stored);
    i64 at = global_thread() * N;
    if (at >= count) return;
    if (ranks < 1 << FEW_LEVELS) {
        TreeOf<Join, typename Of::Wide, FEW_LEVELS> trees[N];
        for (i64 rank = 0; rank < ranks; rank++) {
            Vector<Stored, N> input = load_vector<N>(input_of(rank), at, count);
#pragma unroll
            for (int j = 0; j < N; j++) trees[j].push(Of::load(input.of[j]));
        }
        Vector<Stored, N> result;
#pragma unroll
        for (int j = 0; j < N; j++) result.of[j] = Of::store(trees[j].finish());
        store_vector(out, at, count, result);
        return;
    }
    for (i64 i = at; i < smaller(at + N, count); i++) {
        TreeOf<Join, typename Of::Wide> tree;
        for (i64 rank = 0; rank < ranks; rank++) tree.push(Of::load(input_of(rank)[i]));
        out[i] = Of::store(tree.finish());
    }
}

template <class Join, class Of>
DEVICE void reduce(const typename Of::Stored* const* inputs, i64 ranks, typename Of::Stored* out, i64 count) {
    reduce_inputs<Join, Of>([=](i64 rank) { return inputs[rank]; }, ranks, out, count);
}

KERNEL reduce_sum_f32(const float* const* inputs, i64 ranks, float* out, i64 count) {
    reduce<Sum, F32>(inputs, ranks, out, count);
}

KERNEL reduce_sum_f64(const double* const* inputs, i64 ranks, double* out, i64 count) {
    reduce<Sum, F64>(inputs, ranks, out, count);
}

KERNEL reduce_sum_bf16(const u16* const* inputs, i64 ranks, u16* out, i64 count) {
    reduce<Sum, Bf16>(inputs, ranks, out, count);
}

KERNEL reduce_sum_f16(const u16* const* inputs, i64 ranks, u16* out, i64 count) {
    reduce<Sum, F16>(inputs, ranks, out, count);
}

KERNEL reduce_sum_i32(const int* const* inputs, i64 ranks, int* out, i64 count) {
    reduce<Sum, I32>(inputs, ranks, out, count);
}

KERNEL reduce_sum_i64(const i64* const* inputs, i64 ranks, i64* out, i64 count) {
    reduce<Sum, I64>(inputs, ranks, out, count);
}

KERNEL reduce_sum_u8(const u8* const* inputs, i64 ranks, u8* out, i64 count) {
    reduce<Sum, U8>(inputs, ranks, out, count);
}

KERNEL reduce_max_f32(const float* const* inputs, i64 ranks, float* out, i64 count) {
    reduce<Max, F32>(inputs, ranks, out, count);
}

KERNEL reduce_max_f64(const double* const* inputs, i64 ranks, double* out, i64 count) {
    reduce<Max, F64>(inputs, ranks, out, count);
}

KERNEL reduce_max_bf16(const u16* const* inputs, i64 ranks, u16* out, i64 count) {
    reduce<Max, Bf16>(inputs, ranks, out, count);
}

KERNEL reduce_max_f16(const u16* const* inputs, i64 ranks, u16* out, i64 count) {
    reduce<Max, F16>(inputs, ranks, out, count);
}

KERNEL reduce_max_i32(const int* const* inputs, i64 ranks, int* out, i64 count) {
    reduce<Max, I32>(inputs, ranks, out, count);
}

KERNEL reduce_max_i64(const i64* const* inputs, i64 ranks, i64* out, i64 count) {
    reduce<Max, I64>(inputs, ranks, out, count);
}

KERNEL reduce_max_u8(const u8* const* inputs, i64 ranks, u8* out, i64 count) {
    reduce<Max, U8>(inputs, ranks, out, count);
}

KERNEL reduce_min_f32(const float* const* inputs, i64 ranks, float* out, i64 count) {
    reduce<Min, F32>(inputs, ranks, out, count);
}

KERNEL reduce_min_f64(const double* const* inputs, i64 ranks, double* out, i64 count) {
    reduce<Min, F64>(inputs, ranks, out, count);
}

KERNEL reduce_min_bf16(const u16* const* inputs, i64 ranks, u16* out, i64 count) {
    reduce<Min, Bf16>(inputs, ranks, out, count);
}

KERNEL reduce_min_f16(const u16* const* inputs, i64 ranks, u16* out, i64 count) {
    reduce<Min, F16>(inputs, ranks, out, count);
}

KERNEL reduce_min_i32(const int* const* inputs, i64 ranks, int* out, i64 count) {
    reduce<Min, I32>(inputs, ranks, out, count);
}

KERNEL reduce_min_i64(const i64* const* inputs, i64 ranks, i64* out, i64 count) {
    reduce<Min, I64>(inputs, ranks, out, count);
}

KERNEL reduce_min_u8(const u8* const* inputs, i64 ranks, u8* out, i64 count) {
    reduce<Min, U8>(inputs, ranks, out, count);
}

// The sum of `vectors` vectors of n elements that follow each other in x.
KERNEL tree_sum(const float* x, i64 vectors, float* out, i64 n) {
    reduce_inputs<Sum, F32>([=](i64 vector) { return x + vector * n; }, vectors, out, n);
}
