//! Which of many cases a test tries: some of them with every change, all of them in a sweep.

use std::iter::{Skip, StepBy};

/// Whether tests try all of their cases: `MESHWORK_SWEEP=all`, as `.ci/nightly sweep` sets it.
pub fn sweeps() -> bool {
    std::env::var("MESHWORK_SWEEP").is_ok_and(|sweep| sweep == "all")
}

/// Cases of which a test tries some.
pub trait Sampled: Iterator + Sized {
    /// Every `nth` case, from the first on; all of them where the test [sweeps].
    ///
    /// # Panics
    /// If `nth` is 0.
    fn sampled(self, nth: usize) -> StepBy<Self> {
        self.step_by(if sweeps() { 1 } else { nth })
    }

    /// Every `nth` case, from the one on whose turn it is: nested cases take others each time around, so that a few
    /// have most pairs. All of them where the test [sweeps].
    ///
    /// # Panics
    /// If `nth` is 0.
    fn sampled_in_turn(self, nth: usize, turn: usize) -> StepBy<Skip<Self>> {
        self.skip(if sweeps() { 0 } else { turn % nth }).sampled(nth)
    }
}

impl<Cases: Iterator> Sampled for Cases {}
