//! What a rank does for one micro-batch: counted by a dry run of one layer, with the embedding before it and the head
//! behind it.
//!
//! The layer is the model's own, on the `tp`, `cp` and `ep` of the mesh, so no formula of a layer is written down here.
//! A step of any depth, degree `dp` and `pp`, and number of micro-batches is made of the same counts.

use crate::error::PlanError;
use meshwork_core::profile::{Class, Detail, Recorder, Span};
use meshwork_core::{DType, Mesh};
use meshwork_engine::{Plan, ScheduleSpec, Zero, dry_run};
use meshwork_pipeline::{ActionKind, Generator, Phase};
use meshwork_tensor::Category;
use meshwork_train::config::Config;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// The operations and collectives of a rank in one pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Work {
    /// The extents of each matrix product (rows, columns, terms of a sum) and how often it is computed.
    pub products: Vec<([usize; 3], usize)>,
    /// Floating point operations of attention.
    pub attention: f64,
    /// Pairs of a query and a key, over heads and samples, with those under the causal mask.
    pub scores: f64,
    /// Bytes that all other operations read and write.
    pub moved: f64,
    /// Operations of the device.
    pub launches: usize,
    /// The collectives between ranks that share the layer.
    pub collectives: Vec<Collective>,
}

/// A collective that the layer waits for.
#[derive(Clone, Debug, PartialEq)]
pub struct Collective {
    /// Its name, as `all_reduce`.
    pub name: &'static str,
    /// The name of its group, as `tp`.
    pub group: String,
    /// World ranks of its members. Rank 0 is a member.
    pub members: Vec<usize>,
    /// Bytes that each rank sends.
    pub sent: f64,
}

/// A part of the model, forward and backward; backward includes what is recomputed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Passes {
    /// One micro-batch forward.
    pub forward: Work,
    /// One micro-batch backward.
    pub backward: Work,
}

/// A model's parts on one rank, for one micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// What is before the layers, one layer, and what is behind them with the loss.
    pub parts: [Passes; 3],
    /// Parameters of a layer on a rank, and of all that is outside the layers.
    pub parameters: [usize; 2],
    /// Of those of a layer, the parameters of experts that are shared out over ep: fewer ranks have the same ones.
    pub experts: usize,
    /// Bytes of activations that a layer keeps from its forward to its backward.
    pub kept: f64,
    /// Bytes of activations, beyond those kept, at the moment when most bytes are alive.
    pub working: f64,
    /// Elements of an activation between two stages, on one tp rank.
    pub message: f64,
}

/// The counts of configurations; those that differ only in depth, `dp`, `pp` or micro-batches have the same.
#[derive(Debug, Default)]
pub struct Counter {
    known: HashMap<String, Arc<Counts>>,
}

impl Counter {
    /// The counts of a configuration.
    ///
    /// # Errors
    /// A configuration whose layer cannot be split over its mesh.
    pub fn counts(&mut self, config: &Config) -> Result<Arc<Counts>, PlanError> {
        let (one, plan) = one_layer(config, 1)?;
        let key = format!("{:?} {:?} {:?} {:?} {}", one.model, one.moe, one.parallelism, one.memory, key_of(&plan));
        if let Some(counts) = self.known.get(&key) {
            return Ok(counts.clone());
        }
        let counts = Arc::new(count(config, &one, &plan)?);
        self.known.insert(key, counts.clone());
        Ok(counts)
    }

    /// How many different layers were counted.
    pub fn layers(&self) -> usize {
        self.known.len()
    }
}

fn key_of(plan: &Plan) -> String {
    format!("{} {:?} {:?} {:?} {}", plan.global_batch_size, plan.mixed, plan.precision, plan.recompute, plan.mesh)
}

/// The configuration with this number of layers on the part of the mesh that shares a layer, and its plan: each layer
/// is a stage, and there is one micro-batch.
fn one_layer(config: &Config, layers: usize) -> Result<(Config, Plan), PlanError> {
    let mut one = config.clone();
    let of = &mut one.parallelism;
    (of.dp, of.pp) = (of.ep, 1);
    (of.zero_stage, of.zero_group) = (0, 0);
    one.model.num_layers = layers;
    one.pipeline.schedule = "1f1b".to_owned();
    one.pipeline.virtual_stages = 1;
    one.pipeline.num_microbatches = 1;
    one.pipeline.partition = Vec::new();
    one.training.global_batch_size = of.dp * config.training.micro_batch_size;
    one.training.micro_batch_size = config.training.micro_batch_size;
    let parallel = &one.parallelism;
    let mesh = Mesh::of_degrees([parallel.tp, parallel.cp, parallel.ep, parallel.dp, 1])?;
    let mut partition = vec![1; layers + 2];
    (partition[0], partition[layers + 1]) = (0, 0);
    let schedule = ScheduleSpec::Named {
        generator: Generator::BreadthFirst,
        virtual_stages: Some(partition.len()),
        vertical_sync: false,
    };
    let plan = Plan {
        mesh,
        schedule,
        partition,
        num_microbatches: Some(1),
        zero: Zero::default(),
        offload: None,
        virtual_cuts: Vec::new(),
        ..one.plan()?
    };
    Ok((one, plan))
}

/// Counts a configuration, from one layer of it and the plan of that.
fn count(config: &Config, one: &Config, plan: &Plan) -> Result<Counts, PlanError> {
    let recorder = Recorder::new(Instant::now());
    let frame = recorder.clone();
    dry_run::observe(&one.model(), plan, 0, &recorder, move |event| {
        let name = match (event.phase, event.action.kind) {
            (Phase::Started, _) => BEGUN,
            (_, ActionKind::Forward) => FORWARD,
            (_, ActionKind::Backward) => BACKWARD,
            _ => return,
        };
        let detail = Detail::Part { stage: event.action.stage, micro: event.action.micro };
        frame.record(Span { class: Class::Action, name, detail, dtype: None, start: 0, end: 0, flops: 0, bytes: 0 });
    })?;
    let half = plan.mixed.is_some();
    let (mut counts, mut work) = (Counts::default(), Work::default());
    for span in recorder.drain() {
        match (span.class, &span.detail) {
            (Class::Action, Detail::Part { stage, .. }) => {
                let done = std::mem::take(&mut work);
                match span.name {
                    FORWARD => counts.parts[*stage].forward = done,
                    BACKWARD => counts.parts[*stage].backward = done,
                    _ => {}
                }
            }
            _ => work.add(&span, half),
        }
    }
    let (parallel, model) = (&config.parallelism, &config.model);
    let heads = (config.training.micro_batch_size * model.num_heads) as f64 / (parallel.tp * parallel.cp) as f64;
    let scores = heads * (model.seq_len as f64).powi(2);
    for passes in &mut counts.parts {
        passes.spread(scores);
    }
    let deep = |layers| -> Result<(usize, f64), PlanError> {
        let (one, plan) = one_layer(config, layers)?;
        // One stage, as a rank has it: the layers are kept together, and recomputed one by one.
        let plan = Plan { schedule: ScheduleSpec::default(), partition: Vec::new(), ..plan };
        let step = dry_run::predict(&one.model(), &plan, 0)?;
        Ok((step.parameters, step.memory.bytes_of(Category::Activations) as f64))
    };
    let [one, two] = [deep(1)?, deep(2)?];
    counts.parameters = [two.0 - one.0, one.0 - (two.0 - one.0)];
    counts.experts = match parallel.ep {
        0 | 1 => 0,
        ep => {
            // A rank that had all experts would have ep times as many of their parameters.
            let mut alone = config.clone();
            alone.parallelism.ep = 1;
            let (model, plan) = one_layer(&alone, 1)?;
            (dry_run::predict(&model.model(), &plan, 0)?.parameters - one.0) / (ep - 1)
        }
    };
    counts.kept = (two.1 - one.1).max(0.0);
    counts.working = (one.1 - counts.kept).max(0.0);
    let tokens = config.training.micro_batch_size * config.model.seq_len / parallel.cp;
    counts.message = (tokens * config.model.hidden_size) as f64;
    Ok(counts)
}

/// The name of the span that begins an action, and of those that end one.
const BEGUN: &str = "begun";
const FORWARD: &str = "forward";
const BACKWARD: &str = "backward";

impl Passes {
    /// Gives the pass with attention its number of scores: as many for each forward, and backward twice as many.
    fn spread(&mut self, scores: f64) {
        let once = self.forward.attention;
        for work in [&mut self.forward, &mut self.backward] {
            work.scores = if once > 0.0 { scores * work.attention / once } else { 0.0 };
        }
    }
}

impl Work {
    fn add(&mut self, span: &Span, half: bool) {
        match (span.class, &span.detail) {
            (Class::Step | Class::Flight | Class::Wait | Class::Optimizer | Class::Data, _) => {}
            (Class::Post, Detail::Meeting(meeting)) => {
                if meeting.message.is_none() && meeting.group.1.len() > 1 {
                    let (group, members) = (meeting.group.0.clone(), meeting.group.1.clone());
                    let sent = sent(span.name, members.len() as f64, span.bytes as f64);
                    self.collectives.push(Collective { name: span.name, group, members, sent });
                }
            }
            // On a device tensors in 16 bits are computed as they are; the dry run widens them around each operation.
            _ if half && span.name == "cast" => {}
            (Class::Product, Detail::Product(extents)) => {
                self.launches += 1;
                match self.products.iter_mut().find(|(known, _)| known == extents) {
                    Some((_, times)) => *times += 1,
                    None => self.products.push((*extents, 1)),
                }
            }
            (Class::Attention, _) => {
                self.launches += 1;
                self.attention += span.flops as f64;
            }
            _ => {
                let narrow = half && span.dtype == Some(DType::F32) && span.class != Class::Memory;
                self.launches += 1;
                self.moved += if narrow { 0.5 } else { 1.0 } * span.bytes as f64;
            }
        }
    }

    /// Floating point operations of products and attention.
    pub fn flops(&self) -> f64 {
        let product = |&([m, n, k], times): &([usize; 3], usize)| 2.0 * (m * n) as f64 * k as f64 * times as f64;
        self.products.iter().map(product).sum::<f64>() + self.attention
    }
}

/// Bytes that a rank sends in a collective of `count` ranks, of whose buffers it reads and writes `bytes`.
fn sent(name: &str, count: f64, bytes: f64) -> f64 {
    let others = (count - 1.0) / count;
    match name {
        "all_reduce" => bytes * others,
        "all_gather" | "reduce_scatter" => bytes * count / (count + 1.0) * others,
        "barrier" => 0.0,
        _ => bytes / 2.0 * others,
    }
}
