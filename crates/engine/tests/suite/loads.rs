//! Weights and states that one rank loads alone, long after the first step: the next step is verified on every rank.
//! Beside each, the same load on all ranks.

use meshwork_core::RankEnd;
use meshwork_core::{Axis, Rank, World};
use meshwork_cpu::Cpu;
use meshwork_engine::{Numerics, Plan, ScheduleSpec, TrainError, Trainer, Verify, WholeState, Zero, ZeroStage};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language;
use meshwork_nn::{Batch, Model};
use meshwork_tensor::ParamSpec;
use meshwork_tensor::param::LocalSlice;
use std::sync::Arc;

const SEQ: usize = 8;
const VOCAB: usize = 32;
const BATCH: usize = 4;

fn model() -> Arc<dyn Model> {
    let config = Gpt2Config {
        vocab_size: VOCAB,
        hidden_size: 16,
        ffn_hidden_size: 32,
        seq_len: SEQ,
        num_layers: 2,
        tie_embeddings: false, // asynchronous schedules take no tied weight
        ..Gpt2Config::default()
    };
    Arc::new(Gpt2::new(config))
}

fn batch(step: usize, samples: std::ops::Range<usize>) -> Batch {
    let ids = |next: usize| -> Vec<i32> {
        samples.clone().flat_map(|s| (0..SEQ).map(move |at| ((step * 3 + s * 5 + at + next) % VOCAB) as i32)).collect()
    };
    language::batch(ids(0), ids(1), SEQ).unwrap()
}

fn plan(mesh: &str) -> Plan {
    Plan {
        mesh: mesh.parse().unwrap(),
        global_batch_size: BATCH,
        num_microbatches: Some(2),
        max_norm: 0.0,
        ..Plan::default()
    }
}

/// What is loaded between two steps.
#[derive(Clone, Copy, Debug)]
enum Load {
    /// A parameter that tp does not cut.
    Whole,
    /// A parameter that tp cuts, of which no rank has what another has.
    Cut,
    Weights,
    State,
}

const LOADS: [Load; 4] = [Load::Whole, Load::Cut, Load::Weights, Load::State];

fn load(trainer: &mut Trainer, load: Load) -> Result<(), TrainError> {
    let cut = |spec: &ParamSpec| spec.placement.shards().iter().any(|(axis, _)| *axis == Axis::Tp);
    let all = trainer.plan().parameters()?;
    let named =
        |wanted: bool| all.iter().find(|spec| cut(spec) == wanted && spec.name.contains(".0.")).unwrap().clone();
    match load {
        Load::Whole | Load::Cut => {
            let spec = named(matches!(load, Load::Cut));
            let values: Vec<f32> = (0..spec.global_elements()).map(|i| 0.01 * (i % 7) as f32).collect();
            trainer.load_parameter(&spec.name, &values)
        }
        Load::Weights => {
            let read = |spec: &ParamSpec, slice: &LocalSlice| Ok::<_, TrainError>(spec.initial(slice, 77));
            trainer.load_weights(read)
        }
        Load::State => {
            let plan = Plan { seed: 77, ..plan("dp=1") };
            let other = Trainer::new(model(), &plan, Arc::new(Rank::alone().unwrap()), Cpu::device())?;
            let mut state = other.state()?;
            (state.step, state.updates) = (6, 6);
            trainer.load_state(&WholeState::merge(&[state])?)
        }
    }
}

/// The errors of all ranks in steps 1 to 8, if some of them load after step 6; none if all is well.
fn refusals(plan: &Plan, what: Load, loads: impl Fn(usize) -> bool + Sync) -> Vec<String> {
    let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let of_world = rank.world_rank();
        let mut trainer = Trainer::new(model(), plan, rank, Cpu::device())?;
        for step in 0..8 {
            if step == 6 {
                trainer.flush(|_| {})?;
                if loads(of_world) {
                    load(&mut trainer, what)?;
                }
            }
            trainer.start_step(&batch(step, trainer.samples()), || false, |_| {})?;
        }
        trainer.flush(|_| {}).map(drop)
    });
    let Err(error) = ranks else { return Vec::new() };
    let told = |end: &Option<RankEnd>| match end {
        Some(RankEnd::Error(error)) => error.to_string(),
        other => format!("{other:?}"),
    };
    error.ends.iter().map(told).collect()
}

fn assert_refused(plan: &Plan, what: Load) {
    let told = refusals(plan, what, |rank| rank == 1);
    assert_eq!(told.len(), plan.mesh.world_size(), "{} {what:?}", plan.mesh);
    for told in &told {
        assert!(
            told.starts_with("step 7: ") && told.contains(" should be the same over "),
            "{} {what:?}: {told}",
            plan.mesh
        );
    }
    assert!(told.windows(2).all(|two| two[0] == two[1]), "{told:?}");
    assert_eq!(refusals(plan, what, |_| true), [""; 0], "{} {what:?}: all ranks", plan.mesh);
}

#[test]
fn what_one_rank_loads_alone_is_found_in_the_next_step_on_every_mesh() {
    for mesh in ["dp=2", "tp=2", "dp=2,pp=2", "dp=2,tp=2"] {
        for what in LOADS {
            assert_refused(&plan(mesh), what);
        }
    }
    for what in LOADS {
        let off = Plan { verify: Verify::Off, ..plan("dp=2") };
        assert_eq!(refusals(&off, what, |rank| rank == 1), [""; 0], "{what:?}: unnoticed without");
    }
}

#[test]
fn what_ranks_share_out_and_canonical_numerics_are_no_exception() {
    for stage in ZeroStage::ALL {
        let zero = Zero { stage, group: None };
        for what in LOADS {
            assert_refused(&Plan { zero, ..plan("dp=2") }, what);
        }
    }
    assert_refused(&Plan { numerics: Numerics::Canonical { blocks: 8 }, ..plan("dp=2,tp=2") }, Load::Whole);
}

/// Steps that overlap, and updates within the schedule.
#[test]
fn schedules_whose_steps_overlap_find_it_in_the_step_after_the_load() {
    let named = |name| ScheduleSpec::named(name).unwrap();
    for what in [Load::Whole, Load::Cut, Load::Weights] {
        assert_refused(&Plan { schedule: named("zb_h2"), max_norm: 1e3, ..plan("tp=2,pp=2") }, what);
        assert_refused(&Plan { schedule: named("pipedream_2bw"), ..plan("tp=2,pp=2") }, what);
    }
}
