//! OLMo 2 (OLMo Team, 2024): a Llama whose norms lie behind attention and feed-forward network instead of in front,
//! with norms of queries and keys over all heads.

use super::prelude::*;
use meshwork_tensor_parallel::NormOver;

pub(crate) const FAMILY: Family = Family {
    class: "Olmo2ForCausalLM",
    model_type: "olmo2",
    read: |settings| {
        settings.default("rms_norm_eps", json!(1e-5));
        let behind = [Some("post_attention_layernorm"), Some("post_feedforward_layernorm")];
        let own = DecoderConfig {
            attention_bias: settings.flag_or("attention_bias", false).into(),
            qk_norm: Some(NormOver::Heads),
            names: Names { before: [None, None], behind, ..LLAMA.names },
            ..LLAMA
        };
        (llama::read(settings, own), None)
    },
    ..llama::FAMILY
};
