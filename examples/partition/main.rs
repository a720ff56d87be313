//! Finds the layers of each stage, and its number of machines, with PipeDream's planner:
//! `cargo run --release --example partition -- --profile FILE --machines 4 --bandwidth 1e9`. docs/partition.md says how to
//! get a profile.

mod options;
mod report;

use clap::Parser;
use options::Options;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

/// Bad input.
const BAD_INPUT: u8 = 2;
/// A failure while running.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    // Ends the program itself on --help, with exit code 0, and on a command line that is wrong, with exit code 2.
    let options = Options::parse();
    let json = options.json;
    match options.load() {
        Ok(report) if json => show(&format_args!("{}\n", report.json())),
        Ok(report) => show(&report),
        Err(error) => fail(BAD_INPUT, &error),
    }
}

/// Writes to standard output. A reader that closes the pipe (`| head`) is not a failure.
fn show(text: &dyn Display) -> ExitCode {
    let mut out = io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            fail(FAILED, &format_args!("cannot write to standard output: {error}"))
        }
        _ => ExitCode::SUCCESS,
    }
}

fn fail(code: u8, error: &dyn Display) -> ExitCode {
    // A closed standard error is ignored.
    _ = writeln!(io::stderr(), "error: {error}");
    ExitCode::from(code)
}
