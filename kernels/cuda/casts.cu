// Casts between numbers of 32 and 16 bits, rounding to TF32, and copies between tensors and a bucket of many tensors.
//
//   to = round(from), to nearest, ties to even; to TF32 away from zero
//
// Shapes    from, to [count]. A bucket holds tensor t at starts[t] .. starts[t + 1]; tensors [tensors] are their
//           addresses.
// Geometry  one thread per eight elements, for buckets and TF32 four, by 16 bytes (neighbours.cuh).
// Bytes     6 per element; for buckets and TF32 4 read and 4 written.
// Bits      exact where nothing is rounded. f32 to bf16: as the communicator rounds (bf16::from_f32 of crate half); to
//           operands of products, where subnormals become zeros: crates/cpu/src/kernels/round.rs. f32 to f16: half's
//           f16::from_f32.
#include "halves.cuh"

struct Same {
    DEVICE float operator()(float x) const { return x; }
};

KERNEL f32_to_bf16(const float* from, u16* to, i64 count) {
    map_vectors<EIGHT>(from, to, count, [](float x) { return to_bf16(x); });
}

KERNEL f32_to_operand(const float* from, u16* to, i64 count) {
    map_vectors<EIGHT>(from, Bf16Type()(to), count, Same());
}

KERNEL f32_to_tf32(const float* from, float* to, i64 count) {
    map_vectors<FOUR>(from, to, count, [](float x) { return to_tf32(x); });
}

KERNEL bf16_to_f32(const u16* from, float* to, i64 count) {
    map_vectors<EIGHT>(Bf16Type()(from), to, count, Same());
}

KERNEL f32_to_f16(const float* from, u16* to, i64 count) {
    map_vectors<EIGHT>(from, F16Type()(to), count, Same());
}

KERNEL f16_to_f32(const u16* from, float* to, i64 count) {
    map_vectors<EIGHT>(F16Type()(from), to, count, Same());
}

KERNEL bucket_gather(const float* const* tensors, const i64* starts, i64 count_tensors, float* bucket, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    i64 tensor = range_of(starts, count_tensors, at);
    Vector<float, FOUR> four = {};
    if (at + FOUR <= starts[tensor + 1]) four = load_vector<FOUR>(tensors[tensor], at - starts[tensor], starts[tensor + 1] - starts[tensor]);
    else
#pragma unroll
        for (int j = 0; j < FOUR; j++) {
            if (at + j >= count) break;
            tensor = range_of(starts, count_tensors, at + j);
            four.of[j] = tensors[tensor][at + j - starts[tensor]];
        }
    store_vector(bucket, at, count, four);
}

KERNEL bucket_scatter(const float* bucket, const i64* starts, i64 count_tensors, float* const* tensors, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    i64 tensor = range_of(starts, count_tensors, at);
    Vector<float, FOUR> four = load_vector<FOUR>(bucket, at, count);
    if (at + FOUR <= starts[tensor + 1]) {
        store_vector(tensors[tensor], at - starts[tensor], starts[tensor + 1] - starts[tensor], four);
        return;
    }
#pragma unroll
    for (int j = 0; j < FOUR; j++) {
        if (at + j >= count) break;
        tensor = range_of(starts, count_tensors, at + j);
        tensors[tensor][at + j - starts[tensor]] = four.of[j];
    }
}
