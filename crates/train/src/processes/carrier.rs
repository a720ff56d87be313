//! The carrier of elements between the processes of a run (memory, MPI, TCP or NCCL), and settings that contradict it.

use super::meets_over_tcp;
use crate::config::{Config, ContextMethod, Device, Fault, ReductionName};
use crate::devices::MOST_LINKED;

/// What carries elements between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    /// All ranks are threads of this process.
    Memory,
    Mpi,
    Tcp,
    Nccl,
}

impl Carrier {
    fn of(config: &Config) -> Self {
        match &config.comm.launch {
            None => Self::Memory,
            Some(_) if config.device != Device::Cpu => Self::Nccl,
            Some(launch) if meets_over_tcp(config, launch) => Self::Tcp,
            Some(_) => Self::Mpi,
        }
    }
}

/// Notices about settings that have no effect, or another effect, with this carrier.
pub(super) fn notices(config: &Config) -> Vec<String> {
    let (carrier, comm) = (Carrier::of(config), &config.comm);
    let native = (comm.reduction == ReductionName::Native).then_some(match carrier {
        Carrier::Nccl => "NCCL adds up between processes, in an order of its own",
        Carrier::Mpi | Carrier::Tcp => "MPI adds up f32 and f64 between processes, in an order of its own",
        Carrier::Memory => "it has no effect: all ranks are threads of this process, whose sums are those of the tree",
    });
    let by_tcp = comm.launch.as_ref().is_some_and(|launch| meets_over_tcp(config, launch));
    let library = comm.library.as_ref().filter(|_| by_tcp);
    let native = native.map(|by| format!("comm.reduction = native: {by}"));
    let library =
        library.map(|path| format!("comm.library = {path} has no effect: the processes meet over TCP, without MPI"));
    native.into_iter().chain(library).collect()
}

/// The faults of settings that contradict what carries the elements: known before any process waits for another one.
pub(super) fn faults(config: &Config) -> Vec<Fault> {
    match Carrier::of(config) {
        Carrier::Tcp => no_sums(config).into_iter().collect(),
        Carrier::Nccl => shared_card(config).into_iter().chain(large_groups(config)).collect(),
        Carrier::Memory | Carrier::Mpi => Vec::new(),
    }
}

/// Over TCP there is no library that adds up.
fn no_sums(config: &Config) -> Option<Fault> {
    (config.comm.reduction == ReductionName::Native).then(|| {
        let problem = "the processes of CPUs meet over TCP (comm.kind = \"tcp\"), without a library that adds up";
        let valid = "use tree, or MPI, which adds up: comm.kind = \"mpi\" under mpirun";
        Fault::new("comm.reduction", "native", problem, valid)
    })
}

/// NCCL refuses two ranks on one card. Cards of other processes may have the same numbers, where each sees its own.
fn shared_card(config: &Config) -> Option<Fault> {
    let each = config.comm.ranks_per_process;
    let (cards, ranks, of, valid) = match config.device {
        Device::Cuda(Some(_)) => (1, each, "process", "--device cuda, on which each rank has the card of its number"),
        Device::CudaEmulated { devices, .. } => {
            (devices, config.ranks_here(), "host", "as many as a third part: cuda-emulated:0:2 has 2")
        }
        _ => return None,
    };
    (ranks > cards).then(|| {
        let cards = if cards == 1 { "1 card".to_owned() } else { format!("{cards} cards") };
        let problem = format!("{cards} for {ranks} ranks of a {of}, and NCCL, which connects them, refuses two on one");
        Fault::new("--device", config.device, problem, format!("use {valid}, or fewer ranks a {of}"))
    })
}

/// Groups whose members send each other messages.
fn large_groups(config: &Config) -> Vec<Fault> {
    let mesh = &config.parallelism;
    let rings = matches!(mesh.context_parallel_method, ContextMethod::Ring | ContextMethod::Hybrid);
    let groups = [("parallelism.pp", mesh.pp, true, ""), ("parallelism.cp", mesh.cp, rings, ", or all_gather")];
    let large = groups.into_iter().filter(|&(_, degree, sends, _)| sends && degree > MOST_LINKED);
    let fault = |(key, degree, _, or)| {
        let problem = format!(
            "NCCL carries messages in groups of at most {MOST_LINKED} ranks: each pair of a group has communicators of its own"
        );
        Fault::new(key, degree, problem, format!("use at most {MOST_LINKED}{or}"))
    };
    large.map(fault).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Args;
    use crate::processes::find;

    /// The faults and notices of a run whose process has these variables.
    fn told(settings: &str, variables: &str) -> (Vec<String>, Vec<String>) {
        let mut config = Config::from_args(&Args::parse(settings.split_whitespace())).unwrap();
        let pair = |word: &str| word.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
        let environment = variables.split_whitespace().filter_map(pair).collect();
        let launch = find(&config, &environment, ["gpt_train".to_owned()], &mut Vec::new());
        config.comm.launch = launch.unwrap_or_else(|fault| panic!("{settings}: {fault}"));
        (faults(&config).iter().map(Fault::to_string).collect(), notices(&config))
    }

    const OF_TCP: &str = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=node-0 MASTER_PORT=29500";
    const OF_MPI: &str = "PMI_RANK=1 PMI_SIZE=2";

    /// Every kind of processes, on every device, with every reduction.
    #[test]
    fn who_adds_up_is_told_or_refused_for_every_kind_on_every_device() {
        let (nccl, mpi) = ("NCCL adds up between processes", "MPI adds up f32 and f64");
        for (kind, variables, on_cpu, on_gpu) in [
            ("auto", "", Some("it has no effect"), Some("it has no effect")),
            ("threads", OF_MPI, Some("it has no effect"), Some("it has no effect")),
            ("auto", OF_MPI, Some(mpi), Some(nccl)),
            ("mpi", OF_MPI, Some(mpi), Some(nccl)),
            ("tcp", OF_TCP, None, Some(nccl)),
        ] {
            for (device, wanted) in [("cpu", on_cpu), ("cuda", on_gpu), ("cuda-emulated:0:2", on_gpu)] {
                if device != "cpu" && !cfg!(all(feature = "cuda", feature = "emulator")) {
                    continue;
                }
                let line = format!("--mesh dp=2 --set comm.kind={kind} --device {device}");
                assert_eq!(told(&line, variables), (Vec::new(), Vec::new()), "{line}");
                let line = format!("{line} --set training.numerics=fast --set comm.reduction=native");
                let (faults, notices) = told(&line, variables);
                match wanted {
                    Some(by) => assert!(
                        faults.is_empty() && notices[0].starts_with(&format!("comm.reduction = native: {by}")),
                        "{line}: {faults:?} {notices:?}"
                    ),
                    None => assert_eq!(
                        faults,
                        [
                            "comm.reduction = native: the processes of CPUs meet over TCP (comm.kind = \"tcp\"), without a \
                             library that adds up; use tree, or MPI, which adds up: comm.kind = \"mpi\" under mpirun"
                        ]
                    ),
                }
            }
        }
        let library = "--mesh dp=2 --set comm.kind=tcp --set comm.library=libmpi.so.40";
        let unread = "comm.library = libmpi.so.40 has no effect: the processes meet over TCP, without MPI";
        assert_eq!(told(library, OF_TCP), (Vec::new(), vec![unread.to_owned()]));
    }

    #[cfg(all(feature = "cuda", feature = "emulator"))]
    #[test]
    fn what_nccl_cannot_connect_is_refused() {
        let one = |settings: &str, variables: &str| {
            let (faults, _) = told(settings, variables);
            assert!(faults.len() < 2, "{faults:?}");
            faults.into_iter().next().unwrap_or_default()
        };
        let two = "--mesh dp=4 --set comm.ranks_per_process=2 --device";
        assert_eq!(
            one(&format!("{two} cuda:0"), OF_TCP),
            "--device cuda:0: 1 card for 2 ranks of a process, and NCCL, which connects them, refuses two on one; use \
             --device cuda, on which each rank has the card of its number, or fewer ranks a process"
        );
        assert_eq!(one(&format!("{two} cuda"), OF_TCP), "");
        // Each process may see a card of its own, and calls it 0.
        let of_host = format!("{OF_TCP} LOCAL_WORLD_SIZE=2");
        assert_eq!(one("--mesh dp=2 --device cuda:0", &of_host), "");
        let shared = one("--mesh dp=2 --device cuda-emulated", &of_host);
        assert!(shared.starts_with("--device cuda-emulated: 1 card for 2 ranks of a host, and NCCL"), "{shared}");
        assert_eq!(one("--mesh dp=2 --device cuda-emulated:0:2", &of_host), "");

        let of_34 = OF_TCP.replace("SIZE=2", "SIZE=34");
        let layers = "--set model.num_layers=34 --set training.micro_batch_size=1 --device cuda";
        assert_eq!(
            one(&format!("--mesh pp=34 {layers}"), &of_34),
            "parallelism.pp = 34: NCCL carries messages in groups of at most 16 ranks: each pair of a group has \
             communicators of its own; use at most 16"
        );
        let cp = "--mesh cp=32 --device cuda --set parallelism.context_parallel_method";
        let of_32 = OF_TCP.replace("SIZE=2", "SIZE=32");
        assert!(one(&format!("{cp}=ring"), &of_32).ends_with("; use at most 16, or all_gather"));
        assert_eq!(one(&format!("{cp}=all_gather"), &of_32), "");
    }
}
