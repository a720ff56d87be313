//! The shape of a compressed value: a matrix, in parts that have a scale or a choice of their own.

use crate::{CompressError, Result};
use std::fmt;
use std::ops::Range;

/// The shape of a value: a row-major matrix. A vector is one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    rows: usize,
    cols: usize,
}

impl Shape {
    /// A matrix of `rows` rows of `cols` elements.
    ///
    /// # Errors
    /// More than 2^32 - 1 elements.
    pub fn matrix(rows: usize, cols: usize) -> Result<Shape> {
        match rows.checked_mul(cols).is_some_and(|len| u32::try_from(len).is_ok()) {
            true => Ok(Shape { rows, cols }),
            false => Err(CompressError::TooLong { rows, cols }),
        }
    }

    /// A vector of `len` elements.
    ///
    /// # Errors
    /// More than 2^32 - 1 elements.
    pub fn vector(len: usize) -> Result<Shape> {
        Shape::matrix(1, len)
    }

    /// Rows.
    pub fn rows(self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn cols(self) -> usize {
        self.cols
    }

    /// Elements.
    pub fn len(self) -> usize {
        self.rows * self.cols
    }

    /// Whether there is nothing to compress.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.rows, self.cols)
    }
}

/// The parts of a value that are compressed independently: each has its own scale, or its own k largest elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Per {
    /// The whole value.
    Tensor,
    /// Each row.
    Row,
    /// Blocks of this many consecutive elements (at least one), across rows; the last block may be shorter.
    Block(usize),
}

impl Per {
    /// Elements of each part but the last; at least 1.
    pub fn unit(self, shape: Shape) -> usize {
        match self {
            Per::Tensor => shape.len().max(1),
            Per::Row => shape.cols().max(1),
            Per::Block(len) => len.max(1),
        }
    }

    /// Number of parts.
    pub fn parts(self, shape: Shape) -> usize {
        shape.len().div_ceil(self.unit(shape))
    }

    /// The elements of each part, in order.
    pub fn ranges(self, shape: Shape) -> impl Iterator<Item = Range<usize>> {
        let (unit, len) = (self.unit(shape), shape.len());
        (0..self.parts(shape)).map(move |part| part * unit..((part + 1) * unit).min(len))
    }
}

impl fmt::Display for Per {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Per::Tensor => Ok(()),
            Per::Row => f.write_str("/row"),
            Per::Block(len) => write!(f, "/block{len}"),
        }
    }
}
