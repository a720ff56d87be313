//! Predicts every row of a table of runs: `--table`.

use crate::options::Options;
use meshwork::plan::table::{self, Table};
use meshwork::plan::{Counter, PlanError, System};
use meshwork::train::numbers::spans;
use std::fs;
use std::path::Path;

/// A line for each row: what is predicted, and what was measured. Why rows cannot be predicted follows, each reason
/// once.
pub fn rows(options: &Options, path: &Path, name: &str) -> Result<String, PlanError> {
    let file = path.display().to_string();
    let text = fs::read_to_string(path).map_err(|error| PlanError::File {
        file: file.clone(),
        problem: error.to_string(),
        valid: "use a TOML file with [table.NAME]".into(),
    })?;
    let system = System::known(options.system())?;
    let given = options.keys()?;
    let rows = Table::from_toml(&file, &text, name)?.rows(name, &given, &system, &mut Counter::default())?;
    let mut shown = String::new();
    if let Some(row) = rows.iter().flatten().next().filter(|_| !options.json) {
        shown += &format!("the system {} on {} (another one: --system NAME)\n\n", options.system(), row.cluster.name);
        shown += "row   predicted    measured     off      memory  fits\n";
    }
    let mut reasons: Vec<(String, Vec<usize>)> = Vec::new();
    for (at, row) in rows.into_iter().enumerate() {
        let measured = row.as_ref().ok().and_then(|row| row.measured);
        let predicted = row.and_then(|row| row.job.predict(&system, &row.cluster));
        match predicted {
            predicted if options.json => shown += &format!("{}\n", table::line(at, &predicted)),
            Ok(step) => {
                let (measured, off) = measured.map_or((String::new(), String::new()), |seconds| {
                    (format!("{seconds:.4} s"), format!("{:+.1}%", 100.0 * (step.seconds / seconds - 1.0)))
                });
                let fits = if step.fits { "yes" } else { "no" };
                shown += &format!(
                    "{at:>3} {:>9.4} s {measured:>11} {off:>7} {:>8.1} GB  {fits}\n",
                    step.seconds,
                    step.memory / 1e9
                );
            }
            Err(error) => {
                let reason = match error {
                    PlanError::Row { problem, .. } => problem,
                    other => other.to_string(),
                };
                match reasons.iter_mut().find(|(known, _)| *known == reason) {
                    Some((_, rows)) => rows.push(at),
                    None => reasons.push((reason, vec![at])),
                }
            }
        }
    }
    shown.extend(reasons.iter().map(|(reason, rows)| {
        let plural = if rows.len() > 1 { "s" } else { "" };
        format!("{name}, row{plural} {}: {reason}\n", spans(rows))
    }));
    Ok(shown)
}
