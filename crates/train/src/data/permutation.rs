//! The order of the samples in an epoch: a permutation that is computed, not stored.

/// A permutation of `0..len`, fixed by its key. Any rank can compute any place of it directly, without a shared table.
/// It is a Feistel network over the next even power of two, applied until the value is below `len`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permutation {
    len: u64,
    half_bits: u32,
    key: u64,
}

/// Rounds of the network: four make a permutation look random to an adversary; small halves gain from more.
const ROUNDS: u64 = 8;

impl Permutation {
    /// The permutation of `0..len` for this seed and epoch. `len` is at least 1.
    pub(crate) fn new(len: u64, seed: u64, epoch: u64) -> Self {
        let bits = 64 - len.saturating_sub(1).leading_zeros();
        Self { len, half_bits: bits.div_ceil(2).max(1), key: mix(mix(seed) ^ epoch) }
    }

    /// The value at `index`, which must be below `len`.
    pub(crate) fn at(self, index: u64) -> u64 {
        let mut value = self.shuffle(index);
        // The network permutes a range of up to four times `len`: a walk that starts below `len` always returns below
        // `len`.
        while value >= self.len {
            value = self.shuffle(value);
        }
        value
    }

    fn shuffle(self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(mix(self.key ^ round) ^ right) & mask));
        }
        left << self.half_bits | right
    }
}

/// The output function of SplitMix64 (Steele, Lea and Flood, 2014), on the counter's next value.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(len: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let permutation = Permutation::new(len, seed, epoch);
        (0..len).map(|index| permutation.at(index)).collect()
    }

    #[test]
    fn mix_is_splitmix64() {
        // First output of the published generator for seed 0.
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
    }

    #[test]
    fn every_sample_comes_once() {
        for len in (1..70).chain([127, 128, 129, 389, 1000, 4096, 4097]) {
            let mut order = order(len, 1234, 3);
            order.sort_unstable();
            assert!(order.into_iter().eq(0..len), "len {len}");
        }
    }

    #[test]
    fn seed_and_epoch_change_the_order_and_nothing_else_does() {
        assert_eq!(order(389, 1234, 0), order(389, 1234, 0));
        assert_ne!(order(389, 1234, 0), order(389, 1234, 1));
        assert_ne!(order(389, 1234, 0), order(389, 1235, 0));
        assert_ne!(order(389, 1234, 0), (0..389).collect::<Vec<_>>());
        // The order must never change between versions.
        assert_eq!(order(8, 1234, 0), PINNED);
    }

    const PINNED: [u64; 8] = [5, 7, 0, 4, 3, 2, 1, 6];

    #[test]
    fn all_places_are_as_likely() {
        // Over many epochs each of 7 samples stands in each of 7 places about equally often: chi-squared with 36
        // degrees of freedom is above 80 once in 30,000 times.
        const EPOCHS: u64 = 7000;
        let mut counts = [[0u64; 7]; 7];
        for epoch in 0..EPOCHS {
            for (place, sample) in order(7, 5, epoch).into_iter().enumerate() {
                counts[place][sample as usize] += 1;
            }
        }
        let expected = (EPOCHS / 7) as f64;
        let chi: f64 = counts.iter().flatten().map(|&n| (n as f64 - expected).powi(2) / expected).sum();
        assert!(chi < 80.0, "{chi}: {counts:?}");
    }
}
