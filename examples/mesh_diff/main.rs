//! Compares the values that two meshes compute:
//! `cargo run --release --features diff --example mesh_diff -- --mesh dp=1 --mesh dp=2,tp=2,pp=2`. docs/mesh_diff.md
//! explains the output.

mod options;
#[path = "../shared/output.rs"]
mod output;

use meshwork::diff::Error;
use meshwork::train::processes::world_of;
use options::{Options, usage};
use output::{BAD_INPUT, FAILED, fail, fail_together, show, show_fitted, tell};
use std::process::ExitCode;

fn main() -> ExitCode {
    let options = Options::parse(std::env::args_os().skip(1));
    if options.help {
        return show_fitted(&usage("cargo run --release --features diff --example mesh_diff --"));
    }
    let comparison = match options.load() {
        Ok(comparison) => comparison,
        Err(error) => return fail(BAD_INPUT, &error),
    };
    let leads = comparison.config().leads();
    for notice in comparison.notices().iter().filter(|_| leads) {
        tell(&format_args!("note: {notice}"));
    }
    match world_of(comparison.config()).map_err(Error::Run).and_then(|world| comparison.run_in(&world)) {
        Ok(None) => ExitCode::SUCCESS, // the process that has rank 0 tells
        Ok(Some(report)) => match (show(&report), report.holds()) {
            (shown, false) if shown == ExitCode::SUCCESS => ExitCode::from(FAILED),
            (shown, _) => shown,
        },
        Err(Error::Run(error)) => fail_together(comparison.config(), &error),
        Err(error) => fail(FAILED, &error),
    }
}
