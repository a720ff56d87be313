//! Llama (Touvron et al., 2023; Grattafiori et al., 2024): root mean square norms in front of each block, rotary
//! positions, groups of heads that share keys and values, SwiGLU, in most of them no biases, an output head tied to the
//! token table or not.
//!
//! # Parameters
//!
//! The parameters here and in the Hugging Face format. Weights are `[out.., in]` in both.
//!
//! | here, `layers.{n}.` | dims | there, `model.layers.{n}.` |
//! |---|---|---|
//! | `self_attn.q.weight` | `[heads, head_dim, hidden]` | `self_attn.q_proj.weight` |
//! | `self_attn.kv.weight` | `[2, kv_heads · head_dim, hidden]` | `self_attn.k_proj.weight`, then `self_attn.v_proj.weight` |
//! | `self_attn.out.weight` | `[hidden, heads, head_dim]` | `self_attn.o_proj.weight` |
//! | `mlp.gate_up.weight` | `[ffn, 2, hidden]` | `mlp.gate_proj.weight` and `mlp.up_proj.weight`, row by row |
//! | `mlp.down.weight` | `[hidden, ffn]` | `mlp.down_proj.weight` |
//! | `input_layernorm.weight`, `post_attention_layernorm.weight` | `[hidden]` | the same |
//!
//! `embed_tokens.weight`, `norm.weight` and `lm_head.weight` are the same in both. Biases of these products and norms
//! of queries and keys (`self_attn.q_norm.weight`), which other families have, follow them.

use super::prelude::*;
pub use crate::decoder::{DecoderConfig as LlamaConfig, DecoderModel as Llama};

/// A tiny Llama for trials, from which each family that is one but for some fields begins.
pub const LLAMA: DecoderConfig = DecoderConfig {
    num_kv_heads: 2,
    tie_embeddings: false,
    norm: NormKind::Rms,
    fused_qkv: false,
    attention_bias: AttentionBias { input: false, output: false },
    mlp_bias: false,
    rotary: Some(Rotary::new(10_000.0)),
    mlp: MlpKind::SwiGlu,
    names: Names {
        tokens: "embed_tokens",
        positions: None,
        block: "layers",
        before: [Some("input_layernorm"), Some("post_attention_layernorm")],
        behind: [None, None],
        attention: "self_attn",
        mlp: "mlp",
        last_norm: "norm",
        head: "lm_head",
    },
    ..super::gpt2::GPT2
};

/// Presets by name: a tiny one for trials, and published shapes for planning. Rotary frequencies are not scaled here;
/// Llama 3.1, which has the largest shape, scales them by [`LLAMA_3_1`](meshwork_tensor::op::RotaryScaling::LLAMA_3_1).
///
/// ```
/// let presets = meshwork_models::llama::PRESETS;
/// assert!(presets.iter().any(|(name, config)| *name == "llama3-8b" && config.num_kv_heads == 8));
/// ```
pub const PRESETS: [(&str, LlamaConfig); 4] = [
    ("llama-tiny", LLAMA),
    ("llama3-8b", llama3(32, 4096, [32, 8], 14_336)),
    ("llama3-70b", llama3(80, 8192, [64, 8], 28_672)),
    ("llama3-405b", llama3(126, 16_384, [128, 8], 53_248)),
];

/// The values that all sizes of Llama 3 share.
const fn llama3(
    num_layers: usize,
    hidden_size: usize,
    [num_heads, num_kv_heads]: [usize; 2],
    ffn_hidden_size: usize,
) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 128_256,
        num_layers,
        hidden_size,
        num_heads,
        num_kv_heads,
        ffn_hidden_size,
        seq_len: 8192,
        rotary: Some(Rotary::new(500_000.0)),
        ..LLAMA
    }
}

/// The family.
pub const FAMILY: Family = Family {
    class: "LlamaForCausalLM",
    model_type: "llama",
    prefix: "model.",
    norms_from_one: false,
    read: |settings| {
        let own = DecoderConfig {
            head_dim: settings.optional_size("head_dim"),
            attention_bias: settings.flag_or("attention_bias", false).into(),
            mlp_bias: settings.flag_or("mlp_bias", false),
            ..LLAMA
        };
        (read(settings, own), None)
    },
    write: |_, _| json!({}),
    parts,
    beside: &[".rotary_emb.inv_freq"],
};

/// The settings that all families like Llama have. What a family reads by itself is not read again, nor held to the
/// value that it has for a Llama.
pub(crate) fn read(settings: &mut Settings<'_>, family: DecoderConfig) -> DecoderConfig {
    let hidden_size = settings.size("hidden_size");
    let num_heads = settings.size("num_attention_heads");
    let num_kv_heads = settings.size_or("num_key_value_heads", num_heads);
    if family.head_dim.is_none() {
        settings.divides(("num_attention_heads", num_heads), ("hidden_size", hidden_size));
        settings.only("head_dim", &[json!(hidden_size / num_heads)]);
    }
    settings.divides(("num_key_value_heads", num_kv_heads), ("num_attention_heads", num_heads));
    settings.only("hidden_act", &["silu".into()]);
    settings.only("attention_bias", &[false.into()]);
    settings.only("mlp_bias", &[false.into()]);
    settings.only("attention_dropout", &[json!(0)]);
    DecoderConfig {
        rotary: settings.rotary(),
        vocab_size: settings.size("vocab_size"),
        num_layers: settings.size("num_hidden_layers"),
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim: family.head_dim.filter(|features| features * num_heads != hidden_size),
        ffn_hidden_size: settings.size("intermediate_size"),
        seq_len: settings.size_or("max_position_embeddings", 2048),
        norm_eps: settings.number_or("rms_norm_eps", 1e-6),
        tie_embeddings: settings.flag_or("tie_word_embeddings", family.tie_embeddings),
        ..family
    }
}

/// What all families like Llama write.
pub(crate) fn write(config: &DecoderConfig) -> Value {
    json!({
        "vocab_size": config.vocab_size,
        "max_position_embeddings": rotary::positions(config),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_features(),
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rotary.map(|rotary| rotary.theta),
        "rope_scaling": config.rotary.and_then(|rotary| rotary.scaling).map(rotary::write),
        "attention_bias": config.attention_bias.input,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_embeddings,
    })
}

pub(crate) fn parts(block: &Block<'_>) -> Vec<TensorPart> {
    let dims = block.dims;
    // Outputs of an input projection are the dims before the last, inputs of an output projection those behind the
    // first.
    let matrix = |name: &str, out: usize| {
        let shape = [dims[..out].iter().product(), dims[out..].iter().product()];
        TensorPart::same(block.tensor(name), dims, &shape)
    };
    let each = |names: [&str; 2], dim: usize, shape: &[usize]| {
        TensorPart::each(names.map(|name| block.tensor(name)), dims, dim, shape)
    };
    match block.part {
        "self_attn.q.weight" => matrix("self_attn.q_proj.weight", 2),
        "self_attn.q.bias" => TensorPart::same(block.tensor("self_attn.q_proj.bias"), dims, &[dims.iter().product()]),
        "self_attn.kv.weight" => each(["self_attn.k_proj.weight", "self_attn.v_proj.weight"], 0, &dims[1..]),
        "self_attn.kv.bias" => each(["self_attn.k_proj.bias", "self_attn.v_proj.bias"], 0, &dims[1..]),
        "self_attn.out.weight" => matrix("self_attn.o_proj.weight", 1),
        "self_attn.out.bias" => block.same("self_attn.o_proj.bias"),
        "mlp.gate_up.weight" => each(["mlp.gate_proj.weight", "mlp.up_proj.weight"], 1, &[dims[0], dims[2]]),
        "mlp.gate_up.bias" => each(["mlp.gate_proj.bias", "mlp.up_proj.bias"], 1, &dims[..1]),
        "mlp.down.weight" => matrix("mlp.down_proj.weight", 1),
        "mlp.down.bias" => block.same("mlp.down_proj.bias"),
        part if part.ends_with("norm.weight") => block.same(part),
        _ => Vec::new(),
    }
}
