//! Steps that run again on another mesh of the same world: the same bits, and a flipped bit is found.

use crate::small;
use meshwork_core::comm::{Call, Decorator, Op, Pending};
use meshwork_core::{CommError, Communicator, DType, Rank, World};
use meshwork_cpu::Cpu;
use meshwork_testkit::opaque::{self, Opaque};
use meshwork_train::config::{Args, Config};
use meshwork_train::replay::{Replay, Replays};
use meshwork_train::{Devices, RankDevice, Trainer, load, plan, train};
use std::error::Error;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A configuration of canonical numerics that replays each step.
pub fn config(settings: &str) -> Config {
    small::config(&format!("{settings} --set training.numerics=canonical --set training.replay_every=1"))
}

/// Three steps, each run again. `wrap` is around the communicators of the run, not of the replay. The notes of rank 0,
/// or each rank's error.
pub fn run(
    config: &Config,
    devices: &Devices,
    wrap: impl Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator> + Sync,
) -> Result<Vec<String>, Vec<String>> {
    let (data, mesh, plan) = (small::data(), config.mesh().unwrap(), config.plan().unwrap());
    let replays = Replays::from_config(config).unwrap().expect("replays");
    let ended = World::threads(&mesh).run(|world| {
        let RankDevice { device, world } = devices.rank(world.communicator().clone())?;
        let replay = Replay::join(&replays, devices, world.clone())?;
        let mut trainer = Trainer::new(config.model(), &plan, Arc::new(Rank::new(&mesh, wrap(world))?), device)?;
        let mut told = Vec::new();
        for step in 0..3 {
            let replayed = replay.run(&trainer, |rows| data.batch(step, small::BATCH, rows))?;
            let report = trainer.step(&data.batch(step, small::BATCH, trainer.samples())?)?;
            told.push(replay.compare(&trainer, &report, &replayed)?);
        }
        Ok::<_, Box<dyn Error + Send + Sync>>(told)
    });
    match ended {
        Ok(mut told) => Ok(told.swap_remove(0)),
        Err(error) => Err(error.ends.iter().flatten().map(ToString::to_string).collect()),
    }
}

#[test]
fn a_step_has_the_same_bits_where_it_runs_again() {
    let folder = tempfile::tempdir().unwrap();
    let offload = format!("--set memory.offload=all --set memory.offload_dir={}", folder.path().display());
    for settings in [
        "dp=2",
        "tp=2",
        "pp=2",
        "dp=2,tp=2 --set training.replay_mesh=pp=2,dp=2",
        "dp=2,tp=2 --set parallelism.zero_stage=3 --set training.replay_mesh=tp=4",
        "dp=4 --set parallelism.zero_stage=2 --set training.dtype=bf16 --set parallelism.zero_group=2",
        "pp=2,dp=2 --set pipeline.schedule=zb_h2 --set training.replay_mesh=dp=4",
        "dp=2,tp=2 --set training.dtype=f16 --set optimizer.name=adam8bit",
        "dp=2,ep=2 --set moe.num_experts=4 --set training.replay_mesh=tp=2",
        "dp=2 --set compress.activations=bf16 --set compress.virtual_cuts=[1] --set optimizer.name=muon",
        "cp=2,dp=2 --set model.tie_embeddings=false --set training.replay_mesh=dp=4 --set numerics.reduction_blocks=4",
        &format!("dp=2 {offload}"),
    ] {
        let config = config(settings);
        let told = run(&config, &Devices::open(&config).unwrap(), |world| world)
            .unwrap_or_else(|told| panic!("{settings}: {told:?}"));
        assert!(told[2].contains("step 3 run again on ") && told[2].contains(": the same bits"), "{told:?}");
    }
}

/// On devices whose memory the host does not read, with experts over a part of cp too.
#[test]
fn a_step_runs_again_on_devices_whose_memory_the_host_does_not_read() {
    let devices = Devices::own(|world| {
        Ok(RankDevice { device: Opaque::device(Cpu::device()), world: opaque::communicator(world) })
    });
    let untied = "--set model.tie_embeddings=false --set numerics.reduction_blocks=4";
    for settings in [
        "dp=2,tp=2 --set parallelism.zero_stage=3 --set training.replay_mesh=tp=4".to_owned(),
        format!("cp=2,dp=2 {untied} --set training.replay_mesh=dp=4"),
        format!("cp=4,ep=2 {untied} --set moe.num_experts=4 --set training.replay_mesh=dp=2,cp=2,ep=2"),
    ] {
        let config = config(&settings);
        let told = run(&config, &devices, |world| world).unwrap_or_else(|told| panic!("{settings}: {told:?}"));
        assert!(told[2].contains("step 3 run again on ") && told[2].contains(": the same bits"), "{told:?}");
    }
}

/// A bit of a gradient flips in what one rank sends to be summed, in one step.
#[derive(Debug)]
struct Flips {
    inner: Arc<dyn Communicator>,
    sums: Arc<AtomicUsize>,
}

impl Decorator for Flips {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn pass(&self, mut call: Call) -> Result<Pending, CommError> {
        let sums = matches!(call.op, Op::AllReduce(_) | Op::ReduceScatter(_)) && self.name() == "dp";
        let of_gradients = |buffer: &meshwork_core::Buffer| buffer.dtype() == DType::F32 && buffer.count() > 100;
        let buffer = if call.input.is_some() { &mut call.input } else { &mut call.output };
        if let Some(buffer) = buffer.as_mut().filter(|buffer| sums && of_gradients(buffer))
            && self.world_ranks()[self.rank()] == 1
            && self.sums.fetch_add(1, Ordering::Relaxed) == 1
        {
            let elements: &mut [f32] = buffer.as_mut_slice()?;
            let largest = elements.iter_mut().max_by(|a, b| a.abs().total_cmp(&b.abs())).expect("elements");
            *largest = f32::from_bits(largest.to_bits() ^ 1 << 20);
        }
        self.inner.start(call)
    }

    fn around(&self, part: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Flips { inner: part, sums: self.sums.clone() })
    }
}

#[test]
fn a_flipped_bit_of_a_gradient_is_found_with_step_parameter_element_and_ranks() {
    for settings in ["dp=2", "dp=2 --set training.replay_mesh=tp=2", "dp=2 --set parallelism.zero_stage=1"] {
        let config = config(settings);
        let flips = |inner| -> Arc<dyn Communicator> { Arc::new(Flips { inner, sums: Arc::default() }) };
        let told = run(&config, &Devices::open(&config).unwrap(), flips).unwrap_err();
        assert_eq!(told.len(), 2, "every rank has the error: {told:?}");
        assert_eq!(told[0], told[1]);
        // The clipped update of every weight follows from the norm; what is named is the gradient that was wrong.
        assert!(told[0].starts_with("step ") && told[0].contains("it has other bits, so a rank computed"), "{told:?}");
        assert!(told[0].contains(" (gradient) at [") && told[0].contains(" in the replay, on rank "), "{told:?}");
        assert!(told[0].contains("the gradient norm is "), "{told:?}");
    }
}

#[test]
fn a_run_replays_every_n_steps_and_has_the_numbers_of_one_that_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let numbers = |settings: &str, every: u64| {
        let metrics = folder.path().join(every.to_string());
        let config = small::config(&format!(
            "{settings} --steps 4 --set training.numerics=canonical --set training.replay_every={every} \
             --set metrics.sample_tokens=0"
        ));
        train(&config, &small::data(), Some(&metrics), &AtomicBool::new(false)).unwrap();
        let lines = fs::read_to_string(&metrics).unwrap();
        let events = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let (steps, rest): (Vec<_>, Vec<_>) = events.partition(|event| event["event"] == "step");
        let losses: Vec<_> =
            steps.iter().map(|of| format!("{} {} {}", of["step"], of["loss"], of["grad_norm"])).collect();
        let costs: Vec<_> = steps.iter().map(|of| format!("{} {}", of["comm_bytes"], of["peak_bytes"])).collect();
        (losses, costs, rest.last().unwrap()["memory_measured"].clone())
    };
    for settings in ["dp=2,tp=2", "pp=2"] {
        let whole = numbers(settings, 0);
        assert_eq!(whole.0.len(), 4);
        assert_eq!(numbers(settings, 2), whole, "{settings}: its memory and traffic are no part of a step's");
    }
    // Steps that overlap come to an end before a replay.
    let overlaps = "pp=2 --set pipeline.schedule=zb_h2";
    assert_eq!(numbers(overlaps, 3).0, numbers(overlaps, 0).0);
}

/// What the report before the run says is what a replay takes.
#[test]
fn memory_and_traffic_of_a_replay_are_predicted() {
    for settings in ["dp=2,tp=2", "dp=2 --set training.replay_mesh=tp=2"] {
        let config = config(settings);
        let told = run(&config, &Devices::open(&config).unwrap(), |world| world).unwrap();
        let report = plan::report(&config).unwrap();
        let line = report.lines().find(|line| line.starts_with("replay of every step on ")).unwrap();
        let (_, predicted) = line.split_once("a rank has up to ").unwrap();
        let (memory, sent) = predicted.split_once(" more at the peak, and sends up to ").unwrap();
        assert!(told[0].contains(&format!("up to {memory} more and sent up to {sent}")), "{line}\n{told:?}");
    }
}

#[test]
fn replays_that_cannot_be_are_refused() {
    let canonical = "--set training.numerics=canonical --set training.replay_every=2";
    for (line, told) in [
        (
            "--mesh dp=2 --set training.replay_every=2".to_owned(),
            "training.replay_every = 2: compares the bits of two meshes, and only canonical numerics have the same bits on both",
        ),
        (canonical.to_owned(), "training.replay_every = 2: has no other rank that could run a step again"),
        (
            format!("--mesh dp=2 {canonical} --set training.replay_mesh=dp=4"),
            "training.replay_mesh = dp=4: has another number of ranks than the 2 of the run; use a mesh of as many",
        ),
        (
            format!("--mesh dp=2 {canonical} --set training.replay_mesh=xp=2"),
            "training.replay_mesh = xp=2: unknown axis",
        ),
        (
            format!("--mesh dp=3 --set training.global_batch_size=12 {canonical} --set training.replay_mesh=tp=3"),
            "training.replay_mesh = tp=3: no such step: ",
        ),
        (
            format!(
                "--mesh dp=2 {canonical} --set training.replay_mesh=tp=2 --set compress.activations=bf16 --set compress.virtual_cuts=[1]"
            ),
            "training.replay_mesh = tp=2: has other bits where something is compressed",
        ),
        (
            format!("--mesh dp=2 {canonical} --set memory.limit_bytes=30000000"),
            "memory.limit_bytes = 30000000: a rank needs ",
        ),
    ] {
        let refusal = load(&Args::parse(line.split_whitespace())).expect_err(&line).to_string();
        assert!(refusal.starts_with(told), "{refusal}");
    }
}
