//! Multi-head latent attention in folders: its settings and tensors.

use super::prelude::*;
use meshwork_tensor::op::RotaryScaling;
use meshwork_tensor_parallel::LatentHeads;

/// A Llama with latent attention.
pub(crate) fn read(settings: &mut Settings<'_>, family: DecoderConfig) -> DecoderConfig {
    let heads = settings.size("num_attention_heads");
    settings.only("num_key_value_heads", &[json!(heads)]);
    settings.default("q_lora_rank", json!(1536));
    let latent = LatentHeads {
        heads,
        query_rank: settings.optional_size("q_lora_rank"),
        kv_rank: settings.size_or("kv_lora_rank", 512),
        plain: settings.size_or("qk_nope_head_dim", 128),
        turning: settings.size_or("qk_rope_head_dim", 64),
        values: settings.size_or("v_head_dim", 128),
        // Whatever rms_norm_eps is.
        norm_eps: 1e-6,
    };
    let LatentHeads { plain, turning, .. } = latent;
    if !plain.is_multiple_of(2) || !turning.is_multiple_of(2) {
        let problem = format!("qk_nope_head_dim is {plain} and qk_rope_head_dim {turning}: both must be even");
        settings.problems.push(problem);
    }
    let width = latent.query_features();
    let own = DecoderConfig { latent: Some(latent), head_dim: Some(width), ..family };
    // Files have the features that turn under this name, or no such key.
    settings.mark("head_dim");
    let of = llama::read(settings, own);
    let scale = of.rotary.and_then(|rotary| match rotary.scaling? {
        RotaryScaling::Yarn(yarn) => yarn.mscale_all_dim.map(|_| yarn.score_factor() / (width as f64).sqrt()),
        _ => None,
    });
    DecoderConfig { num_kv_heads: heads, score_scale: scale, ..of }
}

/// Its settings, beside those of a Llama; null instead of `head_dim`.
pub(crate) fn write(of: &DecoderConfig, mut own: Value) -> Value {
    let Some(of) = of.latent else { return own };
    own["head_dim"] = Value::Null;
    own["q_lora_rank"] = json!(of.query_rank);
    own["kv_lora_rank"] = json!(of.kv_rank);
    own["qk_nope_head_dim"] = json!(of.plain);
    own["qk_rope_head_dim"] = json!(of.turning);
    own["v_head_dim"] = json!(of.values);
    own
}

/// Its tensors, and those of a Llama.
pub(crate) fn parts(block: &Block<'_>) -> Vec<TensorPart> {
    let Some(LatentHeads { query_rank, kv_rank, plain, turning, .. }) = block.decoder.latent else {
        return llama::parts(block);
    };
    // The first row in the tensor of one half of the turning features, and the distance between its rows.
    let of_half = |half: usize| if block.decoder.interleaved { (half, 2) } else { (half * turning / 2, 1) };
    let turned = |half: usize, here: usize, there: usize| {
        let (start, step) = of_half(half);
        Rows { here, there: there + start, step, count: turning / 2 }
    };
    match block.part {
        "self_attn.q_down.weight" => block.same("self_attn.q_a_proj.weight"),
        "self_attn.q_norm.weight" => block.same("self_attn.q_a_layernorm.weight"),
        "self_attn.q.weight" => {
            let half = (plain + turning) / 2;
            let rows = [0, 1].map(|at| {
                let rest = Rows { here: at * half + turning / 2, there: at * plain / 2, step: 1, count: plain / 2 };
                [turned(at, at * half, plain), rest]
            });
            let name = if query_rank.is_some() { "self_attn.q_b_proj.weight" } else { "self_attn.q_proj.weight" };
            rows.as_flattened().iter().map(|rows| rows.part(block, name)).collect()
        }
        "self_attn.kv_down.weight" => {
            let latent = Rows { here: 0, there: 0, step: 1, count: kv_rank };
            let turned = [0, 1].map(|at| turned(at, kv_rank + at * turning / 2, kv_rank));
            let rows = std::iter::once(latent).chain(turned);
            rows.map(|rows| rows.part(block, "self_attn.kv_a_proj_with_mqa.weight")).collect()
        }
        "self_attn.kv_norm.weight" => block.same("self_attn.kv_a_layernorm.weight"),
        "self_attn.kv.weight" => {
            let (tensor, dims) = (block.tensor("self_attn.kv_b_proj.weight"), block.dims);
            TensorPart::same(tensor, dims, &[dims[0] * dims[1], dims[2]])
        }
        _ => llama::parts(block),
    }
}

/// Features of each head, or of the one vector of all: from row `here` on of the parameter, and there in the tensor
/// every `step` rows.
struct Rows {
    here: usize,
    there: usize,
    step: usize,
    count: usize,
}

impl Rows {
    /// The part of a parameter `[heads, features, in]` or `[features, in]`.
    fn part(&self, block: &Block<'_>, tensor: &str) -> TensorPart {
        let (heads, [features, width]) = match *block.dims {
            [heads, features, width] => (Some(heads), [features, width]),
            _ => (None, [block.dims[0], block.dims[1]]),
        };
        let shape = [heads.unwrap_or(1) * features, width];
        let ranges = heads.map(|heads| 0..heads).into_iter().chain([self.here..self.here + self.count, 0..width]);
        let strides = heads.map(|_| features * width).into_iter().chain([self.step * width, 1]);
        TensorPart::of(block.tensor(tensor), &shape, ranges.collect(), self.there * width, strides.collect())
    }
}
