//! Verify mode: a trainer compares what its ranks claim about their values ([`meshwork_tensor::verify`]) in the steps
//! that its plan names, before the update. Beside the claims of any loop it has those about
//!
//! | claim | checked |
//! |---|---|
//! | optimizer states of a parameter that an axis does not cut | the same bits on all ranks of the axis |
//! | the sums of statistics from which a buffer is updated | the same bits on all ranks that hold it |
//! | a tied weight, or a weight of a replicated stage | the same bits on all pp ranks that hold it |
//! | the samples of data-parallel ranks | no two ranks have the same, unless [`Samples`](crate::Samples) may repeat |

/// In which steps every claim about values is [verified](crate::verify).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// In no step. The program is not [held against the program of one rank](crate::TrainError::OneRank) when a trainer
    /// or a decoder is made.
    Off,
    /// In the first step of a trainer.
    #[default]
    FirstStep,
    /// In every n-th step, beginning with the first.
    Every(u64),
}

impl Verify {
    /// Whether the step with this number, from 0 for the first one of a trainer, is verified.
    pub fn includes(self, step: u64) -> bool {
        match self {
            Self::Off => false,
            Self::FirstStep => step == 0,
            Self::Every(steps) => step.is_multiple_of(steps.max(1)),
        }
    }
}
