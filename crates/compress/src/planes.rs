//! Codes of a few bits as bit planes: see [`wire`](crate::wire).

use meshwork_core::simd::wide;

/// Elements of a tile of codes: see [`wire`](crate::wire).
pub const TILE: usize = 512;

/// Bytes of `count` codes of `bits` bits.
pub fn bytes(count: usize, bits: usize) -> usize {
    bits * count.div_ceil(8)
}

/// Packs the first `count` codes of a tile. The other codes must be zero.
pub fn pack(codes: &[u8; TILE], count: usize, bits: usize, out: &mut [u8]) {
    match count {
        TILE => wide!(pack_tile(codes, bits, out)),
        _ => pack_strided(codes, count.div_ceil(8), bits, out),
    }
}

#[inline(always)]
fn pack_strided(codes: &[u8; TILE], stride: usize, bits: usize, out: &mut [u8]) {
    if stride == 0 {
        return;
    }
    for (bit, plane) in out[..bits * stride].chunks_exact_mut(stride).enumerate() {
        plane.fill(0);
        for (j, codes) in codes[..8 * stride].chunks_exact(stride).enumerate() {
            for (byte, code) in plane.iter_mut().zip(codes) {
                *byte |= ((code >> bit) & 1) << j;
            }
        }
    }
}

/// Unpacks the `count` codes of one tile. Returns whether all padding bits are zero.
pub fn unpack(planes: &[u8], count: usize, bits: usize, codes: &mut [u8; TILE]) -> bool {
    match count {
        TILE => wide!(unpack_strided(planes, TILE / 8, bits, codes)),
        _ => unpack_strided(planes, count.div_ceil(8), bits, codes),
    }
    codes[count..].iter().all(|&code| code == 0)
}

#[inline(always)]
fn unpack_strided(planes: &[u8], stride: usize, bits: usize, codes: &mut [u8; TILE]) {
    codes.fill(0);
    if stride == 0 {
        return;
    }
    for (bit, plane) in planes[..bits * stride].chunks_exact(stride).enumerate() {
        for (j, codes) in codes[..8 * stride].chunks_exact_mut(stride).enumerate() {
            for (byte, code) in plane.iter().zip(codes) {
                *code |= ((byte >> j) & 1) << bit;
            }
        }
    }
}

/// As [`pack_strided`], with lengths known at compile time. Uses a comparison and a mask, which are vector
/// instructions; a shift of bytes is not.
#[inline(always)]
fn pack_tile(codes: &[u8; TILE], bits: usize, out: &mut [u8]) {
    let (rows, _) = codes.as_chunks::<{ TILE / 8 }>();
    for (bit, plane) in out.as_chunks_mut::<{ TILE / 8 }>().0[..bits].iter_mut().enumerate() {
        let mut packed = [0_u8; TILE / 8];
        for (j, codes) in rows.iter().enumerate() {
            for (byte, code) in packed.iter_mut().zip(codes) {
                *byte |= if code & (1 << bit) == 0 { 0 } else { 1 << j };
            }
        }
        *plane = packed;
    }
}
