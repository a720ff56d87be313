//! Trains a small ResNet or VGG on the 8×8 handwritten digits of the UCI repository, through the pipeline:
//! `cargo run --release --features digits --example digits -- --model resnet --pp 2 --schedule gpipe --micro 4 --recompute`.

use meshwork::train::classify::{self, Epoch, Images, Options, usage};
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

/// Bad input.
const BAD_INPUT: u8 = 2;
/// A failure while running.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args_os().skip(1)) {
        Ok(options) => options,
        Err(error) => return fail(BAD_INPUT, &error),
    };
    if options.help {
        return show(&usage("cargo run --release --features digits --example digits --"));
    }
    // Every fifth image is held out: 359 of 1797.
    let (train, held_out) = digits().hold_out(5);
    let Options { model, schedule, pp, dp, micros, recompute, .. } = &options;
    let begun = show(&format!(
        "{model} on {} images, {} held out; {schedule}, pp={pp} dp={dp}, {micros} micro-batches{}\n",
        train.len(),
        held_out.len(),
        if *recompute { ", activations recomputed" } else { "" }
    ));
    if begun != ExitCode::SUCCESS {
        return begun;
    }
    let started = Instant::now();
    let tell = |epoch: &Epoch| {
        let Epoch { epoch, loss, held_out, peak_bytes } = epoch;
        let (accuracy, memory) = (100.0 * held_out.accuracy, *peak_bytes as f64 / f64::from(1 << 20));
        let seconds = started.elapsed().as_secs_f64();
        _ = show(&format!(
            "epoch {epoch:2} | loss {loss:.4} | held out: loss {:.4}, accuracy {accuracy:.1}% | peak {memory:.1} MiB | {seconds:.0} s\n",
            held_out.loss
        ));
    };
    match classify::train(&options.network(), &options.settings(train.len()), &train, &held_out, tell) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => fail(FAILED, &error),
    }
}

/// The digits, as the crate `smartcore` ships them: 64 numbers from 0 to 16 for each, here from 0 to 1.
fn digits() -> Images {
    let all = smartcore::dataset::digits::load_dataset();
    let pixels = all.data.iter().map(|pixel| pixel / 16.0).collect();
    Images::new([8, 8, 1], pixels, all.target.iter().map(|&class| class as i32).collect())
}

/// Writes to standard output. A reader that has seen enough and left (`| head`) is no failure.
fn show(text: &str) -> ExitCode {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            fail(FAILED, &format!("cannot write to standard output: {error}"))
        }
        _ => ExitCode::SUCCESS,
    }
}

fn fail(code: u8, error: &dyn std::fmt::Display) -> ExitCode {
    _ = writeln!(io::stderr(), "error: {error}");
    ExitCode::from(code)
}
