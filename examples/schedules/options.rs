//! The command line, and the schedules that it selects.

use crate::report::{Outcome, Row};
use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use meshwork::pipeline::{Costs, Generator, Schedule, Shape, by_name, simulate};
use std::path::PathBuf;

/// Limits of ranks, and of micro-batches times stages: larger schedules cannot be displayed usefully.
const MAX_RANKS: usize = 1 << 10;
const MAX_PARTS: usize = 1 << 21;

/// Flags that conflict with `--load`, because the file sets them.
const OWN: [&str; 5] = ["schedule", "pp", "micro", "virtual_stages", "steps"];

/// Draws, prices and compares pipeline schedules.
#[derive(Parser)]
#[command(after_help = "Exit code: 2 on bad input, 1 where a file cannot be written, else 0.")]
pub struct Options {
    /// The schedule; without it, a table compares all of them
    #[arg(long, value_name = "NAME", group = "single", value_parser = names().try_map(|name| by_name(&name)))]
    schedule: Option<Generator>,
    /// Pipeline ranks [default: 4]
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = count)]
    pp: Option<usize>,
    /// Micro-batches of one optimizer step [default: 8]
    #[arg(long, value_name = "M", allow_negative_numbers = true, value_parser = count)]
    micro: Option<usize>,
    /// Chunks per rank, for interleaved_1f1b and breadth_first [default: 2]
    #[arg(long = "virtual", value_name = "V", allow_negative_numbers = true, value_parser = count)]
    virtual_stages: Option<usize>,
    /// Times of forward, input gradient and weight gradient of all layers of a rank for one micro-batch; chunks share
    /// them equally
    #[arg(long, value_name = "F,B,W", default_value = "1,1,1", allow_hyphen_values = true, value_parser = costs)]
    costs: [f64; 3],
    /// Time of a message between two ranks
    #[arg(long, value_name = "T", default_value = "0", allow_hyphen_values = true, value_parser = time)]
    transfer: f64,
    /// Messages keep their sender busy
    #[arg(long)]
    no_overlap: bool,
    /// Optimizer steps in a row, with no barrier between them [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = count)]
    steps: Option<usize>,
    /// A schedule of your own, in the text form
    #[arg(long, value_name = "FILE", group = "single", conflicts_with_all = OWN)]
    load: Option<PathBuf>,
    /// Writes the schedule in the text form
    #[arg(long, value_name = "FILE", requires = "single")]
    pub save: Option<PathBuf>,
    /// Writes a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Writes a trace for Perfetto or chrome://tracing (a unit of time is a millisecond)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

impl Options {
    /// Whether one schedule is selected, instead of a table of all.
    pub fn is_single(&self) -> bool {
        self.schedule.is_some() || self.load.is_some()
    }

    /// The selected schedules, simulated; in a table, also the reasons for missing ones.
    pub fn results(&self) -> Result<Vec<Row>, String> {
        if let Some(path) = &self.load {
            let name = path.display();
            let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {name}: {error}"))?;
            let schedule: Schedule = text.parse().map_err(|error| format!("{name}: {error}"))?;
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
        // In a table, the number of chunks applies only to schedules that have a choice.
        let asked = self.virtual_stages.filter(|_| self.is_single() || generator.chooses_virtual_stages());
        Shape { virtual_stages: asked.unwrap_or(shape.virtual_stages), ..shape }
    }

    fn run(&self, schedule: Schedule) -> Result<Outcome, String> {
        // The schedule is proved first, because costs are given per stage and the stages must exist.
        let report = meshwork::pipeline::lower(&schedule).map_err(|error| error.to_string())?.report().clone();
        let [forward, input, weight] = self.costs;
        let costs = Costs {
            transfer: [self.transfer; 2],
            overlap: !self.no_overlap,
            ..Costs::per_rank(&schedule, forward, input, weight)
        };
        let timeline = simulate(&schedule, &costs).map_err(|error| error.to_string())?;
        Ok(Outcome { schedule, report, timeline })
    }
}

fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(Generator::ALL.map(Generator::name))
}

fn count(value: &str) -> Result<usize, &'static str> {
    value.parse().ok().filter(|&n| n > 0).ok_or("expected a whole number of at least 1")
}

fn time(value: &str) -> Result<f64, &'static str> {
    let time = value.trim().parse().ok().filter(|time: &f64| *time >= 0.0 && time.is_finite());
    time.ok_or("expected a time of at least 0")
}

fn costs(value: &str) -> Result<[f64; 3], &'static str> {
    let times: Result<Vec<f64>, _> = value.split(',').map(time).collect();
    let costs = times.ok().and_then(|times| <[f64; 3]>::try_from(times).ok());
    let costs = costs.filter(|costs| costs.iter().any(|&cost| cost > 0.0));
    costs.ok_or("expected three times F,B,W of at least 0, not all 0, as in 1,1,1")
}
