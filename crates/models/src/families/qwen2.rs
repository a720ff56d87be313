//! Qwen2 and Qwen2.5 (Yang et al., 2024): a Llama with biases of queries, keys and values, and, if it is used, a
//! sliding window from some layer on.

use super::prelude::*;

pub(crate) const FAMILY: Family = Family {
    class: "Qwen2ForCausalLM",
    model_type: "qwen2",
    read: |settings| {
        settings.default("num_key_value_heads", json!(32));
        let own = DecoderConfig { attention_bias: AttentionBias { input: true, output: false }, ..windowed(settings) };
        (llama::read(settings, own), None)
    },
    write: |of, _| write_window(of),
    ..llama::FAMILY
};

/// A Llama with the window of a Qwen.
pub(crate) fn windowed(settings: &mut Settings<'_>) -> DecoderConfig {
    let (used, first) = (settings.flag_or("use_sliding_window", false), settings.any_size_or("max_window_layers", 28));
    let window = settings.window(Some(4096)).filter(|_| used);
    let (sliding_window, window_layers) = settings.windows(window, Layers::From(first));
    DecoderConfig { sliding_window, window_layers, ..LLAMA }
}

/// The settings of that window.
pub(crate) fn write_window(decoder: &DecoderConfig) -> Value {
    json!({
        "use_sliding_window": decoder.sliding_window.is_some(),
        "sliding_window": decoder.sliding_window,
        "layer_types": layer_types(decoder),
        "attention_bias": null,
        "mlp_bias": null,
    })
}
