//! The wire format, version 1. Everything is little-endian, and every size is determined by the scheme and the shape.
//!
//! A message is a header of 16 bytes and a body:
//!
//! | bytes | what |
//! |---|---|
//! | 0 | version of the format: 1 |
//! | 1 | number of the [`Method`] |
//! | 2..4 | zero |
//! | 4..8 | fingerprint: the low half of [`meshwork_core::hash::hash`] of the scheme's text, a space and the shape (`topk:0.1 1x50`) |
//! | 8..16 | number of elements |
//!
//! Bodies, of n elements in G parts ([`Per`](crate::Per)):
//!
//! | scheme | body |
//! |---|---|
//! | `none` | n f32 |
//! | `bf16` | n bf16 |
//! | `fp8` | G scales (f32, powers of two), n bytes |
//! | `quant:b` | G pairs of f32, minimum and step; codes of b bits: b·⌈n/8⌉ bytes |
//! | `sign` | G scales (f32); codes of 1 bit (1: negative): ⌈n/8⌉ bytes |
//! | `int8` | G scales (f32), n bytes in two's complement |
//! | `nf4` | G scales (f32); codes of 4 bits: 4·⌈n/8⌉ bytes |
//! | `nf4/e5m3` | G scales (bytes: 8·e + m is (1 + m/8)·2^(e-20), but 0 is zero and 255 NaN); codes as of `nf4` |
//! | `topk` | indices of k elements below n; then the k values, as a vector, by the scheme after the `+` (none: f32) |
//! | `randk` | the two words of the key (u32) and the first counter (u64) that draw the indices; then the k values, likewise |
//! | `powersgd:r` | the factors P (rows·r), row by row, and Q (cols·r), column by column, f32; nothing of an empty matrix |
//!
//! **Codes** of b bits are stored as bit planes, in tiles of 512 elements. A tile of m elements has a plane of s =
//! ⌈m/8⌉ bytes for each of the b bits, the lowest first; bit j of byte i of a plane belongs to element j·s + i. Bits of
//! elements beyond m are zero.
//!
//! **Indices** are k increasing numbers below n, in the smaller of two codings (the first if they are equal). A bitmap
//! has ⌈n/8⌉ bytes, and bit i % 8 of byte i / 8 is set for index i. Packed differences (Elias 1974, Fano 1971) split
//! each index into its low w bits and its high part, w = ⌊log2(n/k)⌋: first come the low bits of each index, one after
//! the other, in ⌈k·w/8⌉ bytes; then a bit vector in which each index sets one bit, and the number of zeros between two
//! ones is the difference of their high parts: ⌈(k + ⌊n/2^w⌋)/8⌉ bytes. Padding bits are zero. Both sizes depend only
//! on n and k.

/// The version of the format that this crate writes and reads.
pub const VERSION: u8 = 1;

/// Bytes of the header.
pub const HEADER: usize = 16;

/// The number of a method in the header. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Method {
    /// `none`
    None = 0,
    /// `bf16`
    Bf16 = 1,
    /// `fp8`
    Fp8 = 2,
    /// `quant`
    Quantize = 3,
    /// `sign`
    Sign = 4,
    /// `topk`
    TopK = 5,
    /// `randk`
    RandomK = 6,
    /// `powersgd`
    PowerSgd = 7,
    /// `int8`
    Int8 = 8,
    /// `nf4`
    Nf4 = 9,
    /// A compressor from another crate.
    Custom = 255,
}

/// Cuts f32s off the front of a body; the sizes were checked with the header.
pub(crate) fn floats(body: &[u8], count: usize) -> (impl Iterator<Item = f32>, &[u8]) {
    let (head, rest) = body.split_at(4 * count);
    (head.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)), rest)
}

/// The f32 with this number.
pub(crate) fn float_at(floats: &[u8], at: usize) -> f32 {
    f32::from_le_bytes(floats.as_chunks::<4>().0[at])
}

/// Writes f32s to the front of a body and returns the rest of it.
pub(crate) fn put_floats(body: &mut [u8], values: impl ExactSizeIterator<Item = f32>) -> &mut [u8] {
    let (head, rest) = body.split_at_mut(4 * values.len());
    for (bytes, value) in head.as_chunks_mut::<4>().0.iter_mut().zip(values) {
        *bytes = value.to_le_bytes();
    }
    rest
}
