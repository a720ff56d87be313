//! A run that is saved, and goes on from its files on another mesh.
//!
//! More than 400 lines: one test for each promise of `docs/checkpoints.md`.

use meshwork_checkpoint::{Checkpoint, Dtype, Lock, TensorKind, Writer, folder_name};
use meshwork_compress::Feedback;
use meshwork_core::Axis;
use meshwork_core::RunError;
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::{
    Compress, Numerics, Plan, ScheduleSpec, StepReport, TrainState, Trainer, WholeState, Zero, ZeroStage, state_layout,
};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language;
use meshwork_models::llama::{Llama, LlamaConfig, PRESETS};
use meshwork_nn::{Batch, Model, SAMPLE};
use meshwork_optim::{Adafactor, Adam8bit, AdamW, Muon, Rule, Sgd};
use meshwork_tensor::random;
use meshwork_train::checkpoint::{CheckpointError, Leeway, Resumed, States, exchange, resume, save, save_plan};
use serde_json::{Value, json};
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

const SEQ: usize = 8;
const VOCAB: usize = 61;
const BATCH: usize = 24;

/// With a vocabulary that no degree divides, and a layer for each stage of an interleaved pipeline.
fn gpt2() -> Gpt2Config {
    Gpt2Config {
        vocab_size: VOCAB,
        num_layers: 8,
        hidden_size: 16,
        ffn_hidden_size: 32,
        seq_len: SEQ,
        dropout: 0.1,
        ..Gpt2Config::default()
    }
}

fn model() -> Arc<dyn Model> {
    Arc::new(Gpt2::new(gpt2()))
}

/// With fewer heads of keys and values than there are ranks in `tp=4`.
fn llama() -> Arc<dyn Model> {
    let sizes = LlamaConfig {
        vocab_size: VOCAB,
        num_layers: 8,
        hidden_size: 32,
        ffn_hidden_size: 64,
        seq_len: SEQ,
        ..PRESETS[0].1
    };
    Arc::new(Llama::new(sizes))
}

/// Random tokens, different in each step.
fn batch(step: u64, samples: Range<usize>) -> Batch {
    let key = random::key(5, "tokens");
    let token = |sample: usize, at: usize| {
        (random::uniform(key, (step * 64 + sample as u64) * 100 + at as u64) * VOCAB as f32) as i32
    };
    let row =
        |shift: usize| samples.clone().flat_map(|sample| (0..SEQ).map(move |at| token(sample, at + shift))).collect();
    language::batch(row(0), row(1), SEQ).unwrap()
}

fn plan(mesh: &str, schedule: &str, numerics: Numerics) -> Plan {
    let schedule = ScheduleSpec::named(schedule).unwrap();
    let global_batch_size = if numerics == Numerics::Fast { BATCH } else { 16 };
    Plan { mesh: mesh.parse().unwrap(), schedule, numerics, global_batch_size, ..Plan::default() }
}

fn fast(mesh: &str) -> Plan {
    plan(mesh, "1f1b", Numerics::Fast)
}

/// What a rank saw.
struct Run {
    reports: Vec<StepReport>,
    resumed: Option<Resumed>,
}

/// Trains from the newest checkpoint in a folder to `steps` steps, and saves after the last one.
fn go_on(model: &Arc<dyn Model>, plan: &Plan, dir: &Path, steps: u64) -> Result<Vec<Run>, RunError> {
    let files = Arc::new(save_plan(model, plan).unwrap());
    World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let number = rank.world_rank();
        let mut trainer = Trainer::new(model.clone(), plan, rank, Cpu::device())?;
        let resumed = resume(&mut trainer, plan, dir, &AtomicBool::new(false), |_, run| {
            assert_eq!(run["note"], "as it was given");
            Ok::<_, CheckpointError>(Leeway::default())
        })?;
        let done = trainer.steps_done();
        assert_eq!(done, resumed.as_ref().map_or(0, |resumed| resumed.step));
        let step = |step| {
            let numbers = trainer.samples().map(|sample| (step as usize % 2 * plan.global_batch_size + sample) as i32);
            let batch = batch(step, trainer.samples());
            trainer.step(&match plan.compress.aqsgd {
                None => batch,
                Some(_) => batch.with(SAMPLE, [], numbers.collect()).unwrap(),
            })
        };
        let reports = (done..steps).map(step).collect::<Result<Vec<_>, _>>()?;
        let exchange = exchange(trainer.rank())?;
        let mut writer = match number {
            0 => Writer::lead(Lock::take(dir).unwrap(), 2, files.clone(), exchange),
            _ => Writer::follow(dir, number, files.clone(), exchange),
        };
        save(&mut writer, &trainer, json!({"note": "as it was given", "steps": steps}))?;
        let saved = writer.wait().unwrap()?;
        assert_eq!((saved.step, saved.bytes), (steps, files.bytes(number)));
        Ok::<_, CheckpointError>(Run { reports, resumed })
    })
}

fn uninterrupted(model: &Arc<dyn Model>, plan: &Plan, steps: u64) -> Vec<StepReport> {
    let mut ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), plan, rank, Cpu::device())?;
        let step = |step| trainer.step(&batch(step, trainer.samples()));
        (0..steps).map(step).collect::<Result<Vec<_>, meshwork_engine::TrainError>>()
    });
    ranks.as_mut().unwrap().swap_remove(0)
}

/// Meshes, each with its schedule. In canonical numerics a rank holds a power of two of the batch.
fn chain(numerics: Numerics) -> [Plan; 5] {
    let last = if numerics == Numerics::Fast { "dp=3" } else { "dp=4" };
    [("dp=2,tp=2,pp=2", "1f1b"), ("tp=4", "1f1b"), ("dp=1", "1f1b"), ("pp=4", "interleaved_1f1b"), (last, "1f1b")]
        .map(|(mesh, schedule)| plan(mesh, schedule, numerics))
}

#[test]
fn a_run_goes_on_from_its_files_on_any_mesh_and_each_rank_reads_its_slices_alone() {
    let (model, dir) = (model(), tempfile::tempdir().unwrap());
    let alone = uninterrupted(&model, &fast("dp=1"), 10);
    for (part, plan) in chain(Numerics::Fast).into_iter().enumerate() {
        let done = 2 * part as u64;
        let ranks = go_on(&model, &plan, dir.path(), done + 2).unwrap();
        let layout = state_layout(&model, &plan).unwrap();
        for (rank, Run { reports, resumed }) in ranks.into_iter().enumerate() {
            let resumed = resumed.map_or((0, 0), |resumed| (resumed.step, resumed.bytes_read));
            let slices = layout.iter().filter(|of| of.rank == rank);
            let bytes: usize = slices.map(|of| of.slice.elements() * size_of::<f32>()).sum();
            let wanted = if part == 0 { 0 } else { bytes as u64 };
            assert_eq!(resumed, (done, wanted), "rank {rank} of {}", plan.mesh);
            for (report, wanted) in reports.iter().zip(&alone[done as usize..]) {
                assert_eq!((report.step, report.lr), (wanted.step, wanted.lr));
                let off = (report.loss - wanted.loss).abs() / wanted.loss;
                assert!(
                    off < 1e-5,
                    "{}: step {} has {}, uninterrupted {}",
                    plan.mesh,
                    report.step,
                    report.loss,
                    wanted.loss
                );
            }
        }
    }
}

/// A model that cuts nothing over cp is refused there before a file is read, and the checkpoint stays.
#[test]
fn a_checkpoint_goes_on_over_no_axis_that_cuts_nothing() {
    let (model, dir) = (model(), tempfile::tempdir().unwrap());
    go_on(&model, &fast("dp=2"), dir.path(), 2).unwrap();
    let refused = go_on(&model, &fast("cp=2"), dir.path(), 4).err().unwrap().to_string();
    assert!(refused.contains("the mesh has cp=2, and the model cuts nothing over cp"), "{refused}");
    let ranks = go_on(&model, &fast("dp=1"), dir.path(), 3).unwrap();
    assert_eq!(ranks[0].resumed.as_ref().map(|resumed| resumed.step), Some(2));
}

#[test]
fn in_canonical_numerics_every_chain_of_meshes_has_the_bits_of_the_uninterrupted_run() {
    let canonical = Numerics::Canonical { blocks: 8 };
    for model in [model(), llama()] {
        let dir = tempfile::tempdir().unwrap();
        let alone = uninterrupted(&model, &plan("dp=1", "1f1b", canonical), 5);
        for (done, plan) in chain(canonical).into_iter().enumerate() {
            let ranks = go_on(&model, &plan, dir.path(), done as u64 + 1).unwrap();
            let numbers = |report: &StepReport| (report.step, report.loss, report.grad_norm);
            assert_eq!(numbers(&ranks[0].reports[0]), numbers(&alone[done]), "{model:?} on {}", plan.mesh);
        }
    }
}

#[test]
fn the_same_mesh_has_the_bits_of_the_uninterrupted_run() {
    let model = model();
    for schedule in ["1f1b", "zb_h2", "zb_v"] {
        let plan = Plan { num_microbatches: Some(6), ..plan("dp=2,pp=2", schedule, Numerics::Fast) };
        let dir = tempfile::tempdir().unwrap();
        let losses = |reports: &[StepReport]| reports.iter().map(|report| report.loss).collect::<Vec<_>>();
        let alone = losses(&uninterrupted(&model, &plan, 4));
        let first = go_on(&model, &plan, dir.path(), 2).unwrap();
        let second = go_on(&model, &plan, dir.path(), 4).unwrap();
        assert_eq!([losses(&first[0].reports), losses(&second[0].reports)].concat(), alone, "{schedule}");
    }
}

/// Trains two steps on `dp=2` and saves both.
fn two_checkpoints(model: &Arc<dyn Model>) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    go_on(model, &fast("dp=2"), dir.path(), 1).unwrap();
    go_on(model, &fast("dp=2"), dir.path(), 2).unwrap();
    dir
}

fn flip(dir: &Path, step: u64, name: &str, at: impl Fn(usize) -> usize) {
    let path = dir.join(folder_name(step)).join(name);
    let mut bytes = fs::read(&path).unwrap();
    let at = at(bytes.len());
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn every_rank_goes_back_to_the_checkpoint_before_a_damaged_one_and_is_told_why() {
    let model = model();
    // On the same mesh reads find it; on another one, what no rank reads whole is verified first.
    for mesh in ["dp=2", "tp=4"] {
        for (name, at) in [("rank-00001.safetensors", usize::MAX), ("rank-00000.safetensors", 20), ("index.json", 99)] {
            let dir = two_checkpoints(&model);
            flip(dir.path(), 2, name, |length| at.min(length - 1));
            for Run { resumed, .. } in go_on(&model, &fast(mesh), dir.path(), 2).unwrap() {
                let resumed = resumed.unwrap();
                assert_eq!((resumed.step, resumed.passed_over.len()), (1, 1), "{mesh}, {name}");
                let told = &resumed.passed_over[0];
                assert!(told.contains("step-00000002") && told.contains(name), "{told}");
            }
        }
    }
}

/// Permissions, a failing disk, too many open files: the older checkpoint is not used, since the run would replace the
/// newer. A link to itself stands for all of these, because it is unreadable for root too.
#[cfg(unix)]
#[test]
fn a_checkpoint_that_one_rank_cannot_read_now_ends_every_rank_with_the_same_error() {
    let model = model();
    for mesh in ["dp=2", "tp=4", "pp=2,dp=2"] {
        for name in ["rank-00001.safetensors", "index.json"] {
            let dir = two_checkpoints(&model);
            // An older damage elsewhere does not count: the same cause may be behind both.
            flip(dir.path(), 2, "rank-00000.safetensors", |_| 20);
            let path = dir.path().join(folder_name(2)).join(name);
            fs::remove_file(&path).unwrap();
            std::os::unix::fs::symlink(&path, &path).unwrap();
            let error = go_on(&model, &fast(mesh), dir.path(), 3).err().unwrap();
            for rank in 0..error.ends.len() {
                let Some(CheckpointError::Unreadable { path: named, problem, .. }) = error.error_of(rank) else {
                    panic!("{mesh}, {name}: {error}")
                };
                assert!(named.ends_with("step-00000002") && problem.contains(name), "{problem}");
                assert!(problem.contains(" cannot be read: "), "{problem}");
            }
        }
    }
}

/// A request to stop ends a resume between two reads, and nothing is changed.
#[test]
fn a_resume_that_is_asked_to_stop_ends() {
    let model = model();
    let (dir, plan, stop) = (two_checkpoints(&model), fast("dp=2"), AtomicBool::new(true));
    let error = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
        resume(&mut trainer, &plan, dir.path(), &stop, |_, _| Ok::<_, CheckpointError>(Leeway::default()))
    });
    let error = error.unwrap_err();
    assert!(matches!(error.error_of(error.rank), Some(CheckpointError::Stopped)), "{error}");
}

#[test]
fn a_folder_where_all_is_damaged_is_an_error_and_an_empty_one_a_fresh_start() {
    let model = model();
    let dir = two_checkpoints(&model);
    flip(dir.path(), 1, "index.json", |_| 50);
    fs::remove_file(dir.path().join("step-00000002/index.json")).unwrap();
    let error = go_on(&model, &fast("dp=2"), dir.path(), 3).err().unwrap().to_string();
    assert!(
        error.contains("every checkpoint in ") && error.contains("step-00000001/index.json: its checksum is"),
        "{error}"
    );
    assert!(error.contains("step-00000002/index.json: there is no such file"), "{error}");
    let empty = tempfile::tempdir().unwrap();
    assert!(go_on(&model, &fast("dp=2"), empty.path(), 1).unwrap()[0].resumed.is_none());
}

#[test]
fn a_state_that_does_not_fit_is_refused_with_everything_that_does_not() {
    let dir = two_checkpoints(&model());
    let refused = |config: Gpt2Config, optimizer: Rule| {
        let plan = Plan { optimizer, ..fast("pp=2") };
        go_on(&(Arc::new(Gpt2::new(config)) as Arc<dyn Model>), &plan, dir.path(), 3).err().unwrap().to_string()
    };
    let adamw = fast("pp=2").optimizer;
    let wider = refused(Gpt2Config { vocab_size: 64, num_layers: 9, ..gpt2() }, adamw.clone());
    for told in [
        "step-00000002 does not fit this run:",
        "wte.weight: the checkpoint has F32 [61, 16], the model F32 [64, 16]",
        "wte.weight:exp_avg: the checkpoint has F32 [61, 16], the model F32 [64, 16]",
        "h.8.ln_1.weight: the checkpoint has none, the model [16]",
    ] {
        assert!(wider.contains(told), "{told}: {wider}");
    }
    let shallower = refused(Gpt2Config { num_layers: 7, ..gpt2() }, adamw);
    assert!(shallower.contains("h.7.ln_1.weight: the checkpoint has [16], the model none"), "{shallower}");
    let sgd = refused(gpt2(), Sgd { momentum: 0.9, weight_decay: 0.0 }.into());
    assert!(sgd.contains("wte.weight:exp_avg: the checkpoint has [61, 16], the model none"), "{sgd}");
    let bytes = refused(gpt2(), Rule::with_adam8bit(Adam8bit::default()));
    assert!(bytes.contains("mlp.up.weight:exp_avg: the checkpoint has F32 [32, 16], the model U8 [32, 16]"), "{bytes}");
    assert!(bytes.contains("mlp.up.weight:exp_avg_largest: the checkpoint has none, the model [1, 1]"), "{bytes}");
}

/// States of rows, columns and blocks, and those in bytes: from mesh to mesh and from stage to stage of ZeRO, as they
/// are.
#[test]
fn states_of_every_layout_are_saved_and_resharded() {
    let model = model();
    for optimizer in [
        Rule::from(Adafactor::default()),
        Rule::with_muon(Muon::default(), AdamW::default()),
        Rule::with_adam8bit(Adam8bit { block: 48, ..Adam8bit::default() }),
    ] {
        let on = |mesh: &str, stage: usize| Plan {
            optimizer: optimizer.clone(),
            zero: Zero { stage: ZeroStage::ALL[stage], group: None },
            ..plan(mesh, "1f1b", Numerics::Canonical { blocks: 8 })
        };
        let (alone, dir) = (uninterrupted(&model, &on("dp=1", 0), 3), tempfile::tempdir().unwrap());
        for (done, plan) in [on("dp=2,tp=2", 2), on("dp=2,pp=2", 3), on("tp=4", 0)].into_iter().enumerate() {
            let ranks = go_on(&model, &plan, dir.path(), done as u64 + 1).unwrap();
            let losses: Vec<f64> = ranks[0].reports.iter().map(|report| report.loss).collect();
            assert_eq!(losses, [alone[done].loss], "{optimizer:?} on {}", plan.mesh);
        }
        let checkpoint = Checkpoint::open_step(dir.path(), 3).unwrap();
        let stored = |name: &str| {
            let tensors = checkpoint.index().tensors.iter().map(|of| &of.tensor);
            tensors.filter(|of| of.name == name).map(|of| (of.dtype, of.dims.clone())).next()
        };
        let wanted = match optimizer.name() {
            "adafactor" => ("h.0.attn.qkv.weight:row_var", Dtype::F32, vec![3, 16]),
            "muon" => ("h.0.attn.qkv.weight:momentum_buffer", Dtype::F32, vec![3, 4, 4, 16]),
            _ => ("h.0.attn.qkv.weight:exp_avg", Dtype::U8, vec![3, 4, 4, 16]),
        };
        assert_eq!(stored(wanted.0), Some((wanted.1, wanted.2)));
    }
}

/// What compression lost is in the files, and goes on bit by bit. It may be resharded, appear and disappear.
#[test]
fn what_compression_lost_is_saved_and_resharded() {
    let compress = Compress {
        activations: "topk:0.3".parse().unwrap(),
        activation_gradients: "quant:8".parse().unwrap(),
        gradients: "quant:4/block64".parse().unwrap(),
        feedback: Feedback::Ef,
        ..Compress::default()
    };
    let of_cuts = Compress { gradients: Compress::default().gradients, feedback: Feedback::Ef21, ..compress };
    let micros = |mesh: &str, compress| Plan { compress, num_microbatches: Some(3), ..fast(mesh) };
    for compress in [compress, of_cuts] {
        let dir = TempDir::new().unwrap();
        let plan = micros("dp=2,tp=2,pp=2", compress);
        let losses = |reports: &[StepReport]| reports.iter().map(|report| report.loss).collect::<Vec<_>>();
        let wanted = uninterrupted(&model(), &plan, 4);
        go_on(&model(), &plan, dir.path(), 2).unwrap();
        let resumed = go_on(&model(), &plan, dir.path(), 4).unwrap();
        assert_eq!(losses(&resumed[0].reports), losses(&wanted[2..]));
        let lost = |step| {
            let checkpoint = Checkpoint::open_step(dir.path(), step).unwrap();
            checkpoint.index().tensors.iter().filter(|of| of.tensor.kind == TensorKind::Feedback).count()
        };
        assert!(lost(4) > 0);
        // Other replicas, stages and cuts; then none, and some again.
        let off = Compress { feedback: Feedback::None, ..compress };
        for (steps, plan) in [
            (5, micros("dp=4", compress)),
            (6, micros("pp=4", compress)),
            (7, micros("dp=2,pp=2", compress)),
            (8, micros("pp=2", off)),
            (9, micros("dp=2,pp=2", compress)),
        ] {
            let runs = go_on(&model(), &plan, dir.path(), steps).unwrap();
            assert_eq!(runs[0].reports.len(), 1, "{plan:?}");
            let keeps = plan.compress.feedback != Feedback::None;
            let held =
                plan.mesh.degree(Axis::Pp) > 1 || plan.compress == compress && compress.gradients != of_cuts.gradients;
            assert_eq!(lost(steps) > 0, keeps && held, "{plan:?}");
        }
    }
}

/// Activations of samples of other data, residuals of another batch, factors of another rank: as if there were none.
#[test]
fn what_compression_kept_of_other_extents_starts_anew() {
    let of_samples =
        |samples| Compress { activations: "topk:0.3".parse().unwrap(), aqsgd: Some(samples), ..Compress::default() };
    let of_cuts = Compress { activations: "topk:0.3".parse().unwrap(), feedback: Feedback::Ef, ..Compress::default() };
    let of_rank = |rank| Compress {
        gradients: format!("powersgd:{rank}").parse().unwrap(),
        feedback: Feedback::Ef,
        ..Compress::default()
    };
    let batch = fast("dp=1").global_batch_size;
    for (mesh, before, after, batch_after, told) in [
        ("pp=2", of_samples(2 * batch), of_samples(3 * batch), batch, ":samples: the checkpoint has "),
        ("pp=2", of_cuts, of_cuts, 2 * batch, ".activation:residual: the checkpoint has "),
        ("dp=2", of_rank(1), of_rank(2), batch, "h.0.attn"),
    ] {
        let dir = TempDir::new().unwrap();
        let plan = |compress, global_batch_size| Plan { compress, global_batch_size, ..fast(mesh) };
        go_on(&model(), &plan(before, batch), dir.path(), 2).unwrap();
        let runs = go_on(&model(), &plan(after, batch_after), dir.path(), 3).unwrap();
        assert_eq!(runs[0].reports.len(), 1, "{mesh}, {before:?}");
        let anew = &runs[0].resumed.as_ref().unwrap().anew;
        assert!(anew.iter().any(|state| state.contains(told)), "{mesh}, {before:?}: {anew:?}");
        let same = go_on(&model(), &plan(after, batch_after), dir.path(), 4).unwrap();
        assert_eq!(same[0].resumed.as_ref().unwrap().anew, [""; 0], "{mesh}: what fits is used");
    }
}

#[test]
fn the_caller_may_refuse_a_checkpoint_by_what_it_kept() {
    let (model, dir) = (model(), two_checkpoints(&model()));
    let plan = fast("dp=2");
    let error = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
        resume(&mut trainer, &plan, dir.path(), &AtomicBool::new(false), |_, run: &Value| {
            let problem = format!("{} steps are too few", run["steps"]);
            Err(CheckpointError::Folder { dir: dir.path().to_path_buf(), problem })
        })
    });
    assert!(error.unwrap_err().to_string().contains("cannot be read: 2 steps are too few"));
}

/// Resumes with a leeway: what each rank has then, and what a trainer has that never trained.
fn resumed_with(
    model: &Arc<dyn Model>,
    plan: &Plan,
    dir: &Path,
    leeway: Leeway,
) -> Result<Vec<[TrainState; 2]>, String> {
    let ends = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let fresh = Trainer::new(model.clone(), plan, rank.clone(), Cpu::device())?.state()?;
        let mut trainer = Trainer::new(model.clone(), plan, rank, Cpu::device())?;
        let resumed =
            resume(&mut trainer, plan, dir, &AtomicBool::new(false), |_, _| Ok::<_, CheckpointError>(leeway))?.unwrap();
        let state = trainer.state()?;
        assert_eq!(resumed.dropped > 0, leeway.states == States::Drop);
        trainer.step(&batch(state.step, trainer.samples()))?;
        Ok::<_, CheckpointError>([state, fresh])
    });
    ends.map_err(|error| error.to_string())
}

/// Of two rules some states have the same names: they mean something else.
#[test]
fn another_rule_begins_without_states_as_before_its_first_update() {
    let (model, dir) = (model(), two_checkpoints(&model()));
    for (mesh, optimizer) in [
        ("tp=2", Rule::from(meshwork_optim::Lamb::default())),
        ("pp=2", Rule::from(Adafactor::default())),
        ("dp=2", Rule::with_adam8bit(Adam8bit::default())),
        ("dp=1", Sgd { momentum: 0.0, weight_decay: 0.0 }.into()),
    ] {
        let plan = Plan { optimizer, ..fast(mesh) };
        let drop = Leeway { states: States::Drop, ..Leeway::default() };
        for [state, fresh] in resumed_with(&model, &plan, dir.path(), drop).unwrap() {
            assert_eq!((state.step, state.updates), (2, 0), "{mesh}");
            for (piece, fresh) in state.pieces.iter().zip(&fresh.pieces) {
                assert_eq!(piece.key, fresh.key, "{mesh}");
                let trained = piece.key.state.is_none() && piece.piece.values != fresh.piece.values;
                let dropped = piece.key.state.is_some() && piece.piece.values == fresh.piece.values;
                assert!(trained || dropped, "{mesh}: {}", piece.key);
            }
        }
    }
}

/// The first positions of a GPT-2, for shorter samples, with their states: nothing else may have fewer rows.
#[test]
fn shorter_samples_take_the_first_positions() {
    let dir = two_checkpoints(&model());
    let half: Arc<dyn Model> = Arc::new(Gpt2::new(Gpt2Config { seq_len: SEQ / 2, ..gpt2() }));
    let rows = |from: u64, to: u64| Leeway { first_rows: Some((from, to)), ..Leeway::default() };
    let whole = |ranks: Vec<[TrainState; 2]>| {
        WholeState::merge(&ranks.into_iter().map(|[state, _]| state).collect::<Vec<_>>()).unwrap()
    };
    let run = |plan: &Plan, model: &Arc<dyn Model>, leeway| {
        World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(model.clone(), plan, rank, Cpu::device())?;
            resume(&mut trainer, plan, dir.path(), &AtomicBool::new(false), |_, _| Ok::<_, CheckpointError>(leeway))?;
            let state = trainer.state()?;
            Ok::<_, CheckpointError>([state.clone(), state])
        })
    };
    let saved = whole(run(&fast("dp=1"), &model(), Leeway::default()).unwrap());
    for mesh in ["dp=2", "tp=4", "pp=2"] {
        let short = whole(run(&fast(mesh), &half, rows(SEQ as u64, SEQ as u64 / 2)).unwrap());
        for key in short.keys() {
            let (short, saved) = (short.vector(key).unwrap(), saved.vector(key).unwrap());
            assert_eq!(short, &saved[..short.len()], "{mesh}: {key}");
            assert_eq!(short.len() < saved.len(), key.parameter == "wpe.weight", "{mesh}: {key}");
        }
    }
    let refused = run(&fast("dp=2"), &half, Leeway::default()).unwrap_err().to_string();
    assert!(refused.contains("wpe.weight: the checkpoint has F32 [8, 16], the model F32 [4, 16]"), "{refused}");
    let refused = run(&fast("dp=2"), &half, rows(61, 4)).unwrap_err().to_string();
    assert!(refused.contains("wpe.weight: the checkpoint has F32 [8, 16]"), "{refused}");
}

/// Nobody writes twice what several ranks hold: with Adam, three vectors of each weight, whatever the mesh.
#[test]
fn the_bytes_are_those_of_one_copy_and_shared_evenly() {
    let wide = Gpt2Config { hidden_size: 64, ffn_hidden_size: 256, ..gpt2() };
    let model: Arc<dyn Model> = Arc::new(Gpt2::new(wide));
    let total = |plan: &Plan| -> (u64, Vec<u64>) {
        let files = save_plan(&model, plan).unwrap();
        let bytes: Vec<u64> = (0..plan.mesh.world_size()).map(|rank| files.bytes(rank)).collect();
        (bytes.iter().sum(), bytes)
    };
    let (wanted, _) = total(&fast("dp=1"));
    for mesh in ["dp=2", "dp=8", "tp=4", "dp=2,tp=2", "dp=2,tp=2,pp=2", "dp=4,pp=2"] {
        let (found, bytes) = total(&fast(mesh));
        assert_eq!(found, wanted, "{mesh}");
        let (most, least) = (bytes.iter().max().unwrap(), bytes.iter().min().unwrap());
        // The two stages are not equally large: the tied table, on both, evens that out.
        assert!(most - least <= found / bytes.len() as u64 / 20, "{mesh}: {bytes:?}");
    }
}
