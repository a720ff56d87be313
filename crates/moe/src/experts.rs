//! Networks of experts: each is a feed-forward block, and all experts of a rank are computed together, on rows grouped
//! by expert.
//!
//! The weights of E experts are `[E, out, in]`, sharded along E over the axes of the experts, so their gradients are
//! summed only over the other data-parallel ranks. They may also be sharded over tp, as in a tensor-parallel block:
//! `copy` before the first product and `all_reduce` after the last, on rows. Otherwise experts are whole, and the ranks
//! of tp do the same work.
//!
//! A weight may have [adapters](meshwork_tensor::param::Adapters), an A and a B of each expert, which are sharded as it
//! is: `y ← y + B · s · A · x`, row by row. What they move between ranks of tp are rows of `rank` features.

use crate::MoeError;
use meshwork_core::{Axes, Axis, Mesh};
use meshwork_tensor::op::{LowRank, RowGroups};
use meshwork_tensor::param::{Matrices, ParamGroup};
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};
use std::fmt::Debug;
use std::rc::Rc;

/// The experts of a layer: a network for each group of rows.
pub trait Experts: Debug + Send + Sync {
    /// `rows [rows, hidden]` sorted by expert → the results, `[rows, hidden]` in the same places and with the same
    /// types.
    fn forward(&self, tape: &Tape, rows: &Var, groups: &Rc<RowGroups>) -> Result<Var>;
}

/// The shape of a layer's experts, and their placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Experts over all ranks.
    pub experts: usize,
    /// Features of a token.
    pub hidden: usize,
    /// Inner features of each expert.
    pub ffn: usize,
    /// The axes whose ranks hold different experts.
    pub axes: Axes,
    /// Whether the inner features are sharded over tp.
    pub over_tp: bool,
}

fn degree(mesh: &Mesh, axes: Axes) -> usize {
    axes.iter().map(|&axis| mesh.degree(axis)).product()
}

impl ExpertShape {
    fn check(&self, mesh: &Mesh) -> Result<()> {
        let (num_experts, ep, tp) = (self.experts, degree(mesh, self.axes), mesh.degree(Axis::Tp));
        if num_experts == 0 {
            return Err(MoeError::NoExperts.into());
        }
        if num_experts % ep != 0 {
            return Err(MoeError::Indivisible { num_experts, ep }.into());
        }
        if self.over_tp && !self.ffn.is_multiple_of(tp) {
            return Err(MoeError::Features { features: self.ffn, tp }.into());
        }
        Ok(())
    }

    /// Sharded along the experts, and along this dim if the inner features are sharded.
    fn placement(&self, dim: Option<usize>) -> Placement {
        let experts = self.axes.iter().fold(Placement::replicated(), |experts, &axis| experts.shard(axis, 0));
        match dim {
            Some(dim) if self.over_tp => experts.shard(Axis::Tp, dim),
            // Sums over inner features have the same bits whether they are sharded or not.
            Some(dim) => experts.summed_in_blocks(dim),
            None => experts,
        }
    }

    fn enter(&self, rows: &Var) -> Result<Var> {
        if self.over_tp { rows.copy(Axis::Tp) } else { Ok(rows.clone()) }
    }

    fn leave(&self, results: &Var) -> Result<Var> {
        if self.over_tp { results.all_reduce(Axis::Tp)?.stored() } else { Ok(results.clone()) }
    }
}

/// The weights of one product of all experts, with their adapters.
#[derive(Clone, Debug)]
struct GroupedWeight {
    id: ParamId,
    adapters: LowRank,
}

impl GroupedWeight {
    fn new(
        params: &mut Declarations,
        name: String,
        dims: &[usize],
        placement: Placement,
        matrices: Matrices,
        init: Init,
    ) -> Result<Self> {
        let id = params.declare_in(name, dims, placement, Role::Weight, init, ParamGroup::hidden(matrices))?;
        Ok(Self { id, adapters: LowRank::new(params, id)? })
    }

    /// `rows · Wᵀ` of the first product.
    fn first(&self, tape: &Tape, shape: &ExpertShape, rows: &Var, groups: &Rc<RowGroups>) -> Result<Var> {
        let inner = self.adapters.inner(
            tape,
            || Ok(rows.clone()),
            |rows, a| shape.enter(&rows.grouped_linear(a, 1, groups)?.scale(self.adapters.scale())?),
        )?; // [rows, rank]
        // Behind the adapters: so their gradients are added to that of this product, whether the rows are copied or
        // not.
        let x = shape.enter(rows)?;
        let y = x.grouped_linear(&tape.param(self.id)?, 1, groups)?; // [rows, ffn/tp], Shard
        self.adapters.add(y, &inner, |inner, b| inner.grouped_linear(b, 1, groups))
    }

    /// `x · Wᵀ` of the last product, summed over tp.
    fn last(&self, tape: &Tape, shape: &ExpertShape, x: &Var, groups: &Rc<RowGroups>) -> Result<Var> {
        let inner = self.adapters.inner(
            tape,
            || Ok(x.clone()),
            |x, a| shape.leave(&x.grouped_linear(a, 1, groups)?)?.scale(self.adapters.scale()), // Σ_tp
        )?; // [rows, rank]
        let y = shape.leave(&x.grouped_linear(&tape.param(self.id)?, 1, groups)?)?; // [rows, hidden], Σ_tp
        self.adapters.add(y, &inner, |inner, b| inner.grouped_linear(b, 1, groups))
    }
}

/// `gelu(x · Wupᵀ + bup) · Wdownᵀ + bdown` of each expert: GPT-2's MLP. The biases are optional.
#[derive(Clone, Debug)]
pub struct GroupedMlp {
    shape: ExpertShape,
    up: GroupedWeight,
    down: GroupedWeight,
    biases: Option<[ParamId; 2]>,
}

impl GroupedMlp {
    /// Declares `{name}.up.weight` `[experts, ffn, hidden]`, `{name}.down.weight` `[experts, hidden, ffn]`, and with
    /// biases `{name}.up.bias` `[experts, ffn]` and `{name}.down.bias` `[experts, hidden]`. `init` has the initial
    /// values of each product.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        shape: ExpertShape,
        bias: bool,
        [up, down]: [Init; 2],
    ) -> Result<Self> {
        shape.check(mesh)?;
        let ExpertShape { experts, hidden, ffn, .. } = shape;
        let of_each = Matrices::new(1, 1);
        let mut weight = |part: &str, dims: &[usize], cut, init| {
            let (name, placement) = (format!("{name}.{part}.weight"), shape.placement(Some(cut)));
            GroupedWeight::new(params, name, dims, placement, of_each, init)
        };
        let up = weight("up", &[experts, ffn, hidden], 1, up)?;
        let down = weight("down", &[experts, hidden, ffn], 2, down)?;
        let mut vector = |part: &str, features, cut| {
            let (name, placement, group) =
                (format!("{name}.{part}.bias"), shape.placement(cut), ParamGroup::bias(of_each));
            params.declare_in(name, &[experts, features], placement, Role::Bias, Init::Zeros, group)
        };
        let biases = match bias {
            true => Some([vector("up", ffn, Some(1))?, vector("down", hidden, None)?]),
            false => None,
        };
        Ok(Self { shape, up, down, biases })
    }
}

impl Experts for GroupedMlp {
    fn forward(&self, tape: &Tape, rows: &Var, groups: &Rc<RowGroups>) -> Result<Var> {
        let mut inner = self.up.first(tape, &self.shape, rows, groups)?; // [rows, ffn/tp]
        if let Some([bias, _]) = self.biases {
            inner = inner.grouped_bias(&tape.param(bias)?, groups)?;
        }
        let y = self.down.last(tape, &self.shape, &inner.gelu()?, groups)?; // [rows, hidden], Σ_tp
        if let Some([_, bias]) = self.biases { y.grouped_bias(&tape.param(bias)?, groups) } else { Ok(y) }
    }
}

/// `(silu(x · Wgateᵀ) · (x · Wupᵀ)) · Wdownᵀ` of each expert: the MLP of Llama and Mixtral.
#[derive(Clone, Debug)]
pub struct GroupedSwiGlu {
    shape: ExpertShape,
    gate_up: GroupedWeight,
    down: GroupedWeight,
}

impl GroupedSwiGlu {
    /// Declares `{name}.gate_up.weight` `[experts, ffn, 2, hidden]`, with the gate and up weights of each inner feature
    /// next to each other, and `{name}.down.weight` `[experts, hidden, ffn]`.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        shape: ExpertShape,
        [gate_up, down]: [Init; 2],
    ) -> Result<Self> {
        shape.check(mesh)?;
        let ExpertShape { experts, hidden, ffn, .. } = shape;
        let mut declare = |part: &str, dims: &[usize], cut, interleaved, init| {
            let of_each = Matrices::new(1, 1).interleaved(interleaved);
            let (name, placement) = (format!("{name}.{part}.weight"), shape.placement(Some(cut)));
            GroupedWeight::new(params, name, dims, placement, of_each, init)
        };
        Ok(Self {
            shape,
            gate_up: declare("gate_up", &[experts, ffn, 2, hidden], 1, 1, gate_up)?,
            down: declare("down", &[experts, hidden, ffn], 2, 0, down)?,
        })
    }
}

impl Experts for GroupedSwiGlu {
    fn forward(&self, tape: &Tape, rows: &Var, groups: &Rc<RowGroups>) -> Result<Var> {
        let inner = match self.gate_up.adapters.is_on(tape) {
            false => self.shape.enter(rows)?.grouped_linear_swiglu(&tape.param(self.gate_up.id)?, 1, groups)?,
            true => self.gate_up.first(tape, &self.shape, rows, groups)?.swiglu()?,
        }; // [rows, ffn/tp]
        self.down.last(tape, &self.shape, &inner, groups) // [rows, hidden], Σ_tp
    }
}
