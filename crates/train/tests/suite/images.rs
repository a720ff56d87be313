//! The tools take image classifiers as they take language models: two meshes are compared value by value, a fault is
//! found where it is, steps and layers are profiled, and gradients are reduced while backward runs.

use meshwork_core::World;
use meshwork_core::profile::{Class, Span};
use meshwork_core::{Axis, Rank};
use meshwork_cpu::Cpu;
use meshwork_data_parallel::BucketEvent;
use meshwork_diff::{Between, Location, Report, Side, Vector, compare};
use meshwork_engine::{At, Numerics, Plan, TrainError, Trainer, Watch};
use meshwork_models::layers::Norm;
use meshwork_models::resnet::ResNetConfig;
use meshwork_models::vgg::VggConfig;
use meshwork_nn::{BatchSource, Model};
use meshwork_optim::Sgd;
use meshwork_pipeline::partition::{Level, Options as PlanOptions, States, plan as partition};
use meshwork_pipeline::{ActionKind, Event, Phase};
use meshwork_tensor::tape::Seen;
use meshwork_tensor::{Tensor, random};
use meshwork_train::data::Images;
use meshwork_train::profile::{Profiler, Rows, layers, schedule_timelines};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Images of a step.
const BATCH: usize = 16;
/// Micro-batches of a step over all dp ranks, so that batch norm sees the same ones on every mesh.
const MICROS: usize = 4;
/// A norm that every step is clipped to.
const CLIPPED: f64 = 0.125;

fn resnet(norm: Norm) -> Arc<dyn Model> {
    Arc::new(ResNetConfig { groups: vec![(4, 2), (8, 2)], norm, ..ResNetConfig::digits() }.network())
}

fn vgg(norm: Norm) -> Arc<dyn Model> {
    let groups = vec![vec![4, 4], vec![8, 8]];
    Arc::new(VggConfig { groups, hidden: vec![12], norm, ..VggConfig::digits() }.network())
}

/// Noise with a class each.
fn images() -> Images {
    let mut pixels = vec![0.0; 4 * BATCH * 64];
    random::fill_uniform(random::key(9, "pixels"), 0, &mut pixels);
    Images::new([8, 8, 1], pixels, (0..4 * BATCH as i32).map(|image| image * 7 % 10).collect())
}

fn plan(mesh: &str) -> Plan {
    let mesh: meshwork_core::Mesh = mesh.parse().unwrap();
    Plan {
        num_microbatches: Some(MICROS / mesh.degree(Axis::Dp)),
        mesh,
        global_batch_size: BATCH,
        optimizer: Sgd { momentum: 0.9, weight_decay: 5e-4 }.into(),
        max_norm: CLIPPED,
        ..Plan::default()
    }
}

#[track_caller]
fn compared(model: &Arc<dyn Model>, plans: [Plan; 2]) -> Report {
    let images = images();
    let [a, b] = plans.map(|plan| Side::from_model(model.clone(), plan, &images));
    compare([&a, &b], 2).unwrap()
}

const MESHES: [&str; 3] = ["dp=2", "pp=2", "dp=2,pp=2"];

#[test]
fn every_value_of_one_rank_finds_its_like_on_any_mesh() {
    for model in [resnet(Norm::Batch), resnet(Norm::Group(2)), vgg(Norm::Batch), vgg(Norm::Group(2))] {
        let alone = compared(&model, [plan("dp=1"), plan("dp=1")]);
        assert!(alone.identical() && alone.skipped.is_empty(), "{alone}");
        for mesh in MESHES {
            let report = compared(&model, [plan("dp=1"), plan(mesh)]);
            assert!(report.unexplained.is_none() && report.replicas.is_none(), "{mesh}: {report}");
            assert_eq!((report.tensors(), report.skipped.len()), (alone.tensors(), 0), "{mesh}: {report}");
            // The norm, and what a clipped step leaves.
            for class in ["gradient norm", "weights", "optimizer states"] {
                let row = report.rows.iter().find(|row| row.class == class).unwrap();
                assert!(row.error < 1e-5, "{mesh}: {report}");
            }
            // dp ranks add up samples in another order, stages nothing but the norm.
            let of_norm = report.first.as_ref().is_none_or(|first| first.place == Location::GradNorm);
            assert_eq!(of_norm, mesh == "pp=2", "{mesh}: {report}");
        }
    }
}

#[test]
fn in_canonical_numerics_every_mesh_has_the_bits_of_one_rank() {
    let canonical = |mesh: &str| Plan { numerics: Numerics::Canonical { blocks: 8 }, ..plan(mesh) };
    for model in [resnet(Norm::Group(2)), vgg(Norm::Group(2))] {
        for mesh in MESHES {
            let report = compared(&model, [canonical("dp=1"), canonical(mesh)]);
            assert!(report.canonical && report.identical() && report.holds(), "{mesh}: {report}");
            assert!(report.skipped.is_empty() && report.tensors() > 100, "{mesh}: {report}");
        }
    }
}

/// Clipping changes the update and nothing before it.
#[test]
fn a_step_that_is_clipped_differs_in_what_it_leaves() {
    let report = compared(&resnet(Norm::Batch), [plan("dp=2,pp=2"), Plan { max_norm: 0.0, ..plan("dp=2,pp=2") }]);
    let first = report.first.as_ref().unwrap();
    let Location::Parameter { name, vector } = &first.place else { panic!("{report}") };
    assert_eq!((first.step, &**name, *vector), (1, "stem.conv.weight", Vector::Weight), "{report}");
}

/// One rank of side B gives a wrong gradient of one convolution's input, in the second step.
#[test]
fn a_wrong_gradient_is_found_and_named() {
    for (model, layer) in
        [(resnet(Norm::Batch), "group.1.block.1.second.conv"), (vgg(Norm::Batch), "group.1.conv.1.conv")]
    {
        let (images, weight) = (images(), format!("{layer}.weight"));
        let wrong = move |site: meshwork_diff::Site, seen: &Seen<'_>| {
            let here = seen.operand == Some("x") && seen.params == [&*weight] && site.coords.get(Axis::Dp) == 1;
            if !here || site.micro != 1 || seen.position.step != 1 {
                return Ok(None);
            }
            let mut values = seen.tensor.to_vec::<f32>()?;
            values[3] += 0.5; // pixel (0, 0), channel 3 of the micro-batch's first image
            Tensor::from_slice(seen.tensor.device(), &values, seen.tensor.shape()).map(Some)
        };
        let plain = Side::from_model(model.clone(), plan("dp=2,pp=2"), &images);
        let report = compare([&plain, &plain.clone().with_hook(wrong)], 2).unwrap();
        let first = report.first.as_ref().unwrap();
        let Location::Op { name, layer: found, operand, .. } = &first.place else { panic!("{report}") };
        assert_eq!((&**name, &**found, *operand), ("conv2d", layer, Some("x")), "{report}");
        // dp rank 1 has images 8 to 15, and four in a micro-batch.
        assert_eq!((first.step, first.between, first.samples), (2, Between::Sides, Some((12, 1))), "{report}");
        assert_eq!((&first.index[..], first.differing), (&[12, 0, 0, 3][..], 1), "{report}");
        assert_eq!(report.unexplained, report.first, "{report}");
    }
}

/// Sleeps on dp rank 1 before the last gradient of its last backward pass, that of the stem's weights, and notes when
/// it went on.
#[derive(Debug)]
struct SlowEnd(Arc<Mutex<Option<Instant>>>);

impl Watch for SlowEnd {
    fn see(&self, at: At, seen: &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error> {
        if at.micro + 1 == MICROS / 2 && seen.operand.is_some() && seen.params.first() == Some(&"stem.norm.weight") {
            // Long against the time in which a thread of a busy machine wakes up and notes that a bucket is complete.
            std::thread::sleep(Duration::from_millis(150));
            *self.0.lock().unwrap() = Some(Instant::now());
        }
        Ok(None)
    }
}

/// By the time that the last weight's gradient is computed, the reduction of all buckets but the last is complete.
#[test]
fn buckets_are_reduced_while_backward_runs() {
    // Wide enough for several buckets of a MiB.
    let model: Arc<dyn Model> =
        Arc::new(ResNetConfig { groups: vec![(64, 1), (128, 3)], ..ResNetConfig::digits() }.network());
    let (plan, images, went_on) = (plan("dp=2"), images(), Arc::default());
    let ranks = World::Threads(2)
        .run(|world| {
            let rank = Arc::new(Rank::new(&plan.mesh, world.communicator().clone())?);
            let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
            if world.rank() == 1 {
                trainer.watch(Arc::new(SlowEnd(Arc::clone(&went_on))));
            }
            let batch = images.batch(0, BATCH, trainer.samples())?;
            let mut backward_end = Instant::now();
            trainer.observed_step(&batch, |Event { action, phase }| {
                if (action.kind, phase) == (ActionKind::Backward, Phase::Finished) {
                    backward_end = Instant::now();
                }
            })?;
            Ok::<_, TrainError>((backward_end, trainer.bucket_events()))
        })
        .unwrap();
    let went_on = went_on.lock().unwrap().expect("the slow rank has slept");
    for (rank, (backward_end, events)) in ranks.iter().enumerate() {
        let at = |event| events.iter().find(|(_, other)| *other == event).unwrap_or_else(|| panic!("no {event:?}")).0;
        let buckets = events.len() / 2; // each is started and done once
        assert!(buckets >= 3, "rank {rank} has {buckets} buckets");
        for bucket in 0..buckets {
            assert!(
                at(BucketEvent::Started(bucket)) <= *backward_end,
                "rank {rank} starts bucket {bucket} after backward"
            );
        }
        // The slow rank notes it when it next looks, after its sleep.
        for bucket in (0..buckets - 1).filter(|_| rank == 0) {
            assert!(at(BucketEvent::Done(bucket)) < went_on, "bucket {bucket} of {buckets} is reduced after backward");
        }
    }
}

#[test]
fn a_step_of_images_is_profiled() {
    let (model, plan, images) = (resnet(Norm::Batch), plan("dp=2,pp=2"), images());
    let profiler = Profiler::new(3, 2, &*Cpu::device());
    let tracks = World::Threads(4).run(|world| {
        let probe = profiler.probe(&**world.communicator());
        let rank = Arc::new(Rank::new(&plan.mesh, probe.communicator(world.communicator().clone()))?);
        let mut trainer = Trainer::new(model.clone(), &plan, rank.clone(), probe.device(Cpu::device()))?;
        for step in 0..3 {
            let batch = images.batch(step, BATCH, trainer.samples())?;
            probe.step(step + 1, || trainer.observed_step(&batch, |event| probe.observe(event)))?;
        }
        Ok::<_, TrainError>(probe.tracks(&rank)?)
    });
    let profile = profiler.profile(tracks.unwrap().into_iter().flatten());
    let rows = Rows::new(&profile);
    assert_eq!(rows.steps.iter().copied().collect::<Vec<_>>(), [2, 3]);
    let classes: Vec<&str> = rows.classes.iter().map(|(sum, _)| &*sum.label).collect();
    for class in ["products", "norm", "pointwise", "loss", "optimizer", "communication"] {
        assert!(classes.contains(&class), "no {class} in\n{rows}");
    }
    for track in &profile.tracks {
        let count = |wanted: &dyn Fn(&Span) -> bool| track.spans.iter().filter(|span| wanted(span)).count();
        let backwards = count(&|span| span.class == Class::Action && span.name == "backward");
        assert_eq!(backwards, 2 * MICROS / 2, "{}: two steps", track.name);
        let reduced = |span: &Span| span.name == "all_reduce" && span.meeting().is_some_and(|at| at.group.0 == *"dp");
        assert!(count(&|span| span.class == Class::Post && reduced(span)) >= 2, "{}\n{rows}", track.name);
    }
    let [predicted, measured] = schedule_timelines(&profile, &plan).unwrap().unwrap();
    assert!(predicted.makespan() > 0.0 && measured.makespan() > 0.0);
}

/// What a planner of partitions starts from, for lists of layers of any shape.
#[test]
fn layers_of_images_are_profiled_in_the_planners_format() {
    let micro_batch = (BATCH / MICROS * size_of::<f32>()) as f64;
    for (model, names, activations) in [
        (
            resnet(Norm::Batch),
            &[
                "Input",
                "stem",
                "group.0.block.0",
                "group.0.block.1",
                "group.1.block.0",
                "group.1.block.1",
                "head",
                "loss",
            ][..],
            &[64, 256, 256, 256, 128, 128, 10][..],
        ),
        (
            vgg(Norm::Group(2)),
            &[
                "Input",
                "group.0.conv.0",
                "group.0.conv.1",
                "no parameters",
                "group.1.conv.0",
                "group.1.conv.1",
                "no parameters",
                "hidden.0",
                "head",
                "loss",
            ],
            &[64, 256, 256, 64, 128, 128, 32, 12, 10],
        ),
    ] {
        // The plan of a pipeline says nothing about one rank but the size of its micro-batches.
        let profile = layers(&model, &plan("dp=2,pp=2"), &images(), Cpu::device(), &AtomicBool::new(false)).unwrap();
        assert_eq!(profile, profile.to_string().parse().unwrap());
        assert_eq!(profile.layers().iter().map(|layer| &*layer.name).collect::<Vec<_>>(), names);
        let ids: Vec<&str> = profile.layers().iter().map(|layer| &*layer.id).collect();
        assert_eq!((ids[0], ids[1], ids[ids.len() - 1]), ("input", "layer.0", "output"));
        let sent: Vec<f64> = activations.iter().map(|&elements| f64::from(elements) * micro_batch).collect();
        assert_eq!(
            profile.layers().iter().map(|layer| layer.activation_bytes).take(sent.len()).collect::<Vec<_>>(),
            sent
        );
        let stem = &profile.layers()[1];
        // A 3×3 convolution of one channel to four, and scale and shift of its norm. Running averages are not trained.
        assert_eq!(stem.parameter_bytes, f64::from(4 * (9 * 4 + 4 + 4)), "{stem:?}");
        assert!(stem.forward_ms > 0.0 && stem.backward_ms > 0.0, "{stem:?}");

        let states = States::new(&profile).unwrap();
        assert_eq!(states.count(), names.len() - 1, "what only reads the batch is not placed");
        let level = Level { machines: 2, bytes_per_second: 1e9 };
        let found = partition(&states, &[level], &PlanOptions { straight: true, ..PlanOptions::default() }).unwrap();
        assert_eq!(found.levels[0].len(), 2);
    }
}

/// A plan or a program that cannot be is an error, with its reason.
#[test]
fn layers_that_cannot_be_trained_are_refused() {
    let refused = |plan: Plan| {
        layers(&resnet(Norm::Batch), &plan, &images(), Cpu::device(), &AtomicBool::new(false)).unwrap_err().to_string()
    };
    let uneven = refused(Plan { num_microbatches: Some(3), ..plan("dp=1") });
    assert!(
        uneven.contains("16 samples cannot be cut into dp=1 times 3 micro-batches: use a multiple of 3"),
        "{uneven}"
    );
    let canonical = refused(Plan { numerics: Numerics::Canonical { blocks: 8 }, ..plan("dp=1") });
    assert!(canonical.contains("group_norm"), "{canonical}");
}

fn numbered(count: usize) -> Images {
    let pixels = (0..2 * count).map(|i| i as f32).collect();
    Images::new([1, 2], pixels, (0..count as i32).collect())
}

#[test]
fn an_order_has_each_image_once_and_another_place_each_epoch() {
    let images = numbered(50);
    let (first, second) = (images.order(1, 1), images.order(1, 2));
    assert_ne!(first, second);
    assert_ne!(first, images.order(2, 1));
    let mut sorted = first.clone();
    sorted.sort_unstable();
    assert!(sorted.into_iter().eq(0..50));
}

#[test]
fn parts_cover_the_images_and_are_filled_up() {
    let (train, held) = numbered(7).hold_out(3);
    assert_eq!((train.labels(), held.labels()), (&[0, 1, 3, 4, 6][..], &[2, 5][..]));
    let parts: Vec<Images> = train.parts(3).collect();
    assert_eq!(parts[0].labels(), [0, 1, 3]);
    assert_eq!(parts[1].labels(), [4, 6, Images::PADDING]);
    assert_eq!(parts[1].pixels(), [8.0, 9.0, 12.0, 13.0, 0.0, 0.0]);
}
