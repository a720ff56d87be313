// Host twins of ../cuda/float16.cuh and of the start of a reciprocal in ../cuda/math.cuh. `cuda_host.h` includes this.
#pragma once

#define FLOAT16_TWINS

namespace host {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline uint16_t nearest_bf16(float x) {
    uint32_t bits = bits_of(x);
    if (x != x) return 0x7fff;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t nearest_f16(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (x != x) return 0x7fff;
    if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);  // from 65520 on
    if (size >= 0x38800000) {
        uint32_t rounded = size + 0x0fff + (size >> 13 & 1);
        return uint16_t(sign | (rounded - 0x38000000) >> 13);
    }
    if (size <= 0x33000000) return uint16_t(sign);  // up to half of the smallest
    // Subnormal: the mantissa with its leading one, shifted, rounded by the bits shifted out.
    uint32_t shift = 126 - (size >> 23), mantissa = (size & 0x007fffff) | 0x00800000;
    uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    kept += rest > half || (rest == half && (kept & 1)) ? 1 : 0;
    return uint16_t(sign | kept);
}

}  // namespace host

inline uint32_t pack(float low, float high) { return host::nearest_bf16(low) | uint32_t(host::nearest_bf16(high)) << 16; }
inline uint32_t pack_f16(float low, float high) { return host::nearest_f16(low) | uint32_t(host::nearest_f16(high)) << 16; }

inline uint32_t pack_tf32(float x) {
    uint32_t bits = host::bits_of(x);
    if (x != x) return 0x7fffffff & 0xffffe000;
    return ((bits & 0x7fffffff) < 0x7f800000 ? bits + 0x1000 : bits) & 0xffffe000;
}

inline float from_f16(uint16_t x) {
    uint32_t sign = (x & 0x8000u) << 16, exponent = x >> 10 & 0x1f, mantissa = x & 0x03ff;
    if (exponent == 0x1f) return host::of_bits(mantissa ? 0x7fffffff : sign | 0x7f800000);
    if (exponent) return host::of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    return host::of_bits(sign | host::bits_of(float(mantissa) * 5.9604644775390625e-8f));  // mantissa 2^-24
}

inline float flushed(float x) {
    uint32_t bits = host::bits_of(x);
    return (bits & 0x7fffffff) < 0x00800000 ? host::of_bits(bits & 0x80000000) : x;
}

// PTX promises an error of at most one unit in the last place: the result is the nearest number, or a neighbour of it.
inline float reciprocal_near(float x) {
    uint32_t bits = host::bits_of(x);
    return x == x ? host::of_bits(host::bits_of(1.0f / x) + bits % 3 - 1) : x;
}
