//! The id of a parameter, valid only with the declarations that gave it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names a parameter within the [`Declarations`](super::Declarations) that gave it, and no others.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId {
    pub(super) index: usize,
    pub(super) registry: Registry,
}

impl ParamId {
    /// Position in the order of declaration.
    pub fn index(self) -> usize {
        self.index
    }
}

/// The position alone: the same on every run.
impl fmt::Debug for ParamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ParamId({})", self.index)
    }
}

/// Tells one set of declarations from all others of the process. Clones are the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Registry(u64);

impl Default for Registry {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}
