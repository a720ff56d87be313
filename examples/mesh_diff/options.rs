//! The command line of the comparison: two meshes, and all that the trainer takes.

use meshwork::train::config::{Args, ConfigError, Fault, choose_from};
use meshwork::train::diff::Comparison;
use meshwork::train::load;
use std::ffi::OsString;

/// A command line, read but not yet held against anything.
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
        if !faults.is_empty() {
            return Err(ConfigError { faults });
        }
        let [a, b] = <[_; 2]>::try_from(sides).unwrap_or_else(|_| unreachable!("a side for each of two meshes"));
        Comparison::new([a, b], steps, fault.as_deref()).map_err(|mut fault| {
            if fault.key == "--mesh" {
                fault.value = meshes.join(" ");
            }
            ConfigError { faults: vec![fault] }
        })
    }
}
