//! DeepSeek-V2 (DeepSeek-AI, 2024): latent attention, and behind dense layers experts chosen by a softmax, in groups.

use super::prelude::*;
use super::{latent, qwen3_moe};
use crate::experts::ExpertGroups;

pub(crate) const FAMILY: Family = Family {
    class: "DeepseekV2ForCausalLM",
    model_type: "deepseek_v2",
    read: |settings| {
        settings.only("scoring_func", &[json!("softmax")]);
        settings.only("norm_topk_prob", &[json!(false)]);
        let limited = settings.one_of("topk_method", ["greedy", "group_limited_greedy"]) == 1;
        let mut experts = experts(settings, [64, 2, 1407, 0], limited.then_some(1));
        experts.moe.normalise = false;
        (latent::read(settings, DecoderConfig { interleaved: true, ..LLAMA }), Some(experts))
    },
    write: |of, experts| {
        let limited = experts.filter(|of| of.moe.groups.groups > 1);
        let method = limited.map_or("greedy", |_| "group_limited_greedy");
        latent::write(of, write(experts, json!({"topk_method": method})))
    },
    parts: |block| match block.part.strip_prefix("mlp.") {
        Some(part) if part.starts_with("shared.") => block.shared_experts("mlp.shared_experts"),
        Some(_) => (qwen3_moe::FAMILY.parts)(block),
        None => latent::parts(block),
    },
    ..llama::FAMILY
};

/// The settings of experts. `defaults` are the numbers of routed experts, of shared experts, of inner features of each,
/// and of dense layers at the start. With `best`, routing is limited to groups, scored by that many of their best
/// experts.
pub(crate) fn experts(settings: &mut Settings<'_>, defaults: [usize; 4], best: Option<usize>) -> ExpertsConfig {
    settings.only("moe_layer_freq", &[json!(1)]);
    let [routed, shared, width, dense] = defaults;
    let mut of = settings.experts("n_routed_experts", routed);
    of.moe.routed_scaling = settings.number_or("routed_scaling_factor", 1.0);
    if let Some(best) = best {
        let [groups, top_groups] = ["n_group", "topk_group"].map(|key| settings.size(key));
        of.moe.groups = ExpertGroups { groups, top_groups, best };
    }
    of.num_shared_experts = settings.any_size_or("n_shared_experts", shared);
    of.expert_hidden_size = settings.size_or("moe_intermediate_size", width);
    of.first_dense_layers = settings.dense_layers("first_k_dense_replace", dense);
    of
}

/// The settings of experts, beside `own`.
pub(crate) fn write(experts: Option<&ExpertsConfig>, mut own: Value) -> Value {
    let Some(of) = experts else { return own };
    let moe = of.moe;
    (own["n_routed_experts"], own["n_shared_experts"]) = (json!(moe.num_experts), json!(of.num_shared_experts));
    (own["num_experts_per_tok"], own["norm_topk_prob"]) = (json!(moe.top_k), json!(moe.normalise));
    (own["n_group"], own["topk_group"]) = (json!(moe.groups.groups), json!(moe.groups.top_groups));
    own["routed_scaling_factor"] = json!(moe.routed_scaling);
    own["moe_intermediate_size"] = json!(of.expert_hidden_size);
    own["first_k_dense_replace"] = json!(of.first_dense_layers);
    own
}
