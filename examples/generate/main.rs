//! Continues a text with a trained model, on any mesh, with a cache of keys and values:
//! `cargo run --release --example generate -- --model DIR --prompt "..." --tokens 100 --mesh tp=2`. docs/generation.md
//! says more.

mod options;
#[path = "../shared/output.rs"]
mod output;

use meshwork::train::generate::{TextStream, Trained, continue_text};
use options::{Options, usage};
use output::{BAD_INPUT, FAILED, fail, fail_together, show, tell};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The exit code of a program ended by Ctrl-C in a shell.
const INTERRUPTED: i32 = 130;

fn main() -> ExitCode {
    let options = Options::parse(std::env::args_os().skip(1));
    if options.help {
        return show(&usage("cargo run --release --example generate --"));
    }
    let trained =
        match Trained::open_at(options.compression, &options.model, options.tokenizer.as_deref(), options.settings) {
            Ok(trained) => trained,
            Err(error) => return fail(BAD_INPUT, &error),
        };
    let leads = trained.config.leads();
    trained.config.notices.iter().filter(|_| leads).for_each(|notice| tell(&format_args!("note: {notice}")));
    let encoded = match options.chat {
        true => trained.encode_chat(&options.prompt, options.system.as_deref()),
        false => trained.encode_with(&options.prompt, options.special_tokens),
    };
    let prompt = match encoded {
        Ok(prompt) => prompt,
        Err(fault) => return fail(BAD_INPUT, &fault),
    };
    let stop = Arc::new(AtomicBool::new(false));
    let asked = stop.clone();
    // The second Ctrl-C ends the program. Without a handler, the first one ends it at once, which loses nothing.
    _ = ctrlc::set_handler(move || {
        if asked.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED);
        }
    });

    let mut shown = if leads && !options.chat { show(&options.prompt) } else { ExitCode::SUCCESS };
    let mut stream = TextStream::new(&trained, &prompt);
    let done = continue_text(&trained, &prompt, options.tokens, options.sampling, &stop, |token| {
        if show(&stream.push(token)) != ExitCode::SUCCESS {
            stop.store(true, Ordering::Relaxed);
            shown = ExitCode::from(FAILED);
        }
    });
    let done = match done {
        Ok(done) => done,
        Err(error) => {
            _ = show(&if leads { "\n" } else { "" });
            return fail_together(&trained.config, &error);
        }
    };
    if !leads {
        return ExitCode::SUCCESS;
    }
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
