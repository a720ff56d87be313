//! Qwen3 with experts: a Qwen3 whose layers, or every so many of them, have experts.

use super::prelude::*;
use super::qwen3;

pub(crate) const FAMILY: Family = Family {
    class: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    read: |settings| {
        let count = if settings.has("num_experts") { "num_experts" } else { "num_local_experts" };
        settings.default("num_experts_per_tok", json!(8));
        let mut of = settings.experts(count, 128);
        of.moe.normalise = settings.flag_or("norm_topk_prob", false);
        of.every_n_layers = settings.size_or("decoder_sparse_step", 1);
        of.first_dense_layers = settings.dense_list("mlp_only_layers", of.every_n_layers);
        of.expert_hidden_size = settings.size_or("moe_intermediate_size", 768);
        (qwen3::read(settings), Some(of))
    },
    write: |of, experts| {
        let mut own = (qwen3::FAMILY.write)(of, None);
        let Some(experts) = experts else { return own };
        own["num_experts"] = json!(experts.moe.num_experts);
        own["num_experts_per_tok"] = json!(experts.moe.top_k);
        own["norm_topk_prob"] = json!(experts.moe.normalise);
        own["decoder_sparse_step"] = json!(experts.every_n_layers);
        own["moe_intermediate_size"] = json!(experts.expert_hidden_size);
        own["mlp_only_layers"] = json!(Vec::from_iter(0..experts.first_dense_layers));
        own
    },
    parts: |block| match block.part {
        "mlp.router.weight" => block.same("mlp.gate.weight"),
        part if part.starts_with("mlp.experts.") => block.experts("mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
        _ => llama::parts(block),
    },
    ..llama::FAMILY
};
