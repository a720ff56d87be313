//! Gemma (Gemma Team, 2024): a Llama with GeGLU, embeddings times √hidden, heads of any width and a tied head. Files
//! have the weights of its norms less 1.

use super::prelude::*;

pub(crate) const FAMILY: Family = Family {
    class: "GemmaForCausalLM",
    model_type: "gemma",
    norms_from_one: true,
    read: |settings| (read(settings, LLAMA), None),
    write: |_, _| json!({"hidden_act": GELU, "hidden_activation": GELU}),
    ..llama::FAMILY
};

/// The activation of all Gemmas.
pub(crate) const GELU: &str = "gelu_pytorch_tanh";

/// What all Gemmas have in common.
pub(crate) fn read(settings: &mut Settings<'_>, family: DecoderConfig) -> DecoderConfig {
    for key in ["hidden_activation", "hidden_act"] {
        settings.only(key, &[json!(GELU)]);
        settings.mark(key);
    }
    settings.only("use_bidirectional_attention", &[json!(false)]);
    let own = DecoderConfig {
        head_dim: Some(settings.size_or("head_dim", 256)),
        attention_bias: settings.flag_or("attention_bias", false).into(),
        tie_embeddings: true,
        mlp: MlpKind::GeGlu,
        ..family
    };
    let of = llama::read(settings, own);
    DecoderConfig { embedding_scale: (of.hidden_size as f64).sqrt(), ..of }
}
