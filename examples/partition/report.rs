//! A partition as a table and as JSON.

use indicatif::HumanCount;
use meshwork::pipeline::partition::{Layer, Level, Method, Options, Plan, PlannedStage, Profile, States};
use meshwork::tensor::memory::Bytes;
use serde_json::{Value, json};
use std::fmt;

/// The best partition, with the input of the planner. Displayed as a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Time and memory of each layer.
    pub profile: Profile,
    /// The places where the model may be cut.
    pub states: States,
    /// The topology, innermost level first.
    pub levels: Vec<Level>,
    /// The options of the planner.
    pub options: Options,
    /// The partition.
    pub plan: Plan,
}

impl Report {
    /// A JSON object: states, stages of each level (the outermost first), and times of a mini-batch in seconds.
    pub fn json(&self) -> Value {
        let stage = |stage: &PlannedStage| {
            let PlannedStage { start, end, replication, compute_s } = stage;
            json!({ "start": start, "end": end, "replication": replication, "compute_s": compute_s })
        };
        let level = |stages: &Vec<PlannedStage>| json!({ "stages": stages.iter().map(stage).collect::<Vec<_>>() });
        json!({
            "states": self.states.count(),
            "levels": self.plan.levels.iter().map(level).collect::<Vec<_>>(),
            "time_per_stage_s": self.plan.time_per_stage_s,
            "single_machine_s": self.plan.single_machine_s,
            "data_parallel_s": self.plan.data_parallel_s,
        })
    }

    /// `node2 Conv2d .. node18 MaxPool2d`: the first and the last layer of a stage.
    fn layers(&self, stage: &PlannedStage) -> String {
        let layers = self.states.layers(stage.start, stage.end);
        let name = |&layer: &usize| {
            let Layer { id, name, .. } = &self.profile.layers()[layer];
            format!("{id} {}", name.split('(').next().unwrap_or(name).trim())
        };
        match &layers[..] {
            [only] => name(only),
            [first, .., last] => format!("{} .. {}", name(first), name(last)),
            [] => String::new(),
        }
    }

    /// Bytes of a stage's weights, and of the activations that it sends.
    fn sizes(&self, stage: &PlannedStage) -> (f64, f64) {
        let state = |cut: usize| cut.checked_sub(1).map(|state| &self.states.all()[state]);
        let weights = |cut| state(cut).map_or(0.0, |state| state.parameter_bytes);
        let is_last = stage.end == self.states.count();
        let sent = state(stage.end).filter(|_| !is_last).map_or(0.0, |state| state.output_bytes);
        (weights(stage.end) - weights(stage.start), sent)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { profile, states, levels, options, plan } = self;
        let topology: Vec<String> =
            levels.iter().map(|level| format!("{} at {} GB/s", level.machines, level.bytes_per_second / 1e9)).collect();
        let cost = match options.method {
            Method::Code => "computation plus communication (as the published code)",
            Method::Paper => "the longer of computation and communication (as the paper)",
        };
        let sent = match options.activation_compression_ratio {
            None => "sending activations costs nothing".to_owned(),
            Some(1.0) => "activations are sent whole".to_owned(),
            Some(ratio) => format!("activations are sent {ratio} times smaller"),
        };
        writeln!(
            f,
            "{}, {}\nmachines: {}\ncost of a stage: {cost}; {sent}",
            count(profile.layers().len(), "layer"),
            count(states.count(), "state"),
            topology.join(", times "),
        )?;
        for (inside, stages) in plan.levels.iter().enumerate() {
            match plan.levels.len() {
                1 => writeln!(f)?,
                levels => {
                    writeln!(f, "\nlevel {}{}", levels - inside, if inside == 0 { ", the outermost" } else { "" })?
                }
            }
            let rows: Vec<String> = stages.iter().map(|stage| self.layers(stage)).collect();
            let width = rows.iter().map(|row| row.chars().count()).max().unwrap_or(0).max("layers".len());
            writeln!(f, "stage  cuts     {:width$}  machines  compute (s)     weights       sends", "layers")?;
            for (number, (stage, row)) in stages.iter().zip(rows).enumerate() {
                let PlannedStage { start, end, replication, compute_s } = stage;
                let (weights, sent) = self.sizes(stage);
                let cuts = format!("{start}-{end}");
                let (weights, sent) = (size(weights), size(sent));
                writeln!(
                    f,
                    "{number:>5}  {cuts:<7}  {row:width$}  {replication:>8}  {compute_s:>11.6}  {weights:>10}  {sent:>10}"
                )?;
            }
        }
        writeln!(
            f,
            "\nOne mini-batch every {:.6} s.\n{:>8.2} times as fast as one machine ({:.6} s)\n{:>8.2} times as fast as data \
             parallelism on all ({:.6} s)",
            plan.time_per_stage_s,
            plan.speedup_vs_single_machine(),
            plan.single_machine_s,
            plan.speedup_vs_data_parallel(),
            plan.data_parallel_s,
        )
    }
}

/// `1 state`, `1,495 states`.
fn count(number: usize, of: &str) -> String {
    format!("{} {of}{}", HumanCount(number as u64), if number == 1 { "" } else { "s" })
}

/// Bytes in binary units.
fn size(bytes: f64) -> String {
    Bytes(bytes.round() as u64).to_string()
}
