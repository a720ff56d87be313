//! 1F1B over replicated stages with a flush (PipeDream's 1F1B-RR; Narayanan et al., 2019, section 3.2).

use super::ActionKind::{Backward, Forward};
use super::{Action, Schedule, Weights};

/// Stage s on `replicas[s]` ranks, which take its micro-batches in turn. PipeDream's planner gives slow stages more
/// ranks than fast ones (3-1, 15-1). Each rank alternates forwards and backwards, and runs the backwards of its own
/// forwards; gradients are summed over the replicas of a stage before its weights are updated.
///
/// Before its first backward, a replica of stage s admits a number of micro-batches: the number of ranks from its stage
/// on, divided by its replicas and rounded up. At the first stage this is the paper's NOAM.
///
/// ```
/// use meshwork_pipeline::{one_f_one_b, one_f_one_b_replicated, render};
///
/// assert_eq!(
///     render(&one_f_one_b_replicated(&[2, 1], 4))?,
///     "rank 0 | 0F0 0F2         0B0----                 0B2----\n\
///      rank 1 | 0F1 0F3                     0B1----                 0B3----\n\
///      rank 2 |     1F0 1B0---- 1F1 1B1---- 1F2 1B2---- 1F3 1B3----\n"
/// );
/// assert_eq!(one_f_one_b_replicated(&[1, 1, 1], 4).actions, one_f_one_b(3, 4).actions);
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn one_f_one_b_replicated(replicas: &[usize], micros: usize) -> Schedule {
    let mut actions = Vec::new();
    let mut placement = Vec::new();
    for (stage, &count) in replicas.iter().enumerate() {
        placement.push(actions.len());
        let from_here: usize = replicas[stage..].iter().sum();
        for replica in 0..count {
            let own: Vec<usize> = (replica..micros).step_by(count).collect();
            let ahead = (from_here.div_ceil(count) - 1).min(own.len());
            let at = |kind| move |&micro: &usize| Action::new(kind, stage, micro);
            let turns = own[ahead..].iter().zip(&own);
            let turns = turns.flat_map(|(forward, backward)| [at(Forward)(forward), at(Backward)(backward)]);
            let fill = own[..ahead].iter().map(at(Forward));
            let drain = own[own.len() - ahead..].iter().map(at(Backward));
            actions.push(fill.chain(turns).chain(drain).collect());
        }
    }
    Schedule {
        name: "1f1b".to_string(),
        ranks: actions.len(),
        placement,
        replicas: replicas.to_vec(),
        micros,
        steps: 1,
        weights: Weights::Flush,
        actions,
    }
}
