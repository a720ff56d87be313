//! The measured time and memory of each layer: the input profile of PipeDream's planner (`metrics.layer_profile`).
//!
//! A few steps of one micro-batch on one rank, with the embedding, each transformer block, and the head with the loss
//! as a stage of its own, one after the other. The start and end of each action of the pipeline's interpreter then give
//! the time of one layer.

use crate::config::Config;
use crate::data::Data;
use crate::error::RunError;
use crate::metrics::MetricsError;
use meshwork_core::Rank;
use meshwork_core::comm::thread::{self, Options, WorldError};
use meshwork_engine::{ModelPlan, TrainError, Trainer, dry_run};
use meshwork_nn::Batch;
use meshwork_pipeline::partition::{Layer, Profile};
use meshwork_pipeline::{ActionKind, Phase, forward_only};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Steps that are timed, after one untimed step that fills the caches.
const STEPS: usize = 5;

/// Bytes of a number that is kept or sent.
const FLOAT: usize = 4;

/// Measures the layers of a model on one rank, with micro-batches of the size that the configuration has. Times are
/// medians of a few steps. A micro-batch is what PipeDream calls a mini-batch. A table that both ends of the model
/// share is counted at both.
///
/// # Errors
/// A step that fails.
pub fn layers(config: &Config, data: &Data) -> Result<Profile, WorldError<RunError>> {
    let options = Options { timeout: config.comm.timeout() };
    let mut measured = thread::run(1, options, |world| {
        let (model, micro_batch) = (config.model(), config.training.micro_batch_size);
        let plan = dry_run::one_layer_a_stage(&*model, &config.plan()?, micro_batch)?;
        let rank = Arc::new(Rank::new(&plan.mesh, world.communicator().clone())?);
        let trainer = Trainer::new(model.clone(), &plan, rank, config.device.open(config.training.dtype))?;
        let times = times(data, trainer, plan.partition.len())?;
        let stages = ModelPlan::new(model.clone(), &plan)?;
        let activations = stages.activations(&Batch::blank(&model.fields(), micro_batch))?;
        let described = |(stage, [forward_ms, backward_ms]): (usize, [f64; 2])| -> Result<Layer, RunError> {
            let on_rank = |number: usize| usize::from(number != stage);
            let placement: Vec<usize> = (0..plan.partition.len()).map(on_rank).collect();
            let alone = stages.local_model(&forward_only(&placement, 1), 0)?;
            let parameters: usize = alone.declarations.specs().iter().map(|spec| spec.global_elements()).sum();
            let (id, name) = names(config, stage);
            let loss = micro_batch * size_of::<f64>();
            let behind = activations.get(stage).map_or(loss, |cut| cut.shape.count() * cut.dtype.size());
            Ok(Layer {
                id,
                name,
                forward_ms,
                backward_ms,
                activation_bytes: behind as f64,
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

/// Milliseconds of forward and backward of each stage.
fn times(data: &Data, mut trainer: Trainer, stages: usize) -> Result<Vec<[f64; 2]>, TrainError> {
    let mut all = vec![[const { Vec::new() }; 2]; stages];
    for step in 0..=STEPS {
        let batch = data.batch(step as u64, trainer.samples().len(), trainer.samples());
        let mut began = Instant::now();
        trainer.observed_step(&batch, |event| {
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
    // Rounded to the microsecond, because finer digits are noise.
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
