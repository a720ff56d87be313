//! What each layer takes, measured: the profile that PipeDream's planner starts from (`metrics.layer_profile`).
//!
//! A few steps of one micro-batch on one rank, with the embedding, each transformer block, and the head with the loss as a stage
//! of its own, one after the other: what the pipeline's interpreter tells of each action's start and end is then the time of
//! that layer alone.

use crate::config::sections::Pipeline;
use crate::config::{Config, Parallelism};
use crate::data::Data;
use crate::engine::{Blueprint, TrainError};
use crate::metrics::MetricsError;
use crate::step::Trainer;
use meshwork_core::Rank;
use meshwork_core::comm::thread::{self, Options, WorldError};
use meshwork_pipeline::partition::{Layer, Profile};
use meshwork_pipeline::{ActionKind, Generator, Phase, forward_only};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Steps that are timed, after one that is not: it fills the caches.
const STEPS: usize = 5;

/// Bytes of a number that is kept or sent.
const FLOAT: usize = 4;

/// Measures the layers of a model on one rank, with micro-batches of the size that the configuration has. Times are medians of a few
/// steps. A micro-batch is what PipeDream calls a mini-batch. A table that both ends of the model share counts at both.
///
/// # Errors
/// A step that fails.
pub fn layers(config: &Config, data: &Data) -> Result<Profile, WorldError<TrainError>> {
    let config = one_layer_a_stage(config);
    let options = Options { timeout: config.comm.timeout() };
    let mut measured = thread::run(1, options, |world| {
        let blueprint = Blueprint::new(&config)?;
        let rank = Arc::new(Rank::new(blueprint.mesh(), world.communicator().clone())?);
        let trainer = Trainer::new(&config, rank, config.device.open(config.training.dtype))?;
        let times = times(&config, data, trainer)?;
        let micro_batch = config.training.micro_batch_size;
        let described = |(stage, [forward_ms, backward_ms]): (usize, [f64; 2])| -> Result<Layer, TrainError> {
            let on_rank = |number: usize| usize::from(number != stage);
            let placement: Vec<usize> = (0..blueprint.stages()).map(on_rank).collect();
            let alone = blueprint.rank_model(&forward_only(&placement, 1), 0)?;
            let parameters: usize = alone.declarations.specs().iter().map(|spec| spec.global_elements()).sum();
            let boundary = alone.stages[0].1.boundary(micro_batch, config.model.seq_len);
            let (id, name) = names(&config, stage);
            let hidden = boundary.shape.count() * FLOAT;
            let loss = micro_batch * size_of::<f64>();
            Ok(Layer {
                id,
                name,
                forward_ms,
                backward_ms,
                activation_bytes: if stage + 1 == blueprint.stages() { loss } else { hidden } as f64,
                parameter_bytes: (parameters * FLOAT) as f64,
                stage: None,
            })
        };
        times.into_iter().enumerate().map(described).collect::<Result<Vec<_>, _>>()
    })?;
    let layers = measured.pop().unwrap_or_default();
    Ok(Profile::chain(layers).expect("ids differ, and times and sizes are numbers"))
}

/// Writes a profile of layers to a file, in the place of any old one.
///
/// # Errors
/// When it cannot be written.
pub fn write_layers(profile: &Profile, path: &Path) -> Result<(), MetricsError> {
    fs::write(path, profile.to_string()).map_err(|source| MetricsError { path: path.to_path_buf(), source })
}

/// The same model on one rank, in as many stages as it has layers and ends, with one micro-batch a step.
fn one_layer_a_stage(config: &Config) -> Config {
    let mut alone = config.clone();
    alone.parallelism = Parallelism { dp: 1, tp: 1, pp: 1, sequence_parallel: false, ..alone.parallelism };
    let mut partition = vec![1; config.model.num_layers + 2];
    (partition[0], partition[config.model.num_layers + 1]) = (0, 0);
    alone.pipeline = Pipeline::plain(Generator::BreadthFirst, partition.len(), partition);
    alone.training.global_batch_size = alone.training.micro_batch_size;
    alone
}

/// Milliseconds of forward and backward of each stage.
fn times(config: &Config, data: &Data, mut trainer: Trainer) -> Result<Vec<[f64; 2]>, TrainError> {
    let mut all = vec![[const { Vec::new() }; 2]; config.pipeline.partition.len()];
    for step in 0..=STEPS {
        let batch = data.batch(step as u64, config.training.global_batch_size, trainer.rows());
        let mut began = Instant::now();
        trainer.step(&batch, |event| {
            let way = match event.action.kind {
                ActionKind::Forward => 0,
                ActionKind::Backward => 1,
                _ => return,
            };
            match event.phase {
                Phase::Started => began = Instant::now(),
                Phase::Finished if step > 0 => all[event.action.stage][way].push(began.elapsed().as_secs_f64() * 1e3),
                Phase::Finished => {}
            }
        })?;
    }
    Ok(all.into_iter().map(|ways| ways.map(median)).collect())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    // To the microsecond: more is noise.
    times.get(times.len() / 2).map_or(0.0, |time| (time * 1e3).round() / 1e3)
}

/// Id and name of a stage's layer.
fn names(config: &Config, stage: usize) -> (String, String) {
    let model = &config.model;
    let (vocab, hidden, seq) = (model.vocab_size, model.hidden_size, model.seq_len);
    if stage == 0 {
        return ("embedding".to_owned(), format!("Embedding(vocab_size={vocab}, seq_len={seq}, hidden_size={hidden})"));
    }
    if stage > model.num_layers {
        return ("head".to_owned(), format!("HeadAndLoss(hidden_size={hidden}, vocab_size={vocab})"));
    }
    let (heads, ffn) = (model.num_heads, model.ffn_hidden_size);
    (format!("h.{}", stage - 1), format!("Block(hidden_size={hidden}, num_heads={heads}, ffn_hidden_size={ffn})"))
}
