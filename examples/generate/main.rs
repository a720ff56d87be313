//! Continues a text by a trained model, on any mesh, with a cache of keys and values:
//! `cargo run --release --example generate -- --model DIR --prompt "..." --tokens 100 --mesh tp=2`. docs/generation.md says more.

mod options;

use meshwork::train::generate::{TextStream, Trained, continue_text};
use options::{Options, usage};
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Bad input.
const BAD_INPUT: u8 = 2;
/// A failure while running.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    let options = Options::parse(std::env::args_os().skip(1));
    if options.help {
        return show(&usage("cargo run --release --example generate --"));
    }
    let trained = match Trained::open(&options.model, options.tokenizer.as_deref(), options.settings) {
        Ok(trained) => trained,
        Err(error) => return fail(BAD_INPUT, &error),
    };
    let prompt = match trained.encode(&options.prompt) {
        Ok(prompt) => prompt,
        Err(fault) => return fail(BAD_INPUT, &fault),
    };
    let stop = Arc::new(AtomicBool::new(false));
    let asked = stop.clone();
    // Without a handler Ctrl-C ends the program at once, which is no loss.
    _ = ctrlc::set_handler(move || asked.store(true, Ordering::Relaxed));

    let mut shown = show(&options.prompt);
    let mut stream = TextStream::new(&trained, &prompt);
    let done = continue_text(&trained, &prompt, options.tokens, options.sampling, &stop, |token| {
        if show(&stream.push(token)) != ExitCode::SUCCESS {
            stop.store(true, Ordering::Relaxed);
            shown = ExitCode::from(FAILED);
        }
    });
    let done = match done {
        Ok(done) => done,
        Err(error) => return fail(FAILED, &format_args!("\n{error}")),
    };
    let ended = show(&format_args!("{}\n", stream.finish()));
    let speed = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    tell(&format_args!(
        "{} tokens of the prompt at {:.0} tokens/s, {} more at {:.1} tokens/s, {} bytes of keys and values on rank 0",
        done.prompt,
        speed(done.prompt, done.prompt_time),
        done.drawn,
        speed(done.drawn.saturating_sub(1), done.time),
        done.cache_bytes,
    ));
    if shown == ExitCode::SUCCESS { ended } else { shown }
}

/// Writes to standard output at once. A reader that closes the pipe (`| head`) is not a failure.
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
