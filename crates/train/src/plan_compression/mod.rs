//! Where compression pays: what `--steps 0` and a profile say of it, at the rate of `comm.bandwidth`.
//!
//! What is sent comes from dry runs, the times from this machine: of matrix products, and of each scheme on values as large as those of the
//! run. The schedule is simulated with these times and messages. Sums of gradients follow it, but for what the last backward hides of their
//! first communication. Other communication is left out: it is the same with compression and without.
//!
//! More than 400 lines: a quarter are its tests.

use crate::Devices;
use crate::config::Config;
use crate::config::sections::Compress;
use crate::plan::{Kind, kinds, size};
use crate::profile::{Ceilings, Profile, Track};
use meshwork_compress::{CompressError, Compressor, Draws, Fold, PowerSgd, Scheme, Shape, SumMethod, wire_bytes};
use meshwork_core::profile::Class;
use meshwork_core::random;
use meshwork_core::{Buffer, DType, OpKind, Record};
use meshwork_engine::{TrainError, ZeroStage, dry_run};
use meshwork_pipeline::{CheckError, Costs, Schedule, simulate};
use meshwork_tensor::{Device, Error};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is tried at each place, besides what the configuration has there.
const SCHEMES: [&str; 6] = ["bf16", "fp8:e4m3", "quant:8/block256", "quant:4/block256", "topk:0.1", "topk:0.01"];
/// What is tried of gradients too: a message between stages has no factors to start from.
const FACTORS: [&str; 2] = ["powersgd:4", "powersgd:16"];

const NOTHING: &str = "none";
const NO_COSTS: &str = "a model has a beginning and an end";

/// Most elements that are compressed to measure a scheme; the time of more is in proportion.
const MEASURED: usize = 1 << 20;
/// Runs of which the fastest counts, and the time after which no further one starts.
const TRIES: usize = 5;
const ENOUGH: Duration = Duration::from_millis(20);

/// Bandwidths between which a limit is looked for, in bytes a second.
const SLOWEST: f64 = 1e3;
const FASTEST: f64 = 1e13;

/// What a step sends, and the time it takes to compress that.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Bytes of a message between stages: of an activation, and of its gradient.
    pub messages: [f64; 2],
    /// Seconds to compress, and to restore, each of them.
    pub codec: [[f64; 2]; 2],
    /// Bytes that sums of gradients send: in a first communication, which backward hides as far as it can, and after it.
    pub sums: [f64; 2],
    /// Seconds to compress and restore these.
    pub sum_codec: f64,
}

/// A step of a pipeline, but for what it sends.
#[derive(Clone, Debug)]
pub struct Computation {
    /// The schedule.
    pub schedule: Schedule,
    /// Seconds of forward and backward of each stage, for one micro-batch. A third is forward.
    pub seconds: Vec<f64>,
}

impl Computation {
    /// Seconds of a step with this traffic, where a rank sends so many bytes a second.
    ///
    /// # Errors
    /// As [`simulate()`].
    pub fn step(&self, traffic: &Traffic, bandwidth: f64) -> Result<f64, CheckError> {
        let last = self.seconds.len().saturating_sub(1);
        let is_sent = |stage: usize| self.schedule.rank_of(stage, 0) != self.schedule.rank_of(stage + 1, 0);
        // Forward compresses what it sends on, and restores what comes; the gradient of the input goes the other way.
        let [activation, gradient] = traffic.codec;
        let busy = |stage: usize, at_start: f64, at_end: f64| {
            let start = if stage > 0 && is_sent(stage - 1) { at_start } else { 0.0 };
            let end = if stage < last && is_sent(stage) { at_end } else { 0.0 };
            self.seconds[stage] / 3.0 + start + end
        };
        let costs = Costs {
            forward: (0..=last).map(|stage| busy(stage, activation[1], activation[0])).collect(),
            input_gradient: (0..=last).map(|stage| busy(stage, gradient[0], gradient[1])).collect(),
            weight_gradient: self.seconds.iter().map(|seconds| seconds / 3.0).collect(),
            transfer: traffic.messages.map(|bytes| bytes / bandwidth),
            overlap: true,
        };
        let hidden = self.seconds.iter().map(|seconds| seconds * 2.0 / 3.0).fold(f64::INFINITY, f64::min);
        let [first, then] = traffic.sums.map(|bytes| bytes / bandwidth);
        Ok(simulate(&self.schedule, &costs)?.span() + (first - hidden).max(0.0) + then + traffic.sum_codec)
    }

    /// The bandwidth below which a step takes less time with `compressed` than with `plain`; `None`: it never does.
    ///
    /// # Errors
    /// As [`simulate()`].
    pub fn pays_below(&self, plain: &Traffic, compressed: &Traffic) -> Result<Option<f64>, CheckError> {
        let pays = |bandwidth| Ok(self.step(compressed, bandwidth)? < self.step(plain, bandwidth)?);
        let [mut slow, mut fast] = [SLOWEST, FASTEST];
        if !pays(slow)? {
            return Ok(None);
        }
        if pays(fast)? {
            return Ok(Some(f64::INFINITY));
        }
        while fast / slow > 1.001 {
            let middle = (slow * fast).sqrt();
            *(if pays(middle)? { &mut slow } else { &mut fast }) = middle;
        }
        Ok(Some(slow))
    }
}

/// A place that is compressed by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Activations,
    ActivationGradients,
    Gradients,
}

impl Place {
    const ALL: [Self; 3] = [Self::Activations, Self::ActivationGradients, Self::Gradients];

    fn key(self) -> &'static str {
        match self {
            Self::Activations => "activations",
            Self::ActivationGradients => "activation_gradients",
            Self::Gradients => "gradients",
        }
    }

    fn of(self, config: &Config) -> &str {
        match self {
            Self::Activations => &config.compress.activations,
            Self::ActivationGradients => &config.compress.activation_gradients,
            Self::Gradients => &config.compress.gradients,
        }
    }
}

/// The configuration with these schemes alone: no feedback, from the first step on.
fn with(config: &Config, scheme: impl Fn(Place) -> String) -> Config {
    let mut config = config.clone();
    let [activations, activation_gradients, gradients] = Place::ALL.map(scheme);
    config.compress = Compress {
        activations,
        activation_gradients,
        gradients,
        weights: NOTHING.to_owned(),
        dispatch: NOTHING.to_owned(),
        dispatch_gradients: NOTHING.to_owned(),
        feedback: "none".to_owned(),
        share_indices: false,
        aqsgd: false,
        start_step: 1,
        ..config.compress
    };
    config
}

fn exact(config: &Config) -> Config {
    with(config, |_| NOTHING.to_owned())
}

/// Seconds to compress and to restore a value: the best of several runs, on this machine.
fn measured(device: &dyn Device, scheme: &Scheme, shape: Shape) -> Result<[f64; 2], Error> {
    if *scheme == Scheme::Values(meshwork_compress::Values::F32) || shape.is_empty() {
        return Ok([0.0; 2]);
    }
    // As many whole rows as there is time for.
    let rows = (MEASURED / shape.cols().max(1)).clamp(1, shape.rows());
    let part = Shape::matrix(rows, shape.cols().min(MEASURED)).map_err(failed)?;
    let share = shape.len() as f64 / part.len() as f64;
    let mut values = vec![0.0_f32; part.len()];
    random::fill_uniform(random::key(0, "the time of compression"), 0, &mut values);
    values.iter_mut().for_each(|value| *value -= 0.5);
    let x = device.upload(&Buffer::from_slice(&values))?;
    let mut message = device.alloc(DType::U8, wire_bytes(scheme, part).map_err(failed)?)?;
    let mut out = device.alloc(DType::F32, part.len())?;
    let kernels = device.compression()?;
    let draws = Draws::new(0, "the time of compression", 0);
    let packed = best(|| kernels.pack(scheme, part, draws, &x, &mut message, 0))?;
    let restored = best(|| kernels.unpack(scheme, part, &message, Fold::Replace, &mut out, 0))?;
    Ok([packed * share, restored * share])
}

/// Seconds in which PowerSGD makes the factors of each element of matrices with these columns, and joins them.
fn factoring(device: &dyn Device, of: PowerSgd, cols: usize) -> Result<f64, Error> {
    let rows = (MEASURED / cols.max(1)).clamp(1, cols.max(1));
    let shape = Shape::matrix(rows, cols.max(1)).map_err(failed)?;
    of.check(shape).map_err(failed)?;
    let mut values = vec![0.0_f32; shape.len()];
    random::fill_uniform(random::key(0, "the time of compression"), 0, &mut values);
    let (m, [of_p, of_q]) = (device.upload(&Buffer::from_slice(&values))?, of.factors(shape));
    let (mut p, mut q) = (device.zeros(DType::F32, of_p)?, device.zeros(DType::F32, of_q)?);
    let (mut out, kernels) = (device.alloc(DType::F32, shape.len())?, device.compression()?);
    let draws = Draws::new(0, "the time of compression", 0);
    let seconds = best(|| {
        kernels.left_factor(of, shape, draws, &m, &mut q, &mut p)?;
        kernels.right_factor(of, shape, &m, &mut p, &mut q)?;
        let factors = [p.clone(), q.clone()];
        kernels.join(of, shape, &factors, 2, &mut out)
    })?;
    Ok(seconds / shape.len() as f64)
}

fn failed(source: CompressError) -> Error {
    Error::Compress { op: "compression", source: Box::new(source) }
}

fn best(mut work: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    let (began, mut best) = (Instant::now(), f64::INFINITY);
    for _ in 0..TRIES {
        let start = Instant::now();
        work()?;
        best = best.min(start.elapsed().as_secs_f64());
        if began.elapsed() > ENOUGH {
            break;
        }
    }
    Ok(best)
}

/// How often a rank compresses and restores each element of a sum over `ranks`.
fn sum_work(scheme: &Scheme, scatters: bool, ranks: usize) -> [f64; 2] {
    let ranks = ranks as f64;
    match scheme.sum() {
        _ if scatters => [1.0, 1.0],
        SumMethod::ScatterGather(_) | SumMethod::AllReduceBf16 => [1.0 + 1.0 / ranks, 2.0],
        _ => [1.0, ranks],
    }
}

/// What compression is weighed by.
struct Weighing<'a> {
    config: &'a Config,
    device: Arc<dyn Device>,
    /// What ranks send without compression.
    exact: Vec<Kind>,
}

impl Weighing<'_> {
    /// The bytes of the longest message between stages without compression, the whole value that it is of, and its share of that.
    fn message(&self) -> (f64, Option<(Shape, f64)>) {
        let Config { parallelism, pipeline, training, .. } = self.config;
        let sends = self.exact.iter().flat_map(|kind| &kind.each.records).filter(|record| record.op == OpKind::Send);
        let Some(longest) = sends.max_by(|a, b| a.bytes().total_cmp(&b.bytes())) else { return (0.0, None) };
        let is_part = pipeline.scatter_gather && !parallelism.sequence_parallel;
        let elements = longest.elements * if is_part { parallelism.tp } else { 1 };
        let rows = training.micro_batch_size.max(1);
        let share = longest.elements as f64 / elements.max(1) as f64;
        (longest.bytes(), Shape::matrix(rows, elements / rows).ok().map(|shape| (shape, share)))
    }

    /// What crosses cuts with the schemes of `config`, and the time of compressing it.
    fn cuts(&self, config: &Config) -> Result<Traffic, TrainError> {
        let compress = config.plan()?.compress;
        let (bytes, shape) = self.message();
        let mut traffic = Traffic { messages: [bytes; 2], ..Traffic::default() };
        let Some((shape, share)) = shape else { return Ok(traffic) };
        for (at, scheme) in [compress.activations, compress.activation_gradients].into_iter().enumerate() {
            if Place::ALL[at].of(config) != NOTHING {
                traffic.messages[at] = share * wire_bytes(&scheme, shape).map_err(failed)? as f64;
                traffic.codec[at] = measured(&*self.device, &scheme, shape)?;
            }
        }
        Ok(traffic)
    }

    /// Adds the sums of the rank that sends most: to `plain` as they are, to `compressed` as `config` has them.
    fn sums(&self, config: &Config, plain: &mut Traffic, compressed: &mut Traffic) -> Result<(), TrainError> {
        let (kinds, plan) = (kinds(config, &config.mesh()?)?, config.plan()?);
        let scheme = &plan.compress.gradients;
        let bytes = |records: &[Record]| -> f64 { records.iter().map(Record::bytes).sum() };
        for (kind, exact) in kinds.iter().zip(&self.exact) {
            let [ours, theirs] = [kind, exact].map(|kind| collectives(&kind.each.records));
            let (new, old) = (beyond(&ours, &theirs), beyond(&theirs, &ours));
            let Some(longest) = old.iter().max_by_key(|record| record.elements) else { continue };
            if bytes(&old) <= plain.sums[0] {
                continue;
            }
            let elements: usize = old.iter().map(|record| record.elements).sum();
            if let Scheme::PowerSgd(of) = scheme {
                // Each bucket sums the factors P, which backward hides, and at the end of the step Q.
                let (first, then) = new.split_at(new.len().div_ceil(2));
                plain.sums = [bytes(&old), 0.0];
                compressed.sums = [bytes(first), bytes(then)];
                compressed.sum_codec = factoring(&*self.device, *of, config.model.hidden_size)? * elements as f64;
                continue;
            }
            let (shards, others): (Vec<_>, Vec<_>) = new.into_iter().partition(|record| record.op == OpKind::AllToAll);
            plain.sums = [bytes(&old), 0.0];
            compressed.sums = match bytes(&shards) {
                0.0 => [bytes(&others), 0.0],
                shards => [shards, bytes(&others)],
            };
            let times = measured(&*self.device, scheme, Shape::vector(longest.elements).map_err(failed)?)?;
            let work = sum_work(scheme, plan.zero.stage > ZeroStage::Off, longest.ranks);
            let each: f64 = times.iter().zip(work).map(|(seconds, often)| seconds * often).sum();
            compressed.sum_codec = each * elements as f64 / longest.elements as f64;
        }
        Ok(())
    }
}

fn collectives(records: &[Record]) -> Vec<Record> {
    records.iter().filter(|record| !matches!(record.op, OpKind::Send | OpKind::Recv)).cloned().collect()
}

/// What the calls of `all` have that those of `others` do not.
fn beyond(all: &[Record], others: &[Record]) -> Vec<Record> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let name = |record: &Record| format!("{record:?}");
    others.iter().for_each(|record| *counts.entry(name(record)).or_default() += 1);
    let is_new = |record: &&Record| match counts.get_mut(&name(record)) {
        Some(left) if *left > 0 => {
            *left -= 1;
            false
        }
        _ => true,
    };
    all.iter().filter(is_new).cloned().collect()
}

/// Seconds of forward and backward of each stage for one micro-batch, from the operations of its layers and the rate of this machine.
fn computation(config: &Config, device: &dyn Device) -> Result<Computation, TrainError> {
    let plan = config.plan()?;
    let rate = Ceilings::measure(device).flops.unwrap_or(f64::INFINITY);
    let costs = dry_run::costs(&config.model(), &plan)?;
    let [beginning, layers @ .., end] = &costs[..] else { return Err(Error::Backward(NO_COSTS.to_owned()).into()) };
    let mut layers = layers.iter();
    let mut flops: Vec<u64> = plan.partition.iter().map(|&count| layers.by_ref().take(count).sum()).collect();
    flops[0] += beginning;
    *flops.last_mut().expect("a partition has a stage") += end;
    let share = plan.micro_batch_size()? as f64 / config.parallelism.tp.max(1) as f64 / rate;
    Ok(Computation { schedule: plan.build_schedule()?, seconds: flops.iter().map(|&of| of as f64 * share).collect() })
}

/// What `--steps 0` says of each place and scheme; nothing without a bandwidth, or where nothing is sent that could be compressed.
///
/// # Errors
/// As [`dry_run::predict`].
pub fn report(config: &Config) -> Result<String, TrainError> {
    let bandwidth = config.comm.bandwidth;
    if bandwidth == 0.0 || config.mesh()?.world_size() == 1 {
        return Ok(String::new());
    }
    let device = Devices::open(config)?.alone()?;
    let exact = exact(config);
    let weighing = Weighing { config, device, exact: kinds(&exact, &exact.mesh()?)? };
    let computation = computation(&exact, &*weighing.device)?;
    let mut plain = weighing.cuts(&exact)?;
    let halved = with(config, |place| if place == Place::Gradients { "bf16" } else { NOTHING }.to_owned());
    if weighing.sums(&halved, &mut plain, &mut Traffic::default()).is_err() {
        plain.sums = [0.0; 2]; // refused, as every row says
    }
    let before = computation.step(&plain, bandwidth)?;
    let mut text = format!(
        "\ncompression, where a rank sends {} (comm.bandwidth): a step of {} without\n",
        rate(bandwidth),
        time(before)
    );
    for place in Place::ALL {
        let of_cuts = place != Place::Gradients;
        if of_cuts && plain.messages[0] == 0.0 || !of_cuts && config.mesh()?.data_degree() == 1 {
            continue;
        }
        let bytes = if of_cuts { plain.messages[0] } else { plain.sums[0] };
        let _ = writeln!(text, "  {}, {}", place.key(), if of_cuts { "each message" } else { "all sums" });
        let own = place.of(config);
        let factors = FACTORS.into_iter().filter(|_| !of_cuts);
        let tried = SCHEMES
            .into_iter()
            .chain(factors)
            .filter(|scheme| *scheme != own)
            .chain(Some(own).filter(|own| *own != NOTHING));
        for scheme in tried {
            let alone = with(config, |at| if at == place { scheme } else { NOTHING }.to_owned());
            let mut plain = plain.clone();
            let weighed = weighing.cuts(&alone).and_then(|mut traffic| {
                traffic.sums = plain.sums;
                if !of_cuts {
                    plain.sums = [0.0; 2];
                    weighing.sums(&alone, &mut plain, &mut traffic)?;
                }
                Ok(traffic)
            });
            let compressed = match weighed {
                Ok(compressed) => compressed,
                Err(TrainError::Plan(error)) => {
                    let _ = writeln!(text, "    {scheme:<20} is refused: {error}");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let at = Place::ALL.iter().position(|other| *other == place).unwrap_or(0);
            let (sent, codec) = match of_cuts {
                true => (compressed.messages[at], compressed.codec[at].iter().sum()),
                false => (compressed.sums.iter().sum(), compressed.sum_codec),
            };
            let pays = match computation.pays_below(&plain, &compressed)? {
                None => "never pays".to_owned(),
                Some(f64::INFINITY) => "always pays".to_owned(),
                Some(limit) => format!("pays below {}", rate(limit)),
            };
            let _ = writeln!(
                text,
                "    {scheme:<20} {} for {}, {} to compress and restore: {pays}; a step of {}",
                size(sent),
                size(bytes),
                time(codec),
                time(computation.step(&compressed, bandwidth)?)
            );
        }
    }
    text += "  Each place by itself, without feedback. Computation is that of ranks which have a machine like this one each; what is sent for \
             other reasons takes no time here.\n";
    Ok(text)
}

/// What a profile says of compression: its time, and the time of the bytes that it saved; nothing without a bandwidth or compression.
///
/// # Errors
/// As [`dry_run::predict`].
pub fn saved(profile: &Profile, config: &Config) -> Result<String, TrainError> {
    let (bandwidth, plan) = (config.comm.bandwidth, config.plan()?);
    let steps: BTreeSet<u64> = profile.tracks.iter().flat_map(Track::steps).collect();
    if bandwidth == 0.0 || !plan.compress.is_some() || steps.is_empty() {
        return Ok(String::new());
    }
    let bytes = |config: &Config| -> Result<Vec<f64>, TrainError> {
        let mut of_rank = vec![0.0; plan.mesh.world_size()];
        for kind in kinds(config, &config.mesh()?)? {
            let bytes: f64 = kind.each.records.iter().map(Record::bytes).sum();
            for rank in kind.ranks {
                of_rank[rank] = bytes;
            }
        }
        Ok(of_rank)
    };
    let (before, after) = (bytes(&exact(config))?, bytes(config)?);
    let less = before.iter().zip(&after).map(|(before, after)| before - after).fold(f64::NEG_INFINITY, f64::max);
    let spent = |track: &Track| -> f64 {
        let spans = track.spans.iter().filter(|span| span.class == Class::Compression);
        spans.map(|span| span.duration() as f64 / 1e9).sum::<f64>() / steps.len() as f64
    };
    let most = profile.tracks.iter().map(spent).fold(0.0, f64::max);
    Ok(format!(
        "Compression takes {} of a step on the rank where it takes longest, and at most {} less are sent by a rank: {} at {} \
         (comm.bandwidth), if nothing hides them.\n",
        time(most),
        size(less.max(0.0)),
        time(less.max(0.0) / bandwidth),
        rate(bandwidth)
    ))
}

/// Bytes a second.
fn rate(bytes: f64) -> String {
    let (unit, name) =
        [(1e9, "GB/s"), (1e6, "MB/s")].into_iter().find(|(unit, _)| bytes >= *unit).unwrap_or((1e3, "kB/s"));
    format!("{} {name}", three(bytes / unit))
}

fn time(seconds: f64) -> String {
    let (unit, name) =
        [(1.0, "s"), (1e-3, "ms")].into_iter().find(|(unit, _)| seconds >= *unit).unwrap_or((1e-6, "µs"));
    format!("{} {name}", three(seconds / unit))
}

/// A number with about three digits.
fn three(number: f64) -> String {
    let digits = if number >= 100.0 {
        0
    } else if number >= 10.0 {
        1
    } else {
        2
    };
    format!("{number:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork_pipeline::gpipe;

    /// Two stages of 3 s a micro-batch each.
    fn computation(micros: usize) -> Computation {
        Computation { schedule: gpipe(2, micros), seconds: vec![3.0; 2] }
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-3 * b.abs().max(1e-9), "{a} {b}");
    }

    #[test]
    fn a_message_delays_the_step_by_its_time_and_that_of_compressing_it() {
        let plain = Traffic { messages: [100e6, 50e6], ..Traffic::default() };
        // Fill and drain: m + 1 forwards and backwards, and a message each way.
        close(computation(4).step(&plain, 100e6).unwrap(), 5.0 * 3.0 + 1.0 + 0.5);
        let compressed = Traffic { messages: [10e6, 50e6], codec: [[0.2, 0.1], [0.0; 2]], ..plain.clone() };
        // Forwards of the first stage take 1.2 s and set the pace, the last one of the second takes 1.1.
        close(computation(4).step(&compressed, 100e6).unwrap(), 4.0 * 1.2 + 1.1 + 0.1 + 5.0 * 2.0 + 0.5);
        // It saves 90 MB and costs 0.9 s.
        close(computation(4).pays_below(&plain, &compressed).unwrap().unwrap(), 100e6);
    }

    #[test]
    fn backward_hides_the_first_communication_of_sums() {
        let plain = Traffic { sums: [100e6, 0.0], ..Traffic::default() };
        let of = |bandwidth| computation(1).step(&plain, bandwidth).unwrap();
        close(of(50e6), 6.0);
        close(of(25e6), 6.0 + 2.0);
        let compressed = Traffic { sums: [10e6, 10e6], sum_codec: 0.1, ..Traffic::default() };
        close(computation(1).step(&compressed, 10e6).unwrap(), 6.0 + 1.0 + 0.1);
        // With b MB/s, 100/b - 2 = 10/b + 0.1 where only the sums as they are stick out.
        close(computation(1).pays_below(&plain, &compressed).unwrap().unwrap(), 90e6 / 2.1);
    }

    #[test]
    fn what_saves_nothing_never_pays_and_what_costs_nothing_always_does() {
        let plain = Traffic { messages: [100.0; 2], ..Traffic::default() };
        let slower = Traffic { codec: [[0.1; 2]; 2], ..plain.clone() };
        assert_eq!(computation(2).pays_below(&plain, &slower).unwrap(), None);
        let free = Traffic { messages: [50.0; 2], ..Traffic::default() };
        let limit = computation(2).pays_below(&plain, &free).unwrap();
        assert!(limit.is_some_and(|limit| limit > 1e12), "{limit:?}");
    }

    fn config(toml: &str) -> Config {
        Config::from_toml(&format!("[model]\nseq_len = 16\n{toml}\n[comm]\nbandwidth = 1e9")).unwrap()
    }

    #[test]
    fn the_report_has_a_line_for_each_place_that_sends() {
        let both = report(&config("[parallelism]\ndp = 2\npp = 2\n[compress]\ngradients = 'sign'")).unwrap();
        for words in [
            "sends 1.00 GB/s",
            "  activations, each",
            "  activation_gradients, each",
            "  gradients, all",
            "    sign ",
            "  powersgd:4 ",
        ] {
            assert_eq!(both.matches(words).count(), 1, "{words}: {both}");
        }
        assert!(!both.contains("refused"), "{both}");
        let pipeline = report(&config("[parallelism]\npp = 2")).unwrap();
        assert!(pipeline.contains("  activations,") && !pipeline.contains("  gradients,"), "{pipeline}");
        assert_eq!(report(&config("")).unwrap(), "");
        let canonical = report(&config("[parallelism]\ndp = 2\n[training]\nnumerics = 'canonical'")).unwrap();
        assert!(canonical.contains("bf16                 is refused: ") && !canonical.contains("pays"), "{canonical}");
    }

    fn weighing<'a>(config: &'a Config, exact: &Config) -> Weighing<'a> {
        Weighing {
            config,
            device: Devices::open(config).unwrap().alone().unwrap(),
            exact: kinds(exact, &config.mesh().unwrap()).unwrap(),
        }
    }

    /// The bytes that a run sends.
    fn sent(config: &Config) -> f64 {
        let kinds = kinds(config, &config.mesh().unwrap()).unwrap();
        kinds.iter().flat_map(|kind| &kind.each.records).map(Record::bytes).sum()
    }

    #[test]
    fn bytes_are_those_of_the_run() {
        let config =
            config("[parallelism]\ndp = 2\npp = 2\n[compress]\nactivations = 'quant:4/row'\ngradients = 'quant:8'");
        let exact = exact(&config);
        let weighing = weighing(&config, &exact);
        let mut plain = weighing.cuts(&exact).unwrap();
        let mut compressed = weighing.cuts(&config).unwrap();
        let micros = config.pipeline.num_microbatches as f64;
        let saved = micros * (plain.messages[0] - compressed.messages[0]);
        let gradients = with(&config, |place| if place == Place::Gradients { "quant:8" } else { NOTHING }.to_owned());
        assert_eq!(sent(&exact) - sent(&config), saved + sent(&exact) - sent(&gradients));
        weighing.sums(&config, &mut plain, &mut compressed).unwrap();
        let total = |sums: [f64; 2]| sums.iter().sum::<f64>();
        // The first stage has more parameters; its ranks send about a quarter of 2n·4/2.
        let share = total(compressed.sums) / total(plain.sums);
        assert!(plain.sums[0] > 1e6 && share > 0.25 && share < 0.26, "{plain:?} {compressed:?}");
    }

    /// PowerSGD sums factors twice: what a run sends of them, in its two communications, and the time that they take.
    #[test]
    fn the_sums_of_factors_are_those_of_the_run() {
        let config = config("[parallelism]\ndp = 2\n[compress]\ngradients = 'powersgd:4'");
        let exact = exact(&config);
        let weighing = weighing(&config, &exact);
        let (mut plain, mut compressed) = Default::default();
        weighing.sums(&config, &mut plain, &mut compressed).unwrap();
        let total = |sums: [f64; 2]| sums.iter().sum::<f64>();
        close(total(plain.sums) - total(compressed.sums), sent(&exact) - sent(&config));
        // P of r columns beside the vectors, then Q of as many rows: of weights that are wider than high, both are of one order.
        let [first, then] = compressed.sums;
        assert!(then > 0.0 && first > 0.3 * then && first < 3.0 * then, "{compressed:?}");
        assert!(compressed.sum_codec > 0.0 && total(compressed.sums) < 0.2 * total(plain.sums), "{compressed:?}");
    }

    /// Gathers of weights and tokens of experts are left out of the weighing, and counted in what a profile says was saved.
    #[test]
    fn nothing_is_compressed_in_the_run_to_compare_with() {
        let config = config("[parallelism]\ndp = 2\nzero_stage = 3\n[compress]\nweights = 'quant:8'");
        assert!(config.plan().unwrap().compress.is_some() && !exact(&config).plan().unwrap().compress.is_some());
    }
}
