//! A model written by hand whose sequence cp cuts, alone and inside of tp: it trains to the bits of one rank, however
//! its attention exchanges what ranks hold. A model that cuts nothing over cp is refused.

mod models;

use crate::runs::{Vectors, on_ranks, vectors};
use meshwork_core::{Axes, Axis, DType, Mesh, Ty, World};
use meshwork_cpu::Cpu;
use meshwork_engine::{
    Decoder, Numerics, Plan, Recompute, ScheduleSpec, StepReport, TrainError, Trainer, Verify, Zero, ZeroStage,
    dry_run, one_rank,
};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language::{self, TARGETS, TOKENS};
use meshwork_models::llama::{LLAMA, Llama, LlamaConfig};
use meshwork_nn::{Activation, Batch, Field, Model, RmsNorm, Stage, StageSpec, sample_types};
use meshwork_optim::{Decay, LrSchedule, Rule, Sgd};
use meshwork_tensor::op::Rotary;
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Declarations, Init, ParamId, ParamSpec, Placement, Result, Role, Shape, Tape, Var};
use std::sync::Arc;

const SEQ: usize = 16;
const VOCAB: usize = 30;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 6;
const WIDTH: usize = HEADS * HEAD;
const LAYERS: usize = 2;

/// What ranks of cp exchange in an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    /// Keys and values of all tokens come to every rank.
    AllGather,
    /// Each rank gets all tokens of some of the heads.
    AllToAll,
}

/// Blocks of attention and a feed-forward layer. Between operations that mix tokens, tp and cp cut the sequence; in
/// them cp alone.
#[derive(Clone, Copy, Debug)]
struct Long {
    method: Method,
    /// Whether the batch gives each rank its tokens, or the embedding of all is cut.
    from_batch: bool,
    dropout: f32,
}

#[derive(Debug)]
struct Block {
    norm: RmsNorm,
    q: [ParamId; 2],
    kv: ParamId,
    out: ParamId,
    up: [ParamId; 2],
    down: ParamId,
    name: String,
}

#[derive(Debug)]
struct Part {
    of: Long,
    embedding: Option<[ParamId; 2]>,
    blocks: Vec<Block>,
    head: Option<ParamId>,
}

/// The axes of a mesh that cut the sequence between operations that mix tokens.
fn cut_over(mesh: &Mesh) -> Axes {
    [Axis::Tp, Axis::Cp].into_iter().filter(|&axis| mesh.has(axis)).collect()
}

/// A field of a number for each token, of which each rank of cp takes its own.
fn of_tokens(field: Field) -> Field {
    field.sequence(0, Axis::Cp)
}

impl Model for Long {
    fn num_layers(&self) -> usize {
        LAYERS
    }

    fn fields(&self) -> Vec<Field> {
        language::fields(SEQ, VOCAB, language::Boundary::Ignored)
    }

    fn stage(&self, params: &mut Declarations, _: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let init = Init::Normal { std: 0.3 };
        let weight = |params: &mut Declarations, name: String, dims: &[usize]| {
            params.declare(name, dims, Placement::replicated(), Role::Weight, init)
        };
        let bias = |params: &mut Declarations, name: String, dims: &[usize]| {
            params.declare(name, dims, Placement::replicated(), Role::Bias, init)
        };
        let embedding = match part.first {
            true => Some([
                weight(params, "tokens".into(), &[VOCAB, WIDTH])?,
                weight(params, "places".into(), &[SEQ, WIDTH])?,
            ]),
            false => None,
        };
        let block = |layer| {
            let name = |part: &str| format!("layers.{layer}.{part}");
            Ok(Block {
                norm: RmsNorm::new(params, &name("norm"), WIDTH, 1e-5)?,
                q: [weight(params, name("q"), &[HEADS, HEAD, WIDTH])?, bias(params, name("q_bias"), &[HEADS, HEAD])?],
                kv: weight(params, name("kv"), &[2, KV_HEADS * HEAD, WIDTH])?,
                out: weight(params, name("out"), &[WIDTH, HEADS, HEAD])?,
                up: [weight(params, name("up"), &[2 * WIDTH, WIDTH])?, bias(params, name("up_bias"), &[2 * WIDTH])?],
                down: weight(params, name("down"), &[WIDTH, 2 * WIDTH])?,
                name: name("attention"),
            })
        };
        let blocks = part.layers.clone().map(block).collect::<Result<_>>()?;
        let head = part.last.then(|| weight(params, "head".into(), &[VOCAB, WIDTH])).transpose()?;
        Ok(Box::new(Part { of: *self, embedding, blocks, head }))
    }

    fn activation(&self, mesh: &Mesh, _: usize, batch: &Batch) -> Result<Activation> {
        let over = cut_over(mesh);
        let ranks: usize = over.iter().map(|&axis| mesh.degree(axis)).product();
        let types = over.iter().fold(sample_types(mesh), |types, &axis| types.with(axis, Ty::Shard(1)));
        Ok(Activation { dtype: DType::F32, shape: Shape::new(&[batch.samples(), SEQ / ranks, WIDTH]), types })
    }

    fn loss_terms(&self, batch: &Batch, samples: std::ops::Range<usize>) -> Result<u64> {
        language::unmasked(batch, samples)
    }
}

impl Part {
    fn block(&self, tape: &Tape, x: &Var, of: &Block) -> Result<Var> {
        let param = |id| tape.param(id);
        let normed = of.norm.forward(tape, x)?; // [b, s/(tp·cp), h]
        let here = normed.all_gather_invariant(Axis::Tp, 1)?; // [b, s/cp, h]
        let [w, b] = of.q;
        let q = here.linear_bias(&param(w)?, &param(b)?, 1)?; // [b, s/cp, heads, d]
        let kv = here.linear(&param(of.kv)?, 1)?; // [b, s/cp, 2, kv_heads · d]
        let (rotary, dropout) = (Some(Rotary::new(20.0)), Some((self.of.dropout, &*of.name)));
        let mixed = match self.of.method {
            Method::AllGather => q.grouped_attention(&kv.all_gather(Axis::Cp, 1)?, rotary, None, dropout)?,
            Method::AllToAll => {
                let (q, kv) = (q.all_to_all(Axis::Cp, 1, 2)?, kv.all_to_all(Axis::Cp, 1, 3)?);
                q.grouped_attention(&kv, rotary, None, dropout)?.all_to_all(Axis::Cp, 2, 1)?
            }
        }; // [b, s/cp, heads, d]
        let y = mixed.linear(&param(of.out)?, 2)?.split(Axis::Tp, 1)?;
        let x = x.add(&y.dropout(self.of.dropout, &format!("{}.out", of.name))?)?;
        let [w, b] = of.up;
        let inner = x.all_gather_invariant(Axis::Tp, 1)?.linear_gelu(&param(w)?, &param(b)?, 1)?;
        x.add(&inner.linear(&param(of.down)?, 1)?.split(Axis::Tp, 1)?)
    }
}

impl Stage for Part {
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var> {
        let x = match self.embedding {
            Some([tokens, places]) => {
                let tokens = match self.of.from_batch {
                    true => {
                        let field = of_tokens(Field::ids(TOKENS, [SEQ], 0..VOCAB as i32));
                        batch.var(tape, &field)?.embedding(&tape.param(tokens)?)?
                    }
                    false => batch.var(tape, TOKENS)?.embedding(&tape.param(tokens)?)?.split(Axis::Cp, 1)?,
                };
                tokens.split(Axis::Tp, 1)?.positions(&tape.param(places)?)?
            }
            None => input.expect("a hidden state").clone(),
        };
        self.blocks.iter().try_fold(x, |x, of| self.block(tape, &x, of))
    }

    fn loss(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        let whole = output.all_gather_invariant(cut_over(tape.rank().mesh()), 1)?;
        let head = tape.param(self.head.expect("the last stage"))?;
        whole.linear(&head, 1)?.cross_entropy(&batch.var(tape, TARGETS)?)
    }
}

fn long(method: Method, from_batch: bool, dropout: f32) -> Arc<dyn Model> {
    Arc::new(Long { method, from_batch, dropout })
}

fn batch(samples: usize) -> Batch {
    let ids = |times: usize| (0..samples * SEQ).map(move |at| ((at * times + at / 7) % VOCAB) as i32);
    let targets = ids(11).map(|id| if id == 3 { -1 } else { id }).collect();
    language::batch(ids(5).collect(), targets, SEQ).unwrap()
}

fn plan(mesh: &str, numerics: Numerics) -> Plan {
    Plan {
        mesh: mesh.parse().unwrap(),
        global_batch_size: 4,
        optimizer: Rule::from(Sgd { momentum: 0.0, weight_decay: 0.0 }),
        lr: LrSchedule { base: 1.0, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 },
        max_norm: 0.0,
        numerics,
        ..Plan::default()
    }
}

/// Steps of gradient descent with rate 1.
fn train(model: &Arc<dyn Model>, plan: &Plan, steps: usize, behind: bool) -> (Vec<StepReport>, Vectors) {
    let (mut reports, state) = on_ranks(model, plan, behind, |trainer| {
        let batch = batch(plan.global_batch_size).part(trainer.samples())?;
        (0..steps).map(|_| trainer.step(&batch)).collect::<std::result::Result<Vec<_>, _>>()
    });
    (reports.swap_remove(0), vectors(&state))
}

/// Every method, whatever cuts the sequence, has the bits that it has on one rank; all methods have the same.
#[test]
fn a_sequence_that_cp_cuts_has_the_bits_of_one_rank() {
    let numerics = Numerics::Canonical { blocks: 4 };
    let mut of_methods = Vec::new();
    for from_batch in [false, true] {
        for method in [Method::AllGather, Method::AllToAll] {
            let model = long(method, from_batch, 0.2);
            let (want, weights) = train(&model, &plan("tp=1,cp=1", numerics), 2, false);
            for (mesh, schedule, micros, recompute, stage, behind) in [
                ("tp=1,cp=2", "1f1b", 1, Recompute::None, ZeroStage::Off, false),
                ("tp=2,cp=2", "1f1b", 2, Recompute::Selective, ZeroStage::Off, false),
                ("dp=2,tp=1,cp=2", "1f1b", 1, Recompute::None, ZeroStage::States, true),
                ("dp=2,tp=1,cp=2", "1f1b", 2, Recompute::Full, ZeroStage::Gradients, false),
                ("dp=2,tp=1,cp=4", "1f1b", 1, Recompute::None, ZeroStage::Weights, false),
                ("pp=2,tp=1,cp=2", "zb_h1", 4, Recompute::Stage, ZeroStage::Off, false),
                ("tp=2,cp=1", "1f1b", 4, Recompute::None, ZeroStage::Off, false),
            ] {
                if method == Method::AllToAll && mesh.ends_with("cp=4") {
                    continue; // two heads of keys and values
                }
                let (schedule, zero) = (ScheduleSpec::named(schedule).unwrap(), Zero { stage, group: None });
                let plan = Plan { schedule, num_microbatches: Some(micros), recompute, zero, ..plan(mesh, numerics) };
                let (found, found_weights) = train(&model, &plan, 2, behind);
                for (found, want) in found.iter().zip(&want) {
                    let what = format!("{mesh}, {method:?}, from the batch {from_batch}");
                    assert_eq!((found.loss, found.grad_norm), (want.loss, want.grad_norm), "{what}");
                    assert!(found_weights == weights, "{what}");
                }
            }
            of_methods.push((want[1].loss, weights));
        }
    }
    // Heads of keys and values are exchanged whole: the order of sums is that of the slices of queries, or none.
    let [gathered, exchanged] = [&of_methods[0], &of_methods[1]];
    assert!((gathered.0 - exchanged.0).abs() <= 1e-4 * gathered.0.abs(), "{} and {}", gathered.0, exchanged.0);
}

/// In fast numerics meshes differ by rounding alone.
#[test]
fn a_sequence_that_cp_cuts_has_the_gradients_of_one_rank() {
    for method in [Method::AllGather, Method::AllToAll] {
        let model = long(method, true, 0.1);
        let (want, weights) = train(&model, &plan("tp=1,cp=1", Numerics::Fast), 1, false);
        for mesh in ["tp=1,cp=2", "tp=2,cp=2", "dp=2,tp=1,cp=2"] {
            let (found, found_weights) = train(&model, &plan(mesh, Numerics::Fast), 1, false);
            assert!((found[0].loss - want[0].loss).abs() <= 1e-6 * want[0].loss.abs(), "{mesh}, {method:?}");
            for (key, want) in &weights {
                let pairs = found_weights[key].iter().zip(want).map(|(a, b)| f64::from((a - b).abs()));
                let furthest = pairs.fold(0.0, f64::max);
                assert!(furthest <= 1e-5, "{mesh}, {method:?}, {key:?}: {furthest:e}");
            }
        }
    }
}

/// The ranks of a degree that the reduction blocks do not fit would each sum other parts of the tree.
#[test]
fn degrees_that_the_blocks_of_the_sequence_do_not_fit_are_refused() {
    let model = long(Method::AllGather, true, 0.0);
    let plan = plan("tp=2,cp=4", Numerics::Canonical { blocks: 4 });
    let refused = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        Trainer::new(model.clone(), &plan, rank, Cpu::device())?.step(&batch(4)).map(|_| ())
    });
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("4 reduction blocks of the sequence fit degrees [1, 2, 4]"), "{error}");
}

fn untouched() -> Vec<Arc<dyn Model>> {
    let gpt2 =
        Gpt2Config { num_layers: 2, hidden_size: 16, ffn_hidden_size: 32, seq_len: SEQ, ..Gpt2Config::default() };
    let llama = LlamaConfig {
        sliding_window: None,
        vocab_size: 256,
        num_layers: 2,
        hidden_size: 16,
        num_heads: 4,
        num_kv_heads: 2,
        ffn_hidden_size: 32,
        seq_len: SEQ,
        rotary: Some(Rotary::new(100.0)),
        norm_eps: 1e-5,
        tie_embeddings: false,
        ..LLAMA
    };
    vec![Arc::new(Gpt2::new(gpt2)), Arc::new(Gpt2::new(gpt2).sequence_parallel(true)), Arc::new(Llama::new(llama))]
}

/// Each rank of cp did all of the work, and the losses were those of one rank.
#[test]
fn a_model_that_cuts_nothing_over_cp_is_refused_by_whatever_runs_it() {
    for model in untouched() {
        for (mesh, verify) in [("cp=2", Verify::FirstStep), ("cp=2", Verify::Off), ("dp=2,tp=2,cp=3", Verify::Off)] {
            let plan = Plan { verify, ..plan(mesh, Numerics::Fast) };
            let degree = plan.mesh.degree(Axis::Cp);
            let says = format!(
                "the mesh has cp={degree}, and the model cuts nothing over cp, so that its {degree} ranks would each do all \
                 of the work: use cp=1, and dp, tp or pp for more ranks, or a model whose values cp cuts"
            );
            let trains = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
                let refused = Trainer::new(model.clone(), &plan, rank.clone(), Cpu::device()).map(|_| ());
                let read = |spec: &ParamSpec, slice: &LocalSlice| Ok::<_, TrainError>(spec.initial(slice, 7));
                let decodes = Decoder::new(model.clone(), &plan, rank, Cpu::device(), SEQ, read).map(|_| ());
                Ok::<_, TrainError>([refused, decodes].map(|end| end.unwrap_err().to_string()))
            });
            for told in trains.unwrap().concat() {
                assert_eq!(told, says, "{mesh}, {verify:?}");
            }
            assert_eq!(dry_run::predict(&model, &plan, 0).unwrap_err().to_string(), says);
            assert_eq!(one_rank::require_same(&model, &plan, 1).unwrap_err().to_string(), says);
        }
        let plan = plan("dp=2,cp=1", Numerics::Fast);
        dry_run::predict(&model, &plan, 0).unwrap();
    }
}
