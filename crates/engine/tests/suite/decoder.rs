//! Decoding with cached keys and values, against passes over the whole sequence, and on every mesh.

use crate::experts::in_every_layer;
use crate::runs::on_ranks;
use meshwork_context_parallel::{ContextParallel, Method};
use meshwork_core::Rank;
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::{
    Decoder, LossScale, MixedPrecision, Numerics, Plan, StateKey, StateSource, TrainError, Trainer, WholeState,
};
use meshwork_models::experts::{ExpertsConfig, MoeConfig, RouterKind};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language;
use meshwork_models::llama::{Llama, LlamaConfig, PRESETS};
use meshwork_nn::Model;
use meshwork_tensor::op::{Order, Rotary, RotaryScaling};
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::tape::HalfType;
use meshwork_tensor::{Device, ParamSpec};
use meshwork_testkit::opaque::{self, Opaque};
use meshwork_testkit::parity::{assert_close, norm};
use std::sync::Arc;

const SEQ: usize = 24;
const VOCAB: usize = 61;

fn gpt2_config() -> Gpt2Config {
    Gpt2Config { vocab_size: VOCAB, hidden_size: 32, ffn_hidden_size: 64, seq_len: SEQ, ..Gpt2Config::default() }
}

/// Fewer heads of keys and values than there are ranks in `tp=4`, and scaled rotations.
fn llama_config() -> LlamaConfig {
    let rotary = Some(Rotary { scaling: Some(RotaryScaling::LLAMA_3_1), ..Rotary::new(10_000.0) });
    LlamaConfig { vocab_size: VOCAB, hidden_size: 32, ffn_hidden_size: 64, seq_len: SEQ, rotary, ..PRESETS[0].1 }
}

fn gpt2() -> Arc<dyn Model> {
    Arc::new(Gpt2::new(gpt2_config()))
}

fn llama() -> Arc<dyn Model> {
    Arc::new(Llama::new(llama_config()))
}

/// The same models with a sliding window.
fn windowed() -> [Arc<dyn Model>; 2] {
    let gpt2 = Gpt2Config { sliding_window: Some(3), ..gpt2_config() };
    let llama = LlamaConfig { sliding_window: Some(7), ..llama_config() };
    [Arc::new(Gpt2::new(gpt2)), Arc::new(Llama::new(llama))]
}

/// Experts in every layer, dropless: a token's own choice does not depend on the others.
fn experts(router: RouterKind) -> Arc<dyn Model> {
    let moe = MoeConfig { num_experts: 4, top_k: 2, router, ..MoeConfig::default() };
    let experts = ExpertsConfig { num_shared_experts: 1, ..in_every_layer(moe, 24) };
    Arc::new(Gpt2::new(gpt2_config()).with_experts(Some(experts)))
}

fn tokens(sample: usize) -> impl Iterator<Item = i32> {
    (0..SEQ).map(move |at| ((at * 7 + sample * 13 + at * at) % VOCAB) as i32)
}

fn plan(mesh: &str, numerics: Numerics) -> Plan {
    Plan { mesh: mesh.parse().unwrap(), numerics, global_batch_size: 2, ..Plan::default() }
}

/// The logits after each of the passes over one or two sequences, as one rank of the mesh has them.
fn decoded(model: &Arc<dyn Model>, plan: &Plan, passes: &[usize]) -> Vec<Vec<f32>> {
    decoded_on(model, plan, passes, Cpu::device, |rank| rank)
}

/// The same on a device, and on ranks made of those of the world.
fn decoded_on(
    model: &Arc<dyn Model>,
    plan: &Plan,
    passes: &[usize],
    device: fn() -> Arc<dyn Device>,
    wrap: fn(Arc<Rank>) -> Arc<Rank>,
) -> Vec<Vec<f32>> {
    let whole = initial(model);
    let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let rank = wrap(rank);
        let samples: Vec<usize> = match plan.mesh.data_degree() {
            1 => vec![0, 1],
            _ => vec![plan.mesh.data_rank(rank.coords())],
        };
        let read = |spec: &ParamSpec, slice: &LocalSlice| whole.slice(spec, slice);
        let mut decoder = Decoder::new(model.clone(), plan, rank, device(), SEQ, read)?;
        let mut at = 0;
        let mut logits = Vec::new();
        for &count in passes {
            let now = samples.iter().flat_map(|&sample| tokens(sample).skip(at).take(count)).collect();
            let batch = language::batch(now, vec![-1; count * samples.len()], count)?;
            logits.push(decoder.next(&batch, count, VOCAB)?);
            at += count;
        }
        assert_eq!(decoder.past(), at);
        Ok::<_, TrainError>((samples, logits))
    });
    let mut ranks = ranks.unwrap_or_else(|error| panic!("{error}"));
    // Ranks of one dp rank agree; the samples of two are put together.
    let (_, first) = ranks[0].clone();
    match ranks.iter().position(|(samples, _)| samples[..] == [1]) {
        None => {
            assert!(ranks.iter().all(|(_, logits)| *logits == first));
            first
        }
        Some(second) => {
            let (_, second) = ranks.swap_remove(second);
            first.into_iter().zip(second).map(|(a, b)| [a, b].concat()).collect()
        }
    }
}

/// The initial weights of a model, which one rank has drawn.
struct Initial(WholeState);

impl Initial {
    fn slice(&self, spec: &ParamSpec, slice: &LocalSlice) -> Result<Vec<f32>, TrainError> {
        let key = StateKey { parameter: spec.name.clone(), state: None };
        self.0.read(&key, spec.dims, slice)
    }
}

fn initial(model: &Arc<dyn Model>) -> Initial {
    Initial(on_ranks(model, &plan("dp=1", Numerics::Fast), false, |_| Ok(())).1)
}

/// The logits after `at` tokens, from one pass over all of them.
fn whole_pass(model: &Arc<dyn Model>, at: usize) -> Vec<f32> {
    whole_pass_of(model, &plan("dp=1", Numerics::Fast), at)
}

fn whole_pass_of(model: &Arc<dyn Model>, plan: &Plan, at: usize) -> Vec<f32> {
    let logits = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), plan, rank, Cpu::device())?;
        let mut logits = Vec::new();
        for sample in 0..2 {
            let batch = language::batch(tokens(sample).take(at).collect(), vec![-1; at], at)?;
            logits.extend(trainer.predict(&batch, at - 1, VOCAB)?);
        }
        Ok::<_, TrainError>(logits)
    });
    logits.unwrap_or_else(|error| panic!("{error}")).swap_remove(0)
}

const PASSES: [usize; 6] = [9, 1, 1, 4, 1, 8];

/// Bit by bit: an attention has one order of sums, whatever passes the tokens come in.
#[test]
fn cached_tokens_have_the_logits_of_whole_passes() {
    let [gpt2_windowed, llama_windowed] = windowed();
    let models = [gpt2(), llama(), gpt2_windowed, llama_windowed, experts(RouterKind::TopK), experts(RouterKind::Bias)];
    for model in models {
        let cached = decoded(&model, &plan("dp=1", Numerics::Fast), &PASSES);
        let mut at = 0;
        for (count, logits) in PASSES.into_iter().zip(cached) {
            at += count;
            assert_eq!(logits, whole_pass(&model, at), "after {at} tokens");
        }
    }
}

#[test]
fn canonical_decoding_has_one_ranks_bits_on_every_mesh() {
    let canonical = Numerics::Canonical { blocks: 8 };
    let [_, llama_windowed] = windowed();
    for model in [gpt2(), llama(), llama_windowed, experts(RouterKind::TopK)] {
        let one = decoded(&model, &plan("dp=1", canonical), &PASSES);
        for mesh in ["tp=2", "tp=4", "pp=2", "pp=4", "tp=2,pp=2", "dp=2", "dp=2,tp=2", "dp=2,ep=2"] {
            assert_eq!(decoded(&model, &plan(mesh, canonical), &PASSES), one, "{mesh}");
        }
    }
}

#[test]
fn fast_decoding_on_a_mesh_is_close_to_one_rank() {
    for model in [gpt2(), llama()] {
        let one = decoded(&model, &plan("dp=1", Numerics::Fast), &PASSES);
        for mesh in ["tp=4", "tp=2,pp=2"] {
            let there = decoded(&model, &plan(mesh, Numerics::Fast), &PASSES);
            one.iter().zip(there).for_each(|(one, there)| assert_close(mesh, &there, one, 0.0));
        }
    }
}

/// Ranks of cp keep the keys of consecutive tokens, 8 of 24 and more each, which a pass of several tokens straddles.
#[test]
fn a_cache_that_cp_cuts_gives_the_logits_of_one_rank() {
    let method = || Some(ContextParallel::new(Method::AllGather, Order::zigzag(2), 1));
    let cut: [Arc<dyn Model>; 2] = [
        Arc::new(Gpt2::new(gpt2_config()).context_parallel(method())),
        Arc::new(Llama::new(llama_config()).context_parallel(method())),
    ];
    for (whole, cut) in [gpt2(), llama()].iter().zip(&cut) {
        let one = decoded(whole, &plan("dp=1", Numerics::Fast), &PASSES);
        let opaque = || Opaque::device(Cpu::device());
        for mesh in ["cp=2", "cp=3", "dp=2,cp=2", "tp=2,cp=2", "pp=2,cp=2"] {
            let there = decoded(cut, &plan(mesh, Numerics::Fast), &PASSES);
            one.iter().zip(&there).for_each(|(one, there)| assert_close(mesh, there, one, 0.0));
            assert_eq!(decoded_on(cut, &plan(mesh, Numerics::Fast), &PASSES, opaque, opaque_world), there, "{mesh}");
        }
        // Canonical sums over keys have the order of one rank, for which each layer brings them together.
        let canonical = Numerics::Canonical { blocks: 8 };
        let one = decoded(whole, &plan("dp=1", canonical), &PASSES);
        for mesh in ["cp=2", "cp=4", "tp=2,cp=2", "pp=2,cp=2"] {
            assert_eq!(
                decoded_on(cut, &plan(mesh, canonical), &PASSES, opaque, opaque_world),
                one,
                "{mesh}, canonical"
            );
        }
        let loss_scale = LossScale::Fixed(1.0);
        let mixed = Some(MixedPrecision { dtype: HalfType::Bf16, reduce_in_half: false, loss_scale });
        let plan = |mesh| Plan { mixed, ..plan(mesh, Numerics::Fast) };
        let half = |model, mesh| decoded(model, &plan(mesh), &PASSES).concat();
        let (one, there) = (half(whole, "dp=1"), half(cut, "cp=2"));
        let off: Vec<f32> = there.iter().zip(&one).map(|(got, wanted)| got - wanted).collect();
        assert!(norm(&off) / norm(&one) < 2e-2, "{:.1e} off in 16 bits", norm(&off) / norm(&one));
    }
}

fn opaque_world(rank: Arc<Rank>) -> Arc<Rank> {
    let world = opaque::communicator(rank.world().communicator().clone());
    Arc::new(Rank::new(rank.mesh(), world).unwrap())
}

/// Weights, activations and cached keys in 16 bits: the logits of f32 but for rounding, in passes over the whole
/// sequence too.
#[test]
fn mixed_precision_decodes_as_it_predicts() {
    let loss_scale = LossScale::Fixed(1.0);
    let mixed = Some(MixedPrecision { dtype: HalfType::Bf16, reduce_in_half: false, loss_scale });
    for model in [gpt2(), llama()] {
        let exact = whole_pass(&model, 9);
        let plan = |mesh| Plan { mixed, ..plan(mesh, Numerics::Fast) };
        let decoded = |mesh| decoded(&model, &plan(mesh), &[9]).swap_remove(0);
        for logits in [whole_pass_of(&model, &plan("dp=1"), 9), decoded("dp=1"), decoded("tp=2,pp=2")] {
            let off: Vec<f32> = logits.iter().zip(&exact).map(|(got, wanted)| got - wanted).collect();
            let off = norm(&off) / norm(&exact);
            assert!((1e-4..2e-2).contains(&off), "{off:.1e} off");
        }
    }
}

#[test]
fn decoding_reads_no_memory_of_the_device() {
    let device = || Opaque::device(Cpu::device());
    for model in [gpt2(), llama()].into_iter().chain(windowed()) {
        let plan = plan("tp=2,pp=2", Numerics::Fast);
        assert_eq!(decoded_on(&model, &plan, &PASSES, device, opaque_world), decoded(&model, &plan, &PASSES));
    }
}

#[test]
fn more_tokens_than_a_sequence_may_have_are_refused() {
    let model = gpt2();
    let (plan, whole) = (plan("dp=1", Numerics::Fast), initial(&model));
    let error = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let read = |spec: &ParamSpec, slice: &LocalSlice| whole.slice(spec, slice);
        let mut decoder = Decoder::new(model.clone(), &plan, rank, Cpu::device(), 8, read)?;
        let pass = |count: usize| language::batch(vec![1; count], vec![-1; count], count);
        decoder.next(&pass(6)?, 6, VOCAB)?;
        let refused = decoder.next(&pass(3)?, 3, VOCAB).unwrap_err().to_string();
        assert_eq!(decoder.past(), 6);
        decoder.clear();
        assert_eq!(decoder.next(&pass(8)?, 8, VOCAB)?.len(), VOCAB);
        Ok::<_, TrainError>(refused)
    });
    assert_eq!(error.unwrap_or_else(|error| panic!("{error}")), ["decode: 6 and 3 tokens, of at most 8"]);
}

#[test]
fn a_router_that_looks_ahead_continues_no_text() {
    let (model, plan) = (experts(RouterKind::ExpertChoice), plan("dp=1", Numerics::Fast));
    let whole = initial(&model);
    let error = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let read = |spec: &ParamSpec, slice: &LocalSlice| whole.slice(spec, slice);
        let mut decoder = Decoder::new(model.clone(), &plan, rank, Cpu::device(), 8, read)?;
        Ok::<_, TrainError>(
            decoder.next(&language::batch(vec![1; 4], vec![-1; 4], 4)?, 4, VOCAB).unwrap_err().to_string(),
        )
    });
    let error = error.unwrap_or_else(|error| panic!("{error}")).swap_remove(0);
    assert!(error.contains("router expert_choice cannot continue a text"), "{error}");
}
