//! What is asked for on the command line, and the schedules that it stands for.

use crate::report::{Outcome, Row};
use std::ffi::OsString;

use meshwork::pipeline::{Costs, Generator, Schedule, Shape, by_name, simulate};

pub const USAGE: &str = "\
Draws, prices and compares pipeline schedules.

usage: schedules [OPTIONS]

  --schedule NAME   gpipe, 1f1b, interleaved_1f1b, breadth_first, zb_h1, zb_h2, zb_v, dualpipe_v, pipedream or
                    pipedream_2bw; without it, a table compares all of them
  --pp P            pipeline ranks [4]
  --micro M         micro-batches of one optimizer step [8]
  --virtual V       chunks per rank, for interleaved_1f1b and breadth_first [2]
  --costs F,B,W     times of forward, input gradient and weight gradient of all layers of a rank for one
                    micro-batch [1,1,1]; chunks share them equally
  --transfer T      time of a message between two ranks [0]
  --no-overlap      messages keep their sender busy
  --steps N         optimizer steps in a row, with no barrier between them [1]
  --load FILE       a schedule of your own, in the text form, instead of --schedule, --pp, --micro, --virtual, --steps
  --save FILE       writes the schedule in the text form
  --svg FILE        writes a picture
  --trace FILE      writes a trace for Perfetto or chrome://tracing (a unit of time is a millisecond)
  --json            prints one JSON object
  --help            prints this
";

pub enum Command {
    Run(Box<Options>),
    Help,
}

/// More ranks than this, or more of micro-batches through stages, are no schedule that anybody looks at.
const MAX_RANKS: usize = 1 << 10;
const MAX_PARTS: usize = 1 << 21;

/// What is asked for. None where it is not.
#[derive(Default)]
pub struct Options {
    schedule: Option<Generator>,
    pp: Option<usize>,
    micro: Option<usize>,
    virtual_stages: Option<usize>,
    costs: Option<[f64; 3]>,
    transfer: f64,
    no_overlap: bool,
    steps: Option<usize>,
    load: Option<String>,
    pub save: Option<String>,
    pub svg: Option<String>,
    pub trace: Option<String>,
    pub json: bool,
}

/// Takes a value; else says what it expects.
type Setter = fn(&mut Options, &str) -> Result<(), String>;

impl Options {
    pub fn parse(args: impl Iterator<Item = OsString>) -> Result<Command, String> {
        // What is no Unicode is no option either, and is shown as far as it can be.
        let mut args = args.map(|arg| arg.to_string_lossy().into_owned());
        let mut options = Self::default();
        while let Some(arg) = args.next() {
            // Both `--pp 4` and `--pp=4`.
            let (flag, attached) = match arg.split_once('=') {
                Some((flag, value)) => (flag.to_string(), Some(value.to_string())),
                None => (arg, None),
            };
            if ["--json", "--no-overlap", "--help", "-h"].contains(&flag.as_str()) {
                if let Some(value) = attached {
                    return Err(format!("{flag} takes no value, got {value:?}"));
                }
                match flag.as_str() {
                    "--json" => options.json = true,
                    "--no-overlap" => options.no_overlap = true,
                    _ => return Ok(Command::Help),
                }
                continue;
            }
            let known = "--schedule, --pp, --micro, --virtual, --costs, --transfer, --no-overlap, --steps, --load, --save, \
                         --svg, --trace, --json, --help";
            let Some(set) = Self::setter(&flag) else {
                return Err(format!("{flag:?} is no option; known: {known}"));
            };
            let value = attached.or_else(|| args.next()).ok_or_else(|| format!("{flag} needs a value"))?;
            set(&mut options, &value).map_err(|expected| format!("{flag} {value}: expected {expected}"))?;
        }
        let own = [options.schedule.is_some(), options.pp.is_some(), options.micro.is_some()];
        let own = own.into_iter().chain([options.virtual_stages.is_some(), options.steps.is_some()]);
        if options.load.is_some() && own.into_iter().any(|given| given) {
            return Err(
                "--load brings a schedule as it is: leave out --schedule, --pp, --micro, --virtual and --steps".into(),
            );
        }
        if options.save.is_some() && !options.is_single() {
            return Err("--save writes one schedule: give --schedule or --load".to_string());
        }
        Ok(Command::Run(Box::new(options)))
    }

    /// How a flag takes its value.
    fn setter(flag: &str) -> Option<Setter> {
        Some(match flag {
            "--schedule" => |options, value| {
                options.schedule = Some(by_name(value).map_err(|error| format!("one of {}", error.known.join(", ")))?);
                Ok(())
            },
            "--pp" => |options, value| count(value).map(|n| options.pp = Some(n)),
            "--micro" => |options, value| count(value).map(|n| options.micro = Some(n)),
            "--virtual" => |options, value| count(value).map(|n| options.virtual_stages = Some(n)),
            "--steps" => |options, value| count(value).map(|n| options.steps = Some(n)),
            "--transfer" => |options, value| time(value).map(|t| options.transfer = t),
            "--costs" => |options, value| {
                let times: Result<Vec<f64>, String> = value.split(',').map(time).collect();
                let costs = times.ok().and_then(|times| <[f64; 3]>::try_from(times).ok());
                let costs = costs.filter(|costs| costs.iter().sum::<f64>() > 0.0);
                options.costs = Some(costs.ok_or("three times F,B,W of at least 0, not all 0, as in 1,1,1")?);
                Ok(())
            },
            "--load" => |options, value| path(value).map(|path| options.load = Some(path)),
            "--save" => |options, value| path(value).map(|path| options.save = Some(path)),
            "--svg" => |options, value| path(value).map(|path| options.svg = Some(path)),
            "--trace" => |options, value| path(value).map(|path| options.trace = Some(path)),
            _ => return None,
        })
    }

    /// Whether one schedule is asked for, and not a table of all.
    pub fn is_single(&self) -> bool {
        self.schedule.is_some() || self.load.is_some()
    }

    /// The schedules that are asked for, on paper; in a table, or why not.
    pub fn results(&self) -> Result<Vec<Row>, String> {
        if let Some(path) = &self.load {
            let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {path}: {error}"))?;
            let schedule: Schedule = text.parse().map_err(|error| format!("{path}: {error}"))?;
            return Ok(vec![Ok(self.run(schedule)?)]);
        }
        if let Some(generator) = self.schedule {
            return Ok(vec![Ok(self.generate(generator)?)]);
        }
        let outcome = |generator| self.generate(generator).map_err(|error| (generator, error));
        Ok(Generator::ALL.map(outcome).into())
    }

    fn generate(&self, generator: Generator) -> Result<Outcome, String> {
        let (shape, steps) = (self.shape(generator), self.steps.unwrap_or(1));
        let factors = [shape.virtual_stages, shape.micros, steps];
        let parts = factors.into_iter().fold(shape.pp, usize::saturating_mul);
        if shape.pp > MAX_RANKS || parts > MAX_PARTS {
            return Err(format!(
                "{parts} micro-batches through stages, and {} ranks: at most {MAX_PARTS} and {MAX_RANKS} can be drawn up",
                shape.pp
            ));
        }
        self.run(generator.build_steps(shape, steps).map_err(|error| error.to_string())?)
    }

    fn shape(&self, generator: Generator) -> Shape {
        let shape = generator.shape(self.pp.unwrap_or(4), self.micro.unwrap_or(8));
        // In a table, the number of chunks is for those schedules that have a choice.
        let asked = self.virtual_stages.filter(|_| self.is_single() || generator.chooses_virtual_stages());
        Shape { virtual_stages: asked.unwrap_or(shape.virtual_stages), ..shape }
    }

    fn run(&self, schedule: Schedule) -> Result<Outcome, String> {
        // Proved first: costs are of its stages, which must be there.
        let report = meshwork::pipeline::lower(&schedule).map_err(|error| error.to_string())?.report().clone();
        let [forward, input, weight] = self.costs.unwrap_or([1.0; 3]);
        let costs = Costs {
            transfer: self.transfer,
            overlap: !self.no_overlap,
            ..Costs::per_rank(&schedule, forward, input, weight)
        };
        let timeline = simulate(&schedule, &costs).map_err(|error| error.to_string())?;
        Ok(Outcome { schedule, report, timeline })
    }
}

fn count(value: &str) -> Result<usize, String> {
    value.parse().ok().filter(|&n| n > 0).ok_or_else(|| "a whole number of at least 1".to_string())
}

fn time(value: &str) -> Result<f64, String> {
    let time = value.trim().parse().ok().filter(|time: &f64| *time >= 0.0 && time.is_finite());
    time.ok_or_else(|| "a time of at least 0".to_string())
}

fn path(value: &str) -> Result<String, String> {
    if value.is_empty() { Err("a path".to_string()) } else { Ok(value.to_string()) }
}
