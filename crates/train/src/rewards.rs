//! What preference optimisation reports beside its loss.

use serde::Serialize;

/// The rewards of the pairs of a step or of a validation, as means over pairs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rewards {
    /// beta · (ln p - ln p_frozen) of the chosen answers.
    pub chosen: f64,
    /// The same of the rejected ones.
    pub rejected: f64,
    /// The first less the second.
    pub margin: f64,
    /// Share of pairs whose margin is above 0.
    pub accuracy: f64,
}

impl Rewards {
    /// From the metrics of a report; `None` of a model that does not learn from pairs.
    pub fn from_report(metrics: &[(&'static str, f64)]) -> Option<Self> {
        let of = |name| metrics.iter().find(|metric| metric.0 == name).map(|metric| metric.1);
        Some(Self {
            chosen: of("rewards_chosen")?,
            rejected: of("rewards_rejected")?,
            margin: of("rewards_margin")?,
            accuracy: of("rewards_accuracy")?,
        })
    }

    /// Its numbers by name.
    pub fn scalars(self) -> [(&'static str, f64); 4] {
        let Self { chosen, rejected, margin, accuracy } = self;
        [("chosen", chosen), ("rejected", rejected), ("margin", margin), ("accuracy", accuracy)]
    }
}
