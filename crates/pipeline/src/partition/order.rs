//! Which cuts can lie between which: the order of the states as a table of bits, so that a search looks only at cuts that count.

use super::states::States;

/// The order of cuts 0 to n, for n states.
///
/// A bit stands for a cut, in the order of [`turn`] and not of the cut, so that the cuts of a set come in that order.
pub(super) struct Order {
    /// The cut of each bit.
    cuts: Vec<u16>,
    /// By cut: the words of the set of cuts at which a stage can end that begins there.
    after: Vec<Vec<u64>>,
    /// By cut: the words of the set of cuts at which a stage can begin that ends there.
    before: Vec<Vec<u64>>,
}

/// When a cut is looked at: of equally good ones, the first is taken. There are many where layers cost nothing or a transfer
/// decides: a straight VGG-16 on four machines has 253 best partitions. The published code looks at cuts in the order of a Python
/// set of objects, which their addresses scatter. Any order is right; this one is as scattered, and was chosen because it takes
/// what the recorded runs of that code took.
fn turn(cut: u16) -> usize {
    let cut = usize::from(cut);
    cut * (cut + 17) % 131
}

impl Order {
    pub(super) fn new(states: &States) -> Self {
        let last = u16::try_from(states.count()).expect("`States` holds fewer states than 2^16");
        let mut cuts: Vec<u16> = (0..=last).collect();
        cuts.sort_by_key(|&cut| turn(cut));
        let mut bits = vec![0; cuts.len()];
        cuts.iter().enumerate().for_each(|(bit, &cut)| bits[usize::from(cut)] = bit);
        let empty = vec![vec![0; cuts.len().div_ceil(64)]; cuts.len()];
        let (mut after, mut before) = (empty.clone(), empty);
        for end in 1..cuts.len() {
            for start in (0..end).filter(|&start| states.precedes(start, end)) {
                after[start][bits[end] / 64] |= 1 << (bits[end] % 64);
                before[end][bits[start] / 64] |= 1 << (bits[start] % 64);
            }
        }
        Self { cuts, after, before }
    }

    /// The cuts between two others, in the order in which they are looked at.
    pub(super) fn between(&self, start: usize, end: usize) -> impl Iterator<Item = usize> {
        let words = self.after[start].iter().zip(&self.before[end]).map(|(after, before)| after & before);
        words.enumerate().flat_map(move |(at, mut word)| {
            std::iter::from_fn(move || {
                let bit = (word != 0).then_some(word.trailing_zeros() as usize)?;
                word &= word - 1;
                Some(usize::from(self.cuts[64 * at + bit]))
            })
        })
    }

    /// How many pairs of cuts, and how many triples, can follow each other; of which the first cut is `from` where that is given.
    pub(super) fn chains(&self, from: Option<usize>) -> (u128, u128) {
        let count = |words: &[u64]| words.iter().map(|word| u128::from(word.count_ones())).sum::<u128>();
        match from {
            // All cuts come after the first.
            Some(from) => (count(&self.after[from]), self.after.iter().skip(from + 1).map(|after| count(after)).sum()),
            None => (
                self.after.iter().map(|after| count(after)).sum(),
                self.before.iter().zip(&self.after).map(|(before, after)| count(before) * count(after)).sum(),
            ),
        }
    }
}
