//! Qwen3 (Yang et al., 2025): a Qwen2 with norms of queries and keys, head by head, and no biases.

use super::prelude::*;
use super::qwen2;
use meshwork_tensor_parallel::NormOver;

pub(crate) const FAMILY: Family = Family {
    class: "Qwen3ForCausalLM",
    model_type: "qwen3",
    read: |settings| (read(settings), None),
    write: |of, _| {
        let mut own = qwen2::write_window(of);
        own["attention_bias"] = json!(of.attention_bias.input);
        own
    },
    ..llama::FAMILY
};

pub(crate) fn read(settings: &mut Settings<'_>) -> DecoderConfig {
    let own = DecoderConfig {
        head_dim: Some(settings.size_or("head_dim", 128)),
        attention_bias: settings.flag_or("attention_bias", false).into(),
        qk_norm: Some(NormOver::Head),
        ..qwen2::windowed(settings)
    };
    llama::read(settings, own)
}
