//! Observers of the training passes of a rank.

use crate::prelude::*;
use meshwork_tensor::tape::{Observer, Seen};
use meshwork_tensor::verify::Claims;
use std::fmt::{self, Debug, Display};

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

/// The observer of one tape: the user's, and the claims of a verified step.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) watch: Option<Arc<dyn Watch>>,
    pub(super) claims: Option<Claims>,
    pub(super) at: At,
}

impl Observer for Watched {
    fn see(&self, seen: &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error> {
        let by = self.watch.as_ref().map_or(Ok(None), |watch| watch.see(self.at, seen))?;
        // The values of a recomputed forward have been seen.
        if let Some(claims) = self.claims.as_ref().filter(|_| !self.at.recomputed || seen.operand.is_some()) {
            claims.see(&self.at, seen, by.as_ref().unwrap_or(seen.tensor))?;
        }
        Ok(by)
    }

    fn source(&self, kind: &'static str, types: Types, tensor: &Tensor) {
        if let Some(claims) = self.claims.as_ref().filter(|_| !self.at.recomputed) {
            // A rank that could not read the value has a claim less, and the comparison says so.
            _ = claims.source(&self.at, kind, types, tensor);
        }
    }

    fn compares_meshes(&self) -> bool {
        self.watch.is_some()
    }
}

impl Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {}, micro-batch {}", self.stage, self.micro)
    }
}
