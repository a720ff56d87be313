//! Moving blocks: what collectives along a dim other than the first need.

use crate::error::Result;
use meshwork_core::Buffer;
use std::fmt::Debug;
use std::ops::Range;

/// Copies of blocks, for any dtype.
pub trait Layout: Debug {
    /// `[a, b, inner] → [b, a, inner]`.
    fn swap_blocks(&self, x: &Buffer, a: usize, b: usize, inner: usize) -> Result<Buffer>;

    /// `[outer, extent, inner] → [outer, range, inner]`.
    fn narrow(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer>;

    /// `[outer, range, inner] → [outer, extent, inner]`, zero outside `range`.
    fn widen(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer>;
}
