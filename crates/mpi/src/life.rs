//! How long MPI lives in a process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// The thread that owns MPI, which ends with the last value that needs it.
#[derive(Debug)]
pub(crate) struct Life {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Life {
    /// Of a thread that ends soon after `over` is set.
    pub(crate) fn new(over: Arc<AtomicBool>, thread: JoinHandle<()>) -> Life {
        Life { over, thread: Some(thread) }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        // The thread looks for this every few milliseconds; a rank that panics must not wait for others there.
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take()
            && !thread::panicking()
        {
            _ = thread.join(); // a panic of it was told by the panic hook, and nothing is left to end
        }
    }
}
