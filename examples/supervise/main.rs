//! Runs a program until it has ended well, and starts it again when it fails or is killed. A run that saves goes on
//! from its last checkpoint:
//!
//! ```text
//! cargo run --release --example supervise -- --restarts 20 -- \
//!     mpirun -n 4 target/release/examples/gpt_train --mesh dp=4 --set checkpoint.dir=run --set checkpoint.resume=true
//! ```
//! Where hosts may not come back, `--ranks` asks how many ranks there is room for, and `{ranks}` is replaced by that.
//! docs/clusters.md says when it is needed.

mod child;
#[path = "../shared/output.rs"]
mod output;

use child::{in_words, room, signal, wait};
use clap::{Arg, ArgAction, Command as Cli};
use meshwork::train::config::{Fault, help, parse_all};
use output::{BAD_INPUT, FAILED, fail, show, tell};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A program that fails sooner is not started again at once.
const SOON: Duration = Duration::from_secs(1);

/// The word that is replaced by the number of ranks.
const RANKS: &str = "{ranks}";

fn cli() -> Cli {
    Cli::new("supervise")
        .arg(
            Arg::new("restarts")
                .long("restarts")
                .value_name("N")
                .default_value("20")
                .value_parser(clap::value_parser!(u64))
                .help("The most times that the program is started again"),
        )
        .arg(Arg::new("ranks").long("ranks").value_name("COMMAND").help(
            "A command for sh that prints how many ranks there is room for, asked before each start: {ranks} in the program's words",
        ))
        .arg(
            Arg::new("command")
                .value_name("COMMAND")
                .action(ArgAction::Append)
                .last(true)
                .help("The program, after --"),
        )
}

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let (matches, mut faults) = parse_all(cli(), args);
    if matches.get_flag("help") {
        return show(&help(cli(), "cargo run --release --example supervise --"));
    }
    let command: Vec<String> = matches.get_many("command").into_iter().flatten().cloned().collect();
    if command.is_empty() {
        faults.push(Fault::new(
            "COMMAND",
            "",
            "there is none",
            "give a program after --, as in: supervise -- mpirun -n 4 gpt_train",
        ));
    }
    let ranks = matches.get_one::<String>("ranks");
    if ranks.is_some() && !command.iter().any(|word| word.contains(RANKS)) {
        let valid = "use it, as in: supervise --ranks 'wc -l <hosts' -- mpirun -n {ranks} gpt_train";
        faults.push(Fault::new("--ranks", "", "no word of the program has {ranks}", valid));
    }
    if !faults.is_empty() {
        let faults: Vec<String> = faults.iter().map(Fault::to_string).collect();
        return fail(BAD_INPUT, &faults.join("\n"));
    }
    let restarts = matches.get_one::<u64>("restarts").copied().unwrap_or_default();
    let stop = Arc::new(AtomicBool::new(false));
    let asked = stop.clone();
    // The first Ctrl-C is passed on; the program ends in its own way.
    if let Err(error) = ctrlc::set_handler(move || asked.store(true, Ordering::Relaxed)) {
        return fail(FAILED, &format_args!("signals cannot be handled: {error}"));
    }
    for restart in 0.. {
        let begun = Instant::now();
        let command = match ranks.map_or(Ok(None), |ask| room(ask).map(Some)) {
            Ok(None) => command.clone(),
            Ok(Some(ranks)) => command.iter().map(|word| word.replace(RANKS, &ranks.to_string())).collect(),
            Err(why) if restart < restarts && !stop.load(Ordering::Relaxed) => {
                tell(&format_args!("supervise: --ranks: {why}, asked again: {} of {restarts}", restart + 1));
                thread::sleep(SOON);
                continue;
            }
            Err(why) => return fail(FAILED, &format_args!("--ranks: {why}")),
        };
        // A group of its own, so that nothing of it is left behind.
        let child = Command::new(&command[0]).args(&command[1..]).process_group(0).spawn();
        let ended = child.and_then(|mut child| {
            let ended = wait(&mut child, &stop);
            signal(&child, "KILL"); // ranks whose mpirun was killed
            ended
        });
        let ended = match ended {
            Ok(ended) => ended,
            Err(error) => return fail(BAD_INPUT, &format_args!("{} cannot be started: {error}", command[0])),
        };
        match ended.code() {
            Some(code @ (0 | 2)) => return ExitCode::from(code as u8), // well, or bad input
            code if restart == restarts || stop.load(Ordering::Relaxed) => {
                return ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(FAILED));
            }
            _ => {}
        }
        tell(&format_args!("supervise: {}, start {} of {restarts} more", in_words(ended), restart + 1));
        thread::sleep(SOON.saturating_sub(begun.elapsed()));
    }
    unreachable!("the last restart returns")
}
