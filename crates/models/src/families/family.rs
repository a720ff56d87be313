//! What a family of decoders is, and the tensors of a block.

use super::llama;
use super::part::TensorPart;
use super::settings::Settings;
use crate::decoder_config::DecoderConfig;
use crate::experts::ExpertsConfig;
use serde_json::Value;
use std::fmt;

/// A family of decoders, as Hugging Face folders have it.
pub struct Family {
    /// Its class in `transformers`.
    pub class: &'static str,
    /// The `model_type` of that class.
    pub model_type: &'static str,
    /// The prefix that files have before the names of all tensors but the head.
    pub(crate) prefix: &'static str,
    /// Whether files have the weights of norms less 1.
    pub(crate) norms_from_one: bool,
    /// The model that settings describe.
    pub(crate) read: fn(&mut Settings<'_>) -> (DecoderConfig, Option<ExpertsConfig>),
    /// The settings of a model, beside those that all families like Llama have; null instead of one of those that the
    /// family does not have.
    pub(crate) write: fn(&DecoderConfig, Option<&ExpertsConfig>) -> Value,
    /// The tensors that hold a parameter of a block; none if there is no such parameter.
    pub(crate) parts: fn(&Block<'_>) -> Vec<TensorPart>,
    /// Ends of the names of constants that files may have beside the parameters.
    pub(crate) beside: &'static [&'static str],
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.class == other.class
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.class)
    }
}

/// A parameter of a block: `{names.block}.{layer}.{part}`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block<'a> {
    pub(crate) layer: &'a str,
    pub(crate) part: &'a str,
    pub(crate) dims: &'a [usize],
    pub(crate) decoder: &'a DecoderConfig,
}

impl Block<'_> {
    /// The name of a tensor of the block.
    pub(crate) fn tensor(&self, name: &str) -> String {
        format!("{}.{}.{name}", self.decoder.names.block, self.layer)
    }

    /// The whole parameter as a tensor of its own shape.
    pub(crate) fn same(&self, name: &str) -> Vec<TensorPart> {
        TensorPart::same(self.tensor(name), self.dims, self.dims)
    }

    /// Queries, keys or values that lie head by head in one tensor of so many heads: head `head` of queries (`which`
    /// 0), keys (1) or values (2) begins at row `row(which, head)`. Features that do not turn lie behind those that do
    /// there.
    pub(crate) fn heads(&self, tensor: &str, heads: usize, row: impl Fn(usize, usize) -> usize) -> Vec<TensorPart> {
        let (tensor, d, dims) = (self.tensor(tensor), self.decoder.head_features(), self.dims);
        let of_queries = !self.part.contains(".kv.");
        // The dims of inputs: none of a bias.
        let inner = &dims[2..];
        let width: usize = inner.iter().product();
        let shape = [&[heads * d][..], inner].concat();
        let turning = self.decoder.rotary.and_then(|rotary| rotary.features).unwrap_or(d);
        let (half, rest) = (turning / 2, (d - turning) / 2);
        // (the first feature here, the first there, their number)
        let halves = [(0, 0, half), (half, turning, rest), (d / 2, half, half), (d / 2 + half, turning + rest, rest)];
        let whole = [(0, 0, d)];
        let mut parts = Vec::new();
        for which in if of_queries { 0..1 } else { 1..3 } {
            let count = if which == 0 { self.decoder.num_heads } else { self.decoder.num_kv_heads };
            for head in 0..count {
                let pieces = if which < 2 && turning < d { &halves[..] } else { &whole[..] };
                for &(here, there, features) in pieces {
                    let (first, second) = match of_queries {
                        true => (head..head + 1, here..here + features),
                        false => (which - 1..which, head * d + here..head * d + here + features),
                    };
                    let ranges = [first, second].into_iter().chain(inner.iter().map(|&extent| 0..extent)).collect();
                    let strides = [0, width].into_iter().chain(inner.iter().map(|_| 1)).collect();
                    let start = (row(which, head) + there) * width;
                    parts.push(TensorPart::of(&*tensor, &shape, ranges, start, strides));
                }
            }
        }
        parts
    }

    /// Shared experts, which are one feed-forward network in this folder.
    pub(crate) fn shared_experts(&self, folder: &str) -> Vec<TensorPart> {
        let mut parts = llama::parts(&Block { part: &self.part.replace("mlp.shared.", "mlp."), ..*self });
        parts.iter_mut().for_each(|part| part.tensor = part.tensor.replace(".mlp.", &format!(".{folder}.")));
        parts
    }

    /// Experts with three matrices each, `{folder}.{expert}.{name}.weight`: gate, up and down.
    pub(crate) fn experts(&self, folder: &str, [gate, up, down]: [&str; 3]) -> Vec<TensorPart> {
        let (experts, dims) = (0..self.dims[0], self.dims);
        let at = |expert: usize, matrix: &str, at: Vec<(usize, usize)>, shape: &[usize]| {
            TensorPart::at(self.tensor(&format!("{folder}.{expert}.{matrix}.weight")), dims, at, shape)
        };
        match self.part {
            "mlp.experts.gate_up.weight" => experts
                .flat_map(|expert| [(0, gate), (1, up)].map(|(index, matrix)| (expert, index, matrix)))
                .map(|(expert, index, matrix)| at(expert, matrix, vec![(0, expert), (2, index)], &[dims[1], dims[3]]))
                .collect(),
            "mlp.experts.down.weight" => {
                experts.map(|expert| at(expert, down, vec![(0, expert)], &dims[1..])).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// `layer_types` of a model with a window in some layers.
pub(crate) fn layer_types(of: &DecoderConfig) -> Value {
    let kind = |layer| {
        if of.window(layer).is_some() { "sliding_attention" } else { "full_attention" }
    };
    (0..of.num_layers).map(kind).collect()
}

/// The share of a head's features that turn.
pub(crate) fn turning_share(of: &DecoderConfig) -> f64 {
    let all = of.head_features();
    of.rotary.and_then(|rotary| rotary.features).unwrap_or(all) as f64 / all as f64
}
