//! `--mesh auto`: the fastest mesh of the cores of this process, by steps that it takes.
//!
//! ```text
//! the machine, measured ─ planner: meshes of at most as many ranks as cores ─▶ sorted ─ steps of the few best, in turn ─▶ the fastest
//! ```
//! All ranks of a process share its cores, and a core whose rank waits works for the others. So more ranks than cores
//! only take turns, and are not tried. Steps have the model, batch and kernels of the run and zeros as tokens; nothing
//! is written.

use meshwork::core::launcher::{Environment, detect};
use meshwork::core::pool;
use meshwork::plan::race::Race;
use meshwork::plan::search::mesh_text;
use meshwork::plan::{Counter, Job, System, measure};
use meshwork::train::config::{Args, Config, Device};
use std::time::{Duration, Instant};

/// What `--mesh` has for the fastest mesh.
const AUTO: &str = "auto";

/// The time that measuring takes, unless ten steps take longer.
const BUDGET: Duration = Duration::from_secs(10);

/// Meshes that take steps: those that the planner predicts to be the fastest.
const FEW: usize = 4;

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
    // For each mesh: the seconds of a step, and the bytes of all ranks.
    let mut found: Vec<(String, Config, [f64; 2])> = Vec::new();
    for (mesh, config) in tried {
        let ranks = config.parallelism.world_size().unwrap_or(1);
        let Ok(job) = Job::new(config.clone(), &mut counter) else { continue };
        let Ok(step) = job.predict(&system, &machine.of_cards(ranks)?) else { continue };
        if config.memory.limit().is_none_or(|limit| step.memory <= limit as f64) {
            found.push((mesh, config, [step.seconds, ranks as f64 * step.memory]));
        }
    }
    found.sort_by(|a, b| a.2[0].total_cmp(&b.2[0]));
    // All of them are in memory at the same time. The first one takes part in any case.
    let mut left = machine.card.memory * machine.cards() as f64;
    let side_by_side = found.into_iter().take(FEW).enumerate().take_while(|(at, (_, _, [_, bytes]))| {
        left -= bytes;
        *at == 0 || left > 0.0
    });
    let (meshes, configs): (Vec<String>, Vec<Config>) =
        side_by_side.map(|(_, (mesh, config, _))| (mesh, config)).unzip();
    let race = Race::run(&configs, begun, BUDGET)?;
    let winner = race.winner();
    let (mesh, reason) = match meshes.get(winner) {
        Some(mesh) => (&mesh[..], told(&race, winner, &meshes)),
        None => ("dp=1", "no mesh is predicted to run and to fit into memory".to_owned()),
    };
    let warned = disturbance.warning().map_or(String::new(), |warning| format!("; {warning}"));
    Ok((with(mesh), Some(format!("--mesh auto takes {mesh}: {reason}{warned}"))))
}

/// How long the steps of the fastest took, and how many times as long the others'.
fn told(race: &Race, winner: usize, meshes: &[String]) -> String {
    let Some(seconds) = race.seconds(winner) else { return "it is predicted to be the fastest".to_owned() };
    let others = meshes.iter().enumerate().take(race.0.len()).filter(|(at, _)| *at != winner);
    let others = others.map(|(at, mesh)| format!(", {:.2} times as long with {mesh}", race.ratio(at, winner)));
    format!("steps took {:.1} ms with {}{}", 1e3 * seconds, meshes[winner], others.collect::<String>())
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
