//! Classifiers through the pipeline: the same bits on every cut into stages, with and without re-materialisation; the
//! same numbers with dp and tp; and what cannot be trained is refused.

use crate::noise;
use crate::runs::{Vectors, on_ranks, vectors};
use meshwork_core::{Axis, Mesh, Rank};
use meshwork_cpu::Cpu;
use meshwork_engine::{Numerics, Plan, Recompute, ScheduleSpec, TrainError, Trainer};
use meshwork_models::layers::{Classes, MaxPool, Norm};
use meshwork_models::network::{IMAGES, LABELS, Network};
use meshwork_models::resnet::ResNetConfig;
use meshwork_models::vgg::VggConfig;
use meshwork_nn::{Batch, Model};
use meshwork_optim::{Decay, LrSchedule, Sgd};
use meshwork_pipeline::Generator;
use meshwork_tensor::tape::{Encoding, HalfType};
use meshwork_testkit::parity::assert_close;
use noise::{BATCH, batch, images};
use std::collections::BTreeMap;
use std::sync::Arc;

const STEPS: usize = 3;
/// A norm that every step is clipped to.
const CLIPPED: f64 = 0.125;

fn mesh(dp: usize, tp: usize, pp: usize) -> Mesh {
    Mesh::new([(Axis::Dp, dp), (Axis::Tp, tp), (Axis::Pp, pp)]).unwrap()
}

/// Four micro-batches of four images, whatever the mesh has in dp.
fn plan() -> Plan {
    Plan {
        mesh: mesh(1, 1, 1),
        schedule: Generator::Gpipe.into(),
        global_batch_size: BATCH,
        num_microbatches: Some(4),
        optimizer: Sgd { momentum: 0.9, weight_decay: 5e-4 }.into(),
        lr: LrSchedule { base: 0.05, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 },
        max_norm: 0.0,
        seed: 3,
        ..Plan::default()
    }
}

fn resnet(norm: Norm) -> Arc<Network> {
    Arc::new(ResNetConfig { groups: vec![(4, 2), (8, 2)], norm, ..ResNetConfig::digits() }.network())
}

fn vgg(norm: Norm) -> Arc<Network> {
    let groups = vec![vec![4, 4], vec![8, 8]];
    Arc::new(VggConfig { groups, hidden: vec![12], norm, ..VggConfig::digits() }.network())
}

fn schedules() -> impl Iterator<Item = Generator> {
    Generator::ALL.into_iter().filter(|generator| generator.is_synchronous())
}

/// The results of training, by name.
#[derive(Debug, PartialEq)]
struct Trained {
    /// Gradients of the last step.
    gradients: BTreeMap<String, Vec<f32>>,
    /// Weights, running averages and optimizer states.
    state: Vectors,
    /// Loss and accuracy of each step, and of other images.
    scores: Vec<(f64, f64)>,
}

/// What the steps took.
#[derive(Default)]
struct Taken {
    /// Norm of the whole gradient of each step, before it is clipped.
    norms: Vec<f64>,
    /// The most bytes that lived on any rank.
    peak: u64,
}

/// What some steps leave on all stages of the first dp rank, and what they took.
fn train(network: &Arc<Network>, plan: &Plan) -> (Trained, Taken) {
    let model: Arc<dyn Model> = network.clone();
    let (mut ranks, state) = on_ranks(&model, plan, false, |trainer| {
        let (mut scores, mut norms, mut peak) = (Vec::new(), Vec::new(), 0);
        for step in 0..STEPS {
            let report = trainer.step(&images(step, trainer.samples()))?;
            scores.push((report.loss, report.metrics[0].1));
            norms.push(report.grad_norm);
            peak = report.peak_bytes().into_iter().max().unwrap();
        }
        let score = trainer.evaluate([images(7, trainer.samples()), images(8, trainer.samples())])?;
        scores.push((score.loss, score.metrics[0].1));
        let params = trainer.params();
        let declarations = params.declarations();
        let gradient = |id| Ok((declarations.spec(id).name.clone(), trainer.gradient(id)?));
        let gradients = declarations.ids().map(gradient).collect::<Result<BTreeMap<_, _>, TrainError>>()?;
        Ok((gradients, scores, Taken { norms, peak }))
    });
    assert!(ranks.iter().all(|rank| rank.1 == ranks[0].1), "every rank knows the scores");
    let trained = Trained {
        gradients: ranks.iter().flat_map(|rank| rank.0.clone()).filter(|(_, gradient)| !gradient.is_empty()).collect(),
        state: vectors(&state),
        scores: ranks[0].1.clone(),
    };
    let [(.., taken), ..] = &mut ranks[..] else { panic!("a mesh without ranks") };
    (trained, std::mem::take(taken))
}

/// Batch norm too: the micro-batches are the same, whichever rank runs them, and so are the running averages.
#[test]
fn every_cut_into_stages_gives_the_same_bits() {
    let mut cuts = 0;
    for network in [resnet(Norm::Batch), vgg(Norm::Group(2)), vgg(Norm::Batch)] {
        let (whole, _) = train(&network, &plan());
        assert!(
            whole.gradients.values().all(|gradient| gradient.iter().any(|&g| g != 0.0)),
            "gradients flow everywhere"
        );
        for generator in schedules() {
            // Two stages on each rank, where the schedule has them, need as many layers.
            for pp in [2, 4] {
                let cut = Plan { mesh: mesh(1, 1, pp), schedule: generator.into(), ..plan() };
                if cut.stages(&*network).is_ok() && cut.build_schedule().is_ok() {
                    assert_eq!(train(&network, &cut).0, whole, "{} over pp={pp}", generator.name());
                    cuts += 1;
                }
            }
        }
        // Activations of every shape: behind each layer once, pools and the mean over pixels among them; and stages
        // without layers.
        let layers = network.layers();
        for first in 0..=layers {
            let cut = Plan { mesh: mesh(1, 1, 2), partition: vec![first, layers - first], ..plan() };
            assert_eq!(train(&network, &cut).0, whole, "cut behind layer {first}");
        }
    }
    assert!(cuts > 35, "{cuts} schedules and degrees");
}

/// A first stage without parameters has nothing to train and hands its activation on.
#[test]
fn a_first_stage_without_parameters_is_a_stage() {
    let network = Network::new([8, 8, 1]).then("pool", MaxPool).then("head", Classes { classes: 10 });
    let network = Arc::new(network);
    let (whole, _) = train(&network, &plan());
    for schedule in ["1f1b", "zb_h1", "zb_h2"] {
        let cut = Plan { mesh: mesh(1, 1, 2), schedule: ScheduleSpec::named(schedule).unwrap(), ..plan() };
        assert_eq!(train(&network, &cut).0, whole, "{schedule}");
    }
}

/// GPipe's re-materialisation: less memory, the same bits, and running averages that move once a step.
#[test]
fn rematerialisation_changes_memory_alone() {
    for network in [resnet(Norm::Batch), vgg(Norm::Batch)] {
        for pp in [1, 2] {
            let of = |recompute, generator: Generator| {
                let (mesh, schedule) = (mesh(1, 1, pp), generator.into());
                train(&network, &Plan { recompute, schedule, mesh, num_microbatches: Some(8), ..plan() })
            };
            let (kept, Taken { peak: most, .. }) = of(Recompute::Selective, Generator::Gpipe);
            let (again, Taken { peak: least, .. }) = of(Recompute::Stage, Generator::Gpipe);
            assert!(kept.state.keys().any(|key| key.parameter.ends_with("running_mean")));
            assert_eq!(again, kept, "pp={pp}");
            assert!(3 * least < 2 * most, "pp={pp}: {least} bytes against {most}");
            // Its layers one after another. Selective recomputation keeps one tensor of a convolution, as this does.
            let (again, Taken { peak, .. }) = of(Recompute::Full, Generator::Gpipe);
            assert_eq!(again, kept, "pp={pp}");
            let (_, Taken { peak: all, .. }) = of(Recompute::None, Generator::Gpipe);
            assert!(peak < all, "pp={pp}: {peak} bytes against {all}");
            assert_eq!(of(Recompute::Sqrt, Generator::ZbH1).0, kept, "groups of layers, zb_h1 over pp={pp}");
            assert_eq!(of(Recompute::Layers(2), Generator::ZbH2).0, kept, "two layers, zb_h2 over pp={pp}");
            // Where backward is split, what forward computed again waits for the gradients of weights.
            assert_eq!(of(Recompute::Stage, Generator::ZbH1).0, kept, "zb_h1 over pp={pp}");
            // A step that overlaps with the next, and is rolled back where it should have been clipped.
            assert_eq!(of(Recompute::Stage, Generator::ZbH2).0, kept, "zb_h2 over pp={pp}");
        }
    }
}

/// Sparse storage (Gist, section 4.2) on every cut and with any recomputation, in fast and in canonical numerics;
/// behind rounding it changes no bit of what was rounded.
#[test]
fn leaving_out_zeros_changes_memory_alone() {
    let (sparse, half) = (Encoding::Sparse, Encoding::Half(HalfType::Bf16));
    for (network, numerics) in [
        (resnet(Norm::Batch), Numerics::Fast),
        (vgg(Norm::Batch), Numerics::Fast),
        (vgg(Norm::Group(2)), Numerics::Canonical { blocks: 8 }),
    ] {
        for (dp, tp, pp, recompute, generator) in [
            (1, 1, 1, Recompute::None, Generator::Gpipe),
            (1, 1, 2, Recompute::None, Generator::ZbH1),
            (2, 2, 1, Recompute::Selective, Generator::OneFOneB),
            (2, 1, 2, Recompute::Full, Generator::ZbH2),
        ] {
            let of = |saved: &[Encoding]| {
                let (mesh, schedule, saved) = (mesh(dp, tp, pp), generator.into(), saved.to_vec());
                train(&network, &Plan { mesh, schedule, recompute, numerics, saved, ..plan() })
            };
            let what = format!("dp={dp},tp={tp},pp={pp}, {numerics:?}");
            let ((dense, Taken { peak: most, .. }), (packed, Taken { peak, .. })) = (of(&[]), of(&[sparse]));
            assert_eq!(packed, dense, "{what}");
            assert!(recompute != Recompute::None || peak < most, "{what}: {peak} bytes, {most} with zeros");
            let ((rounded, Taken { peak: most, .. }), (packed, Taken { peak, .. })) =
                (of(&[half]), of(&[half, sparse]));
            assert_ne!(rounded.state, dense.state, "{what}");
            assert_eq!(packed, rounded, "{what}");
            assert!(recompute != Recompute::None || peak < most, "{what}: {peak} bytes, {most} with zeros, in 16 bits");
        }
    }
}

/// Two dp ranks with two micro-batches each are one rank with those four: the same statistics, and sums in another
/// order. tp has nothing to cut here, and changes nothing. All of it holds for steps that are clipped too.
#[test]
fn dp_ranks_share_the_micro_batches_of_one() {
    for (norm, max_norm) in
        [(Norm::Batch, 0.0), (Norm::Group(2), 0.0), (Norm::Batch, CLIPPED), (Norm::Group(2), CLIPPED)]
    {
        let (network, plan) = (resnet(norm), Plan { max_norm, ..plan() });
        let (whole, Taken { norms, .. }) = train(&network, &plan);
        assert!(norms.iter().all(|&norm| norm > 2.0 * CLIPPED), "{norms:?}");
        for (tp, pp) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
            let halved = Plan { mesh: mesh(2, tp, pp), num_microbatches: Some(2), ..plan.clone() };
            let (got, taken) = train(&network, &halved);
            assert_close("norm", &taken.norms, &norms, 0.0);
            assert_near(&got.gradients, &whole.gradients);
            assert_near(&named(&got), &named(&whole));
            let (of_one, _) = train(&network, &Plan { mesh: mesh(1, tp, pp), ..plan.clone() });
            if max_norm == 0.0 {
                assert_eq!(of_one, whole, "tp={tp}, pp={pp}");
            } else {
                // Stages add up the norm in another order.
                assert_near(&named(&of_one), &named(&whole));
            }
        }
    }
}

/// In canonical numerics a network of group norms has one rank's bits on every mesh; batch norm has none to give.
#[test]
fn canonical_numerics_give_the_bits_of_one_rank() {
    let canonical = Plan { numerics: Numerics::Canonical { blocks: 8 }, max_norm: CLIPPED, ..plan() };
    for network in [resnet(Norm::Group(2)), vgg(Norm::Group(2))] {
        let (whole, Taken { norms, .. }) = train(&network, &canonical);
        assert!(norms.iter().all(|&norm| norm > 2.0 * CLIPPED), "{norms:?}");
        for (dp, tp, pp, micros) in [(2, 1, 2, 4), (4, 2, 1, 2), (2, 2, 2, 8), (1, 1, 4, 16)] {
            let mesh = mesh(dp, tp, pp);
            let (got, taken) = train(&network, &Plan { mesh, num_microbatches: Some(micros), ..canonical.clone() });
            // A gradient of one rank's samples is no whole gradient before it is reduced, so weights and states are
            // compared.
            let mesh = format!("dp={dp},tp={tp},pp={pp}");
            assert_eq!((got.state, got.scores), (whole.state.clone(), whole.scores.clone()), "{mesh}");
            assert_eq!(taken.norms, norms, "{mesh}");
        }
    }
    let rank = Arc::new(Rank::recording(&canonical.mesh, 0).unwrap());
    let refused = Trainer::new(resnet(Norm::Batch), &canonical, rank, Cpu::device()).err().unwrap().to_string();
    assert!(refused.contains("so they depend on the mesh") && refused.contains("group_norm"), "{refused}");
}

/// Group norm takes each image by itself; batch norm does not, and says so.
#[test]
fn only_batch_norm_depends_on_the_micro_batch() {
    let of = |norm, micros| train(&vgg(norm), &Plan { num_microbatches: Some(micros), ..plan() }).0;
    assert_near(&of(Norm::Group(2), 1).gradients, &of(Norm::Group(2), 8).gradients);
    let (one, eight) = (of(Norm::Batch, 1), of(Norm::Batch, 8));
    let name = "group.0.conv.0.conv.weight";
    let distance =
        one.gradients[name].iter().zip(&eight.gradients[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(distance > 1e-3, "{distance}");
}

/// Images use the same clipping as other models: by the norm of the whole gradient.
#[test]
fn clipping_scales_the_whole_gradient() {
    let network = resnet(Norm::Group(2));
    let sgd = Plan { optimizer: Sgd::default().into(), lr: LrSchedule { base: 1.0, ..plan().lr }, ..plan() };
    let moved = |plan: &Plan| {
        let first = |steps: usize| {
            let rank = Arc::new(Rank::recording(&plan.mesh, 0).unwrap());
            let mut trainer = Trainer::new(network.clone(), plan, rank, Cpu::device()).unwrap();
            (0..steps).for_each(|step| drop(trainer.step(&images(step, 0..BATCH)).unwrap()));
            trainer.state().unwrap().pieces.into_iter().flat_map(|piece| piece.piece.values).collect::<Vec<f32>>()
        };
        let (before, after) = (first(0), first(1));
        before.iter().zip(&after).map(|(b, a)| f64::from(b - a).powi(2)).sum::<f64>().sqrt()
    };
    let whole = moved(&sgd);
    assert!(whole > 2.0 * CLIPPED, "{whole}");
    let clipped = moved(&Plan { max_norm: CLIPPED, ..sgd });
    assert!((clipped - CLIPPED).abs() < 1e-4, "{clipped}");
}

/// Weights and states by the names of both.
fn named(trained: &Trained) -> BTreeMap<String, Vec<f32>> {
    trained.state.iter().map(|(key, values)| (key.to_string(), values.clone())).collect()
}

#[track_caller]
fn assert_near(got: &BTreeMap<String, Vec<f32>>, want: &BTreeMap<String, Vec<f32>>) {
    assert!(got.keys().eq(want.keys()));
    for (name, want) in want {
        let wide = |values: &[f32]| values.iter().copied().map(f64::from).collect::<Vec<_>>();
        assert_close(name, &wide(&got[name]), &wide(want), 0.0);
    }
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let network = resnet(Norm::Batch);
    let refused = |plan: Plan| {
        let rank = Arc::new(Rank::recording(&plan.mesh, 0).unwrap());
        match Trainer::new(network.clone(), &plan, rank, Cpu::device()) {
            Ok(_) => panic!("it was taken"),
            Err(error) => error.to_string(),
        }
    };
    for (plan, says) in [
        (
            Plan { mesh: mesh(3, 1, 1), ..plan() },
            "a global batch of 16 samples cannot be cut into dp=3 times 4 micro-batches: use a multiple of 12",
        ),
        (
            Plan { mesh: mesh(1, 1, 7), ..plan() },
            "6 layers cannot fill 7 stages: use a lower pp, a deeper model, or a partition that leaves stages empty",
        ),
        (
            Plan { mesh: mesh(1, 1, 2), partition: vec![3, 4], ..plan() },
            "6 layers cannot be cut into stages of [3, 4]: 2 numbers must add up to them",
        ),
        (
            Plan { mesh: mesh(1, 1, 2), schedule: Generator::PipeDream.into(), ..plan() },
            "schedule pipedream updates weights within a step, so running statistics (batch norm) have no mini-batch to be \
             taken over: use group norm, or a synchronous schedule",
        ),
    ] {
        assert_eq!(refused(plan), says);
    }
}

/// A class that the network does not have is refused on entry, and a loss that is not a number before any weight
/// changes.
#[test]
fn bad_images_are_errors() {
    let (network, plan) = (resnet(Norm::Batch), plan());
    let rank = Arc::new(Rank::recording(&plan.mesh, 0).unwrap());
    let mut trainer = Trainer::new(network, &plan, rank, Cpu::device()).unwrap();
    let all = images(0, 0..BATCH);
    let (pixels, labels) = (all.values::<f32>(IMAGES).unwrap().to_vec(), all.values::<i32>(LABELS).unwrap().to_vec());
    let mut wrong = labels.clone();
    wrong[5] = 10;
    let error = trainer.step(&batch(pixels.clone(), wrong)).unwrap_err().to_string();
    assert!(
        error.contains(
            "labels has the id 10 at place 0 of sample 5: the model takes ids below 10, negative ones masked"
        ),
        "{error}"
    );

    let other =
        Batch::new(16).with(IMAGES, [4, 16, 1], pixels.clone()).unwrap().with(LABELS, [], labels.clone()).unwrap();
    for (batch, says) in [
        (images(0, 0..15), "15 samples given, 16 expected on this rank"),
        (other, "images is f32 of [4, 16, 1] for each sample, and the model takes f32 of [8, 8, 1]"),
        (Batch::new(16).with(LABELS, [], labels.clone()).unwrap(), "there is no field \"images\""),
    ] {
        let error = trainer.step(&batch).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }

    let before = trainer.state().unwrap();
    let mut spoilt = pixels;
    spoilt[70] = f32::NAN;
    let error = trainer.step(&batch(spoilt, labels)).unwrap_err().to_string();
    assert_eq!(error, "step 1: the loss is NaN; the weights are those before this step");
    assert_eq!(trainer.state().unwrap(), before);
    assert!(trainer.step(&all).unwrap().loss.is_finite(), "and training goes on");
}
