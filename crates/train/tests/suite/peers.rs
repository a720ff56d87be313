//! Snapshots in the memory of processes: after a loss the others go on from them, with the bits of a run that lost
//! nothing. Ranks are threads, and each process of them has a memory of its own.

use crate::small;
use meshwork_core::{Communicator, Rank, World};
use meshwork_cpu::Cpu;
use meshwork_testkit::opaque::{self, Opaque};
use meshwork_train::config::{Args, Config};
use meshwork_train::peers::{Keepers, Peers, Snapshots};
use meshwork_train::{RankDevice, RankError, Trainer, load, plan};
use serde_json::json;
use std::ops::Range;
use std::sync::Arc;

const STEPS: u64 = 5;

pub fn config(settings: &str) -> Config {
    small::config(&format!("{settings} --set training.numerics=canonical --set parallelism.elastic=dp"))
}

/// The bits of the losses and norms of some steps.
pub type Numbers = Vec<[u64; 2]>;

fn step(trainer: &mut Trainer, step: u64) -> Result<[u64; 2], RankError> {
    let batch = small::data().batch(step, small::BATCH, trainer.samples())?;
    let report = trainer.step(&batch)?;
    Ok([report.loss.to_bits(), report.grad_norm.to_bits()])
}

/// The devices of ranks.
pub type Open<'a> = &'a (dyn Fn(Arc<dyn Communicator>) -> Result<RankDevice, RankError> + Sync);

pub fn on_cpu(world: Arc<dyn Communicator>) -> Result<RankDevice, RankError> {
    Ok(RankDevice { device: Cpu::device(), world })
}

/// Runs every rank of the mesh.
fn ranks<T: Send>(
    config: &Config,
    open: Open,
    body: impl Fn(Trainer, Arc<dyn Communicator>) -> Result<T, RankError> + Sync,
) -> Result<Vec<T>, String> {
    let (mesh, plan) = (config.mesh().unwrap(), config.plan().unwrap());
    let ended = World::threads(&mesh).run(|group| {
        let RankDevice { device, world } = open(group.communicator().clone())?;
        let trainer = Trainer::new(config.model(), &plan, Arc::new(Rank::new(&mesh, world)?), device)?;
        body(trainer, group.communicator().clone())
    });
    ended.map_err(|error| error.to_string())
}

/// A run on processes of `each` ranks, which take snapshots before the first step and after the second, and after the
/// third one on which `partial` processes are killed before they have it. Then `lost` are lost, and the others go on
/// with `after`, from a snapshot. Returns what the first snapshot took, the step of the last, and the numbers from
/// there.
pub fn regrouped(
    [before, after]: [&Config; 2],
    open: Open,
    each: usize,
    [partial, lost]: [&[usize]; 2],
) -> Result<(String, u64, Numbers), String> {
    let (model, plan) = (before.model(), before.plan().unwrap());
    let processes: Arc<[usize]> = (0..plan.mesh.world_size() / each).collect();
    let memory: [Vec<Peers>; 2] = [0, 1].map(|_| processes.iter().map(|_| Peers::default()).collect());
    let keepers = Arc::new(Keepers::new(&model, &plan, each).unwrap());
    memory.iter().flatten().for_each(|peers| peers.enter(keepers.clone(), processes.clone()));
    let took = ranks(before, open, |mut trainer, world| {
        let process = world.rank() / each;
        let snapshots = Snapshots::join(&memory[0][process], world.clone()).expect("entered");
        let took = snapshots.take(&trainer, json!(0))?;
        for done in 1..=4 {
            step(&mut trainer, done - 1)?;
            snapshots.complete(done);
            if done == 2 {
                snapshots.take(&trainer, json!(done))?;
            }
            if done == 4 && !partial.is_empty() {
                // Its memory is gone.
                let gone = partial.contains(&process);
                let snapshots = Snapshots::join(&memory[usize::from(gone)][process], world.clone());
                snapshots.expect("entered").take(&trainer, json!(done))?;
            }
        }
        Ok(took)
    })?;
    let left: Vec<usize> = processes.iter().copied().filter(|process| !lost.contains(process)).collect();
    let (model, plan) = (after.model(), after.plan().unwrap());
    let restored = World::Threads(left.len() * each).run(|world| {
        let peers = &memory[0][left[world.rank() / each]];
        peers.restore(&world, &left, (&model, &plan))
    });
    let from = restored.map_err(|error| error.to_string())?.swap_remove(0)?;
    let numbers = ranks(after, open, |mut trainer, _| {
        let rank = trainer.rank().world_rank();
        let restored = memory[0][left[rank / each]].restored(rank % each).expect("restored");
        assert_eq!((restored.step, &restored.run), (from, &json!(from)));
        restored.load_into(&mut trainer)?;
        (from..STEPS).map(|at| step(&mut trainer, at)).collect::<Result<Numbers, _>>()
    })?;
    Ok((took[0].clone(), from, numbers[0].clone()))
}

pub fn whole(config: &Config, open: Open, steps: Range<u64>) -> Numbers {
    let numbers = ranks(config, open, |mut trainer, _| {
        (0..steps.end).map(|at| step(&mut trainer, at)).collect::<Result<Numbers, _>>()
    });
    numbers.unwrap()[0][steps.start as usize..].to_vec()
}

/// Meshes, stages of ZeRO, rules, offload and processes of several ranks, so that each meets most of the others.
#[test]
fn the_others_go_on_from_memory_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let bf16 = "--set training.dtype=bf16 --set training.matmul_dtype=f32";
    let offload = format!("--set memory.offload=optimizer --set memory.offload_dir={}", dir.path().display());
    let (zero, name, experts) = (
        "--set parallelism.zero_stage",
        "--set optimizer.name",
        "--set moe.num_experts=4 --set optimizer.name=adam8bit",
    );
    for (before, after, each, lost) in [
        (format!("dp=2 {offload}"), format!("dp=1 {offload}"), 1, 0),
        (format!("dp=2,cp=2 {zero}=3 {offload}"), format!("dp=1,cp=2 {zero}=3"), 2, 0),
        (format!("dp=4 {zero}=1 {bf16} --set parallelism.zero_group=2"), format!("dp=2 {zero}=1 {bf16}"), 1, 3),
        (format!("dp=2,tp=2,pp=2 {zero}=2"), "dp=1,tp=2,pp=2".to_owned(), 2, 2),
        (format!("dp=2,cp=2 {zero}=1 {name}=muon"), format!("dp=1,cp=2 {name}=muon"), 1, 1),
        // Experts that the ranks of cp share out: all of them with some of dp, and a part of them.
        (format!("dp=2,cp=2,ep=4 {experts}"), format!("dp=1,cp=2,ep=2 {experts}"), 1, 0),
        (format!("cp=4,ep=2 {experts}"), format!("cp=2,ep=2 {experts}"), 1, 3),
    ] {
        let [before, after] = [before, after].map(|settings| config(&settings));
        let (_, from, numbers) = regrouped([&before, &after], &on_cpu, each, [&[], &[lost]])
            .unwrap_or_else(|error| panic!("{:?}: {error}", before.parallelism));
        assert_eq!(from, 2);
        assert_eq!(numbers, whole(&before, &on_cpu, 2..STEPS), "{:?}", before.parallelism);
    }
}

/// The same, whose memory the host does not read.
#[test]
fn memory_of_devices_is_kept_on_the_host() {
    let [before, after] = ["dp=2", "dp=1"]
        .map(|mesh| config(&format!("{mesh} --set training.dtype=bf16 --set training.matmul_dtype=f32")));
    let open: Open =
        &|world| Ok(RankDevice { device: Opaque::device(Cpu::device()), world: opaque::communicator(world) });
    let (_, from, numbers) = regrouped([&before, &after], open, 1, [&[], &[1]]).unwrap();
    assert_eq!((from, numbers), (2, whole(&before, &on_cpu, 2..STEPS)));
}

/// One of three processes was killed when the others had the new snapshot, and it is still there: the one before is
/// whole. Where the others have all of the new one, it counts.
#[test]
fn a_snapshot_that_some_have_counts_if_it_is_whole() {
    let sharded = "--set parallelism.zero_stage=3";
    for (settings, from) in [(sharded, 2), ("", 4)] {
        let [before, after] = ["dp=4", "dp=2"].map(|mesh| config(&format!("{mesh} {settings}")));
        // Of process 1, whose partner is 3.
        let told = regrouped([&before, &after], &on_cpu, 1, [&[1], &[3]]).unwrap();
        assert_eq!((told.1, told.2), (from, whole(&before, &on_cpu, from..STEPS)), "{settings}");
    }
}

#[test]
fn a_state_that_nobody_keeps_is_named() {
    let [before, after] = ["dp=4", "dp=2"].map(|mesh| config(&format!("{mesh} --set parallelism.zero_stage=3")));
    let told = regrouped([&before, &after], &on_cpu, 1, [&[], &[0, 2]]).unwrap_err();
    assert!(told.starts_with("of step 2 nobody who is left keeps ") && told.contains(" of [0.."), "{told}");
}

/// A spare rank was given a state after one loss, and after the next one there is none: it reads the checkpoint, as
/// all.
#[test]
fn a_state_that_was_restored_for_another_mesh_is_not_used() {
    let [before, after] = ["dp=2", "dp=1"].map(config);
    let (model, plan) = (before.model(), before.plan().unwrap());
    let memory = [Peers::default(), Peers::default()];
    let keepers = Arc::new(Keepers::new(&model, &plan, 1).unwrap());
    memory.iter().for_each(|peers| peers.enter(keepers.clone(), Arc::new([0, 1])));
    ranks(&before, &on_cpu, |trainer, world| {
        Snapshots::join(&memory[world.rank()], world.clone()).expect("entered").take(&trainer, json!(0))
    })
    .unwrap();
    let plan = after.plan().unwrap();
    World::Threads(1)
        .run(|world| {
            assert_eq!(memory[0].restore(&world, &[0], (&model, &plan))?, Ok(0));
            let told = memory[0].restore(&world, &[7], (&model, &plan))?.unwrap_err();
            assert!(told.starts_with("of step 0 nobody who is left keeps "), "{told}");
            Ok::<_, RankError>(())
        })
        .unwrap();
    assert!(memory[0].restored(0).is_none());
}

/// What the report before a run says is what a snapshot takes.
#[test]
fn memory_and_traffic_of_a_snapshot_are_predicted() {
    for (settings, sends) in [("dp=2", false), ("dp=2 --set parallelism.zero_stage=2", true), ("dp=2,tp=2", false)] {
        let before = config(&format!("{settings} --set checkpoint.peer_every=3"));
        let after = config(&settings.replace("dp=2", "dp=1").replace("zero_stage=2", "zero_stage=0"));
        let (took, ..) = regrouped([&before, &after], &on_cpu, 1, [&[], &[1]]).unwrap();
        let mut planned = before.clone();
        planned.training.steps = 0;
        let report = plan::report(&planned).unwrap();
        let (_, line) = report.split_once("snapshots in memory every 3 steps: ").unwrap_or_else(|| panic!("{report}"));
        let line = line.lines().next().unwrap();
        assert!(took.contains(line), "{line}\n{took}");
        assert_eq!(line.ends_with(" sends up to 0 B"), !sends, "{line}");
    }
}

/// Threads are lost together, and without elastic nothing goes on in place: the key is told to have no effect.
#[test]
fn snapshots_that_help_nobody_are_not_taken_and_that_is_told() {
    let notices = |line: &str| {
        let (config, _) = load(&Args::parse(line.split_whitespace())).unwrap();
        config.notices.iter().filter(|notice| notice.contains("peer_every")).cloned().collect::<Vec<_>>()
    };
    let threads = "--mesh dp=2 --set checkpoint.peer_every=2";
    assert_eq!(notices(threads)[0], "checkpoint.peer_every = 2 has no effect without parallelism.elastic = dp");
    let elastic = format!("{threads} --set parallelism.elastic=dp");
    let told = notices(&elastic);
    let why = "checkpoint.peer_every = 2 keeps no snapshots: all ranks are threads of this process, and would be lost together";
    assert_eq!(told, [why]);
    assert!(notices(&format!("{elastic} --steps 0")).is_empty());
}
