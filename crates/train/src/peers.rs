//! Snapshots of the state in the memory of processes (`checkpoint.peer_every`): after a loss the others go on from
//! them, without a disk.
//!
//! ```text
//! state of all ranks ── by name and slice ──▶ kept in each process that holds a slice,
//!                                             and by a partner where it is one process alone
//! after a loss: what is kept ── by name and slice ──▶ the state of the ranks that are left, on their mesh
//! ```
//! A process keeps a snapshot until a step after the next one is complete: then every rank has the next one. So one
//! step is whole in the memory of all, whenever a process is lost.

use crate::checkpoint::slice_of;
use crate::config::Config;
use crate::error::RankError;
use crate::numbers::{count, size};
use crate::routes::{Arrived, Routes, with_whole_weights};
use meshwork_checkpoint::Slice;
use meshwork_core::{Communicator, Group, Record, ReduceOp};
use meshwork_engine::{ModelPlan, Plan, StateKey, StateSlice, TrainError, Trainer, state_layout};
use meshwork_nn::Model;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Who keeps what of the state of a run, as all of its ranks know it. Made once for the ranks of a process, because it
/// grows with their number.
#[derive(Debug)]
pub struct Keepers {
    /// The slices that are kept, by the rank that keeps them.
    kept: Vec<StateSlice>,
    routes: Routes,
    ranks: usize,
    ranks_per_process: usize,
}

impl Keepers {
    /// The keepers of the state of `model` by `plan`, whose ranks are in processes of `ranks_per_process`: of each
    /// slice its first holder in each process that holds it. If that is one process alone, also the rank in its place
    /// half of all processes further on, which is on another host where there are two of equal size.
    ///
    /// # Errors
    /// A plan that does not fit the model.
    pub fn new(model: &Arc<dyn Model>, plan: &Plan, ranks_per_process: usize) -> Result<Self, TrainError> {
        let (held, ranks) = (state_layout(model, plan)?, plan.mesh.world_size());
        let (process, processes) = (|rank: usize| rank / ranks_per_process, ranks.div_ceil(ranks_per_process));
        let mut holders: BTreeMap<(&StateKey, Slice), BTreeMap<usize, &StateSlice>> = BTreeMap::new();
        for of in held.iter().filter(|of| of.slice.elements() > 0) {
            let by_process = holders.entry((&of.key, slice_of(&of.slice))).or_default();
            let first = by_process.entry(process(of.rank)).or_insert(of);
            if of.rank < first.rank {
                *first = of;
            }
        }
        let partner = |rank: usize| {
            let other = (process(rank) + processes / 2) % processes;
            (other * ranks_per_process + rank % ranks_per_process).min(ranks - 1)
        };
        let mut kept = Vec::new();
        // With one process everything is lost together.
        for by_process in holders.into_values().filter(|_| processes > 1) {
            kept.extend(by_process.values().map(|&of| of.clone()));
            if let (1, Some(&of)) = (by_process.len(), by_process.values().next()) {
                kept.push(StateSlice { rank: partner(of.rank), ..of.clone() });
            }
        }
        let routes = Routes::new(&held, &kept);
        Ok(Self { kept, routes, ranks, ranks_per_process })
    }

    /// The keepers of a run that takes snapshots; `None` of another.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_config(config: &Config) -> Result<Option<Self>, RankError> {
        match config.keeps_snapshots() {
            true => Ok(Some(Self::new(&config.model(), &config.plan()?, config.comm.ranks_per_process)?)),
            false => Ok(None),
        }
    }

    /// The most bytes that a rank keeps of a snapshot, and sends for one.
    fn most(&self) -> [u64; 2] {
        let mut kept = vec![0; self.ranks];
        self.kept.iter().for_each(|of| kept[of.rank] += bytes(of.slice.stored.count()));
        let sent = (0..self.ranks).map(|rank| self.routes.bytes(rank)).max();
        [kept.into_iter().max().unwrap_or(0), sent.unwrap_or(0)]
    }
}

fn bytes(elements: usize) -> u64 {
    (elements * size_of::<f32>()) as u64
}

fn in_words([kept, sent]: [u64; 2]) -> String {
    format!("a rank keeps up to {} in host memory and sends up to {}", size(kept as f64), size(sent as f64))
}

/// The cost of snapshots, for the report before a run; empty without them.
pub(crate) fn report(config: &Config) -> Result<String, RankError> {
    let Some(keepers) = Keepers::from_config(config)? else { return Ok(String::new()) };
    let every = match config.checkpoint.peer_every {
        1 => "step".to_owned(),
        every => count(every as usize, "step"),
    };
    Ok(format!("snapshots in memory every {every}: {}\n", in_words(keepers.most())))
}

/// What the ranks of a process keep, from one world to the next.
#[derive(Debug, Default)]
pub struct Peers(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    /// The worlds so far: who keeps what, and the processes that had their ranks.
    worlds: Vec<(Arc<Keepers>, Arc<[usize]>)>,
    /// By the place of a rank in its process, the newest last.
    snapshots: BTreeMap<usize, Vec<Snapshot>>,
    /// The states with which ranks go on, by place.
    restored: BTreeMap<usize, Restored>,
}

#[derive(Debug)]
struct Snapshot {
    of: Stamp,
    state: Arrived,
}

/// A snapshot, as its ranks name it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Stamp {
    step: u64,
    /// The number of the world that took it.
    world: usize,
    updates: u64,
    run: Value,
}

/// The state of a rank after a loss.
#[derive(Debug)]
pub struct Restored {
    /// Its step, updates and elements.
    pub(crate) state: Arrived,
    /// Complete steps.
    pub step: u64,
    /// What was passed to [`Snapshots::take`].
    pub run: Value,
}

impl Restored {
    /// Loads the state into a trainer of the mesh for which it was restored.
    ///
    /// # Errors
    /// As [`Trainer::load_state`].
    pub fn load_into(&self, trainer: &mut Trainer) -> Result<(), TrainError> {
        trainer.load_state(&self.state)
    }
}

impl Peers {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        // What is under the lock is whole between calls, and no call panics halfway.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a world has been entered before.
    pub(crate) fn have_been(&self) -> bool {
        !self.lock().worlds.is_empty()
    }

    /// Begins a world, whose ranks are in these processes, in order. Every process that is there calls it, also one
    /// whose ranks are spare.
    pub fn enter(&self, keepers: Arc<Keepers>, processes: Arc<[usize]>) {
        self.lock().worlds.push((keepers, processes));
    }

    /// The state with which the rank in this place goes on, if one was restored.
    pub fn restored(&self, place: usize) -> Option<Restored> {
        self.lock().restored.remove(&place)
    }

    /// Restores the newest step of which the processes that are left keep all: each rank of `group`, which are all
    /// ranks of `processes`, has the slices that it holds of the run of `model` by `plan`. The outer error is of the
    /// communication; the inner one says why there is no such step, the same on every rank. Returns the step.
    /// Collective over `group`.
    ///
    /// # Errors
    /// A lost rank, and a plan that does not fit.
    pub fn restore(
        &self,
        group: &Group,
        processes: &[usize],
        (model, plan): (&Arc<dyn Model>, &Plan),
    ) -> Result<Result<u64, String>, RankError> {
        let each = group.size() / processes.len().max(1);
        let (rank, place) = (group.rank(), group.rank() % each);
        // What was restored before was for another mesh.
        self.lock().restored.remove(&place);
        let own: Vec<Stamp> = self.lock().snapshots.get(&place).into_iter().flatten().map(|of| of.of.clone()).collect();
        let unread = |error: serde_json::Error| {
            RankError::Differences(vec![format!("the snapshots of a rank cannot be read: {error}")])
        };
        let told = group.all_gather_bytes(&serde_json::to_vec(&own).map_err(unread)?)?;
        let told: Vec<Vec<Stamp>> =
            told.iter().map(|told| serde_json::from_slice(told)).collect::<Result<_, _>>().map_err(unread)?;
        let mut stamps: Vec<&Stamp> = told.iter().flatten().collect();
        stamps.sort_by_key(|stamp| std::cmp::Reverse((stamp.step, stamp.world)));
        stamps.dedup();
        let ranks: Vec<usize> = (0..plan.mesh.world_size()).collect();
        let wanted = with_whole_weights(&ModelPlan::new(model.clone(), plan)?, &state_layout(model, plan)?, &ranks)?;
        let mut lacks = "none was complete when the process was lost".to_owned();
        let mut found = None;
        for stamp in stamps {
            let Some((keepers, before)) = self.lock().worlds.get(stamp.world).cloned() else { continue };
            let now = |rank: usize| {
                let at = processes.iter().position(|process| before.get(rank / each) == Some(process))?;
                Some(at * each + rank % each).filter(|&now| told[now].contains(stamp))
            };
            let held: Vec<StateSlice> =
                keepers.kept.iter().filter_map(|of| Some(StateSlice { rank: now(of.rank)?, ..of.clone() })).collect();
            let routes = Routes::new(&held, &wanted);
            match routes.missing() {
                None => {
                    found = Some((stamp, routes));
                    break;
                }
                // Of the newest.
                Some(missing) if found.is_none() && lacks.starts_with("none") => {
                    lacks = format!("of step {} nobody who is left keeps {missing}", stamp.step);
                }
                Some(_) => {}
            }
        }
        let Some((stamp, routes)) = found else { return Ok(Err(lacks)) };
        let mut outgoing = routes.outgoing(rank);
        if let Some(snapshot) = self.lock().snapshots.get(&place).into_iter().flatten().find(|of| of.of == *stamp) {
            snapshot.state.slices().for_each(|(key, slice, values)| outgoing.put(key, slice, values));
        }
        let state = outgoing.exchange(group)?.after(stamp.step, stamp.updates);
        let restored = Restored { state, step: stamp.step, run: stamp.run.clone() };
        self.lock().restored.insert(place, restored);
        Ok(Ok(stamp.step))
    }
}

/// The snapshots of one rank.
#[derive(Debug)]
pub struct Snapshots<'a> {
    peers: &'a Peers,
    keepers: Arc<Keepers>,
    /// The number of the world.
    number: usize,
    world: Group,
}

impl<'a> Snapshots<'a> {
    /// Of this rank in `world`, which its process has [entered](Peers::enter) last; `None` if it has entered none.
    pub fn join(peers: &'a Peers, world: Arc<dyn Communicator>) -> Option<Self> {
        let kept = peers.lock();
        let (keepers, number) = (kept.worlds.last()?.0.clone(), kept.worlds.len() - 1);
        Some(Self { peers, keepers, number, world: Group::from(world) })
    }

    /// Takes a snapshot of a trainer whose steps are complete, with a value of the caller's own. The snapshots before
    /// are kept too, until [`complete`](Self::complete). Returns what it took on the rank where it took most, in words.
    /// Collective.
    ///
    /// # Errors
    /// Weights that are not finite, on all ranks; a failed communication.
    pub fn take(&self, trainer: &Trainer, run: Value) -> Result<String, RankError> {
        let (begun, rank) = (Instant::now(), self.world.rank());
        trainer.require_finite()?;
        let mut outgoing = self.keepers.routes.outgoing(rank);
        let (step, updates) = outgoing.put_state(trainer)?;
        self.world.log().drain();
        let state = outgoing.exchange(&self.world)?.after(step, updates);
        let sent: f64 = self.world.log().drain().iter().map(Record::bytes).sum();
        let kept = state.slices().map(|(.., values)| bytes(values.len())).sum::<u64>();
        let mut most = [kept as i64, sent as i64];
        self.world.all_reduce_slice(&mut most, ReduceOp::Max)?;
        let of = Stamp { step, world: self.number, updates, run };
        let place = rank % self.keepers.ranks_per_process;
        self.peers.lock().snapshots.entry(place).or_default().push(Snapshot { of, state });
        let (most, seconds) = (most.map(|bytes| bytes as u64), begun.elapsed().as_secs_f64());
        Ok(format!("step {step}  snapshot in memory: {} ({seconds:.2} s)", in_words(most)))
    }

    /// Steps up to `step` are complete on every rank: all ranks have the newest snapshot of a step before it, and
    /// older ones are dropped.
    pub fn complete(&self, step: u64) {
        let place = self.world.rank() % self.keepers.ranks_per_process;
        let mut kept = self.peers.lock();
        let Some(snapshots) = kept.snapshots.get_mut(&place) else { return };
        if let Some(newest) = snapshots.iter().rposition(|of| of.of.world == self.number && of.of.step < step) {
            snapshots.drain(..newest);
        }
    }
}
