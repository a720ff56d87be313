//! A model whose logits depend on how a sequence is split into passes is refused by a decoder at its first use: on
//! every mesh, by the same error on every rank. Beside each such program is the right one.

use crate::experts::in_every_layer;
use meshwork_core::RankEnd;
use meshwork_core::{DType, Rank, World, rules};
use meshwork_cpu::Cpu;
use meshwork_engine::{Compress, Decoder, LossScale, MixedPrecision, Numerics, Plan, TrainError, Verify};
use meshwork_models::experts::{MoeConfig, RouterKind};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language;
use meshwork_nn::{Activation, Batch, Field, Model, Stage, StageSpec, sample_types};
use meshwork_tensor::Precision;
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::tape::HalfType;
use meshwork_tensor::{
    Declarations, Device, Init, ParamId, ParamSpec, Placement, Result, Role, Shape, Tape, Tensor, Var,
};
use meshwork_testkit::opaque::{self, Opaque};
use std::sync::Arc;

const SEQ: usize = 24;
const VOCAB: usize = 37;
const WIDTH: usize = 8;

/// What a layer makes of `x [samples, tokens, WIDTH]` behind its attention.
type Twist = fn(&Tape, &Var) -> Result<Var>;
/// How positions are added to `x`, from a table.
type Places = fn(&Tape, &Var, &Var) -> Result<Var>;

/// Two layers of attention with a twist.
#[derive(Clone, Copy)]
struct Twisted {
    twist: Twist,
    places: Places,
    attends: bool,
}

impl std::fmt::Debug for Twisted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Twisted")
    }
}

#[derive(Debug)]
struct Part {
    of: Twisted,
    embedding: Option<[ParamId; 2]>,
    layers: Vec<ParamId>,
    head: Option<ParamId>,
}

impl Model for Twisted {
    fn num_layers(&self) -> usize {
        2
    }

    fn fields(&self) -> Vec<Field> {
        language::fields(SEQ, VOCAB, language::Boundary::Ignored)
    }

    fn stage(&self, params: &mut Declarations, _: &meshwork_core::Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let mut declare = |name: String, dims: &[usize]| {
            params.declare(name, dims, Placement::replicated(), Role::Weight, Init::Normal { std: 0.5 })
        };
        let mut ends = |first: bool, name: &str, rows: usize| match first {
            true => declare(name.to_owned(), &[rows, WIDTH]).map(Some),
            false => Ok(None),
        };
        let embedding = ends(part.first, "tokens", VOCAB)?.zip(ends(part.first, "places", SEQ)?).map(|(a, b)| [a, b]);
        let head = ends(part.last, "head", VOCAB)?;
        let mut of_layer = |layer| declare(format!("layers.{layer}.qkv"), &[3 * WIDTH, WIDTH]);
        let layers = part.layers.clone().map(&mut of_layer).collect::<Result<_>>()?;
        Ok(Box::new(Part { of: *self, embedding, layers, head }))
    }

    fn activation(&self, mesh: &meshwork_core::Mesh, _: usize, batch: &Batch) -> Result<Activation> {
        let shape = Shape::new(&[batch.samples(), batch.dims(language::TOKENS)?[0], WIDTH]);
        Ok(Activation { dtype: DType::F32, shape, types: sample_types(mesh) })
    }
}

impl Stage for Part {
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var> {
        let mut x = match self.embedding {
            Some([tokens, places]) => {
                let x = batch.var(tape, language::TOKENS)?.embedding(&tape.param(tokens)?)?;
                (self.of.places)(tape, &x, &tape.param(places)?)?
            }
            None => input.unwrap().clone(),
        };
        for &qkv in &self.layers {
            let [samples, tokens, width] = [0, 1, 2].map(|dim| x.shape()[dim]);
            let heads = x.linear(&tape.param(qkv)?, 1)?.reshape(&[samples, tokens, 3, 2, width / 2])?;
            let mixed = match self.of.attends {
                true => heads.causal_attention(None, None)?,
                false => heads.narrow(2, 0..1)?,
            };
            x = (self.of.twist)(tape, &x.add(&mixed.reshape(&[samples, tokens, width])?)?)?;
        }
        match self.head {
            Some(head) => x.linear(&tape.param(head)?, 1),
            None => Ok(x),
        }
    }

    fn loss(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        output.cross_entropy(&batch.var(tape, language::TARGETS)?)
    }
}

fn plain(_: &Tape, x: &Var) -> Result<Var> {
    Ok(x.clone())
}

/// A function of each token alone is no mixing.
fn pointwise(_: &Tape, x: &Var) -> Result<Var> {
    x.add(&x.map("softsign", |x| x / (1.0 + x.abs()), |x, _| (1.0 + x.abs()).powi(-2))?)
}

/// Each token with that `by` places before it, by operations of the library alone.
fn shifted<const BY: usize>(tape: &Tape, x: &Var) -> Result<Var> {
    let [samples, tokens, width] = [0, 1, 2].map(|dim| x.shape()[dim]);
    let zeros = Tensor::zeros(tape.device(), x.tensor().dtype(), Shape::new(&[samples, BY, width]))?;
    x.add(&tape.constant(zeros, x.types()).concat(x, 1)?.narrow(1, 0..tokens)?)
}

/// Sums, or means, of each token and those of its block of `block` tokens before it.
fn summed(tape: &Tape, x: &Var, block: usize, mean: bool) -> Result<Var> {
    let run = move |x: &Tensor| {
        let (tokens, width) = (x.shape()[1], x.shape()[2]);
        let mut values = x.to_vec::<f32>()?;
        for sample in values.chunks_exact_mut(tokens * width) {
            for at in (1..tokens).filter(|at| at % block != 0) {
                let n = (at % block) as f32;
                for i in 0..width {
                    let (before, own) = (sample[(at - 1) * width + i], sample[at * width + i]);
                    sample[at * width + i] = if mean { (before * n + own) / (n + 1.0) } else { before + own };
                }
            }
        }
        Tensor::from_slice(x.device(), &values, x.shape())
    };
    let infer = |name: &str, operands: &[rules::Operand<'_>]| rules::along_dim(name, operands[0], 1, &[]);
    let typed = move |name: &str, operands: &[rules::Operand<'_>]| {
        infer(name, operands)?;
        Ok(operands[0].types)
    };
    tape.custom("summed", &["x"], &[x], typed, move |x| run(x[0]), |_, _, grad| Ok(vec![grad.clone()]))
}

fn from_past(_: &Tape, x: &Var, table: &Var) -> Result<Var> {
    x.positions(table)
}

/// Positions that begin with 0 in each pass.
fn from_zero(tape: &Tape, x: &Var, table: &Var) -> Result<Var> {
    let [samples, tokens] = [0, 1].map(|dim| x.shape()[dim]);
    let ids: Vec<i32> = (0..samples).flat_map(|_| 0..tokens as i32).collect();
    x.add(&tape.constant(Tensor::from_slice(tape.device(), &ids, [samples, tokens])?, x.types()).embedding(table)?)
}

/// The same, counted from the tokens before.
fn from_past_by_hand(tape: &Tape, x: &Var, table: &Var) -> Result<Var> {
    let [samples, tokens] = [0, 1].map(|dim| x.shape()[dim]);
    let past = tape.past() as i32;
    let ids: Vec<i32> = (0..samples).flat_map(|_| past..past + tokens as i32).collect();
    x.add(&tape.constant(Tensor::from_slice(tape.device(), &ids, [samples, tokens])?, x.types()).embedding(table)?)
}

fn no_places(_: &Tape, x: &Var, _: &Var) -> Result<Var> {
    Ok(x.clone())
}

fn model(twist: Twist, places: Places) -> Arc<dyn Model> {
    Arc::new(Twisted { twist, places, attends: true })
}

fn plan(mesh: &str, numerics: Numerics) -> Plan {
    Plan { mesh: mesh.parse().unwrap(), numerics, global_batch_size: 2, ..Plan::default() }
}

/// The errors of all ranks of a decoder that is given passes of `passes` tokens; none if it decodes.
fn refusals(model: &Arc<dyn Model>, plan: &Plan, passes: &[usize]) -> Vec<String> {
    refusals_on(model, plan, passes, false)
}

fn refusals_on(model: &Arc<dyn Model>, plan: &Plan, passes: &[usize], is_opaque: bool) -> Vec<String> {
    let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let (rank, device): (_, Arc<dyn Device>) = match is_opaque {
            false => (rank, Arc::new(Cpu::new(plan.precision))),
            true => {
                let world = opaque::communicator(rank.world().communicator().clone());
                (Arc::new(Rank::new(rank.mesh(), world)?), Opaque::device(Cpu::device()))
            }
        };
        let seed = plan.seed;
        let read = |spec: &ParamSpec, slice: &LocalSlice| Ok::<_, TrainError>(spec.initial(slice, seed));
        let first = rank.mesh().data_rank(rank.coords());
        let mut decoder = Decoder::new(model.clone(), plan, rank, device, SEQ, read)?;
        let mut at = 0;
        for &count in passes {
            // Two samples on each rank; those of dp ranks are others.
            let ids = (0..2).flat_map(|s| (at..at + count).map(move |at| (at * 5 + s * 3 + first * 7) % VOCAB));
            let batch = language::batch(ids.map(|id| id as i32).collect(), vec![-1; 2 * count], count)?;
            decoder.next(&batch, count, VOCAB)?;
            at += count;
        }
        assert_eq!(decoder.past(), at);
        Ok::<_, TrainError>(())
    });
    let Err(error) = ranks else { return Vec::new() };
    let told = |end: &Option<RankEnd>| match end {
        Some(RankEnd::Error(error)) => error.to_string(),
        other => format!("{other:?}"),
    };
    error.ends.iter().map(told).collect()
}

const MESHES: [&str; 6] = ["dp=1", "dp=2", "tp=2", "pp=2", "dp=2,tp=2", "tp=2,pp=2"];

#[track_caller]
fn assert_refused(model: &Arc<dyn Model>, plan: &Plan, passes: &[usize]) {
    let told = refusals(model, plan, passes);
    assert_eq!(told.len(), plan.mesh.world_size(), "{} {passes:?}", plan.mesh);
    for told in &told {
        assert!(told.starts_with("decode: one pass over 16 tokens, and two of which the second has"), "{told}");
        assert!(told.ends_with("and count positions from Tape::past, as Var::positions does"), "{told}");
    }
    assert!(told.windows(2).all(|two| two[0] == two[1]), "{told:?}");
}

#[test]
fn a_model_that_mixes_tokens_without_the_cache_is_refused_on_every_mesh_by_all_ranks() {
    let wrong: [Twist; 6] = [
        shifted::<1>,
        shifted::<9>,
        |tape, x| summed(tape, x, SEQ, false),
        |tape, x| summed(tape, x, SEQ, true),
        |tape, x| summed(tape, x, 2, true),
        |tape, x| summed(tape, x, 4, false),
    ];
    for (at, twist) in wrong.into_iter().enumerate() {
        let model = model(twist, from_past);
        assert_refused(&model, &plan(MESHES[at], Numerics::Fast), &[5, 1]);
        assert_refused(&model, &plan("dp=1", Numerics::Fast), &[1]);
        assert_refused(&model, &plan("dp=1", Numerics::Fast), &[SEQ]);
    }
    for mesh in MESHES {
        for twist in [plain, pointwise] {
            assert_eq!(refusals(&model(twist, from_past), &plan(mesh, Numerics::Fast), &[5, 1, 1]), [""; 0], "{mesh}");
        }
    }
}

#[test]
fn a_model_whose_only_mixing_is_its_own_is_refused_and_one_that_mixes_nothing_is_not() {
    let alone = |twist| Arc::new(Twisted { twist, places: no_places, attends: false }) as Arc<dyn Model>;
    for mesh in ["dp=1", "tp=2,pp=2"] {
        // The tokens of the prompt are all the same, and have no positions: a mean of them would be each of them.
        assert_refused(&alone(|tape, x| summed(tape, x, SEQ, true)), &plan(mesh, Numerics::Fast), &[1, 1]);
        assert_eq!(refusals(&alone(pointwise), &plan(mesh, Numerics::Fast), &[3, 1, 1]), [""; 0]);
    }
}

#[test]
fn positions_that_begin_anew_in_each_pass_are_refused() {
    for mesh in ["dp=1", "dp=2,tp=2", "pp=2"] {
        assert_refused(&model(plain, from_zero), &plan(mesh, Numerics::Fast), &[4, 1]);
        for places in [from_past, from_past_by_hand, no_places] {
            assert_eq!(refusals(&model(plain, places), &plan(mesh, Numerics::Fast), &[4, 1, 2]), [""; 0]);
        }
    }
}

#[test]
fn mixing_is_found_in_canonical_numerics_in_16_bits_and_on_a_device_that_the_host_cannot_read() {
    let (right, wrong) = (model(plain, from_past), model(shifted::<1>, from_past));
    let half = |dtype| {
        let loss_scale = LossScale::Fixed(1024.0);
        Some(MixedPrecision { dtype, reduce_in_half: false, loss_scale })
    };
    let plans = [
        plan("tp=2,pp=2", Numerics::Canonical { blocks: 8 }),
        Plan { mixed: half(HalfType::Bf16), ..plan("pp=2", Numerics::Fast) },
        Plan { mixed: half(HalfType::F16), ..plan("tp=2", Numerics::Fast) },
        Plan { precision: Precision::Bf16, ..plan("dp=2", Numerics::Fast) },
        Plan { precision: Precision::Tf32, ..plan("dp=2", Numerics::Fast) },
    ];
    for plan in plans {
        assert_eq!(refusals(&right, &plan, &[4, 1, 2]), [""; 0]);
        assert_refused(&wrong, &plan, &[4, 1, 2]);
    }
    let plan = plan("pp=2", Numerics::Fast);
    assert_eq!(refusals_on(&right, &plan, &[4, 1, 2], true), [""; 0]);
    assert!(refusals_on(&wrong, &plan, &[4, 1], true)[1].starts_with("decode: one pass over 16 tokens"));
}

/// What crosses cuts loses most of its bits, which is no mixing.
#[test]
fn compressed_activations_are_no_mixing() {
    let activations = "quant:4".parse().unwrap();
    let compress = Compress { activations, activation_gradients: activations, ..Compress::default() };
    let plan = Plan { compress, ..plan("pp=2", Numerics::Fast) };
    assert_eq!(refusals(&model(plain, from_past), &plan, &[4, 1, 2]), [""; 0]);
    assert_refused(&model(shifted::<1>, from_past), &plan, &[4, 1]);
}

/// Training drops the choices of tokens that find their expert full. How full it is depends on the tokens of a pass, so
/// decoding drops none.
#[test]
fn experts_that_decode_take_all_tokens_whatever_their_capacity() {
    let experts = |capacity_factor| -> Arc<dyn Model> {
        let moe =
            MoeConfig { num_experts: 4, top_k: 2, router: RouterKind::TopK, capacity_factor, ..MoeConfig::default() };
        let experts = in_every_layer(moe, 24);
        let config = Gpt2Config {
            vocab_size: VOCAB,
            hidden_size: 32,
            ffn_hidden_size: 64,
            seq_len: SEQ,
            ..Gpt2Config::default()
        };
        Arc::new(Gpt2::new(config).with_experts(Some(experts)))
    };
    for mesh in ["dp=1", "dp=2,ep=2", "pp=2"] {
        for factor in [0.0, 0.5, 1.0] {
            assert_eq!(
                refusals(&experts(factor), &plan(mesh, Numerics::Fast), &[9, 1, 4, 1]),
                [""; 0],
                "{mesh} {factor}"
            );
        }
    }
}

#[test]
fn a_plan_that_verifies_nothing_decodes_unproven() {
    let plan = Plan { verify: Verify::Off, ..plan("dp=1", Numerics::Fast) };
    assert_eq!(refusals(&model(shifted::<1>, from_past), &plan, &[4, 1]), [""; 0]);
}
