//! A notice for each setting that is valid but has no effect.

use toml::Value;

use super::compress::{CUTS, DISPATCH, GRADIENTS, WEIGHTS};
use super::settings::Settings;
use super::words::{
    Dtype, LossScaling, ModelKind, OffloadWord, OptimizerName, RecomputeWord, SavedDtype, SavedEncoding,
};
use super::{Config, Recomputed};

/// Keys that only a Llama reads. The last three describe the scaling of rotary frequencies.
const LLAMA: [&str; 6] = [
    "model.norm_eps",
    "model.rope_theta",
    "model.rope_scaling_factor",
    "model.rope_scaling_low_freq_factor",
    "model.rope_scaling_high_freq_factor",
    "model.rope_scaling_original_seq_len",
];
const GPT2: [&str; 1] = ["model.dropout"];
/// Keys of the update rule that not all rules read, with those that do.
const BY_RULE: [(&str, &[OptimizerName]); 9] = {
    use OptimizerName::{Adafactor, Adam8bit, Adamw, Lamb, Muon, Sgd};
    [
        ("optimizer.beta1", &[Adamw, Lamb, Muon, Adam8bit]),
        ("optimizer.beta2", &[Adamw, Lamb, Muon, Adam8bit]),
        ("optimizer.eps", &[Adamw, Lamb, Muon, Adam8bit]),
        ("optimizer.momentum", &[Sgd]),
        ("optimizer.muon_momentum", &[Muon]),
        ("optimizer.relative_step", &[Adafactor]),
        ("optimizer.decay_rate", &[Adafactor]),
        ("optimizer.clip_threshold", &[Adafactor]),
        ("optimizer.block_size", &[Adam8bit]),
    ]
};
const MOE: [&str; 17] = [
    "moe.top_k",
    "moe.router",
    "moe.capacity_factor",
    "moe.overflow",
    "moe.aux_loss_coeff",
    "moe.z_loss_coeff",
    "moe.every_n_layers",
    "moe.num_shared_experts",
    "moe.expert_hidden_size",
    "moe.bias_update_rate",
    "moe.aux_loss_scope",
    "moe.jitter",
    "moe.normalize_top_k",
    "moe.routed_scaling",
    "moe.num_groups",
    "moe.top_groups",
    "parallelism.expert_tensor_parallel",
];
const PROFILE: [&str; 3] = ["metrics.profile_steps", "metrics.trace", "metrics.schedule"];

/// Appends a notice to those of `config` for each key that is given and that another key makes meaningless.
pub(crate) fn notice(config: &mut Config, settings: &Settings) {
    let (kind, rule) = (config.model.kind, config.optimizer.name);
    let unread = |key: &str, word: &str| format!("{key} = {word:?} does not read it");
    let by_kind: &[&str] = if kind == ModelKind::Gpt2 { &LLAMA } else { &GPT2 };
    let by_rule: Vec<&str> = BY_RULE.iter().filter(|(_, rules)| !rules.contains(&rule)).map(|(key, _)| *key).collect();
    let recompute = config.memory.recompute;
    let unscaled = kind == ModelKind::Llama && config.model.rope_scaling_factor == 1.0;
    // (the key that decides, whether it makes others meaningless, which ones, why)
    let rules = [
        (
            "training.numerics",
            config.reduction_blocks().is_none(),
            &["numerics.reduction_blocks"][..],
            "training.numerics is fast".to_owned(),
        ),
        ("model.kind", true, by_kind, unread("model.kind", kind.name())),
        ("model.rope_scaling_factor", unscaled, &LLAMA[3..], "model.rope_scaling_factor is 1".to_owned()),
        ("moe.num_experts", config.moe.num_experts == 0, &MOE, "moe.num_experts is 0".to_owned()),
        (
            "moe.capacity_factor",
            config.moe.num_experts > 0 && config.moe.capacity_factor == 0.0,
            &["moe.overflow"],
            "moe.capacity_factor is 0".to_owned(),
        ),
        (
            "checkpoint.dir",
            config.checkpoint.dir.is_none(),
            &["checkpoint.every", "checkpoint.keep", "checkpoint.on_sigterm"],
            "checkpoint.dir is not set".to_owned(),
        ),
        ("checkpoint.resume", !config.checkpoint.resume, &["checkpoint.permit"], "checkpoint.resume is off".to_owned()),
        (
            "memory.offload",
            config.memory.offload == OffloadWord::None,
            &["memory.offload_dir"],
            "memory.offload is none".to_owned(),
        ),
        (
            "compress.aqsgd",
            !config.compress.aqsgd && config.memory.offload == OffloadWord::Samples,
            &["memory.offload"],
            "compress.aqsgd is off".to_owned(),
        ),
        (
            "model.dropout",
            config.model.dropout == 0.0
                && config.moe.num_experts == 0
                && config.memory.saved_encoding == SavedEncoding::Sparse,
            &["memory.saved_encoding"],
            "neither GELU nor SwiGLU gives zeros, and model.dropout is 0".to_owned(),
        ),
        (
            "memory.saved_dtype",
            config.memory.saved_dtype != SavedDtype::F32 && recompute == Recomputed::Word(RecomputeWord::Selective),
            &["memory.recompute"],
            format!(
                "memory.saved_dtype is {}: norms and activation functions would be computed from rounded values",
                config.memory.saved_dtype.name()
            ),
        ),
        (
            "training.dtype",
            config.training.dtype != Dtype::F32,
            &["memory.saved_dtype"],
            format!("activations are in {} anyway", config.training.dtype.name()),
        ),
        (
            "training.dtype",
            config.training.dtype == Dtype::F32,
            &["training.loss_scale"],
            "training.dtype is f32".to_owned(),
        ),
        (
            "training.loss_scale",
            config.training.loss_scale != LossScaling::Dynamic,
            &["training.loss_scale_initial", "training.loss_scale_growth_interval"],
            "the loss scale is not dynamic".to_owned(),
        ),
        (
            "parallelism.pp",
            config.parallelism.pp == 1 && config.compress.virtual_cuts.is_empty(),
            &CUTS,
            "one stage has no cuts".to_owned(),
        ),
        ("parallelism.dp", config.parallelism.dp == 1, &[GRADIENTS], "one rank of dp has nobody to add to".to_owned()),
        (
            "parallelism.ep",
            config.parallelism.ep == 1 && config.moe.num_experts > 0,
            &DISPATCH,
            "one rank of ep has all experts".to_owned(),
        ),
        ("moe.num_experts", config.moe.num_experts == 0, &DISPATCH, "moe.num_experts is 0".to_owned()),
        ("parallelism.dp", config.parallelism.dp == 1, &[WEIGHTS], "one rank of dp has all weights".to_owned()),
        (
            "compress.activations",
            !config.compress.plan().is_ok_and(|plan| plan.is_some()),
            &["compress.rounding", "compress.start_step"],
            "nothing is compressed".to_owned(),
        ),
        ("compress.aqsgd", !config.compress.aqsgd, &["compress.aqsgd_samples"], "compress.aqsgd is off".to_owned()),
        (
            "compress.activations",
            [&config.compress.activations, &config.compress.weights, &config.compress.dispatch]
                .iter()
                .all(|of| *of == "none"),
            &["validation.compression"],
            "neither activations, weights nor tokens of experts are compressed".to_owned(),
        ),
        (
            "compress.activations",
            config.compress.activations == "none" && config.compress.activation_gradients == "none",
            &["compress.virtual_cuts"],
            "nothing is compressed at cuts".to_owned(),
        ),
        ("metrics.profile", !config.metrics.profile, &PROFILE, "metrics.profile is off".to_owned()),
        ("optimizer.name", true, &by_rule, unread("optimizer.name", rule.name())),
    ];
    for (by, applies, keys, why) in rules {
        for key in keys.iter().filter(|_| applies && settings.sound(&[by])) {
            if let Some(value) = settings.given::<Value>(key) {
                config.notices.push(format!("{key} = {value} has no effect: {why}"));
            }
        }
    }
}
