//! The measured time and memory of each layer: the input profile of PipeDream's planner (`metrics.layer_profile`).
//!
//! It runs a few steps of one micro-batch on one rank. Each layer is a stage of its own, and so are the parts that the
//! model binds to its beginning and its end. The start and end of each action of the pipeline's interpreter then give
//! the time of one layer.

use crate::error::{OutputError, RankError};
use crate::stop;
use meshwork_core::Rank;
use meshwork_engine::{Plan, TrainError, Trainer, dry_run};
use meshwork_nn::{Batch, BatchSource, Model, StageSpec};
use meshwork_pipeline::partition::{Layer, Profile};
use meshwork_pipeline::{ActionKind, Phase};
use meshwork_tensor::{Declarations, Device, ParamSpec};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Steps that are timed, after one untimed step that fills the caches.
const STEPS: usize = 5;

/// Measures the layers of a model on this thread, with micro-batches of the plan's size from `data`, on a device of the
/// plan's precision. Times are medians of a few steps. A micro-batch is what PipeDream calls a mini-batch.
/// A parameter that two layers share is counted at both.
///
/// The layers are `layer.0`, `layer.1`, ..., named after their parameters. `input` comes before them, with the
/// parts that the model binds to its beginning; `output` after them, with those that it binds to its end, and the loss.
///
/// ```
/// use meshwork_engine::Plan;
/// use meshwork_models::vgg::VggConfig;
/// use meshwork_nn::Model;
/// use meshwork_cpu::Cpu;
/// use meshwork_train::{data::Images, profile::layers};
/// use std::sync::{Arc, atomic::AtomicBool};
///
/// let model: Arc<dyn Model> = Arc::new(VggConfig::digits().network());
/// let images = Images::new([8, 8, 1], vec![0.5; 16 * 64], (0..16).map(|image| image % 10).collect());
/// let profile = layers(&model, &Plan::default(), &images, Cpu::device(), &AtomicBool::new(false))?;
/// assert_eq!((&*profile.layers()[1].id, &*profile.layers()[1].name), ("layer.0", "group.0.conv.0"));
/// println!("{profile}"); // in the planner's format
/// # Ok::<(), meshwork_train::RankError>(())
/// ```
///
/// # Errors
/// A step that fails, a name that the planner's format cannot hold, and `asked`, a request to stop.
pub fn layers(
    model: &Arc<dyn Model>,
    plan: &Plan,
    data: &dyn BatchSource,
    device: Arc<dyn Device>,
    asked: &AtomicBool,
) -> Result<Profile, RankError> {
    let micro_batch = plan.micro_batch_size().map_err(TrainError::from)?;
    let plan = dry_run::one_layer_a_stage(&**model, plan, micro_batch)?;
    let rank = Arc::new(Rank::recording(&plan.mesh, 0)?);
    let trainer = Trainer::new(model.clone(), &plan, rank, device)?;
    let stages = trainer.plan().clone();
    let activations = stages.activations(&Batch::blank(&model.fields(), micro_batch))?;
    let mut layers = Vec::new();
    for (stage, [forward_ms, backward_ms]) in times(data, trainer, plan.partition.len(), asked)?.into_iter().enumerate()
    {
        let mut declared = Declarations::new();
        model.stage(&mut declared, stages.mesh(), &stages.stages()[stage])?;
        // Frozen ones have no gradients to exchange.
        let trained = declared.specs().iter().filter(|spec| !spec.group.frozen);
        let (id, name) = names(&stages.stages()[stage], declared.specs());
        let loss = micro_batch * size_of::<f64>();
        layers.push(Layer {
            id,
            name,
            forward_ms,
            backward_ms,
            activation_bytes: activations.get(stage).map_or(loss, |cut| cut.shape.count() * cut.dtype.size()) as f64,
            parameter_bytes: (trained.map(ParamSpec::global_elements).sum::<usize>() * size_of::<f32>()) as f64,
            stage: None,
        });
    }
    Ok(Profile::chain(layers)?)
}

/// Writes a profile of layers to a file, in the place of any old one.
pub fn write_layers(profile: &Profile, path: &Path) -> Result<(), OutputError> {
    fs::write(path, profile.to_string()).map_err(OutputError::writing("a layer profile", path))
}

/// Milliseconds of forward and backward of each stage.
fn times(
    data: &dyn BatchSource,
    mut trainer: Trainer,
    stages: usize,
    asked: &AtomicBool,
) -> Result<Vec<[f64; 2]>, RankError> {
    let mut all = vec![[const { Vec::new() }; 2]; stages];
    for step in 0..=STEPS {
        stop::require_unasked(asked)?;
        let batch = data.batch(step as u64, trainer.samples().len(), trainer.samples()).map_err(TrainError::from)?;
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
fn names(part: &StageSpec, parameters: &[ParamSpec]) -> (String, String) {
    let id = match part {
        StageSpec { first: true, .. } => "input".to_owned(),
        StageSpec { last: true, .. } => "output".to_owned(),
        StageSpec { layers, .. } => format!("layer.{}", layers.start),
    };
    let mut owners: Vec<&str> = parameters.iter().map(|spec| owner(&spec.name)).collect();
    owners.dedup();
    let name = match owners.iter().copied().reduce(common) {
        // The planner places no layer of this name: data is wherever it is needed.
        None if part.first => "Input".to_owned(),
        None if part.last => "loss".to_owned(),
        None => "no parameters".to_owned(),
        Some("") => owners.join(", "),
        Some(name) => name.to_owned(),
    };
    let is_taken_for_data = !owners.is_empty() && name.starts_with("Input");
    (id, if is_taken_for_data { format!("layer {name}") } else { name })
}

/// `h.0.ln_1` of `h.0.ln_1.weight`.
fn owner(parameter: &str) -> &str {
    parameter.rsplit_once('.').map_or(parameter, |(owner, _)| owner)
}

/// `h.0` of `h.0.ln_1` and `h.0.attn.qkv`.
fn common<'a>(a: &'a str, b: &str) -> &'a str {
    let ends = a.match_indices('.').map(|(dot, _)| dot).chain([a.len()]);
    let in_both = |end: &usize| b.strip_prefix(&a[..*end]).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    ends.take_while(in_both).last().map_or("", |end| &a[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork_tensor::{Init, Placement, Role};

    #[test]
    fn a_layer_is_named_after_what_its_parameters_share() {
        let part = StageSpec { layers: 3..4, first: false, last: false };
        let named = |part: &StageSpec, parameters: &[&str]| {
            let mut declared = Declarations::new();
            for name in parameters {
                declared.declare(*name, &[1], Placement::replicated(), Role::Weight, Init::Zeros).unwrap();
            }
            let (id, name) = names(part, declared.specs());
            format!("{id}: {name}")
        };
        for (parameters, name) in [
            (&["h.0.ln_1.weight", "h.0.ln_1.bias", "h.0.attn.qkv.weight"][..], "layer.3: h.0"),
            (&["h.1.up.weight", "h.10.up.weight"], "layer.3: h"),
            (&["block.weight", "blocks.weight"], "layer.3: block, blocks"),
            (&["head.weight", "head.bias"], "layer.3: head"),
            (&["w"], "layer.3: w"),
            (&["Input.weight"], "layer.3: layer Input"),
            (&[], "layer.3: no parameters"),
        ] {
            assert_eq!(named(&part, parameters), name);
        }
        let [first, last] =
            [(true, false), (false, true)].map(|(first, last)| StageSpec { first, last, ..part.clone() });
        assert_eq!(named(&first, &["wte.weight", "wpe.weight"]), "input: wte, wpe");
        assert_eq!(named(&first, &[]), "input: Input");
        assert_eq!(named(&last, &[]), "output: loss");
    }
}
