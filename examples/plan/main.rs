//! Predicts published runs: `cargo run --release --example plan -- --table FILE --name TABLE --system NAME --json`.
//! docs/planner.md says more.

mod errors;
#[path = "../shared/output.rs"]
mod output;

use clap::Parser;
use meshwork::plan::table::{self, Table};
use meshwork::plan::{Counter, PlanError, System};
use output::{BAD_INPUT, fail, show};
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

/// Predicts the time and memory of published runs, and fits a system's constants to half of them.
#[derive(Parser)]
#[command(after_help = "Exit code: 2 on bad input, else 0.")]
struct Options {
    /// A TOML file with tables of runs: a row is a configuration
    #[arg(long, value_name = "FILE", requires = "name", required_unless_present_any = ["errors", "fit"])]
    table: Option<PathBuf>,
    /// The table of that file
    #[arg(long, value_name = "TABLE")]
    name: Option<String>,
    /// The system that ran them: meshwork, megatron-deepspeed-a100, fsdp-h100, fsdp-a100 or megatron-h100
    #[arg(long, value_name = "NAME", default_value = "meshwork")]
    system: String,
    /// A line of JSON for each row instead of a table
    #[arg(long)]
    json: bool,
    /// How far all systems are off on their published runs: the table of docs/planner.md
    #[arg(long, conflicts_with_all = ["table", "fit"])]
    errors: bool,
    /// Fit the constants of --system to the even rows of its published runs, and print them and the errors
    #[arg(long, conflicts_with = "table")]
    fit: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match options.run() {
        Ok(text) => show(&text),
        Err(error) => fail(BAD_INPUT, &error),
    }
}

impl Options {
    fn run(&self) -> Result<String, PlanError> {
        match (&self.table, &self.name) {
            _ if self.errors => errors::errors(),
            _ if self.fit => errors::fitted(&self.system),
            (Some(path), Some(name)) => self.rows(path, name),
            _ => Ok(String::new()),
        }
    }

    fn rows(&self, path: &PathBuf, name: &str) -> Result<String, PlanError> {
        let file = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|error| PlanError::File {
            file: file.clone(),
            problem: error.to_string(),
            valid: "use a TOML file with [table.NAME]".into(),
        })?;
        let system = System::known(&self.system)?;
        let rows = Table::from_toml(&file, &text, name)?.rows(name, &system, &mut Counter::default())?;
        let mut shown = String::new();
        if !self.json {
            shown += "row   predicted    measured     off      memory  fits\n";
        }
        for (at, row) in rows.into_iter().enumerate() {
            let measured = row.as_ref().ok().and_then(|row| row.measured);
            let predicted = row.and_then(|row| row.job.predict(&system, &row.cluster));
            shown += &match &predicted {
                _ if self.json => format!("{}\n", table::line(at, &predicted)),
                Ok(step) => {
                    let (measured, off) = measured.map_or((String::new(), String::new()), |seconds| {
                        (format!("{seconds:.4} s"), format!("{:+.1}%", 100.0 * (step.seconds / seconds - 1.0)))
                    });
                    let fits = if step.fits { "yes" } else { "no" };
                    format!(
                        "{at:>3} {:>9.4} s {measured:>11} {off:>7} {:>8.1} GB  {fits}\n",
                        step.seconds,
                        step.memory / 1e9
                    )
                }
                Err(error) => format!("{at:>3} {error}\n"),
            };
        }
        Ok(shown)
    }
}
