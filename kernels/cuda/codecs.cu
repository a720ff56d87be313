// Messages of values with fewer bits each: see crates/compress/src/wire.rs for the format and values.rs for the
// methods.
//
//   fp8: code = round(x / scale), scale the least power of two that fits;  quant: code = round((x - min) / step);  sign: scale = mean |x|
//   int8: code = round(127 x / scale), scale = max |x|;  nf4: the nearest of 16 numbers to x / scale, scale = max |x|
//   e5m3: scale = (1 + m/8) · 2^(e - 20) of a byte 8·e + m, but 0 is zero and 255 NaN
//
// Shapes    x, out [count], in parts of `unit` elements; a scale of 4 bytes per part, for quant a minimum and a step;
//           codes [count] (u8) as bytes, or as `bits` bit planes in tiles of 512 elements. Messages begin at any byte.
// Geometry  scales: one block of threads per part, 16 bytes of f32 per thread at a time (neighbours.cuh), for sign 16
//           threads; codes and values: one thread per 16 bytes of f32, or of bf16; planes: one thread per byte.
// Bytes     4 read per element for its scale and 4 for its code; codes once more for planes.
// Bits      as on the CPU: crates/compress/src/values.rs, absmax.rs, fp8.rs, planes.rs.
#include "message.cuh"
#include "random.cuh"

#define TILE_CODES 512
#define INTEGERS 8388608.0f  // 2^23: numbers added to it are rounded to integers
#define SIGNED_INTEGERS 12582912.0f  // 1.5 · 2^23: the low bits of the sum are the integer in two's complement
#define NOT_A_NUMBER __uint_as_float(0x7fc00000u)
#define INFINITE_BITS 0x7f800000u

KERNEL message_words(u8* to, u64 first, u64 second) {
    i64 at = global_thread();
    if (at < 16) to[at] = static_cast<u8>((at < 8 ? first : second) >> (8 * (at % 8)));
}

// Reports a header that differs from these 16 bytes.
KERNEL message_check(const u8* header, u64 first, u64 second, i64* found) {
    i64 at = global_thread();
    if (at < 16 && header[at] != static_cast<u8>((at < 8 ? first : second) >> (8 * (at % 8)))) *found = 1;
}

KERNEL f32_pack(const float* x, u8* to, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Vector<float, FOUR> four = load_vector<FOUR>(x, at, count);
    Vector<u8, 4 * FOUR> bytes;
#pragma unroll
    for (int j = 0; j < FOUR; j++) put_float(bytes.of + 4 * j, four.of[j]);
    store_vector(to, 4 * at, 4 * count, bytes);
}

KERNEL f32_unpack(const u8* from, float* out, int add, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Vector<u8, 4 * FOUR> bytes = load_vector<4 * FOUR>(from, 4 * at, 4 * count);
    Vector<float, FOUR> four;
#pragma unroll
    for (int j = 0; j < FOUR; j++) four.of[j] = get_float(bytes.of + 4 * j);
    fold_vector(out, at, count, four, add);
}

KERNEL bf16_pack(const float* x, u8* to, i64 count) {
    i64 at = global_thread() * EIGHT;
    if (at >= count) return;
    Vector<float, EIGHT> eight = load_vector<EIGHT>(x, at, count);
    Vector<u8, 2 * EIGHT> bytes;
#pragma unroll
    for (int j = 0; j < EIGHT; j++) put_u16(bytes.of + 2 * j, to_bf16(eight.of[j]));
    store_vector(to, 2 * at, 2 * count, bytes);
}

KERNEL bf16_unpack(const u8* from, float* out, int add, i64 count) {
    i64 at = global_thread() * EIGHT;
    if (at >= count) return;
    Vector<u8, 2 * EIGHT> bytes = load_vector<2 * EIGHT>(from, 2 * at, 2 * count);
    Vector<float, EIGHT> eight;
#pragma unroll
    for (int j = 0; j < EIGHT; j++) eight.of[j] = from_bf16(static_cast<u16>(get_u16(bytes.of + 2 * j)));
    fold_vector(out, at, count, eight, add);
}

// A format of 8 bits: e5m2 or e4m3.
struct Fp8 {
    u32 mantissa, bias, last;
    float largest;
};

DEVICE Fp8 fp8_of(int e5m2) { return e5m2 ? Fp8{2, 15, 0x7b, 57344.0f} : Fp8{3, 7, 0x7e, 448.0f}; }

DEVICE float power_of_two(int exponent) { return __uint_as_float(static_cast<u32>(exponent + 127) << 23); }

DEVICE float smallest_of(const Fp8& of) { return power_of_two(1 - static_cast<int>(of.bias + of.mantissa)); }

DEVICE u32 larger_bits(u32 bits, float x) {
    u32 of_x = __float_as_uint(x) & 0x7fffffffu;
    return of_x > bits ? of_x : bits;
}

// The largest bits of |x| in part blockIdx.x, over a block of threads.
template <class Parts> DEVICE u32 largest_bits(const float* x, i64 count, i64 unit, Parts& parts) {
    i64 begin = static_cast<i64>(blockIdx.x) * unit, end = smaller(count, begin + unit);
    u32 largest = 0;
    for (i64 i = begin + threadIdx.x * FOUR; i < end; i += THREADS * FOUR) {
        Vector<float, FOUR> four = load_vector<FOUR>(x, i, end);
#pragma unroll
        for (int j = 0; j < FOUR; j++) {
            largest = larger_bits(largest, four.of[j]);
        }
    }
    return over_block(largest, parts, [](u32 a, u32 b) { return a > b ? a : b; });
}

KERNEL fp8_scales(const float* x, i64 count, i64 unit, int e5m2, u8* scales) {
    SHARED(u32, parts, BLOCK_WARPS);
    u32 bits = largest_bits(x, count, unit, parts), largest = __float_as_uint(fp8_of(e5m2).largest);
    if (threadIdx.x > 0) return;
    float scale = NOT_A_NUMBER;
    if (bits < INFINITE_BITS) {
        // Exponents and mantissas are compared separately: one more if the mantissa is above the mantissa of the
        // largest number.
        int more = (bits & 0x7fffffu) > (largest & 0x7fffffu) ? 1 : 0;
        int exponent = static_cast<int>(bits >> 23) - static_cast<int>(largest >> 23) + more;
        scale = power_of_two(exponent > -126 ? exponent : -126);
    }
    put_float(scales + 4 * static_cast<i64>(blockIdx.x), scale);
}

DEVICE u8 fp8_code(float x, float scale, const Fp8& of) {
    float value = x * (1.0f / scale);
    u32 sign = __float_as_uint(value) >> 24 & 0x80u, bits = __float_as_uint(value) & 0x7fffffffu, shift = 23 - of.mantissa;
    u32 rounded = bits + (1u << (shift - 1)) - 1u + (bits >> shift & 1u);
    u32 normal = (rounded >> shift) - ((127u - of.bias) << of.mantissa);
    // Adding a number whose last bit is the smallest of this format rounds to multiples of it.
    float magic = smallest_of(of) * INTEGERS;
    u32 small = __float_as_uint(__uint_as_float(bits) + magic) - __float_as_uint(magic);
    bool is_small = bits < (128u - of.bias) << 23;
    return scale != scale ? static_cast<u8>(0) : static_cast<u8>(sign | (is_small ? small : normal));
}

DEVICE float fp8_value(u8 code, const Fp8& of) {
    u32 magnitude = code & 0x7fu;
    float normal = __uint_as_float((magnitude << (23 - of.mantissa)) + ((127u - of.bias) << 23));
    float small = static_cast<float>(static_cast<int>(magnitude)) * smallest_of(of);
    float x = magnitude < 1u << of.mantissa ? small : normal;
    x = magnitude > of.last ? NOT_A_NUMBER : x;
    return __uint_as_float(__float_as_uint(x) | (code & 0x80u) << 24);
}

KERNEL fp8_pack(const float* x, const u8* scales, i64 unit, int e5m2, u8* codes, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Fp8 of = fp8_of(e5m2);
    Vector<float, FOUR> four = load_vector<FOUR>(x, at, count);
    Vector<u8, FOUR> to = {};
    auto scale_of = [=](i64 part) { return get_float(scales + 4 * part); };
    in_parts<FOUR>(at, count, unit, scale_of, [&](int j, float scale) { to.of[j] = fp8_code(four.of[j], scale, of); });
    store_vector(codes, at, count, to);
}

KERNEL fp8_unpack(const u8* codes, const u8* scales, i64 unit, int e5m2, float* out, int add, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Fp8 of = fp8_of(e5m2);
    Vector<u8, FOUR> from = load_vector<FOUR>(codes, at, count);
    Vector<float, FOUR> four = {};
    auto scale_of = [=](i64 part) { return get_float(scales + 4 * part); };
    in_parts<FOUR>(at, count, unit, scale_of, [&](int j, float scale) { four.of[j] = fp8_value(from.of[j], of) * scale; });
    fold_vector(out, at, count, four, add);
}

// The largest |x| of each part; NaN if one of its elements is not finite.
KERNEL absmax_scales(const float* x, i64 count, i64 unit, u8* scales) {
    SHARED(u32, parts, BLOCK_WARPS);
    u32 bits = largest_bits(x, count, unit, parts);
    if (threadIdx.x > 0) return;
    put_float(scales + 4 * static_cast<i64>(blockIdx.x), bits < INFINITE_BITS ? __uint_as_float(bits) : NOT_A_NUMBER);
}

KERNEL int8_pack(const float* x, const u8* scales, i64 unit, u8* codes, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Vector<float, FOUR> four = load_vector<FOUR>(x, at, count);
    Vector<u8, FOUR> to = {};
    auto scale_of = [=](i64 part) { return get_float(scales + 4 * part); };
    in_parts<FOUR>(at, count, unit, scale_of, [&](int j, float scale) {
        float place = four.of[j] / scale * 127.0f;
        to.of[j] = scale > 0.0f ? static_cast<u8>(__float_as_uint(place + SIGNED_INTEGERS)) : static_cast<u8>(0);
    });
    store_vector(codes, at, count, to);
}

KERNEL int8_unpack(const u8* codes, const u8* scales, i64 unit, float* out, int add, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Vector<u8, FOUR> from = load_vector<FOUR>(codes, at, count);
    Vector<float, FOUR> four = {};
    auto scale_of = [=](i64 part) { return get_float(scales + 4 * part); };
    in_parts<FOUR>(at, count, unit, scale_of, [&](int j, float scale) {
        int code = from.of[j] < 128 ? from.of[j] : from.of[j] - 256;
        four.of[j] = static_cast<float>(code) / 127.0f * scale;
    });
    fold_vector(out, at, count, four, add);
}

DEVICE float either(u32 bit, float zero, float one) { return bit ? one : zero; }

// One of four numbers, by the lowest two bits.
DEVICE float of_four(u32 code, float zero, float one, float two, float three) {
    return either(code & 2u, either(code & 1u, zero, one), either(code & 1u, two, three));
}

// The number of a code of NF4, as in crates/compress/src/absmax.rs: by choices, because a table of a thread that is
// read by a code would lie in memory.
DEVICE float nf4_number(u32 code) {
    float lowest = of_four(code, -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f);
    float low = of_four(code, -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f);
    float high = of_four(code, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f);
    float highest = of_four(code, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f);
    return either(code & 8u, either(code & 4u, lowest, low), either(code & 4u, high, highest));
}

KERNEL nf4_codes(const float* x, const u8* scales, i64 unit, u8* codes, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Vector<float, FOUR> four = load_vector<FOUR>(x, at, count);
    Vector<u8, FOUR> to = {};
    auto scale_of = [=](i64 part) { return get_float(scales + 4 * part); };
    in_parts<FOUR>(at, count, unit, scale_of, [&](int j, float scale) {
        float place = four.of[j] / scale;
        int code = 0;
#pragma unroll
        for (u32 below = 0; below < 15; below++) code += place > 0.5f * (nf4_number(below) + nf4_number(below + 1)) ? 1 : 0;
        to.of[j] = static_cast<u8>(scale > 0.0f ? code : 7);
    });
    store_vector(codes, at, count, to);
}

DEVICE float e5m3_value(u32 code) {
    float value = code == 0u ? 0.0f : __uint_as_float((code + (107u << 3)) << 20);
    return code == 255u ? NOT_A_NUMBER : value;
}

// Rounds scales to a byte each, and replaces them by what the bytes are.
KERNEL e5m3_pack(u8* scales, u8* codes, i64 parts) {
    i64 at = global_thread();
    if (at >= parts) return;
    float scale = get_float(scales + 4 * at);
    u32 bits = __float_as_uint(scale), rounded = (bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20, least = 107u << 3;
    u32 code = rounded < least ? 0u : rounded - least;
    code = scale != scale ? 255u : code > 254u ? 254u : code;
    codes[at] = static_cast<u8>(code);
    put_float(scales + 4 * at, e5m3_value(code));
}

KERNEL e5m3_unpack(const u8* codes, u8* scales, i64 parts) {
    i64 at = global_thread();
    if (at < parts) put_float(scales + 4 * at, e5m3_value(codes[at]));
}

// The minimum and the step of each part; NaN if one of its elements is not finite.
KERNEL quant_pairs(const float* x, i64 count, i64 unit, float levels, u8* pairs) {
    SHARED(u32, parts, BLOCK_WARPS);
    SHARED(float, ends, BLOCK_WARPS);
    i64 begin = static_cast<i64>(blockIdx.x) * unit, end = smaller(count, begin + unit);
    float infinite = __uint_as_float(INFINITE_BITS), least = infinite, most = -infinite;
    u32 bits = 0;
    for (i64 i = begin + threadIdx.x * FOUR; i < end; i += THREADS * FOUR) {
        Vector<float, FOUR> four = load_vector<FOUR>(x, i, end);
#pragma unroll
        for (int j = 0; j < FOUR; j++) {
            if (i + j >= end) break;
            least = four.of[j] < least ? four.of[j] : least;
            most = four.of[j] > most ? four.of[j] : most;
            bits = larger_bits(bits, four.of[j]);
        }
    }
    bits = over_block(bits, parts, [](u32 a, u32 b) { return a > b ? a : b; });
    least = over_block(least, ends, [](float a, float b) { return b < a ? b : a; });
    most = over_block(most, ends, [](float a, float b) { return b > a ? b : a; });
    if (threadIdx.x > 0) return;
    float range = most - least;
    bool finite = bits < INFINITE_BITS && (__float_as_uint(range) & 0x7fffffffu) < INFINITE_BITS;
    u8* to = pairs + 8 * static_cast<i64>(blockIdx.x);
    // Adds zero, because the sign of a zero must not depend on the order of equal numbers.
    put_float(to, finite ? least + 0.0f : NOT_A_NUMBER);
    put_float(to + 4, finite ? range / levels : NOT_A_NUMBER);
}

// The minimum and the step of a part.
struct Range {
    float least, step;
};

// If `draws` is not 0, a number is rounded up with a probability equal to its fractional part, by the draw of element
// start + i.
KERNEL quant_codes(const float* x, const u8* pairs, i64 unit, float levels, int draws, u32 key0, u32 key1, u64 start, u8* codes,
                   i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Vector<float, FOUR> four = load_vector<FOUR>(x, at, count);
    Vector<u8, FOUR> to = {};
    auto range_of_part = [=](i64 part) { return Range{get_float(pairs + 8 * part), get_float(pairs + 8 * part + 4)}; };
    in_parts<FOUR>(at, count, unit, range_of_part, [&](int j, const Range& range) {
        float place = (four.of[j] - range.least) / range.step;
        place = place > levels ? levels : place;
        if (draws) {
            u64 index = start + static_cast<u64>(at + j);
            float whole = (place + INTEGERS) - INTEGERS, below = whole > place ? whole - 1.0f : whole;
            place = below + (uniform(philox(index / 4, key0, key1), index) < place - below ? 1.0f : 0.0f);
        }
        to.of[j] = range.step > 0.0f ? static_cast<u8>(__float_as_uint(place + INTEGERS)) : static_cast<u8>(0);
    });
    store_vector(codes, at, count, to);
}

// The mean of |x| of each part: lane l sums every 16th element from l on, and the lanes are added one after another.
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
    map_vectors<FOUR>(x, codes, count, [](float number) { return static_cast<u8>(__float_as_uint(number) >> 31); });
}

// The tile of an element or a byte: its start, its number of elements, and the bytes of one of its planes.
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
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Vector<float, FOUR> four = {};
    auto range_of_part = [=](i64 part) { return Range{get_float(pairs + 8 * part), get_float(pairs + 8 * part + 4)}; };
    in_parts<FOUR>(at, count, unit, range_of_part, [&](int j, const Range& range) {
        four.of[j] = range.least + static_cast<float>(static_cast<int>(code_of(planes, bits, at + j, count))) * range.step;
    });
    fold_vector(out, at, count, four, add);
}

KERNEL nf4_unpack(const u8* planes, const u8* scales, i64 unit, float* out, int add, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Vector<float, FOUR> four = {};
    auto scale_of = [=](i64 part) { return get_float(scales + 4 * part); };
    in_parts<FOUR>(at, count, unit, scale_of, [&](int j, float scale) {
        four.of[j] = nf4_number(code_of(planes, 4, at + j, count)) * scale;
    });
    fold_vector(out, at, count, four, add);
}

KERNEL sign_unpack(const u8* planes, const u8* scales, i64 unit, float* out, int add, i64 count) {
    i64 at = global_thread() * FOUR;
    if (at >= count) return;
    Vector<float, FOUR> four = {};
    auto scale_of = [=](i64 part) { return get_u32(scales + 4 * part); };
    in_parts<FOUR>(at, count, unit, scale_of, [&](int j, u32 scale) {
        four.of[j] = __uint_as_float(scale ^ code_of(planes, 1, at + j, count) << 31);
    });
    fold_vector(out, at, count, four, add);
}
