//! This machine as a cluster of one host: its cores, as steps of small models find them.
//!
//! ```text
//! as many ranks as cores train small models ─ profile ─▶ rates of products, of packing their operands, of attention and
//!                                                         of other operations, seconds between operations, the update
//! one rank with all cores ─▶ how far free cores help     sums of buffers ─▶ latency and rate of collectives
//! ```
//!
//! All cores are busy at once, so that cores which are two threads of one, or share a cache or a limit of power, are
//! measured as a run finds them. Of equal steps the median counts: they are a tenth as long as steps that one trains,
//! and where a core's speed changes within a second, the fastest of short steps is faster than any long one. It takes a
//! few seconds, on a machine that does nothing else; [`Disturbance`] says whether it did.

use crate::cluster::{Card, Cluster, Cores};
pub use crate::disturbance::Disturbance;
use crate::disturbance::Watch;
use crate::error::PlanError;
use crate::plan::Keys;
use crate::table::configured;
use meshwork_core::profile::{Class, Detail, Span};
use meshwork_core::{Buffer, CommError, Group, Rank, ReduceOp, RunError, World, pool};
use meshwork_nn::Batch;
use meshwork_train::config::Config;
use meshwork_train::profile::{Probe, Profiler, SliceKind, slices};
use meshwork_train::{Devices, TrainError, Trainer, memory_left};
use std::sync::Arc;
use std::time::Instant;

/// Hidden size, heads, tokens of a sequence and sequences of a rank, of two models with the same weights: in products
/// of few rows packing takes a third of the time.
pub const MODELS: [[usize; 4]; 2] = [[512, 8, 64, 1], [512, 8, 256, 2]];

/// The same of models that take a tenth of a second: weights that stay in a core's cache are packed faster.
pub const TINY: [[usize; 4]; 2] = [[128, 4, 32, 1], [128, 4, 128, 2]];

/// Layers of each model.
const LAYERS: usize = 2;

/// Steps that are measured of each model, after one that is not.
const STEPS: usize = 6;

/// Elements of the sums of buffers: of the latency, and of the rate.
const SUMS: [usize; 2] = [1, 1 << 20];

/// Sums of each.
const TIMES: usize = 40;

/// Steps as measured, each by its slowest rank.
#[derive(Debug)]
pub struct Steps {
    /// Seconds of the median.
    pub median: f64,
    /// How many times as long as the fastest the slowest took.
    pub spread: f64,
    /// Every rank's spans of the median.
    spans: Vec<Vec<Span>>,
}

/// Trains a configuration for `count` steps after a first one, every rank a thread, on samples of zeros. Nothing is
/// written.
///
/// # Errors
/// A configuration that has no plan; a step that fails.
pub fn steps(config: &Config, count: usize, profiled: bool) -> Result<Steps, PlanError> {
    let (model, plan) = (config.model(), config.plan()?);
    let devices = Devices::cpu(config.training.matmul_dtype.precision());
    let profiler = Profiler::follow(count as u64 + 1, count as u64);
    let ends = config.world().run(|world: Group| {
        let probe = if profiled { profiler.probe(&**world.communicator()) } else { Probe::off() };
        let rank = Arc::new(Rank::new(&plan.mesh, probe.communicator(world.communicator().clone()))?);
        let device = probe.device(devices.rank(world.communicator().clone()).map_err(TrainError::from)?.device);
        let mut trainer = Trainer::new(model.clone(), &plan, rank.clone(), device)?;
        let batch = Batch::blank(&model.fields(), trainer.samples().len());
        let mut times = Vec::new();
        for step in 0..=count {
            let begun = Instant::now();
            probe.step(step as u64 + 1, || trainer.observed_step(&batch, |event| probe.observe(event)))?;
            times.push(begun.elapsed().as_secs_f64());
        }
        Ok::<_, TrainError>((times.split_off(1), probe.track(&rank).map_or(Vec::new(), |track| track.spans)))
    })?;
    let (times, spans): (Vec<Vec<f64>>, Vec<Vec<Span>>) = ends.into_iter().unzip();
    let each: Vec<f64> = (0..count).map(|step| times.iter().map(|of_rank| of_rank[step]).fold(0.0, f64::max)).collect();
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by(|&a, &b| each[a].total_cmp(&each[b]));
    let at = |place: usize| order.get(place).map_or(0.0, |&step| each[step]);
    let (fastest, slowest) = (at(0), at(count.saturating_sub(1)));
    let median = order.get(count / 2).copied().unwrap_or_default();
    let spans = spans.into_iter().map(|of_rank| of_step(of_rank, median)).collect();
    Ok(Steps { median: at(count / 2), spread: slowest / fastest, spans })
}

/// The spans of a step, the first of which has number 0.
fn of_step(mut spans: Vec<Span>, number: usize) -> Vec<Span> {
    let step = spans.iter().filter(|span| span.class == Class::Step).nth(number).map(|step| step.start..=step.end);
    spans.retain(|span| step.as_ref().is_some_and(|step| step.contains(&span.start) && step.contains(&span.end)));
    spans
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or_default()
}

/// An amount, such as bytes, and the nanoseconds that it took.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    amount: f64,
    nanos: f64,
}

impl Spent {
    fn add(&mut self, amount: f64, nanos: u64) {
        self.amount += amount;
        self.nanos += nanos as f64;
    }

    /// Amount a second.
    fn rate(self) -> f64 {
        if self.nanos > 0.0 { self.amount / (self.nanos * 1e-9) } else { f64::INFINITY }
    }
}

/// Sums over timed products for a least-squares fit of seconds = operations / rate + packed elements · seconds of each.
/// The weight of a product is one over its time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Products {
    nanos: f64,
    flops: f64,
    packed: f64,
    flops_squared: f64,
    both: f64,
    packed_squared: f64,
}

impl Products {
    /// A product of these extents, `[m, k]` by `[k, n]`, and the nanoseconds that it took.
    pub fn add(&mut self, [m, n, k]: [usize; 3], nanos: u64) {
        let (right, nanos) = (n as f64 * k as f64, nanos.max(1) as f64);
        let flops = 2.0 * m as f64 * right;
        self.nanos += nanos;
        self.flops += flops;
        self.packed += right;
        self.flops_squared += flops * flops / nanos;
        self.both += flops * right / nanos;
        self.packed_squared += right * right / nanos;
    }

    /// Operations a second, and seconds in which an element of the right operand is packed; never less than none.
    pub fn rates(&self) -> [f64; 2] {
        let Self { flops, packed, flops_squared, both, packed_squared, .. } = *self;
        let all = flops_squared * packed_squared - both * both;
        let pack = if all > 0.0 { ((flops_squared * packed - both * flops) / all).max(0.0) } else { 0.0 };
        [1e9 * flops_squared / (flops - both * pack), 1e-9 * pack]
    }
}

/// The time of ranks by what they did.
#[derive(Clone, Debug, Default)]
struct Work {
    products: Products,
    /// Operations.
    attention: Spent,
    /// Bytes of other operations.
    moved: Spent,
    /// Operations of the device, with the time between them.
    launches: Spent,
    /// Steps, with the time outside of forward and backward.
    update: Spent,
    /// Nanoseconds of waits for other ranks.
    waits: f64,
}

impl Work {
    /// Adds the spans of all ranks.
    fn add(&mut self, spans: &[Vec<Span>]) {
        let ranks: Vec<&[Span]> = spans.iter().map(Vec::as_slice).collect();
        for (spans, slices) in spans.iter().zip(slices(&ranks)) {
            let actions: Vec<&Span> = spans.iter().filter(|span| span.class == Class::Action).collect();
            let inside = |at: u64| actions.iter().any(|action| (action.start..action.end).contains(&at));
            self.update.amount += spans.iter().filter(|span| span.class == Class::Step).count() as f64;
            for slice in slices {
                let nanos = slice.duration();
                match (slice.kind, slice.span.class) {
                    (SliceKind::Waiting, _) => self.waits += nanos as f64,
                    (SliceKind::Hidden, _) | (_, Class::Post | Class::Wait) => {}
                    _ if !inside(slice.start) => self.update.add(0.0, nanos),
                    (SliceKind::Rest, _) => self.launches.add(0.0, nanos),
                    (_, class) => {
                        self.launches.amount += 1.0;
                        match (class, &slice.span.detail) {
                            (Class::Product, Detail::Product(extents)) => self.products.add(*extents, nanos),
                            (Class::Attention, _) => self.attention.add(slice.span.flops as f64, nanos),
                            _ => self.moved.add(slice.span.bytes as f64, nanos),
                        }
                    }
                }
            }
        }
    }

    /// Seconds of all ranks, without waits and communication.
    fn seconds(&self) -> f64 {
        let others = [self.attention, self.moved, self.launches, self.update];
        1e-9 * (self.products.nanos + others.iter().map(|spent| spent.nanos).sum::<f64>())
    }
}

/// Measures this machine by models of these sizes, usually [`MODELS`]: its [`pool::threads`] as the cards of a cluster,
/// and what disturbed it. The last model has the longest operations: all but products are measured by it alone, because
/// its update is bound by memory, and free cores help its operations as they do those of models that one trains.
/// `progress` hears what is done, how many, and of how many.
///
/// # Errors
/// A step that fails.
pub fn measure(
    models: &[[usize; 4]],
    progress: &mut dyn FnMut(&str, usize, usize),
) -> Result<(Cluster, Disturbance), PlanError> {
    let (cores, watch) = (pool::threads(), Watch::begin());
    let (mut all, mut largest) = (Work::default(), Work::default());
    let (mut alone, mut parameters, mut spread) = (0.0, 1.0, 1.0_f64);
    for (at, &sizes) in models.iter().enumerate() {
        progress("training small models", at, models.len());
        let config = model(sizes, cores)?;
        let run = steps(&config, STEPS, true)?;
        all.add(&run.spans);
        if at + 1 == models.len() {
            largest.add(&run.spans);
            let one = steps(&model(sizes, 1)?, STEPS, false)?;
            alone = one.median;
            parameters = meshwork_train::plan::predict(&config, 0)?.parameters as f64;
            spread = run.spread.max(one.spread);
        }
    }
    progress("training small models", models.len(), models.len());
    let busy = largest.seconds() / largest.update.amount;
    let each = largest.update.nanos * 1e-9 / largest.update.amount / parameters;
    let uneven = (largest.waits * 1e-9 / largest.seconds()).clamp(0.0, 1.0);
    let help = (busy / alone).clamp(1.0, cores as f64);
    let [latency, link] = if cores > 1 { sums(&World::Threads(cores))? } else { [0.0, 0.0] };
    let (bandwidth, [peak, pack]) = (largest.moved.rate(), all.products.rates());
    let link = if cores > 1 { link } else { bandwidth };
    let memory = memory_left().map_or(f64::MAX.sqrt(), |bytes| bytes as f64) / cores as f64;
    let constants = [
        ("attention", largest.attention.rate() / peak),
        ("packed_bytes", pack * bandwidth),
        ("launch", largest.launches.nanos * 1e-9 / largest.launches.amount),
        ("latency", latency),
        ("far_latency", latency),
        ("optimizer", each * bandwidth),
    ];
    let disturbance = watch.end(spread);
    let cluster = Cluster {
        name: "this machine".into(),
        hosts: 1,
        cards_per_host: cores,
        card: Card { name: "core".into(), memory, bandwidth, bf16: peak, tf32: peak, f32: peak, units: 1.0 },
        inside: link,
        between: 0.0,
        host: bandwidth,
        price: None,
        source: format!(
            "measured by `cargo run --release --example plan -- --measure FILE`, all cores busy; {disturbance}"
        ),
        cores: Some(Cores { count: cores, help, uneven, processes: 1 }),
        constants: constants.map(|(name, value)| (name.to_owned(), value)).into(),
    };
    Ok((cluster, disturbance))
}

/// A model of these sizes over `dp` ranks.
fn model([hidden, heads, tokens, samples]: [usize; 4], dp: usize) -> Result<Config, PlanError> {
    let keys: Keys = [
        ("model.vocab_size", 256),
        ("model.num_layers", LAYERS),
        ("model.hidden_size", hidden),
        ("model.num_heads", heads),
        ("model.seq_len", tokens),
        ("parallelism.dp", dp),
        ("training.global_batch_size", samples * dp),
        ("training.micro_batch_size", samples),
    ]
    .map(|(key, value)| (key.to_owned(), toml::Value::Integer(value as i64)))
    .into();
    configured(&keys)
}

/// The same cluster with what sums between processes take. Every process of `world` calls it, and has one rank of it.
///
/// # Errors
/// A sum that fails.
pub fn between(world: &World, cluster: &Cluster) -> Result<Cluster, PlanError> {
    let [latency, link] = sums(world)?;
    let mut cluster = Cluster { between: link.min(cluster.inside), ..cluster.clone() };
    cluster.constants.insert("far_latency".to_owned(), latency);
    Ok(cluster)
}

/// Seconds of a sum of almost nothing over all ranks, and bytes a second that each sends in a long one: medians.
fn sums(world: &World) -> Result<[f64; 2], RunError> {
    let all = world.run(|world: Group| {
        let mut found = [0.0; 2];
        for (seconds, elements) in found.iter_mut().zip(SUMS) {
            let mut buffer = Buffer::from_slice(&vec![1.0f32; elements]);
            let mut times = Vec::new();
            for _ in 0..TIMES {
                let begun = Instant::now();
                buffer = world.all_reduce(buffer, ReduceOp::Max)?;
                times.push(begun.elapsed().as_secs_f64());
            }
            *seconds = median(times);
        }
        // To all members but one, twice: a sum scatters and gathers.
        let [short, long] = found;
        let bytes = 2.0 * (SUMS[1] * size_of::<f32>()) as f64 * (world.size() - 1) as f64 / world.size() as f64;
        Ok::<_, CommError>([short, bytes / (long - short).max(1e-9)])
    })?;
    let of = |at: usize| all.iter().map(move |found| found[at]);
    Ok([of(0).fold(0.0, f64::max), of(1).fold(f64::INFINITY, f64::min)])
}
