//! Where each element of a parameter lies in the tensors of a Hugging Face model.
//!
//! A tensor there is a matrix per role. Here some of them are one parameter with structural dims (a fused qkv is
//! `[3, heads, head_dim, hidden]`), so that a mesh cuts it along its heads. GPT-2's matrices are stored `[in, out]`
//! there, ours `[out, in]`.

use super::Architecture;
use meshwork_tensor::Shape;
use std::ops::Range;

/// A part of a parameter that lies in one tensor: one index of each dim in `at`, all of the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorPart {
    /// The tensor's name, without the prefix that some files have.
    pub(super) tensor: String,
    /// Its extents.
    pub(super) shape: Vec<usize>,
    /// The (dim, index) of the parameter that this tensor has; all of it if there is none.
    pub(super) at: Vec<(usize, usize)>,
    /// Elements of the tensor between neighbours along each dim of the parameter; 0 along the dims of `at`.
    pub(super) strides: Vec<usize>,
}

impl TensorPart {
    /// The whole parameter, element for element, as a tensor of this shape.
    fn same(tensor: impl Into<String>, dims: &[usize], shape: &[usize]) -> Vec<Self> {
        let strides = row_major(dims);
        vec![Self { tensor: tensor.into(), shape: shape.to_vec(), at: Vec::new(), strides }]
    }

    /// The whole parameter `[out.., in..]`, of which the first `out` dims are outputs, as a matrix `[in, out]`.
    fn transposed(tensor: impl Into<String>, dims: &[usize], out: usize) -> Vec<Self> {
        let (columns, rows) = (dims[..out].iter().product(), dims[out..].iter().product());
        let inner = row_major(&dims[out..]).into_iter().map(|stride| stride * columns);
        let strides = row_major(&dims[..out]).into_iter().chain(inner).collect();
        vec![Self { tensor: tensor.into(), shape: vec![rows, columns], at: Vec::new(), strides }]
    }

    /// The part with these indices of some dims as a tensor of this shape, row-major in the others.
    fn at(tensor: String, dims: &[usize], at: Vec<(usize, usize)>, shape: &[usize]) -> Self {
        let is_fixed = |dim: usize| at.iter().any(|&(fixed, _)| fixed == dim);
        let others: Vec<usize> = (0..dims.len()).filter(|&dim| !is_fixed(dim)).map(|dim| dims[dim]).collect();
        let mut free = row_major(&others).into_iter();
        let strides = (0..dims.len()).map(|dim| if is_fixed(dim) { 0 } else { free.next().unwrap_or(0) }).collect();
        Self { tensor, shape: shape.to_vec(), at, strides }
    }

    /// One tensor for each index of dim `dim`.
    fn each<const N: usize>(tensors: [String; N], dims: &[usize], dim: usize, shape: &[usize]) -> Vec<Self> {
        let part = |(index, tensor)| Self::at(tensor, dims, vec![(dim, index)], shape);
        tensors.into_iter().enumerate().map(part).collect()
    }

    /// The indices of this part among `ranges` of the parameter's dims, or of one dim if that is empty.
    pub(super) fn within(&self, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
        let mut ranges = ranges.to_vec();
        for &(dim, at) in &self.at {
            let range = &mut ranges[dim];
            *range = at.clamp(range.start, range.end)..(at + 1).clamp(range.start, range.end);
        }
        ranges
    }
}

fn row_major(dims: &[usize]) -> Vec<usize> {
    (0..dims.len()).map(|dim| dims[dim + 1..].iter().product()).collect()
}

/// The tensors that hold the parameter of this name; none if the model has no such parameter.
pub(super) fn parts(architecture: &Architecture, name: &str, dims: Shape) -> Vec<TensorPart> {
    match architecture {
        Architecture::Gpt2(_) => gpt2(name, &dims),
        Architecture::Llama(_) => llama(name, &dims),
        Architecture::Mixtral(..) => mixtral(name, &dims),
    }
}

fn gpt2(name: &str, dims: &[usize]) -> Vec<TensorPart> {
    let plain = |tensor: &str| TensorPart::same(tensor, dims, dims);
    let Some((layer, part)) = name.strip_prefix("h.").and_then(|rest| rest.split_once('.')) else {
        return match name {
            "wte.weight" | "wpe.weight" | "ln_f.weight" | "ln_f.bias" | "lm_head.weight" => plain(name),
            _ => Vec::new(),
        };
    };
    let tensor = |tensor: &str| format!("h.{layer}.{tensor}");
    let whole: usize = dims.iter().product();
    match part {
        "ln_1.weight" | "ln_1.bias" | "ln_2.weight" | "ln_2.bias" => plain(name),
        "attn.qkv.weight" => TensorPart::transposed(tensor("attn.c_attn.weight"), dims, 3),
        "attn.qkv.bias" => TensorPart::same(tensor("attn.c_attn.bias"), dims, &[whole]),
        "attn.out.weight" => TensorPart::transposed(tensor("attn.c_proj.weight"), dims, 1),
        "attn.out.bias" => plain(&tensor("attn.c_proj.bias")),
        "mlp.up.weight" => TensorPart::transposed(tensor("mlp.c_fc.weight"), dims, 1),
        "mlp.up.bias" => plain(&tensor("mlp.c_fc.bias")),
        "mlp.down.weight" => TensorPart::transposed(tensor("mlp.c_proj.weight"), dims, 1),
        "mlp.down.bias" => plain(&tensor("mlp.c_proj.bias")),
        _ => Vec::new(),
    }
}

fn llama(name: &str, dims: &[usize]) -> Vec<TensorPart> {
    let Some((layer, part)) = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) else {
        return match name {
            "embed_tokens.weight" | "norm.weight" | "lm_head.weight" => TensorPart::same(name, dims, dims),
            _ => Vec::new(),
        };
    };
    let tensor = |tensor: &str| format!("layers.{layer}.{tensor}.weight");
    // Outputs of an input projection are the dims before the last, inputs of an output projection those behind the
    // first.
    let matrix = |name: &str, out: usize| {
        let shape = [dims[..out].iter().product(), dims[out..].iter().product()];
        TensorPart::same(tensor(name), dims, &shape)
    };
    match part {
        "input_layernorm.weight" | "post_attention_layernorm.weight" => TensorPart::same(name, dims, dims),
        "self_attn.q.weight" => matrix("self_attn.q_proj", 2),
        "self_attn.kv.weight" => {
            TensorPart::each(["k", "v"].map(|one| tensor(&format!("self_attn.{one}_proj"))), dims, 0, &dims[1..])
        }
        "self_attn.out.weight" => matrix("self_attn.o_proj", 1),
        "mlp.gate_up.weight" => {
            TensorPart::each(["gate", "up"].map(|one| tensor(&format!("mlp.{one}_proj"))), dims, 1, &[dims[0], dims[2]])
        }
        "mlp.down.weight" => matrix("mlp.down_proj", 1),
        _ => Vec::new(),
    }
}

/// A Llama, with three matrices for each expert: w1 is the gate, w3 is up, w2 is down.
fn mixtral(name: &str, dims: &[usize]) -> Vec<TensorPart> {
    let split = |rest: &'_ str| rest.split_once(".mlp.").map(|(layer, part)| (layer.to_owned(), part.to_owned()));
    let Some((layer, part)) = name.strip_prefix("layers.").and_then(split) else { return llama(name, dims) };
    let tensor =
        |expert: usize, matrix: &str| format!("layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight");
    match &*part {
        "router.weight" => TensorPart::same(format!("layers.{layer}.block_sparse_moe.gate.weight"), dims, dims),
        "experts.gate_up.weight" => {
            let of = |expert: usize| {
                let part = move |(index, matrix): (usize, &str)| {
                    TensorPart::at(tensor(expert, matrix), dims, vec![(0, expert), (2, index)], &[dims[1], dims[3]])
                };
                ["w1", "w3"].into_iter().enumerate().map(part).collect::<Vec<_>>()
            };
            (0..dims[0]).flat_map(of).collect()
        }
        "experts.down.weight" => (0..dims[0])
            .map(|expert| TensorPart::at(tensor(expert, "w2"), dims, vec![(0, expert)], &dims[1..]))
            .collect(),
        _ => Vec::new(),
    }
}

/// Tensors that files of a model may have beside its parameters: constants, and the head of a tied model.
pub(super) fn is_beside(architecture: &Architecture, tensor: &str) -> bool {
    match architecture {
        Architecture::Gpt2(config) => {
            tensor.starts_with("h.") && (tensor.ends_with(".attn.bias") || tensor.ends_with(".attn.masked_bias"))
                || config.tie_embeddings && tensor == "lm_head.weight"
        }
        Architecture::Llama(config) | Architecture::Mixtral(config, _) => {
            tensor.ends_with(".rotary_emb.inv_freq") || config.tie_embeddings && tensor == "lm_head.weight"
        }
    }
}

/// The prefix that files have before the names of all tensors but the head.
pub(super) fn prefix(architecture: &Architecture) -> &'static str {
    match architecture {
        Architecture::Gpt2(_) => "transformer.",
        Architecture::Llama(_) | Architecture::Mixtral(..) => "model.",
    }
}

#[cfg(test)]
mod tests {
    use super::super::config;
    use super::*;
    use crate::gpt2::Gpt2Config;
    use crate::llama::PRESETS;

    /// The element of (tensor, row-major index) that holds an element of a parameter.
    fn place(parts: &[TensorPart], index: &[usize]) -> (String, usize) {
        let part = parts.iter().find(|part| part.at.iter().all(|&(dim, at)| index[dim] == at)).unwrap();
        (part.tensor.clone(), part.strides.iter().zip(index).map(|(stride, at)| stride * at).sum())
    }

    #[test]
    fn fused_and_transposed_matrices_are_found_element_by_element() {
        let gpt2 = Architecture::Gpt2(Gpt2Config::default());
        // [3, 2 heads, 4, 8] of c_attn [8, 24]: value of head 1, feature 2, from input 5.
        let qkv = parts(&gpt2, "h.0.attn.qkv.weight", Shape::new(&[3, 2, 4, 8]));
        assert_eq!(qkv[0].shape, [8, 24]);
        assert_eq!(place(&qkv, &[2, 1, 2, 5]), ("h.0.attn.c_attn.weight".to_owned(), 5 * 24 + 2 * 8 + 4 + 2));
        // [8, 2, 4] of c_proj [8, 8]: output 3 from head 1, feature 2.
        let out = parts(&gpt2, "h.7.attn.out.weight", Shape::new(&[8, 2, 4]));
        assert_eq!(place(&out, &[3, 1, 2]), ("h.7.attn.c_proj.weight".to_owned(), (4 + 2) * 8 + 3));

        let llama = Architecture::Llama(PRESETS[0].1);
        let kv = parts(&llama, "layers.1.self_attn.kv.weight", Shape::new(&[2, 6, 8]));
        assert_eq!(place(&kv, &[1, 4, 3]), ("layers.1.self_attn.v_proj.weight".to_owned(), 4 * 8 + 3));
        let gate_up = parts(&llama, "layers.1.mlp.gate_up.weight", Shape::new(&[10, 2, 8]));
        assert_eq!(place(&gate_up, &[7, 0, 3]), ("layers.1.mlp.gate_proj.weight".to_owned(), 7 * 8 + 3));
        assert_eq!(place(&gate_up, &[7, 1, 3]).0, "layers.1.mlp.up_proj.weight");
        assert_eq!(gate_up[1].shape, [10, 8]);
        assert_eq!(parts(&llama, "layers.1.mlp.gate_up.bias", Shape::new(&[10, 2])), []);

        let mixtral = Architecture::Mixtral(PRESETS[0].1, config::experts(10, 4, 2));
        let expert = |name: &str| format!("layers.1.block_sparse_moe.experts.{name}.weight");
        let gate_up = parts(&mixtral, "layers.1.mlp.experts.gate_up.weight", Shape::new(&[4, 10, 2, 8]));
        assert_eq!(place(&gate_up, &[3, 7, 1, 5]), (expert("3.w3"), 7 * 8 + 5));
        assert_eq!(place(&gate_up, &[0, 7, 0, 5]), (expert("0.w1"), 7 * 8 + 5));
        let down = parts(&mixtral, "layers.1.mlp.experts.down.weight", Shape::new(&[4, 8, 10]));
        assert_eq!(place(&down, &[2, 7, 5]), (expert("2.w2"), 7 * 10 + 5));
        assert_eq!((gate_up.len(), &*gate_up[1].shape, &*down[0].shape), (8, &[10, 8][..], &[8, 10][..]));
    }
}
