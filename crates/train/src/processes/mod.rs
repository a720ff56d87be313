//! Runs over several processes: how they are found, how they meet, and what they compare before the first step.
//!
//! ```text
//! variables of a launcher ─▶ find: a Launch, or threads ─▶ world: MPI or TCP joins the processes ─▶ handshake ─▶ the run
//! ```

mod carrier;
mod elastic;
mod handshake;
mod join;
mod log;
mod straggler;

pub use handshake::Handshake;
pub(crate) use join::Joined;
pub use join::{of_processes, world, world_of};
pub(crate) use log::RankLog;
pub(crate) use straggler::Stragglers;

use crate::config::{AXES, CommKind, Config, Device, Elastic, Fault, Settings};
use crate::error::RankError;
use meshwork_core::launcher::{Environment, Launch, LaunchError, detect};
use meshwork_core::{RankEnd, RunError};
use meshwork_mpi::Meeting;

/// The variables of this process.
pub(crate) fn environment() -> Environment {
    let pairs = std::env::vars_os();
    pairs.map(|(name, value)| [name, value].map(|text| text.to_string_lossy().into_owned()).into()).collect()
}

/// Finds the launch that this process belongs to, by its environment.
pub(crate) fn launch(config: &mut Config, settings: &mut Settings) {
    let of_mesh = AXES.iter().all(|axis| settings.sound(&[&format!("parallelism.{axis}")]));
    if !of_mesh || !settings.sound(&["comm.kind", "comm.ranks_per_process"]) {
        return;
    }
    let mut notices = Vec::new();
    let environment = environment();
    match find(config, &environment, std::env::args(), &mut notices) {
        Ok(launch) => config.comm.launch = launch,
        Err(fault) => settings.faults.push(fault),
    }
    config.notices.extend(notices);
    if config.checkpoint.peer_every > 0 && config.comm.launch.is_none() && config.training.steps > 0 {
        let every = config.checkpoint.peer_every;
        let why = "all ranks are threads of this process, and would be lost together";
        config.notices.push(format!("checkpoint.peer_every = {every} keeps no snapshots: {why}"));
    }
    settings.faults.extend(carrier::faults(config));
    config.notices.extend(carrier::notices(config));
    let ranks = launched(config, &environment).filter(|_| settings.faults.is_empty());
    match ranks.map_or(Ok(None), |ranks| elastic::fit(config, ranks)) {
        Ok(fitted) => *config = fitted.unwrap_or_else(|| config.clone()),
        Err(fault) => settings.faults.push(fault),
    }
}

/// The ranks that a launcher has started, where it says so; `None` of a process by itself.
fn launched(config: &Config, environment: &Environment) -> Option<usize> {
    let joins = |launch: &Launch| launch.launcher.joins_mpi() || meets_over_tcp(config, launch);
    let launch = detect(environment).ok()?.filter(joins)?;
    (config.comm.kind != CommKind::Threads).then_some(launch.size? * config.comm.ranks_per_process)
}

/// Whether processes are joined over TCP, and not by MPI. Between GPUs the elements go over NCCL, so that processes of
/// a launcher without MPI are joined there unasked.
pub(crate) fn meets_over_tcp(config: &Config, launch: &Launch) -> bool {
    match config.comm.kind {
        CommKind::Tcp => true,
        CommKind::Auto => !launch.launcher.joins_mpi() && config.device != Device::Cpu,
        CommKind::Mpi | CommKind::Threads => false,
    }
}

/// How the processes of a run are to be joined: `None` for threads of this one. Notices for the user go to `notices`;
/// `command` is that of this process.
///
/// # Errors
/// A launch that cannot be run, or whose number of ranks is not that of the mesh.
pub(crate) fn find(
    config: &Config,
    environment: &Environment,
    command: impl IntoIterator<Item = String>,
    notices: &mut Vec<String>,
) -> Result<Option<Launch>, Fault> {
    let comm = &config.comm;
    let fault = |problem: String, valid: &str| Fault::new("comm.kind", comm.kind.name(), problem, valid);
    let alone = "comm.kind = \"threads\" lets each process train by itself";
    let (found, processes) = (detect(environment), ranks_of_world(config) / comm.ranks_per_process.max(1));
    let launch = match (comm.kind, found) {
        (CommKind::Threads, Ok(Some(launch))) if launch.has_others() => {
            let place = launch.place();
            notices.push(format!("this process is {place}, and trains by itself, as comm.kind = \"threads\" says"));
            return Ok(None);
        }
        (CommKind::Threads, _) => return Ok(None),
        (_, Err(error)) => return Err(fault(error.to_string(), alone)),
        (CommKind::Auto, Ok(None)) => {
            notices.extend(forgotten(environment));
            return Ok(None);
        }
        (CommKind::Auto, Ok(Some(launch))) if !launch.has_others() => return Ok(None),
        (CommKind::Tcp, Ok(None)) => {
            let problem = "no launcher has started this process, as far as its environment says".to_owned();
            return Err(fault(problem, "use torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"));
        }
        (CommKind::Mpi, Ok(None)) => {
            let command: Vec<String> = command.into_iter().collect();
            let problem = "no launcher has started this process, as far as its environment says".to_owned();
            return Err(fault(problem, &format!("use mpirun -n {processes} {}", command.join(" "))));
        }
        (_, Ok(Some(launch))) => launch,
    };
    if meets_over_tcp(config, &launch) {
        Meeting::of(&launch, environment).map_err(|error| fault(error.to_string(), alone))?;
    } else {
        let valid = format!("comm.kind = \"tcp\" joins them without it; {alone}");
        launch.require_mpi(processes, command).map_err(|error| fault(error.to_string(), &valid))?;
    }
    require_ranks(config, &launch)?;
    Ok(Some(launch))
}

/// Ranks of the mesh.
fn ranks_of(config: &Config) -> usize {
    config.mesh().map_or(1, |mesh| mesh.world_size())
}

/// Ranks of the world that the launch is for.
fn ranks_of_world(config: &Config) -> usize {
    config.comm.ranks.unwrap_or_else(|| ranks_of(config))
}

/// Refuses a launch of another number of ranks than the mesh has, unless the mesh fits itself to them, or is the
/// smaller of two in one world.
fn require_ranks(config: &Config, launch: &Launch) -> Result<(), Fault> {
    let (wanted, each) = (ranks_of(config), config.comm.ranks_per_process);
    let elastic = config.parallelism.elastic;
    if elastic != Elastic::Off && launch.size.is_none() {
        let problem = format!("{} does not say how many processes it started", launch.launcher);
        return Err(Fault::new("parallelism.elastic", elastic.name(), problem, "use mpirun, or off"));
    }
    let other = launch.size.filter(|processes| processes.checked_mul(each) != Some(wanted));
    let fits = elastic != Elastic::Off || ranks_of_world(config) > wanted;
    let Some(processes) = other.filter(|_| !fits) else { return Ok(()) };
    let mesh = config.mesh().map_or(String::new(), |mesh| mesh.to_string());
    let of_each = if each == 1 { String::new() } else { format!(" of {each} ranks each") };
    let problem = format!("has {wanted} ranks, and {} started {processes} processes{of_each}", launch.launcher);
    let mut valid = vec![format!("a mesh of {} ranks", processes * each)];
    if wanted.is_multiple_of(each) {
        valid.push(format!("{} processes", wanted / each));
    }
    if wanted.is_multiple_of(processes) {
        valid.push(format!("comm.ranks_per_process = {}", wanted / processes));
    }
    Err(Fault::new("parallelism", mesh, problem, format!("use {}", valid.join(", or "))))
}

/// A batch script of Slurm has more tasks than the one that runs it.
fn forgotten(environment: &Environment) -> Option<String> {
    let tasks: usize = environment.get("SLURM_NTASKS")?.parse().ok()?;
    (tasks > 1).then(|| {
        format!("Slurm has {tasks} tasks for this job, and the program was started without srun: all ranks are threads of this process")
    })
}

/// Refuses to run as one of several processes, for a program that works in one process alone.
///
/// # Errors
/// Other processes beside this one, or variables that contradict each other.
pub fn require_alone(program: &str) -> Result<(), Fault> {
    require_alone_in(program, &environment())
}

fn require_alone_in(program: &str, environment: &Environment) -> Result<(), Fault> {
    let problem = match detect(environment) {
        Ok(Some(launch)) if launch.has_others() => {
            format!("runs in one process, and this one is {}", launch.place())
        }
        Err(error @ LaunchError::Contradiction { .. }) => error.to_string(),
        _ => return Ok(()),
    };
    Err(Fault::new(program, "", problem, "start it by itself, without a launcher"))
}

/// Whether a run failed because its processes cannot meet, by the library or the launch: as with bad input, another
/// start does not mend it.
#[must_use]
pub fn cannot_meet(error: &RunError) -> bool {
    let of = |end: &RankEnd| match end {
        RankEnd::Error(error) => match error.downcast_ref() {
            Some(RankError::Mpi(error)) => {
                use meshwork_mpi::MpiError::{Library, Native, NoSums, NotFound, Threads};
                matches!(**error, NotFound { .. } | Library { .. } | Threads { .. } | Native { .. } | NoSums { .. })
            }
            Some(RankError::Launch(_)) => true,
            _ => false,
        },
        RankEnd::Panic(_) => false,
    };
    error.ends.iter().flatten().any(of)
}

impl Config {
    /// Whether this process has rank 0, and so speaks for all of them.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.comm.launch.as_ref().is_none_or(|launch| launch.rank == 0)
    }

    /// Whether this process tells the error of the run: that of rank 0, or the first that was not lost. All processes
    /// have the same error, but one that cannot join the others: it tells its own, which no other process knows. The
    /// others should give the process that tells a moment, because a launcher may end it when they end.
    #[must_use]
    pub fn tells(&self, error: &RunError) -> bool {
        let Some(launch) = &self.comm.launch else { return true };
        let own = launch.rank * self.comm.ranks_per_process;
        if error.ends.get(own).and_then(Option::as_ref).is_some_and(join::is_alone) {
            return true;
        }
        let first = error.ends.iter().position(|end| !end.as_ref().is_some_and(join::is_lost));
        first.is_none_or(|first| join::process_of(first, self.comm.ranks_per_process) == launch.rank)
    }

    /// Whether processes keep snapshots of the state in memory. Where no step is trained, as before a run.
    pub(crate) fn keeps_snapshots(&self) -> bool {
        let others = self.comm.launch.is_some() || self.training.steps == 0;
        self.checkpoint.peer_every > 0 && self.parallelism.elastic != Elastic::Off && others
    }

    /// The part of all ranks that is on this host, as far as is known: for what the host must have.
    pub(crate) fn ranks_here(&self) -> usize {
        let (all, each) = (ranks_of(self), self.comm.ranks_per_process);
        let launch = self.comm.launch.as_ref();
        launch.map_or(all, |launch| (launch.local_size.unwrap_or(1) * each).min(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Args;

    fn found(settings: &str, variables: &str) -> Result<(Option<usize>, Vec<String>), String> {
        let config = Config::from_args(&Args::parse(settings.split_whitespace())).unwrap();
        let pair = |word: &str| word.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
        let environment = variables.split_whitespace().filter_map(pair).collect();
        let mut notices = Vec::new();
        let command = ["gpt_train", "--mesh", "dp=4"].map(str::to_owned);
        let launch = find(&config, &environment, command, &mut notices).map_err(|fault| fault.to_string())?;
        Ok((launch.map(|launch| launch.rank), notices))
    }

    const OF_FOUR: &str = "PMI_RANK=1 PMI_SIZE=4";

    #[test]
    fn auto_takes_mpi_where_a_launcher_says_so() {
        let none = Ok((None, Vec::new()));
        assert_eq!(found("--mesh dp=4", ""), none);
        assert_eq!(found("--mesh dp=4", OF_FOUR), Ok((Some(1), Vec::new())));
        assert_eq!(found("--mesh dp=4", "PMI_RANK=0 PMI_SIZE=1"), none, "one process: threads");
        assert_eq!(found("--mesh dp=4 --set comm.kind=mpi", OF_FOUR), Ok((Some(1), Vec::new())));
        assert_eq!(found("--mesh dp=8 --set comm.ranks_per_process=2", OF_FOUR), Ok((Some(1), Vec::new())));
        assert_eq!(found("--mesh dp=4", "PMIX_RANK=3"), Ok((Some(3), Vec::new())), "prterun says no size");
        let of_tcp = "RANK=1 WORLD_SIZE=4 MASTER_ADDR=node-0 MASTER_PORT=29500";
        assert_eq!(found("--mesh dp=4 --set comm.kind=tcp", of_tcp), Ok((Some(1), Vec::new())));
        let of_torchrun = format!("{of_tcp} TORCHELASTIC_RUN_ID=7");
        assert_eq!(found("--mesh dp=4 --set comm.kind=tcp", &of_torchrun), Ok((Some(1), Vec::new())));
        let on_gpus = "--mesh dp=4 --device cuda";
        assert_eq!(found(on_gpus, &of_torchrun), Ok((Some(1), Vec::new())), "the elements go over NCCL");
        assert_eq!(found(on_gpus, OF_FOUR), Ok((Some(1), Vec::new())), "MPI where it is: no MASTER_ADDR");
        let (none, told) = found("--mesh dp=4 --set comm.kind=threads", OF_FOUR).unwrap();
        assert_eq!((none, told.len()), (None, 1));
        assert!(told[0].starts_with("this process is rank 1 of 4 by mpiexec, and trains by itself"), "{told:?}");
        let (none, told) = found("--mesh dp=4", "SLURM_NTASKS=4 SLURM_PROCID=0").unwrap();
        assert_eq!((none, told.len()), (None, 1));
        assert!(told[0].contains("4 tasks") && told[0].contains("without srun"), "{told:?}");
    }

    #[test]
    fn a_launch_that_does_not_fit_the_mesh_is_a_fault() {
        for (settings, variables, message) in [
            (
                "--mesh dp=8",
                OF_FOUR,
                "parallelism = tp=1,dp=8,pp=1: has 8 ranks, and mpiexec started 4 processes; use a mesh of 4 ranks, or 8 processes, or \
                 comm.ranks_per_process = 2",
            ),
            (
                "--mesh dp=4 --set comm.kind=tcp",
                OF_FOUR,
                "comm.kind = tcp: rank 1 of 4 by mpiexec: MASTER_ADDR is not set: it says where rank 0 is; \
                 comm.kind = \"threads\" lets each process train by itself",
            ),
            (
                "--mesh dp=4 --set comm.kind=tcp",
                "RANK=1 WORLD_SIZE=4 MASTER_ADDR=node-0 MASTER_PORT=many",
                "comm.kind = tcp: rank 1 of 4 by RANK and WORLD_SIZE: MASTER_PORT is many, and no port; \
                 comm.kind = \"threads\" lets each process train by itself",
            ),
            (
                "--mesh dp=4 --device cuda",
                "RANK=1 WORLD_SIZE=4",
                "comm.kind = auto: rank 1 of 4 by RANK and WORLD_SIZE: MASTER_ADDR is not set: it says where rank 0 is; \
                 comm.kind = \"threads\" lets each process train by itself",
            ),
            (
                "--mesh dp=4 --set comm.kind=tcp",
                "",
                "comm.kind = tcp: no launcher has started this process, as far as its environment says; use torchrun, or \
                 set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            ),
            (
                "--mesh dp=2 --set comm.ranks_per_process=4",
                OF_FOUR,
                "parallelism = tp=1,dp=2,pp=1: has 2 ranks, and mpiexec started 4 processes of 4 ranks each; use a mesh of 16 ranks",
            ),
            (
                "--mesh dp=4 --set comm.kind=mpi",
                "",
                "comm.kind = mpi: no launcher has started this process, as far as its environment says; use mpirun -n 4 gpt_train --mesh dp=4",
            ),
            (
                "--mesh dp=4",
                "RANK=1 WORLD_SIZE=2",
                "comm.kind = auto: rank 1 of 2 by RANK and WORLD_SIZE: ranks of several processes communicate by MPI, which this launcher does \
                 not start; use mpirun -n 4 gpt_train --mesh dp=4; comm.kind = \"tcp\" joins them without it; comm.kind = \"threads\" lets each \
                 process train by itself",
            ),
        ] {
            assert_eq!(found(settings, variables), Err(message.to_owned()));
        }
        let unknown = found("--mesh dp=4 --set parallelism.elastic=dp", "PMIX_RANK=3").unwrap_err();
        assert!(
            unknown.starts_with("parallelism.elastic = dp: ") && unknown.contains("how many processes"),
            "{unknown}"
        );
        assert_eq!(
            found("--mesh dp=4 --set parallelism.elastic=dp", "PMI_RANK=1 PMI_SIZE=3"),
            Ok((Some(1), Vec::new()))
        );
        let two =
            found("--mesh dp=4", "PMI_RANK=1 PMI_SIZE=4 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4").unwrap_err();
        assert!(two.contains("the variables of two launchers"), "{two}");
    }

    #[test]
    fn a_program_of_one_process_is_not_run_as_several() {
        let of = |variables: &str| {
            let pair = |word: &str| word.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
            require_alone_in("mesh_diff", &variables.split_whitespace().filter_map(pair).collect())
        };
        assert_eq!(of(""), Ok(()));
        assert_eq!(of("PMI_RANK=0 PMI_SIZE=1"), Ok(()));
        assert_eq!(
            of(OF_FOUR).unwrap_err().to_string(),
            "mesh_diff: runs in one process, and this one is rank 1 of 4 by mpiexec; start it by itself, without a launcher"
        );
        let of_torchrun = "RANK=1 WORLD_SIZE=4 MASTER_ADDR=node-0 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=7";
        assert_eq!(
            of(of_torchrun).unwrap_err().to_string(),
            "mesh_diff: runs in one process, and this one is rank 1 of 4 by torchrun; start it by itself, without a launcher"
        );
        assert_eq!(of("RANK=0 WORLD_SIZE=1 MASTER_ADDR=node-0 MASTER_PORT=29500"), Ok(()));
    }
}
