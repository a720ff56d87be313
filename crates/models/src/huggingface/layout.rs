//! Where each element of a parameter lies in the tensors of a Hugging Face model.
//!
//! A tensor there is a matrix per role. Here some of them are one parameter with structural dims (a fused qkv is
//! `[3, heads, head_dim, hidden]`), so that a mesh cuts it along its heads. GPT-2's matrices are stored `[in, out]`
//! there, ours `[out, in]`.

use super::Architecture;
use crate::families::{Block, TensorPart};
use meshwork_tensor::Shape;

/// The tensors that hold the parameter of this name; none if the model has no such parameter.
pub(super) fn parts(of: &Architecture, name: &str, dims: Shape) -> Vec<TensorPart> {
    let (names, decoder) = (&of.decoder.names, &of.decoder);
    let in_block = name.strip_prefix(names.block).and_then(|rest| rest.strip_prefix('.')?.split_once('.'));
    let mut parts = match in_block {
        Some((layer, part)) => (of.family.parts)(&Block { layer, part, dims: &dims, decoder }),
        None => {
            let begins = [Some(names.tokens), names.positions, Some(names.last_norm), Some(names.head)];
            let of_model = |begin: &str| [".weight", ".bias"].iter().any(|end| name.strip_suffix(end) == Some(begin));
            match begins.into_iter().flatten().any(of_model) {
                true => TensorPart::same(name, &dims, &dims),
                false => Vec::new(),
            }
        }
    };
    if of.family.norms_from_one && name.ends_with("norm.weight") {
        parts.iter_mut().for_each(|part| part.offset = 1.0);
    }
    parts
}

/// Tensors that files of a model may have beside its parameters: constants, and the head of a tied model.
pub(super) fn is_beside(of: &Architecture, tensor: &str) -> bool {
    of.family.beside.iter().any(|end| tensor.ends_with(end)) || of.decoder.tie_embeddings && is_head(of, tensor)
}

/// The name of a part's tensor in files with this prefix.
pub(super) fn name(of: &Architecture, part: &TensorPart, prefix: &str) -> String {
    if is_head(of, &part.tensor) { part.tensor.clone() } else { format!("{prefix}{}", part.tensor) }
}

/// Whether a tensor is the output head, which lies beside the model that the prefix names.
fn is_head(of: &Architecture, tensor: &str) -> bool {
    tensor.strip_suffix(".weight") == Some(of.decoder.names.head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::{GPT2, LLAMA, experts};

    /// The element of (tensor, row-major index) that holds an element of a parameter.
    fn place(parts: &[TensorPart], index: &[usize]) -> (String, usize) {
        let holds = |part: &&TensorPart| part.ranges.iter().zip(index).all(|(range, at)| range.contains(at));
        let part = parts.iter().find(holds).unwrap();
        let along = index.iter().enumerate().map(|(dim, &at)| part.along(dim, at));
        (part.tensor.clone(), part.start + along.sum::<usize>())
    }

    #[test]
    fn fused_and_transposed_matrices_are_found_element_by_element() {
        let gpt2 = Architecture::gpt2(GPT2);
        // [3, 2 heads, 4, 8] of c_attn [8, 24]: value of head 1, feature 2, from input 5.
        let qkv = parts(&gpt2, "h.0.attn.qkv.weight", Shape::new(&[3, 2, 4, 8]));
        assert_eq!(qkv[0].shape, [8, 24]);
        assert_eq!(place(&qkv, &[2, 1, 2, 5]), ("h.0.attn.c_attn.weight".to_owned(), 5 * 24 + 2 * 8 + 4 + 2));
        // [8, 2, 4] of c_proj [8, 8]: output 3 from head 1, feature 2.
        let out = parts(&gpt2, "h.7.attn.out.weight", Shape::new(&[8, 2, 4]));
        assert_eq!(place(&out, &[3, 1, 2]), ("h.7.attn.c_proj.weight".to_owned(), (4 + 2) * 8 + 3));

        let llama = Architecture::llama(LLAMA);
        let kv = parts(&llama, "layers.1.self_attn.kv.weight", Shape::new(&[2, 6, 8]));
        assert_eq!(place(&kv, &[1, 4, 3]), ("layers.1.self_attn.v_proj.weight".to_owned(), 4 * 8 + 3));
        let gate_up = parts(&llama, "layers.1.mlp.gate_up.weight", Shape::new(&[10, 2, 8]));
        assert_eq!(place(&gate_up, &[7, 0, 3]), ("layers.1.mlp.gate_proj.weight".to_owned(), 7 * 8 + 3));
        assert_eq!(place(&gate_up, &[7, 1, 3]).0, "layers.1.mlp.up_proj.weight");
        assert_eq!(gate_up[1].shape, [10, 8]);
        let bias = parts(&llama, "layers.1.mlp.gate_up.bias", Shape::new(&[10, 2]));
        assert_eq!(place(&bias, &[7, 1]), ("layers.1.mlp.up_proj.bias".to_owned(), 7));
        assert_eq!(parts(&llama, "layers.1.mlp.up.bias", Shape::new(&[10])), []);

        let mixtral = Architecture::mixtral(LLAMA, experts(10, 4, 2));
        let expert = |name: &str| format!("layers.1.block_sparse_moe.experts.{name}.weight");
        let gate_up = parts(&mixtral, "layers.1.mlp.experts.gate_up.weight", Shape::new(&[4, 10, 2, 8]));
        assert_eq!(place(&gate_up, &[3, 7, 1, 5]), (expert("3.w3"), 7 * 8 + 5));
        assert_eq!(place(&gate_up, &[0, 7, 0, 5]), (expert("0.w1"), 7 * 8 + 5));
        let down = parts(&mixtral, "layers.1.mlp.experts.down.weight", Shape::new(&[4, 8, 10]));
        assert_eq!(place(&down, &[2, 7, 5]), (expert("2.w2"), 7 * 10 + 5));
        assert_eq!((gate_up.len(), &*gate_up[1].shape, &*down[0].shape), (8, &[10, 8][..], &[8, 10][..]));
    }
}
