//! What every matrix product is asked for: whether it adds to its output, and how its operands lie.

/// Whether an output is replaced or added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// The old contents do not matter and are not read.
    Overwrite,
    /// The result is added to the old contents.
    Accumulate,
}

/// Distance in elements from one row to the next, and from one column to the next.
pub type Strides = (usize, usize);
