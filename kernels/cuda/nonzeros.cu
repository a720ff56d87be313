// Vectors packed without their zeros (Gist, Jain et al. 2018): one bit per element, and the elements whose bit is set,
// in order.
//
//   bits[i / 8] has bit i % 8 set if x[i] is not +0;  values = the x[i] whose bit is set;  back: x[i] = the next value, or +0
//
// Shapes    x [count], bit patterns of 32 or 16 bits; bits [bytes = count / 8 rounded up]; counts [chunks], of
//           CHUNK_BYTES bytes each; starts [chunks + 1].
// Geometry  marks: one thread per byte; counts, values and elements: one block of threads per chunk, 8 bytes per
//           thread; starts: one block.
// Bytes     each element read twice, its value written; unpacking: each value read, each element written.
// Bits      bit patterns, as on the CPU: crates/cpu/src/kernels/zeros.rs.
#include "message.cuh"

#define EACH_BYTES 8
#define CHUNK_BYTES (THREADS * EACH_BYTES)

template <class T> DEVICE void mark(const T* x, u8* bits, i64 count) {
    i64 at = global_thread();
    if (8 * at >= count) return;
    u32 byte = 0;
    for (i64 j = 0; j < smaller(8, count - 8 * at); j++) byte |= x[8 * at + j] != 0 ? 1u << j : 0u;
    bits[at] = static_cast<u8>(byte);
}

KERNEL nonzeros_mark_32(const u32* x, u8* bits, i64 count) { mark(x, bits, count); }

KERNEL nonzeros_mark_16(const u16* x, u8* bits, i64 count) { mark(x, bits, count); }

// The first byte of this thread, and the number of set bits in its bytes.
DEVICE i64 first_byte() { return static_cast<i64>(blockIdx.x) * CHUNK_BYTES + static_cast<i64>(threadIdx.x) * EACH_BYTES; }

DEVICE i64 set_bits(const u8* bits, i64 bytes) {
    i64 set = 0;
    for (i64 at = first_byte(); at < smaller(bytes, first_byte() + EACH_BYTES); at++) set += __popc(bits[at]);
    return set;
}

KERNEL nonzeros_count(const u8* bits, i64 bytes, i64* counts) {
    SHARED(i64, parts, BLOCK_WARPS);
    i64 all = over_block(set_bits(bits, bytes), parts, [](i64 a, i64 b) { return a + b; });
    if (threadIdx.x == 0) counts[blockIdx.x] = all;
}

KERNEL nonzeros_starts(const i64* counts, i64 chunks, i64* starts) {
    SHARED(i64, parts, BLOCK_WARPS);
    i64 total = 0;
    for (i64 first = 0; first < chunks; first += THREADS) {
        i64 at = first + threadIdx.x;
        Prefix sum = prefix_of_block(at < chunks ? counts[at] : 0, parts);
        if (at < chunks) starts[at] = total + sum.before;
        total += sum.all;
    }
    if (threadIdx.x == 0) starts[chunks] = total;
}

// Calls each(element, number, whether its bit is set) for the elements of this thread, with the number of the next
// value.
template <class Parts, class Each>
DEVICE void for_elements(const u8* bits, i64 bytes, const i64* starts, i64 count, Parts& parts, Each each) {
    i64 number = starts[blockIdx.x] + prefix_of_block(set_bits(bits, bytes), parts).before;
    for (i64 at = first_byte(); at < smaller(bytes, first_byte() + EACH_BYTES); at++) {
        for (i64 j = 0; j < 8 && 8 * at + j < count; j++) {
            bool set = (bits[at] >> j & 1) != 0;
            each(8 * at + j, number, set);
            number += set ? 1 : 0;
        }
    }
}

template <class T, class Parts>
DEVICE void gather(const T* x, const u8* bits, i64 bytes, const i64* starts, T* values, i64 count, Parts& parts) {
    for_elements(bits, bytes, starts, count, parts, [&](i64 element, i64 number, bool set) {
        if (set) values[number] = x[element];
    });
}

KERNEL nonzeros_gather_32(const u32* x, const u8* bits, i64 bytes, const i64* starts, u32* values, i64 count) {
    SHARED(i64, parts, BLOCK_WARPS);
    gather(x, bits, bytes, starts, values, count, parts);
}

KERNEL nonzeros_gather_16(const u16* x, const u8* bits, i64 bytes, const i64* starts, u16* values, i64 count) {
    SHARED(i64, parts, BLOCK_WARPS);
    gather(x, bits, bytes, starts, values, count, parts);
}

// `held` values; a missing value is +0.
template <class T, class Parts>
DEVICE void scatter(const u8* bits, i64 bytes, const i64* starts, const T* values, i64 held, T* x, i64 count, Parts& parts) {
    for_elements(bits, bytes, starts, count, parts, [&](i64 element, i64 number, bool set) {
        x[element] = set && number < held ? values[number] : static_cast<T>(0);
    });
}

KERNEL nonzeros_scatter_32(const u8* bits, i64 bytes, const i64* starts, const u32* values, i64 held, u32* x, i64 count) {
    SHARED(i64, parts, BLOCK_WARPS);
    scatter(bits, bytes, starts, values, held, x, count, parts);
}

KERNEL nonzeros_scatter_16(const u8* bits, i64 bytes, const i64* starts, const u16* values, i64 held, u16* x, i64 count) {
    SHARED(i64, parts, BLOCK_WARPS);
    scatter(bits, bytes, starts, values, held, x, count, parts);
}
