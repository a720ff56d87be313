//! The vocabulary cut over tp: token table, logits and loss. Where tp does not divide the vocabulary, the table is padded
//! at its end (in canonical numerics, where the blocks do not divide it); padding is never looked up, never enters the loss, and its gradient is zero.

use crate::Region;
use meshwork_core::Axis;
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};

/// A table `W [vocab, hidden]`; each rank of tp holds ⌈vocab/tp⌉ rows. It is used as token embedding, as output head
/// or, if tied, as both.
#[derive(Clone, Copy, Debug)]
pub struct VocabParallelEmbedding {
    weight: ParamId,
    vocab: usize,
}

impl VocabParallelEmbedding {
    /// Declares `{name}.weight` [vocab, hidden], cut along the vocabulary.
    pub fn new(params: &mut Declarations, name: &str, vocab: usize, hidden: usize, init: Init) -> Result<Self> {
        let placement = Self::placement(params);
        let weight = params.declare(format!("{name}.weight"), &[vocab, hidden], placement, Role::Weight, init)?;
        Ok(Self { weight, vocab })
    }

    /// Shares the table that another layer, on whichever stage, declares with the same arguments: the output head tied to the token
    /// embedding.
    pub fn tied(params: &mut Declarations, name: &str, vocab: usize, hidden: usize, init: Init) -> Result<Self> {
        let placement = Self::placement(params);
        let weight = params.tie(format!("{name}.weight"), &[vocab, hidden], placement, Role::Weight, init)?;
        Ok(Self { weight, vocab })
    }

    fn placement(params: &Declarations) -> Placement {
        Placement::replicated().shard(Axis::Tp, 0).in_multiples_of(params.reduction_blocks().unwrap_or(1))
    }

    /// i32 `ids [b, s]`, whole on tp, → `W[ids] [b, s, hidden]` in the region: each rank looks up the rows that it holds, and the results
    /// are summed.
    pub fn embed(&self, tape: &Tape, ids: &Var, region: Region) -> Result<Var> {
        region.leave(&ids.vocab_parallel_embedding(&tape.param(self.weight)?, Axis::Tp, self.vocab)?)
    }

    /// `x [b, s, hidden]` in the region → logits `[b, s, ⌈vocab/tp⌉]`, on tp `Shard` along their last dim.
    pub fn logits(&self, tape: &Tape, x: &Var, region: Region) -> Result<Var> {
        region.enter(x)?.linear(&tape.param(self.weight)?, 1)
    }

    /// The loss of each sample: `[b]` in f64, the cross entropy of those logits against i32 targets `[b, s]`, negative ones masked, summed over
    /// its tokens. `Invariant` on tp; where the samples are cut over ranks, as over dp, `Shard(0)`.
    pub fn loss(&self, logits: &Var, targets: &Var) -> Result<Var> {
        logits.vocab_parallel_cross_entropy(targets, Axis::Tp, self.vocab)
    }

    /// The same from x, as [`logits`](Self::logits) takes it, with the logits of at most `chunk` tokens at a time: `[b]` in f64, as
    /// [`loss`](Self::loss) gives it.
    pub fn chunked_loss(&self, tape: &Tape, x: &Var, targets: &Var, region: Region, chunk: usize) -> Result<Var> {
        let weight = tape.param(self.weight)?;
        region.enter(x)?.vocab_parallel_linear_cross_entropy(&weight, targets, Axis::Tp, self.vocab, chunk)
    }
}
