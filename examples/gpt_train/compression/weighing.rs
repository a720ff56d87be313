//! The bytes of each payload in a step, with and without compression, and the time to compress and restore them.

use super::computation::{Computation, Traffic};
use super::measured::{factoring, failed, measured};
use super::payload::{NOTHING, Payload};
use meshwork::compress::{Compressor, Scheme, Shape, SumMethod, wire_bytes};
use meshwork::core::{OpKind, Record};
use meshwork::engine::{TrainError, ZeroStage, dry_run};
use meshwork::tensor::{Device, Error};
use meshwork::train::config::Config;
use meshwork::train::plan::{EqualRanks, predict_all};
use meshwork::train::profile::Ceilings;
use std::collections::BTreeMap;
use std::sync::Arc;

const NO_COSTS: &str = "a model has a beginning and an end";

/// How often a rank compresses, and restores, each element of a sum over `ranks`.
fn sum_work(scheme: &Scheme, scatters: bool, ranks: usize) -> [f64; 2] {
    let ranks = ranks as f64;
    match scheme.sum() {
        _ if scatters => [1.0, 1.0],
        SumMethod::ScatterGather(_) | SumMethod::AllReduceBf16 => [1.0 + 1.0 / ranks, 2.0],
        _ => [1.0, ranks],
    }
}

/// Compares the bytes that the ranks of a configuration send with and without compression.
pub(super) struct Weighing<'a> {
    pub(super) config: &'a Config,
    /// The device on which schemes are timed.
    pub(super) device: Arc<dyn Device>,
    /// Predictions without compression.
    pub(super) exact: Vec<EqualRanks>,
}

impl Weighing<'_> {
    /// The longest message between stages without compression: its bytes, the shape of the whole value, and the part of
    /// it in the message.
    fn message(&self) -> (f64, Option<(Shape, f64)>) {
        let Config { parallelism, pipeline, training, .. } = self.config;
        let sends = self.exact.iter().flat_map(|ranks| &ranks.each.records).filter(|record| record.op == OpKind::Send);
        let Some(longest) = sends.max_by(|a, b| a.bytes().total_cmp(&b.bytes())) else { return (0.0, None) };
        let is_part = pipeline.scatter_gather && !parallelism.sequence_parallel;
        let elements = longest.elements * if is_part { parallelism.tp } else { 1 };
        let rows = training.micro_batch_size.max(1);
        let share = longest.elements as f64 / elements.max(1) as f64;
        (longest.bytes(), Shape::matrix(rows, elements / rows).ok().map(|shape| (shape, share)))
    }

    /// Whether a run sends this payload.
    pub(super) fn sends(&self, payload: Payload) -> bool {
        let Config { parallelism, moe, .. } = self.config;
        let data = parallelism.dp > 1;
        match payload {
            Payload::Activations | Payload::ActivationGradients => self.message().0 > 0.0,
            Payload::Gradients => data,
            Payload::Weights => data && parallelism.zero().stage == ZeroStage::Weights,
            Payload::Dispatch | Payload::DispatchGradients => parallelism.ep > 1 && moe.num_experts > 0,
        }
    }

    /// Sets the traffic of a payload: uncompressed in `plain`, and compressed by `config` in `compressed`.
    pub(super) fn weigh(
        &self,
        payload: Payload,
        config: &Config,
        plain: &mut Traffic,
        compressed: &mut Traffic,
    ) -> Result<(), TrainError> {
        match payload {
            Payload::Activations | Payload::ActivationGradients => {
                let Traffic { messages, codec, .. } = self.cuts(config)?;
                (compressed.messages, compressed.codec) = (messages, codec);
                plain.messages = [self.message().0; 2];
            }
            Payload::Gradients => {
                (plain.sums, compressed.sums, compressed.sum_codec) = Default::default();
                self.sums(config, plain, compressed)?;
            }
            Payload::Weights => {
                let passes = 2.0 * config.pipeline.num_microbatches as f64;
                let scheme = config.plan()?.compress.weights;
                let [all, then, seconds] = self.replaced(config, |old| {
                    let Some(longest) = old.iter().max_by_key(|record| record.elements) else { return Ok(0.0) };
                    let shape = Shape::vector(longest.elements).map_err(failed)?;
                    let [pack, restore] = measured(&*self.device, &scheme, shape)?;
                    // Each rank compresses its own part, and restores all parts.
                    let elements: usize = old.iter().map(|record| record.elements).sum();
                    Ok((pack / longest.ranks as f64 + restore) * elements as f64 / longest.elements as f64)
                })?;
                (plain.weights, compressed.weights, compressed.weights_codec) =
                    (all / passes, then / passes, seconds / passes);
            }
            Payload::Dispatch | Payload::DispatchGradients => {
                let direction = usize::from(payload == Payload::DispatchGradients);
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

    /// For the rank with the most bytes in calls that `config` changes: the bytes of these calls in a step, the bytes
    /// of the calls that replace them, and the seconds to compress and restore them.
    fn replaced(
        &self,
        config: &Config,
        seconds: impl Fn(&[Record]) -> Result<f64, Error>,
    ) -> Result<[f64; 3], TrainError> {
        let mut most = [0.0; 3];
        for (ranks, exact) in predict_all(config)?.iter().zip(&self.exact) {
            let [ours, theirs] = [ranks, exact].map(|ranks| collectives(&ranks.each.records));
            let old = beyond(&theirs, &ours);
            if bytes(&old) > most[0] {
                most = [bytes(&old), bytes(&beyond(&ours, &theirs)), seconds(&old)?];
            }
        }
        Ok(most)
    }

    /// The messages between stages with the schemes of `config`, and the time to compress and restore them.
    pub(super) fn cuts(&self, config: &Config) -> Result<Traffic, TrainError> {
        let compress = config.plan()?.compress;
        let (bytes, shape) = self.message();
        let mut traffic = Traffic { messages: [bytes; 2], ..Traffic::default() };
        let Some((shape, share)) = shape else { return Ok(traffic) };
        for (at, scheme) in [compress.activations, compress.activation_gradients].into_iter().enumerate() {
            if Payload::ALL[at].scheme(config) != NOTHING {
                traffic.messages[at] = share * wire_bytes(&scheme, shape).map_err(failed)? as f64;
                traffic.codec[at] = measured(&*self.device, &scheme, shape)?;
            }
        }
        Ok(traffic)
    }

    /// Adds the gradient sums of the rank that sends most for them: to `plain` uncompressed, to `compressed` with the
    /// scheme of `config`.
    pub(super) fn sums(
        &self,
        config: &Config,
        plain: &mut Traffic,
        compressed: &mut Traffic,
    ) -> Result<(), TrainError> {
        let (ranks, plan) = (predict_all(config)?, config.plan()?);
        let scheme = &plan.compress.gradients;
        for (ranks, exact) in ranks.iter().zip(&self.exact) {
            let [ours, theirs] = [ranks, exact].map(|ranks| collectives(&ranks.each.records));
            let (new, old) = (beyond(&ours, &theirs), beyond(&theirs, &ours));
            let Some(longest) = old.iter().max_by_key(|record| record.elements) else { continue };
            if bytes(&old) <= plain.sums[0] {
                continue;
            }
            let elements: usize = old.iter().map(|record| record.elements).sum();
            if let Scheme::PowerSgd(of) = scheme {
                // Each bucket sums its factors P while backward runs, and its factors Q at the end of the step.
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

pub(super) fn bytes(records: &[Record]) -> f64 {
    records.iter().map(Record::bytes).sum()
}

fn collectives(records: &[Record]) -> Vec<Record> {
    records.iter().filter(|record| !matches!(record.op, OpKind::Send | OpKind::Recv)).cloned().collect()
}

/// The calls in `all` without an equal one in `others`.
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

/// The computation of a configuration: operations are counted by a dry run, and timed by a matrix product on this
/// machine.
pub(super) fn computation(config: &Config, device: &dyn Device) -> Result<Computation, TrainError> {
    let plan = config.plan()?;
    let rate = Ceilings::measure(device).flops.unwrap_or(f64::INFINITY);
    let costs = dry_run::costs(&config.model(), &plan)?;
    let [beginning, layers @ .., end] = &costs[..] else { return Err(Error::Backward(NO_COSTS.to_owned()).into()) };
    let mut layers = layers.iter();
    let mut flops: Vec<u64> = plan.partition.iter().map(|&count| layers.by_ref().take(count).sum()).collect();
    flops[0] += beginning;
    *flops.last_mut().expect("a partition has a stage") += end;
    let share = plan.micro_batch_size()? as f64 / config.parallelism.tp.max(1) as f64 / rate;
    Ok(Computation {
        schedule: plan.build_schedule()?,
        seconds: flops.iter().map(|&flops| flops as f64 * share).collect(),
    })
}
