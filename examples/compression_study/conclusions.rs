//! The published conclusions (Rudakov et al., arXiv:2401.07788), each checked against the results: it holds here, it
//! does not, or the results cannot tell.
//!
//! Runs of one seed start from the same weights and see the same data, so settings are compared seed by seed. A
//! difference counts if its mean over seeds is above [`SIGNIFICANT`] standard errors.

use crate::results::Results;
use crate::settings::{BITS, quantised, top};
use crate::tasks::Scores;
use std::fmt;

/// Standard errors: the 95% quantile of Student's t for 5 seeds, one-sided.
const SIGNIFICANT: f64 = 2.13;

/// The answer to a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The published conclusion.
    Holds,
    /// The opposite holds, or there is no difference.
    DoesNot,
    /// The seeds spread too much, or runs are missing.
    CannotBeTold,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Holds => "holds here",
            Self::DoesNot => "does not",
            Self::CannotBeTold => "cannot be told",
        })
    }
}

/// A conclusion with its answer on a task.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The published claim.
    pub claim: &'static str,
    /// The task.
    pub task: &'static str,
    /// The answer.
    pub verdict: Verdict,
    /// The numbers behind the answer.
    pub numbers: String,
}

/// A task and its score.
#[derive(Clone, Copy, Debug)]
pub struct Scored {
    /// Its name.
    pub task: &'static str,
    /// Unit of its score.
    pub unit: &'static str,
    /// 1 if more is better, else -1.
    pub sign: f64,
    /// The loss of quality from which harm counts as severe.
    pub severe: f64,
    /// The score of a diverged run: the score of guessing.
    pub worst: f64,
}

/// The tasks. Severe is a tenth of the way from the score without compression to twice the error, or to guessing.
pub const TASKS: [Scored; 2] = [
    Scored { task: "language", unit: "nats per byte", sign: -1.0, severe: 0.1, worst: 5.545 },
    Scored { task: "digits", unit: "% correct", sign: 1.0, severe: 2.0, worst: 10.0 },
];

/// A mean over seeds with its standard error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mean {
    /// The mean.
    pub mean: f64,
    /// Its standard error.
    pub error: f64,
}

impl Mean {
    /// The mean of some numbers; `None` for fewer than two.
    pub fn of(values: &[f64]) -> Option<Self> {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        (values.len() > 1).then(|| Self { mean, error: (squares / (count - 1.0) / count).sqrt() })
    }

    fn is_above(self, bound: f64) -> bool {
        self.mean - bound > SIGNIFICANT * self.error
    }

    fn is_below(self, bound: f64) -> bool {
        bound - self.mean > SIGNIFICANT * self.error
    }
}

impl fmt::Display for Mean {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:+.3} ± {:.3}", self.mean, self.error)
    }
}

/// The use of a model: with or without compression at inference.
type Use = fn(Scores) -> Option<f64>;
const ON: Use = |scores| scores.on;
const OFF: Use = |scores| scores.off;

impl Scored {
    /// How much better `a` is than `b`, seed by seed.
    fn better(&self, results: &Results, (a, use_a): (&str, Use), (b, use_b): (&str, Use)) -> Option<Mean> {
        let score = |scores, of: Use| of(scores).unwrap_or(self.worst);
        let pairs = results.of(self.task, a).filter_map(|(seed, of_a)| {
            let (_, of_b) = results.of(self.task, b).find(|(other, _)| *other == seed)?;
            Some(self.sign * (score(of_a, use_a) - score(of_b, use_b)))
        });
        Mean::of(&pairs.collect::<Vec<_>>())
    }

    /// The loss of quality in a setting, with compression at inference.
    fn harm(&self, results: &Results, setting: &str) -> Option<Mean> {
        self.better(results, ("none", ON), (setting, ON))
    }

    fn answer(&self, claim: &'static str, told: Option<(bool, bool, String)>) -> Answer {
        let (verdict, numbers) = match told {
            None => (Verdict::CannotBeTold, "runs are missing".to_owned()),
            Some((true, _, numbers)) => (Verdict::Holds, numbers),
            Some((false, true, numbers)) => (Verdict::DoesNot, numbers),
            Some((false, false, numbers)) => (Verdict::CannotBeTold, numbers),
        };
        Answer { claim, task: self.task, verdict, numbers }
    }

    fn gradients_need_more(&self, results: &Results) -> Answer {
        let mut means = Vec::new();
        for (few, many) in BITS.iter().flat_map(|few| BITS.iter().map(move |many| (*few, *many))) {
            if few < many {
                let (gradients, activations) = (quantised(few, many), quantised(many, few));
                means.extend(self.better(results, (&gradients, ON), (&activations, ON)));
            }
        }
        let told = (means.len() == 6).then(|| {
            let mean = means.iter().map(|mean| mean.mean).sum::<f64>() / 6.0;
            let error = means.iter().map(|mean| mean.error.powi(2)).sum::<f64>().sqrt() / 6.0;
            let all = Mean { mean, error };
            let wins = means.iter().filter(|mean| mean.is_above(0.0)).count();
            let losses = means.iter().filter(|mean| mean.is_below(0.0)).count();
            let numbers = format!(
                "more bits for gradients than for activations rather than the reverse: {all} better over 6 pairs, of which {wins} are clearly \
                 better and {losses} clearly worse"
            );
            (all.is_above(0.0), all.is_below(0.0), numbers)
        });
        self.answer("Quantisation needs more bits for gradients than for activations.", told)
    }

    fn gradients_need_milder(&self, results: &Results) -> Answer {
        let told = self.better(results, ("top10 fw only", ON), ("top10 bw only", ON)).map(|mean| {
            let numbers = format!("TopK 10% of activations alone rather than of gradients alone: {mean} better");
            (mean.is_above(0.0), mean.is_below(0.0), numbers)
        });
        self.answer("Gradients need milder compression than activations.", told)
    }

    fn ten_percent_is_the_limit(&self, results: &Results) -> Answer {
        let harms = [10, 5].map(|percent| self.harm(results, &top(percent)));
        let told = harms[0].zip(harms[1]).map(|(ten, five)| {
            let numbers = format!("TopK 10% costs {ten}, 5% {five}; severe is {}", self.severe);
            let (holds, already) = (ten.is_below(self.severe) && five.is_above(self.severe), ten.is_above(self.severe));
            (holds, already || five.is_below(self.severe), numbers)
        });
        self.answer("TopK of 10% is the strongest that does no severe harm.", told)
    }

    fn inference_needs_it(&self, results: &Results) -> Answer {
        let told = self.better(results, ("top10", ON), ("top10", OFF)).map(|mean| {
            let numbers = format!("trained with TopK 10%, inference with it rather than without: {mean} better");
            (mean.is_above(self.severe), mean.is_below(self.severe), numbers)
        });
        self.answer("A model trained with TopK does well only where inference is compressed too.", told)
    }

    fn feedback_gains_nothing(&self, results: &Results, name: &str, claim: &'static str) -> Answer {
        let told = self.better(results, (name, ON), ("top10", ON)).map(|mean| {
            let numbers = format!("TopK 10% with feedback rather than without: {mean} better");
            (
                !mean.is_above(0.0) && (mean.is_below(0.0) || mean.error * SIGNIFICANT < self.severe),
                mean.is_above(0.0),
                numbers,
            )
        });
        self.answer(claim, told)
    }

    fn feedback_frees_inference(&self, results: &Results, name: &str, claim: &'static str) -> Answer {
        let lost = self.better(results, (name, ON), (name, OFF));
        let told = lost.zip(self.better(results, (name, OFF), ("top10", OFF))).map(|(lost, gained)| {
            let numbers = format!(
                "without compression at inference it loses {lost}, and is {gained} better than a model trained without feedback"
            );
            (lost.is_below(self.severe) && gained.is_above(0.0), lost.is_above(self.severe), numbers)
        });
        self.answer(claim, told)
    }

    fn differences_do_not_help(&self, results: &Results) -> Answer {
        let means = [30, 20, 10].map(|percent| {
            let differences = format!("{} aq-sgd", top(percent));
            let of = |harm: Option<Mean>| harm.map(|mean| (percent, mean));
            (of(self.harm(results, &differences)), of(self.better(results, (&differences, ON), (&top(percent), ON))))
        });
        let (harms, gains): (Vec<_>, Vec<_>) = means.into_iter().unzip();
        let both = harms.into_iter().collect::<Option<Vec<_>>>().zip(gains.into_iter().collect::<Option<Vec<_>>>());
        let told = both.map(|(harms, gains)| {
            let each = |means: &[(u32, Mean)]| {
                means.iter().map(|(percent, mean)| format!("{percent}%: {mean}")).collect::<Vec<_>>().join(", ")
            };
            let numbers = format!(
                "AQ-SGD with TopK costs {}; rather than TopK alone it is {} better; severe is {}",
                each(&harms),
                each(&gains),
                self.severe
            );
            let worse =
                harms[1..].iter().all(|(_, mean)| mean.is_above(self.severe)) && harms[0].1.is_below(self.severe);
            let fine = harms[1..].iter().any(|(_, mean)| mean.is_below(self.severe));
            (worse, fine, numbers)
        });
        self.answer("With AQ-SGD, TopK stronger than 30% worsens results significantly.", told)
    }

    fn shared_indices_help(&self, results: &Results) -> Answer {
        let means = [20, 10, 5, 2].map(|percent| {
            let shared = format!("{} shared", top(percent));
            self.better(results, (&shared, ON), (&top(percent), ON)).map(|mean| (percent, mean))
        });
        let means: Option<Vec<_>> = means.into_iter().collect();
        let told = means.map(|means| {
            let each: Vec<_> = means.iter().map(|(percent, mean)| format!("{percent}%: {mean}")).collect();
            let numbers =
                format!("the activations' indices for gradients rather than their own: {} better", each.join(", "));
            let (wins, losses) = means.iter().fold((0, 0), |(wins, losses), (_, mean)| {
                (wins + usize::from(mean.is_above(0.0)), losses + usize::from(mean.is_below(0.0)))
            });
            (wins > 0 && losses == 0, losses > 0 && wins == 0, numbers)
        });
        self.answer("TopK of gradients works better at the indices of the activations.", told)
    }
}

/// Every conclusion, on each task that has results.
pub fn answers(results: &Results) -> Vec<Answer> {
    let mut all = Vec::new();
    for scored in TASKS.iter().filter(|scored| results.of(scored.task, "none").next().is_some()) {
        all.extend([
            scored.gradients_need_milder(results),
            scored.gradients_need_more(results),
            scored.ten_percent_is_the_limit(results),
            scored.inference_needs_it(results),
            scored.feedback_gains_nothing(results, "top10 ef", "Error feedback does not improve on plain TopK."),
            scored.feedback_gains_nothing(results, "top10 ef21", "Neither does EF21."),
            scored.feedback_frees_inference(
                results,
                "top10 ef",
                "But with error feedback, inference can do without compression.",
            ),
            scored.feedback_frees_inference(results, "top10 ef21", "So it can with EF21."),
            scored.differences_do_not_help(results),
            scored.shared_indices_help(results),
        ]);
    }
    all
}
