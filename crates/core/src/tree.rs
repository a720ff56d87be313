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

/// The nodes of the tree over `leaves` leaves that have some of them, ascending, and no others: as few as possible. The
/// last node of a tree may have fewer leaves than a power of two.
///
/// ```
/// // Of seven ranks the last four in one process, and in another the first three.
/// assert_eq!(meshwork_core::tree::nodes(&[3, 4, 5, 6], 7), [3..4, 4..7]);
/// assert_eq!(meshwork_core::tree::nodes(&[0, 1, 2], 7), [0..2, 2..3]);
/// ```
pub fn nodes(some: &[usize], leaves: usize) -> Vec<Range<usize>> {
    let (mut nodes, mut rest) = (Vec::new(), some);
    while let Some(&start) = rest.first() {
        let run = rest.iter().enumerate().take_while(|(at, leaf)| **leaf == start + at).count();
        let largest = if start == 0 { usize::BITS - 1 } else { start.trailing_zeros() };
        let sizes = (0..=largest).rev().map(|twos| (1 << twos).min(leaves - start));
        let size = sizes.into_iter().find(|&size| size <= run).unwrap_or(1);
        nodes.push(start..start + size);
        rest = &rest[size..];
    }
    nodes
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
