//! The conditions under which keys are read: one constant for each condition in the table of keys, and a notice for
//! each given key that the run does not read.

use toml::Value;

use super::keys::{self, Condition};
use super::settings::Settings;
use super::words::{
    Dtype, LossScaleWord, LossScaling, ModelKind, OffloadWord, OptimizerName, RecomputeWord, Recomputed, SavedDtype,
    SavedEncoding,
};
use super::{Config, DecayName};

/// A condition: in words, by which keys, and as a function.
const fn when(with: &'static str, by: &'static [&'static str], holds: fn(&Config) -> bool) -> Condition {
    Condition { with, by, holds }
}

// The model.
pub(super) const GPT2: Condition = when("model.kind = gpt2", &["model.kind"], |c| c.model.kind == ModelKind::Gpt2);
pub(super) const LLAMA: Condition = when("model.kind = llama", &["model.kind"], |c| c.model.kind == ModelKind::Llama);
pub(super) const SCALED: Condition =
    when("model.rope_scaling_factor above 1", &["model.rope_scaling_factor"], |c| c.model.rope_scaling_factor != 1.0);
pub(super) const EXPERTS: Condition = when("moe.num_experts above 0", &["moe.num_experts"], |c| c.moe.num_experts > 0);
pub(super) const CAPACITY: Condition =
    when("moe.capacity_factor above 0", &["moe.capacity_factor"], |c| c.moe.capacity_factor > 0.0);
pub(super) const GROUPS: Condition =
    when("moe.top_groups below moe.num_groups", &["moe.top_groups", "moe.num_groups"], |c| {
        c.moe.top_groups < c.moe.num_groups
    });
pub(super) const BALANCES: Condition =
    when("moe.aux_loss_coeff above 0", &["moe.aux_loss_coeff"], |c| c.moe.aux_loss_coeff > 0.0);

// The mesh.
pub(super) const DP: Condition = when("parallelism.dp above 1", &["parallelism.dp"], |c| c.parallelism.dp > 1);
pub(super) const TP: Condition = when("parallelism.tp above 1", &["parallelism.tp"], |c| c.parallelism.tp > 1);
pub(super) const PP: Condition = when("parallelism.pp above 1", &["parallelism.pp"], |c| c.parallelism.pp > 1);
/// One stage of one chunk has all layers.
pub(super) const CHUNKS: Condition = when(
    "parallelism.pp or pipeline.virtual_stages above 1",
    &["parallelism.pp", "pipeline.virtual_stages", "pipeline.schedule"],
    |c| c.parallelism.pp > 1 || c.pipeline.virtual_stages > 1,
);
pub(super) const EP: Condition = when("parallelism.ep above 1", &["parallelism.ep"], |c| c.parallelism.ep > 1);

// Numerics.
pub(super) const CANONICAL: Condition =
    when("training.numerics = canonical", &["training.numerics"], |c| c.training.numerics == "canonical");
pub(super) const IN_F32: Condition =
    when("training.dtype = f32", &["training.dtype"], |c| c.training.dtype == Dtype::F32);
pub(super) const IN_HALVES: Condition =
    when("training.dtype = bf16 or f16", &["training.dtype"], |c| c.training.dtype != Dtype::F32);
pub(super) const DYNAMIC: Condition = when("training.loss_scale = dynamic", &["training.loss_scale"], |c| {
    c.training.loss_scale == LossScaling::Word(LossScaleWord::Dynamic)
});

// The update rule and its rate.
pub(super) const ADAM: Condition = when("optimizer.name = adamw, lamb, muon or adam8bit", &["optimizer.name"], |c| {
    use OptimizerName::{Adam8bit, Adamw, Lamb, Muon};
    matches!(c.optimizer.name, Adamw | Lamb | Muon | Adam8bit)
});
pub(super) const SGD: Condition =
    when("optimizer.name = sgd", &["optimizer.name"], |c| c.optimizer.name == OptimizerName::Sgd);
pub(super) const MUON: Condition =
    when("optimizer.name = muon", &["optimizer.name"], |c| c.optimizer.name == OptimizerName::Muon);
pub(super) const ADAFACTOR: Condition =
    when("optimizer.name = adafactor", &["optimizer.name"], |c| c.optimizer.name == OptimizerName::Adafactor);
pub(super) const ADAM8BIT: Condition =
    when("optimizer.name = adam8bit", &["optimizer.name"], |c| c.optimizer.name == OptimizerName::Adam8bit);
pub(super) const DECAYS: Condition =
    when("lr_scheduler.decay = linear or cosine", &["lr_scheduler.decay"], |c| c.lr_scheduler.decay != DecayName::None);

// Memory.
/// Recomputation would start from rounded values.
pub(super) const SELECTIVE: Condition = when("memory.saved_dtype = f32, if selective", &["memory.saved_dtype"], |c| {
    c.memory.saved_dtype == SavedDtype::F32 || c.memory.recompute != Recomputed::Word(RecomputeWord::Selective)
});
/// Neither GELU nor SwiGLU gives zeros.
pub(super) const ZEROS: Condition =
    when("model.dropout or moe.num_experts above 0, if sparse", &["model.dropout", "moe.num_experts"], |c| {
        let zeros = c.model.dropout > 0.0 || c.moe.num_experts > 0;
        zeros || c.memory.saved_encoding == SavedEncoding::Dense
    });
pub(super) const SAMPLES: Condition = when("compress.aqsgd = true, if samples", &["compress.aqsgd"], |c| {
    c.compress.aqsgd || c.memory.offload != OffloadWord::Samples
});
pub(super) const OFFLOADS: Condition =
    when("memory.offload", &["memory.offload"], |c| c.memory.offload != OffloadWord::None);

// Outputs of a run.
pub(super) const VALIDATES: Condition =
    when("validation.every above 0", &["validation.every"], |c| c.validation.every > 0);
pub(super) const SAVES: Condition = when("checkpoint.dir", &["checkpoint.dir"], |c| c.checkpoint.dir.is_some());
pub(super) const EXPORTS: Condition =
    when("checkpoint.export", &["checkpoint.export"], |c| c.checkpoint.export.is_some());
pub(super) const RESUMES: Condition = when("checkpoint.resume = true", &["checkpoint.resume"], |c| c.checkpoint.resume);
pub(super) const PROFILES: Condition = when("metrics.profile = true", &["metrics.profile"], |c| c.metrics.profile);
pub(super) const WEIGHS: Condition =
    when("metrics.profile = true or --steps 0", &["metrics.profile", "training.steps"], |c| {
        c.metrics.profile || c.training.steps == 0
    });

// Compression.
pub(super) const CUTS: Condition =
    when("parallelism.pp above 1 or compress.virtual_cuts", &["parallelism.pp", "compress.virtual_cuts"], |c| {
        c.parallelism.pp > 1 || !c.compress.virtual_cuts.is_empty()
    });
pub(super) const AT_CUTS: Condition = when(
    "compress.activations or compress.activation_gradients",
    &["compress.activations", "compress.activation_gradients"],
    |c| c.compress.activations != "none" || c.compress.activation_gradients != "none",
);
pub(super) const FORWARD: Condition = when(
    "compress.activations, compress.weights or compress.dispatch",
    &["compress.activations", "compress.weights", "compress.dispatch"],
    |c| [&c.compress.activations, &c.compress.weights, &c.compress.dispatch].iter().any(|of| *of != "none"),
);
pub(super) const COMPRESSES: Condition =
    when("something to compress", &["compress.activations"], |c| c.compress.plan().is_ok_and(|plan| plan.is_some()));
pub(super) const AQSGD: Condition = when("compress.aqsgd = true", &["compress.aqsgd"], |c| c.compress.aqsgd);

/// Adds a notice to `config` for each key that is given and not read.
pub(crate) fn notice(config: &mut Config, settings: &Settings) {
    for (section, key) in keys::all() {
        let name = format!("{section}.{}", key.name);
        let Some(value) = settings.given::<Value>(&name) else { continue };
        let unmet = key.conditions.iter().find(|of| settings.sound(of.by) && !(of.holds)(config));
        config.notices.extend(unmet.map(|of| format!("{name} = {value} has no effect without {}", of.with)));
    }
}
