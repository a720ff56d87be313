//! A small GPT-2 of parallel layers, trained for a few steps on a device whose memory the host cannot read: bit for bit
//! what the CPU trains, and one download a step, however many micro-batches it has.

use meshwork_core::comm::ReduceOp;
use meshwork_core::{Axis, Buffer, Communicator, DType, Mesh, Rank, Ty, Types};
use meshwork_cpu::Cpu;
use meshwork_nn::{LayerNorm, Positions};
use meshwork_optim::{AdamW, Rule, Sgd, Update, clip_factor};
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::FlatParts;
use meshwork_tensor::op::MlpKind;
use meshwork_tensor::tape::{GradShard, GradSink, GradSlot, Mode, Normaliser, Position, Selective, Weights};
use meshwork_tensor::{Declarations, Device, Init, ParamId, Params, Result, Role, Tape, Tensor, Var};
use meshwork_tensor_parallel::{ParallelAttention, ParallelMlp, Region, VocabParallelEmbedding};
use meshwork_testkit::opaque::{self, Opaque};
use meshwork_testkit::run_world;
use std::rc::Rc;
use std::sync::Arc;

const SAMPLES: usize = 4;
const SEQ: usize = 8;
const HIDDEN: usize = 16;
const VOCAB: usize = 70;
const STEPS: u64 = 3;
const DROPOUT: f32 = 0.1;

struct Gpt {
    tokens: VocabParallelEmbedding,
    positions: Positions,
    blocks: Vec<(LayerNorm, ParallelAttention, LayerNorm, ParallelMlp)>,
    norm: LayerNorm,
}

impl Gpt {
    fn new(params: &mut Declarations, mesh: &Mesh) -> Result<Self> {
        let init = Init::Normal { std: 0.02 };
        let mut block = |i: usize| {
            let name = |part| format!("h.{i}.{part}");
            Ok((
                LayerNorm::new(params, &name("ln_1"), HIDDEN, true)?,
                ParallelAttention::new(params, mesh, &name("attn"), HIDDEN, 4, true, [init, init])?,
                LayerNorm::new(params, &name("ln_2"), HIDDEN, true)?,
                ParallelMlp::new(params, mesh, &name("mlp"), MlpKind::Gelu, [HIDDEN, 4 * HIDDEN], true, [init, init])?,
            ))
        };
        Ok(Self {
            blocks: (0..2).map(&mut block).collect::<Result<_>>()?,
            tokens: VocabParallelEmbedding::new(params, "wte", VOCAB, HIDDEN, init)?,
            positions: Positions::new(params, "wpe", SEQ, HIDDEN, 0.02)?,
            norm: LayerNorm::new(params, "ln_f", HIDDEN, true)?,
        })
    }

    /// The loss of each sample.
    fn losses(&self, tape: &Tape, ids: &Var, targets: &Var, region: Region) -> Result<Var> {
        let x = self.tokens.embed(tape, ids, region)?;
        let mut x = self.positions.forward(tape, &x)?.dropout(DROPOUT, "embedding")?;
        for (ln_1, attention, ln_2, mlp) in &self.blocks {
            x = attention.forward(tape, &ln_1.operand(tape, &x)?, region, Some(&x), None, DROPOUT)?;
            x = mlp.forward(tape, &ln_2.operand(tape, &x)?, region, Some(&x), DROPOUT)?;
        }
        let logits = self.tokens.logits(tape, &self.norm.operand(tape, &x)?, region)?;
        self.tokens.loss(&logits, targets)
    }
}

/// Gradients in a flat vector on the device, written by the operations where they can.
struct Bucket<'a> {
    params: &'a Params,
    device: &'a dyn Device,
    all: &'a mut Buffer,
    empty: &'a mut [bool],
}

impl GradSink for Bucket<'_> {
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()> {
        let start = self.params.place(share.id).1.start;
        match std::mem::take(&mut self.empty[share.id.index()]) {
            true => self.device.layout()?.copy_into(grad.buffer(), 0..grad.count(), self.all, start),
            false => self.device.pointwise()?.add_assign(self.all, start, grad.buffer()),
        }
    }

    fn place(&mut self, share: &GradShard) -> Result<Option<GradSlot<'_>>> {
        let first = std::mem::take(&mut self.empty[share.id.index()]);
        Ok(Some(GradSlot { buffer: self.all, start: self.params.place(share.id).1.start, first }))
    }

    fn ready(&mut self, _id: ParamId) -> Result<()> {
        Ok(())
    }
}

/// A training run: the cut of the batch, the layout of activations, and the update rule.
#[derive(Clone)]
struct Run {
    micros: usize,
    region: Region,
    rule: Rule,
    precision: Precision,
}

/// The results of a run on one rank, in bits: per step the losses of the samples and the norm; then weights and states.
#[derive(Debug, PartialEq)]
struct Trained {
    measured: Vec<Vec<u64>>,
    values: Vec<Vec<u32>>,
    /// Downloads of each step.
    downloads: Vec<u64>,
}

fn ids(tape: &Tape, first: usize, samples: usize, times: usize) -> Var {
    let ids: Vec<i32> = (first * SEQ..(first + samples) * SEQ).map(|i| (i * times % VOCAB) as i32).collect();
    let types = Types::all(tape.rank().mesh(), Ty::Invariant);
    tape.constant(Tensor::from_slice(tape.device(), &ids, [samples, SEQ]).unwrap(), types)
}

fn train(run: &Run, mesh: &Mesh, world: Arc<dyn Communicator>, device: Arc<dyn Device>) -> Result<Trained> {
    let rank = Arc::new(Rank::new(mesh, world)?);
    let mut declarations = Declarations::new();
    let gpt = Gpt::new(&mut declarations, mesh)?;
    let (all, declarations) = (declarations.ids().collect::<Vec<_>>(), Arc::new(declarations));
    let mut params =
        Arc::new(Params::new(declarations.clone(), mesh, rank.coords(), &device, std::slice::from_ref(&all), 7)?);
    let count = params.flats()[0].count();
    let names = run.rule.state_names().iter();
    let mut states = names.map(|_| device.zeros(DType::F32, count)).collect::<Result<Vec<_>>>()?;
    let mut grads = device.zeros(DType::F32, count)?;
    // The first rank counts what is whole on every rank.
    let counts = |types: Types| rank.coords().get(Axis::Tp) == 0 || matches!(types.get(Axis::Tp), Some(Ty::Shard(_)));
    let (mut measured, mut downloads) = (Vec::new(), Vec::new());
    for step in 1..=STEPS {
        let before = device.meter().downloads().calls;
        // [losses of the samples | squared norm]
        let mut sums = device.zeros(DType::F64, SAMPLES + 1)?;
        let mut empty = vec![true; all.len()];
        let mut reads = Default::default();
        let samples = SAMPLES / run.micros;
        for first in (0..SAMPLES).step_by(samples) {
            let position = Position { seed: 3, step, first_sample: first as u64, rank_samples: 0 };
            let (mode, policy) = (Mode::Train, Rc::new(Selective));
            let tape = Tape::with_policy(rank.clone(), params.clone(), device.clone(), mode, position, policy);
            let (ids, targets) = (ids(&tape, first, samples, 5), ids(&tape, first, samples, 7));
            let losses = gpt.losses(&tape, &ids, &targets, run.region)?;
            if counts(losses.types()) {
                device.layout()?.copy_into(losses.tensor().buffer(), 0..samples, &mut sums, first)?;
            }
            let mut sink = Bucket { params: &params, device: &*device, all: &mut grads, empty: &mut empty };
            tape.backward_from_loss(&losses, Normaliser::Scale(1.0 / (SAMPLES * SEQ) as f64), Weights::Now, &mut sink)?;
            reads = tape.reads();
        }
        let tp = rank.group(Axis::Tp);
        for &id in &all {
            let (_, range) = params.place(id);
            if reads[&id].get(Axis::Tp) == Some(Ty::Replicate) {
                let partial = device.layout()?.copy(&grads.slice(range.clone())?)?;
                let whole = tp.all_reduce(partial, ReduceOp::Sum)?;
                device.layout()?.copy_into(&whole, 0..range.len(), &mut grads, range.start)?;
            }
            if counts(params.types(id)) {
                device.optim()?.sum_of_squares(&[grads.slice(range)?], &mut sums, SAMPLES)?;
            }
        }
        let sums = device.download(&tp.all_reduce(sums, ReduceOp::Sum)?)?;
        let sums = sums.as_slice::<f64>()?;
        measured.push(sums.iter().map(|sum| sum.to_bits()).collect());
        let weights = Arc::get_mut(&mut params).expect("no tape is left");
        for &id in &all {
            let decay_factor = if declarations.spec(id).role == Role::Weight { 1.0 } else { 0.0 };
            let update = Update { step, lr: 0.01, grad_scale: clip_factor(sums[SAMPLES].sqrt(), 1.0), decay_factor };
            let (flat, range) = weights.place(id);
            let weights = &mut weights.flats_mut()[flat];
            let parts = FlatParts { weights, grads: &grads, states: &mut states, ranges: &[range] };
            device.optim()?.update(&run.rule, update, &mut [parts])?;
        }
        downloads.push(device.meter().downloads().calls - before);
    }
    let bits = |values: Vec<f32>| values.iter().map(|value| value.to_bits()).collect();
    let mut values = Vec::new();
    for &id in &all {
        values.push(bits(params.read(id)?));
        for state in &states {
            values.push(bits(params.read_from(id, state)?));
        }
    }
    Ok(Trained { measured, values, downloads })
}

/// On the CPU or behind opaque memory, over `degree` ranks of tp.
fn train_over_tp(run: &Run, degree: usize, behind: bool) -> Vec<Trained> {
    let mesh = Mesh::new([(Axis::Tp, degree)]).unwrap();
    run_world(degree, |world| {
        let (world, cpu) = (Arc::clone(world.communicator()), Arc::new(Cpu::new(run.precision)));
        match behind {
            true => train(run, &mesh, opaque::communicator(world), Opaque::device(cpu)).unwrap(),
            false => train(run, &mesh, world, cpu).unwrap(),
        }
    })
}

#[test]
fn a_gpt_trains_to_the_cpus_bits_where_the_host_reads_no_memory() {
    let adamw = Rule::from(AdamW::default());
    let sgd = Rule::from(Sgd { momentum: 0.9, weight_decay: 0.1 });
    let run = |micros, region, rule: &Rule| Run { micros, region, rule: rule.clone(), precision: Precision::F32 };
    let runs = [
        run(1, Region::INVARIANT, &adamw),
        run(2, Region::SEQUENCE_PARALLEL, &sgd),
        run(4, Region::SEQUENCE_PARALLEL, &adamw),
        Run { precision: Precision::Bf16, ..run(2, Region::INVARIANT, &adamw) },
    ];
    for run in runs {
        for degree in [1, 2] {
            let reference = train_over_tp(&run, degree, false);
            let got = train_over_tp(&run, degree, true);
            let what = format!("{} micro-batches, tp={degree}, {:?}, {:?}", run.micros, run.region, run.precision);
            assert!(got == reference, "{what}: {got:?} instead of {reference:?}");
            assert!(got.iter().all(|rank| rank.downloads == [1; STEPS as usize]), "{what}: downloads of each step");
            let loss = |step: usize| -> f64 {
                got[0].measured[step][..SAMPLES].iter().map(|&loss| f64::from_bits(loss)).sum()
            };
            assert!(loss(0) > 1.01 * loss(STEPS as usize - 1), "{what}: it trains");
        }
    }
}
