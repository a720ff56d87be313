//! The effects of a schedule besides the order of its actions: when weights change, which version of them is read, and
//! how much is kept. `parity` and `canonical` check that the numbers of synchronous schedules do not change.

use crate::mesh::cases::{ADAMW, BATCH, CASES, Case, HIDDEN, Model, PLAIN, SEQ, SGD, UNEVEN, UNTIED};
use crate::mesh::parity::assert_parity;
use crate::mesh::streams::{DESCENT, stream};
use crate::mesh::world::{Piece, assemble, on_mesh, pieces, step_of};
use meshwork_nn::Batch;
use meshwork_pipeline::{ActionKind, Event, Phase, lower};
use meshwork_testkit::Sampled;
use meshwork_train::config::Config;
use meshwork_train::plan::predict;
use meshwork_train::{StepReport, TrainError, Trainer};
use std::collections::BTreeMap;

pub type Whole = BTreeMap<String, Vec<f32>>;

/// Runs steps that overlap if the schedule allows it. Returns the report of each, and the state of a rank at the end.
pub fn advance(
    trainer: &mut Trainer,
    batches: &[Batch],
    mut observe: impl FnMut(Event),
) -> Result<Vec<StepReport>, TrainError> {
    let mut reports = Vec::new();
    for batch in batches {
        reports.extend(trainer.start_step(batch, || false, &mut observe)?);
    }
    reports.extend(trainer.flush(&mut observe)?);
    Ok(reports)
}

pub fn batches(model: &Model, trainer: &Trainer, steps: u64) -> Vec<Batch> {
    let data = model.data();
    (0..steps).map(|step| data.batch(step, BATCH, trainer.samples()).unwrap()).collect()
}

pub fn weights(case: &str, held: &[Vec<Piece>]) -> Whole {
    assemble(case, held, |piece| &piece.weights)
}

/// Cases of schedules that let steps overlap, of GPT-2: these tests spoil weights of it, and know when its steps are
/// clipped.
fn overlapping() -> impl Iterator<Item = &'static Case> {
    let gpt2 = CASES.iter().filter(|case| case.model.more.is_empty());
    gpt2.filter(|case| ["zb_h2", "zb_v", "dualpipe_v"].contains(&case.schedule))
}

/// AdamW clips the first step of these models, and not every later one: the update of step 1 is rolled back when step 2
/// has begun. In canonical numerics the result must be, bit by bit, that of steps that wait for their norm: those of
/// one rank.
#[test]
fn an_update_that_should_have_been_clipped_is_taken_back() {
    const STEPS: u64 = 4;
    let more = ADAMW.replace("[training]", "[training]\nmax_norm = 0.9\nnumerics = 'canonical'");
    let numbers = |report: &StepReport| (report.step, report.loss.to_bits(), report.grad_norm.to_bits());
    for case in overlapping() {
        let (name, config) = (case.to_string(), case.config(&more));
        let alone = on_mesh(&Case::alone(case.model).config(&more), |mut trainer| {
            assert_eq!(trainer.steps_ahead(), 0, "1f1b waits");
            let batches = batches(case.model, &trainer, STEPS);
            Ok((advance(&mut trainer, &batches, |_| {})?, pieces(&trainer)?))
        });
        let ranks = on_mesh(&config, |mut trainer| {
            let batches = batches(case.model, &trainer, STEPS);
            let mut first_forwards = 0;
            let reports = advance(&mut trainer, &batches, |event| {
                let first = event.action.kind == ActionKind::Forward && event.action.micro == 0;
                first_forwards += usize::from(first && event.phase == Phase::Finished);
            })?;
            Ok((reports, first_forwards, pieces(&trainer)?))
        });
        let chunks = schedule(&config).stages() / case.pp;
        let (mut held, wanted) = (Vec::new(), &alone[0].0);
        for (rank, (reports, first_forwards, pieces)) in ranks.into_iter().enumerate() {
            assert!(
                reports.iter().map(numbers).eq(wanted.iter().map(numbers)),
                "{name}: rank {rank} reports {reports:?}"
            );
            assert!(reports[0].grad_norm > 0.9, "{name}: step 1 is to be clipped");
            assert!(
                first_forwards > STEPS as usize * chunks,
                "{name}: rank {rank} had begun no step with weights that were taken back"
            );
            held.push(pieces);
        }
        let alone = [alone[0].1.clone()];
        assert_eq!(weights(&name, &held), weights("one rank", &alone), "{name}");
        for state in 0..2 {
            let of = |held: &[Vec<Piece>]| assemble(&name, held, |piece| &piece.states[state]);
            assert_eq!(of(&held), of(&alone), "{name}: state {state}");
        }
    }
}

/// A loss that is not a number is noticed when the next step has begun. The weights are then those before the bad step,
/// and training continues with a good batch.
#[test]
fn a_step_that_is_not_finite_is_taken_back_while_the_next_one_runs() {
    const PLACES: &str = "wpe.weight";
    let good: Vec<f32> = (0..SEQ * HIDDEN).map(|at| (at % 7) as f32 / 100.0).collect();
    for case in overlapping() {
        let (config, name) = (case.config(ADAMW), case.to_string());
        let run = |spoilt: bool| {
            on_mesh(&config, |mut trainer| {
                let batches = batches(case.model, &trainer, 2);
                if spoilt {
                    trainer.load_parameter(PLACES, &[f32::MAX; SEQ * HIDDEN])?;
                    assert!(trainer.start_step(&batches[0], || false, |_| {})?.is_empty(), "{name}");
                    let refused = trainer.start_step(&batches[1], || false, |_| {});
                    assert!(matches!(refused, Err(TrainError::NotFinite { step: 1, .. })), "{name}: {refused:?}");
                    assert_eq!(trainer.steps_done(), 0, "{name}");
                }
                trainer.load_parameter(PLACES, &good)?;
                advance(&mut trainer, &batches, |_| {})?;
                pieces(&trainer)
            })
        };
        assert_eq!(run(true), run(false), "{name}");
    }
}

fn schedule(config: &Config) -> meshwork_pipeline::Schedule {
    config.pipeline.build(config.parallelism.pp).unwrap()
}

#[test]
fn no_rank_keeps_more_than_was_promised() {
    for case in CASES.iter().filter(|case| case.pp > 1).sampled(3) {
        let config = case.config(ADAMW);
        let promised = lower(&schedule(&config)).unwrap().report().clone();
        let peaks = on_mesh(&config, |mut trainer| {
            let batches = batches(case.model, &trainer, 2);
            advance(&mut trainer, &batches, |_| {})?;
            Ok((trainer.rank().coords().get(meshwork_core::Axis::Pp), trainer.peaks().0))
        });
        for (pp_rank, activations) in peaks {
            assert_eq!(activations, promised.peaks[pp_rank], "{case}: activations on pp rank {pp_rank}");
        }
    }
}

#[test]
fn weights_are_not_read_from_outside_while_they_may_change() {
    let case = Case { pp: 2, micros: 4, schedule: "zb_h2", ..Case::alone(&UNEVEN) };
    on_mesh(&case.config(ADAMW), |mut trainer| {
        let batches = batches(case.model, &trainer, 1);
        assert!(trainer.start_step(&batches[0], || false, |_| {})?.is_empty());
        let refused = trainer.evaluate(std::iter::empty()).unwrap_err().to_string();
        assert_eq!(refused, "1 steps are under way: flush() completes them first");
        assert_eq!((trainer.steps_done(), trainer.flush(|_| {})?.len(), trainer.steps_done()), (0, 1, 1));
        Ok(())
    });
}

/// PipeDream's kind of replicas, 3-1 among them: stages of unequal numbers of ranks train as one rank does.
#[test]
fn replicas_of_unequal_numbers_train_as_one_rank() {
    let of = |model, (dp, tp), sequence_parallel, micros| {
        let case = Case { model, dp, tp, pp: 4, sequence_parallel, micros, ..Case::alone(model) };
        Case { schedule: "1f1b", ..case }
    };
    // (the case, ranks of each stage, layers of each stage)
    let cases: [(Case, &[usize], &[usize]); 7] = [
        (of(&PLAIN, (1, 1), false, 4), &[3, 1], &[3, 1]),
        (of(&UNEVEN, (1, 1), false, 8), &[3, 1], &[4, 1]),
        (of(&UNEVEN, (2, 1), false, 8), &[1, 3], &[1, 4]),
        (of(&UNTIED, (1, 2), true, 16), &[3, 1], &[3, 1]),
        (of(&UNTIED, (1, 2), false, 8), &[1, 2, 1], &[1, 2, 1]),
        (of(&UNEVEN, (2, 2), false, 4), &[2, 2], &[3, 2]),
        (of(&PLAIN, (1, 1), false, 8), &[4], &[4]),
    ];
    for (turn, (case, replicas, layers)) in cases.into_iter().enumerate() {
        let model = case.model;
        for (more, steps) in [(SGD, 1), (ADAMW, 3)].into_iter().sampled_in_turn(2, turn) {
            let mut config = case.config(more);
            config.pipeline.replication = replicas.to_vec();
            config.pipeline.partition = layers.to_vec();
            let name = format!("{case}, {layers:?} layers on {replicas:?} ranks");
            let (mut alone, data) = (Case::alone(model).config(more), model.data());
            if steps == 1 {
                let reference = step_of("one rank", &alone, &data);
                let got = step_of(&name, &config, &data);
                assert_parity(&name, &got, &reference);
                for (rank, counted) in got.usage.iter().enumerate() {
                    let predicted = predict(&config, rank).unwrap();
                    let predicted = (predicted.parameters, predicted.flops, predicted.peak_bytes());
                    assert_eq!(
                        (counted.parameters, counted.flops, counted.peak_bytes),
                        predicted,
                        "{name}: rank {rank}"
                    );
                }
                let flops: u64 = got.usage.iter().map(|counted| counted.flops).sum();
                assert!(flops < 2 * reference.usage[0].flops, "{name}: replicas share the work");
            }
            // Some steps, and the loss on other data.
            alone.training.max_norm = config.training.max_norm;
            let losses = |config: &Config| {
                on_mesh(config, |mut trainer| {
                    let batches = batches(model, &trainer, steps);
                    let reports = advance(&mut trainer, &batches, |_| {})?;
                    let held_out = data.validation_batch(0, BATCH, trainer.samples())?;
                    let validation = trainer.evaluate([held_out])?.loss;
                    Ok(reports.iter().map(|report| report.loss).chain([validation]).collect::<Vec<_>>())
                })
            };
            for (got, wanted) in losses(&config)[0].iter().zip(&losses(&alone)[0]) {
                assert!((got - wanted).abs() <= 2e-6 * wanted, "{name}: {got}, on one rank {wanted}");
            }
        }
    }
}

/// A hand-written schedule: a V over two ranks, with one split backward.
#[test]
fn a_schedule_of_ones_own_trains_as_one_rank() {
    let text = "name: mine\nranks: 2\nplacement: 0 1 1 0\nmicros: 2\n\
                rank 0: 0F0 0F1 3F0 3B0 3F1 3I1 0B0 3W1 0B1\n\
                rank 1: 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1I1 1W1\n";
    let path = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("mine.txt");
    std::fs::write(&path, text).unwrap();
    for (tp, more) in [(1, SGD.to_owned()), (2, SGD.to_owned()), (2, format!("{SGD}numerics = 'canonical'\n"))] {
        let case = Case { tp, pp: 2, ..Case::alone(&UNEVEN) }.dealt(&[1, 2, 1, 1]);
        let toml =
            case.text(&more).replace("schedule = 'gpipe'\nnum_microbatches = 1", &format!("schedule_file = {path:?}"));
        let config = Config::from_toml(&toml).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((config.pipeline.num_microbatches, config.training.micro_batch_size), (2, 8));
        let data = UNEVEN.data();
        let (got, wanted) =
            (step_of("mine", &config, &data), step_of("one rank", &Case::alone(&UNEVEN).config(&more), &data));
        assert_parity("mine", &got, &wanted);
        if more.contains("canonical") {
            assert_eq!(got.weights, wanted.weights);
        }
    }
}

/// If steps overlap, the peak of memory is reached after the next one has begun: old weights, new ones, and activations
/// of both.
#[test]
fn the_memory_of_overlapping_steps_is_predicted() {
    let streams = [stream(2, 2, 4, "pipedream"), stream(1, 4, 4, "pipedream_2bw"), stream(1, 4, 2, "pipedream")];
    for case in overlapping().copied().chain(streams) {
        let config = case.config(DESCENT);
        let peaks = on_mesh(&config, |mut trainer| {
            let batches = batches(case.model, &trainer, 1 + trainer.steps_ahead() as u64);
            assert!(batches.len() > 1, "{case}");
            let reports = advance(&mut trainer, &batches, |_| {})?;
            assert_eq!(reports.len(), batches.len(), "{case}");
            Ok(trainer.device().meter().peak_bytes())
        });
        for (rank, peak) in peaks.into_iter().enumerate() {
            assert_eq!(peak, predict(&config, rank).unwrap().peak_bytes(), "{case}: rank {rank}");
        }
    }
}
