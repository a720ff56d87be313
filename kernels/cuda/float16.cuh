// Conversions of 16-bit numbers. A GPU has instructions for them, of sm_80 and newer; the host computes the same by
// integer arithmetic, in ../host/float16_host.h. No header of the CUDA toolkit is needed. The bits are the CPU's.
#pragma once
#include "meshwork.cuh"

#ifndef FLOAT16_TWINS

// Two numbers rounded to bf16, to nearest, ties to even, the first in the lower half; NaN becomes 0x7fff.
DEVICE u32 pack(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// The same to f16: too large is infinite.
DEVICE u32 pack_f16(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Exact; of a NaN some NaN.
DEVICE float from_f16(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

// x as an operand of TF32: rounded as by to_tf32 below; of a NaN some NaN.
DEVICE u32 pack_tf32(float x) {
    u32 word;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
    return word;
}

// x, but a subnormal number becomes a zero of its sign.
DEVICE float flushed(float x) {
    float y;
    asm("mul.rn.ftz.f32 %0, %1, 0f3F800000;" : "=f"(y) : "f"(x));
    return y;
}

#endif

// The bits of a NaN in 16 bits: its sign and the head of its mantissa, quiet. The instructions would give all NaNs the
// same.
DEVICE u16 nan_bf16(float x) { return static_cast<u16>(__float_as_uint(x) >> 16 | 0x40u); }
DEVICE u16 nan_f16(float x) { return static_cast<u16>((__float_as_uint(x) >> 16 & 0x8000u) | 0x7e00u | (__float_as_uint(x) >> 13 & 0x03ffu)); }

// bf16 as bf16::from_f32, for values sent between ranks.
DEVICE u16 to_bf16(float x) { return x == x ? static_cast<u16>(pack(x, 0.0f)) : nan_bf16(x); }

// The same with subnormals flushed to zeros of their sign, as products round their operands:
// crates/cpu/src/kernels/round.rs.
DEVICE u16 to_operand(float x) { return x == x ? static_cast<u16>(pack(flushed(x), 0.0f)) : nan_bf16(x); }

// The nearest number of TF32, which keeps the upper 10 bits of the fraction, as f32; ties away from zero:
// crates/tensor/src/kernel/precision.rs.
DEVICE float to_tf32(float x) {
    u32 bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    u32 half = size < 0x7f800000u ? 0x1000u : 0u, quiet = size > 0x7f800000u ? 0x400000u : 0u;
    return __uint_as_float(((bits + half) & 0xffffe000u) | quiet);
}

DEVICE float from_bf16(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }

DEVICE u16 to_f16(float x) { return x == x ? static_cast<u16>(pack_f16(x, 0.0f)) : nan_f16(x); }
