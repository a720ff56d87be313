// Messages of values in fewer bits each: crates/compress/src/wire.rs has the format, values.rs the methods.
//
//   fp8: code = round(x / scale), scale the least power of two that fits;  quant: code = round((x - min) / step);  sign: scale = mean |x|
//
// Shapes    x, out [count], in parts of `unit` elements; a scale of 4 bytes a part, of quant a minimum and a step; codes [count] (u8) as bytes, or as
//           `bits` bit planes in tiles of 512 elements. Messages begin at any byte.
// Geometry  scales: a block of threads a part, of sign 16 threads; codes and values: a thread an element; planes: a thread a byte.
// Bytes     4 read an element for its scale and 4 for its code; codes once more for planes.
// Bits      those of the CPU: crates/compress/src/values.rs, fp8.rs, planes.rs.
#include "message.cuh"
#include "random.cuh"

#define TILE_CODES 512
#define INTEGERS 8388608.0f  // 2^23: what is added to it is rounded to integers
#define NOT_A_NUMBER __uint_as_float(0x7fc00000u)
#define INFINITE_BITS 0x7f800000u

KERNEL message_words(u8* to, u64 first, u64 second) {
    i64 at = global_thread();
    if (at < 16) to[at] = static_cast<u8>((at < 8 ? first : second) >> (8 * (at % 8)));
}

// Finds a header that is not these 16 bytes.
KERNEL message_check(const u8* header, u64 first, u64 second, i64* found) {
    i64 at = global_thread();
    if (at < 16 && header[at] != static_cast<u8>((at < 8 ? first : second) >> (8 * (at % 8)))) *found = 1;
}

KERNEL f32_pack(const float* x, u8* to, i64 count) {
    i64 i = global_thread();
    if (i < count) put_float(to + 4 * i, x[i]);
}

KERNEL f32_unpack(const u8* from, float* out, int add, i64 count) {
    i64 i = global_thread();
    if (i < count) fold(out + i, get_float(from + 4 * i), add);
}

KERNEL bf16_pack(const float* x, u8* to, i64 count) {
    i64 i = global_thread();
    if (i < count) put_u16(to + 2 * i, to_bf16(x[i]));
}

KERNEL bf16_unpack(const u8* from, float* out, int add, i64 count) {
    i64 i = global_thread();
    if (i < count) fold(out + i, from_bf16(static_cast<u16>(get_u16(from + 2 * i))), add);
}

// A format of 8 bits: e5m2 or e4m3.
struct Fp8 {
    u32 mantissa, bias, last;
    float largest;
};

DEVICE Fp8 fp8_of(int e5m2) { return e5m2 ? Fp8{2, 15, 0x7b, 57344.0f} : Fp8{3, 7, 0x7e, 448.0f}; }

DEVICE float power_of_two(int exponent) { return __uint_as_float(static_cast<u32>(exponent + 127) << 23); }

DEVICE float smallest_of(const Fp8& of) { return power_of_two(1 - static_cast<int>(of.bias + of.mantissa)); }

// Of a block of threads: the largest bits of |x| of part blockIdx.x.
template <class Parts> DEVICE u32 largest_bits(const float* x, i64 count, i64 unit, Parts& parts) {
    i64 begin = static_cast<i64>(blockIdx.x) * unit, end = smaller(count, begin + unit);
    u32 largest = 0;
    for (i64 i = begin + threadIdx.x; i < end; i += THREADS) {
        u32 bits = __float_as_uint(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return over_block(largest, parts, [](u32 a, u32 b) { return a > b ? a : b; });
}

KERNEL fp8_scales(const float* x, i64 count, i64 unit, int e5m2, u8* scales) {
    SHARED(u32, parts, BLOCK_WARPS);
    u32 bits = largest_bits(x, count, unit, parts), largest = __float_as_uint(fp8_of(e5m2).largest);
    if (threadIdx.x > 0) return;
    float scale = NOT_A_NUMBER;
    if (bits < INFINITE_BITS) {
        // Exponents compare apart from mantissas: one more where the mantissa is above that of the largest number.
        int more = (bits & 0x7fffffu) > (largest & 0x7fffffu) ? 1 : 0;
        int exponent = static_cast<int>(bits >> 23) - static_cast<int>(largest >> 23) + more;
        scale = power_of_two(exponent > -126 ? exponent : -126);
    }
    put_float(scales + 4 * static_cast<i64>(blockIdx.x), scale);
}

KERNEL fp8_pack(const float* x, const u8* scales, i64 unit, int e5m2, u8* codes, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    Fp8 of = fp8_of(e5m2);
    float scale = get_float(scales + 4 * (i / unit));
    float value = x[i] * (1.0f / scale);
    u32 sign = __float_as_uint(value) >> 24 & 0x80u, bits = __float_as_uint(value) & 0x7fffffffu, shift = 23 - of.mantissa;
    u32 rounded = bits + (1u << (shift - 1)) - 1u + (bits >> shift & 1u);
    u32 normal = (rounded >> shift) - ((127u - of.bias) << of.mantissa);
    // Adding a number whose last bit is the smallest of this format rounds to multiples of it.
    float magic = smallest_of(of) * INTEGERS;
    u32 small = __float_as_uint(__uint_as_float(bits) + magic) - __float_as_uint(magic);
    bool is_small = bits < (128u - of.bias) << 23;
    codes[i] = scale != scale ? static_cast<u8>(0) : static_cast<u8>(sign | (is_small ? small : normal));
}

KERNEL fp8_unpack(const u8* codes, const u8* scales, i64 unit, int e5m2, float* out, int add, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    Fp8 of = fp8_of(e5m2);
    u32 magnitude = codes[i] & 0x7fu;
    float normal = __uint_as_float((magnitude << (23 - of.mantissa)) + ((127u - of.bias) << 23));
    float small = static_cast<float>(static_cast<int>(magnitude)) * smallest_of(of);
    float x = magnitude < 1u << of.mantissa ? small : normal;
    x = magnitude > of.last ? NOT_A_NUMBER : x;
    x = __uint_as_float(__float_as_uint(x) | (codes[i] & 0x80u) << 24);
    fold(out + i, x * get_float(scales + 4 * (i / unit)), add);
}

// The minimum and the step of each part; NaN if one of its elements is not finite.
KERNEL quant_pairs(const float* x, i64 count, i64 unit, float levels, u8* pairs) {
    SHARED(u32, parts, BLOCK_WARPS);
    SHARED(float, ends, BLOCK_WARPS);
    u32 bits = largest_bits(x, count, unit, parts);
    i64 begin = static_cast<i64>(blockIdx.x) * unit, end = smaller(count, begin + unit);
    float infinite = __uint_as_float(INFINITE_BITS), least = infinite, most = -infinite;
    for (i64 i = begin + threadIdx.x; i < end; i += THREADS) {
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
    }
    least = over_block(least, ends, [](float a, float b) { return b < a ? b : a; });
    most = over_block(most, ends, [](float a, float b) { return b > a ? b : a; });
    if (threadIdx.x > 0) return;
    float range = most - least;
    bool finite = bits < INFINITE_BITS && (__float_as_uint(range) & 0x7fffffffu) < INFINITE_BITS;
    u8* to = pairs + 8 * static_cast<i64>(blockIdx.x);
    // A sum with zero: of equal numbers the sign of a zero must not depend on their order.
    put_float(to, finite ? least + 0.0f : NOT_A_NUMBER);
    put_float(to + 4, finite ? range / levels : NOT_A_NUMBER);
}

// `draws` is not 0: rounded up with the probability of what is above the integer below, by the draw of element start + i.
KERNEL quant_codes(const float* x, const u8* pairs, i64 unit, float levels, int draws, u32 key0, u32 key1, u64 start, u8* codes,
                   i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    const u8* pair = pairs + 8 * (i / unit);
    float step = get_float(pair + 4), place = (x[i] - get_float(pair)) / step;
    place = place > levels ? levels : place;
    if (draws) {
        u64 index = start + static_cast<u64>(i);
        float whole = (place + INTEGERS) - INTEGERS, below = whole > place ? whole - 1.0f : whole;
        place = below + (uniform(philox(index / 4, key0, key1), index) < place - below ? 1.0f : 0.0f);
    }
    codes[i] = step > 0.0f ? static_cast<u8>(__float_as_uint(place + INTEGERS)) : static_cast<u8>(0);
}

// The mean of |x| of each part: lane l has every 16th element from l on, and the lanes are added one after another.
KERNEL sign_scales(const float* x, i64 count, i64 unit, u8* scales, i64 parts) {
    i64 part = global_thread() / 16, lane = global_thread() % 16;
    bool live = part < parts;
    i64 begin = live ? part * unit : 0, end = live ? smaller(count, begin + unit) : 0;
    double own = 0.0, sum = 0.0;
    for (i64 i = begin + lane; i < end; i += 16) own += static_cast<double>(fabsf(x[i]));
    for (int l = 0; l < 16; l++) sum += __shfl_sync(FULL_WARP, own, lane_of_warp() / 16 * 16 + l);
    if (!live || lane != 0) return;
    bool finite = sum - sum == 0.0;
    put_float(scales + 4 * part, finite ? static_cast<float>(sum / static_cast<double>(end - begin)) : NOT_A_NUMBER);
}

KERNEL sign_codes(const float* x, u8* codes, i64 count) {
    i64 i = global_thread();
    if (i < count) codes[i] = static_cast<u8>(__float_as_uint(x[i]) >> 31);
}

// The tile of an element or a byte: where it begins, its elements, and the bytes of one of its planes.
struct Tile {
    i64 first, stride;
};

DEVICE Tile tile_of(i64 tile, i64 count) {
    return {tile * TILE_CODES, (smaller(TILE_CODES, count - tile * TILE_CODES) + 7) / 8};
}

// `bytes` bytes of planes of `count` codes.
KERNEL planes_pack(const u8* codes, i64 bits, u8* planes, i64 bytes, i64 count) {
    i64 at = global_thread();
    if (at >= bytes) return;
    i64 each = bits * (TILE_CODES / 8), in_tile = at % each;
    Tile tile = tile_of(at / each, count);
    i64 bit = in_tile / tile.stride, first = tile.first + in_tile % tile.stride;
    u32 byte = 0;
    for (i64 j = 0; j < 8; j++) {
        i64 element = first + j * tile.stride;
        if (element < smaller(count, tile.first + TILE_CODES)) byte |= (static_cast<u32>(codes[element]) >> bit & 1u) << j;
    }
    planes[at] = static_cast<u8>(byte);
}

DEVICE u32 code_of(const u8* planes, i64 bits, i64 i, i64 count) {
    i64 number = i / TILE_CODES, in_tile = i % TILE_CODES;
    Tile tile = tile_of(number, count);
    const u8* of = planes + number * bits * (TILE_CODES / 8) + in_tile % tile.stride;
    u32 code = 0;
    for (i64 bit = 0; bit < bits; bit++) code |= (static_cast<u32>(of[bit * tile.stride]) >> (in_tile / tile.stride) & 1u) << bit;
    return code;
}

KERNEL quant_unpack(const u8* planes, const u8* pairs, i64 bits, i64 unit, float* out, int add, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    const u8* pair = pairs + 8 * (i / unit);
    float code = static_cast<float>(static_cast<int>(code_of(planes, bits, i, count)));
    fold(out + i, get_float(pair) + code * get_float(pair + 4), add);
}

KERNEL sign_unpack(const u8* planes, const u8* scales, i64 unit, float* out, int add, i64 count) {
    i64 i = global_thread();
    if (i >= count) return;
    u32 scale = get_u32(scales + 4 * (i / unit));
    fold(out + i, __uint_as_float(scale ^ code_of(planes, 1, i, count) << 31), add);
}
