//! Whole training steps of GPT-2: the CPU's bits in canonical numerics, near them with the library's products, in any
//! order of streams. On the emulator here, and on a GPU or its stand-in in `tests/gpu`.

use crate::{driver, drivers, orders};
use meshwork_core::World;
use meshwork_core::simd::{Level, level};
use meshwork_core::{Axis, Mesh, Rank};
use meshwork_cpu::Cpu;
use meshwork_cuda::device::Products;
use meshwork_cuda::{CudaDevice, Order};
use meshwork_engine::dry_run::predict;
use meshwork_engine::offload::Offload;
use meshwork_engine::{Numerics, Plan, StateKey, TrainError, TrainState, Trainer, WholeState, Zero, ZeroStage};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language;
use meshwork_nn::{Batch, Model};
use meshwork_optim::{Adafactor, Adam8bit, AdamW, Lamb, Muon, Rule};
use meshwork_tensor::Device;
use meshwork_tensor::Precision;
use meshwork_testkit::{Sampled, sweeps};
use std::collections::BTreeMap;
use std::sync::Arc;

pub const STEPS: usize = 2;
const SAMPLES: usize = 2;

/// Odd sizes, dropout, the head tied to the table.
pub fn small() -> Gpt2Config {
    let sizes = Gpt2Config { vocab_size: 61, num_layers: 2, hidden_size: 24, num_heads: 3, ..Gpt2Config::default() };
    Gpt2Config { ffn_hidden_size: 50, seq_len: 13, dropout: 0.1, ..sizes }
}

/// The preset `tiny`.
fn tiny() -> Gpt2Config {
    Gpt2Config::default()
}

pub fn batch(config: &Gpt2Config, samples: usize, step: usize) -> Batch {
    let count = samples * config.seq_len;
    let ids = |times: usize| {
        (0..count).map(|i| ((i * times + i * i / 7 + 31 * step) % config.vocab_size) as i32).collect::<Vec<i32>>()
    };
    let mut targets = ids(7);
    targets[3] = -1;
    language::batch(ids(5), targets, config.seq_len).unwrap()
}

/// The numbers of a run: per step the loss and the norm of the gradients; weights and states after the last.
#[derive(Debug, PartialEq)]
pub struct Trained {
    steps: Vec<[f64; 2]>,
    state: BTreeMap<StateKey, Vec<f32>>,
}

pub fn train(config: Gpt2Config, numerics: Numerics, device: Arc<dyn Device>) -> Result<Trained, TrainError> {
    train_watched(config, numerics, STEPS, device, || ())
}

/// Trains for `count` steps; calls `mark` before the first and after each.
pub fn train_watched(
    config: Gpt2Config,
    numerics: Numerics,
    count: usize,
    device: Arc<dyn Device>,
    mark: impl FnMut(),
) -> Result<Trained, TrainError> {
    let precision = device.precision();
    let plan = Plan { global_batch_size: SAMPLES, num_microbatches: Some(2), numerics, precision, ..Plan::default() };
    train_plan(config, &plan, count, device, mark)
}

/// Steps of a plan on one rank.
fn train_with(config: Gpt2Config, plan: &Plan, device: Arc<dyn Device>) -> Result<Trained, TrainError> {
    train_plan(config, plan, STEPS, device, || ())
}

pub fn train_plan(
    config: Gpt2Config,
    plan: &Plan,
    count: usize,
    device: Arc<dyn Device>,
    mut mark: impl FnMut(),
) -> Result<Trained, TrainError> {
    let model: Arc<dyn Model> = Arc::new(Gpt2::new(config));
    let rank = Arc::new(Rank::recording(&plan.mesh, 0)?);
    let mut trainer = Trainer::new(model, plan, rank, device)?;
    let mut steps = Vec::new();
    mark();
    for step in 0..count {
        let report = trainer.step(&batch(&config, SAMPLES, step))?;
        steps.push([report.loss, report.grad_norm]);
        mark();
    }
    Ok(Trained { steps, state: merged(&[trainer.state()?])? })
}

impl Trained {
    /// Holds it against another run, as [`assert_same`] does.
    #[track_caller]
    pub fn assert_same(&self, what: &str, want: &Self) {
        assert_same(what, self, want);
    }
}

/// The state of a run from those of its ranks.
fn merged(ranks: &[TrainState]) -> Result<BTreeMap<StateKey, Vec<f32>>, TrainError> {
    let whole = WholeState::merge(ranks)?;
    Ok(whole.keys().map(|key| (key.clone(), whole.vector(key).unwrap_or_default().to_vec())).collect())
}

fn on_cuda(config: Gpt2Config, numerics: Numerics, products: Products, order: Order) -> Option<Trained> {
    let device = Arc::new(CudaDevice::new(driver(order)?, products).unwrap());
    Some(train(config, numerics, device).unwrap_or_else(|error| panic!("{order:?}: {error}")))
}

/// The same, but for the loss, which has a logarithm in f64 that CUDA and the CPU may round differently.
#[track_caller]
fn assert_same(what: &str, got: &Trained, want: &Trained) {
    for (step, (got, want)) in got.steps.iter().zip(&want.steps).enumerate() {
        assert_eq!(got[1].to_bits(), want[1].to_bits(), "{what}: the norm of step {step}: {} and {}", got[1], want[1]);
        assert!((got[0] / want[0] - 1.0).abs() < 1e-14, "{what}: the loss of step {step}: {} and {}", got[0], want[0]);
    }
    assert_eq!(got.state.len(), want.state.len());
    for ((key, got), (_, want)) in got.state.iter().zip(&want.state) {
        let other = got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(other, None, "{what}: the first element of {key:?} that differs");
    }
}

const CANONICAL: Numerics = Numerics::Canonical { blocks: 4 };

#[test]
fn canonical_steps_have_the_cpus_bits() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    let want = train(small(), CANONICAL, Cpu::device()).unwrap();
    assert!(want.steps[0] != want.steps[1] && want.state.len() > 20, "it trains");
    for order in (0..orders()).map(Order::Seeded).chain([Order::AsQueued]) {
        let Some(got) = on_cuda(small(), CANONICAL, Products::OfTheCpu, order) else { return };
        assert_same(&format!("{order:?}"), &got, &want);
    }
}

#[test]
fn fast_steps_have_the_cpus_bits_with_its_products_and_are_near_them_with_the_librarys() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    let want = train(small(), Numerics::Fast, Cpu::device()).unwrap();
    let Some(got) = on_cuda(small(), Numerics::Fast, Products::OfTheCpu, Order::Seeded(3)) else { return };
    assert_same("fast numerics", &got, &want);
    let Some(got) = on_cuda(small(), Numerics::Fast, Products::OfTheLibrary, Order::Seeded(4)) else { return };
    for (got, want) in got.steps.iter().zip(&want.steps) {
        assert!(got.iter().zip(want).all(|(got, want)| (got / want - 1.0).abs() < 1e-5), "{got:?} and {want:?}");
    }
}

#[test]
fn steps_with_products_of_low_precision_have_the_cpus_bits() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    let on = |products, order, precision| {
        let device = CudaDevice::with_precision(driver(order)?, products, precision).unwrap();
        Some(Arc::new(device))
    };
    let [bf16, tf32] = [(Precision::Bf16, 1e-2), (Precision::Tf32, 1e-2 / 8.0)];
    let cases = [(bf16, CANONICAL), (bf16, Numerics::Fast), (tf32, CANONICAL), (tf32, Numerics::Fast)];
    for ((precision, most), numerics) in cases {
        let want = train(small(), numerics, Arc::new(Cpu::new(precision))).unwrap();
        let Some(device) = on(Products::OfTheCpu, Order::Seeded(5), precision) else { return };
        assert_same(&format!("products of {precision:?}"), &train(small(), numerics, device).unwrap(), &want);
        let Some(device) = on(Products::OfTheLibrary, Order::Seeded(6), precision) else { return };
        let got = train(small(), numerics, device).unwrap();
        for (got, want) in got.steps.iter().zip(&want.steps) {
            assert!(got.iter().zip(want).all(|(got, want)| (got / want - 1.0).abs() < most), "{got:?} and {want:?}");
        }
    }
}

/// LAMB, Adafactor, Muon and 8-bit Adam: one rank, matrices cut over two, and states cut over two.
#[test]
fn every_update_rule_has_the_cpus_bits() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    let config = Gpt2Config { vocab_size: 62, num_heads: 4, ffn_hidden_size: 48, seq_len: 12, ..small() };
    let relative = Adafactor { weight_decay: 0.1, ..Adafactor::default() };
    let rules: [Rule; 5] = [
        Lamb::default().into(),
        relative.into(),
        Adafactor { relative_step: false, ..relative }.into(),
        Rule::with_muon(Muon::default(), AdamW::default()),
        Rule::with_adam8bit(Adam8bit { block: 100, ..Adam8bit::default() }),
    ];
    // Each rule on two of them, in a sweep on all.
    for (turn, rule) in rules.into_iter().enumerate() {
        let plan = |mesh: &str, stage, micros| Plan {
            mesh: mesh.parse().unwrap(),
            zero: Zero { stage, group: None },
            optimizer: rule.clone(),
            global_batch_size: SAMPLES,
            num_microbatches: Some(micros),
            numerics: CANONICAL,
            ..Plan::default()
        };
        let want = train_with(config, &plan("dp=1", ZeroStage::Off, 2), Cpu::device()).unwrap();
        for (mesh, stage, micros) in [
            ("tp=2", ZeroStage::Off, 2),
            ("dp=1", ZeroStage::Off, 2),
            ("dp=2", ZeroStage::Weights, 1),
            ("dp=2", ZeroStage::States, 1),
        ]
        .into_iter()
        .sampled_in_turn(2, turn)
        {
            let Some(got) = train_mesh(config, &plan(mesh, stage, micros), Devices::Shared, 11) else { return };
            assert_same(&format!("{} on {mesh}, {stage:?}", rule.name()), &got, &want);
        }
    }
}

#[test]
fn tiny_has_the_cpus_bits() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    // Its first step has all sizes; `.ci/nightly emulated` trains longer.
    let plan = Plan { global_batch_size: SAMPLES, num_microbatches: Some(2), numerics: CANONICAL, ..Plan::default() };
    let run = |device| train_plan(tiny(), &plan, if sweeps() { STEPS } else { 1 }, device, || ()).unwrap();
    let Some(driver) = driver(Order::Seeded(7)) else { return };
    let got = run(Arc::new(CudaDevice::new(driver, Products::OfTheCpu).unwrap()));
    assert_same("tiny", &got, &run(Cpu::device()));
}

/// States, gradients and activations in pinned memory of the host, on one rank. The most memory is what a dry run
/// predicts.
#[test]
fn offloaded_steps_have_the_cpus_bits() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    let want = train(small(), CANONICAL, Cpu::device()).unwrap();
    let plan = offloading();
    let predicted = predict(&(Arc::new(Gpt2::new(small())) as Arc<dyn Model>), &plan, 0).unwrap();
    for seed in 0..orders().min(5) {
        let Some(driver) = driver(Order::Seeded(seed)) else { return };
        let device = Arc::new(CudaDevice::new(driver, Products::OfTheCpu).unwrap());
        let got = train_with(small(), &plan, device.clone()).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert_same(&format!("seed {seed}"), &got, &want);
        assert_eq!(device.meter().peak(), predicted.memory, "seed {seed}");
    }
    assert!(predicted.offloaded.written > 0 && predicted.offloaded.read > predicted.offloaded.written / 2);
}

/// A plan of [`small`] that offloads all that can be.
pub fn offloading() -> Plan {
    let offload = Offload { optimizer: true, gradients: true, activations: true, samples: false, to: None };
    let plan = Plan { global_batch_size: SAMPLES, num_microbatches: Some(2), numerics: CANONICAL, ..Plan::default() };
    Plan { offload: Some(offload), ..plan }
}

/// What ranks have of devices.
#[derive(Clone, Copy, Debug)]
enum Devices {
    /// All of one.
    Shared,
    /// Two in turn, which are peers.
    Peers,
    /// Two in turn, whose memory copies alone reach.
    Apart,
}

/// Steps of a plan on a mesh of ranks, in orders of streams that are drawn from `seed`. The bytes on the wire and the
/// most memory are those that a dry run predicts. None without g++.
fn train_mesh(config: Gpt2Config, plan: &Plan, devices: Devices, seed: u64) -> Option<Trained> {
    let model: Arc<dyn Model> = Arc::new(Gpt2::new(config));
    let drivers = match devices {
        Devices::Shared => vec![driver(Order::Seeded(seed))?],
        Devices::Peers => drivers(Order::Seeded(seed), 2, |_, _| true)?,
        Devices::Apart => drivers(Order::Seeded(seed), 2, |_, _| false)?,
    };
    let ranks = World::threads(&plan.mesh).run(|world| {
        let driver = drivers[world.rank() % drivers.len()].clone();
        let device = Arc::new(CudaDevice::new(driver, Products::OfTheCpu)?);
        let rank = Arc::new(Rank::new(&plan.mesh, world.communicator().clone())?);
        let predicted = predict(&model, plan, rank.world_rank())?;
        let mut trainer = Trainer::new(model.clone(), plan, rank, device.clone())?;
        let mut steps = Vec::new();
        for step in 0..STEPS {
            let report = trainer.step(&batch(&config, SAMPLES, step).part(trainer.samples())?)?;
            steps.push([report.loss, report.grad_norm]);
            assert_eq!(report.records, predicted.records, "rank {}", world.rank());
            assert_eq!(device.meter().peak(), predicted.memory, "rank {}", world.rank());
        }
        Ok::<_, TrainError>((steps, trainer.state()?))
    });
    let (mut steps, states): (Vec<_>, Vec<_>) =
        ranks.unwrap_or_else(|error| panic!("{}: {error}", plan.mesh)).into_iter().unzip();
    Some(Trained { steps: steps.swap_remove(0), state: merged(&states).unwrap() })
}

/// Ranks that share a device, and ranks on two, against one rank of the CPU: gradients, norms, weights and states.
#[test]
fn meshes_have_the_bits_of_one_cpu() {
    if level() < Level::Avx2 {
        return eprintln!("left out: this CPU has no fused multiply-add, and other bits");
    }
    // Sizes that the degrees divide; two samples for the two ranks of dp.
    let config = Gpt2Config { vocab_size: 62, num_heads: 4, ffn_hidden_size: 48, seq_len: 12, ..small() };
    let want = train(config, CANONICAL, Cpu::device()).unwrap();
    let meshes = ["dp=2", "tp=2", "pp=2", "dp=2,tp=2,pp=2"].map(|mesh| (mesh, ZeroStage::Off, Devices::Shared));
    let two = [
        ("dp=2", ZeroStage::Off, Devices::Peers),
        ("tp=2", ZeroStage::Off, Devices::Apart),
        ("pp=2", ZeroStage::Off, Devices::Apart),
        ("dp=2", ZeroStage::Weights, Devices::Peers),
        ("dp=2,tp=2,pp=2", ZeroStage::Off, Devices::Peers),
        ("dp=2,tp=2,pp=2", ZeroStage::Off, Devices::Apart),
    ];
    let zero =
        [ZeroStage::States, ZeroStage::Gradients, ZeroStage::Weights].map(|zero| ("dp=2", zero, Devices::Shared));
    for (turn, (mesh, stage, devices)) in meshes.into_iter().chain(two).chain(zero).enumerate() {
        let mesh: Mesh = mesh.parse().unwrap();
        let micros = if mesh.degree(Axis::Dp) == 2 { 1 } else { 2 };
        let zero = Zero { stage, group: None };
        let plan = Plan { mesh, zero, global_batch_size: SAMPLES, numerics: CANONICAL, ..Plan::default() };
        let plan = Plan { num_microbatches: Some(micros), ..plan };
        for seed in [0, 100].into_iter().sampled_in_turn(2, turn) {
            let Some(got) = train_mesh(config, &plan, devices, seed) else { return };
            assert_same(&format!("{}, {stage:?}, {devices:?}, seed {seed}", plan.mesh), &got, &want);
        }
    }
}
