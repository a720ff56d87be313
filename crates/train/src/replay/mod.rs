//! Silent corruption: every few steps one step is run again on another mesh of the same world, by other ranks, and
//! compared bit for bit (`training.replay_every`). Canonical numerics promise the same bits on both.
//!
//! ```text
//! state before the step ─ exchanged by name and slice ─▶ a trainer on the other mesh ─ its step ┐
//! the step of the run ─ gradients, then state ── compared ◀─ exchanged by name and slice ───────┘
//! ```
//! The trainer of the other mesh exists while it has its step, on a device of its own: the memory and traffic that the
//! run reports of itself are those without a replay.

pub(crate) mod other_bits;

use crate::config::{Config, Fault, parse_mesh};
use crate::devices::{Devices, RankDevice};
use crate::error::RankError;
use crate::numbers::{count, size, spans};
use crate::predict::predict_all;
use crate::routes::{Arrived, Different, Routes, with_whole_weights};
use meshwork_core::{Communicator, Group, Rank};
use meshwork_engine::{
    GRADIENT, ModelPlan, Plan, StateKey, StateSlice, StepReport, TrainError, Trainer, Verify, gradient_layout,
    state_layout,
};
use meshwork_nn::{Batch, Model};
use meshwork_tensor::param::LocalSlice;
pub use other_bits::OtherBits;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// The replays of a run, as all of its ranks know them. Made once for the ranks of a process, because it grows with
/// their number.
#[derive(Debug)]
pub struct Replays {
    model: Arc<dyn Model>,
    /// The plan of the other mesh.
    plan: Plan,
    /// The mesh of the run, in words.
    of: String,
    /// The world rank of each rank of the other mesh.
    members: Vec<usize>,
    /// The state before the step, to the other mesh.
    there: Routes,
    /// Gradients and the state after the step, back.
    back: Routes,
}

impl Replays {
    /// Replays of a run of `model` by the plan `run`, by the plan `other` on another mesh of as many ranks, or the
    /// same: each rank has the place of the rank before it, so that other ranks do the work of each.
    ///
    /// # Errors
    /// A plan that does not fit the model.
    pub fn new(model: Arc<dyn Model>, run: &Plan, other: Plan) -> Result<Self, TrainError> {
        // The run is what verifies; here two runs are compared.
        let plan = Plan { verify: Verify::Off, ..other };
        let ranks = plan.mesh.world_size();
        let members: Vec<usize> = (0..ranks).map(|place| (place + 1) % ranks).collect();
        let at = |mut layout: Vec<StateSlice>| {
            layout.iter_mut().for_each(|of| of.rank = members[of.rank]);
            layout
        };
        let (here, there) = (state_layout(&model, run)?, at(state_layout(&model, &plan)?));
        let gradients = (gradient_layout(&model, run)?, at(gradient_layout(&model, &plan)?));
        let wanted = with_whole_weights(&ModelPlan::new(model.clone(), &plan)?, &there, &members)?;
        let back = Routes::new(&[there, gradients.1].concat(), &[here.clone(), gradients.0].concat());
        let there = Routes::new(&here, &wanted);
        Ok(Self { model, plan, of: run.mesh.to_string(), members, there, back })
    }

    /// The replays that a configuration asks for.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_config(config: &Config) -> Result<Option<Self>, RankError> {
        if config.training.replay_every == 0 {
            return Ok(None);
        }
        let other = on_other_mesh(config)?;
        // The model of the other mesh has the same parameters; how it is cut is its own.
        Ok(Some(Self::new(other.model(), &config.plan()?, other.plan()?)?))
    }

    /// The other mesh in words.
    fn other(&self) -> String {
        match self.plan.mesh.to_string() {
            mesh if mesh == self.of => "the same mesh, each rank in the place of the one before it".to_owned(),
            mesh => format!("{mesh}, from rank 1 on"),
        }
    }

    /// The most bytes that a rank sends for a replay, beside its step.
    pub fn bytes(&self) -> u64 {
        (0..self.members.len()).map(|rank| self.there.bytes(rank) + self.back.bytes(rank)).max().unwrap_or(0)
    }
}

/// The configuration of the other mesh.
fn on_other_mesh(config: &Config) -> Result<Config, Fault> {
    const KEY: &str = "training.replay_mesh";
    let mut other = config.clone();
    let Some(text) = &config.training.replay_mesh else { return Ok(other) };
    let fault = |problem: String, valid: &str| Fault::new(KEY, text, problem, valid);
    let degrees = parse_mesh(text).map_err(|faults| {
        let problems: Vec<String> = faults.iter().map(|fault| fault.problem.clone()).collect();
        fault(problems.join("; "), "use axis=degree, such as dp=2,tp=2")
    })?;
    let before = config.parallelism.world_size();
    let of = &mut other.parallelism;
    [of.dp, of.tp, of.pp, of.cp, of.ep] = degrees;
    if of.world_size() != before {
        let problem = format!("has another number of ranks than the {} of the run", before.unwrap_or_default());
        return Err(fault(problem, "use a mesh of as many"));
    }
    if of.pp != config.parallelism.pp {
        other.pipeline.partition = Vec::new();
    }
    let plan = other.plan().map(|plan| Plan { num_microbatches: None, ..plan });
    let micros = plan.and_then(|plan| Ok((plan.num_microbatches()?, plan.micro_batch_size()?)));
    let (micros, size) = micros.map_err(|error| fault(format!("no such step: {error}"), "use another mesh"))?;
    (other.pipeline.num_microbatches, other.training.micro_batch_size) = (micros, size);
    Ok(other)
}

/// The fault of replays that cannot be, or that need more memory than the limit.
pub(crate) fn fault(config: &Config) -> Option<Fault> {
    const KEY: &str = "training.replay_every";
    let every = config.training.replay_every;
    let of_key = |problem: &str, valid: &str| Some(Fault::new(KEY, every, problem.to_owned(), valid));
    if every == 0 {
        return None;
    }
    if config.reduction_blocks().is_none() {
        let problem = "compares the bits of two meshes, and only canonical numerics have the same bits on both";
        return of_key(problem, "use training.numerics = \"canonical\", or training.check_replicas_every");
    }
    if config.parallelism.world_size() == Some(1) {
        return of_key("has no other rank that could run a step again", "use a mesh of several ranks, or 0");
    }
    let other = match on_other_mesh(config) {
        Ok(other) => other,
        Err(fault) => return Some(fault),
    };
    let mesh = config.training.replay_mesh.as_deref().unwrap_or_default();
    let of_mesh = |problem: String, valid: &str| Some(Fault::new("training.replay_mesh", mesh, problem, valid));
    if !mesh.is_empty() && config.compress.plan().is_ok_and(|plan| plan.is_some()) {
        let problem = "has other bits where something is compressed: what is sent differs between meshes".to_owned();
        return of_mesh(problem, "leave it out: the same mesh is then used, with other ranks");
    }
    let (run, predicted) = match (predict_all(config), predict_all(&other)) {
        (Ok(run), Ok(predicted)) => (run, predicted),
        (Err(_), _) => return None, // told elsewhere
        (_, Err(error)) => return of_mesh(format!("no such step: {error}"), "use another mesh"),
    };
    let limit = config.memory.limit()?;
    let held = run.iter().map(|equal| equal.each.model_bytes).max().unwrap_or(0);
    let needed = held + predicted.iter().map(|equal| equal.each.memory.total()).max().unwrap_or(0);
    (needed > limit).then(|| {
        let problem = format!("a rank needs {} while a step runs again", size(needed as f64));
        Fault::new("memory.limit_bytes", limit, problem, format!("use a larger limit, or {KEY} = 0"))
    })
}

/// The cost of a replay, for the report before a run; empty without one.
pub(crate) fn report(config: &Config) -> Result<String, RankError> {
    let Some(replays) = Replays::from_config(config)? else { return Ok(String::new()) };
    let other = on_other_mesh(config)?;
    let most = predict_all(&other)?.iter().map(|equal| equal.each.memory.total()).max().unwrap_or(0);
    Ok(format!(
        "replay of every {}on {}: one more step; a rank has up to {} more at the peak, and sends up to {} more\n",
        if config.training.replay_every == 1 {
            "step ".to_owned()
        } else {
            format!("{}. step ", config.training.replay_every)
        },
        replays.other(),
        size(most as f64),
        size(replays.bytes() as f64)
    ))
}

/// The replays of one rank.
#[derive(Debug)]
pub struct Replay<'a> {
    replays: &'a Replays,
    devices: &'a Devices,
    /// The world of the run.
    world: Group,
    /// The same ranks in the order of the other mesh.
    other: Group,
}

impl<'a> Replay<'a> {
    /// Joins the other ranks in `world`, of whose communicators each replay has its device make its own. Collective.
    ///
    /// # Errors
    /// A failed communication.
    pub fn join(replays: &'a Replays, devices: &'a Devices, world: Arc<dyn Communicator>) -> Result<Self, RankError> {
        let world = Group::from(world);
        let other = world.split("replay", &replays.members)?;
        Ok(Self { replays, devices, world, other })
    }

    /// Runs the step that comes next on the other mesh. `batch` reads samples of its global batch. Collective, between
    /// steps.
    ///
    /// # Errors
    /// Of the step on the other mesh.
    pub fn run<E>(
        &self,
        trainer: &Trainer,
        batch: impl FnOnce(Range<usize>) -> Result<Batch, E>,
    ) -> Result<Replayed, RankError>
    where
        RankError: From<E>,
    {
        let (Self { replays, devices, world, .. }, begun) = (self, Instant::now());
        let RankDevice { device, world: of_other } = devices.rank(self.other.communicator().clone())?;
        let rank = Arc::new(Rank::new(&replays.plan.mesh, of_other)?);
        let mut other = Trainer::new(replays.model.clone(), &replays.plan, rank, device.clone())?;
        let mut outgoing = replays.there.outgoing(world.rank());
        let (step, updates) = outgoing.put_state(trainer)?;
        other.load_state(&outgoing.exchange(world)?.after(step, updates))?;
        let report = other.step(&batch(other.samples())?)?;
        let mut outgoing = replays.back.outgoing(world.rank());
        other.visit_gradients(|view| outgoing.put(&view.key, &view.slice, view.values))?;
        outgoing.put_state(&other)?;
        let arrived = outgoing.exchange(world)?;
        drop(other);
        Ok(Replayed { arrived, report, peak: device.meter().peak_bytes(), seconds: begun.elapsed().as_secs_f64() })
    }

    /// Compares the step of the run, which is complete, with its replay: loss, norm, gradients, weights and states.
    /// Returns the replay in words. Collective.
    ///
    /// # Errors
    /// The first difference, the same on every rank: [`OtherBits`].
    pub fn compare(&self, trainer: &Trainer, report: &StepReport, replayed: &Replayed) -> Result<String, RankError> {
        let Replayed { arrived, report: again, peak, seconds } = replayed;
        let (mut found, mut vectors, mut left_out) = (None::<Told>, BTreeSet::new(), None);
        let mut compare = |key: &StateKey, slice: &LocalSlice, values: &[f32]| {
            let differs = arrived.differs(key, slice, values).unwrap_or_else(|error| {
                left_out.get_or_insert(error);
                None
            });
            if let Some(Different { at, own, other, holder }) = differs {
                vectors.insert(key.to_string());
                let class = u8::from(key.state.as_deref() != Some(GRADIENT));
                let told = Told {
                    class,
                    key: key.to_string(),
                    at,
                    bits: [own.to_bits(), other.to_bits()],
                    ranks: [self.world.rank(), holder],
                };
                if found.as_ref().is_none_or(|found| told.order() < found.order()) {
                    found = Some(told);
                }
            }
        };
        trainer.visit_gradients(|view| compare(&view.key, &view.slice, view.values))?;
        trainer.visit_state(
            |_| true,
            |view| {
                compare(&view.key, &view.slice, view.values);
                Ok::<_, TrainError>(())
            },
        )?;
        if let Some(error) = left_out {
            return Err(error.into());
        }
        let unread = |rank: usize| {
            move |error| RankError::Differences(vec![format!("rank {rank}: what it compared cannot be read: {error}")])
        };
        let own = serde_json::to_vec(&(found, vectors)).map_err(unread(self.world.rank()))?;
        let (mut told, mut vectors) = (Vec::new(), Vec::new());
        for (rank, bytes) in self.world.all_gather_bytes(&own)?.iter().enumerate() {
            let (first, differing): (Option<Told>, BTreeSet<String>) =
                serde_json::from_slice(bytes).map_err(unread(rank))?;
            told.push(first);
            vectors.push(differing);
        }
        let vectors: BTreeSet<String> = vectors.into_iter().flatten().collect();
        let sums = [("loss", report.loss, again.loss), ("gradient norm", report.grad_norm, again.grad_norm)];
        let sums = sums.iter().filter(|(_, a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()));
        let mut lines: Vec<String> =
            sums.map(|(name, a, b)| format!("the {name} is {a}, and {b} in the replay")).collect();
        let told: Vec<Told> = told.into_iter().flatten().collect();
        if let Some(first) = told.iter().min_by_key(|told| told.order()) {
            let same = || told.iter().filter(|other| other.order() == first.order());
            let ranks = |side: usize| {
                spans(&same().map(|told| told.ranks[side]).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>())
            };
            let [own, other] = first.bits.map(f32::from_bits);
            let more =
                if vectors.len() > 1 { format!("; {} differ", count(vectors.len(), "vector")) } else { String::new() };
            lines.push(format!(
                "{} at {:?} is {own:e} on rank {}, and {other:e} in the replay, on rank {}{more}",
                first.key,
                first.at,
                ranks(0),
                ranks(1)
            ));
        }
        let (mesh, step) = (self.replays.other(), report.step);
        if lines.is_empty() {
            let (memory, sent) = (size(*peak as f64), size(self.replays.bytes() as f64));
            return Ok(format!(
                "step {step} run again on {mesh}: the same bits, {seconds:.2} s; a rank had up to {memory} more and sent up to {sent} more"
            ));
        }
        Err(Box::new(OtherBits { step, of: self.replays.of.clone(), mesh, lines }).into())
    }
}

/// A step on the other mesh.
pub struct Replayed {
    arrived: Arrived,
    report: StepReport,
    peak: u64,
    seconds: f64,
}

/// A difference that a rank found.
#[derive(Serialize, Deserialize)]
struct Told {
    /// Gradients come first: where they differ, so does what is updated by them.
    class: u8,
    key: String,
    at: Vec<usize>,
    bits: [u32; 2],
    /// The rank of the run, and the rank of the replay.
    ranks: [usize; 2],
}

impl Told {
    fn order(&self) -> (u8, &str, &[usize]) {
        (self.class, &self.key, &self.at)
    }
}
