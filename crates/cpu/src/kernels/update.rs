//! Options of every matrix product: whether it adds to its output, and the strides of its operands.

/// Whether an output is replaced or added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// The old contents are not read.
    Overwrite,
    /// The result is added to the old contents.
    Accumulate,
}

/// Distance in elements from one row to the next, and from one column to the next.
pub type Strides = (usize, usize);
