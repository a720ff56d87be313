//! Statistics of a step, and the buffers that are updated from them: the moving averages of batch norms.
//!
//! GPipe (section 2): "the sufficient statistics of inputs during training are computed over each micro-batch [...]. We
//! also track the moving average of the sufficient statistics over the entire mini-batch to be used during evaluation."
//! A micro-batch notes its statistics on its tape ([`Tape::note`](crate::Tape::note)); at the end of the step the notes
//! of all micro-batches on all data-parallel ranks are summed, and the buffers are updated from the sums.

use super::ParamId;
use std::fmt::Debug;
use std::sync::Arc;

/// Names a statistic within its [`Declarations`](super::Declarations).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StatisticId(pub(super) usize);

impl StatisticId {
    /// Position in the order of declaration.
    pub fn index(self) -> usize {
        self.0
    }
}

/// How buffers are updated from the notes of micro-batches. Both functions are pure: a step that is rolled back runs
/// them again.
pub trait StatisticRule: Debug + Send + Sync {
    /// The terms of one note, which are summed over the step in f64: `weight` and `values` are the arguments of the
    /// note. Canonical numerics keep the bits of one rank where the sum is exact, as it is of counts.
    fn terms(&self, weight: f64, values: &[f32]) -> Vec<f64>;

    /// Updates the buffers of the statistic, in their order, from the sums of all terms.
    fn update(&self, sums: &[f64], buffers: &mut [Vec<f32>]);

    /// The name under which the report of a step has the sums, as many as the first buffer has elements. `None`: it
    /// does not have them.
    fn reported(&self) -> Option<&'static str> {
        None
    }
}

/// A declared statistic.
#[derive(Clone, Debug)]
pub struct Statistic {
    /// The parameters that are updated, each of [`Role::Buffer`](super::Role::Buffer).
    pub buffers: Vec<ParamId>,
    /// The rule of their update.
    pub rule: Arc<dyn StatisticRule>,
}
