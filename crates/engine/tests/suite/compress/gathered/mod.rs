//! Compressed gathers of weights with ZeRO-3: ranks compute with what messages restore to, and update the weights
//! themselves.

use super::*;
use meshwork_engine::{LossScale, MixedPrecision};
use meshwork_tensor::tape::HalfType;

/// Weights, and the rest as it is.
fn weights_by(scheme: &str) -> Compress {
    Compress { weights: self::scheme(scheme), ..Compress::default() }
}

fn on(mesh: &str, compress: Compress) -> Plan {
    Plan {
        global_batch_size: 16,
        num_microbatches: Some(2),
        max_norm: 0.0,
        zero: Zero { stage: ZeroStage::Weights, group: None },
        compress,
        ..plan(mesh)
    }
}

/// What this rank's messages of its parameters restore to, each where it lies in the parameter as the rank would hold
/// it whole.
fn restored(trainer: &Trainer, scheme: &Scheme, updates: u64) -> BTreeMap<String, Vec<f32>> {
    let params = trainer.params();
    let of = |id| {
        let spec = params.declarations().spec(id);
        let local = spec.local(trainer.rank().mesh(), trainer.rank().coords());
        let (own, part) = (params.read(id).unwrap(), params.part(id, &params.window(params.place(id).0)));
        let mut values = own.clone();
        // Frozen parameters are whole on every rank, and sent by none.
        if !spec.group.frozen && !own.is_empty() {
            let draws = Draws::new(Plan::default().seed, &format!("weight {}", spec.name), updates).skip(part.start);
            let shape = Matrix::vector(own.len()).unwrap();
            let message = Message::compress(scheme, &own, shape, draws, &mut []).unwrap();
            message.restore(scheme, shape, Fold::Replace, &mut values).unwrap();
        }
        let mut whole = vec![0.0; local.stored.count()];
        local.for_each_run(spec.dims, |_, run| {
            // Padding stays zero.
            for at in run.filter(|at| part.contains(at)) {
                whole[at] = values[at - part.start];
            }
        });
        (spec.name.clone(), whole)
    };
    params.declarations().ids().map(of).collect()
}

/// Each step has the loss and gradients of one that reads the restored weights as they are, bit by bit, on every mesh;
/// and it updates the exact weights: those that a message was made of, less the gradients.
#[test]
fn ranks_compute_with_what_messages_restore_to_and_update_exact_weights() {
    let full = |plan| Plan { recompute: Recompute::Full, ..plan };
    let halves = |plan| Plan {
        mixed: Some(MixedPrecision { dtype: HalfType::Bf16, reduce_in_half: false, loss_scale: LossScale::Fixed(1.0) }),
        ..plan
    };
    let groups = |plan: Plan| Plan { zero: Zero { group: Some(2), ..plan.zero }, ..plan };
    let zb = |plan| Plan { schedule: named("zb_h1"), ..plan };
    for (mesh, scheme, change) in [
        ("dp=2", "quant:8", (&|plan| plan) as &dyn Fn(Plan) -> Plan),
        ("dp=4", "quant:8/block64", &full),
        ("dp=2,tp=2", "quant:4", &|plan| plan),
        ("dp=2,pp=2", "fp8:e4m3", &full),
        ("dp=2,tp=2,pp=2", "quant:6/block32/stochastic", &zb),
        ("dp=4", "bf16", &groups),
        ("dp=3", "quant:8/block64", &|plan| Plan { global_batch_size: 12, ..plan }),
        ("dp=2,tp=2", "sign", &halves),
    ] {
        let what = format!("{mesh} {scheme}");
        let compress = weights_by(scheme);
        let (plan, as_it_is) = (change(on(mesh, compress)), change(on(mesh, Compress::default())));
        let same = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(gpt2(), &plan, rank.clone(), Cpu::device())?;
            let mut lost = false;
            for step in 0..STEPS {
                let mut reads = Trainer::new(gpt2(), &as_it_is, rank.clone(), Cpu::device())?;
                let used = restored(&trainer, &compress.weights, step as u64);
                let specs = trainer.params().declarations().clone();
                reads.load_weights(|spec, _| Ok::<_, TrainError>(used[&spec.name].clone()))?;
                let before: Vec<_> = specs.ids().map(|id| trainer.params().read(id)).collect::<Result<_, _>>()?;
                let there: Vec<_> = reads.params().declarations().ids().collect();
                lost |= there.iter().copied().zip(&before).any(|(id, own)| reads.params().read(id).unwrap() != *own);
                let samples = trainer.samples();
                let (got, wanted) =
                    (trainer.step(&tokens(step, samples.clone()))?, reads.step(&tokens(step, samples))?);
                assert_eq!((got.loss, got.grad_norm), (wanted.loss, wanted.grad_norm), "{what}: step {step}");
                for (id, before) in specs.ids().zip(before) {
                    let name = &specs.spec(id).name;
                    assert_eq!(
                        trainer.gradient(id)?,
                        reads.gradient(there[id.index()])?,
                        "{what}: gradient of {name} in step {step}"
                    );
                    let (gradient, after) = (trainer.gradient(id)?, trainer.params().read(id)?);
                    if plan.mixed.is_none() && !gradient.is_empty() {
                        let moved =
                            before.iter().zip(&gradient).map(|(w, g)| w - tower::RATE as f32 * g).collect::<Vec<_>>();
                        let far = moved.iter().zip(&after).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                        assert!(far < 1e-6, "{what}: {name} is {far} from the exact weights less the gradients");
                    }
                }
            }
            assert!(lost, "{what}: nothing is lost");
            for id in trainer.params().declarations().ids() {
                if plan.mixed.is_some() {
                    continue; // no numbers that a test can read
                }
                let params = trainer.params();
                let (spec, mut padding) = (params.declarations().spec(id), params.value(id)?.to_vec::<f32>()?);
                let local = spec.local(trainer.rank().mesh(), trainer.rank().coords());
                local.for_each_run(spec.dims, |_, run| padding[run].fill(0.0));
                assert!(padding.iter().all(|&x| x == 0.0), "{what}: padding of {}", spec.name);
            }
            Ok::<_, TrainError>(())
        });
        same.unwrap_or_else(|error| panic!("{what}: {error}"));
    }
}

/// On every mesh eight bits train as all do, calls, bytes and memory are as predicted, and a device whose memory the
/// host cannot read gives the same bits.
#[test]
fn gathers_take_the_bytes_that_were_predicted_and_train() {
    let zb = |plan| Plan { schedule: named("zb_h2"), max_norm: 1e3, ..plan };
    let full = |plan| Plan { recompute: Recompute::Full, ..plan };
    for (mesh, scheme, change) in [
        ("dp=2", "quant:8", (&|plan| plan) as &dyn Fn(Plan) -> Plan),
        ("dp=4", "quant:8", &full),
        ("dp=2,tp=2", "quant:8/block64", &full),
        ("dp=2,tp=2,pp=2", "quant:8", &zb),
        ("dp=2,pp=2", "fp8:e4m3/block64", &|plan| Plan { schedule: named("interleaved_1f1b"), ..plan }),
    ] {
        let (what, plan) = (format!("{mesh} {scheme}"), change(on(mesh, weights_by(scheme))));
        let (reports, state) = run_on(&gpt2(), &plan, false, tokens);
        for (rank, reports) in reports.iter().enumerate() {
            let (report, predicted) = (&reports[STEPS - 1], predict(&gpt2(), &plan, rank).unwrap());
            assert_eq!(report.records, predicted.records, "{what}, rank {rank}");
            assert_eq!(report.memory[rank], predicted.memory, "{what}, rank {rank}");
        }
        let exact = change(on(mesh, Compress::default()));
        let (wanted, exact_state) = run_on(&gpt2(), &exact, false, tokens);
        let gathered = |reports: &[Vec<StepReport>]| -> f64 {
            let of = |record: &&Record| record.op == OpKind::AllGather && record.group == "dp";
            reports[0][STEPS - 1].records.iter().filter(of).map(Record::bytes).sum()
        };
        let ratio = gathered(&wanted) / gathered(&reports);
        assert!((2.5..4.0).contains(&ratio), "{what}: {ratio} times fewer bytes");
        let (opaque, hidden) = run_on(&gpt2(), &plan, true, tokens);
        assert!(hidden == state && opaque[0][STEPS - 1].loss == reports[0][STEPS - 1].loss, "{what}: opaque");
        assert_ne!(weights(&state), weights(&exact_state), "{what}: nothing is lost");
        let (got, wanted) = (reports[0][STEPS - 1].loss, wanted[0][STEPS - 1].loss);
        assert!((got / wanted - 1.0).abs() < 2e-3, "{what}: loss {got}, uncompressed {wanted}");
    }
}

/// Each rank sends the messages of its parts of parameters: as many bytes as the wire format says.
#[test]
fn a_message_has_a_part_for_each_parameter_of_a_slice() {
    let plan = Plan { num_microbatches: Some(1), ..on("dp=2", weights_by("quant:8/block64")) };
    World::threads(&plan.mesh)
        .run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(gpt2(), &plan, rank.clone(), Cpu::device())?;
            let mut of_flats: BTreeMap<usize, usize> = BTreeMap::new();
            {
                let params = trainer.params();
                for id in params.declarations().ids() {
                    let own = params.read(id)?.len();
                    let bytes = match own {
                        0 => 0,
                        own => wire_bytes(&plan.compress.weights, Matrix::vector(own).unwrap()).unwrap(),
                    };
                    *of_flats.entry(params.place(id).0).or_default() += bytes;
                }
            }
            // The other rank's may be longer.
            let mut longest: Vec<i64> = of_flats.values().map(|&bytes| bytes as i64).collect();
            rank.data_group().all_reduce_slice(&mut longest, ReduceOp::Max)?;
            let report = trainer.step(&tokens(0, trainer.samples()))?;
            let gathers = report.records.iter().filter(|record| record.op == OpKind::AllGather && record.group == "dp");
            let mut found: Vec<i64> =
                gathers.inspect(|of| assert_eq!(of.dtype, DType::U8)).map(|of| of.elements as i64 / 2).collect();
            found.sort_unstable();
            found.dedup();
            longest.sort_unstable();
            longest.dedup();
            assert_eq!(found, longest);
            Ok::<_, TrainError>(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
}

/// Validation computes with what messages restore to, or with the weights themselves; training does so from its step
/// on.
#[test]
fn validation_and_early_steps_may_gather_exact_weights() {
    let losses = |compress, cuts| {
        let plan = on("dp=2", compress);
        let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(gpt2(), &plan, rank, Cpu::device())?;
            let before = trainer.evaluate_at(cuts, [tokens(9, trainer.samples())])?.loss;
            let step = |step| Ok(trainer.step(&tokens(step, trainer.samples()))?.loss);
            let steps = (0..STEPS).map(step).collect::<Result<Vec<_>, TrainError>>()?;
            Ok::<_, TrainError>((before, steps))
        });
        ranks.unwrap_or_else(|error| panic!("{error}")).swap_remove(0)
    };
    let quant = weights_by("quant:4");
    let (plain, lost) = (losses(Compress::default(), AtCuts::AsTrained), losses(quant, AtCuts::AsTrained));
    assert_eq!(losses(quant, AtCuts::Exact), (plain.0, lost.1.clone()), "validation without compression");
    assert!(plain.0 != lost.0 && plain.1[0] != lost.1[0], "{plain:?} {lost:?}");
    let late = losses(Compress { start_step: 3, ..quant }, AtCuts::AsTrained);
    assert_eq!((late.0, &late.1[..2]), (plain.0, &plain.1[..2]));
    assert_ne!(late.1[2], plain.1[2]);
}

#[test]
fn weights_that_no_rank_gathers_or_that_would_be_lost_are_refused() {
    let refused = |plan| match predict(&gpt2(), &plan, 0) {
        Err(TrainError::Plan(error)) if matches!(*error, PlanError::Compress { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    for stage in [ZeroStage::Off, ZeroStage::States, ZeroStage::Gradients] {
        let below = refused(Plan { zero: Zero { stage, group: None }, ..on("dp=2", weights_by("quant:8")) });
        assert!(
            below.starts_with(
                "compression of weights by quant:8: ranks gather no weights to use them below ZeRO stage 3"
            ) && below.ends_with("use ZeRO stage 3, or none"),
            "{below}"
        );
    }
    let canonical = refused(Plan { numerics: Numerics::Canonical { blocks: 8 }, ..on("dp=2", weights_by("bf16")) });
    assert!(canonical.contains("of one rank, which has all weights as they are; use fast numerics"), "{canonical}");
    for scheme in ["topk:0.5", "randk:0.5"] {
        let few = refused(on("dp=2", weights_by(scheme)));
        assert!(few.contains("a weight that is not sent would be zero, whatever it is; use quant, bf16"), "{few}");
    }
    let factors = refused(on("dp=2", weights_by("powersgd:2")));
    assert!(factors.contains("factors of few columns are far from a weight"), "{factors}");
    let feedback = refused(on("dp=2", Compress { feedback: Feedback::Ef, ..weights_by("quant:8") }));
    assert!(feedback.contains("gathers of weights lose nothing for good: their owners keep them"), "{feedback}");
}
