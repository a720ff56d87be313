//! Dense methods: all values are sent, with fewer bits each.
//!
//! A part ([`Per`]) with a NaN or an infinity gets NaN as its scale, so that the whole part is restored as NaN; `none`
//! and `bf16` keep each such value.
//!
//! More than 400 lines: each of the seven casts has its size, bound, writer and reader side by side with the others'.

use crate::absmax::{self, NF4};
use crate::compressor::{Draws, Guarantee, SumMethod};
use crate::fp8::{E4M3, E5M2, Fp8};
use crate::planes::{self, TILE};
use crate::wire::{float_at, put_floats};
use crate::{
    CompressError, Compressor, Fold, Fp8Format, MessageError, Method, Result, Rounding, Scales, Shape, Values,
};
use meshwork_core::bf16;
use meshwork_core::random::fill_uniform;
use meshwork_core::simd::wide;
use std::ops::Range;

impl Values {
    /// Calls `put` with each of these tiles of restored values and the index of its first.
    #[inline(always)]
    fn restore(
        self,
        body: &[u8],
        shape: Shape,
        tiles: Range<usize>,
        mut put: impl FnMut(usize, &[f32]),
    ) -> Result<(), MessageError> {
        let (len, parts) = (shape.len(), self.per().parts(shape));
        let mut tile = [0.0; TILE];
        match self {
            Values::F32 => {
                for (i, bytes) in body.chunks(4 * TILE).enumerate().take(tiles.end).skip(tiles.start) {
                    let values = bytes.as_chunks::<4>().0;
                    tile.iter_mut().zip(values).for_each(|(x, &bytes)| *x = f32::from_le_bytes(bytes));
                    put(i * TILE, &tile[..values.len()]);
                }
            }
            Values::Bf16 => {
                for (i, bytes) in body.chunks(2 * TILE).enumerate().take(tiles.end).skip(tiles.start) {
                    let values = bytes.as_chunks::<2>().0;
                    let wider = |bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16);
                    tile.iter_mut().zip(values).for_each(|(x, &bytes)| *x = wider(bytes));
                    put(i * TILE, &tile[..values.len()]);
                }
            }
            Values::Fp8 { format, per } => {
                let (scales, codes) = body.split_at(4 * parts);
                for (i, codes) in codes.chunks(TILE).enumerate().take(tiles.end).skip(tiles.start) {
                    each_part(per.unit(shape), i * TILE, codes.len(), |part, range| {
                        let (codes, tile) = (&codes[range.clone()], &mut tile[range]);
                        match format {
                            Fp8Format::E4M3 => decode::<E4M3>(codes, float_at(scales, part), tile),
                            Fp8Format::E5M2 => decode::<E5M2>(codes, float_at(scales, part), tile),
                        }
                    });
                    put(i * TILE, &tile[..codes.len()]);
                }
            }
            Values::Quantize { bits, per, .. } => {
                let (pairs, packed) = body.split_at(8 * parts);
                codes(packed, len, bits.into(), tiles, |start, codes| {
                    each_part(per.unit(shape), start, codes.len(), |part, range| {
                        let (min, step) = (float_at(pairs, 2 * part), float_at(pairs, 2 * part + 1));
                        let codes = &codes[range.clone()];
                        let tile = &mut tile[range];
                        wide!(tile.iter_mut().zip(codes).for_each(|(x, &code)| *x = min + f32::from(code) * step));
                    });
                    put(start, &tile[..codes.len()]);
                })?;
            }
            Values::Int8 { per } => {
                let (scales, codes) = body.split_at(4 * parts);
                for (i, codes) in codes.chunks(TILE).enumerate().take(tiles.end).skip(tiles.start) {
                    each_part(per.unit(shape), i * TILE, codes.len(), |part, range| {
                        absmax::from_int8(&codes[range.clone()], float_at(scales, part), &mut tile[range]);
                    });
                    put(i * TILE, &tile[..codes.len()]);
                }
            }
            Values::Nf4 { per, scales: kind } => {
                let (scales, packed) = body.split_at(kind.bytes() * parts);
                codes(packed, len, 4, tiles, |start, codes| {
                    each_part(per.unit(shape), start, codes.len(), |part, range| {
                        absmax::from_nf4(&codes[range.clone()], kind.at(scales, part), &mut tile[range]);
                    });
                    put(start, &tile[..codes.len()]);
                })?;
            }
            Values::Sign { per } => {
                let (scales, packed) = body.split_at(4 * parts);
                codes(packed, len, 1, tiles, |start, codes| {
                    each_part(per.unit(shape), start, codes.len(), |part, range| {
                        let (scale, codes) = (float_at(scales, part).to_bits(), &codes[range.clone()]);
                        let signed = |code| f32::from_bits(scale ^ (u32::from(code) << 31));
                        let tile = &mut tile[range];
                        wide!(tile.iter_mut().zip(codes).for_each(|(x, &code)| *x = signed(code)));
                    });
                    put(start, &tile[..codes.len()]);
                })?;
            }
        }
        Ok(())
    }

    /// Decodes the tiles from `first` on into `out`, which has their elements.
    pub(crate) fn read_tiles(
        self,
        body: &[u8],
        shape: Shape,
        fold: Fold,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), MessageError> {
        let (start, tiles) = (first * TILE, first..first + out.len().div_ceil(TILE));
        match fold {
            Fold::Replace => self.restore(body, shape, tiles, |at, tile| {
                out[at - start..][..tile.len()].copy_from_slice(tile);
            }),
            Fold::Add => self.restore(body, shape, tiles, |at, tile| {
                out[at - start..][..tile.len()].iter_mut().zip(tile).for_each(|(y, x)| *y += x);
            }),
        }
    }
}

impl Compressor for Values {
    fn name(&self) -> String {
        self.to_string()
    }

    fn method(&self) -> Method {
        match self {
            Values::F32 => Method::None,
            Values::Bf16 => Method::Bf16,
            Values::Fp8 { .. } => Method::Fp8,
            Values::Quantize { .. } => Method::Quantize,
            Values::Sign { .. } => Method::Sign,
            Values::Int8 { .. } => Method::Int8,
            Values::Nf4 { .. } => Method::Nf4,
        }
    }

    fn check(&self, _shape: Shape) -> Result<()> {
        match *self {
            Values::Quantize { bits: 0 | 9.., .. } => {
                let problem = "the number of bits must be 1 to 8".to_owned();
                Err(CompressError::Scheme { text: self.to_string(), problem })
            }
            _ => Ok(()),
        }
    }

    fn body_bytes(&self, shape: Shape) -> usize {
        let (len, parts) = (shape.len(), self.per().parts(shape));
        match *self {
            Values::F32 => 4 * len,
            Values::Bf16 => 2 * len,
            Values::Fp8 { .. } | Values::Int8 { .. } => 4 * parts + len,
            Values::Nf4 { scales, .. } => scales.bytes() * parts + planes::bytes(len, 4),
            Values::Quantize { bits, .. } => 8 * parts + planes::bytes(len, bits.into()),
            Values::Sign { .. } => 4 * parts + planes::bytes(len, 1),
        }
    }

    fn guarantee(&self, shape: Shape) -> Guarantee {
        // The largest part has the largest bound.
        let len = self.per().unit(shape).min(shape.len()) as f64;
        let none = f64::from(u8::from(!shape.is_empty()));
        match *self {
            Values::F32 => Guarantee { error: 0.0, unbiased: true },
            // Half of the distance between two numbers of 8 bits of precision.
            Values::Bf16 => Guarantee { error: none * 2_f64.powi(-16), unbiased: false },
            Values::Fp8 { format, .. } => {
                // The scaled largest value of a part is above half of the format's range.
                let (precision, largest, smallest) = match format {
                    Fp8Format::E4M3 => (4, E4M3::MAX, E4M3::SMALLEST),
                    Fp8Format::E5M2 => (3, E5M2::MAX, E5M2::SMALLEST),
                };
                let below_normal = f64::from(smallest) / f64::from(largest);
                Guarantee { error: none * 4_f64.powi(-precision) + len * below_normal.powi(2), unbiased: false }
            }
            // Half a step bounds each error (nearest) or its standard deviation (stochastic); and (max - min)² is at
            // most twice the sum of squares.
            Values::Quantize { bits, rounding, .. } => {
                let steps = f64::from((1_u32 << bits) - 1);
                Guarantee { error: len / (2.0 * steps * steps), unbiased: rounding == Rounding::Stochastic }
            }
            // Half of the widest gap between two codes, in units of the largest magnitude, whose square is at most the
            // sum of squares.
            Values::Int8 { .. } => Guarantee { error: len / 254_f64.powi(2), unbiased: false },
            // Zero is one of the numbers, whatever the scale: none is further away.
            Values::Nf4 { scales: Scales::E5M3, .. } => Guarantee { error: none, unbiased: false },
            Values::Nf4 { .. } => {
                Guarantee { error: len * (0.5 * f64::from(NF4[1] - NF4[0])).powi(2), unbiased: false }
            }
            // |x|² - (Σ|x|)²/n, and (Σ|x|)² is at least |x|².
            Values::Sign { .. } => Guarantee { error: none * (1.0 - 1.0 / len.max(1.0)), unbiased: false },
        }
    }

    fn sum(&self) -> SumMethod {
        match *self {
            Values::F32 => SumMethod::AllReduce,
            Values::Bf16 => SumMethod::AllReduceBf16,
            _ => SumMethod::ScatterGather(self.per()),
        }
    }

    fn write(&self, x: &[f32], shape: Shape, draws: Draws, _warm: &mut [f32], body: &mut [u8]) {
        let parts = self.per().parts(shape);
        match *self {
            Values::F32 => drop(put_floats(body, x.iter().copied())),
            Values::Bf16 => wide!({
                for (bytes, &x) in body.as_chunks_mut::<2>().0.iter_mut().zip(x) {
                    *bytes = to_bf16(x).to_le_bytes();
                }
            }),
            Values::Fp8 { format, per } => {
                let (scales, codes) = body.split_at_mut(4 * parts);
                for (scale, range) in scales.as_chunks_mut::<4>().0.iter_mut().zip(per.ranges(shape)) {
                    let (x, codes) = (&x[range.clone()], &mut codes[range]);
                    let chosen = wide!(match format {
                        Fp8Format::E4M3 => encode::<E4M3>(x, codes),
                        Fp8Format::E5M2 => encode::<E5M2>(x, codes),
                    });
                    *scale = chosen.to_le_bytes();
                }
            }
            Values::Quantize { bits, per, rounding } => {
                let levels = ((1_u32 << bits) - 1) as f32;
                let (head, packed) = body.split_at_mut(8 * parts);
                // A part that fits into a cache is read from memory once: its step is computed right before its codes.
                let mut pairs = head.as_chunks_mut::<8>().0.iter_mut().zip(per.ranges(shape));
                let (mut of, mut pair) = (usize::MAX, [0.0; 2]);
                let mut noise = [0.5; TILE];
                pack(packed, x.len(), bits.into(), |start, codes| {
                    if rounding == Rounding::Stochastic {
                        fill_uniform(draws.key, draws.start + start as u64, &mut noise[..codes.len()]);
                    }
                    each_part(per.unit(shape), start, codes.len(), |part, range| {
                        if part != of
                            && let Some((bytes, whole)) = pairs.next()
                        {
                            (of, pair) = (part, min_and_step(&x[whole], levels));
                            _ = put_floats(bytes, pair.into_iter());
                        }
                        let [min, step] = pair;
                        let x = &x[start + range.start..start + range.end];
                        let codes = &mut codes[range.clone()];
                        match rounding {
                            Rounding::Nearest => nearest(x, min, step, levels, codes),
                            Rounding::Stochastic => stochastic(x, min, step, levels, &noise[range], codes),
                        }
                    });
                })
            }
            Values::Int8 { per } => {
                let (scales, codes) = body.split_at_mut(4 * parts);
                for (bytes, range) in scales.as_chunks_mut::<4>().0.iter_mut().zip(per.ranges(shape)) {
                    let scale = largest(&x[range.clone()]);
                    absmax::int8(&x[range.clone()], scale, &mut codes[range]);
                    *bytes = scale.to_le_bytes();
                }
            }
            Values::Nf4 { per, scales: kind } => {
                let (head, packed) = body.split_at_mut(kind.bytes() * parts);
                let mut scales = head.chunks_exact_mut(kind.bytes()).zip(per.ranges(shape));
                let (mut of, mut scale) = (usize::MAX, f32::NAN);
                pack(packed, x.len(), 4, |start, codes| {
                    each_part(per.unit(shape), start, codes.len(), |part, range| {
                        if part != of
                            && let Some((bytes, whole)) = scales.next()
                        {
                            (of, scale) = (part, kind.put(largest(&x[whole]), bytes));
                        }
                        absmax::nf4(&x[start + range.start..start + range.end], scale, &mut codes[range]);
                    });
                });
            }
            Values::Sign { per } => {
                let (head, packed) = body.split_at_mut(4 * parts);
                let mut scales = head.as_chunks_mut::<4>().0.iter_mut().zip(per.ranges(shape)).peekable();
                pack(packed, x.len(), 1, |start, codes| {
                    while let Some((bytes, whole)) = scales.next_if(|(_, whole)| whole.start < start + codes.len()) {
                        *bytes = mean_abs(&x[whole]).to_le_bytes();
                    }
                    let x = &x[start..start + codes.len()];
                    wide!(codes.iter_mut().zip(x).for_each(|(code, x)| *code = (x.to_bits() >> 31) as u8));
                });
            }
        }
    }

    fn read(&self, body: &[u8], shape: Shape, fold: Fold, out: &mut [f32]) -> Result<(), MessageError> {
        self.read_tiles(body, shape, fold, 0, out)
    }
}

/// Calls `f` with each part that overlaps the elements `start..start + len`, and with its elements, counted from
/// `start`.
#[inline(always)]
fn each_part(unit: usize, start: usize, len: usize, mut f: impl FnMut(usize, Range<usize>)) {
    let mut at = 0;
    while at < len {
        let part = (start + at) / unit;
        let end = ((part + 1) * unit - start).min(len);
        f(part, at..end);
        at = end;
    }
}

/// Calls `f` to fill each tile of codes, and packs it.
#[inline(always)]
fn pack(packed: &mut [u8], len: usize, bits: usize, mut f: impl FnMut(usize, &mut [u8])) {
    let mut codes = [0; TILE];
    for (i, packed) in packed.chunks_mut(planes::bytes(TILE, bits)).enumerate() {
        let count = TILE.min(len - i * TILE);
        f(i * TILE, &mut codes[..count]);
        codes[count..].fill(0);
        planes::pack(&codes, count, bits, packed);
    }
}

/// Calls `f` with each of these tiles of codes.
#[inline(always)]
fn codes(
    packed: &[u8],
    len: usize,
    bits: usize,
    tiles: Range<usize>,
    mut f: impl FnMut(usize, &[u8]),
) -> Result<(), MessageError> {
    let mut codes = [0; TILE];
    for (i, packed) in packed.chunks(planes::bytes(TILE, bits)).enumerate().take(tiles.end).skip(tiles.start) {
        let count = TILE.min(len - i * TILE);
        if !planes::unpack(packed, count, bits, &mut codes) {
            return Err(MessageError::Padding);
        }
        f(i * TILE, &codes[..count]);
    }
    Ok(())
}

/// The nearest bfloat16, ties to even, branch-free; NaN stays NaN.
#[inline(always)]
fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded }) as u16
}

/// `x` as bfloat16, like the values of a message, for a sum in bfloat16.
pub(crate) fn cast_bf16(x: &[f32], out: &mut [bf16]) {
    wide!(out.iter_mut().zip(x).for_each(|(y, &x)| *y = bf16::from_bits(to_bf16(x))));
}

/// The largest bits of |x|. The bits of infinity, or larger ones, say that some x is not finite.
#[inline(always)]
fn largest_bits(x: &[f32]) -> u32 {
    x.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7fff_ffff))
}

/// The largest |x|; NaN if a value is not finite.
fn largest(x: &[f32]) -> f32 {
    let bits = wide!(largest_bits(x));
    if bits < f32::INFINITY.to_bits() { f32::from_bits(bits) } else { f32::NAN }
}

/// Numbers from 2^23 on have no fraction: adding 2^23 rounds to the nearest integer, which is then in the low bits.
const INTEGERS: f32 = 8_388_608.0;

fn nearest(x: &[f32], min: f32, step: f32, levels: f32, codes: &mut [u8]) {
    wide!({
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = (place(x, min, step, levels) + INTEGERS).to_bits() as u8;
        }
    });
    clear_without_step(step, codes);
}

/// The position of a value in units of codes, at most the last code.
#[inline(always)]
fn place(x: f32, min: f32, step: f32, levels: f32) -> f32 {
    let place = (x - min) / step;
    if place > levels { levels } else { place }
}

fn stochastic(x: &[f32], min: f32, step: f32, levels: f32, noise: &[f32], codes: &mut [u8]) {
    wide!({
        for ((code, &x), u) in codes.iter_mut().zip(x).zip(noise) {
            let place = place(x, min, step, levels);
            // The integer below.
            let whole = (place + INTEGERS) - INTEGERS;
            let below = if whole > place { whole - 1.0 } else { whole };
            let up = if *u < place - below { 1.0 } else { 0.0 };
            *code = (below + up + INTEGERS).to_bits() as u8;
        }
    });
    clear_without_step(step, codes);
}

/// If all values are equal, or a value is not finite, all codes are zero.
#[inline(always)]
fn clear_without_step(step: f32, codes: &mut [u8]) {
    if step.is_nan() || step <= 0.0 {
        codes.fill(0);
    }
}

/// Smallest value and step of a part; both NaN if a value or the range is not finite.
fn min_and_step(x: &[f32], levels: f32) -> [f32; 2] {
    wide!({
        const LANES: usize = 16;
        let (mut low, mut high, mut bits) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES], [0; LANES]);
        let (chunks, rest) = x.as_chunks::<LANES>();
        for x in chunks {
            for l in 0..LANES {
                low[l] = if x[l] < low[l] { x[l] } else { low[l] };
                high[l] = if x[l] > high[l] { x[l] } else { high[l] };
                bits[l] = bits[l].max(x[l].to_bits() & 0x7fff_ffff);
            }
        }
        let (mut least, mut most, mut largest) = (f32::INFINITY, f32::NEG_INFINITY, largest_bits(rest));
        for l in 0..LANES {
            least = if low[l] < least { low[l] } else { least };
            most = if high[l] > most { high[l] } else { most };
            largest = largest.max(bits[l]);
        }
        for &x in rest {
            least = if x < least { x } else { least };
            most = if x > most { x } else { most };
        }
        match largest < f32::INFINITY.to_bits() && (most - least).is_finite() {
            // Adds zero, because the sign of a zero must not depend on the order of equal numbers.
            true => [least + 0.0, (most - least) / levels],
            false => [f32::NAN; 2],
        }
    })
}

/// Mean of |x|, NaN if a value is not finite.
fn mean_abs(x: &[f32]) -> f32 {
    wide!({
        let mut lanes = [0.0_f64; 16];
        let (chunks, rest) = x.as_chunks::<16>();
        for x in chunks {
            lanes.iter_mut().zip(x).for_each(|(sum, x)| *sum += f64::from(x.abs()));
        }
        lanes.iter_mut().zip(rest).for_each(|(sum, x)| *sum += f64::from(x.abs()));
        let sum = lanes.into_iter().fold(0.0, |sum, lane| sum + lane);
        if sum.is_finite() { (sum / x.len() as f64) as f32 } else { f32::NAN }
    })
}

/// The codes of a part; returns its scale.
#[inline(always)]
fn encode<F: Fp8>(x: &[f32], codes: &mut [u8]) -> f32 {
    let scale = F::scale(largest_bits(x));
    let inverse = 1.0 / scale;
    match scale.is_nan() {
        true => codes.fill(0),
        false => codes.iter_mut().zip(x).for_each(|(code, x)| *code = F::encode(x * inverse)),
    }
    scale
}

fn decode<F: Fp8>(codes: &[u8], scale: f32, out: &mut [f32]) {
    wide!(out.iter_mut().zip(codes).for_each(|(x, &code)| *x = F::decode(code) * scale));
}
