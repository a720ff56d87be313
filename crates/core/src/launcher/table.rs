//! The launchers, each by its variables.

use std::fmt;

/// A launcher of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpiexec` of MPICH and Intel MPI, and other launchers with its process manager interface (PMI).
    Hydra,
    /// `srun`, with PMIx or PMI2.
    Slurm,
    /// `prterun` alone: no number of processes.
    Prrte,
    /// `torchrun`.
    Torchrun,
    /// `RANK` and `WORLD_SIZE`, set by hand or by a script.
    Plain,
    /// A pod of Kubeflow's trainer.
    Kubeflow,
    /// A pod of an indexed Job or a JobSet of Kubernetes.
    IndexedJob,
}

/// What a launcher starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Starts {
    /// Ranks.
    Ranks,
    /// Ranks, or a shell, or the daemons of another launcher.
    RanksOrDaemons,
    /// One process a host, which starts the ranks there.
    Hosts,
}

/// The variables of a launcher. Of several names the first one counts that has a value.
pub(super) struct Row {
    pub launcher: Launcher,
    /// The launcher is there if one of these has a value.
    pub marks: &'static [&'static str],
    pub rank: &'static [&'static str],
    pub size: &'static [&'static str],
    pub local_rank: &'static [&'static str],
    pub local_size: &'static [&'static str],
    pub hosts: &'static [&'static str],
    pub job: &'static [&'static str],
    pub starts: Starts,
    /// Rank and size of this process's host among the hosts: the place that a launcher around this one gave it.
    pub group: [&'static [&'static str]; 2],
}

const NONE: Row = Row {
    launcher: Launcher::Plain,
    marks: &[],
    rank: &[],
    size: &[],
    local_rank: &[],
    local_size: &[],
    hosts: &[],
    job: &[],
    starts: Starts::Ranks,
    group: [&[], &[]],
};

/// The role of a pod of an MPIJob: `launcher`, whose `mpirun` starts the ranks, or `worker`.
pub(super) const MPI_JOB_ROLE: &str = "K_MPI_JOB_ROLE";

/// All launchers, the innermost first.
pub(super) const LAUNCHERS: &[Row] = &[
    Row {
        launcher: Launcher::Torchrun,
        marks: &["TORCHELASTIC_RUN_ID"],
        rank: &["RANK"],
        size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
        hosts: &["GROUP_WORLD_SIZE"],
        job: &["TORCHELASTIC_RUN_ID"],
        group: [&["GROUP_RANK"], &["GROUP_WORLD_SIZE"]],
        ..NONE
    },
    Row {
        launcher: Launcher::OpenMpi,
        marks: &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        rank: &["OMPI_COMM_WORLD_RANK"],
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        job: &["PMIX_NAMESPACE"],
        ..NONE
    },
    Row {
        launcher: Launcher::Hydra,
        marks: &["PMI_RANK", "PMI_SIZE"],
        rank: &["PMI_RANK"],
        size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID"],
        local_size: &["MPI_LOCALNRANKS"],
        job: &["PMI_JOBID"],
        ..NONE
    },
    Row { launcher: Launcher::Prrte, marks: &["PMIX_RANK"], rank: &["PMIX_RANK"], job: &["PMIX_NAMESPACE"], ..NONE },
    // `SLURM_PROCID` and `SLURM_NTASKS` are set in a batch script too, which `sbatch` starts once: a step is marked by
    // variables of its own.
    Row {
        launcher: Launcher::Slurm,
        marks: &["SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"],
        rank: &["SLURM_PROCID"],
        size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        hosts: &["SLURM_STEP_NUM_NODES"],
        job: &["SLURM_JOB_ID"],
        starts: Starts::RanksOrDaemons,
        ..NONE
    },
    Row {
        launcher: Launcher::Plain,
        marks: &["WORLD_SIZE"],
        rank: &["RANK"],
        size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
        ..NONE
    },
    Row {
        launcher: Launcher::Kubeflow,
        marks: &["PET_NNODES", "PET_NODE_RANK"],
        rank: &["PET_NODE_RANK"],
        size: &["PET_NNODES"],
        hosts: &["PET_NNODES"],
        starts: Starts::Hosts,
        ..NONE
    },
    Row {
        launcher: Launcher::IndexedJob,
        marks: &["JOB_COMPLETION_INDEX"],
        rank: &["JOB_COMPLETION_INDEX"],
        job: &["JOBSET_NAME", "JOB_NAME"],
        starts: Starts::Hosts,
        ..NONE
    },
];

impl Launcher {
    /// Whether it starts processes that MPI joins.
    pub const fn joins_mpi(self) -> bool {
        matches!(self, Self::OpenMpi | Self::Hydra | Self::Slurm | Self::Prrte)
    }

    /// Why processes that it started may not have met.
    pub(super) const fn cause_of_split(self) -> &'static str {
        match self {
            Self::OpenMpi => {
                "the library is not that of this mpirun, or a container hides its PMIx server; use the mpirun of the library, \
                 or name the library of the mpirun"
            }
            Self::Hydra => {
                "the library is not that of this mpiexec, or a container hides its PMI; use the mpiexec of the library, \
                 or name the library of the mpiexec"
            }
            Self::Slurm => {
                "srun offers the library no PMI that it knows; use srun --mpi=pmix or --mpi=pmi2 (srun --mpi=list shows \
                 which there are), or the mpirun of the library, and pass PMI into containers"
            }
            _ => "the launcher offers the library no PMI that it knows; use the mpirun of the library",
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OpenMpi => "Open MPI's mpirun",
            Self::Hydra => "mpiexec",
            Self::Slurm => "Slurm",
            Self::Prrte => "prterun",
            Self::Torchrun => "torchrun",
            Self::Plain => "RANK and WORLD_SIZE",
            Self::Kubeflow => "Kubeflow",
            Self::IndexedJob => "a Kubernetes Job",
        })
    }
}
