//! A run over processes: the losses, checkpoint and profile of threads, and the same error in every process.

#[path = "suite/small.rs"]
mod small;

use meshwork_checkpoint::Checkpoint;
use meshwork_core::World;
use meshwork_testkit::comm::processes::{is_rank, run};
use meshwork_train::config::Config;
use meshwork_train::{Devices, Outcome, RunError, train_in};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(600);

/// A run of four steps on `mesh` that saves, is profiled and says what it did, in a folder of its own.
fn config(mesh: &str, folder: &Path) -> Config {
    let [dir, layers] = ["saved", "layers"].map(|name| folder.join(name).display().to_string());
    small::config(&format!(
        "{mesh} --steps 4 --set checkpoint.dir={dir} --set checkpoint.every=2 --set metrics.profile=true --set \
         metrics.profile_steps=2 --set metrics.layer_profile={layers}"
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
    let exits = run(2, "a_run_over_processes_is_that_over_threads", |worlds| {
        let world = worlds.world(2, LONG).unwrap();
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
}
