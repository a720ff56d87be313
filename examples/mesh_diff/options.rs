//! The command line of the comparison: two meshes, and all that the trainer takes.

use super::{Break, Error, Program, Report, Side, compare_programs};
use crate::config::{Args, Config, ConfigError, Fault, choose_from};
use crate::data::Data;
use crate::load;
use std::ffi::OsString;

/// A command line, read but not yet held against anything.
///
/// ```
/// use meshwork_train::diff::Options;
///
/// let options = Options::parse(["--mesh", "dp=1", "--mesh", "dp=2,tp=2", "--steps", "5", "--break", "layer_norm"]);
/// assert_eq!(options.meshes, ["dp=1", "dp=2,tp=2"]);
/// assert_eq!((options.steps, options.fault.as_deref()), (5, Some("layer_norm")));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// `--mesh`, given twice: side A, side B.
    pub meshes: Vec<String>,
    /// `--steps N`: steps to compare. `training.steps`, from which learning rates derive, stays what it is.
    pub steps: u64,
    /// `--break OP` or `--break OP:backward`.
    pub fault: Option<String>,
    /// Whether `--help` was asked for.
    pub help: bool,
    /// Arguments of the trainer that hold for both sides, and for each alone.
    both: Vec<String>,
    alone: [Vec<String>; 2],
    faults: Vec<Fault>,
}

const FLAGS: [&str; 11] = [
    "--mesh",
    "--steps",
    "--config",
    "--data",
    "--device",
    "--set",
    "--set-a",
    "--set-b",
    "--numerics",
    "--break",
    "--help",
];

/// The text that `--help` prints.
pub fn usage(program: &str) -> String {
    format!(
        "Usage: {program} --mesh A --mesh B [--steps N] [--config FILE.toml] [--data PATH]\n    \
         [--set section.key=value]... [--set-a section.key=value]... [--set-b section.key=value]...\n    \
         [--numerics fast|canonical] [--break OP[:backward]] [--device cpu] [--help]\n\n\
         Trains on both meshes, step by step in turn, and compares every value.\n\n\
         --mesh      degrees of the axes dp, tp, pp; given twice, for side A and side B\n\
         --steps     steps to compare. Default: {DEFAULT_STEPS}\n\
         --config    settings in TOML sections, for both sides; gpt_train --help lists them\n\
         --data      short for --set data.path=PATH\n\
         --set       overrides one key on both sides; later ones win\n\
         --set-a     overrides one key on side A only\n\
         --set-b     overrides one key on side B only: another schedule, other micro-batches, sequence parallelism\n\
         --numerics  short for --set training.numerics=VALUE\n\
         --break     changes one element by one ulp on side B, in the first operation of that name: its output, or\n            \
         with :backward the first gradient that it gives\n\
         --device    where the ranks compute\n\n\
         Exit code: 1 if canonical numerics diverge or a run fails, 2 on bad input, else 0.\n"
    )
}

/// Steps that are compared unless told otherwise.
const DEFAULT_STEPS: u64 = 3;

impl Options {
    /// Reads the arguments after the program's name. Faults are kept, to be reported with all others.
    pub fn parse<T: Into<OsString>>(args: impl IntoIterator<Item = T>) -> Self {
        let mut parsed = Self {
            meshes: Vec::new(),
            steps: DEFAULT_STEPS,
            fault: None,
            help: false,
            both: Vec::new(),
            alone: Default::default(),
            faults: Vec::new(),
        };
        let mut args = args.into_iter().map(|arg| arg.into().to_string_lossy().into_owned()).peekable();
        while let Some(arg) = args.next() {
            let (name, inline) = match arg.split_once('=') {
                Some((name, value)) if name.starts_with("--") => (name, Some(value.to_owned())),
                _ => (&*arg, None),
            };
            let Some(flag) = FLAGS.into_iter().find(|flag| *flag == name) else {
                let known = choose_from(name, &FLAGS);
                parsed.faults.push(Fault::new(name, "", "unknown argument", known));
                if name.starts_with('-') && inline.is_none() {
                    args.next_if(|next| !next.starts_with('-'));
                }
                continue;
            };
            if flag == "--help" {
                parsed.help = true;
                continue;
            }
            match inline.or_else(|| args.next_if(|next| !next.starts_with("--"))) {
                Some(value) => parsed.take(flag, value),
                None => {
                    parsed.faults.push(Fault::new(flag, "", "no value", format!("use {flag} VALUE or {flag}=VALUE")));
                }
            }
        }
        match &parsed.meshes[..] {
            [_, _] => {}
            meshes => {
                let problem = match meshes.len() {
                    0 => "two meshes are compared, and none is given".to_owned(),
                    given => format!("two meshes are compared, not {given}"),
                };
                parsed.faults.push(Fault::new("--mesh", meshes.join(" "), problem, "use --mesh A --mesh B"));
            }
        }
        parsed
    }

    fn take(&mut self, flag: &'static str, value: String) {
        match flag {
            "--mesh" => self.meshes.push(value),
            "--steps" => match value.parse() {
                Ok(steps) if steps > 0 => self.steps = steps,
                _ => self.faults.push(Fault::new(flag, value, "no number of steps", "use 1 or more")),
            },
            "--break" => self.fault = Some(value),
            "--numerics" => self.both.extend(["--set".to_owned(), format!("training.numerics={value}")]),
            "--set-a" => self.alone[0].extend(["--set".to_owned(), value]),
            "--set-b" => self.alone[1].extend(["--set".to_owned(), value]),
            _ => self.both.extend([flag.to_owned(), value]),
        }
    }

    /// All that the comparison needs.
    ///
    /// # Errors
    /// Every fault of the command line, the file and the data, of both sides; one that both have is told once.
    pub fn load(self) -> Result<Comparison, ConfigError> {
        let Self { meshes, steps, fault, both, alone, mut faults, .. } = self;
        let mut sides = Vec::new();
        for (mesh, alone) in meshes.iter().zip(&alone) {
            let mesh = ["--mesh".to_owned(), mesh.clone()];
            match load(&Args::parse(mesh.iter().chain(&both).chain(alone))) {
                Ok(side) => sides.push(side),
                Err(error) => error.faults.into_iter().for_each(|fault| {
                    if !faults.contains(&fault) {
                        faults.push(fault);
                    }
                }),
            }
        }
        let mut comparison = Comparison { sides, steps, fault: None };
        if faults.is_empty() {
            match comparison.programs() {
                Ok([_, b]) => match fault.map(|asked| Break::find(&b, &asked)).transpose() {
                    Ok(fault) => comparison.fault = fault,
                    Err(fault) => faults.push(fault),
                },
                Err(error) => {
                    faults.push(Fault::new(
                        "--mesh",
                        meshes.join(" "),
                        error.to_string(),
                        "use one model on both sides",
                    ));
                }
            }
        }
        if faults.is_empty() { Ok(comparison) } else { Err(ConfigError { faults }) }
    }
}

/// Two sides, ready to be compared.
#[derive(Debug)]
pub struct Comparison {
    sides: Vec<(Config, Data)>,
    steps: u64,
    fault: Option<Break>,
}

impl Comparison {
    /// What the user should know although nothing is wrong, with the side.
    pub fn notices(&self) -> Vec<String> {
        let of = |(side, (config, _)): (char, &(Config, Data))| {
            config.notices.iter().map(|notice| format!("{side}: {notice}")).collect::<Vec<_>>()
        };
        super::SIDES.into_iter().zip(&self.sides).flat_map(of).collect()
    }

    /// Runs both sides and compares them.
    ///
    /// # Errors
    /// A run that fails.
    pub fn run(&self) -> Result<Report, Error> {
        let programs = self.programs()?;
        let side = |at: usize| {
            let (config, data) = &self.sides[at];
            Side::new(config, data)
        };
        let b = Side { hook: self.fault.as_ref().map(Break::hook), ..side(1) };
        let mut report = compare_programs([&side(0), &b], [&programs[0], &programs[1]], self.steps)?;
        report.broken = self.fault.as_ref().and_then(Break::told);
        Ok(report)
    }

    fn programs(&self) -> Result<[Program; 2], Error> {
        let [(a, _), (b, _)] = &self.sides[..] else {
            return Err(Error::Structure(format!("{} sides", self.sides.len())));
        };
        let programs = [Program::new(a)?, Program::new(b)?];
        programs[0].require_same(&programs[1])?;
        Ok(programs)
    }
}
