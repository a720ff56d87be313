//! How often to save, and the share of time that trains: failures that come at random, at a rate by the number of
//! cards.
//!
//! ```text
//! τ seconds of training, δ seconds of saving, a failure λ times a second, R seconds from a failure until training goes on
//! expected time of τ and δ: (e^(λ(τ+δ)) - 1) · e^(λR) / λ        share that trains: τ over that
//! ```
//! J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006).

use crate::error::PlanError;
use serde::Deserialize;

/// What a failure and a checkpoint take, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// How long a checkpoint stops training.
    pub save: f64,
    /// How long a checkpoint is written while training goes on. A failure meanwhile goes back to the one before.
    pub write: f64,
    /// From a failure until training goes on from a checkpoint.
    pub recover: f64,
}

/// The best checkpoint interval and what it leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goodput {
    /// Seconds of training between two checkpoints.
    pub interval: f64,
    /// Share of time that trains what is kept.
    pub share: f64,
}

/// Hours between two failures of a run, by its number of cards, as published.
#[derive(Clone, Debug)]
pub struct Failures {
    rows: Vec<(f64, f64)>,
}

/// Facts of failures, with their sources.
const FAULTS: &str = include_str!("../published/faults.toml");

impl Failures {
    /// The published rates.
    ///
    /// # Errors
    /// A file without them.
    pub fn published() -> Result<Self, PlanError> {
        #[derive(Deserialize)]
        struct File {
            mttf: Mttf,
        }
        #[derive(Deserialize)]
        struct Mttf {
            rows: Vec<(f64, f64)>,
        }
        let read: File = toml::from_str(FAULTS).map_err(|error| PlanError::File {
            file: "published/faults.toml".into(),
            problem: error.message().to_owned(),
            valid: "it has [mttf] with rows of cards and hours".into(),
        })?;
        Ok(Self { rows: read.mttf.rows })
    }

    /// One failure in so many hours of a card, however many cards there are.
    pub fn of_card(hours: f64) -> Self {
        Self { rows: vec![(1.0, hours)] }
    }

    /// Hours between two failures. Between published numbers of cards it is a power of the cards; below the smallest
    /// and above the largest, a card fails as often as there.
    pub fn hours(&self, cards: usize) -> f64 {
        let cards = cards as f64;
        let pair = self.rows.windows(2).find(|pair| pair[0].0 <= cards && cards <= pair[1].0);
        match pair {
            Some(&[(few, long), (many, short)]) => {
                let place = (cards / few).ln() / (many / few).ln();
                long * (short / long).powf(place)
            }
            _ => {
                let nearest = self.rows.iter().min_by(|a, b| distance(a.0, cards).total_cmp(&distance(b.0, cards)));
                nearest.map_or(f64::INFINITY, |(known, hours)| hours * known / cards)
            }
        }
    }
}

fn distance(a: f64, b: f64) -> f64 {
    (a / b).ln().abs()
}

impl Times {
    /// The share of time that trains with this interval, if a failure comes every `between` seconds on average.
    ///
    /// ```
    /// use meshwork_plan::goodput::Times;
    ///
    /// let times = Times { save: 10.0, write: 0.0, recover: 60.0 };
    /// // Without failures only saving takes time.
    /// assert!((times.share(90.0, 1e12) - 0.9).abs() < 1e-6);
    /// assert!(times.share(90.0, 3600.0) < 0.89);
    /// ```
    pub fn share(&self, interval: f64, between: f64) -> f64 {
        let lost = ((self.recover + self.write) / between).exp();
        let tried = ((interval + self.save) / between).exp_m1() * between;
        interval / (tried * lost)
    }

    /// The interval with the largest share: where the derivative of the logarithm of the share is zero,
    /// `1 - τ/M = e^(-(τ+δ)/M)` for a failure every M seconds.
    pub fn best(&self, between: f64) -> Goodput {
        let falls = |interval: f64| 1.0 - interval / between <= (-(interval + self.save) / between).exp();
        // The slope changes its sign once, before the time between two failures.
        let (mut low, mut high) = (0.0, between);
        for _ in 0..200 {
            let middle = 0.5 * (low + high);
            if falls(middle) { high = middle } else { low = middle }
        }
        let interval = 0.5 * (low + high);
        Goodput { interval, share: self.share(interval, between) }
    }
}
