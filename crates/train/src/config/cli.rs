//! The command line. All settings live in the TOML sections; the few flags here name files, or are short forms of a
//! key.

use super::arguments::parse_all;
use super::fault::Fault;
use clap::{Arg, ArgAction, ArgMatches, Command};
use std::ffi::OsString;
use std::path::PathBuf;

/// A command line, parsed but not yet checked.
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
    /// `--device cpu`, `--device cuda:0`, `--device cuda-emulated`
    pub device: Option<String>,
    /// `--metrics FILE.jsonl`
    pub metrics: Option<PathBuf>,
    /// `--set key=value`, `--data` and `--steps` as (key, value, flag), in their order: later ones win.
    pub assignments: Vec<(String, String, &'static str)>,
    /// Ranks of the world, where it has more than the mesh: two configurations that are compared share it.
    pub ranks: Option<usize>,
    /// Whether `--plan-memory` was given: to report memory instead of training.
    pub plan_memory: bool,
    /// Whether `--help` was given.
    pub help: bool,
    /// Faults of the command line itself; reported together with the faults of the settings.
    pub faults: Vec<Fault>,
}

/// Flags that are short for a key: name, flag, key, name of the value.
const SHORT: [(&str, &str, &str, &str); 2] =
    [("data", "--data", "data.path", "PATH"), ("steps", "--steps", "training.steps", "N")];

/// The flags, for [`Args::parse`] and `--help`.
pub(super) fn command() -> Command {
    let flag = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help).allow_negative_numbers(true)
    };
    let short = SHORT.map(|(name, _, key, value)| {
        let help = format!("Short for --set {key}={value}");
        flag(name, value, "").help(help).action(ArgAction::Append)
    });
    Command::new("gpt_train")
        .arg(flag("config", "FILE.toml", "Settings in TOML sections, as listed below"))
        .arg(flag(
            "mesh",
            "dp=2,tp=4,pp=2",
            "Degrees of the axes dp, tp, pp, cp, ep; axes not named are 1; auto: the fastest on these cores, by steps \
             that it takes",
        ))
        .args(short)
        .arg(flag(
            "device",
            "cpu|cuda[:N]|cuda:CARD|cuda-emulated[:SEED[:DEVICES]]",
            "Where the ranks compute: on this CPU, on GPUs (all ranks on GPU N, or rank r on GPU r modulo their count), or on CUDA devices \
             emulated in host memory, for tests (rank r on device r modulo their count). With --steps 0, cuda:h100 \
             predicts a step on such a card, which need not be there. docs/cuda.md \
             says what is shown of GPUs",
        ))
        .arg(flag("metrics", "FILE.jsonl", "File to write one JSON line per event to"))
        .arg(
            Arg::new("plan-memory").long("plan-memory").action(ArgAction::SetTrue).help(
                "Print what each rank will hold, and the cheapest settings below memory.limit_bytes; do not train",
            ),
        )
        .arg(flag("set", "section.key=value", "Overrides one key; later ones win").action(ArgAction::Append))
}

impl Args {
    /// Reads the arguments after the program's name. Faults are kept, to be reported with all others.
    pub fn parse<T: Into<OsString>>(args: impl IntoIterator<Item = T>) -> Self {
        let (matches, faults) = parse_all(command(), args);
        let one = |name: &str| matches.get_one::<String>(name).cloned();
        let mut parsed = Self {
            config: one("config").map(PathBuf::from),
            mesh: one("mesh"),
            device: one("device"),
            metrics: one("metrics").map(PathBuf::from),
            assignments: Vec::new(),
            ranks: None,
            plan_memory: matches.get_flag("plan-memory"),
            help: matches.get_flag("help"),
            faults,
        };
        parsed.assign(&matches);
        parsed
    }

    /// Collects all assignments to keys, in the order of the command line.
    fn assign(&mut self, matches: &ArgMatches) {
        let given = |name| {
            let places = matches.indices_of(name).into_iter().flatten();
            places.zip(matches.get_many::<String>(name).into_iter().flatten())
        };
        let mut found: Vec<(usize, String, &str, &'static str)> = Vec::new();
        for (name, flag, key, _) in SHORT {
            found.extend(given(name).map(|(place, value)| (place, key.to_owned(), value.as_str(), flag)));
        }
        for (place, text) in given("set") {
            match text.split_once('=') {
                Some((key, value)) => found.push((place, key.trim().to_owned(), value, "--set")),
                None => self.faults.push(Fault::new("--set", text, "no value", "use --set section.key=value")),
            }
        }
        found.sort_by_key(|&(place, ..)| place);
        let pairs = found.into_iter().map(|(_, key, value, flag)| (key, value.trim().to_owned(), flag));
        self.assignments.extend(pairs);
    }
}
