// Dropout whose mask does not depend on the mesh: the counter-based random bits of crates/tensor/src/random.rs.
//
//   y = x factor(i),  factor(i) = 0 if uniform(key, i) < p else 1 / (1 - p),  i the row-major index in the global tensor
//   jitter, of the input of a router: factor(i) = low + step uniform(key, i)
//
// Shapes    x, y [count]: a part of the global tensor. The backward is the same call with dy and dx.
// Geometry  a thread four elements, so that where they are neighbours in a block of Philox it is computed once.
// Bytes     4 read and 4 written an element, half in 16 bits (_16).
// Bits      those of the CPU: crates/tensor/src/cpu/kernels/dropout.rs.
#include "halves.cuh"
#include "random.cuh"

// src/variants.rs changes it.
#ifndef EACH
#define EACH 4
#endif

// The place of a local tensor of `dims` dims in the global one: sizes are its extents, then the first global index of each dim, then the
// global extents.
DEVICE u64 global_index(const i64* sizes, int dims, i64 local) {
    u64 index = 0, stride = 1;
    for (int d = dims - 1; d >= 0; d--) {
        index += static_cast<u64>(local % sizes[d] + sizes[dims + d]) * stride;
        local /= sizes[d];
        stride *= static_cast<u64>(sizes[2 * dims + d]);
    }
    return index;
}

// y = x times the factor that `factor` makes of each global element's random words.
template <class In, class Out, class Factor>
DEVICE void times_drawn(In x, const i64* sizes, int dims, u32 key0, u32 key1, Out y, i64 count, Factor factor) {
    i64 first = global_thread() * EACH;
    Words words = {};
    u64 block = ~0ull;
    for (i64 i = first; i < smaller(count, first + EACH); i++) {
        u64 index = global_index(sizes, dims, i);
        if (index / 4 != block) {
            block = index / 4;
            words = philox(block, key0, key1);
        }
        store(y, i, factor(words, index) * x[i]);
    }
}

KERNEL dropout(const float* x, const i64* sizes, int dims, u32 key0, u32 key1, float p, float kept, float* y, i64 count) {
    auto factor = [&](const Words& words, u64 index) { return dropout_factor(words, index, p, kept); };
    times_drawn(x, sizes, dims, key0, key1, y, count, factor);
}

KERNEL jitter(const float* x, const i64* sizes, int dims, u32 key0, u32 key1, float low, float step, float* y, i64 count) {
    auto factor = [&](const Words& words, u64 index) { return low + step * uniform(words, index); };
    times_drawn(x, sizes, dims, key0, key1, y, count, factor);
}

KERNEL dropout_16(const u16* x, const i64* sizes, int dims, u32 key0, u32 key1, float p, float kept, u16* y, i64 count, int f16) {
    auto factor = [&](const Words& words, u64 index) { return dropout_factor(words, index, p, kept); };
    times_drawn(halves(x, f16), sizes, dims, key0, key1, halves(y, f16), count, factor);
}
