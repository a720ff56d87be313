//! Observers of the training passes of a rank.

use meshwork_tensor::Tensor;
use meshwork_tensor::tape::{Observer, Seen};
use std::fmt::Debug;
use std::sync::Arc;

/// The place of a tape in the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The stage.
    pub stage: usize,
    /// The micro-batch.
    pub micro: usize,
    /// Whether this forward recomputes activations for its backward. Its values have then been seen before.
    pub recomputed: bool,
}

/// Sees every value of a rank's training passes and may replace it: an [`Observer`] of all its tapes.
pub trait Watch: Debug + Send + Sync {
    /// Sees a value. A returned tensor, which must have the same dtype and shape, replaces it.
    fn see(&self, at: At, seen: &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error>;
}

/// The observer of one tape.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) watch: Arc<dyn Watch>,
    pub(super) at: At,
}

impl Observer for Watched {
    fn see(&self, seen: &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error> {
        self.watch.see(self.at, seen)
    }
}
