//! The balanced binary tree that fixes the order of sums which a mesh, a batch or a thread may cut.
//!
//! The tree over n leaves splits at the largest power of two below n, and its parts split in the same way: three leaves
//! give (a + b) + c, five ((a + b) + (c + d)) + e. Communicators add up their ranks in it ([`comm`](crate::comm));
//! canonical numerics continue it within each rank, down to leaves that do not depend on the mesh.
//!
//! The sum does not depend on which rank computes a subtree, as long as one rank holds all leaves of it. A number of
//! ranks [fits] a number of leaves if each rank then holds a whole subtree. A run of leaves that is not a whole subtree
//! is passed as the few [`subtrees`] that it consists of, and a [`Counter`] joins them.
//!
//! ```
//! use meshwork_core::tree::{degrees, subtrees, sum};
//!
//! let leaves = [1e8f32, 3.3, -1e8, 7.7, 0.1];
//! assert_eq!(sum(&leaves, |a, b| a + b), Some(((1e8 + 3.3) + (-1e8 + 7.7)) + 0.1));
//!
//! // Two ranks with four leaves each: both hold a subtree. Three ranks cannot share eight leaves so.
//! assert_eq!(degrees(8), [1, 2, 4, 8]);
//! // Samples 3 to 8: the leaf 3, then the subtree of 4 to 7, then the leaf 8.
//! assert!(subtrees(3..9).eq([3..4, 4..8, 8..9]));
//! ```

use std::ops::Range;

/// Whether each of `degree` ranks, holding an equal run of the `leaves`, holds a whole subtree: one rank always does,
/// several ranks do if each has a power of two.
pub fn fits(leaves: usize, degree: usize) -> bool {
    degree == 1 || degree > 0 && leaves.is_multiple_of(degree) && (leaves / degree).is_power_of_two()
}

/// The numbers of ranks that [fit](fits), in order.
pub fn degrees(leaves: usize) -> Vec<usize> {
    // Every degree except 1 is the number of leaves divided by a power of two.
    let mut degrees: Vec<usize> =
        (0..=leaves.max(1).trailing_zeros()).filter_map(|twos| leaves.checked_shr(twos)).collect();
    degrees.retain(|&degree| degree > 0);
    degrees.push(1);
    degrees.sort_unstable();
    degrees.dedup();
    degrees
}

/// The largest subtrees that a run of leaves is made of, in order. Where the run begins at leaf 0, they are those of
/// the tree over the run alone.
pub fn subtrees(leaves: Range<usize>) -> impl Iterator<Item = Range<usize>> + Clone {
    let mut start = leaves.start;
    std::iter::from_fn(move || {
        let left = leaves.end.saturating_sub(start);
        // Limited by the number of remaining leaves and by the place of the first: leaf 12 begins a subtree of 4.
        let size = 1 << left.checked_ilog2()?.min(start.trailing_zeros());
        start += size;
        Some(start - size..start)
    })
}

/// Sums of subtrees that wait for their right neighbours: adds up leaves, or whole subtrees, that arrive in order. It
/// holds no more sums than their number has bits.
#[derive(Clone, Debug)]
pub struct Counter<T>(Vec<(usize, T)>);

impl<T> Default for Counter<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Counter<T> {
    /// Sums that wait, the oldest first.
    pub fn waiting(&self) -> usize {
        self.0.len()
    }

    /// Adds the sum of the next subtree, of `leaves` leaves, and joins complete subtrees by `join(left, right)`.
    pub fn push(&mut self, mut leaves: usize, mut sum: T, mut join: impl FnMut(T, T) -> T) {
        while let Some((_, left)) = self.0.pop_if(|(waiting, _)| *waiting == leaves) {
            sum = join(left, sum);
            leaves *= 2;
        }
        self.0.push((leaves, sum));
    }

    /// The total sum: the remaining sums are joined from the right. `None` if there are none.
    pub fn finish(&mut self, mut join: impl FnMut(T, T) -> T) -> Option<T> {
        let (_, mut sum) = self.0.pop()?;
        while let Some((_, left)) = self.0.pop() {
            sum = join(left, sum);
        }
        Some(sum)
    }
}

/// The sum of the leaves; `None` if there are none.
pub fn sum<T: Copy>(leaves: &[T], mut join: impl FnMut(T, T) -> T) -> Option<T> {
    let mut counter = Counter::default();
    leaves.iter().for_each(|&leaf| counter.push(1, leaf, &mut join));
    counter.finish(join)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The tree by its definition.
    fn by_definition(leaves: &[f32]) -> f32 {
        match leaves {
            [one] => *one,
            _ => {
                let (left, right) = leaves.split_at(leaves.len().next_power_of_two() / 2);
                by_definition(left) + by_definition(right)
            }
        }
    }

    fn add(a: f32, b: f32) -> f32 {
        a + b
    }

    fn leaves(count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * i) as f32 * 0.7).sin() * 10f32.powi(i as i32 % 5)).collect()
    }

    #[test]
    fn sums_are_those_of_the_definition() {
        let mut orders = 0;
        for n in 1..200 {
            let leaves = leaves(n);
            let tree = by_definition(&leaves);
            assert_eq!(sum(&leaves, add).unwrap().to_bits(), tree.to_bits(), "{n} leaves");
            orders += usize::from(leaves.iter().sum::<f32>() != tree);
        }
        assert!(orders > 100, "the values must tell orders apart");
        assert_eq!(sum(&[], add), None);
    }

    #[test]
    fn degrees_are_those_that_fit() {
        for leaves in 1..100 {
            let fitting: Vec<usize> = (1..=leaves + 1).filter(|&degree| fits(leaves, degree)).collect();
            assert_eq!(degrees(leaves), fitting, "{leaves} leaves");
        }
        assert_eq!(degrees(12), [1, 3, 6, 12]);
        assert_eq!(degrees(0), [1], "no leaves: no rank but one");
        assert!(!fits(8, 0) && !fits(8, 3) && !fits(6, 2));
    }

    proptest! {
        /// However the leaves are cut into runs, and each run into its subtrees, the sum has the same bits.
        #[test]
        fn any_cut_gives_the_same_bits(cuts in prop::collection::vec(1..40_usize, 1..8)) {
            let leaves = leaves(cuts.iter().sum());
            let mut counter = Counter::default();
            let mut start = 0;
            for run in cuts {
                let mut next = start;
                for subtree in subtrees(start..start + run) {
                    prop_assert_eq!(subtree.start, next);
                    prop_assert!(subtree.len().is_power_of_two() && subtree.start % subtree.len() == 0);
                    next = subtree.end;
                    counter.push(subtree.len(), by_definition(&leaves[subtree]), add);
                }
                start += run;
                prop_assert_eq!(next, start);
                prop_assert!(counter.waiting() <= start.ilog2() as usize + 1);
            }
            prop_assert_eq!(counter.finish(add).unwrap().to_bits(), by_definition(&leaves).to_bits());
        }

        /// Ranks that fit add up their leaves, and the tree over the ranks continues from there.
        #[test]
        fn ranks_that_fit_continue_the_tree(odd in 0..6_usize, twos in 0..5_u32) {
            let leaves = leaves((2 * odd + 1) << twos);
            for degree in degrees(leaves.len()) {
                let ranks: Vec<f32> = leaves.chunks(leaves.len() / degree).map(by_definition).collect();
                prop_assert_eq!(by_definition(&ranks).to_bits(), by_definition(&leaves).to_bits());
            }
        }
    }
}
