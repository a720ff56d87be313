//! The command line of the planner.

use super::Report;
use crate::config::{ConfigError, Fault, choose_from};
use meshwork_pipeline::partition::{self, Level, Method, PlanError, Profile, ProfileError, States, plan};
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::str::FromStr;
use thiserror::Error;

/// A command line, read but not yet held against a profile.
///
/// ```
/// use meshwork_train::partition::Options;
///
/// let options = Options::parse(["--profile", "vgg16.txt", "--machines", "4,2", "--bandwidth=1e10,1.25e9", "--straight"]);
/// assert_eq!(options.levels[1].machines, 2);
/// assert_eq!(options.levels[1].bytes_per_second, 1.25e9);
/// assert!(options.plan.straight && options.plan.activation_compression_ratio.is_none());
///
/// let error = Options::parse(["--machines", "four", "--bandwidth", "1e9", "--method", "codes"]).load().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "--method codes: unknown; the nearest is code; use one of code, paper\n\
///      --machines four: no list of machines; use whole numbers of at least 1, innermost level first, such as 4 or 4,2\n\
///      --profile: none given; use --profile FILE"
/// );
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// `--profile FILE`
    pub profile: Option<PathBuf>,
    /// `--machines 4,2` and `--bandwidth 1e10,1.25e9`, innermost level first.
    pub levels: Vec<Level>,
    /// `--method`, `--activation-compression-ratio`, `--straight`.
    pub plan: partition::Options,
    /// `--json`
    pub json: bool,
    /// Whether `--help` was asked for.
    pub help: bool,
    faults: Vec<Fault>,
}

/// Why there is no partition. Displayed as one line per fault.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum PartitionError {
    /// The command line.
    #[error(transparent)]
    Arguments(#[from] ConfigError),
    /// The file.
    #[error("--profile {path}, {fault}")]
    Profile {
        /// Its path.
        path: String,
        /// What is wrong with it.
        fault: ProfileError,
    },
    /// The task.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

const FLAGS: [&str; 8] = [
    "--profile",
    "--machines",
    "--bandwidth",
    "--method",
    "--activation-compression-ratio",
    "--straight",
    "--json",
    "--help",
];

/// The text that `--help` prints.
pub fn usage(program: &str) -> String {
    format!(
        "Usage: {program} --profile FILE --machines N[,N]... --bandwidth B[,B]...\n    \
         [--method code|paper] [--activation-compression-ratio R] [--straight] [--json] [--help]\n\n\
         Finds the stages, and the machines of each, whose slowest stage is fastest.\n\n\
         --profile    what each layer takes, in PipeDream's format; gpt_train writes one with --set metrics.layer_profile=FILE\n\
         --machines   machines of each level of the topology, innermost first\n\
         --bandwidth  bytes per second between the machines of each level, innermost first\n\
         --method     cost of a stage: code, computation plus communication; paper, the longer of the two. Default: code\n\
         --activation-compression-ratio\n             \
         by how much activations shrink to be sent, 1 for not at all; without it, sending them costs nothing\n\
         --straight   each stage on one machine\n\
         --json       one JSON object instead of a table\n\n\
         Exit code: 2 on bad input, else 0.\n"
    )
}

impl Options {
    /// Reads the arguments after the program's name. Faults are kept, to be reported together.
    pub fn parse<T: Into<OsString>>(args: impl IntoIterator<Item = T>) -> Self {
        let mut parsed = Self {
            profile: None,
            levels: Vec::new(),
            plan: partition::Options::default(),
            json: false,
            help: false,
            faults: Vec::new(),
        };
        let (mut machines, mut bandwidths) = (None, None);
        let mut args = args.into_iter().map(|arg| arg.into().to_string_lossy().into_owned()).peekable();
        while let Some(arg) = args.next() {
            let (name, inline) = match arg.split_once('=') {
                Some((name, value)) if name.starts_with("--") => (name, Some(value.to_owned())),
                _ => (&*arg, None),
            };
            let Some(flag) = FLAGS.into_iter().find(|flag| *flag == name) else {
                parsed.faults.push(Fault::new(name, "", "unknown argument", choose_from(name, &FLAGS)));
                if name.starts_with('-') && inline.is_none() {
                    args.next_if(|next| !next.starts_with('-'));
                }
                continue;
            };
            match flag {
                "--straight" => parsed.plan.straight = true,
                "--json" => parsed.json = true,
                "--help" => parsed.help = true,
                _ => match inline.or_else(|| args.next_if(|next| !next.starts_with("--"))) {
                    None => {
                        let valid = format!("use {flag} VALUE or {flag}=VALUE");
                        parsed.faults.push(Fault::new(flag, "", "no value", valid));
                    }
                    Some(value) => match flag {
                        "--profile" => parsed.profile = Some(value.into()),
                        "--machines" => machines = Some(value),
                        "--bandwidth" => bandwidths = Some(value),
                        "--method" => parsed.method(&value),
                        _ => parsed.ratio(&value),
                    },
                },
            }
        }
        parsed.levels(machines, bandwidths);
        if parsed.profile.is_none() && !parsed.has_fault("--profile") {
            parsed.faults.push(Fault::new("--profile", "", "none given", "use --profile FILE"));
        }
        parsed
    }

    fn has_fault(&self, flag: &str) -> bool {
        self.faults.iter().any(|fault| fault.key == flag)
    }

    fn method(&mut self, value: &str) {
        match value {
            "code" => self.plan.method = Method::Code,
            "paper" => self.plan.method = Method::Paper,
            _ => self.faults.push(Fault::new("--method", value, "unknown", choose_from(value, &["code", "paper"]))),
        }
    }

    fn ratio(&mut self, value: &str) {
        match value.parse::<f64>() {
            Ok(ratio) if ratio.is_finite() && ratio > 0.0 => self.plan.activation_compression_ratio = Some(ratio),
            _ => {
                let valid = "use a number above 0, such as 1 for none";
                self.faults.push(Fault::new("--activation-compression-ratio", value, "no ratio", valid));
            }
        }
    }

    fn levels(&mut self, machines: Option<String>, bandwidths: Option<String>) {
        let machines =
            self.list("--machines", machines, "machines", "whole numbers", "4 or 4,2", |&machines: &usize| {
                machines > 0
            });
        let bandwidths = self.list(
            "--bandwidth",
            bandwidths,
            "bandwidths",
            "bytes per second",
            "1e9 or 1e10,1.25e9",
            |&bandwidth: &f64| bandwidth.is_finite() && bandwidth >= 1.0,
        );
        match (machines, bandwidths) {
            (Some(machines), Some(bandwidths)) if machines.len() == bandwidths.len() => {
                let levels = machines.into_iter().zip(bandwidths);
                self.levels = levels.map(|(machines, bytes_per_second)| Level { machines, bytes_per_second }).collect();
            }
            (Some(machines), Some(bandwidths)) => {
                let problem = format!("for {} levels, and --machines has {}", bandwidths.len(), machines.len());
                let list = bandwidths.iter().map(f64::to_string).collect::<Vec<_>>().join(",");
                self.faults.push(Fault::new("--bandwidth", list, problem, "give each level both"));
            }
            _ => {}
        }
    }

    /// A list of one number per level.
    fn list<T: FromStr>(
        &mut self,
        flag: &str,
        text: Option<String>,
        what: &str,
        unit: &str,
        such_as: &str,
        is_sound: impl Fn(&T) -> bool,
    ) -> Option<Vec<T>> {
        let Some(text) = text else {
            if !self.has_fault(flag) {
                let valid = format!("use {flag} with {unit}, innermost level first, such as {such_as}");
                self.faults.push(Fault::new(flag, "", "none given", valid));
            }
            return None;
        };
        let number = |text: &str| text.trim().parse().ok().filter(|number| is_sound(number));
        let numbers: Option<Vec<T>> = text.split(',').map(number).collect();
        if numbers.is_none() {
            let valid = format!("use {unit} of at least 1, innermost level first, such as {such_as}");
            self.faults.push(Fault::new(flag, text, format!("no list of {what}"), valid));
        }
        numbers
    }

    /// Reads the profile and plans.
    ///
    /// # Errors
    /// Every fault of the command line at once, or the first of the profile, or of what is asked.
    pub fn load(self) -> Result<Report, PartitionError> {
        let Self { profile, levels, plan: options, mut faults, .. } = self;
        let path = profile.unwrap_or_default();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) => {
                if !path.as_os_str().is_empty() {
                    let problem = format!("cannot be read: {error}");
                    faults.push(Fault::new(
                        "--profile",
                        path.display(),
                        problem,
                        "use a profile in PipeDream's format",
                    ));
                }
                String::new()
            }
        };
        if !faults.is_empty() {
            return Err(ConfigError { faults }.into());
        }
        let refuse = |fault| PartitionError::Profile { path: path.display().to_string(), fault };
        let profile: Profile = text.parse().map_err(refuse)?;
        let states = States::new(&profile)?;
        let plan = plan(&states, &levels, &options)?;
        Ok(Report { profile, states, levels, options, plan })
    }
}
