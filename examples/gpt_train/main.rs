//! Trains a GPT over any mesh, every rank a thread of this process:
//! `cargo run --release --example gpt_train -- --mesh dp=2,tp=4,pp=2`. `--help` lists every setting. Started by
//! `mpirun` or `srun`, its ranks are processes: docs/clusters.md.

mod auto;
mod card;
mod compression;
#[path = "../shared/output.rs"]
mod output;

use meshwork::plan::memory;
use meshwork::train::config::{Args, Config, usage};
use meshwork::train::profile::{self, Profile};
use meshwork::train::{load, plan, train};
use output::{BAD_INPUT, FAILED, fail, fail_together, show, show_fitted, tell};
use signal_hook::consts::SIGTERM;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit code of a program ended by Ctrl-C in a shell.
const INTERRUPTED: i32 = 130;

fn main() -> ExitCode {
    let args = Args::parse(std::env::args_os().skip(1));
    if args.help {
        return show_fitted(&usage("cargo run --release --example gpt_train --"));
    }
    let (args, measured) = match auto::chosen(args) {
        Ok(chosen) => chosen,
        Err(error) => return fail(BAD_INPUT, &error),
    };
    let (config, data) = match load(&args) {
        Ok(loaded) => loaded,
        Err(error) => return fail(BAD_INPUT, &error),
    };
    let leads = config.leads();
    for notice in measured.iter().chain(&config.notices).filter(|_| leads) {
        tell(&format_args!("note: {notice}"));
    }
    if !leads && (args.plan_memory || config.training.steps == 0) {
        return ExitCode::SUCCESS; // the process of rank 0 reports
    }
    if args.plan_memory {
        return match memory::report(&config) {
            Ok(report) => show_fitted(&report),
            Err(error) => fail(FAILED, &error),
        };
    }
    if config.training.steps == 0 {
        return match report(&config) {
            Ok(report) => show_fitted(&report),
            // Nothing has run: there is no such step.
            Err(error) => fail(BAD_INPUT, &error),
        };
    }

    let stop = Arc::new(AtomicBool::new(false));
    if let Err(error) = stop_on_signals(stop.clone(), leads) {
        tell(&format_args!("note: Ctrl-C will end the run at once, not after a step: {error}"));
    }
    if config.checkpoint.dir.is_some() && !config.checkpoint.on_sigterm {
        // Acts as if the signal had no handler.
        let always = Arc::new(AtomicBool::new(true));
        if let Err(error) = signal_hook::flag::register_conditional_default(SIGTERM, always) {
            tell(&format_args!("note: SIGTERM will end the run after a step, not at once: {error}"));
        }
    }
    let outcome = match train(&config, &data, args.metrics.as_deref(), &stop) {
        Ok(outcome) => outcome,
        Err(error) => return fail_together(&config, &error),
    };
    if !outcome.leads {
        return ExitCode::SUCCESS;
    }
    let ending = match outcome.stopped {
        true if outcome.loss.is_none() => show(&"stopped before the first step as asked\n"),
        true => show(&format_args!("stopped after step {} as asked\n", outcome.steps)),
        false if outcome.sample.is_empty() => ExitCode::SUCCESS,
        false => show(&format_args!("\nA sample of the trained model:\n{}\n", outcome.sample)),
    };
    match outcome.profile {
        Some(profile) if ending == ExitCode::SUCCESS => tell_profile(&profile, &config),
        _ => ending,
    }
}

/// The cost of a step before it runs, its time on a card that is not here, and where compression would pay.
fn report(config: &Config) -> Result<String, Box<dyn std::error::Error>> {
    Ok(plan::report(config)? + &card::report(config)? + &compression::report(config)?)
}

/// Prints where the time of a step went, and writes the pictures of the profile to files.
fn tell_profile(profile: &Profile, config: &Config) -> ExitCode {
    let (trace, schedule) = (Path::new(&config.metrics.trace), Path::new(&config.metrics.schedule));
    let plan = match config.plan() {
        Ok(plan) => plan,
        Err(error) => return fail(FAILED, &error),
    };
    match (profile::report(profile, &plan, trace, schedule), compression::saved(profile, config)) {
        (Ok(text), Ok(saved)) => show_fitted(&format!("\n{text}{saved}")),
        (Err(error), _) => fail(FAILED, &error),
        (_, Err(error)) => fail(FAILED, &error),
    }
}

/// The first Ctrl-C, SIGTERM or SIGHUP ends the run after the current step or validation batch; the second one ends it
/// at once.
fn stop_on_signals(stop: Arc<AtomicBool>, leads: bool) -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(move || {
        if stop.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED);
        }
        if leads {
            tell(&"\nstopping after this step; once more to stop at once");
        }
    })
}
