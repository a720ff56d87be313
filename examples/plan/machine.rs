//! This machine as a cluster: `--measure`.

use crate::best::progress;
use crate::best::read;
use crate::options::Options;
use crate::output::tell;
use meshwork::plan::{Cluster, PlanError, measure};
use meshwork::train::World;
use meshwork::train::processes::of_processes;
use std::fs;
use std::path::Path;

/// Measures, and writes the file of the cluster. A machine that was busy is told, because its rates are wrong.
pub fn written(options: &Options) -> Result<String, PlanError> {
    let path = options.measure.clone().unwrap_or_default();
    if let Some(world) = of_processes()? {
        return between(&world, &path);
    }
    let (machine, disturbance) = measure::measure(&measure::MODELS, &mut progress)?;
    if let Some(warning) = disturbance.warning() {
        tell(&format_args!("warning: {warning}"));
    }
    write(&machine, &path)
}

/// Adds the links between processes to the file. The process of rank 0 writes.
fn between(world: &World, path: &Path) -> Result<String, PlanError> {
    let machine = read(&path.display().to_string())?;
    let leads = matches!(world, World::Joined(ranks) if ranks.iter().any(|rank| rank.rank() == 0));
    let machine = measure::between(world, &machine)?;
    if leads { write(&machine, path) } else { Ok(String::new()) }
}

fn write(machine: &Cluster, path: &Path) -> Result<String, PlanError> {
    let text = machine.to_toml();
    fs::write(path, &text).map_err(|error| PlanError::File {
        file: path.display().to_string(),
        problem: error.to_string(),
        valid: "use a file in a folder that can be written to".into(),
    })?;
    Ok(text)
}
