//! A model that asks the engine for everything that it offers: auxiliary losses, metrics, parameter groups, frozen
//! parameters, and statistics whose buffers training reads.

use meshwork_core::{Axis, DType, Mesh};
use meshwork_engine::Plan;
use meshwork_nn::model::{Metric, Per};
use meshwork_nn::{Activation, Batch, Field, Model, Stage, StageSpec, sample_types};
use meshwork_optim::{Decay, LrSchedule, Sgd};
use meshwork_tensor::param::{ParamGroup, StatisticId, StatisticRule};
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Shape, Tape, Tensor, Var, random};
use std::ops::Range;
use std::sync::Arc;

pub const HIDDEN: usize = 16;
pub const BATCH: usize = 8;
/// Factor of the auxiliary loss.
pub const PENALTY: f64 = 0.25;
/// Factor on the learning rate of one weight.
pub const SLOW: f64 = 0.5;
pub const RATE: f64 = 0.0625;

/// A deliberate mistake.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mistake {
    None,
    /// A parameter that no stage reads.
    Unread,
    /// A metric that the model does not declare.
    UndeclaredMetric,
    /// An auxiliary loss that is `Replicate` on tp.
    ReplicateLoss,
    /// A metric that is not one number for each sample.
    ShapeOfMetric,
    /// A stage that makes another activation than the model says.
    Activation,
    /// Blocks that draw their dropout masks under one name.
    SharedMask,
    /// A head whose read is Invariant on tp for the first samples, and Replicate for others.
    DependsOnSamples,
}

/// A residual tower for regression: a frozen stem, blocks whose outputs are kept small by an auxiliary loss, and a
/// head. Each block subtracts from what it reads how often each feature was positive in the steps before.
#[derive(Debug)]
pub struct Tower {
    pub layers: usize,
    pub mistake: Mistake,
}

#[derive(Debug)]
struct Part {
    stem: Option<ParamId>,
    blocks: Vec<Block>,
    head: Option<ParamId>,
    mistake: Mistake,
}

#[derive(Debug)]
struct Block {
    up: ParamId,
    down: ParamId,
    rate: ParamId,
    positive: StatisticId,
}

/// How often each feature is positive: counts, which add up exactly in any order, and their moving average.
#[derive(Debug)]
struct PositiveRate;

impl StatisticRule for PositiveRate {
    fn terms(&self, samples: f64, values: &[f32]) -> Vec<f64> {
        let count = |feature| values.iter().skip(feature).step_by(HIDDEN).filter(|&&x| x > 0.0).count() as f64;
        (0..HIDDEN).map(count).chain([samples]).collect()
    }

    fn update(&self, sums: &[f64], buffers: &mut [Vec<f32>]) {
        for (rate, count) in buffers[0].iter_mut().zip(sums) {
            *rate += 0.25 * ((count / sums[HIDDEN]) as f32 - *rate);
        }
    }
}

impl Model for Tower {
    fn num_layers(&self) -> usize {
        self.layers
    }

    fn fields(&self) -> Vec<Field> {
        ["x", "y"].map(|name| Field::new(name, DType::F32, [4])).to_vec()
    }

    fn stage(&self, params: &mut Declarations, _: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let init = Init::Normal { std: 0.25 };
        let whole = Placement::replicated;
        let frozen = |params: &mut Declarations, name: &str, dims: &[usize]| {
            params.declare_in(name, dims, whole(), Role::Weight, init, ParamGroup::FROZEN)
        };
        let stem = part.first.then(|| frozen(params, "stem", &[HIDDEN, 4])).transpose()?;
        let mut block = |layer: usize| {
            let slow = ParamGroup { learning_rate: SLOW, ..ParamGroup::for_role(Role::Weight) };
            let (up, down) = (whole().shard(Axis::Tp, 0), whole().shard(Axis::Tp, 1));
            let name = |part: &str| format!("block.{layer}.{part}");
            let rate = params.declare(name("rate"), &[HIDDEN], whole(), Role::Buffer, Init::Zeros)?;
            Ok(Block {
                up: params.declare(name("up"), &[2 * HIDDEN, HIDDEN], up, Role::Weight, init)?,
                down: params.declare_in(name("down"), &[HIDDEN, 2 * HIDDEN], down, Role::Weight, init, slow)?,
                rate,
                positive: params.declare_statistic(vec![rate], PositiveRate),
            })
        };
        let blocks = part.layers.clone().map(&mut block).collect::<Result<_>>()?;
        if self.mistake == Mistake::Unread {
            params.declare("forgotten", &[3], whole(), Role::Weight, init)?;
        }
        let head = part.last.then(|| params.declare("head", &[4, HIDDEN], whole(), Role::Weight, init)).transpose()?;
        Ok(Box::new(Part { stem, blocks, head, mistake: self.mistake }))
    }

    fn activation(&self, mesh: &Mesh, _: usize, batch: &Batch) -> Result<Activation> {
        let hidden = if self.mistake == Mistake::Activation { 2 * HIDDEN } else { HIDDEN };
        Ok(Activation { dtype: DType::F32, shape: Shape::new(&[batch.samples(), hidden]), types: sample_types(mesh) })
    }

    fn metrics(&self) -> Vec<Metric> {
        ["penalty", "size"].map(|name| Metric { name, per: Per::Sample }).to_vec()
    }
}

/// The mean square of each sample.
fn size(tape: &Tape, x: &Var) -> Result<Var> {
    let zeros = Tensor::zeros(tape.device(), DType::F32, x.shape())?;
    x.mean_squared_error(&tape.constant(zeros, x.types()))
}

impl Stage for Part {
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var> {
        let mut x = match (self.stem, input) {
            (Some(stem), _) => batch.var(tape, "x")?.linear(&tape.param(stem)?, 1)?,
            (None, Some(input)) => input.clone(),
            (None, None) => unreachable!("a stage behind the first has an input"),
        };
        for block in &self.blocks {
            tape.note(block.positive, x.shape()[0] as f64, &[x.tensor()]);
            let read = x.sub(&tape.param(block.rate)?)?.copy(Axis::Tp)?;
            let inner = read.linear(&tape.param(block.up)?, 1)?.relu()?;
            if self.mistake == Mistake::SharedMask {
                x = x.dropout(0.5, "mask")?;
            }
            x = x.add(&inner.linear(&tape.param(block.down)?, 1)?.all_reduce(Axis::Tp)?)?;
            let penalty = size(tape, &x)?;
            match self.mistake {
                Mistake::ReplicateLoss => tape.add_loss("penalty", PENALTY, &size(tape, &x.copy(Axis::Tp)?)?)?,
                Mistake::UndeclaredMetric => tape.report("sizes", &penalty)?,
                Mistake::ShapeOfMetric => tape.report("size", &x)?,
                _ => tape.add_loss("penalty", PENALTY, &penalty)?,
            }
        }
        let Some(head) = self.head else { return Ok(x) };
        if self.mistake == Mistake::DependsOnSamples && tape.first_sample() > 0 {
            let output = x.copy(Axis::Tp)?.linear(&tape.param(head)?, 1)?;
            return output.slice(Axis::Tp, 1)?.all_gather_invariant(Axis::Tp, 1);
        }
        x.linear(&tape.param(head)?, 1)
    }

    fn loss(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        tape.report("size", &size(tape, output)?)?;
        output.mean_squared_error(&batch.var(tape, "y")?)
    }
}

pub fn batch(step: usize, samples: Range<usize>) -> Batch {
    let field = |name: &str| {
        let mut values = vec![0f32; samples.len() * 4];
        random::fill_uniform(random::key(7, name), ((step * BATCH + samples.start) * 4) as u64, &mut values);
        values
    };
    let batch = Batch::new(samples.len()).with("x", [4], field("x")).unwrap();
    batch.with("y", [4], field("y")).unwrap()
}

pub fn plan(mesh: &str) -> Plan {
    Plan {
        mesh: mesh.parse().unwrap(),
        global_batch_size: BATCH,
        num_microbatches: None,
        optimizer: Sgd::default().into(),
        lr: LrSchedule { base: RATE, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 },
        max_norm: 0.0,
        ..Plan::default()
    }
}

pub fn tower(layers: usize) -> Arc<dyn Model> {
    Arc::new(Tower { layers, mistake: Mistake::None })
}
