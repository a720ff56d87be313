//! Draws, prices and compares pipeline schedules:
//! `cargo run --release --example schedules -- --schedule zb_v --pp 4 --micro 8`. docs/schedules.md shows what it
//! prints.

mod options;
#[path = "../shared/output.rs"]
mod output;
mod report;

use clap::Parser;
use options::Options;
use output::{BAD_INPUT, FAILED, fail, show};
use std::process::ExitCode;

/// Makes the content of a file.
type Content = fn(&[report::Row]) -> String;

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
