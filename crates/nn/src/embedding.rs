//! Token and position tables.

use meshwork_core::{Axes, Ty};
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};

/// `y[.., h] = W[ids[..], h]`. It stores the rows that there are: a tied head of an odd number of them is slow on a
/// GPU, and `VocabParallelEmbedding` of `meshwork-tensor-parallel` stores a multiple of 64, on one rank too.
#[derive(Clone, Copy, Debug)]
pub struct Embedding {
    weight: ParamId,
}

impl Embedding {
    /// Declares `{name}.weight` [rows, features], with these initial values.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        rows: usize,
        features: usize,
        init: impl Into<Init>,
    ) -> Result<Self> {
        let (name, init) = (format!("{name}.weight"), init.into());
        Ok(Self { weight: params.declare(name, &[rows, features], Placement::replicated(), Role::Weight, init)? })
    }

    /// Shares the table that another layer, on whichever stage, declares with the same arguments: a tied head.
    pub fn tied(
        params: &mut Declarations,
        name: &str,
        rows: usize,
        features: usize,
        init: impl Into<Init>,
    ) -> Result<Self> {
        let (name, init) = (format!("{name}.weight"), init.into());
        Ok(Self { weight: params.tie(name, &[rows, features], Placement::replicated(), Role::Weight, init)? })
    }

    /// i32 `ids [..] → [.., features]`.
    pub fn forward(&self, tape: &Tape, ids: &Var) -> Result<Var> {
        ids.embedding(&tape.param(self.weight)?)
    }

    /// Logits of a tied head: `x [.., features] → [.., rows]`.
    pub fn logits(&self, tape: &Tape, x: &Var) -> Result<Var> {
        x.linear(&tape.param(self.weight)?, 1)
    }
}

/// `y[b, s, h] = x[b, s, h] + W[s, h]`: learned positions. Under sequence parallelism each rank adds those of its
/// slice. Of packed sequences, `W[positions[b, s], h]` is added.
#[derive(Clone, Copy, Debug)]
pub struct Positions {
    weight: ParamId,
}

impl Positions {
    /// Declares `{name}.weight` [seq, features], with these initial values.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        seq: usize,
        features: usize,
        init: impl Into<Init>,
    ) -> Result<Self> {
        let (name, init) = (format!("{name}.weight"), init.into());
        Ok(Self { weight: params.declare(name, &[seq, features], Placement::replicated(), Role::Weight, init)? })
    }

    /// `x [b, s, h] → [b, s, h]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        x.positions(&tape.param(self.weight)?)
    }

    /// The same with a position for each token, i32 `[b, s]`, cut along the sequence over some of the axes that cut x,
    /// or none.
    ///
    /// Over the others each rank looks up all positions and takes its slice, so that the gradient of the table is not
    /// summed over slices.
    pub fn at(&self, tape: &Tape, x: &Var, positions: &Var) -> Result<Var> {
        let rows = positions.embedding(&tape.param(self.weight)?)?; // [b, s, h]
        let held = positions.types();
        let cut: Axes = x.types().cuts(1).filter(|&axis| held.get(axis) != Some(Ty::Shard(1))).collect();
        x.add(&if cut.is_empty() { rows } else { rows.split(cut, 1)? })
    }
}
