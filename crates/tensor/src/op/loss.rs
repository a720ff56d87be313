//! Softmax cross entropy, summed over the tokens of each sample: `L_s = Σ_i (ln Σ_v exp(x_siv) - x_si,target)`. Never a
//! mean: the division by the number of unmasked tokens of the whole step is in the seed of backward. The caller, who
//! knows all samples, sums over them. Or over the tokens of each of a sample's groups, such as the documents that share
//! a sequence.
//!
//! The vocab-parallel form (Megatron-LM, section 3) is the only collective operation here, as its name says: an
//! all-reduce of the row maxima, then one of the sums and the target logit together. Where ranks cut the sequence too,
//! as cp does, it gathers these three numbers of each token, so that the loss of a sample is summed over its tokens as
//! on one rank.

use super::prelude::*;
use crate::device::Device;
use crate::kernel::VocabShard;
use crate::tape::Tape;
use meshwork_core::tree::Counter;
use meshwork_core::{Axes, Axis, Buffer, ReduceOp};
use std::sync::Arc;

/// The operation behind both forms of the loss.
#[derive(Debug)]
pub struct VocabLoss {
    pub(super) shard: VocabShard,
    pub(super) cut_over: Option<Axis>,
    /// The axes that cut the sequence, over which the numbers of tokens are gathered.
    sequence: Axes,
    /// The groups of tokens of a sample, if the loss is theirs.
    groups: Option<usize>,
}

/// The target of each token, and the sums of losses that are asked for: one for each sample, or one for each of its
/// groups of tokens.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// Ids, i32 `[samples, ..]`; negative ones are masked.
    pub ids: &'a Var,
    /// The groups of tokens, if there are some.
    pub groups: Option<TokenGroups<'a>>,
}

/// Groups of the tokens of each sample. A loss by groups is `[samples, count]`.
#[derive(Clone, Copy, Debug)]
pub struct TokenGroups<'a> {
    /// The group of each token, i32, which lies as the ids of the targets do. The loss of a token whose group is
    /// negative counts nowhere, and has no gradient.
    pub of: &'a Var,
    /// The number of groups.
    pub count: usize,
}

impl<'a> From<&'a Var> for Targets<'a> {
    fn from(ids: &'a Var) -> Self {
        Self { ids, groups: None }
    }
}

impl<'a> Targets<'a> {
    /// The operands of a loss that reads `first` too.
    pub(super) fn behind(self, first: &[&'a Var]) -> Vec<&'a Var> {
        first.iter().copied().chain([self.ids]).chain(self.groups.map(|groups| groups.of)).collect()
    }
}

impl Var {
    /// The loss of each sample, `[samples]` in f64, or of each of its groups of tokens, `[samples, groups]`, of whole
    /// logits `[samples, .., vocab]` against i32 targets `[samples, ..]`, negative ones masked.
    pub fn cross_entropy<'a>(&'a self, targets: impl Into<Targets<'a>>) -> Result<Var> {
        let (width, targets) = (self.shape().last().copied().unwrap_or(0), targets.into());
        self.tape().apply(VocabLoss::whole(width, targets), &targets.behind(&[self]))
    }

    /// The same for logits whose last dim, `vocab` over all ranks, is cut over `axis`; padding is never included.
    /// `Invariant` on `axis`, and on axes that cut the sequence `[samples, sequence, vocab]`.
    pub fn vocab_parallel_cross_entropy<'a>(
        &'a self,
        targets: impl Into<Targets<'a>>,
        axis: Axis,
        vocab: usize,
    ) -> Result<Var> {
        let (width, targets) = (self.shape().last().copied().unwrap_or(0), targets.into());
        self.tape().apply(VocabLoss::cut(self, axis, width, vocab, targets), &targets.behind(&[self]))
    }
}

impl VocabLoss {
    /// Of logits of all `width` ids.
    pub(super) fn whole(width: usize, targets: Targets<'_>) -> Self {
        let groups = targets.groups.map(|groups| groups.count);
        Self { shard: VocabShard::whole(width), cut_over: None, sequence: Axes::NONE, groups }
    }

    /// Of the `width` columns that this rank has of the logits of `vocab` ids, which are cut over `axis`. The tokens
    /// lie as those of x `[samples, .., features]`.
    pub(super) fn cut(x: &Var, axis: Axis, width: usize, vocab: usize, targets: Targets<'_>) -> Self {
        let first = (x.tape().rank().coords().get(axis) * width).min(vocab);
        let sequence = x.types().cuts(1).filter(|_| x.shape().len() == 3).collect();
        let shard = VocabShard { first, valid: width.min(vocab - first), width, skipped: 0, pitch: width, vocab };
        Self { shard, cut_over: Some(axis), sequence, ..Self::whole(width, targets) }
    }

    /// Those of `names` that are operands: the last one is the groups.
    pub(super) fn operands(&self, names: &'static [&'static str]) -> &'static [&'static str] {
        &names[..names.len() - usize::from(self.groups.is_none())]
    }

    /// The parts of the vocabulary here whose sums are separate: those of the reduction blocks.
    pub(super) fn parts(&self, tape: &Tape) -> impl Iterator<Item = VocabShard> {
        let degree = self.cut_over.map_or(1, |axis| tape.rank().mesh().degree(axis));
        self.shard.parts(tape.reduction_blocks().map_or(1, |blocks| blocks / degree))
    }

    /// (the loss of each of `samples`, or of their groups, lse of each row), from the
    /// [statistics](crate::kernel::Loss::row_stats) of all rows for each of the [`parts`](Self::parts). The sums are
    /// first relative to the maximum of their part, and then to that of the row. `targets` are the ids, and the groups
    /// if there are some.
    pub(super) fn total(
        &self,
        cx: &Forward<'_>,
        parts: Vec<(Buffer, Buffer)>,
        targets: &[&Tensor],
        samples: usize,
    ) -> Result<(Tensor, Buffer)> {
        let device = targets[0].device();
        let loss = device.loss()?;
        let mut max = device.layout()?.copy(&parts[0].0)?;
        for (local, _) in &parts[1..] {
            loss.larger(&mut max, local)?;
        }
        if let Some(axis) = self.cut_over {
            max = cx.tape().rank().group(axis).all_reduce(max, ReduceOp::Max)?;
        }
        let mut sums = tree_of_sums(device, parts, &max)?;
        if let Some(axis) = self.cut_over {
            sums = cx.tape().rank().group(axis).all_reduce(sums, ReduceOp::Sum)?;
        }
        let group = cx.tape().rank().group_over(&self.sequence);
        let (layout, ranks, here) = (device.layout()?, group.size(), targets[0].count() / samples.max(1));
        // [rows, tokens here] → [rows, tokens of all ranks]
        let whole = |x: Buffer, rows: usize| {
            if ranks == 1 {
                return Ok(x);
            }
            let all = device.alloc(x.dtype(), ranks * x.count())?;
            layout.swap_blocks(&group.all_gather(x, all)?, ranks, rows, here)
        };
        let (max, sums) = (whole(max, samples)?, whole(sums, 2 * samples)?);
        let ids = whole(targets[0].buffer().clone(), samples)?;
        let (total, shape, lse) = match self.groups.zip(targets.get(1)) {
            Some((count, groups)) => {
                let (losses, lse) = loss.total(&max, &sums, &ids, ids.count())?;
                let groups = whole(groups.buffer().clone(), samples)?;
                (loss.group_sums(&losses, &groups, samples, count)?, Shape::new(&[samples, count]), lse)
            }
            None => {
                let (total, lse) = loss.total(&max, &sums, &ids, samples)?;
                (total, Shape::new(&[samples]), lse)
            }
        };
        let own = group.rank() * here..(group.rank() + 1) * here;
        let lse = if ranks == 1 { lse } else { layout.narrow(&lse, samples, ranks * here, 1, own)? };
        Ok((Tensor::from_buffer(device, total, shape)?, lse))
    }

    /// The gradient of the loss of each sample, or of each token, from that of the result. `targets` are as in
    /// [`total`](Self::total).
    pub(super) fn scale(&self, grad: Tensor, targets: &[Tensor]) -> Result<Tensor> {
        let Some(groups) = targets.get(1) else { return Ok(grad) };
        let samples = grad.shape().first().copied().unwrap_or(1);
        let scale = grad.device().loss()?.group_sums_grad(grad.buffer(), groups.buffer(), samples)?;
        Tensor::from_buffer(grad.device(), scale, groups.shape())
    }

    /// The types of the loss of `op`, of logits and of targets, whose groups lie as their ids do.
    pub(super) fn types(
        &self,
        op: &str,
        logits: Operand<'_>,
        targets: &[Operand<'_>],
    ) -> std::result::Result<Types, SpmdError> {
        let types = self.types_of(op, logits, targets[0])?;
        targets[1..].iter().try_fold(types, |_, &groups| self.types_of(op, logits, groups))
    }

    fn types_of(&self, op: &str, logits: Operand<'_>, targets: Operand<'_>) -> std::result::Result<Types, SpmdError> {
        let vocab_dim = logits.ndim.saturating_sub(1);
        let Some(cut) = self.cut_over else {
            return rules::summed_loss(op, logits, vocab_dim, targets);
        };
        let refuse =
            |problem: String, fix: &str| SpmdError { op: op.to_owned(), axis: cut, problem, fix: fix.to_owned() };
        match logits.types.get(cut) {
            Some(Ty::Shard(dim)) if dim == vocab_dim => {}
            Some(ty) => {
                return Err(refuse(
                    format!("logits are {ty}: full logits given to the vocab-parallel loss"),
                    "use cross_entropy, or leave the logits sharded over the vocabulary",
                ));
            }
            None => {
                return Err(refuse("logits do not lie on this axis".to_owned(), "use cross_entropy"));
            }
        }
        match targets.types.get(cut) {
            Some(Ty::Invariant | Ty::Replicate) => {
                let [logits, targets] =
                    [logits, targets].map(|of| Operand::value(of.name, of.types.with(cut, Ty::Invariant), of.ndim));
                let types = rules::summed_loss(op, logits, vocab_dim, targets)?;
                Ok(self.sequence.iter().fold(types, |types, &axis| types.with(axis, Ty::Invariant)))
            }
            _ => Err(refuse(
                format!("{} differ between ranks that share a token", targets.name),
                "give every rank the same targets",
            )),
        }
    }

    /// What it makes of padded operands.
    pub(super) fn padding(&self) -> Padded {
        match self.cut_over {
            None => Padded::Refused,
            Some(axis) => Padded::Knows { axis, extent: self.shard.vocab },
        }
    }
}

/// The sums of the blocks, each relative to its own maximum, rescaled to `max` and then added up in the tree.
fn tree_of_sums(device: &Arc<dyn Device>, blocks: Vec<(Buffer, Buffer)>, max: &Buffer) -> Result<Buffer> {
    let join = |left: Result<Buffer>, right: Result<Buffer>| {
        let mut left = left?;
        device.pointwise()?.add_assign(&mut left, 0, &right?)?;
        Ok(left)
    };
    let mut tree = Counter::default();
    for (local, mut sums) in blocks {
        device.loss()?.rescale(&mut sums, &local, max)?;
        tree.push(1, Ok(sums), join);
    }
    tree.finish(join).unwrap_or_else(|| device.alloc(max.dtype(), 0))
}

impl Op for VocabLoss {
    fn name(&self) -> &'static str {
        if self.cut_over.is_some() { "vocab_parallel_cross_entropy" } else { "cross_entropy" }
    }

    fn operands(&self) -> &'static [&'static str] {
        self.operands(&["logits", "targets", "groups"])
    }

    fn reads_values(&self) -> bool {
        true
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        self.types(self.name(), operands[0], &operands[1..])
    }

    fn padded(&self) -> Padded {
        self.padding()
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (logits, targets, shape) = (inputs[0], inputs[1], inputs[0].shape());
        cx.require(
            inputs[1..].iter().all(|of| of.shape()[..] == shape[..shape.len().saturating_sub(1)]),
            "targets have the shape of logits without the vocabulary",
        )?;
        let loss = logits.device().loss()?;
        let stats = |part| loss.row_stats(logits.buffer(), targets.buffer(), part);
        let parts = self.parts(cx.tape()).map(stats).collect::<Result<Vec<_>>>()?;
        let samples = targets.shape().first().copied().unwrap_or(1);
        let (total, lse) = self.total(cx, parts, &inputs[1..], samples)?;
        cx.save_exact(logits)?;
        let rows = lse.count();
        cx.save_exact(&Tensor::from_buffer(logits.device(), lse, [rows])?)?;
        inputs[1..].iter().try_for_each(|targets| cx.save(targets))?;
        Ok(total)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let mut gradients = vec![None; Op::operands(self).len()];
        if !cx.needs(0) {
            return Ok(gradients);
        }
        let lse = cx.saved(1)?;
        let targets = (1..gradients.len()).map(|at| cx.saved(1 + at)).collect::<Result<Vec<_>>>()?;
        let scale = self.scale(grad, &targets)?;
        // The logits are replaced by their gradient, in place unless something else still reads them.
        let logits = cx.take_saved(0)?;
        let (shape, mut logits) = (logits.shape(), logits.into_owned_buffer()?);
        let loss = scale.device().loss()?;
        loss.grad(&mut logits, targets[0].buffer(), lse.buffer(), scale.buffer(), self.shard)?;
        gradients[0] = Some(Tensor::from_buffer(scale.device(), logits, shape)?);
        Ok(gradients)
    }
}

#[derive(Debug)]
struct Correct;

impl Var {
    /// Per sample an f64, `[samples]`: the rows of whole logits `[samples, .., vocab]` whose target, of
    /// `[samples, ..]`, has the largest logit. A metric: it has no gradient.
    pub fn correct(&self, targets: &Var) -> Result<Var> {
        self.tape().apply(Correct, &[&self.detach(), targets])
    }
}

impl Op for Correct {
    stated! { "correct": logits, targets; reads_values }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::summed_loss(self.name(), operands[0], operands[0].ndim.saturating_sub(1), operands[1])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (logits, targets) = (inputs[0], inputs[1]);
        let lead = logits.shape().len().saturating_sub(1);
        cx.require(
            logits.shape()[..lead] == targets.shape()[..],
            "targets have the shape of logits without the vocabulary",
        )?;
        let (width, samples) = (logits.shape()[lead], targets.shape().first().copied().unwrap_or(1));
        let found = logits.device().loss()?.correct(logits.buffer(), targets.buffer(), width, samples)?;
        Tensor::from_buffer(logits.device(), found, [samples])
    }

    fn backward(&self, _cx: &mut Backward<'_>, _grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![None, None])
    }
}
