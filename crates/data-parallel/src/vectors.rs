//! The memory of gradients, and the little arithmetic that reducing them takes.

use meshwork_core::{Buffer, BufferError, DType};
use std::error::Error;
use std::fmt::Debug;
use std::ops::Range;

/// Why memory could not be had, or a sum not be taken.
pub type VectorError = Box<dyn Error + Send + Sync>;

/// Vectors of f32 where gradients lie. [`HostVectors`] are those in host memory.
pub trait Vectors: Debug + Send + Sync {
    /// Memory for `count` elements of any value.
    fn alloc(&self, count: usize) -> Result<Buffer, VectorError>;

    /// Memory for `count` elements of any value, of the type of another vector.
    fn like(&self, vector: &Buffer, count: usize) -> Result<Buffer, VectorError>;

    /// Sets elements to zero.
    ///
    /// # Errors
    /// Elements that are not there, or that something else reads.
    fn zero(&self, vector: &mut Buffer, range: Range<usize>) -> Result<(), VectorError>;

    /// Adds a vector to another of the same length.
    ///
    /// # Errors
    /// Lengths that differ, or a sum that something else reads.
    fn add(&self, sum: &mut Buffer, vector: &Buffer) -> Result<(), VectorError>;
}

/// Vectors in host memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostVectors;

impl Vectors for HostVectors {
    fn alloc(&self, count: usize) -> Result<Buffer, VectorError> {
        Ok(Buffer::zeros(DType::F32, count))
    }

    fn like(&self, vector: &Buffer, count: usize) -> Result<Buffer, VectorError> {
        Ok(Buffer::zeros(vector.dtype(), count))
    }

    fn zero(&self, vector: &mut Buffer, range: Range<usize>) -> Result<(), VectorError> {
        let count = vector.count();
        let outside = BufferError::Range { start: range.start, end: range.end, count };
        vector.as_mut_slice::<f32>()?.get_mut(range).ok_or(outside)?.fill(0.0);
        Ok(())
    }

    fn add(&self, sum: &mut Buffer, vector: &Buffer) -> Result<(), VectorError> {
        let (vector, count) = (vector.as_slice::<f32>()?, sum.count());
        if vector.len() != count {
            return Err(BufferError::Range { start: 0, end: vector.len(), count }.into());
        }
        sum.as_mut_slice::<f32>()?.iter_mut().zip(vector).for_each(|(sum, x)| *sum += x);
        Ok(())
    }
}
