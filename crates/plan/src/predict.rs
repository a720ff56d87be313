//! The time and memory of a step, from the counts of a layer.
//!
//! ```text
//! counts of a layer ─ system, cluster ─▶ seconds of a pass ─▶ simulated schedule ─▶ + gradients, optimizer ─▶ a step
//! ```
//!
//! More than 400 lines: every term of a step's time and memory, from products to the optimizer, in one place.

use crate::cluster::Cluster;
use crate::count::{Counter, Counts, Passes, Work};
use crate::error::PlanError;
use crate::system::{Constants, Memory, System};
use meshwork_core::Axis;
use meshwork_pipeline::{Costs, Schedule, Shape, Timeline, by_name, simulate};
use meshwork_train::config::{Config, Dtype, MatmulDtype, OffloadWord, RecomputeWord, Recomputed};
use meshwork_train::plan;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// A step as predicted.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Seconds of the step.
    pub seconds: f64,
    /// Model operations a second, over the peak of all cards: nothing recomputed counts.
    pub mfu: f64,
    /// Seconds in which the busiest card waits for other stages.
    pub bubble: f64,
    /// Seconds in which a card waits for collectives, by the name of the collective and its group.
    pub exposed: BTreeMap<String, f64>,
    /// Seconds in which a card computes activations again.
    pub recomputed: f64,
    /// Seconds that follow the last backward: the optimizer, the waits for gradients and for states that are offloaded.
    pub update: f64,
    /// Bytes of the fullest card.
    pub memory: f64,
    /// Whether they fit.
    pub fits: bool,
    /// Dollars for a million tokens, where the cluster has a price.
    pub cost: Option<f64>,
}

/// A configuration with the counts of its layer, to be predicted on any cluster by any constants.
#[derive(Clone, Debug)]
pub struct Job {
    pub(crate) config: Config,
    counts: Arc<Counts>,
    /// The counts where nothing is computed twice.
    plain: Arc<Counts>,
    /// The operations of the model: nothing recomputed counts.
    pub(crate) model_flops: f64,
    /// The bytes of the fullest rank by a dry run of the whole step, after the first [`Self::dry_memory`].
    dry: OnceLock<f64>,
}

/// All passes of all micro-batches.
#[derive(Clone, Debug)]
pub(crate) struct Passed {
    time: Time,
    /// Seconds in which the slowest rank waits for others.
    bubble: f64,
    /// Bytes of activations that the fullest rank holds, at most, of its layers.
    held: f64,
}

/// A sum of seconds, with those of each collective.
#[derive(Clone, Debug, Default)]
struct Time {
    seconds: f64,
    exposed: BTreeMap<String, f64>,
}

impl Time {
    fn scaled(&self, by: f64) -> Self {
        let exposed = self.exposed.iter().map(|(name, seconds)| (name.clone(), seconds * by)).collect();
        Self { seconds: self.seconds * by, exposed }
    }

    fn add(&mut self, other: &Self) {
        self.seconds += other.seconds;
        other.exposed.iter().for_each(|(name, seconds)| *self.exposed.entry(name.clone()).or_default() += seconds);
    }

    fn wait(&mut self, name: &str, seconds: f64) {
        if seconds > 0.0 {
            self.seconds += seconds;
            *self.exposed.entry(name.to_owned()).or_default() += seconds;
        }
    }
}

/// Rows and columns of a tile of a product.
const TILE: [usize; 2] = [128, 256];

/// Extents of which tensor cores take multiples, in 16 bits.
const ALIGNED: usize = 8;

/// Heads that one block of the fused softmax takes.
const SOFTMAX_HEADS: f64 = 4.0;

/// Operations of attention's backward for each pair, and those of them that the model needs: scores are computed again.
const ATTENTION_BACKWARD: f64 = 14.0 / 12.0;

impl Job {
    /// Counts a configuration.
    ///
    /// # Errors
    /// A configuration whose layer cannot be split over its mesh.
    pub fn new(config: Config, counter: &mut Counter) -> Result<Self, PlanError> {
        let counts = counter.counts(&config)?;
        let mut plain = config.clone();
        plain.memory.recompute = Recomputed::Word(RecomputeWord::None);
        // Backward computes what a few tokens at a time leave out once more.
        (plain.memory.loss_chunk, plain.memory.sequence_block) = (0, 0);
        let whole = counter.counts(&plain)?;
        let flops = |passes: &Passes| {
            let of = |work: &Work| work.flops() - work.attention + work.attention / ATTENTION_BACKWARD;
            of(&passes.forward) + of(&passes.backward)
        };
        let [first, layer, last] = &whole.parts;
        let each = flops(first) + config.model.num_layers as f64 * flops(layer) + flops(last);
        let parallel = &config.parallelism;
        let shared = (parallel.tp * parallel.cp) as f64;
        let model_flops =
            each * shared * config.training.global_batch_size as f64 / config.training.micro_batch_size as f64;
        Ok(Self { config, counts, plain: whole, model_flops, dry: OnceLock::new() })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The same with other keys that a layer does not read, such as its schedule.
    pub(crate) fn with_config(&self, change: impl FnOnce(&mut Config)) -> Self {
        let mut other = Self { dry: OnceLock::new(), ..self.clone() };
        change(&mut other.config);
        other
    }

    /// Predicts a step.
    ///
    /// # Errors
    /// A pipeline that its schedule does not take.
    pub fn predict(&self, system: &System, cluster: &Cluster) -> Result<Prediction, PlanError> {
        self.with(system, &system.constants, cluster)
    }

    /// The same with other constants.
    ///
    /// # Errors
    /// As [`predict`](Self::predict).
    pub fn with(&self, system: &System, constants: &Constants, cluster: &Cluster) -> Result<Prediction, PlanError> {
        let rates = Rates { system, constants, cluster, job: self };
        let memory = match system.memory {
            Memory::Held => None,
            Memory::DryRun => Some(self.dry_memory()?),
        };
        Ok(rates.step(&rates.pipeline()?, memory))
    }

    /// A step without the dry run of all of it: its memory is an estimate from the counts of a layer.
    pub(crate) fn roughly(&self, system: &System, cluster: &Cluster, passed: &Passed) -> Prediction {
        Rates { system, constants: &system.constants, cluster, job: self }.step(passed, None)
    }

    /// All passes of all micro-batches.
    pub(crate) fn passes(&self, system: &System, cluster: &Cluster) -> Result<Passed, PlanError> {
        Rates { system, constants: &system.constants, cluster, job: self }.pipeline()
    }

    /// Seconds and bytes that no schedule of this job goes below: no stage waits, and one micro-batch is in flight.
    pub(crate) fn bound(&self, system: &System, cluster: &Cluster) -> (f64, f64) {
        let rates = Rates { system, constants: &system.constants, cluster, job: self };
        let parallel = &self.config.parallelism;
        let layers = self.config.model.num_layers as f64;
        let all: f64 =
            rates.parts().iter().flatten().zip([1.0, 1.0, layers, layers, 1.0, 1.0]).map(|(a, n)| a.seconds * n).sum();
        let micros = self.config.pipeline.num_microbatches.max(1) as f64;
        let seconds = all * micros / parallel.pp as f64 * rates.shared(1.0) + rates.after().seconds;
        (seconds, rates.memory(self.counts.kept * layers / parallel.pp as f64))
    }

    /// Bytes of the weights, gradients and states of the optimizer of the fullest rank, by the counts of a layer.
    pub fn state_bytes(&self, system: &System, cluster: &Cluster) -> f64 {
        Rates { system, constants: &system.constants, cluster, job: self }.states()
    }

    /// Bytes that the fullest rank sends to those with the same parameters, for the sums of its gradients and the
    /// gathers of its weights: in each step without ZeRO and in stage 1.
    pub fn gradient_bytes(&self, system: &System, cluster: &Cluster) -> f64 {
        let rates = Rates { system, constants: &system.constants, cluster, job: self };
        let (parameters, [all, experts]) = (rates.parameters(), rates.replicas().map(|ranks| ranks.len() as f64));
        let of = |number: f64, ranks: f64| 2.0 * rates.element() * number * (ranks - 1.0) / ranks;
        of(parameters.dense, all) + of(parameters.experts, experts)
    }

    /// Bytes of the fullest rank as `--steps 0` predicts them: a dry run of a step of one rank of each stage, without
    /// the micro-batches that repeat others. The first of the ranks along tp, cp, dp and ep has the largest parts.
    ///
    /// # Errors
    /// A step that does not run.
    pub fn dry_memory(&self) -> Result<f64, PlanError> {
        self.dry_memory_up_to(f64::INFINITY)
    }

    /// The same, or the bytes of the first rank that has more than `most`.
    pub(crate) fn dry_memory_up_to(&self, most: f64) -> Result<f64, PlanError> {
        if let Some(bytes) = self.dry.get() {
            return Ok(*bytes);
        }
        let mesh = self.config.mesh()?;
        let of_stage = mesh.world_size() / self.config.parallelism.pp;
        let mut fullest = 0.0_f64;
        for stage in 0..self.config.parallelism.pp {
            fullest = fullest.max(plan::peak_bytes(&self.config, stage * of_stage)? as f64);
            if fullest > most {
                return Ok(fullest);
            }
        }
        Ok(*self.dry.get_or_init(|| fullest))
    }
}

/// Numbers of parameters: those that all ranks along dp and cp have, and those that only ranks with the same experts
/// have.
#[derive(Clone, Copy, Debug)]
struct Parameters {
    dense: f64,
    experts: f64,
}

struct Rates<'a> {
    system: &'a System,
    constants: &'a Constants,
    cluster: &'a Cluster,
    job: &'a Job,
}

impl Rates<'_> {
    /// The whole step; without bytes of memory these are estimated.
    fn step(&self, passed: &Passed, memory: Option<f64>) -> Prediction {
        let (config, cluster) = (&self.job.config, self.cluster);
        let (mut step, after) = (passed.time.clone(), self.after());
        step.add(&after);
        let memory = memory.unwrap_or_else(|| self.memory(passed.held));
        let world = config.parallelism.world_size().unwrap_or(1) as f64;
        let peak = self.peak();
        // Of cores that ranks share, all compute.
        let cards = cluster.cores.map_or(world, |cores| (cores.count * cluster.hosts) as f64);
        let tokens = (config.training.global_batch_size * config.model.seq_len) as f64;
        Prediction {
            seconds: step.seconds,
            mfu: self.job.model_flops / (step.seconds * peak * cards),
            bubble: passed.bubble,
            exposed: step.exposed,
            recomputed: self.recomputed(),
            update: after.seconds,
            memory,
            fits: memory <= cluster.card.memory,
            cost: cluster.price.map(|price| price * world * step.seconds / 3600.0 / (tokens / 1e6)),
        }
    }

    /// Seconds of a rank that backward takes longer than without recomputation.
    fn recomputed(&self) -> f64 {
        let (config, job) = (&self.job.config, self.job);
        let seconds = |counts: &Counts| self.pass(&counts.parts[1].backward, false).seconds;
        let layers = config.pipeline.num_microbatches.max(1) as f64 * config.model.num_layers as f64;
        (seconds(&job.counts) - seconds(&job.plain)).max(0.0) * layers / config.parallelism.pp as f64 * self.shared(1.0)
    }

    /// How many times as long work takes while this share of the ranks computes, where ranks share cores.
    fn shared(&self, of: f64) -> f64 {
        let world = self.job.config.parallelism.world_size().unwrap_or(1) as f64;
        self.cluster.cores.map_or(1.0, |cores| cores.stretch(of * world / self.cluster.hosts as f64))
    }

    /// Seconds from the first start to the last end. Where ranks share cores, each moment takes as long as its active
    /// ranks need.
    fn span(&self, timeline: &Timeline) -> f64 {
        if self.cluster.cores.is_none() {
            return timeline.makespan();
        }
        let mut ends: Vec<(f64, i32)> = Vec::new();
        ends.extend(timeline.ranks.iter().flatten().flat_map(|one| [(one.start, 1), (one.end, -1)]));
        ends.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let (mut seconds, mut active) = (0.0, 0);
        for pair in ends.windows(2) {
            active += pair[0].1;
            let share = f64::from(active) / timeline.ranks.len() as f64;
            seconds += (pair[1].0 - pair[0].0) * if active > 0 { self.shared(share) } else { 1.0 };
        }
        seconds
    }

    fn half(&self) -> bool {
        self.job.config.training.dtype != Dtype::F32
    }

    /// Operations a second of products, if nothing is lost.
    fn peak(&self) -> f64 {
        let (card, training) = (&self.cluster.card, &self.job.config.training);
        match training.matmul_dtype {
            _ if self.half() => card.bf16,
            MatmulDtype::Bf16 => card.bf16,
            MatmulDtype::Tf32 => card.tf32,
            MatmulDtype::F32 => card.f32,
        }
    }

    /// Bytes of an element of weights and activations.
    fn element(&self) -> f64 {
        if self.half() { 2.0 } else { 4.0 }
    }

    /// Whether a rank's products with the logits have columns that are no multiple of 8. This library's counts have
    /// columns that are padded.
    fn odd(&self) -> bool {
        let columns = self.job.config.model.vocab_size / self.job.config.parallelism.tp;
        !self.system.pads && !columns.is_multiple_of(ALIGNED)
    }

    /// Seconds of a pass of one micro-batch through the layers or what is before them; `head` is what is behind them.
    fn pass(&self, work: &Work, head: bool) -> Time {
        let (of, card) = (self.constants, &self.cluster.card);
        let odd = head && self.odd();
        let peak = self.peak();
        let (mut busy, mut packed) = (0.0, 0.0);
        for &([m, n, k], times) in &work.products {
            let aligned = !odd && [m, n, k].iter().all(|extent| extent.is_multiple_of(ALIGNED));
            let share = if aligned { of.products } else { of.unaligned };
            let waves = (m.div_ceil(TILE[0]) * n.div_ceil(TILE[1])) as f64 / card.units;
            let right = n as f64 * k as f64 * times as f64;
            busy += 2.0 * m as f64 * right / (peak * share) * (1.0 + of.wave / waves);
            packed += right;
        }
        if of.attention > 0.0 {
            busy += work.attention / (peak * of.attention);
        }
        let moved = work.moved * of.passes + work.scores * of.score_bytes + packed * of.packed_bytes;
        busy += moved / (card.bandwidth * of.memory);
        let mut time = Time { seconds: busy, exposed: BTreeMap::new() };
        for collective in &work.collectives {
            let (rate, far) = self.cluster.rate(&collective.members);
            let (share, latency) = if far { (of.between, of.far_latency) } else { (of.inside, of.latency) };
            time.wait(
                &format!("{} ({})", collective.name, collective.group),
                latency * (collective.members.len() as f64).log2() + collective.sent / (rate * share),
            );
        }
        let uneven = work.scores > 0.0 && of.score_bytes > 0.0 && !self.heads().is_multiple_of(SOFTMAX_HEADS as usize);
        let host = work.launches as f64 * of.launch
            + work.collectives.len() as f64 * of.call
            + if uneven { of.fallback } else { 0.0 }
            + if head { of.batch / 2.0 } else { 0.0 };
        time.seconds = joined(time.seconds, host, of.join);
        time
    }

    /// Heads of a micro-batch on a rank.
    fn heads(&self) -> usize {
        let config = &self.job.config;
        config.training.micro_batch_size * config.model.num_heads / config.parallelism.tp
    }

    /// World ranks with the same parameters as the first one, along dp and cp, and those of them with the same experts.
    fn replicas(&self) -> [Vec<usize>; 2] {
        let parallel = &self.job.config.parallelism;
        let all: Vec<usize> = (0..parallel.dp * parallel.cp).map(|rank| rank * parallel.tp).collect();
        let Some(mesh) = parallel.mesh().ok().filter(|_| self.job.counts.experts > 0) else {
            return [all.clone(), all];
        };
        let experts = mesh.expert_axes();
        let axes =
            [Axis::Cp, Axis::Cep, Axis::Dp].into_iter().filter(|axis| !experts.iter().any(|other| other == axis));
        [all, mesh.group(0, &axes.collect::<Vec<_>>())]
    }

    /// Seconds in which a rank sends so many bytes for each of its parameters to its replicas.
    fn among_replicas(&self, parameters: Parameters, bytes: f64) -> f64 {
        let each = self.replicas().into_iter().zip([parameters.dense, parameters.experts]);
        each.filter(|(members, number)| members.len() > 1 && *number > 0.0)
            .map(|(members, number)| {
                let count = members.len() as f64;
                let (rate, far) = self.cluster.rate(&members);
                let (share, latency) = if far {
                    (self.constants.gradients, self.constants.far_latency)
                } else {
                    (self.constants.inside, self.constants.latency)
                };
                latency + bytes * number * (count - 1.0) / count / (rate * share)
            })
            .sum()
    }

    /// Parameters of which a rank holds its share, from this stage of ZeRO on.
    fn held(&self, parameters: Parameters, from: usize) -> f64 {
        if self.job.config.parallelism.zero_stage < from {
            return parameters.dense + parameters.experts;
        }
        let [all, experts] = self.replicas().map(|ranks| ranks.len() as f64);
        parameters.dense / all + parameters.experts / experts
    }

    /// A layer's pass with the gathers and scatters of its weights: what is not hidden, and what slows the pass down.
    /// FSDP has them in every stage; others gather weights in stage 3, and scatter gradients from stage 2 on.
    fn sharded(&self, mut time: Time, parameters: Parameters, backward: bool) -> Time {
        let (stage, by_layer) = (self.job.config.parallelism.zero_stage, self.system.by_layer);
        let gathers = stage > 2 || (by_layer && !backward);
        let scatters = backward && (stage > 1 || by_layer);
        if !gathers && !scatters {
            return time;
        }
        let gather = self.among_replicas(parameters, self.element());
        let mut left = if self.system.overlaps || by_layer { time.seconds } else { 0.0 };
        for (name, done) in [("all_gather", gathers), ("reduce_scatter", scatters)] {
            if done {
                let hidden = gather.min(left);
                left -= hidden;
                time.wait(&format!("{name} (zero)"), gather - hidden + self.constants.interference * hidden);
            }
        }
        time
    }

    /// The passes of one micro-batch, forward and backward, through what is before the layers, a layer, and what is
    /// behind them.
    fn parts(&self) -> [[Time; 2]; 3] {
        let counts = &self.job.counts;
        let half = Parameters { dense: counts.parameters[1] as f64 / 2.0, experts: 0.0 };
        let parameters = [half, self.layer(), half];
        let of = |part: usize, backward: bool| {
            let passes: &Passes = &counts.parts[part];
            let work = if backward { &passes.backward } else { &passes.forward };
            self.sharded(self.pass(work, part == 2), parameters[part], backward)
        };
        [0, 1, 2].map(|part| [of(part, false), of(part, true)])
    }

    /// All passes of all micro-batches.
    fn pipeline(&self) -> Result<Passed, PlanError> {
        let config = &self.job.config;
        let times = self.parts();
        let generator = by_name(&config.pipeline.schedule)?;
        let (pp, chunks) = (config.parallelism.pp, config.pipeline.virtual_stages.max(1));
        let micros = config.pipeline.num_microbatches.max(1);
        let layers = config.model.num_layers as f64;
        let mut step = Time::default();
        if pp == 1 {
            for (part, each) in times.iter().enumerate() {
                let times = micros as f64 * if part == 1 { layers } else { 1.0 };
                each.iter().for_each(|time| step.add(&time.scaled(times)));
            }
            return Ok(Passed {
                time: step.scaled(self.shared(1.0)),
                bubble: 0.0,
                held: self.job.counts.kept * layers,
            });
        }
        let schedule = |micros| generator.build(Shape { pp, virtual_stages: chunks, micros });
        let span = |schedule: &Schedule| -> Result<(f64, f64, f64), PlanError> {
            let stages = schedule.stages();
            let (given, all) = (&config.pipeline.partition, config.model.num_layers);
            // As a run cuts it: the first stages take the rest.
            let even = |stage: usize| all / stages + usize::from(stage < all % stages);
            let of = |stage: usize| (if given.len() == stages { given[stage] } else { even(stage) }) as f64;
            let stage = |pass: usize| -> Vec<f64> {
                let ends = |stage: usize| {
                    let first = if stage == 0 { times[0][pass].seconds } else { 0.0 };
                    first + if stage + 1 == stages { times[2][pass].seconds } else { 0.0 }
                };
                (0..stages).map(|at| of(at) * times[1][pass].seconds + ends(at)).collect()
            };
            let half: Vec<f64> = stage(1).into_iter().map(|seconds| 0.5 * seconds).collect();
            let transfer = self.message();
            let costs = Costs {
                forward: stage(0),
                input_gradient: half.clone(),
                weight_gradient: half,
                transfer: [transfer; 2],
                overlap: self.system.sends_behind,
            };
            let timeline = simulate(schedule, &costs)?;
            let mut layers = vec![0.0; pp];
            timeline.placement.iter().enumerate().for_each(|(stage, &rank)| layers[rank] += of(stage));
            // A weight gradient that is deferred needs what backward has computed again.
            let (kept, deferred) = (self.job.counts.kept, self.job.plain.kept.max(self.job.counts.kept));
            let held = timeline.peak_held(kept, deferred).into_iter().zip(layers).map(|(bytes, all)| bytes * all);
            let held = held.fold(0.0, f64::max);
            let busy: Vec<f64> =
                timeline.ranks.iter().map(|row| row.iter().map(|one| one.end - one.start).sum()).collect();
            Ok((self.span(&timeline), busy.into_iter().fold(0.0, f64::max) * self.shared(1.0), held))
        };
        // A pipeline that is full takes as long for each further round of micro-batches.
        let few = 2 * pp * chunks;
        let (seconds, busy, held) = if micros > few + 2 * pp {
            let (few, more) = (few + micros % pp, few + micros % pp + pp);
            let (short, long) = (span(&schedule(few)?)?, span(&schedule(more)?)?);
            let rounds = (micros - few) as f64 / pp as f64;
            let further = |short: f64, long: f64| short + rounds * (long - short);
            (further(short.0, long.0), further(short.1, long.1), further(short.2, long.2))
        } else {
            span(&schedule(micros)?)?
        };
        // Collectives of a rank in the middle; the rest of the step is computation, messages and the bubble.
        for pass in &times[1] {
            step.add(&pass.scaled(micros as f64 * layers / pp as f64 * self.shared(1.0)));
        }
        step.seconds = seconds;
        Ok(Passed { time: step, bubble: (seconds - busy).max(0.0), held })
    }

    /// Seconds of a message between two stages.
    fn message(&self) -> f64 {
        let parallel = &self.job.config.parallelism;
        let next = parallel.dp * parallel.cp * parallel.tp;
        let (rate, far) = self.cluster.rate(&[0, next]);
        let (share, latency) = if far {
            (self.constants.between, self.constants.far_latency)
        } else {
            (self.constants.inside, self.constants.latency)
        };
        let parts = if self.job.config.pipeline.scatter_gather || parallel.sequence_parallel { parallel.tp } else { 1 };
        latency + self.job.counts.message / parts as f64 * self.element() / (rate * share)
    }

    /// Parameters of a layer on a rank.
    fn layer(&self) -> Parameters {
        let experts = self.job.counts.experts as f64;
        Parameters { dense: self.job.counts.parameters[0] as f64 - experts, experts }
    }

    /// Parameters of the fullest rank.
    fn parameters(&self) -> Parameters {
        let (config, layer) = (&self.job.config, self.layer());
        let layers = (config.model.num_layers as f64 / config.parallelism.pp as f64).ceil();
        let outer = self.job.counts.parameters[1] as f64;
        Parameters { dense: layers * layer.dense + outer, experts: layers * layer.experts }
    }

    /// What follows the last backward: the sum of gradients, the optimizer.
    fn after(&self) -> Time {
        self.update().scaled(self.shared(1.0))
    }

    /// The same on a core of its own, where ranks share cores.
    fn update(&self) -> Time {
        let (of, parallel) = (self.constants, &self.job.config.parallelism);
        let (parameters, mut time) = (self.parameters(), Time { seconds: of.step, exposed: BTreeMap::new() });
        let updated = self.held(parameters, 1);
        time.seconds += updated * of.optimizer / (self.cluster.card.bandwidth * of.memory);
        if self.job.config.memory.offload == OffloadWord::Optimizer {
            // The slice of the states comes from the host and goes back, in both directions at once.
            time.wait("offload (host)", updated * self.system.held.states / self.cluster.host);
        }
        if !self.system.by_layer {
            let times = |count: f64| self.among_replicas(parameters, count * self.element());
            let [_, layer, _] = &self.job.counts.parts;
            let layers = (self.job.config.model.num_layers as f64 / parallel.pp as f64).ceil();
            let behind = if self.system.overlaps { layers * self.pass(&layer.backward, false).seconds } else { 0.0 };
            // From stage 2 on gradients are scattered in every backward, in stage 3 weights are gathered there.
            let (name, all) = match parallel.zero_stage {
                0 => ("all_reduce (dp)", times(2.0)),
                1 => ("reduce_scatter, all_gather (dp)", times(2.0)),
                2 => ("all_gather (dp)", times(1.0)),
                _ => return time,
            };
            let hidden = if parallel.zero_stage < 2 { all.min(behind) } else { 0.0 };
            time.wait(name, all - hidden + of.interference * hidden);
        }
        time
    }

    /// Bytes of the weights, gradients and states of the optimizer of the fullest card.
    fn states(&self) -> f64 {
        let (held, parameters) = (&self.system.held, self.parameters());
        let states = if self.job.config.memory.offload == OffloadWord::Optimizer { 0.0 } else { held.states };
        let of_stages = [(held.weight, 3), (held.gradient, 2), (states, 1)];
        of_stages.map(|(bytes, stage)| bytes * self.held(parameters, stage)).iter().sum()
    }

    /// Bytes of the fullest card, which holds so many bytes of activations of its layers.
    fn memory(&self, kept: f64) -> f64 {
        let (held, counts) = (&self.system.held, &self.job.counts);
        let [_, layer, _] = &counts.parts;
        // Of the layer whose backward runs, a system that gathers by layer has whole weights and gradients.
        let gathered = if self.system.by_layer {
            4.0 * self.element() * counts.parameters[0].max(counts.parameters[1]) as f64
        } else {
            0.0
        };
        self.states()
            + gathered
            + (kept + counts.working) * held.activations
            + layer.forward.scores * held.scores
            + held.fixed
    }
}

/// The time of two that run side by side, and wait for each other now and then.
fn joined(card: f64, host: f64, exponent: f64) -> f64 {
    match card.max(host) {
        0.0 => 0.0,
        most => most * ((card / most).powf(exponent) + (host / most).powf(exponent)).powf(1.0 / exponent),
    }
}
