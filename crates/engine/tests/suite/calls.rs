//! Programs whose ranks make different calls: each is told which ones, on every mesh, and none hangs. And the call that
//! makes many of them, `Trainer::train`.

use meshwork_core::{Rank, RunError, World};
use meshwork_cpu::Cpu;
use meshwork_engine::{AtCuts, Decoder, Plan, ScheduleSpec, TrainError, Trainer};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language;
use meshwork_nn::{Batch, BatchSource, Model};
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Error, ParamSpec};
use std::ops::Range;
use std::sync::Arc;

const SEQ: usize = 8;

fn model() -> Arc<dyn Model> {
    let small =
        Gpt2Config { num_layers: 2, hidden_size: 16, ffn_hidden_size: 32, seq_len: SEQ, ..Gpt2Config::default() };
    Arc::new(Gpt2::new(Gpt2Config { tie_embeddings: false, ..small }))
}

fn plan(mesh: &str) -> Plan {
    Plan { mesh: mesh.parse().unwrap(), global_batch_size: 4, ..Plan::default() }
}

/// Samples that count from their numbers, as many steps of them as it says.
struct Counting(u64);

impl BatchSource for Counting {
    fn batch(&self, step: u64, global: usize, samples: Range<usize>) -> Result<Batch, Error> {
        if step >= self.0 {
            return Err(Error::Shape { op: "counting", problem: format!("no step {step}"), shapes: Vec::new() });
        }
        let of_step = step as usize % 8 * global;
        let rows = |shift| {
            let row = |n| (0..SEQ).map(move |at| (of_step + n + at + shift) as i32);
            samples.clone().flat_map(row).collect()
        };
        language::batch(rows(0), rows(1), SEQ)
    }
}

/// The samples of a rank in the first step.
fn batch(trainer: &Trainer) -> Batch {
    Counting(1).batch(0, 4, trainer.samples()).unwrap()
}

type Call = fn(&mut Trainer) -> Result<(), TrainError>;

/// Every collective call of a trainer.
#[rustfmt::skip]
const CALLS: [(&str, Call); 10] = [
    ("step",           |trainer| trainer.step(&batch(trainer)).map(drop)),
    ("step",           |trainer| trainer.observed_step(&batch(trainer), |_| {}).map(drop)),
    ("step",           |trainer| trainer.start_step(&batch(trainer), || false, |_| {}).map(drop)),
    ("step",           |trainer| trainer.train(&Counting(1), 1, |_| {})),
    ("evaluate",       |trainer| trainer.evaluate([batch(trainer)]).map(drop)),
    ("evaluate",       |trainer| trainer.evaluate_at(AtCuts::Exact, [batch(trainer)]).map(drop)),
    ("predict",        |trainer| trainer.predict(&batch(trainer), 0, 4).map(drop)),
    ("predict",        |trainer| trainer.predict_at(AtCuts::Exact, &batch(trainer), 0, 4).map(drop)),
    ("predict_all",    |trainer| trainer.predict_all(&batch(trainer)).map(drop)),
    ("require_finite", |trainer| trainer.require_finite()),
];

/// Trainers on two ranks, each of which makes calls of its own.
fn calls(plan: &Plan, of_rank: impl Fn(usize, &mut Trainer) -> Result<(), TrainError> + Sync) -> Result<(), RunError> {
    let model = model();
    let ended = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let number = rank.world_rank();
        of_rank(number, &mut Trainer::new(model.clone(), plan, rank, Cpu::device())?)
    });
    ended.map(drop)
}

const MESHES: [&str; 3] = ["dp=2", "tp=2", "pp=2"];

/// Whether a call needs the other rank: each rank of dp predicts all samples by itself.
fn meets(mesh: &str, call: &str) -> bool {
    (mesh, call) != ("dp=2", "predict")
}

#[test]
fn a_call_on_one_rank_alone_is_named() {
    for mesh in MESHES {
        for (name, call) in CALLS.into_iter().filter(|(name, _)| meets(mesh, name)) {
            for caller in [0, 1] {
                let error = calls(&plan(mesh), |rank, trainer| if rank == caller { call(trainer) } else { Ok(()) });
                let Err(error) = error else { panic!("{name} on rank {caller} alone of {mesh} went unnoticed") };
                let error = error.to_string();
                let says = format!(
                    "rank {} has returned and takes no part in Trainer::{name}, which every rank calls",
                    1 - caller
                );
                assert!(error.lines().next().unwrap().ends_with(&says), "{mesh}, {name} on {caller}: {error}");
            }
        }
    }
}

#[test]
fn ranks_in_different_calls_are_told_both() {
    for mesh in MESHES {
        let calls_of = || CALLS.into_iter().filter(|(name, _)| meets(mesh, name));
        for (i, (one, first)) in calls_of().enumerate() {
            for (other, second) in calls_of().skip(i + 1).filter(|(other, _)| *other != one) {
                let error =
                    calls(&plan(mesh), |rank, trainer| if rank == 0 { first(trainer) } else { second(trainer) });
                let error = error.expect_err("ranks are in different calls").to_string();
                let line = error.lines().next().unwrap();
                for says in [one, other] {
                    assert!(line.contains(&format!("Trainer::{says}")), "{mesh}, {one} and {other}: {error}");
                }
                assert!(
                    line.ends_with("every rank makes the same calls, in the same order"),
                    "{mesh}, {one} and {other}: {error}"
                );
            }
        }
    }
}

/// The last micro-batches of an asynchronous schedule are on their way, and `flush` drains the pipeline.
#[test]
fn a_flush_on_one_rank_alone_is_named() {
    let schedule = ScheduleSpec::named("pipedream").unwrap();
    let flowing = Plan { schedule, max_norm: 0.0, num_microbatches: Some(4), ..plan("pp=2") };
    let error = calls(&flowing, |rank, trainer| {
        trainer.start_step(&batch(trainer), || false, |_| {})?;
        if rank == 0 { trainer.flush(|_| {}).map(drop) } else { Ok(()) }
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("takes no part in Trainer::flush, which every rank calls"), "{error}");
}

#[test]
fn a_step_too_many_is_named() {
    for mesh in MESHES {
        let twice = calls(&plan(mesh), |rank, trainer| {
            (0..=rank).try_for_each(|_| trainer.step(&batch(trainer)).map(drop))?;
            trainer.evaluate([batch(trainer)]).map(drop)
        });
        let error = twice.unwrap_err().to_string();
        let line = error.lines().next().unwrap();
        assert!(
            line.contains("of Trainer::evaluate") || line.contains("rank 0 is in Trainer::evaluate"),
            "{mesh}: {error}"
        );
        assert!(line.contains("of Trainer::step") || line.contains("rank 1 is in Trainer::step"), "{mesh}: {error}");
    }
}

/// Two trainers of the same plan communicate alike: what one rank computed with the first one met what another computed
/// with the second.
#[test]
fn two_trainers_in_another_order_are_told_apart() {
    for mesh in MESHES {
        let (plan, model) = (plan(mesh), model());
        let trained = |swap: bool| {
            World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
                let new = || Trainer::new(model.clone(), &plan, rank.clone(), Cpu::device());
                let (mut student, mut teacher) = (new()?, new()?);
                let pair = [&mut student, &mut teacher];
                let order = if swap && rank.world_rank() == 1 { [1, 0] } else { [0, 1] };
                order.into_iter().try_for_each(|i| pair[i].evaluate([batch(pair[i])]).map(drop))
            })
        };
        trained(false).unwrap();
        let error = trained(true).unwrap_err().to_string();
        let line = error.lines().next().unwrap();
        assert!(line.contains("Trainer::evaluate") && line.contains("Trainer 2::evaluate"), "{mesh}: {error}");
    }
}

#[test]
fn a_decoder_on_one_rank_alone_is_named() {
    for mesh in ["tp=2", "pp=2"] {
        let (plan, model) = (plan(mesh), model());
        let ended = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let zeros = |_: &ParamSpec, slice: &LocalSlice| Ok::<_, String>(vec![0.0; slice.stored.count()]);
            let number = rank.world_rank();
            let mut decoder = Decoder::new(model.clone(), &plan, rank, Cpu::device(), SEQ, zeros)?;
            let tokens = language::batch(vec![1, 2], vec![2, 3], 2)?;
            if number == 1 { decoder.next(&tokens, 2, 4).map(drop) } else { Ok(()) }
        });
        let error = ended.unwrap_err();
        let says = "rank 0 has returned and takes no part in Decoder::next, which every rank calls";
        assert!(error.to_string().lines().next().unwrap().ends_with(says), "{mesh}: {error}");
    }
}

/// A rank's error in user code, and its panic, are the first cause, with where the others were.
#[test]
fn the_error_and_the_panic_of_a_program_are_the_cause() {
    let error = calls(&plan("dp=2"), |rank, trainer| match rank {
        0 => trainer.evaluate([batch(trainer)]).map(drop),
        _ => Err(TrainError::NoTerms { step: 7 }),
    });
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("a world of 2 ranks failed: rank 1 returned an error: step 7: every token"), "{error}");
    assert!(error.contains("of Trainer::evaluate"), "{error}");
    let error = calls(&plan("dp=2"), |rank, trainer| match rank {
        0 => trainer.evaluate([batch(trainer)]).map(drop),
        _ => panic!("out of cheese"),
    });
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("a world of 2 ranks failed: rank 1 panicked: out of cheese"), "{error}");
}

#[test]
fn a_mesh_of_another_size_than_the_world_or_than_the_plan_is_named() {
    let ended =
        World::Threads(2).run(|world| Rank::new(&"dp=4".parse().unwrap(), world.communicator().clone()).map(drop));
    let error = ended.unwrap_err();
    let says = "cannot join the mesh tp=1,dp=4,pp=1: the mesh has 4 ranks, the world has 2";
    assert!(error.to_string().contains(says), "{error}");
    let (model, other) = (model(), plan("tp=2"));
    let ended = World::threads(&"dp=2".parse().unwrap())
        .run_mesh(&"dp=2".parse().unwrap(), |rank| Trainer::new(model.clone(), &other, rank, Cpu::device()).map(drop));
    let error = ended.unwrap_err();
    assert!(error.to_string().contains("tp=2") && error.to_string().contains("dp=2"), "{error}");
}

/// The numbers and losses of steps.
type Reports = Vec<(u64, f64)>;

/// Where steps overlap (`zb_h2`) and where they flow (`pipedream`) too; a second call goes on behind the first.
#[test]
fn train_reports_every_step_once_and_in_order() {
    for (schedule, max_norm) in [("1f1b", 1.0), ("zb_h2", 1e9), ("pipedream", 0.0)] {
        let schedule = ScheduleSpec::named(schedule).unwrap();
        let plan = Plan { schedule, max_norm, num_microbatches: Some(4), ..plan("pp=2") };
        let model = model();
        let trained = |by: fn(&mut Trainer, &mut Reports) -> Result<(), TrainError>| {
            World::threads(&plan.mesh)
                .run_mesh(&plan.mesh, |rank| {
                    let (mut trainer, mut reports) =
                        (Trainer::new(model.clone(), &plan, rank, Cpu::device())?, Vec::new());
                    by(&mut trainer, &mut reports)?;
                    assert_eq!(trainer.steps_done(), 5);
                    Ok::<_, TrainError>(reports)
                })
                .unwrap()
        };
        let by_hand = trained(|trainer, reports| {
            for step in 0..5 {
                let batch = Counting(5).batch(step, 4, trainer.samples())?;
                reports.extend(trainer.start_step(&batch, || false, |_| {})?.iter().map(|of| (of.step, of.loss)));
                if [1, 4].contains(&step) {
                    reports.extend(trainer.flush(|_| {})?.iter().map(|of| (of.step, of.loss)));
                }
            }
            Ok(())
        });
        let trained = trained(|trainer, reports| {
            trainer.train(&Counting(5), 2, |of| reports.push((of.step, of.loss)))?;
            trainer.train(&Counting(5), 0, |of| reports.push((of.step, of.loss)))?;
            trainer.train(&Counting(5), 3, |of| reports.push((of.step, of.loss)))
        });
        assert_eq!(trained, by_hand, "{plan:?}");
        assert!(trained[0].iter().map(|(step, _)| *step).eq(1..=5), "{plan:?}: {trained:?}");
    }
}

#[test]
fn train_ends_with_the_error_of_its_source() {
    let error = calls(&plan("dp=2"), |_, trainer| trainer.train(&Counting(2), 3, |_| {})).unwrap_err();
    assert!(error.to_string().contains("counting: no step 2"), "{error}");
}
