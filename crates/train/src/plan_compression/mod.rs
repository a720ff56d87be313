//! Where compression pays: what `--steps 0` and a profile say of it, at the rate of `comm.bandwidth`.
//!
//! What is sent comes from dry runs, the times from this machine: of matrix products, and of each scheme on values as
//! large as those of the run. The schedule is simulated with these times and messages (`computation.rs`). Sums of
//! gradients follow it, but for what the last backward hides of their first communication. Other communication is left
//! out: it is the same with compression and without.
//!
//! More than 400 lines: a quarter are its tests.

mod computation;
mod measured;

pub use computation::{Computation, Traffic};

use crate::Devices;
use crate::config::Config;
use crate::config::sections::Compress;
use crate::plan::{Kind, kinds, size};
use crate::profile::{Ceilings, Profile, Track};
use measured::{factoring, failed, measured};
use meshwork_compress::{Compressor, Scheme, Shape, SumMethod, wire_bytes};
use meshwork_core::profile::Class;
use meshwork_core::{OpKind, Record};
use meshwork_engine::{TrainError, ZeroStage, dry_run};
use meshwork_tensor::{Device, Error};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;

/// What is tried at each place, besides what the configuration has there.
const SCHEMES: [&str; 6] = ["bf16", "fp8:e4m3", "quant:8/block256", "quant:4/block256", "topk:0.1", "topk:0.01"];
/// What is tried of gradients too: a message between stages has no factors to start from.
const FACTORS: [&str; 2] = ["powersgd:4", "powersgd:16"];

const NOTHING: &str = "none";
const NO_COSTS: &str = "a model has a beginning and an end";

/// A place that is compressed by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Activations,
    ActivationGradients,
    Gradients,
    Weights,
    Dispatch,
    DispatchGradients,
}

impl Place {
    const ALL: [Self; 6] = [
        Self::Activations,
        Self::ActivationGradients,
        Self::Gradients,
        Self::Weights,
        Self::Dispatch,
        Self::DispatchGradients,
    ];

    fn key(self) -> &'static str {
        match self {
            Self::Activations => "activations",
            Self::ActivationGradients => "activation_gradients",
            Self::Gradients => "gradients",
            Self::Weights => "weights",
            Self::Dispatch => "dispatch",
            Self::DispatchGradients => "dispatch_gradients",
        }
    }

    fn of(self, config: &Config) -> &str {
        let compress = &config.compress;
        match self {
            Self::Activations => &compress.activations,
            Self::ActivationGradients => &compress.activation_gradients,
            Self::Gradients => &compress.gradients,
            Self::Weights => &compress.weights,
            Self::Dispatch => &compress.dispatch,
            Self::DispatchGradients => &compress.dispatch_gradients,
        }
    }

    /// What its bytes and seconds are counted for.
    fn unit(self) -> &'static str {
        match self {
            Self::Activations | Self::ActivationGradients => "each message",
            Self::Gradients => "all sums",
            Self::Weights => "the gathers of one forward or backward of a micro-batch",
            Self::Dispatch => "the exchanges of one forward of a micro-batch",
            Self::DispatchGradients => "those of its backward",
        }
    }

    /// The schemes that are tried here.
    fn tried(self) -> Vec<&'static str> {
        let schemes = SCHEMES.into_iter().filter_map(|scheme| match self {
            // A weight that is not sent would be zero.
            Self::Weights => Some(scheme).filter(|scheme| !scheme.starts_with("topk")),
            // Each token has a scale of its own.
            Self::Dispatch | Self::DispatchGradients => Some(scheme.trim_end_matches("/block256")),
            _ => Some(scheme),
        });
        schemes.chain(FACTORS.into_iter().filter(move |_| self == Self::Gradients)).collect()
    }

    /// Of some traffic its bytes, and the seconds of compressing and restoring them.
    fn part(self, traffic: &Traffic) -> (f64, f64) {
        let cut = |at: usize| (traffic.messages[at], traffic.codec[at].iter().sum());
        match self {
            Self::Activations => cut(0),
            Self::ActivationGradients => cut(1),
            Self::Gradients => (traffic.sums.iter().sum(), traffic.sum_codec),
            Self::Weights => (traffic.weights, traffic.weights_codec),
            Self::Dispatch => (traffic.tokens[0], traffic.tokens_codec[0]),
            Self::DispatchGradients => (traffic.tokens[1], traffic.tokens_codec[1]),
        }
    }
}

/// The configuration with these schemes alone: no feedback, from the first step on.
fn with(config: &Config, scheme: impl Fn(Place) -> String) -> Config {
    let mut config = config.clone();
    let [activations, activation_gradients, gradients, weights, dispatch, dispatch_gradients] = Place::ALL.map(scheme);
    config.compress = Compress {
        activations,
        activation_gradients,
        gradients,
        weights,
        dispatch,
        dispatch_gradients,
        feedback: "none".to_owned(),
        share_indices: false,
        aqsgd: false,
        start_step: 1,
        ..config.compress
    };
    config
}

/// The configuration with a scheme at one place.
fn alone(config: &Config, place: Place, scheme: &str) -> Config {
    with(config, |at| if at == place { scheme } else { NOTHING }.to_owned())
}

fn exact(config: &Config) -> Config {
    with(config, |_| NOTHING.to_owned())
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
    /// The bytes of the longest message between stages without compression, the whole value that it is of, and its
    /// share of that.
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

    /// Whether a run sends anything that this place compresses.
    fn sends(&self, place: Place) -> bool {
        let Config { parallelism, moe, .. } = self.config;
        let data = parallelism.dp > 1;
        match place {
            Place::Activations | Place::ActivationGradients => self.message().0 > 0.0,
            Place::Gradients => data,
            Place::Weights => data && parallelism.zero().stage == ZeroStage::Weights,
            Place::Dispatch | Place::DispatchGradients => parallelism.ep > 1 && moe.num_experts > 0,
        }
    }

    /// What a place sends where `config` compresses it alone, in `compressed`; and without, in `plain`.
    fn weigh(
        &self,
        place: Place,
        config: &Config,
        plain: &mut Traffic,
        compressed: &mut Traffic,
    ) -> Result<(), TrainError> {
        match place {
            Place::Activations | Place::ActivationGradients => {
                let Traffic { messages, codec, .. } = self.cuts(config)?;
                (compressed.messages, compressed.codec) = (messages, codec);
                plain.messages = [self.message().0; 2];
            }
            Place::Gradients => {
                (plain.sums, compressed.sums, compressed.sum_codec) = Default::default();
                self.sums(config, plain, compressed)?;
            }
            Place::Weights => {
                let passes = 2.0 * config.pipeline.num_microbatches as f64;
                let scheme = config.plan()?.compress.weights;
                let [all, then, seconds] = self.replaced(config, |old| {
                    let Some(longest) = old.iter().max_by_key(|record| record.elements) else { return Ok(0.0) };
                    let shape = Shape::vector(longest.elements).map_err(failed)?;
                    let [pack, restore] = measured(&*self.device, &scheme, shape)?;
                    // Each rank compresses its own part, and restores all of them.
                    let elements: usize = old.iter().map(|record| record.elements).sum();
                    Ok((pack / longest.ranks as f64 + restore) * elements as f64 / longest.elements as f64)
                })?;
                (plain.weights, compressed.weights, compressed.weights_codec) =
                    (all / passes, then / passes, seconds / passes);
            }
            Place::Dispatch | Place::DispatchGradients => {
                let direction = usize::from(place == Place::DispatchGradients);
                let micros = config.pipeline.num_microbatches as f64;
                let compress = config.plan()?.compress;
                let scheme = [compress.dispatch, compress.dispatch_gradients][direction];
                let cols = config.model.hidden_size;
                let [all, then, seconds] = self.replaced(config, |old| {
                    let elements: usize = old.iter().map(|record| record.elements).sum();
                    let shape = Shape::matrix(elements / cols, cols).map_err(failed)?;
                    Ok(measured(&*self.device, &scheme.of_each_row(cols), shape)?.iter().sum())
                })?;
                plain.tokens[direction] = all / micros;
                compressed.tokens[direction] = then / micros;
                compressed.tokens_codec[direction] = seconds / micros;
            }
        }
        Ok(())
    }

    /// Of the rank that sends most of what `config` compresses: the bytes of a step without, the bytes with it, and the
    /// seconds that it takes to compress and restore what these calls send.
    fn replaced(
        &self,
        config: &Config,
        seconds: impl Fn(&[Record]) -> Result<f64, Error>,
    ) -> Result<[f64; 3], TrainError> {
        let mut most = [0.0; 3];
        for (kind, exact) in kinds(config, &config.mesh()?)?.iter().zip(&self.exact) {
            let [ours, theirs] = [kind, exact].map(|kind| collectives(&kind.each.records));
            let old = beyond(&theirs, &ours);
            if bytes(&old) > most[0] {
                most = [bytes(&old), bytes(&beyond(&ours, &theirs)), seconds(&old)?];
            }
        }
        Ok(most)
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

fn bytes(records: &[Record]) -> f64 {
    records.iter().map(Record::bytes).sum()
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

/// Seconds of forward and backward of each stage for one micro-batch, from the operations of its layers and the rate of
/// this machine.
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

/// What `--steps 0` says of each place and scheme; nothing without a bandwidth, or where nothing is sent that could be
/// compressed.
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
    let mut plain = Traffic::default();
    for place in Place::ALL {
        // What is refused, as every row says, counts as nothing.
        weighing.weigh(place, &alone(config, place, "bf16"), &mut plain, &mut Traffic::default()).ok();
    }
    let before = computation.step(&plain, bandwidth)?;
    let mut text = format!(
        "\ncompression, where a rank sends {} (comm.bandwidth): a step of {} without\n",
        rate(bandwidth),
        time(before)
    );
    for place in Place::ALL.into_iter().filter(|place| weighing.sends(*place)) {
        let _ = writeln!(text, "  {}, {}", place.key(), place.unit());
        let own = place.of(config);
        let tried =
            place.tried().into_iter().filter(|scheme| *scheme != own).chain(Some(own).filter(|own| *own != NOTHING));
        for scheme in tried {
            let (mut plain, mut compressed) = (plain.clone(), plain.clone());
            match weighing.weigh(place, &alone(config, place, scheme), &mut plain, &mut compressed) {
                Ok(()) => {}
                Err(TrainError::Plan(error)) => {
                    let _ = writeln!(text, "    {scheme:<20} is refused: {error}");
                    continue;
                }
                Err(error) => return Err(error),
            }
            let (sent, codec) = place.part(&compressed);
            let pays = match computation.pays_below(&plain, &compressed)? {
                None => "never pays".to_owned(),
                Some(f64::INFINITY) => "always pays".to_owned(),
                Some(limit) => format!("pays below {}", rate(limit)),
            };
            let _ = writeln!(
                text,
                "    {scheme:<20} {} for {}, {} to compress and restore: {pays}; a step of {}",
                size(sent),
                size(place.part(&plain).0),
                time(codec),
                time(computation.step(&compressed, bandwidth)?)
            );
        }
    }
    text += "  Each place by itself, without feedback. Computation is that of ranks which have a machine like this one each; what is sent for \
             other reasons takes no time here.\n";
    Ok(text)
}

/// What a profile says of compression: its time, and the time of the bytes that it saved; nothing without a bandwidth
/// or compression.
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

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-3 * b.abs().max(1e-9), "{a} {b}");
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
        let gradients = alone(&config, Place::Gradients, "quant:8");
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
        // P of r columns beside the vectors, then Q of as many rows: of weights that are wider than high, both are of
        // one order.
        let [first, then] = compressed.sums;
        assert!(then > 0.0 && first > 0.3 * then && first < 3.0 * then, "{compressed:?}");
        assert!(compressed.sum_codec > 0.0 && total(compressed.sums) < 0.2 * total(plain.sums), "{compressed:?}");
    }

    /// Gathers of weights, and tokens that go to experts, take the bytes of the run.
    #[test]
    fn gathers_and_exchanges_are_those_of_the_run() {
        let of = |toml: &str, place, scheme: &str| {
            let config = config(toml);
            let (exact, alone) = (exact(&config), alone(&config, place, scheme));
            let (mut plain, mut compressed) = Default::default();
            weighing(&config, &exact).weigh(place, &alone, &mut plain, &mut compressed).unwrap();
            let [(whole, none), (sent_then, seconds)] = [&plain, &compressed].map(|traffic| place.part(traffic));
            let micros = config.pipeline.num_microbatches as f64;
            let passes = if place == Place::Weights { 2.0 * micros } else { micros };
            close(passes * (whole - sent_then), sent(&exact) - sent(&alone));
            assert!(none == 0.0 && seconds > 0.0 && sent_then > 0.0, "{plain:?} {compressed:?}");
            sent_then / whole
        };
        let sliced = "[parallelism]\ndp = 2\nzero_stage = 3";
        let eighths = of(sliced, Place::Weights, "quant:8/block256");
        assert!(eighths > 0.25 && eighths < 0.27, "{eighths}");
        let experts = "[parallelism]\ndp = 2\nep = 2\n[moe]\nnum_experts = 4";
        for place in [Place::Dispatch, Place::DispatchGradients] {
            let rows = of(experts, place, "quant:8");
            assert!(rows > 0.25 && rows < 0.32, "{rows}");
        }
        let text = [sliced, experts].map(|toml| report(&config(toml)).unwrap());
        assert!(text[0].contains("  weights, the gathers") && !text[0].contains("  dispatch"), "{}", text[0]);
        assert!(text[1].contains("  dispatch, the") && text[1].contains("  dispatch_gradients, those"), "{}", text[1]);
        assert!(!text[1].contains("  weights,") && !text.concat().contains("refused"), "{}", text.concat());
    }

    /// The run to compare with sends everything as it is.
    #[test]
    fn nothing_is_compressed_in_the_run_to_compare_with() {
        let config = config("[parallelism]\ndp = 2\nzero_stage = 3\n[compress]\nweights = 'quant:8'");
        assert!(config.plan().unwrap().compress.is_some() && !exact(&config).plan().unwrap().compress.is_some());
    }
}
