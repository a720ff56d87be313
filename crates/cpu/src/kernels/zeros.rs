//! Vectors packed without their zeros: one bit per element, and the elements whose bit is set (Gist, Jain et al. 2018,
//! section 4.2; Gist stores the column of each element in a byte, but bits take less if more than an eighth of the
//! elements are not zero). Elements are bit patterns, so that -0 and every NaN are restored exactly. The first of eight
//! elements has the lowest bit of a byte.

use super::relu::PER_BYTE;

/// A bit pattern of a float.
pub trait Pattern: Copy + Default + PartialEq {}

impl Pattern for u16 {}
impl Pattern for u32 {}

/// Sets the bits of the elements that are not zero, and counts them. Overwrites.
pub fn mark<P: Pattern>(x: &[P], bits: &mut [u8]) -> usize {
    assert_eq!(bits.len(), x.len().div_ceil(PER_BYTE), "bytes against elements");
    let mut count = 0;
    for (x, bits) in x.chunks(PER_BYTE).zip(bits) {
        *bits = x.iter().enumerate().fold(0, |bits, (at, &x)| bits | u8::from(x != P::default()) << at);
        count += bits.count_ones() as usize;
    }
    count
}

/// The elements that are not zero, in order. Overwrites `values`, which must have exactly their number.
pub fn gather<P: Pattern>(x: &[P], values: &mut [P]) {
    let found = x.iter().filter(|&&x| x != P::default());
    let mut count = 0;
    for (value, &x) in values.iter_mut().zip(found) {
        *value = x;
        count += 1;
    }
    assert_eq!(count, values.len(), "elements that are not zero against room for them");
}

/// Writes elements whose bits are set from `values`, in order, and zeros elsewhere. Overwrites.
pub fn scatter<P: Pattern>(bits: &[u8], values: &[P], x: &mut [P]) {
    assert_eq!(bits.len(), x.len().div_ceil(PER_BYTE), "bytes against elements");
    let mut from = values.iter();
    for (x, &bits) in x.chunks_mut(PER_BYTE).zip(bits) {
        for (at, x) in x.iter_mut().enumerate() {
            *x = if bits >> at & 1 == 1 { from.next().copied().unwrap_or_default() } else { P::default() };
        }
    }
    assert_eq!(from.len(), 0, "values without a bit");
}

/// The number of set bits.
pub fn set(bits: &[u8]) -> usize {
    bits.iter().map(|bits| bits.count_ones() as usize).sum()
}
