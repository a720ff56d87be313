//! Communicators around another one.

use super::{Call, CommError, Communicator, Membership, Pending, ReductionOrder};
use std::fmt::Debug;
use std::sync::Arc;

/// A communicator that does something with the calls of an inner one, and passes on everything else.
pub trait Decorator: Send + Sync + Debug {
    /// The inner communicator.
    fn inner(&self) -> &Arc<dyn Communicator>;

    /// Starts an operation of the inner communicator.
    fn pass(&self, call: Call) -> Result<Pending, CommError>;

    /// The same around a part of the inner communicator.
    fn around(&self, part: Arc<dyn Communicator>) -> Arc<dyn Communicator>;
}

impl<D: Decorator> Communicator for D {
    fn rank(&self) -> usize {
        self.inner().rank()
    }

    fn size(&self) -> usize {
        self.inner().size()
    }

    fn world_ranks(&self) -> &[usize] {
        self.inner().world_ranks()
    }

    fn name(&self) -> &str {
        self.inner().name()
    }

    fn start(&self, call: Call) -> Result<Pending, CommError> {
        self.pass(call)
    }

    fn split(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(self.around(self.inner().split(name, members)?))
    }

    fn connect(&self) -> Result<(), CommError> {
        self.inner().connect()
    }

    fn membership(&self) -> &dyn Membership {
        self.inner().membership()
    }

    fn reduction_order(&self) -> ReductionOrder {
        self.inner().reduction_order()
    }
}
