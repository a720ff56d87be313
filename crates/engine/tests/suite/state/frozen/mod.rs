//! Frozen parts of a model: they stay, the others train as if nothing was frozen, and every mesh does the same.

use super::{batch, go_on_with, on};
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::offload::{Folder, Offload};
use meshwork_engine::{
    ModelPlan, Numerics, Plan, ScheduleSpec, StateKey, TrainError, Trainer, Zero, ZeroStage, dry_run,
};
use meshwork_models::gpt2::Gpt2;
use meshwork_models::language::Frozen;
use meshwork_models::llama::Llama;
use meshwork_nn::Model;
use meshwork_optim::{AdamW, LrSchedule, Muon, Rule, Sgd};
use std::sync::Arc;

const CANONICAL: Numerics = Numerics::Canonical { blocks: 8 };

fn gpt2(freeze: &str) -> Arc<dyn Model> {
    Arc::new(Gpt2::new(super::small_gpt2()).freeze(freeze.parse().unwrap()))
}

fn llama(freeze: &str) -> Arc<dyn Model> {
    Arc::new(Llama::new(super::small_llama()).freeze(freeze.parse().unwrap()))
}

/// Whether a parameter of these models lies in a part, by its name.
fn is_in(name: &str, freeze: &str) -> bool {
    let frozen: Frozen = freeze.parse().unwrap();
    let mut parts = name.split('.');
    match parts.next().unwrap() {
        "wte" | "wpe" | "embed_tokens" => frozen.embedding,
        "ln_f" | "norm" => frozen.norm,
        "lm_head" => frozen.head,
        _ => frozen.has_layer(parts.next().unwrap().parse().unwrap()),
    }
}

const PARTS: [&str; 5] =
    ["embedding, layers.0-1", "layers.3", "head, norm", "layers.0,layers.2", "embedding,layers.0-3"];

/// One step of gradient descent: what is frozen keeps its bits and has no states, and the rest moves as it does where
/// nothing is frozen.
#[test]
fn frozen_parts_stay_and_the_others_train_as_before() {
    type Make = fn(&str) -> Arc<dyn Model>;
    for (make, tied) in [(gpt2 as Make, true), (llama, false)] {
        let sgd = Sgd { momentum: 0.9, weight_decay: 0.0 };
        let plan = Plan {
            optimizer: sgd.into(),
            lr: LrSchedule { base: 0.1, ..Plan::default().lr },
            max_norm: 0.0,
            ..on("dp=1", CANONICAL)
        };
        let specs = ModelPlan::new(make(""), &plan).unwrap().parameters().unwrap();
        let (_, start) = go_on_with(&make(""), batch, &plan, None, 0..0);
        let (_, all) = go_on_with(&make(""), batch, &plan, None, 0..1);
        for freeze in PARTS {
            if tied && freeze.contains("head") {
                continue; // the head is the table
            }
            let (_, some) = go_on_with(&make(freeze), batch, &plan, None, 0..1);
            for spec in &specs {
                let key =
                    |state: Option<&str>| StateKey { parameter: spec.name.clone(), state: state.map(str::to_owned) };
                let frozen = is_in(&spec.name, freeze);
                let wanted = if frozen { &start } else { &all };
                assert_eq!(some.vector(&key(None)), wanted.vector(&key(None)), "{} of {freeze}", spec.name);
                assert_ne!(all.vector(&key(None)), start.vector(&key(None)), "{} trains", spec.name);
                assert_eq!(some.vector(&key(Some("momentum_buffer"))).is_none(), frozen, "{} of {freeze}", spec.name);
            }
        }
    }
}

/// Every mesh, stage of ZeRO and schedule, and states in files, give the bits of one rank, from one to the other.
#[test]
fn frozen_parts_are_the_same_on_every_mesh() {
    let folder = tempfile::TempDir::new().unwrap();
    let rule = Rule::with_muon(Muon::default(), AdamW::default());
    for model in [gpt2("embedding, layers.0-1"), llama("embedding, layers.0-2, norm"), llama("layers.2-3, head")] {
        let cut = |mesh: &str, schedule: &str, stage: usize| Plan {
            schedule: ScheduleSpec::named(schedule).unwrap(),
            zero: Zero { stage: ZeroStage::ALL[stage], group: None },
            max_norm: 0.1,
            ..Plan { optimizer: rule.clone(), ..on(mesh, CANONICAL) }
        };
        let (alone, wanted) = go_on_with(&model, batch, &cut("dp=1", "1f1b", 0), None, 0..10);
        let mut state = None;
        for (part, (mesh, schedule, stage)) in [
            ("dp=2,tp=2,pp=2", "1f1b", 1),
            ("pp=4", "zb_h2", 0),
            ("dp=4", "1f1b", 3),
            ("dp=2,pp=2", "interleaved_1f1b", 2),
            ("tp=4", "1f1b", 0),
        ]
        .into_iter()
        .enumerate()
        {
            let first = 2 * part as u64;
            let mut plan = cut(mesh, schedule, stage);
            if mesh == "tp=4" {
                let to = Some(Arc::new(Folder(folder.path().into())) as _);
                plan.offload =
                    Some(Offload { optimizer: true, gradients: true, activations: true, samples: false, to });
            }
            let (reports, next) = go_on_with(&model, batch, &plan, state.as_ref(), first..first + 2);
            for (report, wanted) in reports.iter().zip(&alone[first as usize..]) {
                let numbers = [(report.loss, report.grad_norm), (wanted.loss, wanted.grad_norm)];
                assert_eq!(numbers[0], numbers[1], "{model:?} on {mesh}, step {}", report.step);
            }
            state = Some(next);
        }
        assert!(state.unwrap() == wanted, "{model:?}");
    }
}

/// A dry run tells what is saved: states and gradients of frozen parts, and the backward below the first part that is
/// trained.
#[test]
fn what_frozen_parts_save_is_predicted() {
    let plan = on("dp=1", Numerics::Fast);
    let predict = |freeze: &str| dry_run::predict(&llama(freeze), &plan, 0).unwrap();
    let (all, lower, upper) = (predict(""), predict("embedding, layers.0-2"), predict("layers.1-3, norm, head"));
    for (some, freeze) in [(&lower, "embedding, layers.0-2"), (&upper, "layers.1-3, norm, head")] {
        let held = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(llama(freeze), &plan, rank, Cpu::device())?;
            let live = trainer.device().meter().live_bytes();
            trainer.step(&batch(0, trainer.samples()))?;
            Ok::<_, TrainError>((live, trainer.device().meter().peak().total()))
        });
        let (live, peak) = held.unwrap()[0];
        assert_eq!((live, peak), (some.model_bytes, some.memory.total()), "{freeze}");
        assert_eq!(some.parameters, all.parameters);
        assert!(some.model_bytes < all.model_bytes, "{freeze}");
    }
    // Of layers.0-2 and the embedding there is no backward at all, which takes twice as long as their forward.
    assert!(10 * lower.flops < 6 * all.flops, "{} and {}", lower.flops, all.flops);
    assert!(upper.flops < all.flops && upper.flops > lower.flops, "{} and {}", upper.flops, all.flops);
}
