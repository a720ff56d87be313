//! Self-attention: `softmax(QKᵀ/√d, masked) · V` on `qkv [b, s, 3, heads, d]`.

use super::attention_mask::{Mask, MaskedOperands, Masking, masked_operands};
use crate::error::{Error, Result};
use crate::kernel::{AttentionShape, GroupedShape, Pattern};
use crate::shape::Shape;
use crate::tape::{Backward, Forward, Op, Var};
use crate::tensor::Tensor;
use meshwork_core::rules::{self, Operand};
use meshwork_core::{SpmdError, Ty, Types};

#[derive(Debug)]
struct SelfAttention {
    name: &'static str,
    types: Types,
    shape: AttentionShape,
    masks: Masking,
}

impl Var {
    /// `[b, s, 3, heads, d] → [b, s, heads, d]`. Heads may be sharded; the sequence may not (that is context
    /// parallelism). `mask` are documents, a window or both; `dropout` is (p, layer name) for the attention
    /// probabilities.
    ///
    /// # Errors
    /// A mask of another pattern: that is [`self_attention`](Self::self_attention).
    pub fn causal_attention<'a>(&self, mask: impl Into<Mask<'a>>, dropout: Option<(f32, &str)>) -> Result<Var> {
        let mask = mask.into();
        if mask.pattern != Pattern::Causal {
            let problem = format!("a {:?} mask: use self_attention", mask.pattern);
            return Err(Error::Shape { op: "causal_attention", problem, shapes: vec![self.shape().to_vec()] });
        }
        self.self_attention(mask, dropout)
    }

    /// The same with a mask of any pattern whose keys are those of the sequence, and without the gradient of a bias.
    ///
    /// # Errors
    /// Keys of another sequence, or a bias of pairs: those are for [`grouped_attention`](Self::grouped_attention).
    pub fn self_attention<'a>(&self, mask: impl Into<Mask<'a>>, dropout: Option<(f32, &str)>) -> Result<Var> {
        let mask = mask.into();
        let name = if mask.pattern == Pattern::Causal { "causal_attention" } else { "self_attention" };
        if mask.pattern == Pattern::Cross || mask.bias.is_some() {
            let problem = "keys of another sequence and a bias of pairs are for grouped_attention".to_owned();
            return Err(Error::Shape { op: name, problem, shapes: vec![self.shape().to_vec()] });
        }
        let extents = self.shape();
        let extent = |dim: usize| extents.get(dim).copied().unwrap_or(0);
        let shape = AttentionShape { batch: extent(0), seq: extent(1), heads: extent(3), head_dim: extent(4) };
        let op = SelfAttention { name, types: self.types(), shape, masks: Masking::new(self, 3, mask, dropout)? };
        self.tape().apply(op, &[self].into_iter().chain(mask.vars()).collect::<Vec<_>>())
    }
}

impl Op for SelfAttention {
    fn name(&self) -> &'static str {
        self.name
    }

    fn reads_values(&self) -> bool {
        true
    }

    fn operands(&self) -> &'static [&'static str] {
        const NAMES: MaskedOperands = masked_operands!("qkv");
        self.masks.operands(&NAMES)
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let qkv = operands[0];
        self.masks.infer(self.name(), (qkv, 3), &operands[1..])?;
        // The softmax runs along the sequence, and each head mixes its q, k and v over all its features.
        for whole in [1, 2, 4] {
            rules::along_dim(self.name(), qkv, whole, &[])?;
        }
        Ok(qkv.types.iter().fold(Types::NONE, |types, (axis, ty)| {
            types.with(axis, if ty == Ty::Shard(3) { Ty::Shard(2) } else { ty })
        }))
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        self.masks.scalars()
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let qkv = inputs[0];
        cx.require(qkv.shape().len() == 5 && qkv.shape()[2] == 3, "qkv is [batch, seq, 3, heads, head_dim]")?;
        let s = self.shape;
        if let Some(cache) = cx.tape().cache() {
            cx.require(!self.masks.has_positions(), "decoding continues one document")?;
            self.masks.require_plain(self.name(), "decoding continues causal attention")?;
            let (layout, rows, width) = (qkv.device().layout()?, s.batch * s.seq, s.heads * s.head_dim);
            let q = layout.narrow(qkv.buffer(), rows, 3, width, 0..1)?;
            let kv = layout.narrow(qkv.buffer(), rows, 3, width, 1..3)?;
            let (masks, group) = (self.masks.with(&[]), cx.tape().cache_group(self.types));
            let out = cache.attend(qkv.device(), GroupedShape::alone(s), [&q, &kv], masks, group)?;
            return Tensor::from_buffer(qkv.device(), out, [s.batch, s.seq, s.heads, s.head_dim]);
        }
        let (out, lse) = qkv.device().attention()?.causal(s, qkv.buffer(), self.masks.with(&inputs[1..]))?;
        let out = Tensor::from_buffer(qkv.device(), out, [s.batch, s.seq, s.heads, s.head_dim])?;
        cx.save_input(0)?;
        cx.save(&out)?;
        cx.save_exact(&Tensor::from_buffer(qkv.device(), lse, [s.batch, s.heads, s.seq])?)?;
        inputs[1..].iter().try_for_each(|mask| cx.save(mask))?;
        Ok(out)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if !cx.needs(0) {
            return Ok(vec![None; self.operands().len()]);
        }
        let (qkv, out, lse) = (cx.saved(0)?, cx.saved(1)?, cx.saved(2)?);
        let masks = (1..self.operands().len()).map(|i| cx.saved(2 + i)).collect::<Result<Vec<_>>>()?;
        let dqkv = grad.device().attention()?.causal_grad(
            self.shape,
            grad.buffer(),
            qkv.buffer(),
            out.buffer(),
            lse.buffer(),
            self.masks.with(&masks.iter().collect::<Vec<_>>()),
        )?;
        let s = self.shape;
        let shape = Shape::new(&[s.batch, s.seq, 3, s.heads, s.head_dim]);
        let dqkv = Some(Tensor::from_buffer(grad.device(), dqkv, shape)?);
        Ok([dqkv].into_iter().chain(masks.iter().map(|_| None)).collect())
    }
}
