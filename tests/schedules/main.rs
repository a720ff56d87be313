//! The program `schedules` as a user runs it: flags in; standard output, files and exit codes out.

#[path = "../example/mod.rs"]
mod example;

use meshwork::tensor::random;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// (exit code, standard output, standard error) of a command line of words without spaces.
fn run(line: &str) -> (Option<i32>, String, String) {
    let ended = Command::new(example::program("schedules"))
        .args(line.split_whitespace())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ended.status.code(), text(ended.stdout), text(ended.stderr))
}

#[track_caller]
fn succeed(line: &str) -> String {
    let (code, out, err) = run(line);
    assert_eq!((code, &*err), (Some(0), ""), "{line}\n{out}");
    out
}

#[track_caller]
fn object(line: &str) -> Value {
    serde_json::from_str(&succeed(&format!("{line} --json"))).unwrap()
}

#[track_caller]
fn refused(line: &str, message: &str) {
    let (code, out, err) = run(line);
    assert_eq!((code, &*out), (Some(2), ""), "{line}\n{err}");
    assert_eq!(err, format!("error: {message}\n"), "{line}");
}

/// A command line that the parser refuses, with a text that has all of these.
#[track_caller]
fn told(line: &str, texts: &[&str]) {
    let (code, out, err) = run(line);
    assert_eq!((code, &*out), (Some(2), ""), "{line}\n{err}");
    assert!(err.starts_with("error: ") && texts.iter().all(|text| err.contains(text)), "{line}\n{err}");
}

/// A path of this test in the folder for temporary files, removed when it goes.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("meshwork-{}-{name}", std::process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.0).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn one_schedule_is_drawn_with_its_bubble_and_its_memory() {
    assert_eq!(
        succeed("--schedule zb_h1 --pp 2 --micro 3"),
        "zb_h1 over 2 ranks, 3 micro-batches\n\n\
         rank 0 | F0 F1    I0 W0 F2 I1 W1 I2 W2\n\
         rank 1 |    F0 I0 F1 I1 W0 F2 I2 W1 W2\n\n\
         makespan 10, span 10\n\
         bubble 10.0% of the span, 11.1% of the ideal time\n\
         peak activations per rank, in micro-batches: 2 2\n\
         peak weight versions per rank: 1 1\n\
         room for messages between two ranks: 1\n"
    );
    let long = succeed("--schedule=interleaved_1f1b --pp=4 --micro=8 --virtual=3 --steps=2");
    assert!(
        long.starts_with("interleaved_1f1b over 4 ranks of 3 chunks, 2 steps of 8 micro-batches\n\nrank 0 | 0F0 "),
        "{long}"
    );
}

#[test]
fn json_is_one_object_of_known_keys() {
    assert_eq!(
        object("--schedule 1f1b --pp 2 --micro 2 --costs 1,2,1"),
        json!({
            "schedule": "1f1b", "pp": 2, "virtual": 1, "micro": 2, "makespan": 12.0, "span": 12.0,
            "bubble_of_total": 1.0 / 3.0, "bubble_of_ideal": 0.5,
            "peak_activations": [2.0, 1.0], "peak_weight_versions": [1, 1],
            "actions": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
        })
    );
    // Ranks that start and end at different times: the span is shorter than the makespan.
    let value = object("--schedule zb_v --pp 4 --micro 8");
    assert_eq!(
        [&value["makespan"], &value["span"], &value["bubble_of_ideal"], &value["peak_activations"][3]],
        [&json!(25.5), &json!(24.0), &json!(0.0), &json!(4.0)]
    );
    let value = object("--schedule pipedream --pp 3 --micro 6 --steps 2");
    assert_eq!((&value["micro"], &value["peak_weight_versions"]), (&json!(6), &json!([3, 2, 1])));
    assert_eq!(value["actions"][2][2], "2U0");
}

#[test]
fn messages_take_their_time() {
    let makespan = |options: &str| object(&format!("--schedule gpipe --pp 2 --micro 2 {options}"))["makespan"].clone();
    assert_eq!(makespan(""), 9.0);
    // One way there and one back, with the others behind them ..
    assert_eq!(makespan("--transfer 0.5"), 10.0);
    // .. which wait for their senders where nothing overlaps.
    assert_eq!(makespan("--transfer 0.5 --no-overlap"), 11.0);
}

#[test]
fn without_a_schedule_all_are_compared() {
    let table = succeed("--pp 4 --micro 6");
    let row = |name: &str| {
        table.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap_or_else(|| panic!("{table}"))
    };
    let words = |name| row(name).split_whitespace().skip(1).collect::<Vec<_>>();
    assert_eq!(words("gpipe"), ["1", "27", "27", "33.3%", "50.0%", "6", "1"]);
    assert_eq!(words("1f1b"), ["1", "27", "27", "33.3%", "50.0%", "4", "1"]);
    assert!(
        row("dualpipe_v").ends_with("needs at least 8 micro-batches, got 6; gpipe and 1f1b take any number"),
        "{table}"
    );
    assert_eq!(table.lines().count(), 13, "{table}");
    let all = object("--pp 2 --micro 4 --virtual 3");
    let chunks: Vec<&Value> = all["schedules"].as_array().unwrap().iter().map(|one| &one["virtual"]).collect();
    assert_eq!(chunks, [1, 1, 3, 3, 1, 1, 2, 2, 1, 1]);
}

#[test]
fn files_are_written_and_read_again() {
    let [text, svg, trace] = ["own.txt", "own.svg", "own.json"].map(Scratch::new);
    let (own, picture, events) = (text.path(), svg.path(), trace.path());
    let line = format!("--schedule dualpipe_v --pp 2 --micro 4 --save {own} --svg {picture} --trace {events}");
    let drawn = succeed(&line);
    assert_eq!(succeed(&format!("--load {own}")), drawn);
    assert_eq!(object(&format!("--load {own}")), object("--schedule dualpipe_v --pp 2 --micro 4"));
    assert!(svg.text().starts_with("<svg "));
    let trace: Value = serde_json::from_str(&trace.text()).unwrap();
    // A name for the process and each of two tracks, and the computations: of 4 backwards in chunks of 2, some split.
    let events = trace["traceEvents"].as_array().unwrap();
    let computed = object("--schedule dualpipe_v --pp 2 --micro 4")["actions"].as_array().unwrap().clone();
    assert_eq!(events.len(), 3 + computed.iter().map(|row| row.as_array().unwrap().len()).sum::<usize>());
    assert_eq!(events.last().unwrap()["dur"], 500.0);
}

#[test]
fn what_is_asked_for_wrongly_is_refused_with_what_would_be_valid() {
    told("--colour red", &["unexpected argument '--colour' found", "Usage: schedules [OPTIONS]", "try '--help'"]);
    told("--scedule gpipe", &["unexpected argument '--scedule' found", "a similar argument exists: '--schedule'"]);
    told(
        "--schedule 1f2b",
        &[
            "invalid value '1f2b' for '--schedule <NAME>'",
            "gpipe, 1f1b, interleaved_1f1b, breadth_first, zb_h1, zb_h2, zb_v, dualpipe_v, pipedream, pipedream_2bw",
            "a similar value exists: '1f1b'",
        ],
    );
    told("--pp", &["a value is required for '--pp <P>' but none was supplied"]);
    told("--pp 0", &["invalid value '0' for '--pp <P>': expected a whole number of at least 1"]);
    told("--micro=-3", &["invalid value '-3' for '--micro <M>': expected a whole number of at least 1"]);
    told("--json=yes", &["unexpected value 'yes' for '--json' found; no more were expected"]);
    for costs in ["1,1", "1,1,x", "1,1,1,1", "-1,1,1", "0,0,0", "inf,1,1"] {
        let rule = "expected three times F,B,W of at least 0, not all 0, as in 1,1,1";
        told(&format!("--costs {costs}"), &[&format!("invalid value '{costs}' for '--costs <F,B,W>': {rule}")]);
    }
    told("--transfer NaN", &["invalid value 'NaN' for '--transfer <T>': expected a time of at least 0"]);
    told("--svg=", &["a value is required for '--svg <FILE>' but none was supplied"]);
    refused(
        "--schedule gpipe --costs 1e308,1,1",
        "schedule gpipe: its costs add up to more than 1e300 units of time; use a larger unit",
    );
    refused(
        "--schedule interleaved_1f1b --pp 4 --micro 6",
        "schedule interleaved_1f1b over pp=4 needs a multiple of 4 micro-batches, got 6; gpipe and 1f1b take any number",
    );
    refused(
        "--schedule zb_v --virtual 3",
        "schedule zb_v does not run with 3 virtual stages (chunks per rank): it has 2; interleaved_1f1b and breadth_first \
         take any number",
    );
    refused(
        "--schedule gpipe --micro 99999999999",
        "399999999996 micro-batches through stages, and 4 ranks: at most 2097152 and 1024 can be drawn up",
    );
    told("--save x.txt", &["required arguments were not provided", "<--schedule <NAME>|--load <FILE>>"]);
    told("--load x.txt --pp 4", &["the argument '--load <FILE>' cannot be used with", "'--pp <P>'"]);
    let (code, _, err) = run("--load /no/such/file");
    assert_eq!(code, Some(2));
    assert!(err.starts_with("error: cannot read /no/such/file: "), "{err}");
    let own = Scratch::new("wrong.txt");
    std::fs::write(&own.0, "name: x\nranks: 1\nplacement: 0\nmicros: 1\nrank 0: 0F0 0Q0\n").unwrap();
    let (code, _, err) = run(&format!("--load {}", own.path()));
    assert_eq!(code, Some(2));
    assert!(err.contains("wrong.txt: line 5: item 2: \"0Q0\" is no action: "), "{err}");
    std::fs::write(&own.0, "name: x\nranks: 1\nplacement: 0\nmicros: 1\nrank 0: 0F0 0W0\n").unwrap();
    refused(
        &format!("--load {}", own.path()),
        "schedule x: rank 0 runs no input gradient of micro-batch 0 through stage 0 (0I0)",
    );
    let (code, _, err) = run("--schedule gpipe --svg /no/such/folder/x.svg");
    assert_eq!(code, Some(1));
    assert!(err.starts_with("error: cannot write /no/such/folder/x.svg: "), "{err}");
    assert!(succeed("--help").contains("--schedule <NAME>"));
}

/// A cost of 1e9 beside costs of 1 does not give a billion columns, and the output says how wide a column is.
#[test]
fn costs_that_are_far_apart_are_drawn_on_a_coarser_scale() {
    let out = succeed("--schedule 1f1b --pp 2 --micro 2 --costs 1e9,1,1");
    assert!(out.len() < 10_000 && out.contains("rank 0 | F0---") && out.contains("\n(a column is 6000000.01"), "{out}");
}

/// With values of any kind, each run ends with a short text, or with exit code 2 and the reason. Large valid schedules
/// take long, and the crate's own tests cover them.
#[test]
fn any_values_are_answered() {
    let key = random::key(1, "command lines");
    let mut drawn = 0;
    let mut pick = |from: &[&str]| {
        drawn += 1;
        from[(random::uniform(key, drawn) * from.len() as f32) as usize].to_owned()
    };
    let numbers = ["0", "1", "2", "3", "5", "8", "18446744073709551615", "-0.5", "0.25", "1e308", "1e9", "5e-324"];
    let odd = ["", "-1", "NaN", "inf", "x", "1,1", "--json"];
    let schedules = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v", "pipedream_2bw", "?"];
    for _ in 0..64 {
        let mut options = Vec::new();
        while options.len() < 5 && pick(&["", "", "", "", "end"]).is_empty() {
            let mut number = |_| if pick(&["", "", "", "odd"]).is_empty() { pick(&numbers) } else { pick(&odd) };
            let values: Vec<String> = (0..3).map(&mut number).collect();
            options.push(match &*pick(&["count", "count", "costs", "schedule", "switch"]) {
                "count" => {
                    format!("{}={}", pick(&["--pp", "--micro", "--virtual", "--steps", "--transfer"]), values[0])
                }
                "costs" => format!("--costs={}", values.join(",")),
                "schedule" => format!("--schedule={}", pick(&schedules)),
                _ => pick(&["--json", "--no-overlap", "--colour", "-"]),
            });
        }
        let line = options.join(" ");
        let (code, out, err) = run(&line);
        match code {
            Some(0) => assert!(err.is_empty() && out.len() < 1 << 20, "{line}\n{err}"),
            Some(2) => assert!(err.starts_with("error: ") && out.is_empty(), "{line}\n{err}"),
            _ => panic!("{line}: {code:?}\n{err}"),
        }
    }
}
