//! Command lines read by `clap`, with all their faults reported together. clap itself stops at the first.

use super::fault::{Fault, choose_from};
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Command};
use std::error::Error as _;
use std::ffi::OsString;
use std::ops::Range;

/// Reads the arguments after the program's name by the definition `command`, to which it adds the flag `--help`. An
/// invalid argument becomes a fault, and the others are read without it. If an argument is given twice, the later one
/// counts.
///
/// ```
/// use clap::{Arg, Command, value_parser};
/// use meshwork_train::config::parse_all;
///
/// let command = || {
///     let pp = Arg::new("pp").long("pp").value_parser(value_parser!(u16).range(1..)).default_value("2");
///     Command::new("digits").arg(pp).arg(Arg::new("model").long("model").value_parser(["resnet", "vgg"]))
/// };
/// let (matches, faults) = parse_all(command(), ["--pp", "4"]);
/// assert_eq!((matches.get_one::<u16>("pp"), faults.len()), (Some(&4), 0));
///
/// let (matches, faults) = parse_all(command(), ["--modle", "vgg", "--pp=0", "--model", "vg"]);
/// assert_eq!(matches.get_one::<u16>("pp"), Some(&2));
/// let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
/// assert_eq!(
///     faults,
///     [
///         "--modle: unknown flag; the nearest is --model; use one of --pp, --model, --help",
///         "--pp 0: 0 is not in 1..=65535; --help says what --pp takes",
///         "--model vg: unknown; the nearest is vgg; use one of resnet, vgg",
///     ]
/// );
/// ```
pub fn parse_all<T: Into<OsString>>(command: Command, args: impl IntoIterator<Item = T>) -> (ArgMatches, Vec<Fault>) {
    let mut command = with_help(command).no_binary_name(true).args_override_self(true);
    let mut args: Vec<String> = args.into_iter().map(|arg| arg.into().to_string_lossy().into_owned()).collect();
    let mut faults = Vec::new();
    loop {
        let error = match command.try_get_matches_from_mut(&args) {
            Ok(matches) => return (matches, faults),
            Err(error) => error,
        };
        let (fault, wrong) = explain(&command, &error, &args);
        faults.push(fault);
        match wrong {
            Some(range) => drop(args.drain(range)),
            None => return (command.ignore_errors(true).get_matches_from(&args), faults),
        }
    }
}

/// The text that `--help` prints for a program of the name `program`.
pub fn help(command: Command, program: &str) -> String {
    let mut command = with_help(command).bin_name(program).help_template("Usage: {usage}\n\n{options}{after-help}\n");
    command.render_help().to_string()
}

/// `--help` as an ordinary flag, so that it does not end the search for faults.
fn with_help(command: Command) -> Command {
    let help = Arg::new("help").long("help").short('h').action(ArgAction::SetTrue).help("Prints this text");
    command.disable_help_flag(true).arg(help)
}

/// The fault, and the range of the arguments at fault, which are then left out; `None` if they are not known.
fn explain(command: &Command, error: &Error, args: &[String]) -> (Fault, Option<Range<usize>>) {
    // clap names an argument as in its usage: "--mesh <MESH>".
    let shown = text(error, ContextKind::InvalidArg).unwrap_or_default();
    let name = shown.split(' ').next().unwrap_or_default();
    let value = text(error, ContextKind::InvalidValue).unwrap_or_default();
    let given = place(args, name, value);
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let known: Vec<String> =
                command.get_arguments().filter_map(Arg::get_long).map(|long| format!("--{long}")).collect();
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            let (problem, valid) = match name.starts_with('-') {
                true => ("unknown flag", choose_from(name, &known)),
                false => ("not a flag", format!("use one of {}", known.join(", "))),
            };
            (Fault::new(name, "", problem, valid), unknown(args, name))
        }
        ErrorKind::InvalidValue if value.is_empty() => {
            (Fault::new(name, "", "no value", format!("use {name} VALUE or {name}=VALUE")), given)
        }
        ErrorKind::InvalidValue => {
            let known: Vec<&str> = match error.get(ContextKind::ValidValue) {
                Some(ContextValue::Strings(words)) => words.iter().map(String::as_str).collect(),
                _ => Vec::new(),
            };
            (Fault::new(name, value, "unknown", choose_from(value, &known)), given)
        }
        ErrorKind::TooManyValues => (Fault::new(name, value, "takes no value", format!("use {name} alone")), given),
        ErrorKind::ValueValidation => {
            let why = error.source().map_or_else(|| "is not valid".to_owned(), ToString::to_string);
            (Fault::new(name, value, why, format!("--help says what {name} takes")), given)
        }
        // Flags that need or exclude each other.
        _ => {
            let message = error.kind().as_str().unwrap_or("is not valid").to_owned();
            (Fault::new(shown, "", message, "--help lists the flags"), None)
        }
    }
}

fn text(error: &Error, kind: ContextKind) -> Option<&str> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text),
        ContextValue::Strings(texts) => texts.first().map(String::as_str),
        _ => None,
    }
}

/// The place of the flag with this value, as one argument or two. With an empty value, the place of the flag without
/// one.
fn place(args: &[String], name: &str, value: &str) -> Option<Range<usize>> {
    let inline = format!("{name}={value}");
    args.iter().enumerate().find_map(|(at, arg)| match args.get(at + 1) {
        _ if *arg == inline => Some(at..at + 1),
        next if arg == name && next.is_none_or(|next| next.starts_with('-')) && value.is_empty() => Some(at..at + 1),
        Some(next) if arg == name && next == value => Some(at..at + 2),
        _ => None,
    })
}

/// The place of the unknown argument. The argument after an unknown flag counts as its value and not as another fault.
fn unknown(args: &[String], name: &str) -> Option<Range<usize>> {
    let at = args.iter().position(|arg| match arg.strip_prefix(name) {
        Some(rest) => rest.is_empty() || name.starts_with("--") && rest.starts_with('=') || is_short(name),
        None => false,
    })?;
    let value =
        args[at] == name && name.starts_with('-') && args.get(at + 1).is_some_and(|next| !next.starts_with('-'));
    Some(at..at + 1 + usize::from(value))
}

/// `-x`, which clap also finds at the start of `-xyz`.
fn is_short(name: &str) -> bool {
    name.starts_with('-') && !name.starts_with("--")
}
