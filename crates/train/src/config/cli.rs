//! The command line. All settings live in the TOML sections; the few flags here name files, or are short for a key.

use std::ffi::OsString;
use std::path::PathBuf;

use super::fault::{Fault, choose_from};

/// A command line, read but not yet held against anything.
///
/// ```
/// use meshwork_train::config::Args;
///
/// let args = Args::parse(["--mesh", "dp=2", "--steps=10"]);
/// assert_eq!(args.mesh.as_deref(), Some("dp=2"));
/// assert_eq!(args.assignments, [("training.steps".to_string(), "10".to_string(), "--steps")]);
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Args {
    /// `--config FILE.toml`
    pub config: Option<PathBuf>,
    /// `--mesh dp=2,tp=4,pp=2`
    pub mesh: Option<String>,
    /// `--device cpu`
    pub device: Option<String>,
    /// `--metrics FILE.jsonl`
    pub metrics: Option<PathBuf>,
    /// `--set key=value`, `--data` and `--steps` as (key, value, flag), in their order: later ones win.
    pub assignments: Vec<(String, String, &'static str)>,
    /// Whether `--help` was asked for.
    pub help: bool,
    /// What was wrong with the command line itself; reported with the faults of the settings.
    pub faults: Vec<Fault>,
}

const FLAGS: [&str; 8] = ["--config", "--mesh", "--data", "--steps", "--device", "--metrics", "--set", "--help"];

impl Args {
    /// Reads the arguments after the program's name. Faults are kept, to be reported with all others.
    pub fn parse<T: Into<OsString>>(args: impl IntoIterator<Item = T>) -> Self {
        let mut parsed = Self::default();
        let mut args = args.into_iter().map(|arg| arg.into().to_string_lossy().into_owned()).peekable();
        while let Some(arg) = args.next() {
            let (name, inline) = match arg.split_once('=') {
                Some((name, value)) if name.starts_with("--") => (name, Some(value.to_string())),
                _ => (arg.as_str(), None),
            };
            let Some(flag) = FLAGS.into_iter().find(|flag| *flag == name) else {
                let (problem, valid) = if name.starts_with('-') {
                    ("unknown flag", choose_from(name, &FLAGS))
                } else {
                    ("not a flag", format!("use one of {}", FLAGS.join(", ")))
                };
                parsed.faults.push(Fault::new(name, "", problem, valid));
                // Do not take the value of an unknown flag for a fault of its own.
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
                    let valid = format!("use {flag} VALUE or {flag}=VALUE");
                    parsed.faults.push(Fault::new(flag, "", "no value", valid));
                }
            }
        }
        parsed
    }

    fn take(&mut self, flag: &'static str, value: String) {
        let mut assign = |key: &str, value: &str| {
            self.assignments.push((key.to_string(), value.trim().to_string(), flag));
        };
        match flag {
            "--config" => self.config = Some(value.into()),
            "--mesh" => self.mesh = Some(value),
            "--device" => self.device = Some(value),
            "--metrics" => self.metrics = Some(value.into()),
            "--data" => assign("data.path", &value),
            "--steps" => assign("training.steps", &value),
            _ => match value.split_once('=') {
                Some((key, value)) => assign(key.trim(), value),
                None => {
                    let fault = Fault::new(flag, &value, "no value", "use --set section.key=value");
                    self.faults.push(fault);
                }
            },
        }
    }
}
