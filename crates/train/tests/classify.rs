//! Classifiers through the pipeline: the same bits on every cut into stages, with and without re-materialisation; the same
//! numbers with dp; and what cannot be trained is refused.

use meshwork_core::{Axis, Rank};
use meshwork_models::layers::Norm;
use meshwork_models::network::Network;
use meshwork_models::resnet::ResNetConfig;
use meshwork_models::vgg::VggConfig;
use meshwork_tensor::cpu::Cpu;
use meshwork_tensor::random;
use meshwork_testkit::parity::assert_close;
use meshwork_testkit::run_world;
use meshwork_train::classify::{Classifier, Images, Options, Score, Settings, schedules};
use std::collections::BTreeMap;
use std::sync::Arc;

const STEPS: usize = 3;

fn settings() -> Settings {
    Settings { batch: 16, seed: 3, ..Settings::default() }
}

fn resnet(norm: Norm) -> Network {
    ResNetConfig { groups: vec![(4, 2), (8, 2)], norm, ..ResNetConfig::digits() }.network()
}

fn vgg(norm: Norm) -> Network {
    VggConfig { groups: vec![vec![4, 4], vec![8, 8]], hidden: vec![12], norm, ..VggConfig::digits() }.network()
}

/// Noise with a class each: enough for parity.
fn images(count: usize) -> Images {
    let mut pixels = vec![0.0; count * 64];
    random::fill_uniform(random::key(9, "pixels"), 0, &mut pixels);
    Images::new([8, 8, 1], pixels, (0..count as i32).map(|i| i * 7 % 10).collect())
}

/// Everything that training leaves, by name.
#[derive(Debug, PartialEq)]
struct Trained {
    /// Of the last step.
    gradients: BTreeMap<String, Vec<f32>>,
    weights: BTreeMap<String, Vec<f32>>,
    averages: BTreeMap<String, (Vec<f64>, Vec<f64>)>,
    /// Of each step, and of images held out.
    scores: Vec<Score>,
}

/// What some steps leave on all stages of the first dp rank; and the most bytes that lived on any rank.
fn train(network: &Network, settings: &Settings) -> (Trained, u64) {
    let mesh = settings.mesh().unwrap();
    let ranks = run_world(mesh.world_size(), |world| {
        let rank = Arc::new(Rank::new(&mesh, Arc::clone(world.communicator())).unwrap());
        let mut classifier = Classifier::new(network, settings, rank, Cpu::device()).unwrap();
        let data = images(STEPS * settings.batch);
        let mut scores: Vec<Score> = data.parts(settings.batch).map(|batch| classifier.step(&batch).unwrap()).collect();
        let peak = classifier.peak_bytes().unwrap();
        scores.push(classifier.evaluate(&images(21)).unwrap());
        let params = classifier.params();
        let declarations = params.declarations();
        let weight = |id| (declarations.spec(id).name.clone(), params.value(id).unwrap().to_vec::<f32>().unwrap());
        let averages = classifier.averages().into_iter().map(|(name, mean, variance)| (name, (mean, variance)));
        let trained = Trained {
            gradients: classifier.gradients().unwrap().into_iter().collect(),
            weights: declarations.ids().map(weight).collect(),
            averages: averages.collect(),
            scores,
        };
        (classifier.rank().coords().get(Axis::Dp), trained, peak)
    });
    let mut ranks = ranks.into_iter().filter(|(dp, ..)| *dp == 0).map(|(_, trained, peak)| (trained, peak));
    let (mut all, peak) = ranks.next().unwrap();
    for (stage, _) in ranks {
        assert_eq!(stage.scores, all.scores, "every rank knows them");
        all.gradients.extend(stage.gradients);
        all.weights.extend(stage.weights);
        all.averages.extend(stage.averages);
    }
    (all, peak)
}

/// Batch norm too: the micro-batches are the same, whoever runs them, and so are the moving averages.
#[test]
fn every_cut_into_stages_gives_the_same_bits() {
    let mut cuts = 0;
    for network in [resnet(Norm::Batch), vgg(Norm::Group(2)), vgg(Norm::Batch)] {
        let (whole, _) = train(&network, &settings());
        assert!(
            whole.gradients.values().all(|gradient| gradient.iter().any(|&g| g != 0.0)),
            "gradients flow everywhere"
        );
        for schedule in schedules() {
            // Two stages on each rank, where the schedule has them, need as many layers.
            for pp in [2, 4] {
                let cut = Settings { pp, schedule: schedule.to_owned(), ..settings() };
                let stages = cut.schedule().map_or(usize::MAX, |schedule| schedule.placement.len());
                if stages <= network.layers() {
                    assert_eq!(train(&network, &cut).0, whole, "{schedule} over pp={pp}");
                    cuts += 1;
                }
            }
        }
        // Boundaries of every shape: behind each layer once, pools and the mean over pixels among them.
        for first in 1..network.layers() {
            let cut = Settings { pp: 2, partition: Some(vec![first, network.layers() - first]), ..settings() };
            assert_eq!(train(&network, &cut).0, whole, "cut behind layer {first}");
        }
    }
    assert!(cuts > 35, "{cuts} schedules and degrees");
}

/// GPipe's re-materialisation: less memory, the same bits, and moving averages that move once a step.
#[test]
fn rematerialisation_changes_memory_alone() {
    for network in [resnet(Norm::Batch), vgg(Norm::Batch)] {
        for pp in [1, 2] {
            let of = |recompute, schedule: &str| {
                let schedule = schedule.to_owned();
                train(&network, &Settings { recompute, schedule, pp, batch: 64, micros: 8, ..settings() })
            };
            let ((kept, most), (again, least)) = (of(false, "gpipe"), of(true, "gpipe"));
            assert!(!kept.averages.is_empty());
            assert_eq!(again, kept, "pp={pp}");
            assert!(2 * least < most, "pp={pp}: {least} bytes against {most}");
            // Where backward is split, what forward made again waits for the gradients of weights.
            assert_eq!(of(true, "zb_h1").0, kept, "zb_h1 over pp={pp}");
        }
    }
}

/// Two dp ranks with two micro-batches each are one rank with those four: the same statistics, and sums in another order.
#[test]
fn dp_ranks_share_the_micro_batches_of_one() {
    for norm in [Norm::Batch, Norm::Group(2)] {
        let network = resnet(norm);
        let (whole, _) = train(&network, &settings());
        for pp in [1, 2] {
            let (got, _) = train(&network, &Settings { pp, dp: 2, micros: 2, ..settings() });
            assert_near(&got.gradients, &whole.gradients);
            assert_near(&got.weights, &whole.weights);
            assert_eq!(got.averages.len(), whole.averages.len());
            for (name, (mean, variance)) in &whole.averages {
                assert_close(name, &got.averages[name].0, mean, 0.0);
                assert_close(name, &got.averages[name].1, variance, 0.0);
            }
        }
    }
}

/// Group norm takes each image by itself; batch norm does not, and says so.
#[test]
fn only_batch_norm_depends_on_the_micro_batch() {
    let of = |norm, micros| train(&vgg(norm), &Settings { micros, ..settings() }).0;
    assert_near(&of(Norm::Group(2), 1).gradients, &of(Norm::Group(2), 8).gradients);
    let (one, eight) = (of(Norm::Batch, 1), of(Norm::Batch, 8));
    let name = "group.0.conv.0.conv.weight";
    let distance =
        one.gradients[name].iter().zip(&eight.gradients[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(distance > 1e-3, "{distance}");
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
    let refused = |settings: Settings| {
        let rank = Arc::new(Rank::recording(&settings.mesh().unwrap(), 0).unwrap());
        match Classifier::new(&network, &settings, rank, Cpu::device()) {
            Ok(_) => panic!("it was taken"),
            Err(error) => error.to_string(),
        }
    };
    for (settings, says) in [
        (
            Settings { dp: 3, ..settings() },
            "a mini-batch of 16 images cannot be cut into dp=3 times 4 micro-batches: take a multiple of 12",
        ),
        (Settings { pp: 7, ..settings() }, "6 layers cannot fill 7 stages: take a lower pp, or a deeper network"),
        (
            Settings { pp: 2, partition: Some(vec![3, 4]), ..settings() },
            "6 layers cannot be cut into stages of [3, 4]: 2 numbers of at least 1 must add up to them",
        ),
        (
            Settings { schedule: "pipedream".to_owned(), ..settings() },
            "schedule pipedream updates weights within a step, which classifiers do not: use one of gpipe, 1f1b, \
             interleaved_1f1b, breadth_first, zb_h1, zb_h2, zb_v, dualpipe_v",
        ),
        (
            Settings { pp: 4, micros: 2, schedule: "zb_h2".to_owned(), ..settings() },
            "schedule zb_h2 over pp=4 needs at least 4 micro-batches, got 2; gpipe and 1f1b take any number",
        ),
    ] {
        assert_eq!(refused(settings), says);
    }
}

/// A class that the network does not have is found where the loss is, and a loss that is no number before any weight moves.
#[test]
fn bad_images_are_errors() {
    let (network, settings) = (resnet(Norm::Batch), settings());
    let mut classifier = Classifier::new(&network, &settings, Arc::new(Rank::alone().unwrap()), Cpu::device()).unwrap();
    let all = images(16);
    let mut labels = all.labels().to_vec();
    labels[5] = 10;
    let error = classifier.step(&Images::new([8, 8, 1], all.pixels().to_vec(), labels)).unwrap_err().to_string();
    assert!(error.contains("id 10 at place 1 is not in a vocabulary of 10"), "{error}");

    for (images, says) in [
        (images(15), "15 images of [8, 8, 1] for a network of [8, 8, 1] that trains on 16 at a time"),
        (
            Images::new([4, 16, 1], all.pixels().to_vec(), all.labels().to_vec()),
            "16 images of [4, 16, 1] for a network of",
        ),
    ] {
        let error = classifier.step(&images).unwrap_err().to_string();
        assert!(error.starts_with(says), "{error}");
    }
    assert!(classifier.evaluate(&images(0)).unwrap_err().to_string().starts_with("0 images of "));

    let before = classifier.params().flats()[0].as_slice::<f32>().unwrap().to_vec();
    let mut pixels = all.pixels().to_vec();
    pixels[70] = f32::NAN;
    let error = classifier.step(&Images::new([8, 8, 1], pixels, all.labels().to_vec())).unwrap_err().to_string();
    assert_eq!(error, "step 1: the loss is NaN; the weights are those before this step");
    assert_eq!(classifier.params().flats()[0].as_slice::<f32>().unwrap(), before);
    assert!(classifier.step(&all).unwrap().loss.is_finite(), "and training goes on");
}

#[test]
fn bad_flags_say_what_would_be_valid() {
    for (args, says) in [
        (&["--model", "alexnet"][..], "--model alexnet: unknown; the nearest is resnet; use one of resnet, vgg"),
        (&["--pp", "0"], "--pp 0: no such number; use 1 to 4096"),
        (&["--pp", "9"], "--pp 9: resnet has 6 layers, too few for 9 stages; use 6 at most"),
        (&["--schedule", "gpip"], "--schedule gpip: unknown; the nearest is gpipe; use one of gpipe, 1f1b, "),
        (&["--schedule", "pipedream"], "--schedule pipedream: unknown; the nearest is "),
        (&["--pp", "4", "--schedule", "zb_v"], "--pp 4: resnet has 6 layers, too few for 8 stages; use 3 at most"),
        (&["--virtual", "3"], "--micro 4: schedule gpipe does not run with 3 virtual stages"),
        (&["--recompute=yes"], "--recompute yes: takes no value; use --recompute alone"),
        (&["--epochs"], "--epochs: no value; use --epochs VALUE or --epochs=VALUE"),
        (
            &["--micro", "5"],
            "--micro 5: a mini-batch of 64 images cannot be cut into dp=1 times 5 micro-batches: take a multiple of 5; use \
             other numbers, or another --schedule than gpipe",
        ),
    ] {
        assert!(
            Options::parse(args).unwrap_err().to_string().starts_with(says),
            "{}",
            Options::parse(args).unwrap_err()
        );
    }
    let both = Options::parse(["--pp", "x", "--fast"]).unwrap_err();
    assert_eq!(both.faults.len(), 2, "all faults together");
}
