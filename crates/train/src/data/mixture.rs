//! Which source each sample comes from: sample i of a mixture is a function of i alone.
//!
//! Weights are whole-number shares w, W in all. The sequence of sources has the period W, in which each source comes w
//! times, in the order of earliest deadlines: sample j of a source (from 0) may come from place ⌊j·W/w⌋ on and must
//! come before place ⌈(j+1)·W/w⌉. Such an order always exists, and taking the earliest deadline finds it (Baruah,
//! Cohen, Plaxton and Varvel, 1996: proportionate progress). So in every prefix of n samples a source has its share
//! n·w/W but for less than one sample.

/// The order of sources.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Mixture {
    shares: Vec<u64>,
    /// The sources of one period.
    order: Vec<u16>,
    /// For each place of the period, how many samples of its source come before it.
    before: Vec<u32>,
}

/// The longest period: weights need more digits for nothing.
pub(crate) const LONGEST: u64 = 1 << 20;

impl Mixture {
    /// One source.
    pub fn alone() -> Self {
        Self { shares: vec![1], order: vec![0], before: vec![0] }
    }

    /// The mixture of sources with these weights, which are positive and finite; `None` if their period is too long.
    pub fn new(weights: &[f64]) -> Option<Self> {
        let shares = shares(weights)?;
        let period: u64 = shares.iter().sum();
        let mut taken = vec![0; shares.len()];
        let mut mixture = Self { shares: shares.clone(), order: Vec::new(), before: Vec::new() };
        for place in 0..period {
            let deadline = |source: usize| ((taken[source] + 1) * period).div_ceil(shares[source]);
            let ready = |source: &usize| taken[*source] * period / shares[*source] <= place;
            let source = (0..shares.len()).filter(ready).min_by_key(|&source| deadline(source))?;
            mixture.order.push(source as u16);
            mixture.before.push(taken[source] as u32);
            taken[source] += 1;
        }
        Some(mixture)
    }

    /// The shares of the sources.
    pub fn shares(&self) -> &[u64] {
        &self.shares
    }

    /// The source of a sample, and how many samples of that source come before it.
    pub fn at(&self, index: u128) -> (usize, u128) {
        let period = self.order.len() as u128;
        let (round, place) = (index / period, (index % period) as usize);
        let source = usize::from(self.order[place]);
        (source, round * u128::from(self.shares[source]) + u128::from(self.before[place]))
    }

    /// How many of the first `index` samples are of a source.
    pub fn before(&self, source: usize, index: u128) -> u128 {
        let period = self.order.len() as u128;
        let rest = &self.order[..(index % period) as usize];
        let counted = rest.iter().filter(|of| usize::from(**of) == source).count() as u128;
        index / period * u128::from(self.shares[source]) + counted
    }

    /// The number of samples before one of the sources, which have `held` samples each, has to repeat one.
    pub fn samples(&self, held: &[u64]) -> u64 {
        let repeats = |(source, &held): (usize, &u64)| {
            let (round, rest) = (held / self.shares[source], held % self.shares[source]);
            let same = |place: &usize| self.order[*place] as usize == source && u64::from(self.before[*place]) == rest;
            let place = (0..self.order.len()).find(same).unwrap_or(0);
            u128::from(round) * self.order.len() as u128 + place as u128
        };
        held.iter().enumerate().map(repeats).min().map_or(0, |samples| samples.try_into().unwrap_or(u64::MAX))
    }
}

/// Whole numbers in the exact proportion of the weights as they are written in decimals, in lowest terms.
fn shares(weights: &[f64]) -> Option<Vec<u64>> {
    let written: Vec<String> = weights.iter().map(|weight| format!("{weight}")).collect();
    let decimals = |text: &String| text.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let most = written.iter().map(decimals).max()?;
    let whole =
        |text: &String| format!("{}{}", text.replace('.', ""), "0".repeat(most - decimals(text))).parse::<u128>();
    let whole: Vec<u128> = written.iter().map(whole).collect::<Result<_, _>>().ok()?;
    let gcd = whole.iter().fold(0, |a, &b| gcd(a, b));
    let shares: Vec<u64> = whole.iter().map(|share| u64::try_from(share / gcd.max(1)).ok()).collect::<Option<_>>()?;
    let sum = shares.iter().try_fold(0u64, |sum, &share| sum.checked_add(share))?;
    (sum <= LONGEST && shares.len() <= usize::from(u16::MAX)).then_some(shares)
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_the_weights_as_they_are_written() {
        assert_eq!(shares(&[0.7, 0.3]).unwrap(), [7, 3]);
        assert_eq!(shares(&[1.0, 1.0, 2.5]).unwrap(), [2, 2, 5]);
        assert_eq!(shares(&[1e-3, 0.999]).unwrap(), [1, 999]);
        assert_eq!(shares(&[5.0]).unwrap(), [1]);
        assert_eq!(shares(&[1.0 / 3.0, 1.0]), None);
        assert_eq!(shares(&[1e300, 1.0]), None);
    }

    #[test]
    fn every_prefix_has_its_share_but_for_less_than_one_sample() {
        let many: Vec<f64> = (1..40).map(f64::from).collect();
        let cases: [&[f64]; 7] = [
            &[1.0],
            &[1.0, 1.0],
            &[0.7, 0.3],
            &[0.501, 0.3, 0.199],
            &[97.0, 1.0, 1.0, 1.0],
            &[1.0, 2.0, 3.0, 500.0],
            &many,
        ];
        for weights in cases {
            let mixture = Mixture::new(weights).unwrap();
            let (shares, period) = (mixture.shares(), mixture.order.len() as i128);
            let mut counts = vec![0i128; weights.len()];
            for n in 0..3 * period + 1 {
                for (count, &share) in counts.iter().zip(shares) {
                    let off = count * period - n * i128::from(share);
                    assert!(off.abs() < period, "{weights:?}: {count} of {n} samples");
                }
                let before: Vec<u128> = (0..weights.len()).map(|source| mixture.before(source, n as u128)).collect();
                assert!(before.iter().zip(&counts).all(|(before, count)| *before == *count as u128), "{before:?}");
                let (source, nth) = mixture.at(n as u128);
                assert_eq!(nth as i128, counts[source], "sample {n} of {weights:?}");
                counts[source] += 1;
            }
        }
    }

    #[test]
    fn one_source_is_taken_in_order() {
        let alone = Mixture::alone();
        assert_eq!(alone, Mixture::new(&[3.5]).unwrap());
        assert_eq!(alone.at(1 << 100), (0, 1 << 100));
        assert_eq!(alone.samples(&[17]), 17);
    }

    #[test]
    fn the_samples_before_a_repetition_are_counted() {
        for (weights, held) in
            [([7.0, 3.0], [20, 4]), ([7.0, 3.0], [3, 400]), ([1.0, 2.0], [5, 10]), ([1.0, 1.0], [0, 3])]
        {
            let mixture = Mixture::new(&weights).unwrap();
            let first = (0..).find(|&n| {
                let (source, nth) = mixture.at(n);
                nth >= u128::from(held[source])
            });
            assert_eq!(Some(u128::from(mixture.samples(&held))), first, "{weights:?} {held:?}");
        }
    }
}
