//! The vocabulary cut over tp: token table, logits and loss. The table is padded at its end to a multiple of 64 rows,
//! of which each rank stores a multiple of 8 (in canonical numerics to one of the reduction blocks); padding is never
//! looked up, never enters the loss, and its gradient is zero.

use crate::Region;
use meshwork_core::Axis;
use meshwork_tensor::op::Targets;
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};

/// Rows of which a table is stored in a multiple. The logits have a column for each, and products of a GPU with an odd
/// number of columns are many times slower (<https://github.com/pytorch/pytorch/issues/146817>); the vocabulary of
/// GPT-2 is 50257.
const ROWS: usize = 64;

/// Rows of which each rank stores a multiple: each row of its logits then begins at a multiple of 16 bytes, in 16 bits
/// too.
const ROWS_OF_RANK: usize = 8;

/// A table `W [vocab, hidden]`; each rank of tp stores the same number of rows. It is used as token embedding, as
/// output head or, if tied, as both.
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

    /// Shares the table that another layer, on whichever stage, declares with the same arguments: the output head tied
    /// to the token embedding.
    pub fn tied(params: &mut Declarations, name: &str, vocab: usize, hidden: usize, init: Init) -> Result<Self> {
        let placement = Self::placement(params);
        let weight = params.tie(format!("{name}.weight"), &[vocab, hidden], placement, Role::Weight, init)?;
        Ok(Self { weight, vocab })
    }

    fn placement(params: &Declarations) -> Placement {
        let placement = Placement::replicated().shard(Axis::Tp, 0);
        match params.reduction_blocks() {
            // The blocks of what is stored are the order of the sums, and begin at odd rows whatever follows the last.
            Some(blocks) => placement.in_multiples_of(blocks),
            None => placement.in_multiples_of(ROWS).each_in_multiples_of(ROWS_OF_RANK),
        }
    }

    /// i32 `ids [b, s]`, whole on tp, → `W[ids] [b, s, hidden]` in the region: each rank looks up the rows that it
    /// holds, and the results are summed.
    pub fn embed(&self, tape: &Tape, ids: &Var, region: Region) -> Result<Var> {
        region.leave(&ids.vocab_parallel_embedding(&tape.param(self.weight)?, Axis::Tp, self.vocab)?)
    }

    /// `x [b, s, hidden]` in the region → logits `[b, s, rows of this rank]`, on tp `Shard` along their last dim.
    pub fn logits(&self, tape: &Tape, x: &Var, region: Region) -> Result<Var> {
        region.enter(x)?.linear(&tape.param(self.weight)?, 1)
    }

    /// The loss of each sample: `[b]` in f64, the cross entropy of those logits against i32 targets `[b, s]`, negative
    /// ones masked, summed over its tokens; or over each of its groups of tokens, `[b, groups]`. `Invariant` on tp;
    /// where the samples are cut over ranks, as over dp, `Shard(0)`.
    pub fn loss<'a>(&self, logits: &'a Var, targets: impl Into<Targets<'a>>) -> Result<Var> {
        logits.vocab_parallel_cross_entropy(targets, Axis::Tp, self.vocab)
    }

    /// The same from x, as [`logits`](Self::logits) takes it, with the logits of at most `chunk` tokens at a time:
    /// in f64, as [`loss`](Self::loss) gives it.
    pub fn chunked_loss<'a>(
        &self,
        tape: &Tape,
        x: &Var,
        targets: impl Into<Targets<'a>>,
        region: Region,
        chunk: usize,
    ) -> Result<Var> {
        let (weight, targets) = (tape.param(self.weight)?, targets.into());
        region.enter(x)?.vocab_parallel_linear_cross_entropy(&weight, targets, Axis::Tp, self.vocab, chunk)
    }
}
