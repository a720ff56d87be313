//! The hash of bytes.

use meshwork_core::hash::hash;
use std::collections::HashSet;

#[test]
fn any_bit_order_and_length_counts() {
    let bytes: Vec<u8> = (0..200).map(|i| (i * 7 + 1) as u8).collect();
    let mut seen = HashSet::new();
    for length in 0..bytes.len() {
        assert!(seen.insert(hash(&bytes[..length])), "length {length}");
        assert!(seen.insert(hash(&vec![0; length + 1])), "{length} zeros");
    }
    for bit in 0..8 * bytes.len() {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(seen.insert(hash(&flipped)), "bit {bit}");
    }
    for word in 0..24 {
        let mut swapped = bytes.clone();
        (0..8).for_each(|i| swapped.swap(8 * word + i, (8 * word + 8 + i) % 200));
        assert!(seen.insert(hash(&swapped)), "words {word} and {}", word + 1);
    }
}
