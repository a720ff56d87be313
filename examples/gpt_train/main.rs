//! Trains a GPT over any mesh, every rank a thread of this process:
//! `cargo run --release --example gpt_train -- --mesh dp=2,tp=4,pp=2`. `--help` lists every setting.

use meshwork::train::config::{Args, usage};
use meshwork::train::{load, plan, train};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bad input.
const BAD_INPUT: u8 = 2;
/// A failure while running.
const FAILED: u8 = 1;
/// What shells report for a program ended by Ctrl-C.
const INTERRUPTED: i32 = 130;

fn main() -> ExitCode {
    let args = Args::parse(std::env::args_os().skip(1));
    if args.help {
        println!("{}", usage("cargo run --release --example gpt_train --"));
        return ExitCode::SUCCESS;
    }
    let (config, data) = match load(&args) {
        Ok(loaded) => loaded,
        Err(error) => return fail(BAD_INPUT, &error),
    };
    for notice in &config.notices {
        eprintln!("note: {notice}");
    }
    if config.training.steps == 0 {
        return match plan::report(&config) {
            Ok(report) => {
                print!("{report}");
                ExitCode::SUCCESS
            }
            Err(error) => fail(FAILED, &error),
        };
    }

    let stop = Arc::new(AtomicBool::new(false));
    if let Err(error) = stop_on_ctrl_c(stop.clone()) {
        eprintln!("note: Ctrl-C will end the run at once, not after a step: {error}");
    }
    match train(&config, &data, args.metrics.as_deref(), &stop) {
        Ok(outcome) if outcome.stopped => {
            println!("stopped after step {} as asked", outcome.steps);
            ExitCode::SUCCESS
        }
        Ok(outcome) => {
            println!("\nA sample of the trained model:\n{}", outcome.sample);
            ExitCode::SUCCESS
        }
        Err(error) => fail(FAILED, &error),
    }
}

/// The first Ctrl-C ends the run after the step under way, the second one at once.
fn stop_on_ctrl_c(stop: Arc<AtomicBool>) -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(move || {
        if stop.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED);
        }
        eprintln!("\nstopping after this step; once more to stop at once");
    })
}

fn fail(code: u8, error: &dyn std::fmt::Display) -> ExitCode {
    eprintln!("error: {error}");
    ExitCode::from(code)
}
