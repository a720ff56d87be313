// Dropout whose mask does not depend on the mesh: the counter-based random bits of crates/tensor/src/random.rs.
//
//   y = x factor(i),  factor(i) = 0 if uniform(key, i) < p else 1 / (1 - p),  i the row-major index in the global tensor
//   jitter (of a router's input): factor(i) = low + step uniform(key, i)
//
// Shapes    x, y [count]: a part of the global tensor. The backward is the same call with dy and dx.
// Geometry  one thread per four elements, eight of 16 bits, by 16 bytes (neighbours.cuh); a block of Philox that
//           several of them share is computed once.
// Bytes     4 read and 4 written per element, half in 16 bits (_16).
// Bits      as on the CPU: crates/cpu/src/kernels/dropout.rs.
#include "halves.cuh"
#include "random.cuh"

// src/variants.rs overrides it.
#ifndef EACH
#define EACH 4
#endif

// The place of a local tensor of `dims` dims in the global one: sizes are its extents, then the first global index of
// each dim, then the global extents.
DEVICE u64 global_index(const i64* sizes, int dims, i64 local) {
    u64 index = 0, stride = 1;
    for (int d = dims - 1; d >= 0; d--) {
        index += static_cast<u64>(local % sizes[d] + sizes[dims + d]) * stride;
        local /= sizes[d];
        stride *= static_cast<u64>(sizes[2 * dims + d]);
    }
    return index;
}

// y = x times `factor` of the random words of each global element.
template <int N, class In, class Out, class Factor>
DEVICE void times_drawn(In x, const i64* sizes, int dims, u32 key0, u32 key1, Out y, i64 count, Factor factor) {
    i64 at = global_thread() * N;
    if (at >= count) return;
    Vector<float, N> values = load_vector<N>(x, at, count);
    Words words = {};
    u64 block = ~0ull, index = 0;
    i64 columns = dims > 0 ? sizes[dims - 1] : 1, column = at % columns;
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (at + j >= count) break;
        // Neighbours in a row of the last dim are neighbours in the global tensor.
        index = j > 0 && column > 0 ? index + 1 : global_index(sizes, dims, at + j);
        column = column + 1 == columns ? 0 : column + 1;
        if (index / 4 != block) {
            block = index / 4;
            words = philox(block, key0, key1);
        }
        values.of[j] = factor(words, index) * values.of[j];
    }
    store_vector(y, at, count, values);
}

KERNEL dropout(const float* x, const i64* sizes, int dims, u32 key0, u32 key1, float p, float kept, float* y, i64 count) {
    auto factor = [&](const Words& words, u64 index) { return dropout_factor(words, index, p, kept); };
    times_drawn<EACH>(x, sizes, dims, key0, key1, y, count, factor);
}

KERNEL jitter(const float* x, const i64* sizes, int dims, u32 key0, u32 key1, float low, float step, float* y, i64 count) {
    auto factor = [&](const Words& words, u64 index) { return low + step * uniform(words, index); };
    times_drawn<FOUR>(x, sizes, dims, key0, key1, y, count, factor);
}

KERNEL dropout_16(const u16* x, const i64* sizes, int dims, u32 key0, u32 key1, float p, float kept, u16* y, i64 count, int f16) {
    auto factor = [=](const Words& words, u64 index) { return dropout_factor(words, index, p, kept); };
    in_type(f16, [&](auto of) { times_drawn<EIGHT>(of(x), sizes, dims, key0, key1, of(y), count, factor); });
}
