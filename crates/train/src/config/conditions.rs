//! The conditions under which keys are read: one for each name in the table of keys, and a notice for
//! each given key that the run does not read.

use toml::Value;

use super::keys::{self, Condition};
use super::settings::Settings;
use super::words::{
    ContextMethod, Dtype, LossScaleWord, LossScaling, ModelKind, Objective, OffloadWord, OptimizerName, Quantization,
    RecomputeWord, Recomputed, SavedDtype, SavedEncoding,
};
use super::{Config, DecayName, Elastic};

/// Declares conditions: a name for the table of keys, the condition in words, the keys that decide, and a function.
macro_rules! conditions {
    ($($(#[$meta:meta])* $name:ident: $with:literal, [$($by:literal),+], $holds:expr;)+) => {$(
        $(#[$meta])*
        pub(super) const $name: Condition = Condition { with: $with, by: &[$($by),+], holds: $holds };
    )+};
}

conditions! {
    // The model.
    GPT2: "model.kind = gpt2", ["model.kind"], |c| c.model.kind == ModelKind::Gpt2;
    LLAMA: "model.kind = llama", ["model.kind"], |c| c.model.kind == ModelKind::Llama;
    KEYS: "model.config unset", ["model.config"], |c| c.model.config.is_none();
    SCALED: "model.rope_scaling_factor above 1", ["model.rope_scaling_factor"], |c| c.model.rope_scaling_factor != 1.0;
    EXPERTS: "moe.num_experts above 0", ["moe.num_experts"], |c| c.moe.num_experts > 0;
    CAPACITY: "moe.capacity_factor above 0", ["moe.capacity_factor"], |c| c.moe.capacity_factor > 0.0;
    GROUPS: "moe.top_groups below moe.num_groups", ["moe.top_groups", "moe.num_groups"], |c| c.moe.top_groups < c.moe.num_groups;
    BALANCES: "moe.aux_loss_coeff above 0", ["moe.aux_loss_coeff"], |c| c.moe.aux_loss_coeff > 0.0;

    LORA: "lora.rank above 0", ["lora.rank"], |c| c.lora.rank > 0;
    QUANTIZED: "lora.quantization = int8 or nf4", ["lora.quantization"],
        |c| matches!(c.lora.quantization, Quantization::Int8 | Quantization::Nf4);
    NF4: "lora.quantization = nf4", ["lora.quantization"], |c| c.lora.quantization == Quantization::Nf4;

    // The mesh.
    DP: "parallelism.dp above 1", ["parallelism.dp"], |c| c.parallelism.dp > 1;
    TP: "parallelism.tp above 1", ["parallelism.tp"], |c| c.parallelism.tp > 1;
    PP: "parallelism.pp above 1", ["parallelism.pp"], |c| c.parallelism.pp > 1;
    /// One stage of one chunk has all layers.
    CHUNKS: "parallelism.pp or pipeline.virtual_stages above 1", ["parallelism.pp", "pipeline.virtual_stages", "pipeline.schedule"],
        |c| c.parallelism.pp > 1 || c.pipeline.virtual_stages > 1;
    CP: "parallelism.cp above 1", ["parallelism.cp"], |c| c.parallelism.cp > 1;
    /// Where an order changes the work of ranks and nothing else.
    ORDERED: "all_gather, ring or hybrid, in fast numerics, without model.dropout and lora.dropout",
        ["parallelism.context_parallel_method", "training.numerics", "model.dropout", "lora.dropout", "lora.rank"],
        |c| matches!(c.parallelism.context_parallel_method, ContextMethod::AllGather | ContextMethod::Ring | ContextMethod::Hybrid)
            && c.training.numerics == "fast" && c.dropout().is_none();
    HYBRID: "parallelism.context_parallel_method = hybrid", ["parallelism.context_parallel_method"],
        |c| c.parallelism.context_parallel_method == ContextMethod::Hybrid;
    ELASTIC: "parallelism.elastic = dp", ["parallelism.elastic"], |c| c.parallelism.elastic != Elastic::Off;
    EP: "parallelism.ep above 1", ["parallelism.ep"], |c| c.parallelism.ep > 1;

    // Numerics.
    CANONICAL: "training.numerics = canonical", ["training.numerics"], |c| c.training.numerics == "canonical";
    IN_F32: "training.dtype = f32", ["training.dtype"], |c| c.training.dtype == Dtype::F32;
    IN_HALVES: "training.dtype = bf16 or f16", ["training.dtype"], |c| c.training.dtype != Dtype::F32;
    DYNAMIC: "training.loss_scale = dynamic", ["training.loss_scale"], |c| c.training.loss_scale == LossScaling::Word(LossScaleWord::Dynamic);

    REPLAYS: "training.replay_every above 0", ["training.replay_every"], |c| c.training.replay_every > 0;

    EXAMPLES: "training.objective = sft or dpo", ["training.objective"], |c| c.training.objective != Objective::Pretrain;
    DPO: "training.objective = dpo", ["training.objective"], |c| c.training.objective == Objective::Dpo;

    // The update rule and its rate.
    ADAM: "optimizer.name = adamw, lamb, muon or adam8bit", ["optimizer.name"],
        |c| matches!(c.optimizer.name, OptimizerName::Adamw | OptimizerName::Lamb | OptimizerName::Muon | OptimizerName::Adam8bit);
    SGD: "optimizer.name = sgd", ["optimizer.name"], |c| c.optimizer.name == OptimizerName::Sgd;
    MUON: "optimizer.name = muon", ["optimizer.name"], |c| c.optimizer.name == OptimizerName::Muon;
    ADAFACTOR: "optimizer.name = adafactor", ["optimizer.name"], |c| c.optimizer.name == OptimizerName::Adafactor;
    ADAM8BIT: "optimizer.name = adam8bit", ["optimizer.name"], |c| c.optimizer.name == OptimizerName::Adam8bit;
    DECAYS: "lr_scheduler.decay = linear or cosine", ["lr_scheduler.decay"], |c| c.lr_scheduler.decay != DecayName::None;

    // Memory.
    /// Recomputation would start from rounded values.
    SELECTIVE: "memory.saved_dtype = f32, if selective", ["memory.saved_dtype"],
        |c| c.memory.saved_dtype == SavedDtype::F32 || c.memory.recompute != Recomputed::Word(RecomputeWord::Selective);
    /// Neither GELU nor SwiGLU gives zeros.
    ZEROS: "model.dropout, lora.dropout or moe.num_experts above 0, if sparse", ["model.dropout", "lora.dropout", "lora.rank", "moe.num_experts"],
        |c| c.dropout().is_some() || c.moe.num_experts > 0 || c.memory.saved_encoding == SavedEncoding::Dense;
    SAMPLES: "compress.aqsgd = true, if samples", ["compress.aqsgd"], |c| c.compress.aqsgd || c.memory.offload != OffloadWord::Samples;
    OFFLOADS: "memory.offload", ["memory.offload"], |c| c.memory.offload != OffloadWord::None;

    // Outputs of a run.
    VALIDATES: "validation.every above 0", ["validation.every"], |c| c.validation.every > 0;
    SAVES: "checkpoint.dir", ["checkpoint.dir"], |c| c.checkpoint.dir.is_some();
    EXPORTS: "checkpoint.export", ["checkpoint.export"], |c| c.checkpoint.export.is_some();
    RESUMES: "checkpoint.resume = true", ["checkpoint.resume"], |c| c.checkpoint.resume;
    PROFILES: "metrics.profile = true", ["metrics.profile"], |c| c.metrics.profile;
    WEIGHS: "metrics.profile = true or --steps 0", ["metrics.profile", "training.steps"], |c| c.metrics.profile || c.training.steps == 0;

    // Compression.
    CUTS: "parallelism.pp above 1 or compress.virtual_cuts", ["parallelism.pp", "compress.virtual_cuts"],
        |c| c.parallelism.pp > 1 || !c.compress.virtual_cuts.is_empty();
    AT_CUTS: "compress.activations or compress.activation_gradients", ["compress.activations", "compress.activation_gradients"],
        |c| c.compress.activations != "none" || c.compress.activation_gradients != "none";
    FORWARD: "compress.activations, compress.weights or compress.dispatch", ["compress.activations", "compress.weights", "compress.dispatch"],
        |c| [&c.compress.activations, &c.compress.weights, &c.compress.dispatch].iter().any(|of| *of != "none");
    COMPRESSES: "something to compress", ["compress.activations"], |c| c.compress.plan().is_ok_and(|plan| plan.is_some());
    AQSGD: "compress.aqsgd = true", ["compress.aqsgd"], |c| c.compress.aqsgd;
}

/// Adds a notice to `config` for each key that is given and not read.
pub(crate) fn notice(config: &mut Config, settings: &Settings) {
    for (section, key) in keys::all() {
        let name = format!("{section}.{}", key.name);
        let Some(value) = settings.given::<Value>(&name) else { continue };
        let unmet = key.conditions.iter().find(|of| settings.sound(of.by) && !(of.holds)(config));
        config.notices.extend(unmet.map(|of| format!("{name} = {value} has no effect without {}", of.with)));
    }
}
