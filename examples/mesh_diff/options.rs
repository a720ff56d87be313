//! The command line of the comparison: two meshes, and the settings of the trainer.

use clap::{Arg, ArgAction, ArgMatches, Command};
use meshwork::diff::Comparison;
use meshwork::train::config::{self, Args, ConfigError, Fault, parse_mesh};
use meshwork::train::load;
use std::ffi::OsString;

/// A command line, parsed but not yet checked.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether `--help` was given.
    pub help: bool,
    matches: ArgMatches,
    faults: Vec<Fault>,
}

fn command() -> Command {
    let flag = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help).allow_negative_numbers(true)
    };
    let many = |arg: Arg| arg.action(ArgAction::Append);
    Command::new("mesh_diff")
        .arg(many(flag("mesh", "dp=2,tp=2,pp=2", "Degrees of the axes dp, tp, pp, cp, ep; given twice, for side A and side B")))
        .arg(flag("steps", "N", "Steps to compare").default_value("3").value_parser(steps))
        .arg(flag("config", "FILE.toml", "Settings in TOML sections, for both sides; gpt_train --help lists them"))
        .arg(flag("data", "PATH", "Short for --set data.path=PATH"))
        .arg(many(flag("set", "section.key=value", "Overrides one key on both sides; later ones win")))
        .arg(many(flag("set-a", "section.key=value", "Overrides one key on side A only")))
        .arg(many(flag(
            "set-b",
            "section.key=value",
            "Overrides one key on side B only: another schedule, other micro-batches, sequence parallelism",
        )))
        .arg(flag("numerics", "fast|canonical", "Short for --set training.numerics=VALUE"))
        .arg(flag(
            "break",
            "OP[:backward]",
            "Changes one element by one ulp on side B, in the first operation of that name: its output, or with :backward the \
             first gradient that it gives",
        ))
        .arg(many(flag(
            "device",
            "cpu|cuda[:N]|cuda-emulated[:SEED[:DEVICES]]",
            "Where the ranks compute, as gpt_train has it; given twice, for side A and side B",
        )))
        .after_help(
            "Trains on both meshes, step by step in turn, and compares every value.\n\n\
             Exit code: 1 if canonical numerics diverge or a run fails, 2 on bad input, else 0.",
        )
}

/// The text that `--help` prints.
pub fn usage(program: &str) -> String {
    config::help(command(), program)
}

impl Options {
    /// Parses the arguments after the program's name. Errors are kept, to be reported with all others.
    pub fn parse<T: Into<OsString>>(args: impl IntoIterator<Item = T>) -> Self {
        let (matches, mut faults) = config::parse_all(command(), args);
        let meshes: Vec<&str> = given(&matches, "mesh").collect();
        if meshes.len() != 2 {
            let problem = match meshes.len() {
                0 => "two meshes are compared, and none is given".to_owned(),
                given => format!("two meshes are compared, not {given}"),
            };
            faults.push(Fault::new("--mesh", meshes.join(" "), problem, "use --mesh A --mesh B"));
        }
        Self { help: matches.get_flag("help"), matches, faults }
    }

    /// The trainer's arguments for one side, in a world of as many `ranks`.
    fn side(&self, mesh: &str, own: &str, device: Option<&str>, ranks: Option<usize>) -> Args {
        let one =
            |flag: &str, name| given(&self.matches, name).map(|value| format!("--{flag}={value}")).collect::<Vec<_>>();
        let numerics = given(&self.matches, "numerics").map(|value| format!("--set=training.numerics={value}"));
        let mut args = vec![format!("--mesh={mesh}")];
        for flag in ["config", "data", "set"] {
            args.extend(one(flag, flag));
        }
        args.extend(device.map(|device| format!("--device={device}")));
        args.extend(numerics);
        args.extend(one("set", own));
        // A comparison goes on without no rank.
        args.push("--set=parallelism.elastic=off".to_owned());
        Args { ranks, ..Args::parse(args) }
    }

    /// Sets up the comparison.
    ///
    /// # Errors
    /// Every error of the command line, the file and the data, of both sides; common errors are reported once.
    pub fn load(self) -> Result<Comparison, ConfigError> {
        let meshes: Vec<&str> = given(&self.matches, "mesh").collect();
        let (mut sides, mut faults) = (Vec::new(), self.faults.clone());
        let devices: Vec<&str> = given(&self.matches, "device").collect();
        if devices.len() > 2 {
            let problem = format!("two sides are compared, and {} devices are given", devices.len());
            faults.push(Fault::new("--device", devices.join(" "), problem, "give one for both, or one for each"));
        }
        let ranks = |mesh: &&str| parse_mesh(mesh).ok()?[..4].iter().copied().try_fold(1, usize::checked_mul);
        let ranks = meshes.iter().filter_map(ranks).max();
        for (at, (mesh, own)) in meshes.iter().zip(["set-a", "set-b"]).enumerate() {
            match load(&self.side(mesh, own, devices.get(at).or(devices.last()).copied(), ranks)) {
                Ok(side) => sides.push(side),
                Err(error) => error.faults.into_iter().for_each(|fault| {
                    if !faults.contains(&fault) {
                        faults.push(fault);
                    }
                }),
            }
        }
        if !faults.is_empty() {
            return Err(ConfigError { faults });
        }
        let [a, b] = <[_; 2]>::try_from(sides).unwrap_or_else(|_| unreachable!("a side for each of two meshes"));
        let steps = self.matches.get_one("steps").copied().unwrap_or(1);
        let fault = self.matches.get_one::<String>("break");
        Comparison::new([a, b], steps, fault.map(String::as_str)).map_err(|mut fault| {
            if fault.key == "--mesh" {
                fault.value = meshes.join(" ");
            }
            ConfigError { faults: vec![fault] }
        })
    }
}

/// The values of a flag, in order.
fn given<'a>(matches: &'a ArgMatches, name: &str) -> impl Iterator<Item = &'a str> {
    matches.get_many::<String>(name).into_iter().flatten().map(String::as_str)
}

fn steps(value: &str) -> Result<u64, &'static str> {
    value.parse().ok().filter(|&steps| steps > 0).ok_or("expected 1 or more")
}
