//! The checksum of a piece: XXH3 with 64 bits.
//!
//! It detects accidental changes by disks, cables and copies: a change stays undetected with probability 2^-64. It runs
//! faster than memory, so it adds no cost to a save, and other languages have it (`xxhash.xxh3_64` in Python). A
//! cryptographic hash would also detect forgery. CRC-32C would miss one change in 2^32, and a checkpoint of some
//! terabytes has a million pieces.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::hash::Hasher;
use twox_hash::XxHash3_64;

/// XXH3 of some bytes. In JSON: 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Checksum(u64);

impl Checksum {
    /// The checksum of these bytes.
    pub fn hash(bytes: &[u8]) -> Self {
        Self(XxHash3_64::oneshot(bytes))
    }

    /// Reads 16 lower-case hexadecimal digits.
    pub(crate) fn parse(digits: &str) -> Option<Self> {
        let valid = digits.len() == 16 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        valid.then(|| u64::from_str_radix(digits, 16).ok().map(Self)).flatten()
    }
}

/// An incremental checksum.
#[derive(Default)]
pub(crate) struct Summing(XxHash3_64);

impl Summing {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    pub(crate) fn checksum(&self) -> Checksum {
        Checksum(self.0.finish())
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let digits = String::deserialize(deserializer)?;
        Self::parse(&digits).ok_or_else(|| serde::de::Error::custom("a checksum is 16 hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the reference implementation, `xxhsum -H3`.
    #[test]
    fn it_is_xxh3() {
        assert_eq!(Checksum::hash(b"").to_string(), "2d06800538d394c2");
        assert_eq!(Checksum::hash(b"a").to_string(), "e6c632b61e964e1f");
    }

    #[test]
    fn parts_make_up_the_whole() {
        let bytes: Vec<u8> = (0..5000u32).map(|at| (at * at) as u8).collect();
        for part in [1, 7, 256, 1000, 5000] {
            let mut sum = Summing::default();
            bytes.chunks(part).for_each(|part| sum.add(part));
            assert_eq!(sum.checksum(), Checksum::hash(&bytes), "parts of {part}");
        }
    }
}
