//! Placements: the three ways in which the generators put stages on ranks.

use super::{Action, Schedule, Weights};

/// Stage s on rank s.
pub(super) fn one_per_rank(pp: usize) -> Vec<usize> {
    (0..pp).collect()
}

/// `virtual_stages` times around the ranks (PTD-P, section 2.2): rank r holds stages r, r + pp, r + 2 pp, ...
pub(super) fn looped(pp: usize, virtual_stages: usize) -> Vec<usize> {
    (0..virtual_stages).flat_map(|_| 0..pp).collect()
}

/// Down the ranks and back: rank r holds stages r and 2 pp - 1 - r, so that the first and the last share a rank.
pub(super) fn v_shaped(pp: usize) -> Vec<usize> {
    (0..pp).chain((0..pp).rev()).collect()
}

/// One step of synchronous training.
pub(super) fn one_step(name: &str, placement: Vec<usize>, micros: usize, actions: Vec<Vec<Action>>) -> Schedule {
    Schedule {
        name: name.to_string(),
        ranks: actions.len(),
        replicas: vec![1; placement.len()],
        placement,
        micros,
        steps: 1,
        weights: Weights::Flush,
        actions,
    }
}
