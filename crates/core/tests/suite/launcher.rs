//! Launchers by the variables that they set, and where ranks are.

use meshwork_core::launcher::{Environment, Launch, LaunchError, Launcher, Placement, Within, detect};
use meshwork_core::{Axis, Mesh, World};

fn environment(text: &str) -> Environment {
    let pair = |word: &str| word.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    text.split_whitespace().filter_map(pair).collect()
}

fn found(text: &str) -> Result<Option<Launch>, String> {
    detect(&environment(text)).map_err(|error| error.to_string())
}

/// Ranks as their launchers start them, with the variables that those set.
#[test]
fn every_launcher_is_known_by_its_variables() {
    use Launcher::*;
    let slurm = "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[001-002] SLURM_STEP_NUM_NODES=2 \
                 SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1";
    let torchrun = "TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 \
                    LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500";
    let open_mpi = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 \
                    OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=0 PMIX_RANK=2 PMIX_NAMESPACE=prterun-a-1@1";
    let table: &[(&str, String, Launcher, usize, Option<usize>)] = &[
        ("mpirun of Open MPI", open_mpi.into(), OpenMpi, 2, Some(4)),
        ("mpirun -n 1", "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1".into(), OpenMpi, 0, Some(1)),
        (
            "mpiexec of MPICH",
            "PMI_RANK=1 PMI_SIZE=2 PMI_FD=9 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2".into(),
            Hydra,
            1,
            Some(2),
        ),
        ("prterun alone", "PMIX_RANK=1 PMIX_NAMESPACE=prterun-a-9@1".into(), Prrte, 1, None),
        ("srun without a PMI", slurm.into(), Slurm, 3, Some(4)),
        ("srun --mpi=pmi2", format!("{slurm} PMI_RANK=3 PMI_SIZE=4 PMI_FD=12 PMI_JOBID=77.0"), Slurm, 3, Some(4)),
        ("srun --mpi=pmix", format!("{slurm} PMIX_RANK=3 PMIX_NAMESPACE=slurm.pmix.77.0"), Slurm, 3, Some(4)),
        ("torchrun", torchrun.into(), Torchrun, 5, Some(8)),
        ("by hand", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1".into(), Plain, 1, Some(2)),
        (
            "Kubeflow",
            "PET_NNODES=2 PET_NPROC_PER_NODE=4 PET_NODE_RANK=1 PET_MASTER_ADDR=a".into(),
            Kubeflow,
            1,
            Some(2),
        ),
        ("an indexed Job", "JOB_COMPLETION_INDEX=3 HOSTNAME=train-3".into(), IndexedJob, 3, None),
        // One inside another.
        (
            "torchrun in srun",
            format!("{} {torchrun}", slurm.replace("NUM_TASKS=4", "NUM_TASKS=2").replace("PROCID=3", "PROCID=1")),
            Torchrun,
            5,
            Some(8),
        ),
        (
            "mpirun's daemons by srun",
            format!("{} {open_mpi}", slurm.replace("NUM_TASKS=4", "NUM_TASKS=1").replace("PROCID=3", "PROCID=0")),
            OpenMpi,
            2,
            Some(4),
        ),
        (
            "hydra's proxies by srun",
            format!(
                "{} PMI_RANK=5 PMI_SIZE=8",
                slurm.replace("NUM_TASKS=4", "NUM_TASKS=2").replace("PROCID=3", "PROCID=1")
            ),
            Hydra,
            5,
            Some(8),
        ),
        (
            "mpirun in a shell of srun --pty",
            format!(
                "{} {open_mpi}",
                "SLURM_STEP_NODELIST=a SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0"
            ),
            OpenMpi,
            2,
            Some(4),
        ),
        (
            "prterun's daemons by srun",
            "PMIX_RANK=1 PMIX_NAMESPACE=prterun-a-9@1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_PROCID=1"
                .into(),
            Prrte,
            1,
            None,
        ),
        (
            "mpirun in a batch script",
            format!("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 {open_mpi}"),
            OpenMpi,
            2,
            Some(4),
        ),
        ("a script that passes the rank on", format!("{slurm} RANK=3 WORLD_SIZE=4"), Slurm, 3, Some(4)),
        ("the same for mpirun", format!("{open_mpi} RANK=2 WORLD_SIZE=4 LOCAL_RANK=0"), OpenMpi, 2, Some(4)),
        ("mpirun in a pod of a JobSet", format!("JOB_COMPLETION_INDEX=0 {open_mpi}"), OpenMpi, 2, Some(4)),
        ("mpirun of an MPIJob", format!("K_MPI_JOB_ROLE=launcher {open_mpi}"), OpenMpi, 2, Some(4)),
        ("torchrun in a pod of Kubeflow", format!("PET_NNODES=2 PET_NODE_RANK=1 {torchrun}"), Torchrun, 5, Some(8)),
        // Awkward values.
        ("spaces around a number", "RANK=1\u{a0} WORLD_SIZE=2".replace('\u{a0}', ""), Plain, 1, Some(2)),
        ("a world of one without a rank", "WORLD_SIZE=1".into(), Plain, 0, Some(1)),
    ];
    for (name, variables, launcher, rank, size) in table {
        let launch = found(variables)
            .unwrap_or_else(|error| panic!("{name}: {error}"))
            .unwrap_or_else(|| panic!("{name}: none"));
        assert_eq!((launch.launcher, launch.rank, launch.size), (*launcher, *rank, *size), "{name}");
    }
    let launch = found(open_mpi).unwrap().unwrap();
    assert_eq!(
        (launch.local_rank, launch.local_size, launch.job.as_deref()),
        (Some(0), Some(2), Some("prterun-a-1@1"))
    );
    let launch = found(slurm).unwrap().unwrap();
    assert_eq!((launch.local_rank, launch.hosts, launch.job.as_deref()), (Some(1), Some(2), Some("77")));
}

/// A program that was started by itself, whatever else there is in its environment.
#[test]
fn a_program_started_by_itself_has_no_launcher() {
    for alone in [
        "",
        "PATH=/bin RANK=3",  // nobody's variable
        "RANK= WORLD_SIZE=", // exported from variables that are not set
        "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_NUM_NODES=2", // a batch script
        "K_MPI_JOB_ROLE=worker",
        "MASTER_ADDR=a MASTER_PORT=1",
    ] {
        assert_eq!(found(alone), Ok(None), "{alone}");
    }
}

#[test]
fn a_launch_that_cannot_be_is_refused() {
    let open_mpi = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4";
    let two = "the environment has the variables of two launchers: rank 1 of 4 by Open MPI's mpirun, and ";
    for (variables, message) in [
        ("OMPI_COMM_WORLD_RANK=one OMPI_COMM_WORLD_SIZE=4".to_owned(), "OMPI_COMM_WORLD_RANK = \"one\", which Open MPI's mpirun sets, is not a whole number"),
        ("PMI_RANK=-1 PMI_SIZE=4".to_owned(), "PMI_RANK = \"-1\", which mpiexec sets, is not a whole number"),
        ("PET_NNODES=1:4 PET_NODE_RANK=0".to_owned(), "PET_NNODES = \"1:4\", which Kubeflow sets, is not a whole number"),
        ("RANK=4 WORLD_SIZE=4".to_owned(), "rank 4 of 4 by RANK and WORLD_SIZE: ranks count from 0 to 3"),
        ("RANK=0 WORLD_SIZE=0".to_owned(), "rank 0 of 0 by RANK and WORLD_SIZE: ranks count from 0 to 0"),
        ("RANK= WORLD_SIZE=4".to_owned(), "some variables of RANK and WORLD_SIZE are set, and RANK is not"),
        ("OMPI_COMM_WORLD_SIZE=4".to_owned(), "some variables of Open MPI's mpirun are set, and OMPI_COMM_WORLD_RANK is not"),
        ("PMI_RANK=1".to_owned(), "some variables of mpiexec are set, and PMI_SIZE is not"),
        (format!("{open_mpi} PMI_RANK=0 PMI_SIZE=2"), &format!("{two}rank 0 of 2 by mpiexec; ")),
        (format!("{open_mpi} RANK=0 WORLD_SIZE=4"), &format!("{two}rank 0 of 4 by RANK and WORLD_SIZE; ")),
        // Eight runs of four ranks each.
        (format!("{open_mpi} SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=2 SLURM_PROCID=5"), &format!("{two}rank 5 of 8 by Slurm; ")),
        ("TORCHELASTIC_RUN_ID=x RANK=0 WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=1 SLURM_PROCID=3".to_owned(),
         "rank 0 of 2 by torchrun, and rank 3 of 4 by Slurm"),
        ("K_MPI_JOB_ROLE=launcher".to_owned(), "the program was started without mpirun"),
    ] {
        let error = found(&variables).expect_err(&variables);
        assert!(error.contains(message), "{variables}: {error}");
    }
}

#[test]
fn a_launcher_without_mpi_gives_the_line_to_use() {
    let launch = found("RANK=1 WORLD_SIZE=2").unwrap().unwrap();
    let command = ["target/release/gpt_train", "--mesh", "dp=2", "--data", "my text's.txt", ""].map(str::to_owned);
    let error = launch.require_mpi(2, command).unwrap_err().to_string();
    let line = r"mpirun -n 2 target/release/gpt_train --mesh dp=2 --data 'my text'\''s.txt' ''";
    assert!(error.starts_with("rank 1 of 2 by RANK and WORLD_SIZE: ") && error.ends_with(line), "{error}");
    let pods = found("PET_NNODES=3 PET_NODE_RANK=1").unwrap().unwrap();
    let error = pods.require_mpi(6, ["train".to_owned()]).unwrap_err().to_string();
    assert!(error.ends_with("mpirun -n 6 --hostfile HOSTS train"), "{error}");
    let job = found("JOB_COMPLETION_INDEX=1").unwrap().unwrap();
    let error = job.require_mpi(4, ["train".to_owned()]).unwrap_err().to_string();
    assert!(error.ends_with("mpirun -n 4 --hostfile HOSTS train"), "{error}");
    let mpi = found("PMI_RANK=1 PMI_SIZE=2").unwrap().unwrap();
    assert_eq!(mpi.require_mpi(2, ["train".to_owned()]), Ok(()));
}

/// n processes that became n worlds of one.
#[test]
fn a_silent_split_is_refused_with_both_numbers() {
    for (variables, cause) in [
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4", "use the mpirun of the library"),
        ("PMI_RANK=1 PMI_SIZE=4", "use the mpiexec of the library"),
        ("SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0", "srun --mpi=pmix or --mpi=pmi2"),
    ] {
        let launch = found(variables).unwrap().unwrap();
        assert_eq!(launch.require_met(4, "MPICH 5.0.2"), Ok(()));
        let error = launch.require_met(1, "MPICH 5.0.2").unwrap_err();
        assert!(matches!(error, LaunchError::Split { launched: 4, met: 1, .. }));
        let error = error.to_string();
        assert!(error.contains("started 4 processes, and this one met a world of 1 by MPICH 5.0.2: "), "{error}");
        assert!(error.contains(cause), "{error}");
    }
    let unknown = found("PMIX_RANK=1").unwrap().unwrap();
    assert_eq!(unknown.require_met(2, "Open MPI"), Ok(()), "prterun says no size");
}

fn mesh(text: &str) -> Mesh {
    text.parse().unwrap()
}

#[test]
fn tp_lies_inside_a_process_then_a_host() {
    let slots = Placement::new(&["a", "a", "b", "b"], 4);
    let [of_16, wide] = ["tp=4,dp=2,pp=2", "tp=8,dp=2"].map(mesh);
    assert_eq!((slots.processes(), slots.hosts()), (4, 2));
    assert_eq!(slots.within(&of_16, Axis::Tp), Within::Process);
    assert_eq!(slots.within(&of_16, Axis::Dp), Within::Host);
    assert_eq!(slots.within(&of_16, Axis::Pp), Within::Hosts);
    assert_eq!(slots.within(&wide, Axis::Tp), Within::Host);
    assert_eq!([&of_16, &wide].map(|mesh| slots.warning(mesh)), [None, None]);
    assert_eq!(
        slots.describe(&of_16, "Slurm"),
        "16 ranks: 4 processes on 2 hosts by Slurm, mesh tp=4 inside a process, dp=2 inside a host, pp=2 across hosts"
    );
    assert_eq!(
        Placement::new(&["a"; 4], 1).describe(&mesh("tp=4"), "mpiexec"),
        "4 ranks: 4 processes on 1 host by mpiexec, mesh tp=4 inside a host"
    );
    assert_eq!(Placement::new(&["a"], 1).describe(&mesh("tp=1"), "mpiexec"), "1 rank: 1 process on 1 host by mpiexec");
}

#[test]
fn tp_over_hosts_is_warned_of_with_what_would_fit() {
    let in_turn = Placement::new(&["a", "b", "a", "b"], 1).warning(&mesh("tp=2,dp=2")).unwrap();
    assert!(in_turn.contains("tp=2 reaches over hosts") && in_turn.contains("--distribution=block"), "{in_turn}");
    let wide = Placement::new(&["a", "a", "b", "b"], 1).warning(&mesh("tp=4")).unwrap();
    assert!(wide.ends_with("use tp=2, or hosts with a multiple of 4 ranks each"), "{wide}");
    let uneven = Placement::new(&["a", "a", "a", "b", "b", "b"], 1).warning(&mesh("tp=2,dp=3")).unwrap();
    assert!(uneven.ends_with("use tp=1, or hosts with a multiple of 2 ranks each"), "{uneven}");
    assert_eq!(Placement::new(&["a", "b"], 1).warning(&mesh("dp=2")), None);
}

/// Processes on one to three hosts, dealt out in every way: groups reach over hosts only where they must.
#[test]
fn processes_are_numbered_so_that_tp_lies_inside_a_host() {
    for (dealt, each, tp) in
        (0..3usize.pow(6)).flat_map(|dealt| [(1, 2), (1, 3), (2, 4), (2, 3)].map(|(k, tp)| (dealt, k, tp)))
    {
        let hosts: Vec<usize> = (0..6).map(|process| dealt / 3usize.pow(process) % 3).collect();
        let order = Placement::order(&hosts, each, tp);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted == [0, 1, 2, 3, 4, 5] && order[0] == 0, "{order:?} of {hosts:?}");
        let host = |rank: usize| hosts[order[rank / each]];
        let over = (0..6 * each).step_by(tp).filter(|&first| (first..first + tp).any(|rank| host(rank) != host(first)));
        // In blocks that begin and end with a group, a host is left with fewer processes than a block.
        let block = [1, 2, 3].into_iter().find(|processes| (processes * each).is_multiple_of(tp)).unwrap();
        let left: usize = (0..3).map(|host| hosts.iter().filter(|&&it| it == host).count() % block).sum();
        let groups = left * each / tp;
        assert!(
            over.clone().count() <= groups,
            "{} groups, {order:?} of {hosts:?}, {each} each, tp={tp}",
            over.count()
        );
    }
}

/// Rank 0 learns the hosts of all processes.
#[test]
fn a_placement_is_gathered_on_rank_0() {
    let gathered = World::Threads(4).run(|world| Placement::gather(&world, ["a", "b"][world.rank() / 2], 2)).unwrap();
    assert_eq!(gathered, [Some(Placement::new(&["a", "b"], 2)), None, None, None]);
}
