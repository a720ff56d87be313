//! Compares the values that two meshes compute:
//! `cargo run --release --features diff --example mesh_diff -- --mesh dp=1 --mesh dp=2,tp=2,pp=2`. docs/mesh_diff.md
//! explains the output.

mod options;
#[path = "../shared/output.rs"]
mod output;

use meshwork::train::processes::require_alone;
use options::{Options, usage};
use output::{BAD_INPUT, FAILED, fail, show, show_fitted, tell};
use std::process::ExitCode;

fn main() -> ExitCode {
    let options = Options::parse(std::env::args_os().skip(1));
    if options.help {
        return show_fitted(&usage("cargo run --release --features diff --example mesh_diff --"));
    }
    if let Err(fault) = require_alone("mesh_diff") {
        return fail(BAD_INPUT, &fault);
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
