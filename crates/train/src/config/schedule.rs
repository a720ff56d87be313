//! The schedule of the pipeline: one by name, one over replicated stages, or one of the user's own.

use meshwork_engine::TrainError;
use meshwork_pipeline::{CheckError, Lowered, Schedule, lower};
use std::fs;

use super::Config;
use super::fault::Fault;
use super::sections::Pipeline;
use super::settings::Settings;

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
    if config.pipeline.vertical_sync && settings.sound(&[VERTICAL, NAME]) && config.pipeline.schedule != "pipedream" {
        let problem = format!("does not go with {NAME} = {:?}", config.pipeline.schedule);
        settings.fault(VERTICAL, true, problem, format!("use {NAME} = \"pipedream\", or leave it out"));
    }
    if let Some(path) = settings.given::<String>(FILE) {
        match own(&path, canonical, config, settings) {
            Ok(schedule) => {
                config.pipeline.num_microbatches = schedule.micros;
                config.pipeline.schedule.clone_from(&schedule.name);
                config.pipeline.own_schedule = Some(schedule);
            }
            Err((problem, valid)) => settings.fault(FILE, &path, problem, valid),
        }
    }
    let replicas = config.pipeline.replication.clone();
    if replicas.is_empty() || !settings.sound(&[REPLICATION, STAGES, NAME]) {
        return;
    }
    let pp = config.parallelism.pp;
    let ranks = replicas.iter().fold(0usize, |sum, &count| sum.saturating_add(count));
    let wrong = if ranks != pp || replicas.contains(&0) {
        Some((
            format!("puts stages on {ranks} ranks, not {STAGES} = {pp}"),
            format!("use numbers of at least 1 that add up to {pp}"),
        ))
    } else if config.pipeline.schedule != "1f1b" || settings.given::<String>(FILE).is_some() {
        let name = &config.pipeline.schedule;
        Some((format!("does not go with {NAME} = {name:?}"), format!("use {NAME} = \"1f1b\"")))
    } else if canonical && replicas.iter().any(|&count| count > 1) {
        let problem = "replicas take micro-batches in turn: none holds a whole subtree of the samples, as canonical numerics needs";
        Some((
            problem.to_owned(),
            "use training.numerics = \"fast\", or dp for replicas of the whole pipeline".to_owned(),
        ))
    } else {
        None
    };
    if let Some((problem, valid)) = wrong {
        config.pipeline.replication.clear();
        settings.faults.push(Fault::new(REPLICATION, format!("{replicas:?}"), problem, valid));
        settings.distrust(REPLICATION);
    }
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

/// The schedule in a file, or what is wrong with it and what would be valid.
fn own(path: &str, canonical: bool, config: &Config, settings: &Settings) -> Result<Schedule, (String, String)> {
    let how = || "docs/schedules.md shows the text form; `schedules --load FILE` draws where it is stuck".to_owned();
    let text = fs::read_to_string(path)
        .map_err(|error| (format!("cannot be read: {error}"), "use the path of a schedule".to_owned()))?;
    let schedule: Schedule = text.parse().map_err(|error| (format!("{error}"), how()))?;
    let lowered: Lowered = lower(&schedule).map_err(|error| (first_line(&error), how()))?;
    let pp = config.parallelism.pp;
    if settings.sound(&[STAGES]) && schedule.ranks != pp {
        return Err((
            format!("is for {} ranks, not {STAGES} = {pp}", schedule.ranks),
            format!("use pp = {}", schedule.ranks),
        ));
    }
    if schedule.steps != 1 || !schedule.weights.is_synchronous() {
        let problem = "is no single synchronous step: steps that overlap are generated from a name";
        return Err((problem.to_owned(), "use one with weights: flush and steps: 1".to_owned()));
    }
    if schedule.is_forward_only() {
        return Err(("has no backward: nothing would be learnt".to_owned(), "use one with backwards".to_owned()));
    }
    if let Some(name) = settings.given::<String>(NAME) {
        return Err((format!("is one schedule, and {NAME} = {name:?} another"), "use one of the two".to_owned()));
    }
    if let Some(micros) = settings.given::<usize>(MICROS).filter(|&micros| micros != schedule.micros) {
        return Err((
            format!("has {} micro-batches, not {MICROS} = {micros}", schedule.micros),
            format!("use {MICROS} = {}, or leave it out", schedule.micros),
        ));
    }
    if let Some(chunks) =
        settings.given::<usize>(CHUNKS).filter(|&chunks| pp.saturating_mul(chunks) != schedule.stages())
    {
        return Err((
            format!("has {} stages over {} ranks, not {CHUNKS} = {chunks} on each", schedule.stages(), schedule.ranks),
            format!("leave out {CHUNKS}"),
        ));
    }
    if canonical && (!lowered.weight_gradients_in_order() || schedule.replicas.iter().any(|&count| count > 1)) {
        let problem = "adds gradients in another order than that of the micro-batches, which canonical numerics needs";
        return Err((problem.to_owned(), "use training.numerics = \"fast\"".to_owned()));
    }
    Ok(schedule)
}

/// A fault takes one line, so the grid of ranks that wait for each other is left out.
fn first_line(error: &CheckError) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().trim_end_matches(':').to_owned()
}
