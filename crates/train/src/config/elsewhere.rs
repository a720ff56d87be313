//! What other trainers call our keys, so that a key in their words is answered with ours.

use std::fmt::Write as _;

/// A key of ours, and its names in Megatron-LM, Hugging Face (and PEFT), DeepSpeed and torchtitan, without their
/// sections and in lower case with underscores.
const NAMES: [(&str, &[&str]); 43] = [
    ("parallelism.dp", &["data_parallel_size", "data_parallel_replicate_degree"]),
    ("parallelism.tp", &["tensor_model_parallel_size", "tensor_parallel_degree", "tp_size", "autotp_size"]),
    ("parallelism.pp", &["pipeline_model_parallel_size", "pipeline_parallel_degree", "pp_size"]),
    ("parallelism.cp", &["context_parallel_size", "context_parallel_degree", "sequence_parallel_size", "cp_size"]),
    ("parallelism.ep", &["expert_model_parallel_size", "expert_parallel_degree", "ep_size"]),
    ("parallelism.expert_tensor_parallel", &["expert_tensor_parallel_size"]),
    ("parallelism.context_parallel_method", &["cp_comm_type", "context_parallel_rotate_method"]),
    ("parallelism.zero_stage", &["stage", "use_distributed_optimizer", "data_parallel_sharding_strategy", "fsdp"]),
    ("pipeline.schedule", &["pipeline_parallel_schedule"]),
    ("pipeline.virtual_stages", &["num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"]),
    ("pipeline.num_microbatches", &["gradient_accumulation_steps", "pipeline_parallel_microbatches"]),
    (
        "training.micro_batch_size",
        &["per_device_train_batch_size", "train_micro_batch_size_per_gpu", "local_batch_size"],
    ),
    ("training.global_batch_size", &["train_batch_size", "batch_size"]),
    ("training.steps", &["max_steps", "train_iters", "train_steps", "num_steps"]),
    ("training.max_norm", &["max_grad_norm", "clip_grad", "gradient_clipping", "clip_norm"]),
    ("training.dtype", &["bf16", "fp16", "torch_dtype", "mixed_precision", "mixed_precision_param"]),
    ("training.reduce_dtype", &["mixed_precision_reduce", "grad_reduce_in_fp32", "communication_data_type"]),
    ("training.loss_scale_initial", &["initial_loss_scale", "initial_scale_power"]),
    ("training.numerics", &["deterministic_mode", "full_determinism", "deterministic"]),
    ("optimizer.lr", &["learning_rate", "max_lr"]),
    ("optimizer.name", &["optim", "optimizer_type"]),
    ("optimizer.beta1", &["adam_beta1"]),
    ("optimizer.beta2", &["adam_beta2"]),
    ("optimizer.eps", &["adam_eps", "adam_epsilon"]),
    ("lr_scheduler.warmup_steps", &["lr_warmup_iters", "num_warmup_steps", "warmup_num_steps"]),
    ("lr_scheduler.decay", &["lr_decay_style", "lr_scheduler_type", "decay_type"]),
    ("lr_scheduler.decay_steps", &["lr_decay_iters"]),
    ("lr_scheduler.min_lr_factor", &["min_lr"]),
    ("model.num_layers", &["num_hidden_layers", "n_layer", "n_layers"]),
    ("model.num_heads", &["num_attention_heads", "n_head", "n_heads"]),
    ("model.num_kv_heads", &["num_key_value_heads", "num_query_groups", "n_kv_heads"]),
    ("model.hidden_size", &["n_embd", "dim", "d_model"]),
    ("model.ffn_hidden_size", &["intermediate_size", "hidden_dim"]),
    ("model.seq_len", &["seq_length", "max_length", "max_seq_length", "max_position_embeddings", "n_positions"]),
    ("model.init_from", &["model_name_or_path", "pretrained_model_name_or_path", "initial_load_path", "load"]),
    ("model.tie_embeddings", &["tie_word_embeddings", "untie_embeddings_and_output_weights"]),
    ("moe.top_k", &["num_experts_per_tok", "moe_router_topk"]),
    ("lora.rank", &["r", "lora_r", "lora_rank", "lora_dim"]),
    ("lora.alpha", &["lora_alpha"]),
    ("lora.targets", &["target_modules", "lora_target_modules"]),
    ("memory.recompute", &["gradient_checkpointing", "recompute_granularity", "activation_checkpoint"]),
    ("memory.offload", &["offload_optimizer", "cpu_offload", "enable_cpu_offload"]),
    ("checkpoint.every", &["save_steps", "save_interval"]),
];

/// Our key for a name of another trainer, if `name` is one, or differs from one by at most a sixth of its letters.
pub(super) fn ours(name: &str) -> Option<&'static str> {
    let name = name.to_lowercase().replace('-', "_");
    let edits = |their: &&str| strsim::levenshtein(&name, their);
    let nearest = NAMES.iter().filter_map(|(key, theirs)| Some((theirs.iter().map(edits).min()?, *key)));
    let (edits, key) = nearest.min_by_key(|&(edits, _)| edits)?;
    (edits <= name.len() / 6).then_some(key)
}

/// The table of names for docs/configuration.md.
pub(super) fn table() -> String {
    let mut out = String::from("## Names of other trainers\n\n");
    out.push_str(
        "Megatron-LM, Hugging Face, DeepSpeed and torchtitan have other names for these keys, and some of them ",
    );
    out.push_str("another unit. The error for a key of theirs names ours.\n\n| theirs | ours |\n|---|---|\n");
    for (key, theirs) in NAMES {
        let theirs = theirs.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        // Writing to a string cannot fail.
        _ = writeln!(out, "| {theirs} | `{key}` |");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::keys;
    use super::*;

    #[test]
    fn names_lead_to_keys_of_ours() {
        for (key, theirs) in NAMES {
            let (section, name) = key.split_once('.').unwrap_or_default();
            assert!(keys::find(section, name).is_some(), "{key} is no key");
            for their in theirs {
                assert_eq!(ours(their), Some(key), "{their} is a name of two keys");
            }
        }
        assert_eq!(ours("Tensor-Model-Parallel-Size"), Some("parallelism.tp"));
        assert_eq!(ours("learning_rat"), Some("optimizer.lr"));
        assert_eq!(ours("flux_capacity"), None);
    }
}
