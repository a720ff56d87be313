//! The program of an example, which `cargo test` builds beside the tests.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// The program of an example.
///
/// # Panics
/// It is missing, or older than one of its sources. `cargo test --test NAME` builds no examples, and would test the
/// program of an earlier build.
pub fn program(example: &str) -> PathBuf {
    let test = env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    let program = profile.join("examples").join(format!("{example}{}", env::consts::EXE_SUFFIX));
    let build = format!("build it with `cargo build --workspace --all-features --example {example}`");
    assert!(program.is_file(), "{} is missing: {build}", program.display());
    if let Some(source) = newer_source(&program) {
        panic!("{} is older than {}: {build}", program.display(), source.display());
    }
    program
}

/// A source that has changed since a program was built, or that is gone. Cargo lists the sources of a program, with
/// those of the crates of its workspace, in a file beside it.
pub fn newer_source(program: &Path) -> Option<PathBuf> {
    let built = program.metadata().and_then(|of| of.modified()).ok()?;
    let listed = fs::read_to_string(program.with_extension("d")).ok()?;
    // Spaces in names are escaped.
    let listed = listed.replace("\\ ", "\0");
    let (_, sources) = listed.split_once(": ")?;
    let sources = sources.split_whitespace().map(|source| PathBuf::from(source.replace('\0', " ")));
    let is_newer = |source: &PathBuf| source.metadata().and_then(|of| of.modified()).is_ok_and(|at| at > built);
    let mut changed = sources.filter(|source| is_newer(source) || !source.exists());
    changed.next()
}
