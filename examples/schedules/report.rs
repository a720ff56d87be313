//! Output for schedules, printed and in files.

use meshwork::pipeline::{Generator, Report, Schedule, Timeline, chrome_trace, svg, text_grid};
use serde_json::{Value, json};
use std::fmt::Write;

/// A schedule, the report of its proof, and its simulated timeline.
pub struct Outcome {
    pub schedule: Schedule,
    pub report: Report,
    pub timeline: Timeline,
}

/// A simulated schedule, or the reason why there is none of this shape.
pub type Row = Result<Outcome, (Generator, String)>;

/// A grid with more columns than this is not printed.
const MAX_WIDTH: usize = 4000;

fn timelines(rows: &[Row]) -> Vec<&Timeline> {
    rows.iter().flatten().map(|outcome| &outcome.timeline).collect()
}

/// The text form.
pub fn source(rows: &[Row]) -> String {
    rows.iter().flatten().map(|outcome| outcome.schedule.to_string()).collect()
}

pub fn picture(rows: &[Row]) -> String {
    svg(&timelines(rows))
}

/// A unit of time is a millisecond.
pub fn trace(rows: &[Row]) -> String {
    chrome_trace(&timelines(rows), 1000.0)
}

pub fn json(rows: &[Row], single: bool) -> String {
    let objects: Vec<Value> = rows.iter().flatten().map(Outcome::json).collect();
    let value = if single { objects.into_iter().next().unwrap_or_default() } else { json!({ "schedules": objects }) };
    format!("{value}\n")
}

pub fn text(rows: &[Row], single: bool) -> String {
    if single { rows.iter().flatten().map(Outcome::text).collect() } else { table(rows) }
}

impl Outcome {
    fn virtual_stages(&self) -> usize {
        (0..self.schedule.ranks).map(|rank| self.schedule.stages_of(rank).count()).max().unwrap_or(0)
    }

    fn json(&self) -> Value {
        let Self { schedule, report, timeline } = self;
        let actions = |row: &Vec<_>| row.iter().map(ToString::to_string).collect::<Vec<_>>();
        json!({
            "schedule": schedule.name,
            "pp": schedule.ranks,
            "virtual": self.virtual_stages(),
            "micro": schedule.micros_per_step(),
            "makespan": timeline.makespan(),
            "span": timeline.span(),
            "bubble_of_total": timeline.bubble_of_total(),
            "bubble_of_ideal": timeline.bubble_of_ideal(),
            "peak_activations": timeline.peak_activations(),
            "peak_weight_versions": report.weight_versions,
            "actions": schedule.actions.iter().map(actions).collect::<Vec<_>>(),
        })
    }

    fn text(&self) -> String {
        let Self { schedule, report, timeline } = self;
        let grid = text_grid(timeline);
        let chunks = match self.virtual_stages() {
            1 => String::new(),
            chunks => format!(" of {chunks} chunks"),
        };
        let steps = match schedule.steps {
            1 => String::new(),
            steps => format!("{steps} steps of "),
        };
        let mut text = format!(
            "{} over {} ranks{chunks}, {steps}{} micro-batches\n\n",
            schedule.name,
            schedule.ranks,
            schedule.micros_per_step()
        );
        if grid.lines().all(|line| line.len() <= MAX_WIDTH) {
            _ = writeln!(text, "{grid}");
        } else {
            text.push_str("(too long to draw in text: use --svg or --trace)\n\n");
        }
        let list = |numbers: &[f64]| numbers.iter().map(|&x| number(x)).collect::<Vec<_>>().join(" ");
        let versions: Vec<f64> = report.weight_versions.iter().map(|&x| x as f64).collect();
        _ = writeln!(text, "makespan {}, span {}", number(timeline.makespan()), number(timeline.span()));
        let (total, ideal) = (100.0 * timeline.bubble_of_total(), 100.0 * timeline.bubble_of_ideal());
        _ = writeln!(text, "bubble {total:.1}% of the span, {ideal:.1}% of the ideal time");
        _ = writeln!(text, "peak activations per rank, in micro-batches: {}", list(&timeline.peak_activations()));
        _ = writeln!(text, "peak weight versions per rank: {}", list(&versions));
        _ = writeln!(text, "room for messages between two ranks: {}", report.in_flight);
        text
    }
}

/// A line per schedule: the time of a step and the memory of a rank.
fn table(rows: &[Row]) -> String {
    let header =
        ["schedule", "virtual", "makespan", "span", "of total", "of ideal", "activations", "weights"].map(String::from);
    let mut lines = vec![header.to_vec()];
    for row in rows {
        lines.push(match row {
            Ok(outcome) => {
                let timeline = &outcome.timeline;
                let peak = timeline.peak_activations().into_iter().fold(0.0, f64::max);
                vec![
                    outcome.schedule.name.clone(),
                    outcome.virtual_stages().to_string(),
                    number(timeline.makespan()),
                    number(timeline.span()),
                    format!("{:.1}%", 100.0 * timeline.bubble_of_total()),
                    format!("{:.1}%", 100.0 * timeline.bubble_of_ideal()),
                    number(peak),
                    outcome.report.weight_versions.iter().max().copied().unwrap_or(0).to_string(),
                ]
            }
            Err((generator, error)) => vec![generator.name().to_string(), error.clone()],
        });
    }
    let complete = || lines.iter().filter(|line| line.len() > 2);
    let widths: Vec<usize> = (0..8).map(|i| complete().map(|line| line[i].len()).max().unwrap_or(0)).collect();
    let mut text = "bubble of the span and of the ideal time; activations (micro-batches) and weight versions of the fullest rank\n\n".to_string();
    for line in &lines {
        let mut cells = format!("{:<16}", line[0]);
        match line.as_slice() {
            [_, error] => _ = write!(cells, "  {error}"),
            [_, rest @ ..] => {
                rest.iter().zip(&widths[1..]).for_each(|(cell, width)| _ = write!(cells, "  {cell:>width$}"));
            }
            [] => {}
        }
        _ = writeln!(text, "{}", cells.trim_end());
    }
    text
}

/// Formats a number without the noise of its last bits.
fn number(value: f64) -> String {
    if value >= 1e15 {
        return format!("{value:.4e}");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
