//! Counter-based randomness: element `i` of a stream depends only on its [`Key`] and `i`.
//!
//! A parameter or a dropout mask is thus the same on every mesh: each rank draws the elements it holds, by their
//! global index, in any order and any number of pieces.
//!
//! The generator is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
//! 2011). Block `i / 4` (the low 64 bits of the counter, the high ones zero) gives four 32-bit words, and element `i`
//! of a stream comes from word `i % 4`. All distributions use the same words: give each use its own name. The uniform
//! one is here; others implement [`Distribution`].

use crate::simd::wide;

/// Names one random stream. Made by [`key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key([u32; 2]);

impl Key {
    /// The key of which [`words`](Self::words) are these: for a stream whose name was sent.
    pub const fn from_words(words: [u32; 2]) -> Key {
        Key(words)
    }

    /// The two words of the key as the generator takes them, for devices that draw their own bits.
    pub const fn words(self) -> [u32; 2] {
        self.0
    }

    /// Mixes a hash, so that near hashes give unrelated keys.
    fn from_hash(hash: u64) -> Key {
        let mixed = mix(hash);
        Key([mixed as u32, (mixed >> 32) as u32])
    }
}

/// The stream called `name` under `seed`.
///
/// The hash is stable across versions and machines: 64-bit FNV-1a over the eight little-endian bytes of `seed` and
/// then the bytes of `name`, passed through the SplitMix64 finaliser; the low half is the first key word.
pub fn key(seed: u64, name: &str) -> Key {
    let bytes = seed.to_le_bytes().into_iter().chain(name.bytes());
    let fnv =
        bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    Key::from_hash(fnv)
}

/// Element `index` of the uniform stream: in [0, 1), a multiple of 2^-24.
pub fn uniform(key: Key, index: u64) -> f32 {
    element::<Uniform>(key, index)
}

/// `out[i] = uniform(key, start + i)`, bit for bit, at a fraction of the cost. Overwrites.
pub fn fill_uniform<T: From<f32>>(key: Key, start: u64, out: &mut [T]) {
    wide!(fill::<Uniform, T>(key, start, out));
}

/// The SplitMix64 finaliser (Steele, Lea and Flood 2014; Stafford's variant 13), preceded by its increment.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `N` Philox4x32-10 blocks side by side: `[w][l]` is word `w` of block `l`. The lanes let the compiler vectorise.
#[inline(always)]
fn philox<const N: usize>(counters: [[u32; N]; 4], Key([mut k0, mut k1]): Key) -> [[u32; N]; 4] {
    let mut words = counters;
    for _ in 0..10 {
        let [w0, w1, w2, w3] = words;
        for l in 0..N {
            let first = 0xd251_1f53 * u64::from(w0[l]);
            let second = 0xcd9e_8d57 * u64::from(w2[l]);
            words[0][l] = (second >> 32) as u32 ^ w1[l] ^ k0;
            words[1][l] = second as u32;
            words[2][l] = (first >> 32) as u32 ^ w3[l] ^ k1;
            words[3][l] = first as u32;
        }
        k0 = k0.wrapping_add(0x9e37_79b9);
        k1 = k1.wrapping_add(0xbb67_ae85);
    }
    words
}

/// The words of blocks `first .. first + N`: `[w][l]` is word `w` of block `first + l`.
#[inline(always)]
pub fn blocks<const N: usize>(key: Key, first: u64) -> [[u32; N]; 4] {
    let block = |l: usize| first.wrapping_add(l as u64);
    let low = std::array::from_fn(|l| block(l) as u32);
    let high = std::array::from_fn(|l| (block(l) >> 32) as u32);
    philox([low, high, [0; N], [0; N]], key)
}

/// 2^-24, the step of the uniform stream.
const ULP: f32 = 1.0 / 16_777_216.0;

/// How the four words of a block become four elements.
pub trait Distribution {
    /// The elements of `N` blocks side by side, as the words are. Mark it `#[inline(always)]`.
    fn draw<const N: usize>(words: [[u32; N]; 4]) -> [[f32; N]; 4];
}

struct Uniform;

impl Distribution for Uniform {
    #[inline(always)]
    fn draw<const N: usize>(words: [[u32; N]; 4]) -> [[f32; N]; 4] {
        // The upper 24 bits are exact in an f32; as i32 because that conversion is one instruction.
        words.map(|lanes| lanes.map(|word| (word >> 8) as i32 as f32 * ULP))
    }
}

/// Element `index` of a stream: word `index % 4` of block `index / 4`.
#[inline(always)]
pub fn element<D: Distribution>(key: Key, index: u64) -> f32 {
    D::draw(blocks::<1>(key, index / 4))[(index % 4) as usize][0]
}

/// `out[i] = element(key, start + i)`, bit for bit, many blocks at a time. Call it within [`wide()`].
#[inline(always)]
pub fn fill<D: Distribution, T: From<f32>>(key: Key, start: u64, out: &mut [T]) {
    const WIDE: usize = 16;
    let lead = ((4 - start % 4) % 4) as usize;
    let (head, body) = out.split_at_mut(lead.min(out.len()));
    for (i, value) in head.iter_mut().enumerate() {
        *value = element::<D>(key, start + i as u64).into();
    }
    let mut block = start.div_ceil(4);
    let mut chunks = body.chunks_exact_mut(4 * WIDE);
    for chunk in &mut chunks {
        let drawn = D::draw(blocks::<WIDE>(key, block));
        for (l, four) in chunk.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *four = [0, 1, 2, 3].map(|w| drawn[w][l].into());
        }
        block += WIDE as u64;
    }
    for four in chunks.into_remainder().chunks_mut(4) {
        let drawn = D::draw(blocks::<1>(key, block));
        for (value, [word]) in four.iter_mut().zip(drawn) {
            *value = word.into();
        }
        block += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The `philox4x32 10` lines of Random123's `kat_vectors`.
    #[test]
    fn philox_matches_the_published_vectors() {
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (pi, [0xa409_3822, 0x299f_31d0], [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox(counter.map(|word| [word]), Key(key)), expected.map(|word| [word]));
        }
    }
}
