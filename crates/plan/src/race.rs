//! The fastest of several configurations on this machine, by steps that they take in turn.
//!
//! ```text
//! A B C D ─ a first step of each, which does not count ─▶ A B C D  A B C D ─ C and D are out ─▶ A B  A B  … ─▶ A
//! ```
//! A machine's speed changes within seconds, and steps one configuration after the other would compare its moments. The
//! steps of a round follow each other, so they are compared with each other, and the median over the rounds decides:
//! neither a slow moment nor a single step does. All ranks are threads of one world; one that a configuration does not
//! have waits, and its core works for the others. They agree on the times of each step, so all of them decide the same.

use crate::error::PlanError;
use meshwork_core::{Group, Rank, ReduceOp, World};
use meshwork_nn::Batch;
use meshwork_train::config::Config;
use meshwork_train::{Devices, RankDevice, TrainError, Trainer};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Rounds for which there must be time before a further configuration is started.
const ROUNDS: usize = 3;

/// Rounds after which a race is over in any case.
const MOST_ROUNDS: usize = 20;

/// A race may last as long as this many steps, where that is longer than its budget.
const STEPS: f64 = 10.0;

/// Ratios of two steps of a round are taken to be at least this far off: a few of them may agree by chance.
const NOISE: f64 = 0.07;

/// Seconds of the steps of each configuration, in the order of preference. One that has dropped out has fewer steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Race(pub Vec<Vec<f64>>);

/// How many times as long the steps of one configuration took as those of another.
#[derive(Clone, Copy, Debug)]
struct Lag {
    /// The median over the rounds of both.
    ratio: f64,
    /// How far ratios are from it, in the median.
    deviation: f64,
    rounds: f64,
}

impl Lag {
    /// So much slower that further rounds would hardly change it.
    fn is_clear(self) -> bool {
        self.ratio > 1.0 + 4.0 * self.deviation.max(NOISE) / self.rounds.sqrt()
    }

    /// No slower than the ratio may be off.
    fn is_tie(self) -> bool {
        self.ratio <= 1.0 + self.deviation / self.rounds.sqrt()
    }
}

impl Race {
    /// Lets configurations, in the order of preference, take steps in turn until `budget` after `begun`. Where steps
    /// are long only the first ones take part. Steps are those of samples of zeros; nothing is written.
    ///
    /// # Errors
    /// A configuration that has no plan; a step that fails.
    pub fn run(configs: &[Config], begun: Instant, budget: Duration) -> Result<Self, PlanError> {
        let ranks = configs.iter().map(|config| config.parallelism.world_size().unwrap_or(1)).max().unwrap_or(1);
        let races = World::Threads(ranks).run(|world| Self::on_rank(configs, &world, begun, budget.as_secs_f64()))?;
        Ok(races.into_iter().next().unwrap_or_default())
    }

    fn on_rank(configs: &[Config], world: &Group, begun: Instant, mut budget: f64) -> Result<Self, TrainError> {
        let mut race = Self::default();
        let mut runners: Vec<Option<Runner>> = Vec::new();
        // Seconds since the race began, and of the longest first step.
        let (mut now, mut longest) = (0.0, 0.0f64);
        for config in configs {
            let steps = 1 + ROUNDS * (runners.len() + 1);
            if !runners.is_empty() && now + longest * steps as f64 > budget {
                break;
            }
            let mut runner = Runner::start(&format!("configuration {}", runners.len()), config, world)?;
            let [seconds, end] = Runner::step(runner.as_mut(), world, begun)?;
            (now, longest) = (end, longest.max(seconds));
            if runners.is_empty() {
                budget = budget.max(STEPS * seconds);
            }
            runners.push(runner);
            race.0.push(Vec::new());
        }
        loop {
            let racing = race.racing();
            let round: f64 = racing.iter().filter_map(|&at| race.0[at].last()).sum();
            if racing.len() < 2 || race.rounds() == MOST_ROUNDS || now + round > budget {
                return Ok(race);
            }
            runners.iter_mut().enumerate().filter(|(at, _)| !racing.contains(at)).for_each(|(_, out)| *out = None);
            for at in racing {
                let [seconds, end] = Runner::step(runners[at].as_mut(), world, begun)?;
                race.0[at].push(seconds);
                now = end;
            }
        }
    }

    /// Those that take part in the next round: all of the last one but those that are clearly slower than the fastest.
    pub fn racing(&self) -> Vec<usize> {
        let (last, front) = (self.last(), self.front());
        last.into_iter().filter(|&at| !self.lag(at, front).is_clear()).collect()
    }

    /// The fastest. Of those that are no slower than their ratios are off, the first.
    ///
    /// ```
    /// use meshwork_plan::race::Race;
    ///
    /// // The machine slows down, and the first step of the second one is a lucky one.
    /// let race = Race(vec![vec![1.0, 1.1, 1.2, 1.3], vec![0.9, 1.2, 1.3, 1.4]]);
    /// assert_eq!(race.winner(), 0);
    /// ```
    pub fn winner(&self) -> usize {
        let front = self.front();
        self.last().into_iter().find(|&at| at == front || self.lag(at, front).is_tie()).unwrap_or(front)
    }

    /// The median step of one; `None` if it took none that counts.
    pub fn seconds(&self, of: usize) -> Option<f64> {
        Some(median(&self.0[of])).filter(|_| !self.0[of].is_empty())
    }

    /// How many times as long the steps of one took as those of another in the same rounds, in the median.
    pub fn ratio(&self, of: usize, to: usize) -> f64 {
        self.lag(of, to).ratio
    }

    fn lag(&self, of: usize, to: usize) -> Lag {
        let ratios: Vec<f64> = self.0[of].iter().zip(&self.0[to]).map(|(own, other)| own / other).collect();
        let ratio = median(&ratios);
        let off: Vec<f64> = ratios.iter().map(|other| (other - ratio).abs()).collect();
        Lag { ratio, deviation: median(&off), rounds: ratios.len().max(1) as f64 }
    }

    fn rounds(&self) -> usize {
        self.0.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Those that took part in the last round.
    fn last(&self) -> Vec<usize> {
        (0..self.0.len()).filter(|&at| self.0[at].len() == self.rounds()).collect()
    }

    /// The one whose steps took the least part of their rounds, in the median.
    fn front(&self) -> usize {
        let last = self.last();
        let all: Vec<f64> = (0..self.rounds()).map(|round| last.iter().map(|&at| self.0[at][round]).sum()).collect();
        let part = |of: usize| {
            let parts: Vec<f64> = self.0[of].iter().zip(&all).map(|(own, all)| own / all).collect();
            median(&parts)
        };
        last.iter().copied().min_by(|&a, &b| part(a).total_cmp(&part(b))).unwrap_or(0)
    }
}

/// A configuration on one of its ranks.
struct Runner {
    trainer: Trainer,
    batch: Batch,
}

impl Runner {
    /// Starts a configuration on the first ranks of the world; `None` on the others. Collective over the world.
    fn start(name: &str, config: &Config, world: &Group) -> Result<Option<Self>, TrainError> {
        let (model, plan) = (config.model(), config.plan()?);
        let size = plan.mesh.world_size();
        let members = if world.rank() < size { (0..size).collect() } else { vec![world.rank()] };
        let own = world.split(name, &members)?;
        if world.rank() >= size {
            return Ok(None);
        }
        let devices = Devices::cpu(config.training.matmul_dtype.precision());
        let RankDevice { device, world } = devices.rank(own.communicator().clone())?;
        let trainer = Trainer::new(model.clone(), &plan, Arc::new(Rank::new(&plan.mesh, world)?), device)?;
        let batch = Batch::blank(&model.fields(), trainer.samples().len());
        Ok(Some(Self { trainer, batch }))
    }

    /// A step, where this rank has a part in it: the seconds of its slowest rank, and those from `begun` to its end.
    /// All ranks have the same. Collective over the world.
    fn step(runner: Option<&mut Self>, world: &Group, begun: Instant) -> Result<[f64; 2], TrainError> {
        let start = Instant::now();
        if let Some(Self { trainer, batch }) = runner {
            trainer.step(batch)?;
        }
        let mut times = [start.elapsed().as_secs_f64(), begun.elapsed().as_secs_f64()];
        world.all_reduce_slice(&mut times, ReduceOp::Max)?;
        Ok(times)
    }
}

/// The mean of the two in the middle, where there are two.
fn median(all: &[f64]) -> f64 {
    let mut all = all.to_vec();
    all.sort_by(f64::total_cmp);
    let at = |place: usize| all.get(place).copied().unwrap_or_default();
    (at(all.len() / 2) + at(all.len().saturating_sub(1) / 2)) / 2.0
}
