//! The error of a step that has other bits where it runs again.

/// A step that has other bits where it runs again.
#[derive(thiserror::Error)]
#[error(
    "step {step}: on mesh {of}, and run again on {mesh}, it has other bits, so a rank computed, stored or sent a wrong value:\n  {}\n\
     start again from a checkpoint before this step; ranks that are named here twice, or again, are the first to look at",
    lines.join("\n  ")
)]
pub struct OtherBits {
    /// The step.
    pub step: u64,
    /// The mesh of the run.
    pub of: String,
    /// The mesh of the replay.
    pub mesh: String,
    /// What differs: loss and norm, and the first element that does.
    pub lines: Vec<String>,
}

meshwork_core::debug_as_display!(OtherBits);
