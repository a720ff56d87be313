//! Predictions of a configuration's step, rank by rank, without running it.

use crate::config::Config;
use meshwork_core::Axis;
use meshwork_engine::TrainError;
use meshwork_engine::dry_run::{self, Prediction};
use meshwork_tensor::MemoryUse;

/// Predicts a step of the rank `world_rank` of the configuration's mesh.
///
/// # Errors
/// As [`dry_run::predict`].
pub fn predict(config: &Config, world_rank: usize) -> Result<Prediction, TrainError> {
    dry_run::predict(&config.model(), &config.plan()?, world_rank)
}

/// The most bytes of a step of the rank `world_rank`, without all of its micro-batches.
///
/// # Errors
/// As [`dry_run::peak_bytes`].
pub fn peak_bytes(config: &Config, world_rank: usize) -> Result<u64, TrainError> {
    dry_run::peak_bytes(&config.model(), &config.plan()?, world_rank)
}

/// Ranks of one pp rank that do the same work.
#[derive(Clone, Debug)]
pub struct EqualRanks {
    /// Their world ranks, in ascending order.
    pub ranks: Vec<usize>,
    /// Their pp rank.
    pub pp_rank: usize,
    /// The step of each of them.
    pub each: Prediction,
}

/// Predicts a step of every rank. Ranks that differ only along dp do the same work, so a thousand of them need no more
/// predictions than one.
///
/// # Errors
/// As [`dry_run::predict`].
pub fn predict_all(config: &Config) -> Result<Vec<EqualRanks>, TrainError> {
    let mesh = config.mesh()?;
    let mut all: Vec<EqualRanks> = Vec::new();
    for first in (0..mesh.world_size()).filter(|&rank| mesh.data_rank(mesh.coords(rank)) == 0) {
        let pp_rank = mesh.coords(first).get(Axis::Pp);
        let each = predict(config, first)?;
        let ranks = mesh.group(first, &Axis::DATA);
        match all.iter_mut().find(|equal| equal.pp_rank == pp_rank && equal.each == each) {
            Some(equal) => equal.ranks.extend(ranks),
            None => all.push(EqualRanks { ranks, pp_rank, each }),
        }
    }
    all.iter_mut().for_each(|equal| equal.ranks.sort_unstable());
    Ok(all)
}

/// The holders of each rank's memory when most bytes are alive.
///
/// # Errors
/// As [`dry_run::predict`].
pub fn memory(config: &Config) -> Result<Vec<MemoryUse>, TrainError> {
    let mut memory = vec![MemoryUse::default(); config.mesh()?.world_size()];
    for EqualRanks { ranks, each, .. } in predict_all(config)? {
        ranks.into_iter().for_each(|rank| memory[rank] = each.memory);
    }
    Ok(memory)
}

/// Most bytes alive at once on all ranks together.
///
/// # Errors
/// As [`dry_run::predict`].
pub fn world_bytes(config: &Config) -> Result<u128, TrainError> {
    let all = predict_all(config)?;
    Ok(all.iter().map(|equal| equal.ranks.len() as u128 * u128::from(equal.each.peak_bytes())).sum())
}
