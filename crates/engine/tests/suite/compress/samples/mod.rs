//! Activations of samples that come again (AQ-SGD).

use super::*;
use meshwork_engine::SAMPLES;
use meshwork_engine::offload::{Folder, Offload};
use meshwork_nn::SAMPLE;
use meshwork_tensor::MemoryUse;
use meshwork_testkit::Sampled;

/// Reports of every rank of some steps of a run that goes on from a state, with its peak of memory, and the state
/// behind them. Steps may overlap.
fn go_on_all(
    model: &Arc<dyn Model>,
    plan: &Plan,
    from: Option<&WholeState>,
    steps: Range<usize>,
    batch: impl Fn(usize, Range<usize>) -> Batch + Sync,
) -> (Vec<(Vec<StepReport>, MemoryUse)>, WholeState) {
    on_ranks(model, plan, false, |trainer| {
        from.map(|state| trainer.load_state(state)).transpose()?;
        Ok((overlapped(trainer, steps.clone(), &batch)?, trainer.device().meter().peak()))
    })
}

/// The losses of these steps, and the state behind them.
fn go_on(
    model: &Arc<dyn Model>,
    plan: &Plan,
    from: Option<&WholeState>,
    steps: Range<usize>,
    batch: impl Fn(usize, Range<usize>) -> Batch + Sync,
) -> (Vec<f64>, WholeState) {
    let (reports, state) = go_on_all(model, plan, from, steps, batch);
    (reports[0].0.iter().map(|step| step.loss).collect(), state)
}

/// A batch of 16 samples that come again every other step, with their numbers.
fn again(step: usize, samples: Range<usize>) -> Batch {
    let numbers = samples.clone().map(|sample| (step % 2 * BATCH + sample) as i32).collect();
    batch(step % 2, samples).with(SAMPLE, [], numbers).unwrap()
}

/// AQ-SGD over three cuts is its published equations on one rank, bit by bit, on meshes and at virtual cuts; it takes
/// the bytes and the memory that were predicted, once all samples have come; and a resumed run goes on with the
/// activations of samples.
#[test]
fn activations_of_samples_that_come_again_are_sent_as_differences() {
    let aqsgd = Some(2 * BATCH);
    for (forward, backward, micros) in [("topk:0.3", "topk:0.3", 4), ("quant:3/stochastic", "quant:8", 2)] {
        let compress = Compress { aqsgd, ..cuts(forward, backward, "none") };
        let on = |mesh: &str, compress, cuts: &[usize]| Plan {
            compress,
            num_microbatches: Some(micros),
            virtual_cuts: cuts.to_vec(),
            ..plan(mesh)
        };
        let run = |model: &Arc<dyn Model>, plan: &Plan, opaque| {
            let (mut reports, state) = run_on(model, plan, opaque, again);
            (reports.swap_remove(0), state)
        };
        let wanted = run(&tower(4), &on("pp=4", compress, &[]), false);
        let lossy = Lossy::model(tower(4), &[1; 4], compress, Plan::default().seed);
        assert_same(forward, &wanted, &run(&lossy, &simulating(on("dp=1", Compress::default(), &[])), false));
        for (mesh, opaque) in [("dp=1", false), ("pp=2", false), ("dp=1", true)] {
            let got = run(&tower(4), &on(mesh, compress, &[1, 2, 3]), opaque);
            assert!(got.1 == wanted.1, "{forward} on {mesh}: states");
            assert_same(forward, &got, &wanted);
        }
        let tp = run_on(&tower(4), &on("tp=2,pp=2", compress, &[1, 2, 3]), false, again);
        assert!((tp.0[0][2].loss / wanted.0[2].loss - 1.0).abs() < 1e-4, "{forward} over tp");
        for (rank, reports) in tp.0.iter().enumerate() {
            let predicted = predict(&tower(4), &on("tp=2,pp=2", compress, &[1, 2, 3]), rank).unwrap();
            assert_eq!(reports[2].records, predicted.records, "{forward}: rank {rank}");
            assert_eq!(reports[2].memory[rank].total(), predicted.memory.total(), "{forward}: rank {rank}");
        }

        let key = |state: &str| StateKey { parameter: "cut.2.activation".to_owned(), state: Some(state.to_owned()) };
        assert_eq!(wanted.1.vector(&key("samples")).unwrap().len(), 2 * BATCH * tower::HIDDEN);
        assert_eq!(wanted.1.vector(&key("seen")).unwrap(), [1.0; 2 * BATCH]);
        let go_on = |mesh: &str, from, steps| go_on(&tower(4), &on(mesh, compress, &[1, 2, 3]), from, steps, again);
        let (losses, whole) = go_on("pp=2", None, 0..5);
        let (_, halfway) = go_on("dp=1", None, 0..3);
        let (resumed, state) = go_on("pp=4", Some(&halfway), 3..5);
        assert!(resumed == losses[3..] && state == whole, "{forward}: {resumed:?} of {losses:?}");
    }
    let of = |compress, mesh: &str| Plan { compress, num_microbatches: Some(2), ..plan(mesh) };
    let compress = Compress { aqsgd, ..cuts("topk:0.3", "topk:0.3", "none") };
    for (compress, mesh, problem) in [
        (Compress { feedback: Feedback::Ef, ..compress }, "pp=2", "feedback would do so once more; use no feedback"),
        (Compress { share_indices: true, ..compress }, "pp=2", "differences have other indices than gradients"),
        (Compress { aqsgd: Some(0), ..compress }, "pp=2", "it keeps activations of no samples"),
        (Compress { activations: scheme("none"), ..compress }, "pp=2", "activations are not compressed"),
    ] {
        let error = refused(&of(compress, mesh));
        assert!(error.starts_with("compression of aqsgd by") && error.contains(problem), "{error}");
    }
    let step = |batch: &(dyn Fn(Range<usize>) -> Batch + Sync), aqsgd| {
        let plan = Plan { virtual_cuts: vec![2], ..of(Compress { aqsgd, ..compress }, "dp=1") };
        let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(tower(4), &plan, rank, Cpu::device())?;
            trainer.step(&batch(trainer.samples()))
        });
        ranks.unwrap_err().to_string()
    };
    assert!(step(&|samples| batch(0, samples), aqsgd).contains("the batch has no field \"sample\" with their numbers"));
    let few = step(&|samples| again(1, samples), Some(BATCH));
    assert!(few.contains("keeps activations of 8 samples, and the batch has sample 8"), "{few}");
}

/// Samples of a run that goes through 24 of them in another order in each epoch, 16 in a step: they come to other ranks
/// and micro-batches each time, and where an epoch ends within a step some come twice in it.
const ALL: usize = 24;

fn number(step: usize, sample: usize) -> usize {
    let at = step * 16 + sample;
    (at % ALL * 5 + at / ALL * 7) % ALL
}

fn in_turn(step: usize, samples: Range<usize>) -> Batch {
    numbered(samples.map(|sample| number(step, sample)).collect())
}

/// The samples of these numbers.
fn numbered(numbers: Vec<usize>) -> Batch {
    let token = |at: usize| (random::uniform(random::key(6, "tokens"), at as u64) * 61.0) as i32;
    let row = |by| numbers.iter().flat_map(|number| (0..16).map(move |at| token(number * 100 + at + by))).collect();
    let batch = language::batch(row(0), row(1), 16).unwrap();
    batch.with(SAMPLE, [], numbers.iter().map(|&number| number as i32).collect()).unwrap()
}

/// Canonical numerics, with cuts that every mesh simulates.
fn canonical(mesh: &str, schedule: ScheduleSpec, micros: usize) -> Plan {
    Plan {
        mesh: mesh.parse().unwrap(),
        schedule,
        global_batch_size: 16,
        num_microbatches: Some(micros),
        numerics: Numerics::Canonical { blocks: 8 },
        compress: Compress { aqsgd: Some(ALL), ..cuts("topk:0.2/row", "topk:0.3/row", "none") },
        virtual_cuts: vec![1, 2, 3],
        ..Plan::default()
    }
}

/// Whichever ranks, replicas and micro-batches a sample comes to, its activation is the one that it last had: bit by
/// bit that of one rank, also in steps that begin anew, and with the activations on a disk.
#[test]
fn ranks_that_take_samples_in_turn_know_the_same_of_each() {
    let twice = |step| (0..16).map(|sample| number(step, sample)).collect::<std::collections::BTreeSet<_>>().len() < 16;
    assert!((0..6).any(twice));
    let steps = 6;
    let wanted = go_on(&gpt2(), &canonical("dp=1", named("1f1b"), 4), None, 0..steps, in_turn);
    let plain = Plan { compress: cuts("topk:0.2/row", "topk:0.3/row", "none"), ..canonical("dp=1", named("1f1b"), 4) };
    assert_ne!(go_on(&gpt2(), &plain, None, 0..steps, in_turn).0, wanted.0);
    let folder = tempfile::tempdir().unwrap();
    let meshes = [
        ("dp=1", named("1f1b"), 16),
        ("pp=2", named("1f1b"), 4),
        ("dp=2", named("1f1b"), 1),
        ("dp=2,pp=2", named("gpipe"), 4),
        ("dp=4,pp=2", named("zb_h2"), 2),
        ("dp=2,pp=2", named("zb_v"), 4),
        ("dp=2,pp=2", named("dualpipe_v"), 4),
        ("dp=2,ep=2,pp=2", named("1f1b"), 2),
        ("dp=2,tp=2,pp=2", named("interleaved_1f1b"), 4),
    ];
    for (turn, (mesh, schedule, micros)) in meshes.into_iter().enumerate() {
        let held = canonical(mesh, schedule, micros);
        let to = Arc::new(Folder(folder.path().to_owned()));
        let offload =
            Some(Offload { optimizer: false, gradients: false, activations: false, samples: true, to: Some(to) });
        for plan in [held.clone(), Plan { offload, ..held }].into_iter().sampled_in_turn(2, turn) {
            let what = format!("{mesh} {}, offload {:?}", plan.schedule.name(), plan.offload);
            let (losses, state) = go_on(&gpt2(), &plan, None, 0..steps, in_turn);
            assert_eq!(losses, wanted.0, "{what}");
            assert!(state == wanted.1, "{what}: the state behind it");
            // From one rank to this mesh, between memory and disk.
            let (_, halfway) = go_on(&gpt2(), &canonical("dp=1", named("1f1b"), 4), None, 0..3, in_turn);
            let (losses, state) = go_on(&gpt2(), &plan, Some(&halfway), 3..steps, in_turn);
            assert!(losses == wanted.0[3..] && state == wanted.1, "{what}: resumed");
        }
    }
}

/// So it is on replicas of a stage, which add up gradients in another order. (The state of a run is refused where ranks
/// have other activations of a sample.)
#[test]
fn replicas_of_a_stage_know_the_same_of_each_sample() {
    let on = |mesh: &str, schedule, micros| Plan {
        numerics: Numerics::Fast,
        virtual_cuts: vec![2],
        partition: vec![2, 2],
        ..canonical(mesh, schedule, micros)
    };
    let one = Plan { partition: vec![], ..on("dp=1", named("1f1b"), 16) };
    let (wanted, state) = go_on(&gpt2(), &one, None, 0..6, in_turn);
    for (mesh, replicas, micros) in [
        ("pp=3", vec![2, 1], 4),
        ("dp=2,pp=3", vec![1, 2], 4),
        // One takes the first and the last of four, the others one each.
        ("dp=2,pp=4", vec![1, 3], 4),
    ] {
        let what = format!("{mesh} {replicas:?}");
        let (losses, found) =
            go_on(&gpt2(), &on(mesh, ScheduleSpec::Replicated(replicas), micros), None, 0..6, in_turn);
        let close = losses.iter().zip(&wanted).all(|(got, wanted)| (got / wanted - 1.0).abs() < 1e-4);
        assert!(close, "{what}: {losses:?} against {wanted:?}");
        let key = |state: &str| StateKey { parameter: "cut.2.activation".to_owned(), state: Some(state.to_owned()) };
        assert_eq!(found.vector(&key("seen")), state.vector(&key("seen")), "{what}");
        let [found, wanted] = [&found, &state].map(|state| state.vector(&key("samples")).unwrap());
        let close = |(x, y): &(&f32, &f32)| (*x - *y).abs() < 1e-3 * (1.0 + y.abs());
        let apart = found.iter().zip(wanted).filter(|pair| !close(pair)).count();
        assert!(apart * 100 < found.len(), "{what}: {apart} of {} elements differ", found.len());
    }
}

/// Calls, bytes, memory and the room on a disk are predicted; the activations of samples leave memory.
#[test]
fn what_is_kept_of_samples_takes_what_was_predicted() {
    let folder = tempfile::tempdir().unwrap();
    for (mesh, schedule) in [
        ("pp=2", named("1f1b")),
        ("dp=2,pp=2", named("1f1b")),
        ("dp=2,pp=2", named("zb_h2")),
        ("dp=2,tp=2,pp=2", named("interleaved_1f1b")),
        ("dp=2,pp=2", named("pipedream_2bw")),
        ("dp=2,pp=3", ScheduleSpec::Replicated(vec![2, 1])),
    ] {
        let model: Arc<dyn Model> = Arc::new(Gpt2::new(Gpt2Config { tie_embeddings: false, ..config() }));
        let is_asynchronous = schedule.name() == "pipedream_2bw";
        let held = Plan {
            numerics: Numerics::Fast,
            virtual_cuts: vec![],
            max_norm: if is_asynchronous { 0.0 } else { 1e3 },
            compress: Compress { aqsgd: Some(3 * 16), ..cuts("topk:0.2/row", "topk:0.3/row", "none") },
            ..canonical(mesh, schedule, 4)
        };
        let to = Arc::new(Folder(folder.path().to_owned()));
        let offload =
            Some(Offload { optimizer: false, gradients: false, activations: false, samples: true, to: Some(to) });
        let disk = Plan { offload, ..held.clone() };
        let mut losses = Vec::new();
        for plan in [&held, &disk] {
            let what = format!("{mesh} {}, offload {:?}", plan.schedule.name(), plan.offload.is_some());
            // Three steps have new samples, as many as may be under way together.
            let in_order = |step: usize, samples: Range<usize>| {
                numbered(samples.map(|sample| (16 * step + sample) % (3 * 16)).collect())
            };
            let (reports, _) = go_on_all(&model, plan, None, 0..5, in_order);
            for (rank, (reports, peak)) in reports.iter().enumerate() {
                let predicted = predict(&model, plan, rank).unwrap();
                assert_eq!(reports[4].records, predicted.records, "{what}, rank {rank}");
                assert_eq!(Some(&reports[0].records), predicted.exact.as_ref(), "{what}, rank {rank}");
                assert_eq!(*peak, predicted.memory, "{what}, rank {rank}");
                let moved = predicted.offloaded;
                let kept = (4 * 3 * 16 * 16 * 32) as u64;
                assert_eq!(moved.room >= kept, plan.offload.is_some(), "{what}: {moved:?}");
            }
            let ranks = 0..reports.len();
            let sent: f64 = ranks.map(|rank| predict(&model, plan, rank).unwrap().bytes_on(SAMPLES)).sum();
            let reported = reports[0].0[4].comm_bytes.get(SAMPLES).copied().unwrap_or(0.0);
            assert_eq!(reported, sent / reports.len() as f64, "{what}");
            assert_eq!(sent > 0.0, mesh != "pp=2", "{what}");
            losses.push(reports[0].0.iter().map(|step| step.loss).collect::<Vec<_>>());
            // Steps that overlap for long are reported with what later ones moved.
            if let Some(offloaded) = reports[0].0[4].offload.filter(|_| !is_asynchronous) {
                let ranks = reports.len();
                let moved = (0..ranks).map(|rank| predict(&model, plan, rank).unwrap().offloaded);
                let [read, written] = moved.fold([0.0; 2], |[read, written], moved| {
                    [read + moved.read as f64, written + moved.written as f64]
                });
                let ranks = ranks as f64;
                assert_eq!((offloaded.read, offloaded.written), (read / ranks, written / ranks), "{what}");
            }
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        }
        assert_eq!(losses[0], losses[1], "{mesh}");
        let less = |rank| {
            predict(&model, &held, rank).unwrap().memory.total() - predict(&model, &disk, rank).unwrap().memory.total()
        };
        assert!(less(0) as usize > 4 * 16 * 16 * 32, "{mesh}: {}", less(0));
    }
}
