//! A fast hash of bytes, by which ranks compare what should be the same on all of them.
//!
//! It is no cryptographic hash: it finds accidents, not attacks.

/// Odd numbers without structure: the fractional parts of square roots of primes.
const LANES: [u64; 4] = [0x6a09_e667_f3bc_c909, 0xbb67_ae85_84ca_a73b, 0x3c6e_f372_fe94_f82b, 0xa54f_f53a_5f1d_36f1];

/// The hash of some bytes. It depends on their order and number.
///
/// ```
/// use meshwork_core::hash::hash;
///
/// assert_eq!(hash(b"weights"), hash(b"weights"));
/// assert_ne!(hash(b"weights"), hash(b"weight"));
/// ```
pub fn hash(bytes: &[u8]) -> u64 {
    // Four independent chains, each of one multiplication a word: as fast as memory.
    let mut lanes = LANES;
    let (words, rest) = bytes.as_chunks::<8>();
    let (rows, last) = words.as_chunks::<4>();
    let step = |lane: &mut u64, word: [u8; 8], odd: u64| {
        // Both halves of the product: a flipped sign must not look like another bit of a later word.
        let wide = u128::from(*lane ^ u64::from_le_bytes(word)) * u128::from(odd);
        *lane = wide as u64 ^ (wide >> 64) as u64;
    };
    for row in rows {
        for ((lane, &word), odd) in lanes.iter_mut().zip(row).zip(LANES) {
            step(lane, word, odd);
        }
    }
    let mut tail = [0; 8];
    tail[..rest.len()].copy_from_slice(rest);
    for ((lane, &word), odd) in lanes.iter_mut().zip(last.iter().chain([&tail])).zip(LANES) {
        step(lane, word, odd);
    }
    lanes.into_iter().fold(bytes.len() as u64, combine)
}

/// The hash of two hashes, in this order.
pub fn combine(first: u64, second: u64) -> u64 {
    let mixed = (first.rotate_left(32) ^ second).wrapping_mul(LANES[0]);
    (mixed ^ (mixed >> 31)).wrapping_mul(LANES[1])
}
