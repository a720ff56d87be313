// Messages of few elements, the largest or randomly drawn: their indices, and gathers and scatters by them.
// crates/compress/src/wire.rs has the format.
//
//   chosen = the `keep` largest |x| of each part, ties to the first;  out[i] = x[indices[i]] factor;  out[indices[i]] = values[i]
//
// Shapes    x [len] in parts of `unit`; indices [count] (u32), ascending, below `below`: as a bitmap, or as the low
//           `width` bits of each, and high parts encoded by the number of zeros before a one. taken: a bitmap of u64.
// Geometry  choice: one block of threads per part, which finds the smallest kept key bit by bit; draws: one thread;
//           decoding: one block; else one thread per byte or element.
// Bytes     choice 128 read per element, most from the caches; slow for one part of millions of elements.
// Bits      integers, as on the CPU: crates/compress/src/select.rs, indices.rs, sparse.rs. Infinities and NaN count as
//           larger than all numbers.
#include "message.cuh"
#include "random.cuh"

DEVICE u32 key_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

DEVICE i64 plus(i64 a, i64 b) { return a + b; }

// Parts of `unit` elements keep `keep` of them, the last one `last_keep` if it is shorter.
KERNEL topk_choose(const float* x, i64 len, i64 unit, i64 keep, i64 last_keep, u32* indices) {
    SHARED(i64, parts, BLOCK_WARPS);
    i64 part = blockIdx.x, begin = part * unit, n = smaller(unit, len - begin), count = n == unit ? keep : last_keep;
    // The largest key that at least `count` elements reach.
    u32 threshold = 0;
    for (int bit = 30; bit >= 0; bit--) {
        u32 trial = threshold | 1u << bit;
        i64 own = 0;
        for (i64 i = threadIdx.x; i < n; i += THREADS) own += key_of(x[begin + i]) >= trial ? 1 : 0;
        if (over_block(own, parts, plus) >= count) threshold = trial;
    }
    i64 own = 0;
    for (i64 i = threadIdx.x; i < n; i += THREADS) own += key_of(x[begin + i]) > threshold ? 1 : 0;
    i64 ties = count - over_block(own, parts, plus);
    i64 equals = 0, to = part * keep;
    for (i64 first = 0; first < n; first += THREADS) {
        i64 i = first + threadIdx.x;
        u32 key = i < n ? key_of(x[begin + i]) : 0;
        bool equal = i < n && key == threshold;
        Prefix of_equal = prefix_of_block(equal ? 1 : 0, parts);
        bool chosen = i < n && (key > threshold || (equal && equals + of_equal.before < ties));
        Prefix of_chosen = prefix_of_block(chosen ? 1 : 0, parts);
        if (chosen) indices[to + of_chosen.before] = static_cast<u32>(begin + i);
        equals += of_equal.all, to += of_chosen.all;
    }
}

// Draws `count` numbers below `below` (Floyd) by the key and the first counter in `draws`, 16 bytes. `taken` is zero
// before.
KERNEL draw_indices(const u8* draws, i64 count, i64 below, u64* taken) {
    if (global_thread() > 0) return;
    // The values may draw from the same stream, so this uses another key.
    u32 key0 = ~get_u32(draws), key1 = get_u32(draws + 4);
    u64 start = static_cast<u64>(get_u32(draws + 12)) << 32 | get_u32(draws + 8);
    for (i64 i = 0; i < count; i++) {
        u64 last = static_cast<u64>(below - count + i), range = last + 1;
        Words words = philox(start + static_cast<u64>(i), key0, key1);
        // The high half of the product of 64 bits, words 1 and 0, and a range of up to 33 bits.
        u64 low = static_cast<u64>(words.word[0]) * range, high = static_cast<u64>(words.word[1]) * range + (low >> 32);
        u64 at = high >> 32;
        if (taken[at / 64] >> (at % 64) & 1u) at = last;
        taken[at / 64] |= 1ull << (at % 64);
    }
}

// The first index whose number of(index) is at least x; the numbers ascend.
template <class Of> DEVICE i64 first_from(i64 count, i64 x, Of of) {
    i64 low = 0, high = count;
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (of(middle) < x) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Sets bit (index >> `width`) for each index, plus the position of the index if `spread`: a bitmap, or the high parts
// of packed differences.
KERNEL indices_bits(const u32* indices, i64 count, int width, int spread, u8* to, i64 bytes) {
    i64 at = global_thread();
    if (at >= bytes) return;
    auto bit_of = [&](i64 i) { return static_cast<i64>(indices[i] >> width) + (spread ? i : 0); };
    u32 byte = 0;
    for (i64 i = first_from(count, 8 * at, bit_of); i < count && bit_of(i) < 8 * at + 8; i++) byte |= 1u << (bit_of(i) - 8 * at);
    to[at] = static_cast<u8>(byte);
}

// Packs the low `width` bits of each index, one after the other.
KERNEL indices_low(const u32* indices, i64 count, i64 width, u8* to, i64 bytes) {
    i64 at = global_thread();
    if (at >= bytes) return;
    u32 byte = 0;
    for (i64 bit = 0; bit < 8; bit++) {
        i64 number = (8 * at + bit) / width, of = (8 * at + bit) % width;
        if (number < count) byte |= (indices[number] >> of & 1u) << bit;
    }
    to[at] = static_cast<u8>(byte);
}

// Reads the indices written by the kernels above. Reports a wrong number of indices, and indices that are not below
// `below`; these become 0.
KERNEL indices_read(const u8* low, const u8* high, i64 high_bytes, i64 count, i64 below, int width, int spread, u32* indices,
                    i64* found) {
    SHARED(i64, parts, BLOCK_WARPS);
    i64 total = 0;
    for (i64 first = 0; first < high_bytes; first += THREADS) {
        i64 at = first + threadIdx.x;
        u32 byte = at < high_bytes ? high[at] : 0;
        Prefix ones = prefix_of_block(__popc(byte), parts);
        i64 number = total + ones.before;
        for (int bit = 0; bit < 8; bit++) {
            if ((byte >> bit & 1u) == 0 || number >= count) continue;
            i64 index = 8 * at + bit;
            if (spread) {
                u32 rest = 0;
                for (int b = 0; b < width; b++) {
                    i64 place = number * width + b;
                    rest |= (static_cast<u32>(low[place / 8]) >> (place % 8) & 1u) << b;
                }
                index = (index - number) << width | static_cast<i64>(rest);
            }
            if (index >= below) *found = 1;
            indices[number] = index < below ? static_cast<u32>(index) : 0;
            number++;
        }
        total += ones.all;
    }
    for (i64 i = total + threadIdx.x; i < count; i += THREADS) indices[i] = 0;
    if (threadIdx.x == 0 && total != count) *found = 1;
}

KERNEL take_values(const float* x, const u32* indices, float factor, float* out, i64 count) {
    i64 i = global_thread();
    if (i < count) out[i] = x[indices[i]] * factor;
}

KERNEL put_values(const float* values, const u32* indices, float* out, int add, i64 count) {
    i64 i = global_thread();
    if (i < count) fold(out + indices[i], values[i], add);
}
