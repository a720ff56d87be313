//! Ranks that take longer than others for the same work.

use meshwork_core::{Axis, Mesh};
use meshwork_engine::RankTime;

/// Steps after which a rank is named.
const STEPS: usize = 10;
/// A slow rank computes so many times as long as the middle one of its kind, and so many seconds longer.
const FACTOR: f64 = 1.5;
const LEAST: f64 = 0.02;

/// Finds ranks that are slow in many steps on end.
#[derive(Debug)]
pub(crate) struct Stragglers {
    /// The ranks with the same layers, which have the same work.
    kinds: Vec<Vec<usize>>,
    /// The steps on end in which each rank was slow, and the seconds of these steps: its own, and those of the middle
    /// rank.
    slow: Vec<(usize, f64, f64)>,
}

impl Stragglers {
    pub fn new(mesh: &Mesh) -> Self {
        let stage = |rank: usize| mesh.coords(rank).get(Axis::Pp);
        let ranks = || 0..mesh.world_size();
        let kinds = (0..mesh.degree(Axis::Pp)).map(|pp| ranks().filter(|&rank| stage(rank) == pp).collect()).collect();
        Self { kinds, slow: vec![(0, 0.0, 0.0); mesh.world_size()] }
    }

    /// Takes the times of a step. Returns a warning for each rank that has been slow for the first ten steps on end.
    pub fn step(&mut self, times: &[RankTime]) -> Vec<String> {
        let mut told = Vec::new();
        let Self { kinds, slow } = self;
        if times.len() != slow.len() {
            return told;
        }
        for kind in kinds.iter() {
            let mut sorted: Vec<f64> = kind.iter().map(|&rank| times[rank].computed).collect();
            sorted.sort_by(f64::total_cmp);
            // Of two ranks the faster one.
            let Some(&middle) = sorted.get(sorted.len().saturating_sub(1) / 2) else { continue };
            for &rank in kind {
                let own = times[rank].computed;
                let (steps, all, of_middle) = &mut slow[rank];
                if own < FACTOR * middle || own < middle + LEAST {
                    (*steps, *all, *of_middle) = (0, 0.0, 0.0);
                    continue;
                }
                (*steps, *all, *of_middle) = (*steps + 1, *all + own, *of_middle + middle);
                if *steps == STEPS {
                    let [own, middle] = [*all, *of_middle].map(|seconds| seconds / STEPS as f64);
                    told.push(format!(
                        "warning: rank {rank} is a straggler: in each of {STEPS} steps it computed for {own:.3} s, others with the same work for \
                         {middle:.3} s, and they waited for it"
                    ));
                }
            }
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(computed: &[f64]) -> Vec<RankTime> {
        computed.iter().map(|&computed| RankTime { computed, waited: 0.0 }).collect()
    }

    #[test]
    fn a_straggler_is_named_once_after_ten_steps_on_end() {
        let mut stragglers = Stragglers::new(&"dp=4".parse().unwrap());
        let slow = times(&[0.1, 0.11, 0.3, 0.1]);
        for step in 1..=30 {
            let told = stragglers.step(&slow);
            assert_eq!(told.len(), usize::from(step == 10), "step {step}");
            if let [line] = &told[..] {
                assert!(
                    line.contains("rank 2 is a straggler") && line.contains("0.300 s") && line.contains("0.100 s"),
                    "{line}"
                );
            }
        }
        // It recovers, and is named anew only after ten more.
        assert!(stragglers.step(&times(&[0.1; 4])).is_empty());
        assert_eq!((1..=10).map(|_| stragglers.step(&slow).len()).collect::<Vec<_>>(), [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn stages_with_more_layers_and_short_steps_are_no_stragglers() {
        let mut stages = Stragglers::new(&"dp=2,pp=2".parse().unwrap());
        let mut short = Stragglers::new(&"dp=2".parse().unwrap());
        for _ in 0..20 {
            assert!(stages.step(&times(&[0.1, 0.1, 0.9, 0.9])).is_empty());
            assert!(short.step(&times(&[0.001, 0.01])).is_empty());
        }
        let two = (0..10).flat_map(|_| stages.step(&times(&[0.1, 0.1, 0.9, 0.3]))).collect::<Vec<_>>();
        assert!(matches!(&two[..], [line] if line.contains("rank 2 is a straggler")), "{two:?}");
    }
}
