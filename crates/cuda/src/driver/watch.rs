//! How a host waits for a device whose work other processes take part in: it would wait for ever for one that has died.

use super::error::{DriverError, Result};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Waits with an eye on the other processes.
pub trait Watch: Send + Sync + Debug {
    /// Blocks until `done`, which is asked again and again.
    ///
    /// # Errors
    /// Of `done`; and the reason why other processes will not do their part. Then the device's communicators are
    /// aborted, so that its work ends.
    fn attend(&self, done: &mut dyn FnMut() -> Result<bool>) -> Result<()>;

    /// The fault of another process that is the reason of a [communication error](DriverError::Comm), if the other
    /// processes say one within a bounded time; else the error.
    fn reason(&self, error: DriverError) -> DriverError;
}

/// The watch of a device, if it has one.
#[derive(Debug, Default)]
pub struct Watched(Mutex<Option<Weak<dyn Watch>>>);

impl Watched {
    /// Replaces the watch.
    pub fn set(&self, watch: Weak<dyn Watch>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(watch);
    }

    /// The watch, as long as it lives.
    pub fn get(&self) -> Option<Arc<dyn Watch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.upgrade()
    }
}
