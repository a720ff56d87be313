//! Predicts training on a cluster that is not here:
//! `cargo run --release --example plan -- --cluster dgx-h100 --preset llama3-70b --tokens-per-batch 4M`.
//! docs/planner.md says more.

mod best;
#[path = "../report/chart.rs"]
#[allow(dead_code, reason = "the bars are for reports of runs")]
mod chart;
mod errors;
mod goodput;
mod machine;
mod options;
#[path = "../shared/output.rs"]
mod output;
mod picture;
mod rows;

use clap::Parser;
use meshwork::plan::PlanError;
use options::Options;
use output::{BAD_INPUT, fail, show};
use std::process::ExitCode;

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(text) => show(&text),
        Err(error) => fail(BAD_INPUT, &error),
    }
}

fn run(options: &Options) -> Result<String, PlanError> {
    match (&options.cluster, &options.table, &options.name) {
        (Some(cluster), ..) => best::best(options, cluster),
        _ if options.measure.is_some() => machine::written(options),
        _ if options.goodput => goodput::goodput(options),
        _ if options.errors => errors::errors(),
        _ if options.fit => errors::fitted(options.system()),
        (_, Some(path), Some(name)) => rows::rows(options, path, name),
        _ => Ok(String::new()),
    }
}
