//! A page about one or several runs, from the files that `gpt_train --metrics` writes:
//! `cargo run --release --example report -- run.jsonl other.jsonl --out report.html`

mod chart;
mod page;
mod run;

use clap::Parser;
use page::page;
use run::Run;
use std::path::PathBuf;
use std::process::ExitCode;

/// Writes one HTML page with curves, memory, communication, mesh and configuration of runs. It needs no network.
#[derive(Parser)]
struct Options {
    /// Metrics files, each of one run.
    #[arg(required = true)]
    runs: Vec<PathBuf>,
    /// The page to write.
    #[arg(long, default_value = "report.html")]
    out: PathBuf,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match write(&options) {
        Ok(()) => {
            println!("wrote {}", options.out.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn write(Options { runs, out }: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let runs = runs.iter().map(|run| Run::read(run)).collect::<Result<Vec<_>, _>>()?;
    Ok(std::fs::write(out, page(&runs)).map_err(|error| format!("cannot write {}: {error}", out.display()))?)
}
