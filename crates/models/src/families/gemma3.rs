//! Gemma 3 (Gemma Team, 2025), of text: a Gemma with norms behind attention and feed-forward network too, norms of
//! queries and keys, its own factor of scores, and a window in all layers but every sixth, which turn by other
//! frequencies.

use super::gemma;
use super::prelude::*;
use meshwork_tensor_parallel::NormOver;

pub(crate) const FAMILY: Family = Family {
    class: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    read: |settings| {
        let every = settings.size_or("sliding_window_pattern", 6);
        let (rotary, window_rotary) = settings.rotary_by_layer([1e6, 10_000.0]);
        let own = surrounded(settings, Layers::AllBut(every));
        let of = gemma::read(settings, own);
        (DecoderConfig { qk_norm: Some(NormOver::Head), rotary, window_rotary, ..of }, None)
    },
    write: |of, _| {
        let mut own = write(of);
        let theta = of.window_rotary.map(|rotary| rotary.theta);
        own["rope_local_base_freq"] = json!(theta);
        own
    },
    ..gemma::FAMILY
};

/// A Llama with the norms, windows and factors of the later Gemmas.
pub(crate) fn surrounded(settings: &mut Settings<'_>, layers: Layers) -> DecoderConfig {
    let window = settings.window(Some(4096));
    let (sliding_window, window_layers) = settings.windows(window, layers);
    let names = Names {
        before: [Some("input_layernorm"), Some("pre_feedforward_layernorm")],
        behind: [Some("post_attention_layernorm"), Some("post_feedforward_layernorm")],
        ..LLAMA.names
    };
    DecoderConfig {
        sliding_window,
        window_layers,
        score_scale: Some(settings.number_or("query_pre_attn_scalar", 256.0).powf(-0.5)),
        logit_cap: settings.optional_number("final_logit_softcapping"),
        names,
        ..LLAMA
    }
}

/// The settings of all that.
pub(crate) fn write(decoder: &DecoderConfig) -> Value {
    json!({
        "hidden_act": gemma::GELU,
        "hidden_activation": gemma::GELU,
        "sliding_window": decoder.sliding_window,
        "layer_types": layer_types(decoder),
        "query_pre_attn_scalar": decoder.score_scale.map(|scale| scale.powi(-2).round() as u64),
        "final_logit_softcapping": decoder.logit_cap,
    })
}
