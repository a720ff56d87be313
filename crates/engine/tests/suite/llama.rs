//! Llama against PyTorch, through the engine (`crates/models/tests/fixtures/make_llama_fixtures.py` says what was
//! recorded, and how it was checked in float64): over dp, tp with fewer heads of keys and values than ranks among them,
//! pp, and sequence parallelism.

use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::{Numerics, Plan, StateKey, StepReport, TrainError, Trainer, WholeState};
use meshwork_models::language;
use meshwork_models::llama::{LLAMA, Llama, LlamaConfig};
use meshwork_nn::Model;
use meshwork_optim::{AdamW, Decay, LrSchedule, Rule, Sgd};
use meshwork_tensor::op::{Rotary, RotaryScaling};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Largest absolute differences: a few times what two orders of f32 sums differ by in numbers of this size.
const LOSS: f64 = 3e-6;
const LOGITS: f64 = 1e-5;
const GRADIENTS: f64 = 3e-6;
const WEIGHTS: f64 = 5e-6;

const STEPS: usize = 3;

/// Mesh, sequence parallelism, and micro-batches for the sequences of the fixture. More ranks than heads of keys and
/// values among them; the 37 ids are not divided by 2.
const MESHES: [(&str, bool, usize); 8] = [
    ("dp=1", false, 1),
    ("tp=2", false, 3),
    ("tp=2", true, 1),
    ("tp=4", false, 1),
    ("tp=4", true, 3),
    ("dp=3", false, 1),
    ("pp=2", false, 3),
    ("dp=3,tp=4,pp=2", true, 1),
];

struct Fixture(Value);

impl Fixture {
    fn read() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/llama_micro.json");
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
        Self(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}")))
    }

    fn size(&self, name: &str) -> usize {
        self.0["config"][name].as_u64().unwrap() as usize
    }

    fn config(&self, tied: bool) -> LlamaConfig {
        let number = |name: &str| self.0["config"][name].as_f64().unwrap();
        let scaling = RotaryScaling::Llama3 {
            factor: number("factor"),
            low_frequency_factor: number("low_frequency_factor"),
            high_frequency_factor: number("high_frequency_factor"),
            original_positions: self.size("original_positions"),
        };
        LlamaConfig {
            sliding_window: None,
            vocab_size: self.size("vocab"),
            num_layers: self.size("layers"),
            hidden_size: self.size("hidden"),
            num_heads: self.size("heads"),
            num_kv_heads: self.size("kv_heads"),
            ffn_hidden_size: self.size("ffn"),
            seq_len: self.size("seq"),
            rotary: Some(Rotary { scaling: Some(scaling), ..Rotary::new(number("theta")) }),
            norm_eps: number("eps"),
            tie_embeddings: tied,
            ..LLAMA
        }
    }

    fn ids(&self, name: &str) -> Vec<i32> {
        self.0[name]["data"].as_array().unwrap().iter().map(|value| value.as_i64().unwrap() as i32).collect()
    }
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

fn floats(tensor: &Value) -> Vec<f32> {
    numbers(&tensor["data"]).into_iter().map(|value| value as f32).collect()
}

#[track_caller]
fn assert_near<A: Copy + Into<f64>, B: Copy + Into<f64>>(what: &str, got: &[A], wanted: &[B], tolerance: f64) {
    assert_eq!(got.len(), wanted.len(), "{what}: number of elements");
    for (at, (&got, &wanted)) in got.iter().zip(wanted).enumerate() {
        let (got, wanted): (f64, f64) = (got.into(), wanted.into());
        let off = (got - wanted).abs();
        assert!(off <= tolerance, "{what}: element {at} is {got}, in PyTorch {wanted} ({off:.1e} off)");
    }
}

/// The results of a run of some steps.
struct Run {
    /// Logits of the first sequence before any step, position by position.
    logits: Vec<f32>,
    reports: Vec<StepReport>,
    /// Gradients of the first step.
    gradients: BTreeMap<String, Vec<f32>>,
    /// Weights after the last step.
    weights: WholeState,
    loss_after: f64,
}

fn run(fixture: &Fixture, tied: bool, mesh: (&str, bool, usize), of: (Rule, f64, f64)) -> Run {
    run_in(Numerics::Fast, fixture, tied, mesh, of)
}

fn run_in(
    numerics: Numerics,
    fixture: &Fixture,
    tied: bool,
    (mesh, cut, micros): (&str, bool, usize),
    (rule, lr, max_norm): (Rule, f64, f64),
) -> Run {
    let model: Arc<dyn Model> = Arc::new(Llama::new(fixture.config(tied)).sequence_parallel(cut));
    let plan = Plan {
        mesh: mesh.parse().unwrap(),
        global_batch_size: fixture.size("batch"),
        num_microbatches: Some(micros),
        optimizer: rule,
        lr: LrSchedule { base: lr, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 },
        max_norm,
        numerics,
        ..Plan::default()
    };
    let (seq, vocab) = (fixture.size("seq"), fixture.size("vocab"));
    let params = fixture.0["params"].as_object().unwrap();
    let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
        for spec in trainer.params().declarations().specs() {
            assert!(params.contains_key(&spec.name), "{} is not in the fixture", spec.name);
        }
        for (name, value) in params.iter().filter(|(name, _)| !(tied && *name == "lm_head.weight")) {
            trainer.load_parameter(name, &floats(value))?;
        }
        let own = |name: &str| {
            let samples = trainer.samples();
            fixture.ids(name)[samples.start * seq..samples.end * seq].to_vec()
        };
        let batch = language::batch(own("inputs"), own("targets"), seq)?;
        let first = fixture.ids("inputs")[..seq].to_vec();
        let first = language::batch(first, vec![-1; seq], seq)?;
        let logits = (0..seq).map(|row| trainer.predict(&first, row, vocab)).collect::<Result<Vec<_>, _>>()?.concat();
        let mut reports = vec![trainer.step(&batch)?];
        let declarations = trainer.params().declarations().clone();
        let gradients = declarations.ids().map(|id| trainer.gradient(id)).collect::<Result<Vec<_>, _>>()?;
        let mut of_gradients = trainer.state()?;
        of_gradients.pieces.retain(|piece| piece.key.state.is_none());
        of_gradients.pieces.iter_mut().zip(gradients).for_each(|(piece, gradient)| piece.piece.values = gradient);
        for _ in 1..STEPS {
            reports.push(trainer.step(&batch)?);
        }
        let loss_after = trainer.evaluate([batch])?.loss;
        Ok::<_, TrainError>((logits, reports, of_gradients, trainer.state()?, loss_after))
    });
    let mut ranks = ranks.unwrap_or_else(|error| panic!("{mesh}: {error}"));
    let gradients = WholeState::merge(&ranks.iter().map(|rank| rank.2.clone()).collect::<Vec<_>>()).unwrap();
    let weights = WholeState::merge(&ranks.iter().map(|rank| rank.3.clone()).collect::<Vec<_>>()).unwrap();
    let (logits, reports, _, _, loss_after) = ranks.swap_remove(0);
    let gradient = |key: &StateKey| (key.parameter.clone(), gradients.vector(key).unwrap().to_vec());
    Run { logits, reports, gradients: gradients.keys().map(gradient).collect(), weights, loss_after }
}

fn assert_steps(what: &str, run: &Run, recorded: &Value) {
    let losses: Vec<f64> = run.reports.iter().map(|report| report.loss).collect();
    let norms: Vec<f64> = run.reports.iter().map(|report| report.grad_norm).collect();
    assert_near(&format!("{what}: losses"), &losses, &numbers(&recorded["losses"]), LOSS);
    assert_near(&format!("{what}: gradient norms"), &norms, &numbers(&recorded["grad_norms"]), 2.0 * LOSS);
    let after = recorded["loss_after"].as_f64().unwrap();
    assert_near(&format!("{what}: loss after"), &[run.loss_after], &[after], LOSS);
}

fn check(tied: bool) {
    let fixture = Fixture::read();
    let recorded = &fixture.0[if tied { "tied" } else { "untied" }];
    let value = |of: &str, name: &str| fixture.0[of][name].as_f64().unwrap();
    let of = |name: &str| value("adamw", name);
    let adamw = AdamW { beta1: of("beta1"), beta2: of("beta2"), eps: of("eps"), weight_decay: of("weight_decay") };
    let sgd = Sgd { momentum: value("sgd", "momentum"), weight_decay: 0.0 };
    for mesh in MESHES {
        let what = format!("{mesh:?}, tied = {tied}");
        let adamw = run(&fixture, tied, mesh, (adamw.into(), of("lr"), of("max_norm")));
        assert_near(&format!("{what}: logits"), &adamw.logits, &floats(&recorded["logits_0"]), LOGITS);
        let wanted = recorded["grads"].as_object().unwrap();
        assert_eq!(adamw.gradients.len(), wanted.len(), "{what}: number of gradients");
        for (name, wanted) in wanted {
            assert_near(&format!("{what}: gradient of {name}"), &adamw.gradients[name], &floats(wanted), GRADIENTS);
        }
        assert_steps(&format!("{what}, adamw"), &adamw, &recorded["adamw"]);
        for (name, wanted) in recorded["adamw"]["final"].as_object().unwrap() {
            let got = adamw.weights.vector(&StateKey { parameter: name.clone(), state: None }).unwrap();
            assert_near(&format!("{what}: {name} after adamw"), got, &floats(wanted), WEIGHTS);
        }
        let sgd = run(&fixture, tied, mesh, (sgd.into(), value("sgd", "lr"), 0.0));
        assert_steps(&format!("{what}, sgd"), &sgd, &recorded["sgd"]);
    }
}

#[test]
fn tied_embeddings_are_those_of_pytorch() {
    check(true);
}

#[test]
fn untied_embeddings_are_those_of_pytorch() {
    check(false);
}

/// Products of queries beside those of keys and values, gathered heads, groups that ranks share: all in one rank's
/// order.
#[test]
fn canonical_numerics_give_the_bits_of_one_rank() {
    let fixture = Fixture::read();
    for tied in [true, false] {
        let run = |mesh| {
            let rule = AdamW::default().into();
            let run = run_in(Numerics::Canonical { blocks: 8 }, &fixture, tied, mesh, (rule, 3e-3, 1.0));
            let reports = run.reports.iter().map(|report| [report.loss.to_bits(), report.grad_norm.to_bits()]);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            let weights = run.weights.keys().map(|key| (key.clone(), bits(run.weights.vector(key).unwrap())));
            (reports.collect::<Vec<_>>(), weights.collect::<BTreeMap<_, _>>())
        };
        let want = run(MESHES[0]);
        for mesh in MESHES {
            let got = run(mesh);
            assert_eq!(got.0, want.0, "{mesh:?}, tied = {tied}: losses and norms");
            assert!(got.1 == want.1, "{mesh:?}, tied = {tied}: weights and states");
        }
    }
}
