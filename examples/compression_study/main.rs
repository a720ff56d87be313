//! The effect of compression between four stages on training: the study of Rudakov et al. (arXiv:2401.07788) on small
//! models, which one rank simulates.
//!
//! `cargo run --release --features digits --example compression_study -- --results FILE` continues an interrupted
//! study; with `--write` it renews the tables and the picture of `docs/compression.md`.

mod conclusions;
mod report;
mod results;
mod settings;
mod tasks;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use results::{Key, Results};
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tasks::{Digits, Language, Length, Task};

/// A command line.
#[derive(Debug, Parser)]
struct Options {
    /// The file of results, a line for each run
    #[arg(long, value_name = "FILE", default_value = "examples/compression_study/results.jsonl")]
    results: PathBuf,
    /// What to train
    #[arg(long, default_value = "all", value_parser = ["all", "language", "digits"])]
    task: String,
    /// Runs of each setting
    #[arg(long, value_name = "N", default_value = "5")]
    seeds: u64,
    /// A setting to run, by its name in the table; all if none is given
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Shorter runs, for a first look: their results do not compare with those of full ones
    #[arg(long)]
    quick: bool,
    /// Train nothing: write the tables into docs/compression.md and the picture into docs/img
    #[arg(long)]
    write: bool,
}

fn main() -> ExitCode {
    if let Err(fault) = meshwork::train::processes::require_alone("compression_study") {
        eprintln!("error: {fault}");
        return ExitCode::from(2);
    }
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    if options.write {
        return write(&Results::read(&options.results)?);
    }
    let length = if options.quick { Length::QUICK } else { Length::FULL };
    let mut tasks: Vec<Box<dyn Task>> = Vec::new();
    if options.task != "digits" {
        eprintln!("training the model of the first text");
        tasks.push(Box::new(Language::new(length)?));
    }
    if options.task != "language" {
        tasks.push(Box::new(Digits::new(length)));
    }
    let wanted = |name: &str| options.only.is_empty() || options.only.iter().any(|only| only == name);
    let mut runs = Vec::new();
    // All settings with one seed before any with two.
    for (seed, task) in (1..=options.seeds).flat_map(|seed| tasks.iter().map(move |task| (seed, task))) {
        let settings = settings::all(task.steps(), task.samples()).into_iter().filter(|setting| wanted(&setting.name));
        runs.extend(settings.map(|setting| ((task.name().to_owned(), setting.name.clone(), seed), task, setting)));
    }
    let done = Results::read(&options.results)?;
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} runs  {msg}  ETA {eta}")?;
    let bar = ProgressBar::new(runs.len() as u64).with_style(style);
    for (key, task, setting) in runs {
        if !done.0.contains_key(&key) {
            bar.set_message(describe(&key));
            let scores = task.run(setting.compress, key.2).map_err(|error| format!("{}: {error}", describe(&key)))?;
            Results::append(&options.results, &key, scores)?;
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    print!("{}", report::markdown(&Results::read(&options.results)?));
    Ok(())
}

fn describe((task, setting, seed): &Key) -> String {
    format!("{task} {setting}, seed {seed}")
}

fn write(results: &Results) -> Result<(), Box<dyn Error>> {
    let document = Path::new("docs/compression.md");
    fs::write(document, report::renewed(&fs::read_to_string(document)?, results)?)?;
    Ok(fs::write("docs/img/compression_study.svg", report::picture(results))?)
}
