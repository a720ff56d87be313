//! The warning that a build computes slowly, once in a process.

use meshwork_tensor::Device;
use meshwork_tensor::cpu;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether this process was told.
static TOLD: AtomicBool = AtomicBool::new(false);

/// What to do if meshwork was [compiled without optimisation](cpu::slow_build), the first time that a process asks: a program that calls it
/// shows it where it shows such things. Else the first step of a [`Trainer`](crate::Trainer) on a CPU writes it to standard error.
pub fn slow_build_warning() -> Option<&'static str> {
    cpu::slow_build().filter(|_| !TOLD.swap(true, Ordering::Relaxed))
}

/// Tells standard error, if the steps of `device` are slow for this reason.
pub(crate) fn warn(device: &dyn Device) {
    if device.name() == "cpu"
        && let Some(warning) = slow_build_warning()
    {
        eprintln!("warning: {warning}");
    }
}
