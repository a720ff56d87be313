//! Mistral (Jiang et al., 2023): a Llama with a sliding window and heads of any width.

use super::prelude::*;

pub(crate) const FAMILY: Family = Family {
    class: "MistralForCausalLM",
    model_type: "mistral",
    read: |settings| {
        settings.default("num_key_value_heads", json!(8));
        let own = DecoderConfig {
            head_dim: settings.optional_size("head_dim"),
            sliding_window: settings.window(Some(4096)),
            ..LLAMA
        };
        (llama::read(settings, own), None)
    },
    write: |of, _| json!({"sliding_window": of.sliding_window}),
    ..llama::FAMILY
};
