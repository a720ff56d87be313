//! The warning that a build computes slowly, once in a process.

use crate::prelude::*;
use meshwork_core::slow_build;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether this process was told.
static TOLD: AtomicBool = AtomicBool::new(false);

/// The warning that meshwork was [compiled without optimisation](slow_build), the first time that a process asks for
/// it. A program that calls this shows the warning to its user; in other programs the first step of a
/// [`Trainer`](crate::Trainer) on a CPU writes it to standard error.
pub fn slow_build_warning() -> Option<&'static str> {
    slow_build().filter(|_| !TOLD.swap(true, Ordering::Relaxed))
}

/// Tells standard error, if the steps of `device` are slow for this reason.
pub(crate) fn warn(device: &dyn Device) {
    if device.name() == "cpu"
        && let Some(warning) = slow_build_warning()
    {
        eprintln!("warning: {warning}");
    }
}
