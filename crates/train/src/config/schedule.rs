//! The schedule of the pipeline: one by name, one over replicated stages, or one of the user's own.

use super::Config;
use super::fault::Fault;
use super::sections::Pipeline;
use super::settings::Settings;
use meshwork_engine::TrainError;
use meshwork_pipeline::{CheckError, Lowered, Schedule, lower};
use std::fs;

const FILE: &str = "pipeline.schedule_file";
const NAME: &str = "pipeline.schedule";
const MICROS: &str = "pipeline.num_microbatches";
const CHUNKS: &str = "pipeline.virtual_stages";
const REPLICATION: &str = "pipeline.replication";
const VERTICAL: &str = "pipeline.vertical_sync";
const STAGES: &str = "parallelism.pp";

impl Pipeline {
    /// The schedule of one step over `pp` ranks.
    ///
    /// # Errors
    /// An unknown name, or a shape that the schedule does not take.
    pub fn build(&self, pp: usize) -> Result<Schedule, TrainError> {
        Ok(self.spec()?.build(pp, self.num_microbatches)?)
    }

    /// Stages over `pp` ranks.
    pub(super) fn stages(&self, pp: usize) -> usize {
        match (&self.own_schedule, &self.replication[..]) {
            (Some(own), _) => own.stages(),
            (None, []) => pp.saturating_mul(self.virtual_stages),
            (None, replicas) => replicas.len(),
        }
    }
}

/// Reads a schedule of the user's own, and checks it and the replicas of stages against the other settings.
pub(crate) fn resolve(config: &mut Config, settings: &mut Settings) {
    let canonical = config.reduction_blocks().is_some();
    let name = config.pipeline.schedule.clone();
    settings.require(&[VERTICAL, NAME], !config.pipeline.vertical_sync || name == "pipedream", || {
        let valid = format!("use {NAME} = \"pipedream\", or leave it out");
        Fault::new(VERTICAL, true, format!("does not go with {NAME} = {name:?}"), valid)
    });
    let file = settings.given::<String>(FILE);
    if let Some(path) = &file {
        match own(path, canonical, config, settings) {
            Ok(schedule) => {
                config.pipeline.num_microbatches = schedule.micros;
                config.pipeline.schedule.clone_from(&schedule.name);
                config.pipeline.own_schedule = Some(schedule);
            }
            Err((problem, valid)) => settings.fault(FILE, path, problem, valid),
        }
    }
    let replicas = &config.pipeline.replication;
    if replicas.is_empty() || !settings.sound(&[REPLICATION, STAGES, NAME]) {
        return;
    }
    let (pp, name) = (config.parallelism.pp, &config.pipeline.schedule);
    let ranks = replicas.iter().fold(0usize, |sum, &count| sum.saturating_add(count));
    let (problem, valid) = if ranks != pp || replicas.contains(&0) {
        let problem = format!("puts stages on {ranks} ranks, not {STAGES} = {pp}");
        (problem, format!("use numbers of at least 1 that add up to {pp}"))
    } else if name != "1f1b" || file.is_some() {
        (format!("does not go with {NAME} = {name:?}"), format!("use {NAME} = \"1f1b\""))
    } else if canonical && replicas.iter().any(|&count| count > 1) {
        let problem = "replicas take micro-batches in turn: none holds a whole subtree of the samples, as canonical numerics needs";
        let valid = "use training.numerics = \"fast\", or dp for replicas of the whole pipeline";
        (problem.to_owned(), valid.to_owned())
    } else {
        return;
    };
    settings.fault(REPLICATION, format!("{replicas:?}"), problem, valid);
    config.pipeline.replication.clear();
}

/// Checks the replicas of stages against the number of micro-batches, once that is known: each replica needs one.
pub(super) fn check_replicas(config: &Config, settings: &mut Settings) {
    let (replicas, micros) = (&config.pipeline.replication, config.pipeline.num_microbatches);
    if let Some(&most) = replicas.iter().max().filter(|&&most| most > micros) {
        let problem = format!("leaves ranks without work: {most} ranks of a stage take {MICROS} = {micros} in turn");
        let valid = format!("use at most {micros} ranks for a stage, or more micro-batches");
        settings.fault(REPLICATION, format!("{replicas:?}"), problem, valid);
    }
}

/// The schedule in a file, or its problem and what would be valid.
fn own(path: &str, canonical: bool, config: &Config, settings: &Settings) -> Result<Schedule, (String, String)> {
    let how = || "docs/schedules.md shows the text form; `schedules --load FILE` draws where it is stuck".to_owned();
    let refuse = |problem: String, valid: &str| Err((problem, valid.to_owned()));
    let text = fs::read_to_string(path)
        .map_err(|error| (format!("cannot be read: {error}"), "use the path of a schedule".to_owned()))?;
    let schedule: Schedule = text.parse().map_err(|error| (format!("{error}"), how()))?;
    let lowered: Lowered = lower(&schedule).map_err(|error| (first_line(&error), how()))?;
    let (pp, ranks, stages, micros) = (config.parallelism.pp, schedule.ranks, schedule.stages(), schedule.micros);
    if settings.sound(&[STAGES]) && ranks != pp {
        return refuse(format!("is for {ranks} ranks, not {STAGES} = {pp}"), &format!("use pp = {ranks}"));
    }
    if schedule.steps != 1 || !schedule.weights.is_synchronous() {
        let problem = "is no single synchronous step: steps that overlap are generated from a name";
        return refuse(problem.to_owned(), "use one with weights: flush and steps: 1");
    }
    if schedule.is_forward_only() {
        return refuse("has no backward: nothing would be learnt".to_owned(), "use one with backwards");
    }
    if let Some(name) = settings.given::<String>(NAME) {
        return refuse(format!("is one schedule, and {NAME} = {name:?} another"), "use one of the two");
    }
    if let Some(other) = settings.given::<usize>(MICROS).filter(|&other| other != micros) {
        let valid = format!("use {MICROS} = {micros}, or leave it out");
        return refuse(format!("has {micros} micro-batches, not {MICROS} = {other}"), &valid);
    }
    if let Some(chunks) = settings.given::<usize>(CHUNKS).filter(|&chunks| pp.saturating_mul(chunks) != stages) {
        let problem = format!("has {stages} stages over {ranks} ranks, not {CHUNKS} = {chunks} on each");
        return refuse(problem, &format!("leave out {CHUNKS}"));
    }
    if canonical && (!lowered.weight_gradients_in_order() || schedule.replicas.iter().any(|&count| count > 1)) {
        let problem = "adds gradients in another order than that of the micro-batches, which canonical numerics needs";
        return refuse(problem.to_owned(), "use training.numerics = \"fast\"");
    }
    Ok(schedule)
}

/// A fault takes one line, so the grid of ranks that wait for each other is left out.
fn first_line(error: &CheckError) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().trim_end_matches(':').to_owned()
}
