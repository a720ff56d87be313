//! How the processes of a run meet.

use super::elastic::fit;
use super::{environment, meets_over_tcp};
use crate::config::{Config, Device, Elastic, ReductionName};
use crate::error::RankError;
use crate::numbers::spans;
use crate::peers::{Keepers, Peers};
use meshwork_core::hash::hash;
use meshwork_core::launcher::{Launch, LaunchError, detect};
use meshwork_core::{Axis, Mesh, RankEnd, RunError, World};
use meshwork_mpi::{Library, Meeting, MpiError, Options, Runtime};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// The processes in the order of the ranks that they were launched for. A process joins once.
static ORDER: OnceLock<Arc<[usize]>> = OnceLock::new();

/// The process of a rank, as it was launched.
pub(super) fn process_of(rank: usize, ranks_per_process: usize) -> usize {
    let at = rank / ranks_per_process.max(1);
    ORDER.get().and_then(|order| order.get(at)).copied().unwrap_or(at)
}

/// The world of a run.
#[derive(Debug)]
pub(crate) struct Joined {
    /// `None` of a process whose ranks are spare.
    world: Option<World>,
    /// All ranks that are there, where some are spare or may be lost.
    all: Option<World>,
    /// What joined them; none of threads.
    runtime: Option<Runtime>,
    /// What rank 0 tells of how they joined.
    told: Vec<String>,
}

impl Joined {
    /// Threads of this process, or the processes that were launched, joined by MPI or over TCP.
    ///
    /// # Errors
    /// No library, one that fails, processes that met as another number than were launched, or `stop` before all are
    /// there.
    pub fn from_config(config: &Config, stop: &AtomicBool) -> Result<Self, RunError> {
        let Some(launch) = &config.comm.launch else {
            return Ok(Self { world: Some(config.world()), all: None, runtime: None, told: Vec::new() });
        };
        let runtime = Self::join(config, launch, stop)?;
        let told = vec![runtime.describe().to_owned()];
        Ok(Self::over(config, runtime, told))
    }

    fn join(config: &Config, launch: &Launch, stop: &AtomicBool) -> Result<Runtime, RunError> {
        Self::runtime(config, launch, stop).map_err(|error| {
            // Of this process alone: what became of the others is not known.
            let rank = launch.rank * config.comm.ranks_per_process;
            let cause = format!("{} cannot join the others: {error}", launch.place());
            let ranks = config.mesh().map_or(1, |mesh| mesh.world_size()).max(rank + 1);
            let mut ends: Vec<Option<RankEnd>> = (0..ranks).map(|_| None).collect();
            ends[rank] = Some(RankEnd::Error(error.into()));
            RunError { rank, cause, fault: None, ends }
        })
    }

    fn runtime(config: &Config, launch: &Launch, stop: &AtomicBool) -> Result<Runtime, RankError> {
        let comm = &config.comm;
        let host = hash(gethostname::gethostname().as_encoded_bytes());
        // Between devices it is NCCL that adds up, if not the tree.
        let on_host = if config.device == Device::Cpu { comm.reduction } else { ReductionName::Tree };
        let (ranks_per_process, reduction) = (comm.ranks_per_process, on_host.into());
        let options = Options { timeout: comm.timeout(), ranks_per_process, reduction, host };
        if meets_over_tcp(config, launch) {
            return Ok(Runtime::meet(Meeting::of(launch, &environment())?, options, stop)?);
        }
        let library = comm.library.as_deref().map_or_else(Library::find, |path| Library::open(Path::new(path)))?;
        meet(launch, library, options, stop)
    }

    /// The worlds over the processes that are there: all make them in this order.
    fn over(config: &Config, runtime: Runtime, told: Vec<String>) -> Self {
        runtime.arrange(config.mesh().map_or(1, |mesh| mesh.degree(Axis::Tp)));
        ORDER.get_or_init(|| runtime.there());
        if config.parallelism.elastic == Elastic::Off {
            // Of another size than the mesh it is refused.
            return Self { world: Some(runtime.world()), all: None, runtime: Some(runtime), told };
        }
        let all = Some(runtime.world());
        let ranks = config.mesh().map_or(1, |mesh| mesh.world_size());
        Self { world: runtime.world_of(ranks, config.comm.timeout()), all, runtime: Some(runtime), told }
    }

    /// Runs `train` in the world of the run, with what rank 0 tells first. A process of spare ranks waits until it has
    /// ended, and ends as it did.
    ///
    /// Where processes are lost and the others live, an elastic run that saves goes on in place, on the mesh that fits
    /// the ranks that are there: from the last snapshot in the memory of `peers`, else from its last checkpoint.
    ///
    /// # Errors
    /// Of `train`, on spare ranks too. Ranks are numbered as they were launched.
    pub fn run<T: Default>(
        mut self,
        config: &Config,
        peers: &Peers,
        train: impl Fn(&World, Vec<String>, &Config) -> Result<T, RunError>,
    ) -> Result<T, RunError> {
        let mut now = config.clone();
        loop {
            let told = self.restore(&now, peers);
            let ended = told.and_then(|told| match &self.world {
                Some(world) => train(world, told, &now),
                None => Ok(T::default()),
            });
            let Some(all) = self.all.take() else { return ended };
            let cause = ended.as_ref().err().map(|error| error.cause.clone());
            let together = all.run(|all| match cause.clone() {
                // One that does not come is missed within the timeout; at the end of a world it would be waited for.
                Some(cause) => all.barrier().map_err(|_| cause.clone()).and(Err(cause)),
                None => Ok(()),
            });
            let of_all = match together {
                Ok(_) => return ended,
                Err(of_all) => of_all,
            };
            drop(all);
            // Spare ranks that were lost are not needed any more.
            let trained = now.mesh().map_or(0, |mesh| mesh.world_size());
            let is_over = |(rank, end): (usize, &Option<RankEnd>)| match end {
                None => true,
                Some(end) => rank >= trained && is_lost(end),
            };
            if of_all.ends.iter().enumerate().all(is_over) {
                return ended;
            }
            let Some(runtime) = self.runtime.take() else { return ended };
            let before = runtime.there();
            let Some((fitted, told)) = regrouped(config, &runtime, &of_all, cause) else {
                return Err(as_launched(ended.err().unwrap_or(of_all), &before, config.comm.ranks_per_process));
            };
            now = fitted;
            self = Self::over(&now, runtime, told);
        }
    }

    /// Begins a world whose ranks keep snapshots, if they do; after a loss with the state of the last one. What rank 0
    /// tells first.
    ///
    /// # Errors
    /// A loss meanwhile, and where there is nothing to go on from.
    fn restore(&mut self, config: &Config, peers: &Peers) -> Result<Vec<String>, RunError> {
        let mut told = std::mem::take(&mut self.told);
        let Some(runtime) = self.runtime.as_ref().filter(|_| config.keeps_snapshots()) else { return Ok(told) };
        let processes = runtime.there();
        if peers.have_been() {
            let restored = runtime.world().run(|world| {
                let (model, plan) = (config.model(), config.plan()?);
                match peers.restore(&world, &processes, (&model, &plan))? {
                    Err(why) if config.checkpoint.dir.is_none() => Err(RankError::NoSnapshot(why)),
                    restored => Ok(restored),
                }
            })?;
            told.extend(restored.into_iter().next().map(|restored| match restored {
                Ok(step) => format!("the state after step {step} is restored from the memory of the others"),
                Err(why) => {
                    format!("warning: the last checkpoint is read, because no snapshot in memory is whole: {why}")
                }
            }));
        }
        if let Some(all) = &self.all {
            let keepers = all.prepare(|| Keepers::from_config(config))?;
            keepers.into_iter().for_each(|keepers| peers.enter(Arc::new(keepers), processes.clone()));
        }
        Ok(told)
    }
}

/// Of an elastic run whose processes were lost: goes on without them. The configuration for the others, and what rank 0
/// tells of it, with the cause that its own world had; `None` of other errors, and where the run cannot go on.
fn regrouped(
    config: &Config,
    runtime: &Runtime,
    error: &RunError,
    cause: Option<String>,
) -> Option<(Config, Vec<String>)> {
    let each = config.comm.ranks_per_process;
    // One that does not answer may come back, and then it would be in no world.
    let has_ended = |end: &RankEnd| is_lost(end) && end.to_string().contains("its process ended");
    let hangs = |end: &Option<RankEnd>| end.as_ref().is_some_and(|end| end.to_string().starts_with("has not ended"));
    if error.ends.iter().any(hangs) {
        return None;
    }
    let lost = |rank: &usize| error.ends[*rank].as_ref().is_some_and(has_ended);
    let ranks: Vec<usize> = (0..error.ends.len()).filter(lost).collect();
    let there = runtime.there();
    let processes: BTreeSet<usize> = ranks.iter().filter_map(|rank| there.get(rank / each).copied()).collect();
    let saves = config.checkpoint.dir.is_some() || config.keeps_snapshots();
    let goes_on = !processes.is_empty() && !processes.contains(&runtime.process()) && saves;
    if !goes_on {
        return None;
    }
    let left = runtime.ranks() - processes.len() * each;
    // Of the whole mesh: it has what fits, whatever was lost before.
    let mut fitted = match fit(config, left) {
        Ok(fitted) => fitted.unwrap_or_else(|| config.clone()),
        Err(_) => return None,
    };
    runtime.without(&processes.into_iter().collect::<Vec<_>>());
    fitted.checkpoint.resume = true;
    let told = fitted.notices.split_off(config.notices.len().min(fitted.notices.len()));
    let cause = format!("lost {}: {}", spans(&ranks), cause.as_ref().unwrap_or(&error.cause));
    Some((fitted, [vec![cause], told].concat()))
}

/// Whether a rank is lost, as the others say.
pub(crate) fn is_lost(end: &RankEnd) -> bool {
    end.to_string().starts_with("is lost")
}

/// Whether a rank ended because its process could not join the others.
pub(super) fn is_alone(end: &RankEnd) -> bool {
    let RankEnd::Error(error) = end else { return false };
    matches!(error.downcast_ref(), Some(RankError::Mpi(_) | RankError::Launch(_)))
}

/// An error with the ranks as they were launched, where processes were lost before.
fn as_launched(error: RunError, there: &[usize], each: usize) -> RunError {
    let number = |process: &usize| ORDER.get()?.iter().position(|launched| launched == process);
    let place = |rank: usize| there.get(rank / each).and_then(number).map_or(rank, |at| at * each + rank % each);
    let most = (0..error.ends.len()).map(place).max().map_or(0, |most| most + 1);
    if most <= error.ends.len() {
        return error;
    }
    let lost = || Some(RankEnd::Error("is lost (before)".into()));
    let mut ends: Vec<Option<RankEnd>> = (0..most).map(|_| lost()).collect();
    let RunError { rank, cause, fault, ends: of_there } = error;
    of_there.into_iter().enumerate().for_each(|(rank, end)| ends[place(rank)] = end);
    RunError { rank: place(rank), cause, fault, ends }
}

fn meet(launch: &Launch, library: Library, options: Options, stop: &AtomicBool) -> Result<Runtime, RankError> {
    let name = library.to_string();
    let runtime = Runtime::start_unless(library, options, stop)?;
    launch.require_met(runtime.processes(), &name)?;
    Ok(runtime)
}

/// The world of a configuration's ranks, for a program that does not train by it: threads, or the processes that were
/// launched. A process joins once.
///
/// # Errors
/// Processes that cannot be joined.
pub fn world_of(config: &Config) -> Result<World, RunError> {
    let Some(launch) = &config.comm.launch else { return Ok(config.world()) };
    let runtime = Joined::join(config, launch, &AtomicBool::new(false))?;
    runtime.arrange(config.mesh().map_or(1, |mesh| mesh.degree(Axis::Tp)));
    ORDER.get_or_init(|| runtime.there());
    Ok(runtime.world())
}

/// The world of a program without a configuration: the processes that a launcher started, each with an equal number of
/// the ranks of `mesh`, joined by MPI; threads of a process that was started by itself.
///
/// # Errors
/// A launch that cannot be joined, or whose number of processes does not divide the ranks.
pub fn world(mesh: &Mesh) -> Result<World, RankError> {
    let Some(launch) = detect(&environment())?.filter(Launch::has_others) else { return Ok(World::threads(mesh)) };
    let ranks = mesh.world_size();
    launch.require_mpi(launch.size.unwrap_or(ranks), std::env::args())?;
    let library = Library::find()?;
    let ranks_per_process = match launch.size {
        Some(processes) if !ranks.is_multiple_of(processes) => {
            return Err(LaunchError::Uneven { launcher: launch.launcher, processes, ranks }.into());
        }
        size => size.map_or(1, |processes| ranks / processes),
    };
    let runtime = meet(&launch, library, options(ranks_per_process), &AtomicBool::new(false))?;
    runtime.arrange(mesh.degree(Axis::Tp));
    Ok(runtime.world())
}

/// The processes that a launcher started, each with one rank of a world; `None` of a process by itself. MPI joins them
/// where the launcher starts it, else TCP.
///
/// # Errors
/// A launch that cannot be joined.
pub fn of_processes() -> Result<Option<World>, RankError> {
    let Some(launch) = detect(&environment())?.filter(Launch::has_others) else { return Ok(None) };
    let never = AtomicBool::new(false);
    let runtime = match launch.launcher.joins_mpi() {
        true => meet(&launch, Library::find()?, options(1), &never)?,
        false => Runtime::meet(Meeting::of(&launch, &environment())?, options(1), &never)?,
    };
    Ok(Some(runtime.world()))
}

/// Those of a program without a configuration.
fn options(ranks_per_process: usize) -> Options {
    let host = hash(gethostname::gethostname().as_encoded_bytes());
    Options { ranks_per_process, host, ..Options::default() }
}

impl From<MpiError> for RankError {
    fn from(error: MpiError) -> Self {
        Self::Mpi(Box::new(error))
    }
}
