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
    pass_on! {
        self.inner() =>
        fn rank(&self) -> usize;
        fn size(&self) -> usize;
        fn world_ranks(&self) -> &[usize];
        fn name(&self) -> &str;
        fn connect(&self) -> Result<(), CommError>;
        fn membership(&self) -> &dyn Membership;
        fn reduction_order(&self) -> ReductionOrder;
    }

    fn start(&self, call: Call) -> Result<Pending, CommError> {
        self.pass(call)
    }

    fn split(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(self.around(self.inner().split(name, members)?))
    }
}
