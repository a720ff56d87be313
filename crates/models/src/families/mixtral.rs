//! Mixtral (Jiang et al., 2024): a Mistral with experts, as wide as its `intermediate_size`, in every layer.

use super::prelude::*;

pub(crate) const FAMILY: Family = Family {
    class: "MixtralForCausalLM",
    model_type: "mixtral",
    read: |settings| {
        // There it multiplies the input of the experts too.
        settings.only("router_jitter_noise", &[json!(0)]);
        let llama = DecoderConfig { sliding_window: settings.window(None), ..LLAMA };
        let llama = llama::read(settings, llama);
        let of = settings.experts("num_local_experts", 8);
        (llama, Some(ExpertsConfig { expert_hidden_size: llama.ffn_hidden_size, ..of }))
    },
    write: |of, experts| {
        let Some(experts) = experts else {
            return json!({});
        };
        json!({
            "intermediate_size": experts.expert_hidden_size,
            "num_local_experts": experts.moe.num_experts,
            "num_experts_per_tok": experts.moe.top_k,
            "router_jitter_noise": 0.0,
            "sliding_window": of.sliding_window,
            // There the loss counts every one of a token's experts, here their mean.
            "router_aux_loss_coef": experts.moe.aux_loss_coeff / experts.moe.top_k as f64,
        })
    },
    parts: |block| match block.part.strip_prefix("mlp.") {
        Some("router.weight") => block.same("block_sparse_moe.gate.weight"),
        Some(_) => block.experts("block_sparse_moe.experts", ["w1", "w3", "w2"]),
        None => llama::parts(block),
    },
    ..llama::FAMILY
};
