//! Runs a program: the one implementation of `Model` behind every program, on any mesh.

use crate::program::{Block, Data, Group, Map, Op, Param, Program, Terms};
use crate::user::{constant, sine, unsent};
use meshwork_core::{Axis, DType, Mesh, Ty};
use meshwork_nn::model::{Metric, Per};
use meshwork_nn::{Activation, Batch, Field, Model, Stage, StageSpec, sample_types};
use meshwork_tensor::op::Mask;
use meshwork_tensor::param::{ParamGroup, StatisticId, StatisticRule};
use meshwork_tensor::{Declarations, Error, ParamId, Placement, Result, Shape, Tape, Tensor, Var, random};
use std::ops::Range;
use std::sync::Arc;

/// The factor of an auxiliary loss.
const PENALTY: f64 = 0.25;
/// The factor on the learning rate of [`Group::Slow`].
const SLOW: f64 = 0.5;

const INPUTS: &str = "inputs";
const TARGETS: &str = "targets";

/// A program as a model.
#[derive(Debug)]
pub struct Net(pub Arc<Program>);

#[derive(Debug)]
struct Part {
    program: Arc<Program>,
    spec: StageSpec,
    /// What each block of this part declared, by the number of the block.
    declared: Vec<(usize, Declared)>,
}

#[derive(Debug, Default)]
struct Declared {
    params: Vec<Option<ParamId>>,
    /// The statistic that updates a buffer.
    statistics: Vec<(usize, StatisticId)>,
}

impl Model for Net {
    fn num_layers(&self) -> usize {
        self.0.layers()
    }

    fn fields(&self) -> Vec<Field> {
        let seq = self.0.seq;
        let field = |name| match self.0.data {
            Data::Tokens { .. } => Field::new(name, DType::I32, [seq]),
            Data::Floats { width } => Field::new(name, DType::F32, [seq, width]),
        };
        [INPUTS, TARGETS].map(field).to_vec()
    }

    fn stage(&self, params: &mut Declarations, mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let back = self.0.back();
        let front = part.first.then_some(0);
        let last = if part.last { back..back + 2 } else { 0..0 };
        let blocks = front.into_iter().chain(part.layers.clone().map(|layer| layer + 1)).chain(last);
        let declared = blocks.map(|number| Ok((number, declare(&self.0.blocks[number], params, mesh)?)));
        let declared = declared.collect::<Result<_>>()?;
        Ok(Box::new(Part { program: self.0.clone(), spec: part.clone(), declared }))
    }

    fn activation(&self, mesh: &Mesh, at: usize, batch: &Batch) -> Result<Activation> {
        let cut = self.0.cuts[at];
        let mut shape = Shape::new(&[batch.samples(), batch.dims(INPUTS)?[0], cut.width]);
        if let Ty::Shard(dim) = cut.ty {
            shape = shape.with(dim, shape[dim] / mesh.degree(cut.axis));
        }
        Ok(Activation { dtype: DType::F32, shape, types: sample_types(mesh).with(cut.axis, cut.ty) })
    }

    fn loss_terms(&self, batch: &Batch, samples: Range<usize>) -> Result<u64> {
        let part = batch.part(samples)?;
        let right = match self.0.data {
            Data::Tokens { .. } => part.values::<i32>(TARGETS)?.iter().filter(|&&target| target >= 0).count(),
            Data::Floats { .. } => part.samples(),
        };
        Ok(match self.0.terms {
            Terms::Right => right,
            Terms::Twice => 2 * right,
            Terms::One => 1,
            Terms::Half => right.div_ceil(2),
        } as u64)
    }

    fn metrics(&self) -> Vec<Metric> {
        ["penalty", "size"].map(|name| Metric { name, per: Per::Sample }).to_vec()
    }
}

fn declare(block: &Block, params: &mut Declarations, mesh: &Mesh) -> Result<Declared> {
    let mut declared = Declared::default();
    for (number, param) in block.params.iter().enumerate() {
        let id = block.reads(number).then(|| declare_param(param, params, mesh)).transpose()?;
        declared.params.push(id);
    }
    for instr in &block.code {
        if let (Op::Centred { buffer }, [..]) = (&instr.op, &instr.args[..])
            && let Some(id) = declared.params[*buffer]
        {
            let features = block.params[*buffer].dims[0];
            declared.statistics.push((*buffer, params.declare_statistic(vec![id], PositiveRate(features))));
        }
    }
    Ok(declared)
}

fn declare_param(param: &Param, params: &mut Declarations, mesh: &Mesh) -> Result<ParamId> {
    let Param { name, dims, wider, cut, padded, role, init, group, tied } = param;
    let mut dims = dims.clone();
    wider.iter().for_each(|&(axis, dim)| dims[dim] *= mesh.degree(axis));
    let mut placement = cut.map_or(Placement::replicated(), |(axis, dim)| Placement::replicated().shard(axis, dim));
    if *padded {
        // As token tables are, with multiples that leave some words on every rank.
        placement = match params.reduction_blocks() {
            Some(blocks) => placement.in_multiples_of(blocks),
            None => placement.in_multiples_of(3).each_in_multiples_of(2),
        };
    }
    let group = match group {
        Group::Usual => ParamGroup::for_role(*role),
        Group::Slow => ParamGroup { learning_rate: SLOW, ..ParamGroup::for_role(*role) },
        Group::Frozen => ParamGroup::FROZEN,
    };
    match tied {
        true => params.tie_in(name, &dims[..], placement, *role, *init, group),
        false => params.declare_in(name, &dims[..], placement, *role, *init, group),
    }
}

/// How often each feature is positive: counts, which add up exactly in any order, and their moving average.
#[derive(Debug)]
struct PositiveRate(usize);

impl StatisticRule for PositiveRate {
    fn terms(&self, tokens: f64, values: &[f32]) -> Vec<f64> {
        let count = |feature| values.iter().skip(feature).step_by(self.0).filter(|&&x| x > 0.0).count() as f64;
        (0..self.0).map(count).chain([tokens]).collect()
    }

    fn update(&self, sums: &[f64], buffers: &mut [Vec<f32>]) {
        for (rate, count) in buffers[0].iter_mut().zip(sums) {
            *rate += 0.25 * ((count / sums[self.0]) as f32 - *rate);
        }
    }
}

impl Stage for Part {
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var> {
        let mut x = match (self.spec.first, input) {
            (false, Some(input)) => input.clone(),
            _ => batch.var(tape, INPUTS)?,
        };
        for (number, declared) in self.declared.iter().filter(|(number, _)| *number <= self.program.back()) {
            x = self.run(*number, declared, tape, batch, x)?;
        }
        Ok(x)
    }

    fn predict(&self, output: &Var) -> Result<Var> {
        let cut = output.types().iter().find_map(|(axis, ty)| (ty == Ty::Shard(2)).then_some(axis));
        cut.map_or(Ok(output.clone()), |axis| output.all_gather_invariant(axis, 2))
    }

    fn loss(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        let (number, declared) = self.declared.last().ok_or_else(|| misfit("a stage without blocks has no loss"))?;
        self.run(*number, declared, tape, batch, output.clone())
    }
}

impl Part {
    fn run(&self, number: usize, declared: &Declared, tape: &Tape, batch: &Batch, input: Var) -> Result<Var> {
        let mut values = vec![input];
        for instr in &self.program.blocks[number].code {
            let args: Vec<&Var> = instr.args.iter().map(|&arg| &values[arg]).collect();
            let value = apply(&instr.op, &args, declared, tape, batch)?;
            values.push(value);
        }
        values.pop().ok_or_else(|| misfit("a block has its input at least"))
    }
}

pub fn misfit(problem: &str) -> Error {
    Error::Shape { op: "program", problem: problem.to_owned(), shapes: Vec::new() }
}

fn apply(op: &Op, args: &[&Var], declared: &Declared, tape: &Tape, batch: &Batch) -> Result<Var> {
    let param = |number: usize| match declared.params[number] {
        Some(id) => tape.param(id),
        None => Err(misfit("a parameter that is read was not declared")),
    };
    let x = args.first().copied();
    let x = || x.ok_or_else(|| misfit("an operation without its operand"));
    let y = || args.get(1).copied().ok_or_else(|| misfit("an operation without its second operand"));
    match op {
        Op::Same => Ok(x()?.clone()),
        Op::Targets => batch.var(tape, TARGETS),
        Op::Constant { salt, dims, axis, holds, says } => constant(tape, *salt, dims, *axis, *holds, *says),
        Op::Retyped { axis, says } => Ok(tape.constant(x()?.tensor().clone(), x()?.types().with(*axis, *says))),

        Op::Unsent(collective) => unsent(tape, x()?, collective),
        Op::Copy(axis) => x()?.copy(*axis),
        Op::AllReduce(axis) => stored(&x()?.all_reduce(*axis)?),
        Op::AllReduceReplicate(axis) => stored(&x()?.all_reduce_replicate(*axis)?),
        Op::AllGather(Axis::Dp, dim) => x()?.all_gather(Axis::DATA, *dim),
        Op::AllGather(axis, dim) => x()?.all_gather(*axis, *dim),
        Op::AllGatherInvariant(axis, dim) => x()?.all_gather_invariant(*axis, *dim),
        Op::ReduceScatter(axis, dim) => stored(&x()?.reduce_scatter(*axis, *dim)?),
        Op::Split(axis, dim) => x()?.split(*axis, *dim),
        Op::Slice(axis, dim) => x()?.slice(*axis, *dim),
        Op::AllToAll(axis, from, to) => x()?.all_to_all(*axis, *from, *to),

        Op::Linear { weight, contract } => x()?.linear(&param(*weight)?, *contract),
        Op::LinearBias { weight, bias } => x()?.linear_bias(&param(*weight)?, &param(*bias)?, 1),
        Op::LinearGelu { weight, bias } => {
            let bias = bias.map(param).transpose()?;
            x()?.linear_gelu(&param(*weight)?, bias.as_ref(), 1)
        }
        Op::LinearSwiglu { weight } => x()?.linear_swiglu(&param(*weight)?, 1),
        Op::Bias { bias } => x()?.bias(&param(*bias)?),
        Op::BiasResidual { bias } => x()?.bias_residual(&param(*bias)?, y()?),
        Op::LayerNorm { gamma, beta } => {
            let beta = beta.map(param).transpose()?;
            x()?.layer_norm(&param(*gamma)?, beta.as_ref(), 1e-5)
        }
        Op::RmsNorm { weight } => x()?.rms_norm(&param(*weight)?, 1e-5),
        Op::Map(Map::Relu) => x()?.relu(),
        Op::Map(Map::Gelu) => x()?.gelu(),
        Op::Map(Map::Silu) => x()?.silu(),
        Op::Map(Map::Tanh) => x()?.tanh(),
        Op::Map(Map::Sigmoid) => x()?.sigmoid(),
        Op::Map(Map::SoftCap) => x()?.soft_cap(2.0),
        Op::Scale(factor) => x()?.scale(*factor),
        Op::Dropout { p, name } => x()?.dropout(*p, name),
        Op::Softmax => x()?.softmax(),
        Op::Add => x()?.add(y()?),
        Op::Sub => x()?.sub(y()?),
        Op::Mul => x()?.mul(y()?),
        Op::Concat { dim } => x()?.concat(y()?, *dim),
        Op::Narrow { dim, range } => x()?.narrow(*dim, range.clone()),
        Op::Transpose(a, b) => x()?.transpose(*a, *b),
        Op::SampleMean => x()?.mean(0),
        Op::TokenShift => {
            let (x, shape) = (x()?, x()?.shape());
            let zeros = tape.constant(Tensor::zeros(tape.device(), x.tensor().dtype(), shape.with(1, 1))?, x.types());
            x.add(&zeros.concat(&x.narrow(1, 0..shape[1] - 1)?, 1)?.scale(0.5)?)
        }
        Op::SplitDim { dim, inner } => x()?.unflatten(*dim, &[extent(x()?, *dim)? / inner, *inner]),
        Op::SplitInto { dim, count } => x()?.unflatten(*dim, &[*count, extent(x()?, *dim)? / count]),
        Op::MergeDims { dim } => x()?.flatten(*dim..dim + 2),
        Op::Attention { dropout, window } => {
            let mask = Mask { window: *window, ..Mask::default() };
            x()?.causal_attention(mask, dropout.as_ref().map(|(p, name)| (*p, &**name)))
        }
        Op::GroupedAttention { window } => {
            x()?.grouped_attention(y()?, None, Mask { window: *window, ..Mask::default() }, None)
        }
        Op::Embedding { table } => x()?.embedding(&param(*table)?),
        Op::VocabEmbedding { table, axis, vocab } => x()?.vocab_parallel_embedding(&param(*table)?, *axis, *vocab),
        Op::Positions { table } => x()?.positions(&param(*table)?),
        Op::User(lie) => sine(tape, x()?, *lie),

        Op::Penalty => {
            tape.add_loss("penalty", PENALTY, &mean_square(tape, x()?)?)?;
            Ok(x()?.clone())
        }
        Op::Report => {
            tape.report("size", &mean_square(tape, x()?)?)?;
            Ok(x()?.clone())
        }
        Op::Centred { buffer } => {
            let id = declared.statistics.iter().find(|(of, _)| of == buffer).map(|(_, id)| *id);
            let tokens = x()?.shape()[..2].iter().product::<usize>();
            tape.note(id.ok_or_else(|| misfit("a buffer without its statistic"))?, tokens as f64, &[x()?.tensor()]);
            x()?.sub(&param(*buffer)?)
        }

        Op::PerExtent { dim } => x()?.scale(1.0 / extent(x()?, *dim)? as f64),
        Op::CrossEntropy => x()?.cross_entropy(y()?),
        Op::VocabCrossEntropy { axis, vocab } => x()?.vocab_parallel_cross_entropy(y()?, *axis, *vocab),
        Op::SquaredError => x()?.mean_squared_error(y()?),
    }
}

/// The value in the type in which the model stores values, once it is no share of a sum any more, and its gradient is
/// none.
fn stored(x: &Var) -> Result<Var> {
    match x.types().iter().any(|(_, ty)| matches!(ty, Ty::Partial | Ty::Replicate)) {
        true => Ok(x.clone()),
        false => x.stored(),
    }
}

/// What this rank has of a dim.
fn extent(x: &Var, dim: usize) -> Result<usize> {
    x.shape().get(dim).copied().ok_or_else(|| misfit("an extent that does not exist"))
}

fn mean_square(tape: &Tape, x: &Var) -> Result<Var> {
    x.mean_squared_error(&tape.constant(Tensor::zeros(tape.device(), DType::F32, x.shape())?, x.types()))
}

/// The samples `samples` of the batch of a step.
pub fn batch(program: &Program, seed: u64, step: u64, global_batch: usize, samples: Range<usize>) -> Batch {
    let first = step * global_batch as u64 + samples.start as u64;
    let uniform = |name: &str, per_sample: usize| {
        let mut values = vec![0f32; samples.len() * per_sample];
        random::fill_uniform(random::key(seed, name), first * per_sample as u64, &mut values);
        values
    };
    let seq = program.seq;
    let batch = Batch::new(samples.len());
    let made = match program.data {
        Data::Tokens { vocab } => {
            let ids = |name| uniform(name, seq).into_iter().map(|u| (u * vocab as f32) as i32).collect::<Vec<i32>>();
            // One in three is masked, and of every third sample all but the first.
            let masked = |(i, u): (usize, f32)| match (samples.start + i / seq).is_multiple_of(3) {
                true => !i.is_multiple_of(seq),
                false => u < 0.33,
            };
            let masks: Vec<bool> = uniform("masks", seq).into_iter().enumerate().map(masked).collect();
            let targets =
                ids(TARGETS).into_iter().zip(masks).map(|(id, masked)| if masked { -1 } else { id }).collect();
            batch.with(INPUTS, [seq], ids(INPUTS)).and_then(|batch| batch.with(TARGETS, [seq], targets))
        }
        Data::Floats { width } => {
            let floats = |name| uniform(name, seq * width).into_iter().map(|u| 2.0 * u - 1.0).collect::<Vec<f32>>();
            let dims = [seq, width];
            batch.with(INPUTS, dims, floats(INPUTS)).and_then(|batch| batch.with(TARGETS, dims, floats(TARGETS)))
        }
    };
    made.expect("as many values as the samples have")
}

/// Some tokens of each sample, for a decoder.
pub fn tokens(program: &Program, batch: &Batch, range: Range<usize>) -> Result<Batch> {
    fn cut<T: Copy>(values: &[T], seq: usize, width: usize, range: &Range<usize>) -> Vec<T> {
        let rows = values.chunks(seq * width).flat_map(|sample| &sample[range.start * width..range.end * width]);
        rows.copied().collect()
    }
    let (seq, some) = (program.seq, Batch::new(batch.samples()));
    [INPUTS, TARGETS].into_iter().try_fold(some, |some, name| match program.data {
        Data::Tokens { .. } => some.with(name, [range.len()], cut(batch.values::<i32>(name)?, seq, 1, &range)),
        Data::Floats { width } => {
            some.with(name, [range.len(), width], cut(batch.values::<f32>(name)?, seq, width, &range))
        }
    })
}
