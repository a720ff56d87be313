//! `--mesh auto`: the fastest mesh of the cores of this process, by steps that it takes.
//!
//! ```text
//! meshes of at most as many ranks as cores ─ dry runs: operations and bytes of all ranks ─▶ sorted ─ some steps of each ─▶ the fastest
//! ```
//! All ranks of a process share its cores, and a core whose rank waits works for the others. So more ranks than cores
//! only take turns, and are not tried. Steps have the model, batch and kernels of the run and zeros as tokens; nothing
//! is written.

use meshwork::core::launcher::{Environment, detect};
use meshwork::core::pool;
use meshwork::nn::Batch;
use meshwork::train::config::{Args, Config, Device};
use meshwork::train::plan::predict_all;
use meshwork::train::{Devices, TrainError, Trainer};
use std::time::{Duration, Instant};

/// What `--mesh` has for the fastest mesh.
const AUTO: &str = "auto";

/// After this long no further mesh is tried.
const BUDGET: Duration = Duration::from_secs(10);

/// Steps that are measured of each mesh, after one that is not. The fastest counts.
const STEPS: usize = 2;

/// Operations in the time of a byte that a rank sends: it only orders the meshes.
const PER_BYTE: f64 = 10.0;

/// The arguments with the fastest mesh in place of `auto`, and how it was found.
///
/// # Errors
/// Ranks that are no threads of this process; a step that fails.
pub fn chosen(args: Args) -> Result<(Args, Option<String>), Box<dyn std::error::Error>> {
    if args.mesh.as_deref() != Some(AUTO) {
        return Ok((args, None));
    }
    let environment: Environment = std::env::vars().collect();
    if detect(&environment).is_ok_and(|launch| launch.is_some_and(|launch| launch.has_others())) {
        return Err("--mesh auto measures the cores of one process; use a mesh, such as dp=2".into());
    }
    let with = |mesh: &str| Args { mesh: Some(mesh.to_owned()), ..args.clone() };
    let mut found: Vec<(String, Config, f64)> = Vec::new();
    for mesh in meshes(pool::threads()) {
        // What a mesh cannot run has no place here; faults of other keys are told by the loader.
        let Ok(config) = Config::from_args(&with(&mesh)) else { continue };
        if config.device != Device::Cpu {
            return Err("--mesh auto measures the CPU; for cards that are not here, use --example plan".into());
        }
        let Ok(all) = predict_all(&config) else { continue };
        let fits = |bytes: u64| config.memory.limit().is_none_or(|limit| bytes <= limit);
        if all.iter().all(|equal| fits(equal.each.peak_bytes())) {
            let work = all.iter().map(|equal| {
                let sent: f64 = equal.each.records.iter().map(|record| record.bytes()).sum();
                equal.ranks.len() as f64 * (equal.each.flops as f64 + PER_BYTE * sent)
            });
            let work = work.sum();
            found.push((mesh, config, work));
        }
    }
    found.sort_by(|a, b| a.2.total_cmp(&b.2));
    let begun = Instant::now();
    let mut measured: Vec<(String, f64)> = Vec::new();
    for (mesh, config, _) in found {
        if measured.is_empty() || begun.elapsed() < BUDGET {
            measured.push((mesh, seconds(&config)?));
        }
    }
    measured.sort_by(|a, b| a.1.total_cmp(&b.1));
    let told: Vec<String> = measured.iter().map(|(mesh, seconds)| format!("{mesh} {:.1} ms", 1e3 * seconds)).collect();
    let mesh = measured.first().map_or("dp=1", |(mesh, _)| mesh);
    Ok((with(mesh), Some(format!("--mesh {mesh}, of a step's time with {}", told.join(", ")))))
}

/// Meshes of up to so many ranks.
fn meshes(most: usize) -> Vec<String> {
    let mut all = Vec::new();
    for dp in 1..=most {
        for tp in 1..=most / dp {
            for pp in 1..=most / (dp * tp) {
                all.extend((1..=most / (dp * tp * pp)).map(|cp| format!("dp={dp},tp={tp},pp={pp},cp={cp}")));
            }
        }
    }
    all
}

/// Seconds of a step: of the slowest rank, the fastest of some steps.
fn seconds(config: &Config) -> Result<f64, Box<dyn std::error::Error>> {
    let (model, devices) = (config.model(), Devices::cpu(config.training.matmul_dtype.precision()));
    let plan = config.plan()?;
    let ends = config.world().run_mesh(&plan.mesh, |rank| {
        let device = devices.rank(rank.world().communicator().clone()).map_err(TrainError::from)?.device;
        let mut trainer = Trainer::new(model.clone(), &plan, rank, device)?;
        let batch = Batch::blank(&model.fields(), trainer.samples().len());
        let mut least = f64::INFINITY;
        for step in 0..=STEPS {
            let begun = Instant::now();
            trainer.step(&batch)?;
            if step > 0 {
                least = least.min(begun.elapsed().as_secs_f64());
            }
        }
        Ok::<_, TrainError>(least)
    })?;
    Ok(ends.into_iter().fold(0.0, f64::max))
}
