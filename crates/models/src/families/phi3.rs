//! Phi-3 and Phi-4 (Abdin et al., 2024): a Llama with a sliding window, of which some features of a head may turn.
//! Files have queries, keys and values in one matrix, and gate and up in another.

use super::prelude::*;

pub(crate) const FAMILY: Family = Family {
    class: "Phi3ForCausalLM",
    model_type: "phi3",
    read: |settings| {
        settings.only("resid_pdrop", &[json!(0)]);
        settings.only("embd_pdrop", &[json!(0)]);
        let own = DecoderConfig { sliding_window: settings.window(None), ..LLAMA };
        let share = settings.turning_share();
        let of = llama::read(settings, own);
        (settings.turning(of, share), None)
    },
    write: |of, _| {
        json!({
            "head_dim": null,
            "attention_bias": null,
            "mlp_bias": null,
            "sliding_window": of.sliding_window,
            "partial_rotary_factor": turning_share(of),
            "pad_token_id": null,
        })
    },
    parts: |block| {
        let (config, dims) = (block.decoder, block.dims);
        let (heads, kv_heads, d) = (config.num_heads, config.num_kv_heads, config.head_features());
        match block.part {
            "self_attn.q.weight" | "self_attn.kv.weight" => {
                let first = [0, heads, heads + kv_heads];
                block.heads("self_attn.qkv_proj.weight", heads + 2 * kv_heads, |which, head| (first[which] + head) * d)
            }
            "mlp.gate_up.weight" => {
                let (tensor, hidden) = (block.tensor("mlp.gate_up_proj.weight"), dims[2]);
                let half = |at: usize| {
                    let ranges = vec![0..dims[0], at..at + 1, 0..hidden];
                    let start = at * dims[0] * hidden;
                    TensorPart::of(&*tensor, &[2 * dims[0], hidden], ranges, start, vec![hidden, 0, 1])
                };
                vec![half(0), half(1)]
            }
            _ => llama::parts(block),
        }
    },
    ..llama::FAMILY
};
