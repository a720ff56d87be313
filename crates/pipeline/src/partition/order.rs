//! The order of the states as a table of bits: which cuts can lie between which others, so that a search visits only
//! possible cuts.

use super::states::States;

/// The order of cuts 0 to n, for n states.
///
/// Each bit stands for a cut. The bits are in the order of [`turn`] and not of the cuts, so that a set of cuts is
/// visited in that order.
pub(super) struct Order {
    /// The cut of each bit.
    cuts: Vec<u16>,
    /// By cut: the words of the set of cuts at which a stage can end that begins there.
    after: Vec<Vec<u64>>,
    /// By cut: the words of the set of cuts at which a stage can begin that ends there.
    before: Vec<Vec<u64>>,
}

/// The place of a cut in the search order. Of equally good cuts, the search takes the first. There are many equally
/// good ones where layers cost nothing or a transfer decides: a straight VGG-16 on four machines has 253 best
/// partitions. The published code visits cuts in the order of a Python set of objects, which their addresses scatter.
/// Any order is right. This one is also scattered, and was chosen because it finds the partitions of the recorded runs
/// of that code.
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

    /// The cuts between two others, in the order of the search.
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

    /// The numbers of pairs and of triples of cuts that can follow each other, with `from` as the first cut if it is
    /// given.
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
