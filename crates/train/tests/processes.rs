//! A run over processes: the losses, checkpoint and profile of threads, and the same error in every process.

#[path = "suite/small.rs"]
mod small;

use meshwork_checkpoint::Checkpoint;
use meshwork_core::World;
use meshwork_mpi::{Meeting, Options, Runtime};
use meshwork_testkit::comm::processes::{Place, is_rank, run};
use meshwork_train::config::{Args, Config};
use meshwork_train::generate::{Sampling, Trained, continue_text_in};
use meshwork_train::{Devices, Outcome, RunError, train_in};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(600);

/// A run of four steps on `mesh` that saves, is profiled and says what it did, in a folder of its own.
fn config(mesh: &str, folder: &Path) -> Config {
    let [dir, layers, logs] = ["saved", "layers", "logs"].map(|name| folder.join(name).display().to_string());
    small::config(&format!(
        "{mesh} --steps 4 --set checkpoint.dir={dir} --set checkpoint.every=2 --set metrics.profile=true --set \
         metrics.profile_steps=2 --set metrics.layer_profile={layers} --set comm.log_dir={logs} \
         --set training.check_replicas_every=2"
    ))
}

fn train(world: &World, config: &Config, metrics: &Path) -> Result<Outcome, RunError> {
    let devices = world.prepare(|| Devices::open(config))?;
    train_in(world, &devices, config, &small::data(), Some(metrics), &AtomicBool::new(false))
}

/// The losses in a file of metrics, as they are written.
fn losses(metrics: &Path) -> Vec<String> {
    let lines = fs::read_to_string(metrics).unwrap();
    let loss = |line: &str| {
        let event: serde_json::Value = serde_json::from_str(line).unwrap();
        (event["event"] == "step").then(|| format!("{} {}", event["loss"], event["grad_norm"]))
    };
    lines.lines().filter_map(loss).collect()
}

/// The world of the processes of a test.
fn joined(Place { rank, ranks, port }: Place) -> World {
    let meeting = Meeting { rank, size: ranks, host: "127.0.0.1".to_owned(), port, key: None };
    let (options, stop) = (Options { timeout: LONG, ..Options::default() }, AtomicBool::new(false));
    Runtime::meet(meeting, options, &stop).unwrap_or_else(|error| panic!("{error}")).world()
}

/// A folder, which the first process empties.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if !is_rank() {
        _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
    }
    folder
}

#[test]
fn a_run_over_processes_is_that_over_threads() {
    let over_processes = folder("over_processes");
    let config = config("dp=2", &over_processes);
    let exits = run(2, "a_run_over_processes_is_that_over_threads", |place| {
        let world = joined(place);
        let outcome = train(&world, &config, &over_processes.join("metrics")).unwrap();
        assert_eq!(outcome.steps, 4);
        // Rank 0 has the tracks of both, on one clock: each all-reduce is over on both at the same time.
        assert_eq!(outcome.profile.is_some(), world.leads());
        if let Some(profile) = outcome.profile {
            let names: Vec<_> = profile.tracks.iter().map(|track| &*track.name).collect();
            assert_eq!(names, ["rank 0 (dp=0,tp=0,pp=0)", "rank 1 (dp=1,tp=0,pp=0)"]);
            assert!(profile.tracks.iter().all(|track| track.steps().eq([2, 3])), "{profile:?}");
            let calls = profile.tracks.iter().map(|track| {
                let mut calls: Vec<_> =
                    track.spans.iter().filter_map(|span| Some((span.name, span.meeting()?))).collect();
                calls.sort_by_key(|(name, at)| (*name, at.group.clone(), at.seq));
                calls
            });
            let [first, second] = calls.collect::<Vec<_>>().try_into().unwrap();
            assert_eq!(first, second, "both know their communications by the same names");
        }
    });
    let Some(exits) = exits else { return };
    exits.iter().for_each(|exit| assert_eq!(exit.code, Some(0), "{}", exit.errors));

    let over_threads = folder("over_threads");
    let config = self::config("dp=2", &over_threads);
    train(&config.world(), &config, &over_threads.join("metrics")).unwrap();
    let [processes, threads] = [&over_processes, &over_threads].map(|folder| losses(&folder.join("metrics")));
    assert_eq!((processes.len(), &processes), (4, &threads));
    let weights = |folder: &Path| {
        let checkpoint = Checkpoint::open(&folder.join("saved/step-00000004")).unwrap();
        serde_json::to_value(&checkpoint.index().tensors).unwrap()
    };
    assert_eq!(weights(&over_processes), weights(&over_threads));
    assert!(over_processes.join("layers").exists(), "the profile of layers, by rank 0");
    // Each rank has a log, of threads too, and rank 0 writes the times of both.
    for folder in [&over_processes, &over_threads] {
        for rank in 0..2 {
            let log = fs::read_to_string(folder.join(format!("logs/rank-{rank}.log"))).unwrap();
            assert!(log.contains(&format!("rank {rank} (tp=0,cp=0,ep=0,dp={rank},pp=0) in process ")), "{log}");
            assert_eq!(log.lines().filter(|line| line.contains(" waited ")).count(), 4, "{log}");
        }
        let lines = fs::read_to_string(folder.join("metrics")).unwrap();
        let steps = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let steps: Vec<_> = steps.filter(|event| event["event"] == "step").collect();
        for name in ["compute_ms", "wait_ms"] {
            let times = steps.iter().map(|step| step[name].as_array().map_or(0, Vec::len));
            assert_eq!(times.collect::<Vec<_>>(), [2; 4], "{name}");
        }
    }
}

/// One process has another learning rate: every process ends before the first step, with who has what.
#[test]
fn processes_with_other_settings_are_refused_before_the_first_step() {
    let folder = folder("other_settings");
    let exits = run(3, "processes_with_other_settings_are_refused_before_the_first_step", |place| {
        let world = joined(place);
        let rate = if world.leads() { "5e-1" } else { "1e-3" };
        let config = small::config(&format!("pp=3 --set model.num_layers=3 --set optimizer.lr={rate}"));
        let error = train(&world, &config, &folder.join("metrics")).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("the ranks of this run differ:") && text.contains("rank 0 on host "), "{text}");
        assert!(text.contains(": optimizer.lr 0.5, others 0.001"), "{text}");
        assert!(!folder.join("metrics").exists());
    });
    let Some(exits) = exits else { return };
    exits.iter().for_each(|exit| assert_eq!(exit.code, Some(0), "{}", exit.errors));
}

/// What rank 0 draws over processes is what it draws over threads.
#[test]
fn a_text_over_processes_is_that_over_threads() {
    let folder = folder("text");
    let drawn = |world: &World, config: &Config| {
        let trained = Trained::open(&folder.join("saved"), None, Args::parse(["--mesh", "tp=2"])).unwrap();
        assert_eq!(config.model.seq_len, trained.config.model.seq_len);
        let mut tokens = Vec::new();
        let sampling = Sampling::default();
        let done = continue_text_in(world, &trained, &[1, 2, 3], 12, sampling, &AtomicBool::new(false), |token| {
            tokens.push(token)
        });
        assert_eq!(done.unwrap().drawn, 12);
        tokens
    };
    let config = config("dp=2 --set model.vocab_size=256", &folder);
    if !is_rank() {
        train(&config.world(), &config, &folder.join("metrics")).unwrap();
        let tokens = drawn(&World::Threads(2), &config);
        fs::write(folder.join("tokens"), format!("{tokens:?}")).unwrap();
    }
    let exits = run(2, "a_text_over_processes_is_that_over_threads", |place| {
        let world = joined(place);
        let tokens = drawn(&world, &config);
        let wanted = fs::read_to_string(folder.join("tokens")).unwrap();
        assert_eq!(format!("{tokens:?}"), if world.leads() { &wanted } else { "[]" });
    });
    let Some(exits) = exits else { return };
    exits.iter().for_each(|exit| assert_eq!(exit.code, Some(0), "{}", exit.errors));
}
