//! A small GPT of un-sharded layers, trained for a few steps: it allocates nothing from the system once it has run, and
//! the meta device counts what the cpu does at every point of it.

use meshwork_core::{Axis, DType, Mesh, Rank, Ty, Types};
use meshwork_cpu::Cpu;
use meshwork_nn::{Embedding, LayerNorm, Mlp, Positions, SelfAttention};
use meshwork_tensor::meta::Meta;
use meshwork_tensor::op::MlpKind;
use meshwork_tensor::tape::{GradShard, GradSink, Mode, Normaliser, Position, Weights};
use meshwork_tensor::{Declarations, Device, ParamId, Params, Result, Tape, Tensor, Var};
use std::sync::Arc;

const BATCH: usize = 2;
const SEQ: usize = 16;
const HIDDEN: usize = 32;
const VOCAB: usize = 50;

struct Gpt {
    tokens: Embedding,
    positions: Positions,
    ln_1: LayerNorm,
    attention: SelfAttention,
    ln_2: LayerNorm,
    mlp: Mlp,
    ln_f: LayerNorm,
}

impl Gpt {
    fn new(params: &mut Declarations) -> Result<Self> {
        Ok(Self {
            tokens: Embedding::new(params, "wte", VOCAB, HIDDEN, 0.02)?,
            positions: Positions::new(params, "wpe", SEQ, HIDDEN, 0.02)?,
            ln_1: LayerNorm::new(params, "ln_1", HIDDEN, true)?,
            attention: SelfAttention::new(params, "attn", HIDDEN, 4, true, 0.02, 0.02)?,
            ln_2: LayerNorm::new(params, "ln_2", HIDDEN, true)?,
            mlp: Mlp::new(params, "mlp", MlpKind::Gelu, [HIDDEN, 4 * HIDDEN], true, [0.02, 0.02])?,
            ln_f: LayerNorm::new(params, "ln_f", HIDDEN, true)?,
        })
    }

    /// The summed loss; `at` is called after each layer.
    fn loss(&self, tape: &Tape, ids: &Var, targets: &Var, at: &mut dyn FnMut()) -> Result<Var> {
        let mut layer = |x: Var| {
            at();
            x
        };
        let x = layer(self.tokens.forward(tape, ids)?);
        let x = layer(self.positions.forward(tape, &x)?.dropout(0.1, "embedding")?);
        let normed = layer(self.ln_1.forward(tape, &x)?);
        let y = layer(self.attention.forward(tape, &normed, None, 0.1)?);
        drop(normed);
        let x = layer(x.add(&y)?);
        let normed = layer(self.ln_2.forward(tape, &x)?);
        let y = layer(self.mlp.forward(tape, &normed)?);
        drop(normed);
        let x = layer(x.add(&y)?);
        let logits = layer(self.tokens.logits(tape, &self.ln_f.forward(tape, &x)?)?);
        Ok(layer(logits.cross_entropy(targets)?))
    }
}

/// Adds up gradients in one flat buffer, as a data-parallel bucket does.
struct Flat<'a> {
    params: &'a Params,
    sum: Tensor,
    at_share: &'a mut dyn FnMut(),
}

impl GradSink for Flat<'_> {
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()> {
        (self.at_share)();
        let start = self.params.place(share.id).1.start;
        let device = Arc::clone(self.sum.device());
        device.pointwise()?.add_assign(self.sum.buffer_mut(), start, grad.buffer())
    }

    fn ready(&mut self, _id: ParamId) -> Result<()> {
        Ok(())
    }
}

/// Trains `steps` steps on a device and calls `at` at every layer and every gradient.
fn train(device: &Arc<dyn Device>, steps: u64, at: &mut dyn FnMut(&str)) {
    let rank = Arc::new(Rank::alone().unwrap());
    let mut declarations = Declarations::new();
    let gpt = Gpt::new(&mut declarations).unwrap();
    let layout = [declarations.ids().collect()];
    let params = Params::new(Arc::new(declarations), rank.mesh(), rank.coords(), device, &layout, 0).unwrap();
    let params = Arc::new(params);
    let ids: Vec<i32> = (0..BATCH * SEQ).map(|i| (i * 7 % VOCAB) as i32).collect();
    for step in 0..steps {
        let position = Position { seed: 0, step, first_sample: 0, rank_samples: 0 };
        let tape = Tape::new(Arc::clone(&rank), Arc::clone(&params), Arc::clone(device), Mode::Train, position);
        let tokens = |ids: &[i32]| tape.constant(Tensor::from_slice(device, ids, [BATCH, SEQ]).unwrap(), Types::NONE);
        let loss = gpt.loss(&tape, &tokens(&ids), &tokens(&ids), &mut || at("forward")).unwrap();
        let sum = Tensor::zeros(device, DType::F32, [params.flats()[0].count()]).unwrap();
        let mut sink = Flat { params: &params, sum, at_share: &mut || at("backward") };
        tape.backward_from_loss(&loss, Normaliser::Scale(1.0), Weights::Now, &mut sink).unwrap();
        at("step");
    }
}

#[test]
fn after_its_second_step_it_allocates_nothing_from_the_system() {
    let cpu = Arc::new(Cpu::default());
    let device: Arc<dyn Device> = Arc::clone(&cpu) as Arc<dyn Device>;
    let mut after = Vec::new();
    train(&device, 6, &mut |at| {
        if at == "step" {
            after.push(cpu.system_allocations());
        }
    });
    assert!(after[0] > 0 && after[1..].iter().all(|&count| count == after[1]), "after each step: {after:?}");
}

#[test]
fn meta_counts_what_the_cpu_does_at_every_layer_and_gradient() {
    let watch = |device: Arc<dyn Device>| {
        let mut seen = Vec::new();
        train(&device, 2, &mut |at| {
            let meter = device.meter();
            seen.push((at.to_owned(), meter.live_bytes(), meter.peak_bytes(), meter.total_flops()));
        });
        seen
    };
    let (cpu, meta) = (watch(Cpu::device()), watch(Meta::device()));
    assert!(cpu.len() > 40);
    for (i, (cpu, meta)) in cpu.iter().zip(&meta).enumerate() {
        assert_eq!(cpu, meta, "(where, live, peak, flops) at point {i}");
    }
    assert_eq!(cpu.len(), meta.len());
}

/// The layers' parameters are whole on every rank, and where the input is sharded they are read as Replicate.
#[test]
fn replicated_parameters_of_a_sharded_input_have_partial_gradients() {
    let mesh: Mesh = "tp=2,dp=2".parse().unwrap();
    let rank = Arc::new(Rank::recording(&mesh, 0).unwrap());
    let mut declarations = Declarations::new();
    let norm = LayerNorm::new(&mut declarations, "ln", HIDDEN, true).unwrap();
    let id = declarations.find("ln.weight").unwrap();
    let (device, layout) = (Meta::device(), [declarations.ids().collect()]);
    let params = Params::new(Arc::new(declarations), &mesh, rank.coords(), &device, &layout, 0).unwrap();
    let params = Arc::new(params);
    let read = |tp: Ty| {
        let tape =
            Tape::new(Arc::clone(&rank), Arc::clone(&params), Arc::clone(&device), Mode::Train, Position::default());
        let x = Tensor::zeros(&device, DType::F32, [BATCH, SEQ, HIDDEN]).unwrap();
        let types = Types::all(&mesh, Ty::Invariant).with(Axis::Tp, tp).with(Axis::Dp, Ty::Shard(0));
        norm.forward(&tape, &tape.input(x, types)).unwrap();
        tape.reads()[&id].dual().partial_axes().collect::<Vec<_>>()
    };
    assert_eq!(read(Ty::Invariant), [Axis::Dp]);
    assert_eq!(read(Ty::Shard(1)), [Axis::Tp, Axis::Dp], "sequence parallel");
}
