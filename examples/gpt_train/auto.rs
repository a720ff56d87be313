//! `--mesh auto`: the fastest mesh of the cores of this process, by steps that it takes.
//!
//! ```text
//! the machine, measured ─ planner: meshes of at most as many ranks as cores ─▶ sorted ─ some steps of the few best ─▶ the fastest
//! ```
//! All ranks of a process share its cores, and a core whose rank waits works for the others. So more ranks than cores
//! only take turns, and are not tried. Steps have the model, batch and kernels of the run and zeros as tokens; nothing
//! is written.

use meshwork::core::launcher::{Environment, detect};
use meshwork::core::pool;
use meshwork::plan::search::mesh_text;
use meshwork::plan::{Counter, Job, System, measure};
use meshwork::train::config::{Args, Config, Device};
use std::time::{Duration, Instant};

/// What `--mesh` has for the fastest mesh.
const AUTO: &str = "auto";

/// After this long no further mesh is tried.
const BUDGET: Duration = Duration::from_secs(10);

/// Meshes whose steps are measured: those that the planner predicts to be the fastest.
const FEW: usize = 4;

/// Steps that are measured of each mesh, after one that is not. The fastest counts.
const STEPS: usize = 3;

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
    let mut tried: Vec<(String, Config)> = Vec::new();
    for mesh in meshes(pool::threads()) {
        // What a mesh cannot run has no place here; faults of other keys are told by the loader.
        let Ok(config) = Config::from_args(&with(&mesh)) else { continue };
        if config.device != Device::Cpu {
            return Err("--mesh auto measures the CPU; for cards that are not here, use --example plan".into());
        }
        tried.push((mesh, config));
    }
    let begun = Instant::now();
    // Tiny models: the planner's numbers only order the meshes.
    let (machine, disturbance) = measure::measure(&measure::TINY, &mut |_, _, _| {})?;
    let (system, mut counter) = (System::known(machine.system())?.on(&machine), Counter::default());
    let mut found: Vec<(String, Config, f64)> = Vec::new();
    for (mesh, config) in tried {
        let ranks = config.parallelism.world_size().unwrap_or(1);
        let Ok(job) = Job::new(config.clone(), &mut counter) else { continue };
        let Ok(step) = job.predict(&system, &machine.of_cards(ranks)?) else { continue };
        if config.memory.limit().is_none_or(|limit| step.memory <= limit as f64) {
            found.push((mesh, config, step.seconds));
        }
    }
    found.sort_by(|a, b| a.2.total_cmp(&b.2));
    let mut measured: Vec<(String, f64)> = Vec::new();
    for (mesh, config, _) in found.into_iter().take(FEW) {
        if measured.is_empty() || begun.elapsed() < BUDGET {
            measured.push((mesh, measure::steps(&config, STEPS, false)?.fastest));
        }
    }
    measured.sort_by(|a, b| a.1.total_cmp(&b.1));
    let told = measured.iter().map(|(mesh, seconds)| format!("{:.1} ms with {mesh}", 1e3 * seconds));
    let told = told.collect::<Vec<_>>().join(", ");
    let (mesh, reason) = match measured.first() {
        Some((mesh, _)) => (&mesh[..], format!("steps took {told}")),
        None => ("dp=1", "no mesh is predicted to run and to fit into memory".to_owned()),
    };
    let warned = disturbance.warning().map_or(String::new(), |warning| format!("; {warning}"));
    Ok((with(mesh), Some(format!("--mesh auto takes {mesh}: {reason}{warned}"))))
}

/// Meshes of up to so many ranks.
fn meshes(most: usize) -> Vec<String> {
    let mut all = Vec::new();
    for dp in 1..=most {
        for tp in 1..=most / dp {
            for pp in 1..=most / (dp * tp) {
                all.extend((1..=most / (dp * tp * pp)).map(|cp| mesh_text([dp, tp, pp, cp, 1])));
            }
        }
    }
    all
}
