//! Trains a small ResNet or VGG on the 8×8 handwritten digits of the UCI repository, through the pipeline:
//! `cargo run --release --features digits --example digits -- --model resnet --pp 2 --schedule gpipe --micro 4 --recompute`.

mod options;
mod train;

use meshwork::cpu::Cpu;
use meshwork::diff::{Side, compare_in};
use meshwork::nn::Model;
use meshwork::train::data::Images;
use meshwork::train::processes::world;
use meshwork::train::profile::{self, layers, write_layers};
use options::{Options, SCHEDULE, TRACE, usage};
use std::error::Error;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Steps that `--compare` compares.
const COMPARED: u64 = 2;

fn main() -> ExitCode {
    let options = match Options::read(std::env::args_os().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => match show(&usage("cargo run --release --features digits --example digits --")) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => return fail(1, &error),
        },
        Err(error) => return fail(2, &error),
    };
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => fail(1, &*error),
    }
}

/// Runs the action of the flags; returns whether a comparison succeeded.
fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    // Every fifth image is held out: 359 of 1797.
    let (images, held_out) = digits().hold_out(5);
    let model: Arc<dyn Model> = Arc::new(options.network());
    let plan = options.plan(images.len())?;
    if let Some(other) = options.other(&plan) {
        let larger = if other.mesh.world_size() > plan.mesh.world_size() { &other.mesh } else { &plan.mesh };
        let world = world(larger)?;
        let [a, b] = [plan, other].map(|plan| Side::from_model(model.clone(), plan, &images));
        // Of several processes one tells the result.
        let Some(report) = compare_in(&world, [&a, &b], COMPARED)? else { return Ok(true) };
        show(&report)?;
        return Ok(report.holds());
    }
    let world = world(&plan.mesh)?;
    if let (Some(path), true) = (&options.layer_profile, world.leads()) {
        write_layers(&layers(&model, &plan, &images, Cpu::device(), &AtomicBool::new(false))?, path)?;
    }
    if world.leads() {
        show(&format_args!("{} on {} images, {} held out; {options}\n", options.model, images.len(), held_out.len()))?;
    }
    let profile = train::train(&world, &model, &plan, options.epochs, options.profile, [&images, &held_out])?;
    if let Some(profile) = profile.filter(|_| world.leads()) {
        let text = profile::report(&profile, &plan, Path::new(TRACE), Path::new(SCHEDULE))?;
        show(&format_args!("\n{text}"))?;
    }
    Ok(true)
}

/// The digits of the crate `smartcore`: 64 numbers from 0 to 16 each, scaled to 0 to 1 here.
fn digits() -> Images {
    let all = smartcore::dataset::digits::load_dataset();
    let pixels = all.data.iter().map(|pixel| pixel / 16.0).collect();
    Images::new([8, 8, 1], pixels, all.target.iter().map(|&class| class as i32).collect())
}

/// Writes to standard output. A reader that closes the pipe (`| head`) is not a failure.
fn show(text: &dyn Display) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

fn fail(code: u8, error: &dyn Display) -> ExitCode {
    _ = writeln!(io::stderr(), "error: {error}");
    ExitCode::from(code)
}
