//! This machine as a cluster: `--measure`.

use crate::best::progress;
use crate::options::Options;
use meshwork::plan::{PlanError, measure};
use std::fs;

/// Measures, and writes the file of the cluster.
pub fn written(options: &Options) -> Result<String, PlanError> {
    let path = options.measure.clone().unwrap_or_default();
    let text = measure::measure(&measure::MODELS, &mut progress)?.to_toml();
    fs::write(&path, &text).map_err(|error| PlanError::File {
        file: path.display().to_string(),
        problem: error.to_string(),
        valid: "use a file in a folder that can be written to".into(),
    })?;
    Ok(text)
}
