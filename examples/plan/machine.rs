//! This machine as a cluster: `--measure`.

use crate::best::progress;
use crate::options::Options;
use crate::output::tell;
use meshwork::plan::{PlanError, measure};
use std::fs;

/// Measures, and writes the file of the cluster. A machine that was busy is told, because its rates are wrong.
pub fn written(options: &Options) -> Result<String, PlanError> {
    let path = options.measure.clone().unwrap_or_default();
    let (machine, disturbance) = measure::measure(&measure::MODELS, &mut progress)?;
    if let Some(warning) = disturbance.warning() {
        tell(&format_args!("warning: {warning}"));
    }
    let text = machine.to_toml();
    fs::write(&path, &text).map_err(|error| PlanError::File {
        file: path.display().to_string(),
        problem: error.to_string(),
        valid: "use a file in a folder that can be written to".into(),
    })?;
    Ok(text)
}
