//! How the processes of a run meet.

use super::environment;
use crate::config::Config;
use crate::error::RankError;
use meshwork_core::launcher::{Launch, LaunchError, detect};
use meshwork_core::{Mesh, RankEnd, RunError, World};
use meshwork_mpi::{Library, MpiError, Options, Runtime};
use std::path::Path;

/// The world of a run.
#[derive(Debug)]
pub(crate) struct Joined {
    /// `None` of a process whose ranks are spare.
    pub world: Option<World>,
    /// All ranks that were launched, where some are spare.
    all: Option<World>,
    /// What joined its processes, in words; none of threads.
    pub library: Option<String>,
}

impl Joined {
    /// Threads of this process, or the processes that were launched, joined by MPI.
    ///
    /// # Errors
    /// No library, one that fails, or processes that met as another number than were launched.
    pub fn of(config: &Config) -> Result<Self, RunError> {
        let Some(launch) = &config.comm.launch else {
            return Ok(Self { world: Some(config.world()), all: None, library: None });
        };
        Self::by_mpi(config, launch).map_err(|error| {
            // Of this process alone: what became of the others is not known.
            let rank = launch.rank * config.comm.ranks_per_process;
            let cause = format!("{} cannot join the others: {error}", launch.place());
            let ranks = config.mesh().map_or(1, |mesh| mesh.world_size()).max(rank + 1);
            let mut ends: Vec<Option<RankEnd>> = (0..ranks).map(|_| None).collect();
            ends[rank] = Some(RankEnd::Error(error.into()));
            RunError { rank, cause, fault: None, ends }
        })
    }

    fn by_mpi(config: &Config, launch: &Launch) -> Result<Self, RankError> {
        let comm = &config.comm;
        let library = comm.library.as_deref().map_or_else(Library::find, |path| Library::open(Path::new(path)))?;
        let options = Options { timeout: comm.timeout(), ranks_per_process: comm.ranks_per_process };
        let runtime = meet(launch, library, options)?;
        let ranks = config.mesh().map_or(1, |mesh| mesh.world_size());
        let library = Some(runtime.describe().to_owned());
        Ok(match ranks < runtime.ranks() {
            true => {
                let all = Some(runtime.world());
                Self { world: runtime.world_of(ranks, options.timeout), all, library }
            }
            false => Self { world: Some(runtime.world()), all: None, library },
        })
    }

    /// Runs `train` in the world of the run. A process of spare ranks waits until it has ended, and ends as it did.
    ///
    /// # Errors
    /// Of `train`, on spare ranks too.
    pub fn run<T: Default>(&self, train: impl FnOnce(&World) -> Result<T, RunError>) -> Result<T, RunError> {
        let ended = self.world.as_ref().map_or_else(|| Ok(T::default()), train);
        let Some(all) = &self.all else { return ended };
        let told = ended.as_ref().err().map(|error| error.cause.clone());
        let all = all.run(|_| told.clone().map_or(Ok(()), Err));
        ended.and_then(|done| all.map(|_| done))
    }
}

fn meet(launch: &Launch, library: Library, options: Options) -> Result<Runtime, RankError> {
    let name = library.to_string();
    let runtime = Runtime::start(library, options)?;
    launch.require_met(runtime.processes(), &name)?;
    Ok(runtime)
}

/// The world of a program without a configuration: the processes that a launcher started, each with an equal number of
/// the ranks of `mesh`, joined by MPI; threads of a process that was started by itself.
///
/// # Errors
/// A launch that cannot be joined, or whose number of processes does not divide the ranks.
pub fn world(mesh: &Mesh) -> Result<World, RankError> {
    let Some(launch) = detect(&environment())?.filter(Launch::has_others) else { return Ok(World::threads(mesh)) };
    launch.require_mpi(std::env::args())?;
    let (ranks, library) = (mesh.world_size(), Library::find()?);
    let ranks_per_process = match launch.size {
        Some(processes) if !ranks.is_multiple_of(processes) => {
            return Err(LaunchError::Uneven { launcher: launch.launcher, processes, ranks }.into());
        }
        size => size.map_or(1, |processes| ranks / processes),
    };
    Ok(meet(&launch, library, Options { ranks_per_process, ..Options::default() })?.world())
}

impl From<MpiError> for RankError {
    fn from(error: MpiError) -> Self {
        Self::Mpi(Box::new(error))
    }
}
