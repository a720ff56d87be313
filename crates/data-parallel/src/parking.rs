//! Where gradients wait that nothing is added to, outside of the memory that they are computed in.

use crate::vectors::VectorError;
use meshwork_core::Buffer;
use std::fmt::Debug;

/// A store of vectors by number. A [`Reducer`](crate::Reducer) takes back what it put there, once or more often.
pub trait Parking: Debug {
    /// Keeps a vector, in the place of the one of the same number.
    ///
    /// # Errors
    /// No room, or a store that fails.
    fn put(&mut self, place: usize, vector: Buffer) -> Result<(), VectorError>;

    /// The vector that was put there last. It stays in the store too.
    ///
    /// # Errors
    /// A store that fails, or no memory.
    fn get(&mut self, place: usize) -> Result<Buffer, VectorError>;

    /// The same in host memory, for somebody who looks at a run from outside.
    ///
    /// # Errors
    /// A store that fails.
    fn peek(&self, place: usize) -> Result<Buffer, VectorError>;

    /// A new step begins. What was put before is needed no more, but for being looked at until it is replaced.
    fn begin(&mut self);
}
