//! Padded shards and their true extents.
//!
//! Where the degree of an axis does not divide a dim of a parameter, each rank stores ⌈extent / degree⌉ of it, and the
//! last ranks store zeros at the end. A value that is made of such a parameter is padded in the same way. It carries
//! its true extent, so that gathering it gives exactly that, and an operation that would count the zeros is refused.

use super::prelude::*;

/// The true extents of the dims that are cut, where the shards are padded with zeros: at most one for each axis.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Padding(Vec<(Axis, usize)>);

impl Padding {
    /// The padding of dims that are cut over these axes, by their true extents.
    pub fn new(extents: impl IntoIterator<Item = (Axis, usize)>) -> Self {
        Self(extents.into_iter().collect())
    }

    /// The true extent of the dim that `axis` cuts, if its shards are padded.
    pub fn extent(&self, axis: Axis) -> Option<usize> {
        self.iter().find(|&(padded, _)| padded == axis).map(|(_, extent)| extent)
    }

    /// Each padded axis, and the true extent of the dim that it cuts.
    pub fn iter(&self) -> impl Iterator<Item = (Axis, usize)> + '_ {
        self.0.iter().copied()
    }
}

/// The result of an [operation](super::Op::padded) on operands whose shards are padded with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padded {
    /// It would compute with the zeros as if they were elements: such operands are refused.
    Refused,
    /// Zeros at the end of the operands give zeros at the end of the result, and nothing where they are summed over; in
    /// backward too. The operands must have the same true extents.
    Zeros,
    /// It moves the elements of its operand, zeros with the others, and gives a rank other dims: a dim that was cut has
    /// as many times more or fewer elements over all ranks as on one, which must be a whole number.
    Moved {
        /// Shape of the operand on one rank.
        from: Shape,
        /// Shape of the result on one rank.
        to: Shape,
    },
    /// It knows the extent of the dim that is cut over `axis`, and leaves out what lies beyond. An operand of another
    /// extent is refused.
    Knows {
        /// The axis.
        axis: Axis,
        /// The extent over all of its ranks.
        extent: usize,
    },
}
