//! Draws, prices and compares pipeline schedules:
//! `cargo run --release --example schedules -- --schedule zb_v --pp 4 --micro 8`. docs/schedules.md shows the output.

mod options;
#[path = "../shared/output.rs"]
mod output;
mod report;

use clap::Parser;
use options::Options;
use output::{BAD_INPUT, FAILED, fail, show};
use std::process::ExitCode;

/// A function that produces the content of a file.
type Content = fn(&[report::Row]) -> String;

fn main() -> ExitCode {
    // On --help this exits with code 0, and on an invalid command line with code 2.
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
