//! Runs of a case, and the comparison of two of them.

use crate::case::{Case, Way};
use crate::hand;
use crate::interpret::{self, Net};
use crate::mutate::{Change, Mutant};
use crate::program::Program;
use meshwork_core::Rank;
use meshwork_core::RankEnd;
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::{Numerics, Plan, StatePiece, StepReport, TrainError, TrainState, Trainer, Verify, WholeState};
use meshwork_nn::{Batch, Model};
use meshwork_tensor::Precision;
use meshwork_testkit::parity::norm;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The largest relative difference of numbers that differ by rounding, in f32: those of small networks after two steps.
const TOLERANCE: f64 = 2e-4;
/// The same where the operands of products are bf16.
const TOLERANCE_BF16: f64 = 0.1;
/// And in TF32: eight times as many operands are rounded the other way, each by an eighth as much.
const TOLERANCE_TF32: f64 = TOLERANCE_BF16 / 2.8;

/// Steps of a run.
pub const STEPS: u64 = 2;

/// How a run ended.
#[derive(Clone, Debug)]
pub enum Ended {
    /// With these numbers.
    Numbers(Box<Numbers>),
    /// With a claim that did not hold.
    Claim(String),
    /// With a loss or norm that is not finite.
    NotFinite(String),
    /// With another error.
    Refused(String),
    /// With a panic, which is an error of ours.
    Panicked(String),
}

/// The numbers of a run.
#[derive(Clone, Debug)]
pub struct Numbers {
    /// Of each step: loss, gradient norm and metrics.
    reports: Vec<Vec<f64>>,
    /// Weights, momenta and buffers behind the last step.
    state: BTreeMap<String, Vec<f32>>,
    /// Ranks that hold different numbers where they should hold the same.
    conflict: Option<String>,
}

/// One difference between two runs.
#[derive(Clone, Debug)]
pub struct Difference {
    pub what: String,
    /// Distance over the norm of the reference.
    pub relative: f64,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} differs by a relative {:.1e}", self.what, self.relative)
    }
}

/// What a rank is given to run.
#[derive(Clone, Debug)]
pub struct Given<'a> {
    pub program: Arc<Program>,
    pub plan: Plan,
    /// The mistake that this rank makes.
    pub change: Option<&'a Change>,
    seed: u64,
    /// By what part the initial weights are changed.
    nudge: f32,
}

impl Given<'_> {
    /// These samples of a step.
    pub fn batch(&self, step: u64, samples: Range<usize>) -> Batch {
        let (step, samples) = match self.change {
            Some(Change::Batch) => (step + 7, samples),
            Some(Change::FirstSamples) => (step, 0..samples.len()),
            _ => (step, samples),
        };
        interpret::batch(&self.program, self.seed, step, self.plan.global_batch_size, samples)
    }

    /// Weights that differ from these by a rounding or so.
    pub fn nudged(&self, mut weights: Vec<f32>) -> Vec<f32> {
        let signs = (0u32..).map(|i| if (i ^ i >> 1).is_multiple_of(2) { self.nudge } else { -self.nudge });
        weights.iter_mut().zip(signs).for_each(|(value, nudge)| *value += *value * nudge);
        weights
    }
}

/// On one rank: the oracle, which is a trainer unless nothing is trained.
pub fn alone(case: &Case) -> Ended {
    run(case, &case.alone, None, 0.0)
}

/// Whether a rounding of the weights stays a rounding in every number. A program that makes more of it, such as the
/// norm of numbers that are all but equal, tells nothing: its numbers differ between meshes as well.
pub fn is_steady(case: &Case, alone: &Numbers) -> bool {
    let (nudge, bound) = match (case.plan.numerics, case.plan.precision) {
        (Numerics::Canonical { .. }, _) => return true,
        (_, Precision::F32) => (1e-6, TOLERANCE / 4.0),
        (_, Precision::Tf32) => (4e-3 / 8.0, TOLERANCE_TF32 / 4.0),
        (_, Precision::Bf16) => (4e-3, TOLERANCE_BF16 / 4.0),
    };
    match run(case, &case.alone, None, nudge) {
        Ended::Numbers(nudged) => nudged.apart_by(alone, bound).is_none(),
        _ => false,
    }
}

/// On one rank, with a mutation.
pub fn mutated_alone(case: &Case, mutant: &Mutant) -> Ended {
    run(case, &Plan { verify: Verify::Off, ..case.alone.clone() }, Some(mutant), 0.0)
}

/// On the mesh.
pub fn on_mesh(case: &Case) -> Ended {
    run(case, &case.plan, None, 0.0)
}

/// On the mesh, with a mutation, verified as the case says or not at all.
pub fn mutated(case: &Case, mutant: &Mutant, verified: bool) -> Ended {
    let verify = if verified { case.plan.verify } else { Verify::Off };
    run(case, &Plan { verify, ..case.plan.clone() }, Some(mutant), 0.0)
}

fn run(case: &Case, plan: &Plan, mutant: Option<&Mutant>, nudge: f32) -> Ended {
    let right = Arc::new(case.program.clone());
    let wrong = mutant.map(|mutant| Arc::new(mutant.program(&case.program)));
    let is_alone = plan.mesh.world_size() == 1;
    let loads = case.way == Way::Trainer { load: true };
    let stops = loads || mutant.is_some_and(|mutant| matches!(mutant.change, Change::Weight { .. }));
    let meeting = Mutex::default();
    let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mutant = mutant.filter(|mutant| mutant.on.is_none_or(|on| on == rank.world_rank()));
        let program = wrong.as_ref().filter(|_| mutant.is_some()).unwrap_or(&right).clone();
        let plan = mutant.map_or(plan.clone(), |mutant| mutant.plan(plan));
        let change = mutant.map(|mutant| &mutant.change);
        let given = Given { program, plan, change, seed: case.seed, nudge };
        match case.way {
            Way::Loop if !is_alone => hand::train(&given, rank),
            Way::Decoder => {
                let seq = case.program.seq;
                // In fast numerics one pass over all tokens has the same numbers but for rounding.
                let whole = is_alone && given.plan.blocks().is_none();
                let passes = if whole { vec![seq] } else { passes(seq) };
                Ok((hand::decode(&given, rank, &passes)?, TrainState { step: 0, updates: 0, pieces: Vec::new() }))
            }
            _ => train(&given, rank, loads, stops.then_some(&meeting)),
        }
    });
    match ranks {
        Ok(ranks) => Ended::Numbers(Box::new(Numbers::of(ranks))),
        Err(error) => {
            let panicked = error.ends.iter().flatten().any(|end| matches!(end, RankEnd::Panic(_)));
            let of_numbers = |error| matches!(error, &TrainError::NotFinite { .. } | &TrainError::Weight { .. });
            let not_finite = error.errors().any(of_numbers);
            let claim = error.errors().find_map(|error| match error {
                claim @ (TrainError::Claim { .. } | TrainError::Tensor(meshwork_tensor::Error::Claim { .. })) => {
                    Some(claim.to_string())
                }
                _ => None,
            });
            match claim {
                _ if panicked => Ended::Panicked(error.to_string()),
                Some(claim) => Ended::Claim(claim),
                None if not_finite => Ended::NotFinite(error.cause),
                None => Ended::Refused(error.cause),
            }
        }
    }
}

/// The tokens of the passes of a decoder: a prompt, one token, and the others.
fn passes(seq: usize) -> Vec<usize> {
    let prompt = seq.div_ceil(2);
    [prompt, 1, seq.saturating_sub(prompt + 1)]
        .into_iter()
        .take(if seq > prompt { 3 } else { 1 })
        .filter(|&count| count > 0)
        .collect()
}

/// Trains by a trainer, which may load other weights and states before its last step. For that the ranks meet, for each
/// holds a part.
fn train(
    given: &Given<'_>,
    rank: Arc<Rank>,
    loads: bool,
    meeting: Option<&Mutex<Vec<TrainState>>>,
) -> Result<(Vec<Vec<f64>>, TrainState), TrainError> {
    let model: Arc<dyn Model> = Arc::new(Net(given.program.clone()));
    let mut trainer = Trainer::new(model, &given.plan, rank.clone(), Arc::new(Cpu::new(given.plan.precision)))?;
    if given.nudge != 0.0 {
        let mut state = trainer.state()?;
        for StatePiece { piece, .. } in state.pieces.iter_mut().filter(|held| held.key.state.is_none()) {
            piece.values = given.nudged(std::mem::take(&mut piece.values));
        }
        trainer.load_state(&WholeState::merge(&[state])?)?;
    }
    let mut reports = Vec::new();
    for step in 0..STEPS {
        if let (Some(meeting), true) = (meeting, step + 1 == STEPS) {
            reports.extend(trainer.flush(|_| {})?);
            meeting.lock().unwrap().push(trainer.state()?);
            rank.world().barrier()?;
            let mut states = meeting.lock().unwrap().clone();
            for StatePiece { key, piece } in states.iter_mut().flat_map(|state| &mut state.pieces) {
                if loads {
                    piece.values.iter_mut().for_each(|value| *value *= 0.75);
                }
                if let Some(Change::Weight { name, state }) = given.change
                    && key.parameter == *name
                    && key.state.is_some() == *state
                {
                    piece.values.iter_mut().for_each(|value| *value += 0.25);
                }
            }
            if loads || matches!(given.change, Some(Change::Weight { .. })) {
                trainer.load_state(&WholeState::merge(&states)?)?;
            }
        }
        let batch = given.batch(step, trainer.samples());
        reports.extend(trainer.start_step(&batch, || false, |_| {})?);
    }
    reports.extend(trainer.flush(|_| {})?);
    let numbers = |report: &StepReport| {
        let metrics = report.metrics.iter().map(|(_, mean)| *mean);
        [report.loss, report.grad_norm].into_iter().chain(metrics).collect::<Vec<f64>>()
    };
    Ok((reports.iter().map(numbers).collect(), trainer.state()?))
}

impl Numbers {
    fn of(ranks: Vec<(Vec<Vec<f64>>, TrainState)>) -> Self {
        let (reports, states): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
        let disagree = reports.iter().any(|other| *other != reports[0]).then(|| "the reports of two ranks".to_owned());
        let (state, conflict) = match WholeState::merge(&states) {
            Ok(whole) => {
                let vector = |key| (format!("{key}"), whole.vector(key).unwrap_or_default().to_vec());
                (whole.keys().map(vector).collect(), None)
            }
            Err(error) => (BTreeMap::new(), Some(error.to_string())),
        };
        Self { reports: reports.into_iter().next().unwrap_or_default(), state, conflict: conflict.or(disagree) }
    }

    /// The first difference from the run on one rank: of a bit in canonical numerics, else of more than rounding.
    pub fn differ_from(&self, alone: &Self, plan: &Plan) -> Option<Difference> {
        let tolerance: f64 = match (plan.numerics, plan.precision) {
            (Numerics::Canonical { .. }, _) => 0.0,
            (_, Precision::F32) => TOLERANCE,
            (_, Precision::Tf32) => TOLERANCE_TF32,
            (_, Precision::Bf16) => TOLERANCE_BF16,
        };
        self.apart_by(alone, tolerance)
    }

    fn apart_by(&self, alone: &Self, tolerance: f64) -> Option<Difference> {
        if let Some(what) = &self.conflict {
            return Some(Difference { what: what.clone(), relative: f64::NAN });
        }
        if !self.state.keys().eq(alone.state.keys()) {
            return Some(Difference { what: "the set of parameters".to_owned(), relative: f64::NAN });
        }
        let all = norm(&alone.state.values().flatten().copied().collect::<Vec<f32>>());
        for (step, (got, want)) in self.reports.iter().zip(&alone.reports).enumerate() {
            for (what, (got, want)) in
                ["the loss", "the gradient norm", "a metric", "a metric"].iter().zip(got.iter().zip(want))
            {
                // The sum of an auxiliary loss over stages is in the order of the ranks: its last bit may differ.
                let tolerance = if *what == "a metric" { tolerance.max(1e-14) } else { tolerance };
                let floor = if tolerance > 0.0 { 1e-3 } else { 0.0 };
                let what = format!("{what} of step {}", step + 1);
                if let Some(found) = difference(what, &[*got], &[*want], floor, tolerance) {
                    return Some(found);
                }
            }
        }
        // A gradient that is zero except for rounding has no relative error: it is held against all numbers.
        let floor = if tolerance > 0.0 { 1e-3 * all } else { 0.0 };
        let mut differences = self
            .state
            .iter()
            .filter_map(|(name, got)| difference(name.clone(), got, &alone.state[name], floor, tolerance));
        differences.next()
    }
}

fn difference<T: Copy + Into<f64>>(
    what: String,
    got: &[T],
    want: &[T],
    floor: f64,
    tolerance: f64,
) -> Option<Difference> {
    if got.len() != want.len() {
        return Some(Difference { what: format!("the extent of {what}"), relative: f64::NAN });
    }
    let apart: Vec<f64> = got.iter().zip(want).map(|(&got, &want)| got.into() - want.into()).collect();
    let (distance, size) = (norm(&apart), norm(want).max(floor));
    let within = distance <= tolerance * size; // and a number
    (!within).then(|| Difference { what, relative: distance / size })
}
