//! The launcher that started this process, by the variables that it left in the environment.
//!
//! [`detect`] reads a map of variables by a table of launchers, and nothing else. Launchers nest:
//! Slurm starts the daemons of an `mpirun`, Kubernetes the pod in which one runs. The innermost one counts, and those
//! around it must fit. Variables that contradict each other are refused: ranks that misread their place would train
//! several small worlds instead of one.
//!
//! ```
//! use meshwork_core::launcher::{detect, Launcher};
//!
//! let environment = [("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "4")];
//! let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
//! let launch = detect(&environment).unwrap().unwrap();
//! assert_eq!((launch.launcher, launch.rank, launch.size), (Launcher::OpenMpi, 2, Some(4)));
//! assert!(launch.require_met(1, "MPICH 5.0.2").unwrap_err().to_string().contains("4 processes"));
//! ```

mod error;
mod placement;
mod table;

use std::collections::BTreeMap;

pub use error::LaunchError;
pub use placement::{Placement, Within};
pub use table::Launcher;
use table::{LAUNCHERS, Row, Starts};

/// The variables of a process.
pub type Environment = BTreeMap<String, String>;

/// The place of a process among those that a launcher started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The launcher.
    pub launcher: Launcher,
    /// Number of this process.
    pub rank: usize,
    /// Number of processes, where the launcher says it.
    pub size: Option<usize>,
    /// Number of this process among those of its host.
    pub local_rank: Option<usize>,
    /// Number of processes on this host.
    pub local_size: Option<usize>,
    /// Number of hosts.
    pub hosts: Option<usize>,
    /// The launcher's name of the job.
    pub job: Option<String>,
}

/// The launch of the process that has these variables; `None` of a process that was started by itself.
///
/// A variable without a value counts as not set: scripts export variables that they did not find.
///
/// # Errors
/// Variables that are no numbers, incomplete, or contradict each other; a rank outside its world; a launcher's pod in
/// which no ranks were started.
pub fn detect(environment: &Environment) -> Result<Option<Launch>, LaunchError> {
    let mut found: Vec<(&Row, Launch)> = Vec::new();
    for row in LAUNCHERS {
        found.extend(row.read(environment)?.map(|launch| (row, launch)));
    }
    let Some((inner, launch)) = found.first() else {
        // The launcher's pod of an MPIJob, and the shell of a worker.
        return match text(environment, table::MPI_JOB_ROLE) {
            Some("launcher") => Err(LaunchError::NotStarted),
            _ => Ok(None),
        };
    };
    for (outer, around) in &found[1..] {
        if !fits(environment, inner, launch, outer, around) {
            return Err(LaunchError::Contradiction { first: launch.place(), second: around.place() });
        }
    }
    // `srun` gives ranks the variables of its PMI beside its own.
    let by_slurm = |around: &Launch| match launch.launcher {
        Launcher::Hydra => (around.rank, around.size) == (launch.rank, launch.size),
        Launcher::Prrte => launch.job.as_ref().is_some_and(|job| job.starts_with("slurm.")),
        _ => false,
    };
    let slurm = found.iter().find(|(row, around)| row.launcher == Launcher::Slurm && by_slurm(around));
    Ok(Some(slurm.unwrap_or(&found[0]).1.clone()))
}

/// Whether `around` may be the launcher of the launcher `launch`, or is another name of it.
fn fits(environment: &Environment, inner: &Row, launch: &Launch, outer: &Row, around: &Launch) -> bool {
    let same =
        around.rank == launch.rank && (launch.size.is_none() || around.size.is_none() || around.size == launch.size);
    let group = |names| first(environment, names).and_then(|(_, value)| value.parse().ok());
    let of_group = group(inner.group[0]) == Some(around.rank) && group(inner.group[1]) == around.size;
    same || of_group
        || match outer.starts {
            Starts::Hosts => true,
            // One shell, or the daemons of `mpirun`, one a host. More tasks would each start a world of their own.
            Starts::RanksOrDaemons => {
                around.size.is_some_and(|tasks| tasks == 1 || around.hosts.is_some_and(|hosts| tasks <= hosts))
            }
            Starts::Ranks => false,
        }
}

impl Row {
    fn read(&self, environment: &Environment) -> Result<Option<Launch>, LaunchError> {
        if self.marks.iter().all(|mark| text(environment, mark).is_none()) {
            return Ok(None);
        }
        let number = |names: &[&'static str]| match first(environment, names) {
            None => Ok(None),
            Some((name, value)) => value.trim().parse().map(Some).map_err(|_| LaunchError::Number {
                launcher: self.launcher,
                name,
                value: value.to_owned(),
            }),
        };
        let (rank, size) = (number(self.rank)?, number(self.size)?);
        // A single process needs no place.
        let (rank, size) = match (rank, size) {
            (None, Some(1)) => (0, size),
            (Some(rank), size) if size.is_some() || self.size.is_empty() => (rank, size),
            // A variable of that name and no launcher behind it.
            (Some(_), None) if self.launcher == Launcher::Plain => return Ok(None),
            (rank, _) => {
                let missing = if rank.is_none() { self.rank } else { self.size };
                return Err(LaunchError::Missing { launcher: self.launcher, missing: missing.join(" or ") });
            }
        };
        if size.is_some_and(|size| rank >= size) {
            return Err(LaunchError::Outside { launcher: self.launcher, rank, size: size.unwrap_or_default() });
        }
        Ok(Some(Launch {
            launcher: self.launcher,
            rank,
            size,
            local_rank: number(self.local_rank)?,
            local_size: number(self.local_size)?,
            hosts: number(self.hosts)?,
            job: first(environment, self.job).map(|(_, job)| job.to_owned()),
        }))
    }
}

/// The value of a variable that has one.
fn text<'a>(environment: &'a Environment, name: &str) -> Option<&'a str> {
    environment.get(name).map(String::as_str).filter(|value| !value.trim().is_empty())
}

/// The first of `names` that has a value.
fn first<'a>(environment: &'a Environment, names: &[&'static str]) -> Option<(&'static str, &'a str)> {
    names.iter().find_map(|name| Some((*name, text(environment, name)?)))
}

impl Launch {
    /// Whether there are other processes, as far as is known.
    pub fn has_others(&self) -> bool {
        self.size != Some(1)
    }

    /// The place of this process in words: `rank 2 of 4 by Open MPI's mpirun`.
    pub fn place(&self) -> String {
        let of = self.size.map_or(String::new(), |size| format!(" of {size}"));
        format!("rank {}{of} by {}", self.rank, self.launcher)
    }

    /// Refuses a launcher by which MPI is not started, with the command to use instead, for a program that needs so
    /// many processes.
    ///
    /// # Errors
    /// Of torchrun, plain variables, and pods without an `mpirun`.
    pub fn require_mpi(&self, processes: usize, command: impl IntoIterator<Item = String>) -> Result<(), LaunchError> {
        if self.launcher.joins_mpi() {
            return Ok(());
        }
        let command: Vec<String> = command.into_iter().map(|word| quoted(&word)).collect();
        let hosts = if self.hosts.is_some_and(|hosts| hosts > 1) || self.launcher == Launcher::IndexedJob {
            " --hostfile HOSTS"
        } else {
            ""
        };
        let command = format!("mpirun -n {processes}{hosts} {}", command.join(" "));
        Err(LaunchError::NeedsMpi { place: self.place(), command })
    }

    /// Refuses a world of another size than the number of processes that were launched: they would train as several
    /// worlds, each for itself. `library` is what was loaded.
    ///
    /// # Errors
    /// Both numbers, and the likely cause.
    pub fn require_met(&self, met: usize, library: &str) -> Result<(), LaunchError> {
        match self.size {
            Some(launched) if launched != met => Err(LaunchError::Split {
                launcher: self.launcher,
                launched,
                met,
                library: library.to_owned(),
                cause: self.launcher.cause_of_split(),
            }),
            _ => Ok(()),
        }
    }
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |char: char| char.is_ascii_alphanumeric() || "-_=+,./:@%".contains(char);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}
