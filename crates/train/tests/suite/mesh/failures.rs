//! Ranks that fail in the middle of training, and numbers that are not finite.

use crate::mesh::cases::{ADAMW, BATCH, Case, SEQ, UNEVEN, UNTIED};
use crate::mesh::world::{assert_same_pieces, assert_same_report, on_mesh, pieces, train, try_on_mesh};
use meshwork_core::Axis;
use meshwork_core::RankEnd;
use meshwork_core::comm::FaultKind;
use meshwork_core::comm::thread::Options;
use meshwork_cpu::Cpu;
use meshwork_models::language;
use meshwork_pipeline::Phase;
use meshwork_train::data::MASKED;
use meshwork_train::{TrainError, Trainer};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A mesh of eight ranks, tp fastest, then dp, then pp.
fn eight_ranks() -> Case {
    Case { dp: 2, tp: 2, pp: 2, schedule: "1f1b", micros: 4, ..Case::alone(&UNEVEN) }
}

/// The way in which a rank fails in its second step.
#[derive(Clone, Copy, Debug)]
enum Breakdown {
    /// It panics.
    Panic,
    /// It returns before the step.
    Return,
    /// It joins a barrier of a group whose other ranks are in another operation.
    WrongCollective(Axis),
    /// It stops making progress until another rank has failed.
    Stall,
}

#[rustfmt::skip] // A table: how, which rank, before which action, and what every other rank is told.
static BREAKDOWNS: [(Breakdown, usize, &str, &str); 8] = [
    (Breakdown::Panic,                     5, "1B1", "rank 5 panicked: injected"),
    (Breakdown::Panic,                     2, "0F0", "rank 2 panicked: injected"),
    (Breakdown::Return,                    0, "",    "rank 0 has returned and takes no part"),
    (Breakdown::Return,                    7, "",    "rank 7 has returned and takes no part"),
    (Breakdown::WrongCollective(Axis::Tp), 2, "0F0", "barrier"),
    (Breakdown::WrongCollective(Axis::Dp), 1, "0B0", "barrier"),
    (Breakdown::Stall,                     6, "1F2", "rank 6 made no progress for 2s"),
    (Breakdown::Stall,                     0, "0B3", "rank 0 made no progress for 2s"),
];

#[test]
fn every_other_rank_is_told_who_broke_down() {
    let case = eight_ranks();
    let (config, data) = (case.config(ADAMW), case.model.data());
    for (breakdown, culprit, at, told) in BREAKDOWNS {
        let told_one = AtomicBool::new(false);
        let body = |mut trainer: Trainer| -> Result<(), TrainError> {
            let rank = trainer.rank().clone();
            let departs = rank.world_rank() == culprit;
            train(&mut trainer, &data, &config)?;
            if departs && matches!(breakdown, Breakdown::Return) {
                return Ok(());
            }
            let batch = data.batch(1, BATCH, trainer.samples())?;
            let result = trainer.observed_step(&batch, |event| {
                if !departs || event.phase != Phase::Started || event.action.to_string() != at {
                    return;
                }
                match breakdown {
                    Breakdown::Panic => panic!("injected"),
                    Breakdown::Return => {}
                    // Its error is this rank's own; the step will see another.
                    Breakdown::WrongCollective(axis) => drop(rank.group(axis).barrier()),
                    Breakdown::Stall => {
                        while !told_one.load(Ordering::Relaxed) {
                            std::thread::sleep(Duration::from_millis(5));
                        }
                    }
                }
            });
            told_one.store(true, Ordering::Relaxed);
            result.map(drop)
        };
        // Only a rank that stalls is found by time. The report of a panic may take seconds, until symbols are read.
        let seconds = if matches!(breakdown, Breakdown::Stall) { 2 } else { 60 };
        let options = Options { timeout: Duration::from_secs(seconds) };
        let what = format!("{breakdown:?} of rank {culprit} at {at:?}");
        let Err(error) = try_on_mesh(&config, options, |_| Cpu::device(), body) else {
            panic!("{what}: nobody noticed")
        };
        let fault = error.fault.as_ref().unwrap_or_else(|| panic!("{what}: no rank was stopped"));
        match (breakdown, &fault.kind) {
            (Breakdown::Panic, FaultKind::Panicked { rank, .. })
            | (Breakdown::Return, FaultKind::Gone { rank, .. })
            | (Breakdown::Stall, FaultKind::Timeout { rank, .. }) => assert_eq!(*rank, culprit, "{what}: {fault}"),
            (Breakdown::WrongCollective(_), FaultKind::Disagreement { first, second }) => {
                assert!([first.0, second.0].contains(&culprit), "{what}: {fault}");
            }
            (_, kind) => panic!("{what}: told as {kind:?}"),
        }
        for (rank, end) in error.ends.iter().enumerate().filter(|(rank, _)| *rank != culprit) {
            match end {
                Some(RankEnd::Error(error)) => {
                    let text = error.to_string();
                    assert!(text.contains(told), "{what}: rank {rank} is told:\n{text}");
                }
                other => panic!("{what}: rank {rank} ends with {other:?}"),
            }
        }
    }
}

#[test]
fn a_step_that_is_not_finite_leaves_the_weights_alone_and_training_can_go_on() {
    for case in [Case::alone(&UNEVEN), eight_ranks()] {
        let (config, data) = (case.config(ADAMW), case.model.data());
        let clean = on_mesh(&config, |mut trainer| {
            let report = train(&mut trainer, &data, &config)?;
            Ok((report, pieces(&trainer)?))
        });
        let recovered = on_mesh(&config, |mut trainer| {
            let (bias, width) = ("h.2.mlp.up.bias", 128);
            trainer.load_parameter(bias, &vec![f32::NAN; width])?;
            let bits = |trainer: &Trainer| -> Result<Vec<u32>, TrainError> {
                let held = pieces(trainer)?;
                Ok(held.iter().flat_map(|piece| &piece.weights.values).map(|weight| weight.to_bits()).collect())
            };
            let before = bits(&trainer)?;
            let rank = trainer.rank().world_rank();
            match train(&mut trainer, &data, &config) {
                // The weight is named, also on ranks that do not hold it.
                Err(TrainError::Weight { step: 0, name }) => assert_eq!(name, bias),
                other => panic!("{case}: rank {rank} gets {other:?}"),
            }
            assert!(bits(&trainer)? == before, "{case}: rank {rank} has touched its weights");
            assert_eq!(trainer.steps_done(), 0);
            trainer.load_parameter(bias, &vec![0.0; width])?; // as it was at the start
            let report = train(&mut trainer, &data, &config)?;
            Ok((report, pieces(&trainer)?))
        });
        for (rank, (got, wanted)) in recovered.iter().zip(&clean).enumerate() {
            let what = format!("{case}: the first step of rank {rank} after a failed one");
            assert_same_report(&what, &got.0, &wanted.0);
            assert_same_pieces(&what, &got.1, &wanted.1);
        }
    }
}

#[test]
fn a_batch_without_tokens_changes_nothing_on_any_rank_and_counts_as_a_step() {
    let stale = Case { pp: 2, schedule: "pipedream", micros: 4, ..Case::alone(&UNTIED) };
    for (case, more) in [(Case::alone(&UNEVEN), ""), (eight_ranks(), ""), (stale, "max_norm = 0.0\n")] {
        let (config, data) = (case.config(&format!("{ADAMW}{more}")), case.model.data());
        let ends = on_mesh(&config, |mut trainer| {
            let batch = data.batch(0, BATCH, trainer.samples())?;
            let tokens = batch.values::<i32>("tokens")?.to_vec();
            let empty = language::batch(tokens.clone(), vec![MASKED; tokens.len()], SEQ)?;
            let nothing = trainer.evaluate([empty.clone()]);
            assert!(matches!(nothing, Err(TrainError::NoTerms { .. })), "{case}: {nothing:?}");
            let before = trainer.state()?;
            let skipped = trainer.step(&empty)?;
            assert!(skipped.skipped && skipped.loss.is_nan(), "{case}: {skipped:?}");
            assert_eq!((skipped.step, skipped.terms, skipped.grad_norm), (1, 0, 0.0), "{case}");
            let after = trainer.state()?;
            assert_eq!((after.step, after.updates, after.pieces == before.pieces), (1, 0, true), "{case}");
            // One in the middle, while steps are under way.
            let mut reports = Vec::new();
            for batch in [&batch, &empty, &batch] {
                reports.extend(trainer.start_step(batch, || false, |_| {})?);
            }
            reports.extend(trainer.flush(|_| {})?);
            Ok(reports.iter().map(|report| (report.step, report.loss, report.skipped)).collect::<Vec<_>>())
        });
        for steps in &ends {
            let told: Vec<_> = steps.iter().map(|&(step, loss, skipped)| (step, loss.is_nan(), skipped)).collect();
            assert_eq!(told, [(2, false, false), (3, true, true), (4, false, false)], "{case}");
            assert!(steps[0].1 == ends[0][0].1 && steps[2].1 == ends[0][2].1, "{case}: {ends:?}");
        }
    }
}

#[test]
fn a_parameter_is_loaded_by_its_name_and_whole_size_only() {
    // On two stages: both get every parameter of the model, and keep their own.
    let case = Case { pp: 2, tp: 2, micros: 4, ..Case::alone(&UNEVEN) };
    let ramp: Vec<f32> = (0..SEQ * 32).map(|at| at as f32).collect();
    let held = on_mesh(&case.config(ADAMW), |mut trainer| {
        let unknown = trainer.load_parameter("h.9.mlp.up.bias", &[]).unwrap_err().to_string();
        assert_eq!(unknown, "parameter h.9.mlp.up.bias: the model has none of that name");
        let short = trainer.load_parameter("wpe.weight", &[1.0; 5]).unwrap_err().to_string();
        assert_eq!(short, "parameter wpe.weight: 5 elements for its dims [16, 32], which have 512");
        trainer.load_parameter("wpe.weight", &ramp)?;
        pieces(&trainer)
    });
    for (rank, pieces) in held.iter().enumerate() {
        let table = pieces.iter().find(|piece| piece.name == "wpe.weight");
        assert_eq!(table.map(|piece| &piece.weights.values), (rank < 2).then_some(&ramp), "rank {rank}");
    }
}

/// Before the first step there is nothing to save: the ranks end wherever they are, also in what comes before they are
/// threads, and that is no failure.
#[test]
fn a_run_that_is_asked_to_stop_before_its_first_step_trains_none() {
    let folder = tempfile::tempdir().unwrap();
    for more in ["dp=2", "tp=2", "pp=2", "dp=2,pp=2"] {
        let mut config = meshwork_train::config::Config::from_args(&meshwork_train::config::Args::parse([
            "--mesh",
            more,
            "--steps",
            "2",
            "--set",
            "model.hidden_size=16",
            "--set",
            "model.seq_len=8",
        ]))
        .unwrap();
        let data = meshwork_train::Data::open(&config).unwrap();
        let stop = AtomicBool::new(true);
        let layers = folder.path().join("layers.txt");
        for profile in [None, Some(layers.display().to_string())] {
            config.metrics.layer_profile = profile;
            config.checkpoint.dir = Some(folder.path().join("run").display().to_string());
            let outcome = meshwork_train::train(&config, &data, None, &stop).unwrap();
            assert_eq!((outcome.stopped, outcome.steps, outcome.loss), (true, 0, None), "{more}");
        }
        assert!(!layers.exists(), "a profile of some layers is none");
        assert!(meshwork_checkpoint::steps(&folder.path().join("run")).unwrap().is_empty());
    }
}
