//! Increasing indices in as few bytes as their number and range allow: see [`wire`](crate::wire).

use crate::MessageError;

/// Packed differences: the low bits of all indices, then the differences of their high parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Low bits of an index.
    pub width: u32,
    /// Bytes of the low bits of all indices.
    pub low_bytes: usize,
}

impl Packed {
    /// How `count` indices below `below` are packed; `None` for a bitmap.
    pub(crate) fn new(count: usize, below: usize) -> Option<Self> {
        let packed = Self { width: width(count, below), low_bytes: low_bytes(count, below) };
        (!is_bitmap(count, below)).then_some(packed)
    }
}

/// Bytes of `count` indices below `below`.
pub fn bytes(count: usize, below: usize) -> usize {
    below.div_ceil(8).min(packed_bytes(count, below))
}

/// Low bits of each index in packed differences.
fn width(count: usize, below: usize) -> u32 {
    (below / count.max(1)).checked_ilog2().unwrap_or(0)
}

fn low_bytes(count: usize, below: usize) -> usize {
    (count * width(count, below) as usize).div_ceil(8)
}

fn packed_bytes(count: usize, below: usize) -> usize {
    low_bytes(count, below) + (count + (below >> width(count, below))).div_ceil(8)
}

fn is_bitmap(count: usize, below: usize) -> bool {
    below.div_ceil(8) <= packed_bytes(count, below)
}

/// Writes increasing indices.
pub fn write(indices: &[u32], below: usize, out: &mut [u8]) {
    out.fill(0);
    let set = |at: usize, bits: &mut [u8]| bits[at / 8] |= 1 << (at % 8);
    if is_bitmap(indices.len(), below) {
        return indices.iter().for_each(|&index| set(index as usize, out));
    }
    let width = width(indices.len(), below);
    let (low, high) = out.split_at_mut(low_bytes(indices.len(), below));
    let (mut word, mut filled, mut bytes) = (0_u64, 0, low.iter_mut());
    for (i, &index) in indices.iter().enumerate() {
        word |= u64::from(index & mask(width)) << filled;
        filled += width;
        while filled >= 8 {
            if let Some(byte) = bytes.next() {
                *byte = word as u8;
            }
            word >>= 8;
            filled -= 8;
        }
        set((index >> width) as usize + i, high);
    }
    if let Some(byte) = bytes.next() {
        *byte = word as u8;
    }
}

/// Reads `count` indices below `below` from [`bytes`] bytes.
pub fn read(bytes: &[u8], count: usize, below: usize) -> Result<Vec<u32>, MessageError> {
    let wrong = MessageError::Indices { count, below };
    let bitmap = is_bitmap(count, below);
    let (low, high) = bytes.split_at(if bitmap { 0 } else { low_bytes(count, below) });
    if high.iter().map(|byte| byte.count_ones() as usize).sum::<usize>() != count {
        return Err(wrong);
    }
    let mut indices = Vec::with_capacity(count);
    let (width, mut low) = (width(count, below), LowBits { bytes: low.iter(), word: 0, filled: 0 });
    for (at, &byte) in high.iter().enumerate() {
        let mut rest = byte;
        while rest != 0 {
            let position = 8 * at + rest.trailing_zeros() as usize;
            rest &= rest - 1;
            // Does not underflow, because a position is at least the number of ones before it.
            let index = match bitmap {
                true => position,
                false => ((position - indices.len()) << width) + low.next(width) as usize,
            };
            if index >= below || indices.last().is_some_and(|&last| last as usize >= index) {
                return Err(wrong);
            }
            indices.push(index as u32);
        }
    }
    if low.word == 0 { Ok(indices) } else { Err(MessageError::Padding) }
}

fn mask(width: u32) -> u32 {
    ((1_u64 << width) - 1) as u32
}

struct LowBits<'a> {
    bytes: std::slice::Iter<'a, u8>,
    /// Bits that were read but not yet used.
    word: u64,
    filled: u32,
}

impl LowBits<'_> {
    fn next(&mut self, width: u32) -> u32 {
        while self.filled < width {
            self.word |= u64::from(self.bytes.next().copied().unwrap_or(0)) << self.filled;
            self.filled += 8;
        }
        let value = self.word as u32 & mask(width);
        self.word >>= width;
        self.filled -= width;
        value
    }
}
