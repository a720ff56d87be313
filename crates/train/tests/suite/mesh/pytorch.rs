//! Forward, backward and optimizer steps against the numbers of PyTorch:
//! `crates/models/tests/fixtures/make_fixtures.py` says what was recorded, and how it was checked in float64.

use crate::mesh::world::{assemble, on_mesh, pieces};
use meshwork_models::language;
use meshwork_nn::Batch;
use meshwork_train::config::Config;
use meshwork_train::{StepReport, TrainError, Trainer, next_token_logits};
use serde_json::Value;
use std::collections::BTreeMap;

/// Largest absolute differences: a few times what two orders of f32 sums differ by in numbers of this size.
const LOSS: f64 = 3e-6;
const LOGITS: f64 = 1e-5;
const GRADIENTS: f64 = 3e-6;
const WEIGHTS: f64 = 5e-6;

const STEPS: usize = 3;
/// Only the q and v parts of this bias are recorded after AdamW. The gradient of the k part is rounding, which Adam
/// amplifies.
const QKV_BIAS: &str = "h.0.attn.qkv.bias";

/// Mesh and micro-batches for the three sequences of the fixture. Its 37 ids are not divided by 2.
static MESHES: [(&str, usize); 6] = [
    ("dp = 1", 1),
    ("tp = 2", 3),
    ("dp = 3", 1),
    ("pp = 2", 3),
    ("tp = 2\nsequence_parallel = true\npp = 2", 3),
    ("dp = 3\ntp = 2\nsequence_parallel = true", 1),
];

struct Fixture(Value);

impl Fixture {
    fn read() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/gpt2_micro.json");
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
        Self(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}")))
    }

    /// The configuration of the fixture's model on a mesh.
    fn config(&self, tied: bool, (mesh, micros): (&str, usize), optimizer: &str) -> Config {
        let size = |name: &str| &self.0["config"][name];
        let text = format!(
            "[model]\nvocab_size = {}\nnum_layers = {}\nhidden_size = {}\nnum_heads = {}\nseq_len = {}\nffn_hidden_size = {}\n\
             tie_embeddings = {tied}\n[parallelism]\n{mesh}\n[pipeline]\nnum_microbatches = {micros}\nschedule = 'gpipe'\n\
             {optimizer}\nglobal_batch_size = {}\n",
            size("vocab"),
            size("layers"),
            size("hidden"),
            size("heads"),
            size("seq"),
            size("ffn"),
            size("batch"),
        );
        Config::from_toml(&text).unwrap_or_else(|error| panic!("{mesh}: {error}"))
    }

    fn adamw(&self) -> String {
        let value = |name: &str| &self.0["adamw"][name];
        format!(
            "[optimizer]\nname = 'adamw'\nlr = {}\nbeta1 = {}\nbeta2 = {}\neps = {}\nweight_decay = {}\n[training]\nmax_norm = {}",
            value("lr"),
            value("beta1"),
            value("beta2"),
            value("eps"),
            value("weight_decay"),
            value("max_norm"),
        )
    }

    fn sgd(&self) -> String {
        let value = |name: &str| &self.0["sgd"][name];
        let (lr, momentum) = (value("lr"), value("momentum"));
        format!(
            "[optimizer]\nname = 'sgd'\nlr = {lr}\nmomentum = {momentum}\nweight_decay = 0.0\n[training]\nmax_norm = 0.0"
        )
    }

    /// A rank's rows of the batch.
    fn batch(&self, trainer: &Trainer) -> Batch {
        let (rows, seq_len) = (trainer.samples(), self.0["config"]["seq"].as_u64().unwrap() as usize);
        let cut = |name: &str| -> Vec<i32> {
            let all = integers(&self.0[name]);
            all[rows.start * seq_len..rows.end * seq_len].to_vec()
        };
        language::batch(cut("inputs"), cut("targets"), seq_len).unwrap()
    }

    /// Gives a trainer the fixture's parameters, and checks that there are no others.
    fn load(&self, trainer: &mut Trainer, tied: bool) -> Result<(), TrainError> {
        let params = self.0["params"].as_object().unwrap();
        for spec in trainer.params().declarations().specs() {
            assert!(params.contains_key(&spec.name), "{} is not in the fixture", spec.name);
        }
        for (name, value) in params.iter().filter(|(name, _)| !(tied && *name == "lm_head.weight")) {
            trainer.load_parameter(name, &floats(value))?;
        }
        Ok(())
    }
}

fn integers(tensor: &Value) -> Vec<i32> {
    tensor["data"].as_array().unwrap().iter().map(|value| value.as_i64().unwrap() as i32).collect()
}

fn floats(tensor: &Value) -> Vec<f32> {
    numbers(&tensor["data"]).into_iter().map(|value| value as f32).collect()
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

#[track_caller]
fn assert_near<A: Copy + Into<f64>, B: Copy + Into<f64>>(what: &str, got: &[A], wanted: &[B], tolerance: f64) {
    assert_eq!(got.len(), wanted.len(), "{what}: number of elements");
    for (at, (&got, &wanted)) in got.iter().zip(wanted).enumerate() {
        let (got, wanted) = (got.into(), wanted.into());
        let off = (got - wanted).abs();
        assert!(
            off <= tolerance,
            "{what}: element {at} is {got}, in PyTorch {wanted} ({off:.1e} off, {tolerance:.0e} allowed)"
        );
    }
}

/// The results of a run of some steps.
struct Run {
    /// Logits of the first sequence before any step, position by position.
    logits: Vec<f32>,
    /// Report of each step.
    reports: Vec<StepReport>,
    /// Gradients of the first step.
    gradients: BTreeMap<String, Vec<f32>>,
    /// Parameters after the last step.
    finals: BTreeMap<String, Vec<f32>>,
    /// Loss after the last step.
    loss_after: f64,
}

fn run(fixture: &Fixture, tied: bool, mesh: (&str, usize), optimizer: &str) -> Run {
    let config = fixture.config(tied, mesh, optimizer);
    let window = &integers(&fixture.0["inputs"])[..config.model.seq_len];
    let ranks = on_mesh(&config, |mut trainer| {
        fixture.load(&mut trainer, tied)?;
        let batch = fixture.batch(&trainer);
        let mut logits = Vec::new();
        for position in 0..window.len() {
            logits.extend(next_token_logits(&mut trainer, &window[..=position], config.model.vocab_size)?);
        }
        let mut reports = vec![trainer.step(&batch)?];
        let first = pieces(&trainer)?;
        for _ in 1..STEPS {
            reports.push(trainer.step(&batch)?);
        }
        let loss_after = trainer.evaluate([batch])?.loss;
        Ok((logits, reports, first, pieces(&trainer)?, loss_after))
    });
    let (first, last): (Vec<_>, Vec<_>) = ranks.iter().map(|rank| (rank.2.clone(), rank.3.clone())).unzip();
    let (logits, reports, _, _, loss_after) = ranks.into_iter().next().unwrap();
    Run {
        logits,
        reports,
        gradients: assemble(mesh.0, &first, |piece| &piece.gradient),
        finals: assemble(mesh.0, &last, |piece| &piece.weights),
        loss_after,
    }
}

/// Losses and norms of the steps of an optimizer, and the loss after them.
fn assert_steps(what: &str, run: &Run, recorded: &Value) {
    let losses: Vec<f64> = run.reports.iter().map(|report| report.loss).collect();
    let norms: Vec<f64> = run.reports.iter().map(|report| report.grad_norm).collect();
    assert_near(&format!("{what}: losses"), &losses, &numbers(&recorded["losses"]), LOSS);
    assert_near(&format!("{what}: gradient norms"), &norms, &numbers(&recorded["grad_norms"]), LOSS);
    assert_near(&format!("{what}: loss after"), &[run.loss_after], &[recorded["loss_after"].as_f64().unwrap()], LOSS);
}

fn check(tied: bool) {
    let fixture = Fixture::read();
    let recorded = &fixture.0[if tied { "tied" } else { "untied" }];
    for mesh in MESHES {
        let what = format!("{} tied = {tied}", mesh.0.replace('\n', ", "));

        let adamw = run(&fixture, tied, mesh, &fixture.adamw());
        assert_near(&format!("{what}: loss"), &[adamw.reports[0].loss], &[recorded["loss"].as_f64().unwrap()], LOSS);
        assert_near(&format!("{what}: logits"), &adamw.logits, &floats(&recorded["logits_0"]), LOGITS);
        let norm = recorded["grad_norm"].as_f64().unwrap();
        assert_near(&format!("{what}: gradient norm"), &[adamw.reports[0].grad_norm], &[norm], LOSS);
        let gradients = recorded["grads"].as_object().unwrap();
        assert_eq!(adamw.gradients.len(), gradients.len(), "{what}: number of gradients");
        for (name, wanted) in gradients {
            assert_near(&format!("{what}: gradient of {name}"), &adamw.gradients[name], &floats(wanted), GRADIENTS);
        }
        assert_steps(&format!("{what}, adamw"), &adamw, &recorded["adamw"]);
        for (name, wanted) in recorded["adamw"]["final"].as_object().unwrap() {
            assert_near(&format!("{what}: {name} after adamw"), &adamw.finals[name], &floats(wanted), WEIGHTS);
        }
        let [q, k, v] = [0, 1, 2].map(|part| part * adamw.finals[QKV_BIAS].len() / 3);
        let (bias, end) = (&adamw.finals[QKV_BIAS], adamw.finals[QKV_BIAS].len());
        let q_and_v = [&bias[q..k], &bias[v..end]].concat();
        let wanted = floats(&recorded["adamw"]["final_qv"][QKV_BIAS]);
        assert_near(&format!("{what}: q and v of {QKV_BIAS} after adamw"), &q_and_v, &wanted, WEIGHTS);

        let sgd = run(&fixture, tied, mesh, &fixture.sgd());
        assert_steps(&format!("{what}, sgd"), &sgd, &recorded["sgd"]);
    }
}

#[test]
fn tied_embeddings() {
    check(true);
}

#[test]
fn untied_embeddings() {
    check(false);
}
