//! Update rules that read whole parameters: on any mesh, at any stage of ZeRO, with tied weights, experts and schedules
//! that roll back or update while they run.

mod projections;

use super::{batch, go_on_with, llama, model, on};
use crate::experts::in_every_layer;
use meshwork_core::World;
use meshwork_core::exact::LIMBS;
use meshwork_core::{DType, OpKind};
use meshwork_cpu::Cpu;
use meshwork_engine::{
    ModelPlan, Numerics, OPTIMIZER, Plan, ScheduleSpec, TrainError, Trainer, WholeState, Zero, ZeroStage, dry_run,
};
use meshwork_models::experts::ExpertsConfig;
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::llama::{Llama, LlamaConfig};
use meshwork_moe::{MoeConfig, RouterKind};
use meshwork_nn::Model;
use meshwork_optim::{
    Adafactor, Adam8bit, AdamW, Lamb, Muon, OptimError, Over, ParamShape, Pass, PassTotals, Rule, Run, SetPart, State,
    WholeOptimizer,
};
use meshwork_testkit::Sampled;
use meshwork_testkit::parity::assert_close;
use std::sync::Arc;

const CANONICAL: Numerics = Numerics::Canonical { blocks: 8 };

/// A user's own: each block of elements moves by the sign of its gradients, times the largest of them so far.
#[derive(Debug)]
struct Largest;

impl WholeOptimizer for Largest {
    fn name(&self) -> &str {
        "largest"
    }

    fn states(&self, _: &ParamShape) -> Vec<State> {
        vec![State::of_sets("largest", Over::Blocks(5))]
    }

    fn passes(&self, _: &ParamShape) -> Vec<Pass> {
        vec![Pass::Largest(vec![Over::Blocks(5)])]
    }

    fn measure(&self, _: usize, _: &[f32], run: &mut Run<'_, '_>, out: &mut [&mut [f32]]) -> Result<(), OptimError> {
        out[0].iter_mut().zip(run.grads).for_each(|(out, grad)| *out = run.update.grad_scale * grad);
        Ok(())
    }

    fn finish_pass(&self, PassTotals { totals, sets, .. }: PassTotals<'_, '_>) -> Result<(), OptimError> {
        sets[0].iter_mut().zip(&*totals[0]).for_each(|(set, &total)| *set = set.max(total as f32));
        Ok(())
    }

    fn update(&self, weights: &mut [f32], run: &mut Run<'_, '_>) -> Result<(), OptimError> {
        for SetPart { range, set, .. } in Over::Blocks(5).sets(&run.shape, run.first, weights.len()) {
            let size = run.update.lr as f32 * run.sets[0][set];
            weights[range.clone()].iter_mut().zip(&run.grads[range]).for_each(|(w, grad)| *w -= size * grad.signum());
        }
        Ok(())
    }
}

fn rules() -> [Rule; 6] {
    [
        Lamb::default().into(),
        Adafactor::default().into(),
        Adafactor { relative_step: false, ..Adafactor::default() }.into(),
        Rule::with_muon(Muon::default(), AdamW::default()),
        Rule::with_adam8bit(Adam8bit { block: 48, ..Adam8bit::default() }), // across rows and slices
        Rule::whole(Largest),
    ]
}

/// Four experts in every other layer.
fn experts() -> Arc<dyn Model> {
    let moe = MoeConfig { num_experts: 4, router: RouterKind::Switch, top_k: 1, ..MoeConfig::default() };
    let experts = ExpertsConfig { every_n_layers: 2, ..in_every_layer(moe, 32) };
    Arc::new(Gpt2::new(super::small_gpt2()).with_experts(Some(experts)))
}

fn cut(mesh: &str, schedule: &str, stage: usize, numerics: Numerics, optimizer: &Rule) -> Plan {
    Plan {
        schedule: ScheduleSpec::named(schedule).unwrap(),
        zero: Zero { stage: ZeroStage::ALL[stage], group: None },
        optimizer: optimizer.clone(),
        max_norm: 0.1, // every step is clipped, and a tentative one rolled back
        ..on(mesh, numerics)
    }
}

/// A run goes from mesh to mesh and stage to stage with the bits of one rank.
#[test]
fn rules_that_read_whole_parameters_have_the_bits_of_one_rank() {
    let dense = [("dp=4", "1f1b", 3), ("tp=4", "1f1b", 0), ("dp=2,tp=2,pp=2", "1f1b", 2), ("dp=2,pp=2", "zb_v", 1)];
    let spread = [("dp=4,ep=2", "1f1b", 3), ("dp=2,ep=2,tp=2", "1f1b", 0), ("dp=4,ep=4", "1f1b", 2)];
    let models = [(model(), &dense[..]), (llama(), &dense), (experts(), &spread), (projections::mixtral(), &spread)];
    // Each rule over one of two dense models and one of two with experts, in a sweep over all.
    for (turn, (model, chain)) in models.into_iter().enumerate() {
        for rule in rules().into_iter().sampled_in_turn(2, turn) {
            let steps = 2 * chain.len() as u64;
            let plan = cut("dp=1", "gpipe", 0, CANONICAL, &rule);
            let (alone, wanted) = go_on_with(&model, batch, &plan, None, 0..steps);
            let mut state: Option<WholeState> = None;
            for (part, &(mesh, schedule, stage)) in chain.iter().enumerate() {
                let (first, plan) = (2 * part as u64, cut(mesh, schedule, stage, CANONICAL, &rule));
                let (reports, next) = go_on_with(&model, batch, &plan, state.as_ref(), first..first + 2);
                for (report, wanted) in reports.iter().zip(&alone[first as usize..]) {
                    let numbers = [(report.loss, report.grad_norm), (wanted.loss, wanted.grad_norm)];
                    assert_eq!(numbers[0], numbers[1], "{rule:?} on {mesh}, stage {stage}, step {}", report.step);
                }
                state = Some(next);
            }
            assert!(state.unwrap() == wanted, "{rule:?} of {model:?}: other weights or states");
        }
    }
}

/// In fast numerics meshes agree up to rounding. (Of a model without biases: the gradient of a key's bias is zero, and
/// its rounding would be scaled up to a step.)
#[test]
fn rules_that_read_whole_parameters_follow_one_rank() {
    for rule in rules() {
        let plan = cut("dp=1", "gpipe", 0, Numerics::Fast, &rule);
        let (alone, wanted) = go_on_with(&llama(), batch, &plan, None, 0..3);
        for (mesh, schedule, stage, group) in [
            ("dp=2,tp=2,pp=2", "zb_h2", 1, None),
            ("dp=3", "1f1b", 2, None),
            ("dp=4,tp=2", "1f1b", 3, Some(2)),
            ("tp=4", "1f1b", 0, None),
        ] {
            let mut plan = cut(mesh, schedule, stage, Numerics::Fast, &rule);
            plan.zero.group = group;
            if mesh == "dp=3" {
                plan.global_batch_size = 12;
            }
            let of_twelve;
            let (alone, wanted) = match mesh {
                "dp=3" => {
                    let plan = Plan { global_batch_size: 12, ..cut("dp=1", "gpipe", 0, Numerics::Fast, &rule) };
                    of_twelve = go_on_with(&llama(), batch, &plan, None, 0..3);
                    (&of_twelve.0, &of_twelve.1)
                }
                _ => (&alone, &wanted),
            };
            let (reports, state) = go_on_with(&llama(), batch, &plan, None, 0..3);
            let what = format!("{rule:?} on {mesh}, stage {stage}");
            for (report, wanted) in reports.iter().zip(alone) {
                let off = (report.loss - wanted.loss).abs() / wanted.loss;
                assert!(off < 1e-5, "{what}: step {} has loss {}, one rank {}", report.step, report.loss, wanted.loss);
            }
            if rule.name() == "adam8bit" {
                continue; // rounding may take a moment to the next code, a hundredth away
            }
            for key in wanted.keys().filter(|key| key.state.is_none()) {
                // The steps of three updates, each of a rate of 3e-4, are far above rounding.
                assert_close(&format!("{what}: {key}"), state.vector(key).unwrap(), wanted.vector(key).unwrap(), 1e-6);
            }
        }
    }
}

/// A table of 100 words is stored in 104 rows in canonical numerics, in 128 in fast ones, and what is measured of it is
/// of its words.
#[test]
fn measures_of_a_table_leave_out_its_padding() {
    let model: Arc<dyn Model> = Arc::new(Llama::new(LlamaConfig { vocab_size: 100, ..super::small_llama() }));
    for rule in rules().into_iter().filter(|rule| rule.name() != "adam8bit") {
        let (_, wanted) = go_on_with(&model, batch, &cut("dp=1", "gpipe", 0, CANONICAL, &rule), None, 0..3);
        for (mesh, stage) in [("dp=1", 0), ("dp=2,tp=4", 2)] {
            let (_, state) = go_on_with(&model, batch, &cut(mesh, "1f1b", stage, Numerics::Fast, &rule), None, 0..3);
            for key in wanted.keys().filter(|key| key.state.is_none()) {
                let what = format!("{rule:?} on {mesh}: {key}");
                assert_close(&what, state.vector(key).unwrap(), wanted.vector(key).unwrap(), 1e-6);
            }
        }
    }
}

/// Weights that change while the schedule runs are those of the same schedule without dp and ZeRO.
#[test]
fn asynchronous_updates_bring_their_measures_together() {
    for rule in rules() {
        let asynchronous = |mesh: &str, stage: usize, micros: usize| {
            let plan = cut(mesh, "pipedream_2bw", stage, Numerics::Fast, &rule);
            Plan { max_norm: 0.0, num_microbatches: Some(micros), ..plan }
        };
        let (alone, _) = go_on_with(&llama(), batch, &asynchronous("pp=2", 0, 4), None, 0..4);
        for (mesh, stage) in [("dp=2,pp=2", 1), ("dp=2,tp=2,pp=2", 3)] {
            let (reports, _) = go_on_with(&llama(), batch, &asynchronous(mesh, stage, 4), None, 0..4);
            for (report, wanted) in reports.iter().zip(&alone) {
                let off = (report.loss - wanted.loss).abs() / wanted.loss;
                assert!(off < 1e-5, "{rule:?} on {mesh}: step {}: {} {}", report.step, report.loss, wanted.loss);
            }
        }
    }
}

/// What is left between steps: a weight and a gradient of 4 bytes, and the states that the rule declares. Of a model
/// without padding.
#[test]
fn a_rank_holds_the_states_that_its_rule_declares() {
    let model: Arc<dyn Model> = Arc::new(Llama::new(LlamaConfig { vocab_size: 64, ..super::small_llama() }));
    for (rule, per_parameter) in [
        (Rule::from(AdamW::default()), 8.0),
        (Lamb::default().into(), 8.0),
        (Adafactor::default().into(), 0.25),
        (Rule::with_muon(Muon::default(), AdamW::default()), 4.5),
        (Rule::with_adam8bit(Adam8bit::default()), 2.75),
    ] {
        for (mesh, stage) in [("dp=1", 0), ("dp=4", 1)] {
            let plan = cut(mesh, "1f1b", stage, Numerics::Fast, &rule);
            let held = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
                let trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
                let params = trainer.params();
                let specs = params.declarations().specs();
                let (states, ranks) =
                    (specs.iter().map(|spec| rule.state_bytes(&spec.shape())), plan.mesh.world_size());
                let states: usize = states.sum();
                let weights = 4 * trainer.local_elements();
                let gradients = if stage == 0 { weights } else { 0 };
                let live = trainer.device().meter().live_bytes() as usize;
                Ok::<_, TrainError>((live - weights - gradients, states, ranks, trainer.local_elements()))
            });
            for (held, declared, ranks, elements) in held.unwrap() {
                let per = declared as f64 / elements as f64;
                assert!(per <= per_parameter, "{rule:?}: {per} bytes a parameter");
                // States of sets are whole on each rank, and slices are padded to one length.
                let least = declared / ranks;
                assert!(
                    held >= least && held <= least + declared.min(elements / 4),
                    "{rule:?} on {mesh}: {held}, {least}"
                );
                assert!(ranks > 1 || held == declared, "{rule:?} on {mesh}: {held}, {declared}");
            }
        }
    }
}

/// The table in docs/optimizers.md.
#[test]
fn the_bytes_of_states_are_those_of_the_table() {
    let table = include_str!("../../../../../../docs/optimizers.md");
    let sizes = Gpt2Config {
        vocab_size: 50257,
        num_layers: 12,
        hidden_size: 768,
        num_heads: 12,
        ffn_hidden_size: 3072,
        seq_len: 1024,
        ..Gpt2Config::default()
    };
    let plan = on("dp=1", Numerics::Fast);
    let specs = ModelPlan::new(Arc::new(Gpt2::new(sizes)), &plan).unwrap().parameters().unwrap();
    let elements: usize = specs.iter().map(|spec| spec.global_elements()).sum();
    assert_eq!(elements, 124_439_808);
    for rule in [
        Rule::from(AdamW::default()),
        Lamb::default().into(),
        Adafactor::default().into(),
        Rule::with_muon(Muon::default(), AdamW::default()),
        Rule::with_adam8bit(Adam8bit::default()),
    ] {
        let bytes: usize = specs.iter().map(|spec| rule.state_bytes(&spec.shape())).sum();
        let row = table.lines().find(|line| line.starts_with(&format!("| `{}` |", rule.name()))).unwrap();
        let told = format!("| {:.3} |", bytes as f64 / elements as f64);
        assert!(row.ends_with(&told), "{told} in {row}");
    }
}

/// The measures of all parameters travel at once, and in canonical numerics sums as their digits: the table in
/// docs/optimizers.md.
#[test]
fn all_parameters_bring_their_measures_together_at_once() {
    let plan = on("dp=1", Numerics::Fast);
    let specs = ModelPlan::new(llama(), &plan).unwrap().parameters().unwrap();
    let shapes: Vec<ParamShape> = specs.iter().map(|spec| spec.shape()).collect();
    let sum = |of: &dyn Fn(&ParamShape) -> usize| shapes.iter().map(of).sum::<usize>();
    let rows_and_columns = |shape: &ParamShape| match shape.is_matrix() {
        true => shape.matrices * (shape.rows + shape.columns),
        false => 2 * shape.matrices,
    };
    let blocks = |shape: &ParamShape| if shape.hidden { 2 * shape.matrices * shape.each().div_ceil(48) } else { 0 };
    let matrices = |shape: &ParamShape| if shape.is_matrix() { 2 * shape.matrices } else { 0 };
    let [lamb, adafactor, adam8bit] =
        [vec![2 * sum(&|shape| shape.matrices)], vec![sum(&rows_and_columns), sum(&matrices)], vec![sum(&blocks)]];
    for numerics in [Numerics::Fast, CANONICAL] {
        let digits = if numerics == CANONICAL { LIMBS } else { 1 };
        let rules = rules();
        for (rule, wanted, width) in
            [(&rules[0], &lamb, digits), (&rules[1], &adafactor, digits), (&rules[4], &adam8bit, 1)]
        {
            let (reports, _) = go_on_with(&llama(), batch, &cut("tp=2", "1f1b", 0, numerics, rule), None, 0..1);
            let records = reports[0].records.iter().filter(|record| record.group == OPTIMIZER);
            let found: Vec<_> = records.map(|record| (record.op, record.dtype, record.elements)).collect();
            let wanted: Vec<_> = wanted.iter().map(|count| (OpKind::AllReduce, DType::F64, width * count)).collect();
            assert_eq!(found, wanted, "{rule:?}, {numerics:?}");
        }
    }
}

#[test]
fn a_rule_for_matrices_is_refused_where_there_are_none() {
    let refused = |model: &Arc<dyn Model>, optimizer: Rule| {
        let plan = Plan { optimizer, ..on("dp=1", Numerics::Fast) };
        dry_run::predict(model, &plan, 0).unwrap_err().to_string()
    };
    let with_muon = Rule::with_muon(Muon::default(), AdamW::default());
    assert_eq!(
        refused(&super::tower::tower(2), with_muon),
        "the update rule muon is for matrices of hidden layers, and the model declares none: declare them by ParamGroup::hidden, or use \
         another rule"
    );
    assert_eq!(
        refused(&llama(), Muon::default().into()),
        "the update rule muon is for matrices of hidden layers, and layers.0.input_layernorm.weight [32] is none: give it another rule by \
         Rule::Hidden"
    );
}
