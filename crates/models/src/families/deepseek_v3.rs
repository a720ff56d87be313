//! DeepSeek-V3 and R1 (DeepSeek-AI, 2024): a DeepSeek-V2 whose router takes sigmoids, and chooses by them plus a bias.

use super::prelude::*;
use super::{deepseek_v2, latent};
use crate::experts::RouterKind;

pub(crate) const FAMILY: Family = Family {
    class: "DeepseekV3ForCausalLM",
    model_type: "deepseek_v3",
    read: |settings| {
        settings.only("scoring_func", &[json!("sigmoid")]);
        settings.only("topk_method", &[json!("noaux_tc")]);
        settings.only("norm_topk_prob", &[json!(true)]);
        for (key, value) in [("num_experts_per_tok", 8), ("n_group", 8), ("topk_group", 4)] {
            settings.default(key, json!(value));
        }
        settings.default("routed_scaling_factor", json!(2.5));
        let mut experts = deepseek_v2::experts(settings, [256, 1, 2048, 3], Some(2));
        experts.moe.router = RouterKind::Bias;
        let own = DecoderConfig { interleaved: settings.flag_or("rope_interleave", true), ..LLAMA };
        (latent::read(settings, own), Some(experts))
    },
    write: |of, experts| {
        let own = json!({"rope_interleave": of.interleaved});
        latent::write(of, deepseek_v2::write(experts, own))
    },
    parts: |block| match block.part {
        "mlp.router.bias" => block.same("mlp.gate.e_score_correction_bias"),
        _ => (deepseek_v2::FAMILY.parts)(block),
    },
    ..deepseek_v2::FAMILY
};
