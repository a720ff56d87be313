//! GPT-2 (Radford et al., 2019): layer norms in front of each block, learned positions, GELU (tanh form), biases, an
//! output head tied to the token table or not. Its folders have their matrices as `[in, out]`.

use super::prelude::*;
pub use crate::decoder::{DecoderConfig as Gpt2Config, DecoderModel as Gpt2};
pub use crate::decoder_config::GPT2;

/// The family.
pub const FAMILY: Family = Family {
    class: "GPT2LMHeadModel",
    model_type: "gpt2",
    prefix: "transformer.",
    norms_from_one: false,
    read,
    write,
    parts,
    beside: &[".attn.bias", ".attn.masked_bias"],
};

fn read(settings: &mut Settings<'_>) -> (DecoderConfig, Option<ExpertsConfig>) {
    let hidden_size = settings.size("n_embd");
    let num_heads = settings.size("n_head");
    settings.only("activation_function", &["gelu_new".into(), "gelu_pytorch_tanh".into(), "gelu_fast".into()]);
    settings.only("layer_norm_epsilon", &[json!(1e-5)]);
    settings.only("scale_attn_weights", &[true.into()]);
    settings.only("scale_attn_by_inverse_layer_idx", &[false.into()]);
    settings.only("reorder_and_upcast_attn", &[false.into(), true.into()]);
    settings.only("add_cross_attention", &[false.into()]);
    settings.divides(("n_head", num_heads), ("n_embd", hidden_size));
    let config = DecoderConfig {
        dropout: settings.one_dropout(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.1),
        vocab_size: settings.size("vocab_size"),
        num_layers: settings.size("n_layer"),
        hidden_size,
        num_heads,
        num_kv_heads: num_heads,
        ffn_hidden_size: settings.size_or("n_inner", 4 * hidden_size),
        seq_len: settings.size_or("n_positions", 1024),
        tie_embeddings: settings.flag_or("tie_word_embeddings", true),
        ..GPT2
    };
    (config, None)
}

fn write(decoder: &DecoderConfig, _: Option<&ExpertsConfig>) -> Value {
    json!({
        "vocab_size": decoder.vocab_size,
        "n_positions": decoder.seq_len,
        "n_ctx": decoder.seq_len,
        "n_embd": decoder.hidden_size,
        "n_layer": decoder.num_layers,
        "n_head": decoder.num_heads,
        "n_inner": decoder.ffn_hidden_size,
        "activation_function": "gelu_new",
        "resid_pdrop": decoder.dropout,
        "embd_pdrop": decoder.dropout,
        "attn_pdrop": decoder.dropout,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": decoder.tie_embeddings,
    })
}

fn parts(block: &Block<'_>) -> Vec<TensorPart> {
    let (dims, tensor) = (block.dims, |tensor: &str| block.tensor(tensor));
    match block.part {
        "ln_1.weight" | "ln_1.bias" | "ln_2.weight" | "ln_2.bias" => block.same(block.part),
        "attn.qkv.weight" => TensorPart::transposed(tensor("attn.c_attn.weight"), dims, 3),
        "attn.qkv.bias" => TensorPart::same(tensor("attn.c_attn.bias"), dims, &[dims.iter().product()]),
        "attn.out.weight" => TensorPart::transposed(tensor("attn.c_proj.weight"), dims, 1),
        "attn.out.bias" => block.same("attn.c_proj.bias"),
        "mlp.up.weight" => TensorPart::transposed(tensor("mlp.c_fc.weight"), dims, 1),
        "mlp.up.bias" => block.same("mlp.c_fc.bias"),
        "mlp.down.weight" => TensorPart::transposed(tensor("mlp.c_proj.weight"), dims, 1),
        "mlp.down.bias" => block.same("mlp.c_proj.bias"),
        _ => Vec::new(),
    }
}
