//! Draws, prices and compares pipeline schedules:
//! `cargo run --release --example schedules -- --schedule zb_v --pp 4 --micro 8`. docs/schedules.md shows what it prints.

mod options;
mod report;

use clap::Parser;
use options::Options;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

/// Makes the content of a file.
type Content = fn(&[report::Row]) -> String;

/// Bad input.
const BAD_INPUT: u8 = 2;
/// A file that cannot be written.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    // Ends the program itself on --help, with exit code 0, and on a command line that is wrong, with exit code 2.
    let options = Options::parse();
    let results = match options.results() {
        Ok(results) => results,
        Err(error) => return fail(BAD_INPUT, &error),
    };
    for (path, content) in
        [(&options.save, report::source as Content), (&options.svg, report::picture), (&options.trace, report::trace)]
    {
        if let Some(path) = path
            && let Err(error) = std::fs::write(path, content(&results))
        {
            return fail(FAILED, &format_args!("cannot write {}: {error}", path.display()));
        }
    }
    let single = options.is_single();
    show(&if options.json { report::json(&results, single) } else { report::text(&results, single) })
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
    _ = writeln!(io::stderr(), "error: {error}");
    ExitCode::from(code)
}
