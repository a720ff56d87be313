//! Every fault of a command line is told, and the rest is read.

use clap::{Arg, ArgAction, Command, value_parser};
use meshwork_train::config::{Fault, parse_all};

fn faults(args: &[&str]) -> Vec<String> {
    let command = Command::new("test")
        .arg(Arg::new("pp").long("pp").value_parser(value_parser!(u16).range(1..)).allow_negative_numbers(true))
        .arg(Arg::new("model").long("model").value_parser(["resnet", "vgg"]))
        .arg(Arg::new("path").long("path").conflicts_with("model"))
        .arg(Arg::new("quiet").long("quiet").action(ArgAction::SetTrue));
    parse_all(command, args.iter().copied()).1.iter().map(Fault::to_string).collect()
}

#[test]
fn every_kind_of_fault_is_told_and_the_rest_is_read() {
    let all = "--pp, --model, --path, --quiet, --help";
    let unknown = |flag: &str, near: &str| format!("{flag}: unknown flag; the nearest is {near}; use one of {all}");
    let missing = "--model: no value; use --model VALUE or --model=VALUE";
    let cases: [(&[&str], &[&str]); 12] = [
        (&["--pp", "4", "--quiet", "--help"], &[]),
        (&["--quite"], &[&unknown("--quite", "--quiet")]),
        (&["--modle", "vgg", "--pq=3", "--path="], &[&unknown("--modle", "--model"), &unknown("--pq", "--pp")]),
        (&["-xy"], &[&unknown("-x", "--pp")]),
        (&["--path", "here", "here"], &[&format!("here: not a flag; use one of {all}")]),
        (&["--model"], &[missing]),
        (&["--model", "--model", "vgg", "--model"], &[missing, missing]),
        (&["--model="], &[missing]),
        (&["--quiet=yes"], &["--quiet yes: takes no value; use --quiet alone"]),
        (
            &["--pp", "-1", "--pp=x"],
            &[
                "--pp -1: -1 is not in 1..=65535; --help says what --pp takes",
                "--pp x: invalid digit found in string; --help says what --pp takes",
            ],
        ),
        (&["--model", "vg"], &["--model vg: unknown; the nearest is vgg; use one of resnet, vgg"]),
        (
            &["--path", "x", "--model=vgg"],
            &[
                "--path <path>: an argument cannot be used with one or more of the other specified arguments; --help lists the flags",
            ],
        ),
    ];
    for (args, expected) in cases {
        assert_eq!(faults(args), expected, "{args:?}");
    }
}

#[test]
fn the_later_of_two_counts() {
    let command = Command::new("test").arg(Arg::new("path").long("path"));
    let (matches, faults) = parse_all(command, ["--path", "a", "--path=b"]);
    assert_eq!((matches.get_one::<String>("path").map(String::as_str), faults.len()), (Some("b"), 0));
}
