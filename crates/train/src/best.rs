//! The best validation of a run: when it ends early, and which checkpoint it keeps.

use serde::{Deserialize, Serialize};

/// The validation with the lowest loss so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The step behind which it was.
    pub step: u64,
    /// Its loss.
    pub loss: f64,
    /// Validations since then, none of which had a lower loss.
    pub since: u64,
}

impl Best {
    /// The best validation after one more, and whether that is it. A loss that is no number is never the best.
    pub(crate) fn after(best: Option<Self>, step: u64, loss: f64) -> (Option<Self>, bool) {
        match best {
            _ if loss.is_nan() => (best.map(|best| Self { since: best.since + 1, ..best }), false),
            Some(best) if loss >= best.loss => (Some(Self { since: best.since + 1, ..best }), false),
            _ => (Some(Self { step, loss, since: 0 }), true),
        }
    }

    /// Whether a run with this `training.patience` ends.
    pub(crate) fn is_out_of_patience(best: Option<Self>, patience: u64) -> bool {
        patience > 0 && best.is_some_and(|best| best.since >= patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_counts_validations_since_the_best() {
        let (mut best, mut seen) = (None, Vec::new());
        for (step, loss) in [3.0, 2.0, 2.0, f64::NAN, 1.5, 1.6].into_iter().enumerate() {
            let (now, is_best) = Best::after(best, step as u64, loss);
            best = now;
            seen.push((is_best, best.map(|best| best.since), Best::is_out_of_patience(best, 2)));
        }
        let wanted = [
            (true, Some(0), false),
            (true, Some(0), false),
            (false, Some(1), false),
            (false, Some(2), true),
            (true, Some(0), false),
            (false, Some(1), false),
        ];
        assert_eq!(seen, wanted);
        assert_eq!(best, Some(Best { step: 4, loss: 1.5, since: 1 }));
        assert!(!Best::is_out_of_patience(best, 0), "0 is no limit");
        assert_eq!(Best::after(None, 1, f64::NAN), (None, false));
    }
}
