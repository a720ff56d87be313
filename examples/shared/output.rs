//! Standard output, standard error and exit codes of the examples.

use meshwork::train::config::Config;
use meshwork::train::{RunError, processes, terminal};
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

/// The exit code of bad input.
pub const BAD_INPUT: u8 = 2;
/// The exit code of a failure while running.
pub const FAILED: u8 = 1;

/// Writes to standard output at once. A reader that closes the pipe (`| head`) is not a failure.
pub fn show(text: &dyn Display) -> ExitCode {
    let mut out = io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            fail(FAILED, &format_args!("cannot write to standard output: {error}"))
        }
        _ => ExitCode::SUCCESS,
    }
}

/// The same for a table or a text whose lines may be wider than the terminal.
#[allow(dead_code, reason = "not every example has one")]
pub fn show_fitted(text: &str) -> ExitCode {
    show(&terminal::fit(text, terminal::columns()))
}

/// Writes a line to standard error. A closed standard error is ignored.
pub fn tell(text: &dyn Display) {
    _ = io::stderr().write_all(format!("{text}\n").as_bytes()); // at once: other processes write too
}

/// Reports the error of a run. Of several processes, which all have it, one does; the others give it a moment, because
/// a launcher may end all when the first has ended.
#[allow(dead_code, reason = "not every example runs over processes")]
pub fn fail_together(config: &Config, error: &RunError) -> ExitCode {
    let code = if processes::cannot_meet(error) { BAD_INPUT } else { FAILED };
    if config.tells(error) {
        return fail(code, error);
    }
    thread::sleep(Duration::from_secs(1));
    ExitCode::from(code)
}

/// Reports an error, and returns the exit code.
pub fn fail(code: u8, error: &dyn Display) -> ExitCode {
    tell(&format_args!("error: {error}"));
    ExitCode::from(code)
}
