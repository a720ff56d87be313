//! Which rank waits for which: finds deadlocks at once, and after the timeout ranks that make no progress.
//!
//! A waiting rank cannot continue before *all* missing members of its operation have posted, and cannot post anything
//! itself. So a cycle of waits is always a deadlock, and needs no timeout. Otherwise each chain of waits ends at a rank
//! that computes; that rank is at fault if it makes no progress.

use super::state::State;
use crate::comm::{CommError, FaultKind, Site};
use crate::sync::Instant;
use std::time::Duration;

impl State {
    /// The cycle of waits that contains `start`, if there is one.
    pub(super) fn cycle(&self, start: usize) -> Option<Vec<usize>> {
        // In most cases nobody waits for this rank, or no awaited rank waits itself: then there is nothing to search.
        if !self.is_awaited(start) || !self.awaited(start).any(|rank| self.awaited(rank).next().is_some()) {
            return None;
        }
        let (mut seen, mut path) = (vec![false; self.ranks.len()], vec![start]);
        if !self.leads_to(start, start, &mut seen, &mut path) {
            return None;
        }
        // Begins with the lowest rank, so that the message does not depend on which rank noticed.
        let lowest = path.iter().enumerate().min_by_key(|(_, rank)| **rank).map_or(0, |(i, _)| i);
        path.rotate_left(lowest);
        Some(path)
    }

    fn leads_to(&self, from: usize, goal: usize, seen: &mut [bool], path: &mut Vec<usize>) -> bool {
        for next in self.awaited(from) {
            if next == goal {
                return true;
            }
            if std::mem::replace(&mut seen[next], true) {
                continue;
            }
            path.push(next);
            if self.leads_to(next, goal, seen, path) {
                return true;
            }
            path.pop();
        }
        false
    }

    /// For each rank at the end of a chain of waits that starts at `rank`: the chain.
    fn chains(&self, rank: usize) -> Vec<Vec<usize>> {
        let (mut seen, mut found, mut chains) = (vec![false; self.ranks.len()], vec![vec![rank]], vec![]);
        seen[rank] = true;
        while let Some(chain) = found.pop() {
            let mut ends = true;
            for next in chain.last().into_iter().flat_map(|&last| self.awaited(last)) {
                ends = false;
                if !std::mem::replace(&mut seen[next], true) {
                    found.push(chain.iter().copied().chain([next]).collect());
                }
            }
            if ends {
                chains.push(chain);
            }
        }
        chains
    }
}

/// When a wait first looked: what a rank did not do before others waited for it does not count.
#[derive(Debug, Default)]
pub(super) struct Watch(Option<Instant>);

impl Watch {
    /// Stops the world if a rank that `site`'s rank depends on made no progress for `timeout`.
    pub(super) fn look(
        &mut self,
        state: &mut State,
        site: &Site,
        beats: impl Fn(usize) -> u64,
        timeout: Duration,
    ) -> Option<CommError> {
        let now = Instant::now();
        let waits = now.duration_since(*self.0.get_or_insert(now)) >= timeout;
        let is_late = state.progress.look(state.ranks.len(), beats, timeout);
        if !(waits && is_late) {
            return None;
        }
        let chains = state.chains(site.world_rank).into_iter().filter(|chain| chain.len() > 1);
        let (rank, chain) = chains
            .filter_map(|chain| Some((*chain.last()?, chain)))
            .find(|(rank, _)| state.progress.is_late(*rank, now, timeout))?;
        Some(state.stop(FaultKind::Timeout { rank, after: timeout, chain }, site.clone()))
    }
}
