//! Compares what two meshes compute, value by value:
//! `cargo run --release --example mesh_diff -- --mesh dp=1 --mesh dp=2,tp=2,pp=2`. docs/mesh_diff.md says how to read it.

mod options;

use options::{Options, usage};
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

/// Bad input.
const BAD_INPUT: u8 = 2;
/// A failure while running, or numbers that differ although they must not.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    let options = Options::parse(std::env::args_os().skip(1));
    if options.help {
        return show(&usage("cargo run --release --example mesh_diff --"));
    }
    let comparison = match options.load() {
        Ok(comparison) => comparison,
        Err(error) => return fail(BAD_INPUT, &error),
    };
    for notice in comparison.notices() {
        tell(&format_args!("note: {notice}"));
    }
    match comparison.run() {
        Ok(report) => match (show(&report), report.holds()) {
            (shown, false) if shown == ExitCode::SUCCESS => ExitCode::from(FAILED),
            (shown, _) => shown,
        },
        Err(error) => fail(FAILED, &error),
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

/// Writes a line to standard error. A closed standard error is ignored.
fn tell(text: &dyn Display) {
    _ = writeln!(io::stderr(), "{text}");
}

fn fail(code: u8, error: &dyn Display) -> ExitCode {
    tell(&format_args!("error: {error}"));
    ExitCode::from(code)
}
