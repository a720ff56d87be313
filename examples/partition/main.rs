//! Finds the layers of each stage, and its number of machines, with PipeDream's planner:
//! `cargo run --release --example partition -- --profile FILE --machines 4 --bandwidth 1e9`. docs/partition.md says how
//! to get a profile.

mod options;
#[path = "../shared/output.rs"]
mod output;
mod report;

use clap::Parser;
use options::Options;
use output::{BAD_INPUT, fail, show};
use std::process::ExitCode;

fn main() -> ExitCode {
    // On --help this exits with code 0, and on an invalid command line with code 2.
    let options = Options::parse();
    let json = options.json;
    match options.load() {
        Ok(report) if json => show(&format_args!("{}\n", report.json())),
        Ok(report) => show(&report),
        Err(error) => fail(BAD_INPUT, &error),
    }
}
