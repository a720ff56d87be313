// Conversions of 16-bit numbers by integer arithmetic only: no header of the CUDA toolkit is needed, and the bits are
// as on the CPU.
#pragma once
#include "meshwork.cuh"

// bf16, to nearest, ties to even; NaN stays NaN. As bf16::from_f32, for values sent between ranks.
DEVICE u16 to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<u16>((bits >> 16) | 0x40u);
    return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The same with subnormals flushed to zeros of their sign, as products round their operands:
// crates/cpu/src/kernels/round.rs.
DEVICE u16 to_operand(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) < 0x00800000u) return static_cast<u16>(bits >> 16 & 0x8000u);
    return to_bf16(x);
}

DEVICE float from_bf16(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }

// f16, to nearest, ties to even; too large is infinite; NaN stays NaN and is quiet.
DEVICE u16 to_f16(float x) {
    u32 bits = __float_as_uint(x);
    u32 sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return static_cast<u16>(sign | 0x7e00u | (size >> 13 & 0x03ffu));
    if (size >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);  // from 65520 on
    if (size >= 0x38800000u) {
        u32 rounded = size + 0x0fffu + (size >> 13 & 1u);
        return static_cast<u16>(sign | ((rounded - 0x38000000u) >> 13));
    }
    if (size <= 0x33000000u) return static_cast<u16>(sign);  // up to half of the smallest
    // Subnormal: the mantissa with its leading one, shifted, rounded by the bits shifted out.
    u32 shift = 126u - (size >> 23), mantissa = (size & 0x007fffffu) | 0x00800000u;
    u32 kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1u), half = 1u << (shift - 1u);
    kept += rest > half || (rest == half && (kept & 1u)) ? 1u : 0u;
    return static_cast<u16>(sign | kept);
}

// Exact.
DEVICE float from_f16(u16 x) {
    u32 sign = (static_cast<u32>(x) & 0x8000u) << 16, exponent = x >> 10 & 0x1fu, mantissa = x & 0x03ffu;
    if (exponent == 0x1fu) return __uint_as_float(sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x00400000u : 0u));
    if (exponent) return __uint_as_float(sign | (exponent + 112u) << 23 | mantissa << 13);
    // mantissa 2^-24, which is exact.
    return __uint_as_float(sign | __float_as_uint(static_cast<float>(mantissa) * 5.9604644775390625e-8f));
}
