//! GPT-NeoX (Black et al., 2022) and Pythia: layer norms and biases, an exact GELU, attention and feed-forward network
//! side by side, of which some features of a head turn. Files have each head's query, key and value one after another.

use super::prelude::*;

pub(crate) const FAMILY: Family = Family {
    class: "GPTNeoXForCausalLM",
    model_type: "gpt_neox",
    prefix: "gpt_neox.",
    read: |settings| {
        settings.only("hidden_dropout", &[json!(0)]);
        settings.default("rotary_pct", json!(0.25));
        settings.also("rotary_emb_base", "rope_theta");
        settings.default("rms_norm_eps", json!(1e-5));
        settings.also("layer_norm_eps", "rms_norm_eps");
        let share = settings.turning_share();
        let (tokens, attention, last_norm, head) = ("embed_in", "attention", "final_layer_norm", "embed_out");
        let names = Names { tokens, attention, last_norm, head, ..LLAMA.names };
        let own = DecoderConfig {
            norm: NormKind::Layer,
            attention_bias: settings.flag_or("attention_bias", true).into(),
            mlp_bias: true,
            mlp: settings.gelu("hidden_act", "gelu"),
            parallel: settings.flag_or("use_parallel_residual", true),
            names,
            ..LLAMA
        };
        let of = llama::read(settings, own);
        (settings.turning(DecoderConfig { num_kv_heads: of.num_heads, ..of }, share), None)
    },
    write: |of, _| {
        json!({
            "head_dim": null, "mlp_bias": null, "num_key_value_heads": null, "rms_norm_eps": null, "rope_theta": null,
            "hidden_act": if of.mlp == MlpKind::ExactGelu { "gelu" } else { "gelu_new" },
            "layer_norm_eps": of.norm_eps,
            "rotary_emb_base": of.rotary.map(|rotary| rotary.theta),
            "rotary_pct": turning_share(of),
            "use_parallel_residual": of.parallel,
        })
    },
    parts: |block| {
        let (heads, d, dims) = (block.decoder.num_heads, block.decoder.head_features(), block.dims);
        let (layer, kind) = block.part.rsplit_once('.').unwrap_or_default();
        let tensor = |name: &str| block.tensor(&format!("{name}.{kind}"));
        let rows = [dims[0], dims[1..].iter().product()];
        match layer {
            "attention.q" | "attention.kv" => {
                let row = |which: usize, head: usize| (3 * head + which) * d;
                block.heads(&format!("attention.query_key_value.{kind}"), 3 * heads, row)
            }
            "attention.out" => TensorPart::same(tensor("attention.dense"), dims, &rows[..dims.len().min(2)]),
            "mlp.up" => TensorPart::same(tensor("mlp.dense_h_to_4h"), dims, dims),
            "mlp.down" => TensorPart::same(tensor("mlp.dense_4h_to_h"), dims, dims),
            norm if norm.ends_with("layernorm") => block.same(block.part),
            _ => Vec::new(),
        }
    },
    beside: &[".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"],
    ..llama::FAMILY
};
