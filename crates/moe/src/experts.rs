//! Networks of experts: each is a feed-forward block, and all experts of a rank are computed together, on rows grouped
//! by expert.
//!
//! The weights of E experts are `[E, out, in]`, sharded along E over the axes of the experts, so their gradients are
//! summed only over the other data-parallel ranks. They may also be sharded over tp, as in a tensor-parallel block:
//! `copy` before the first product and `all_reduce` after the last, on rows. Otherwise experts are whole, and the ranks
//! of tp do the same work.

use crate::MoeError;
use meshwork_core::{Axes, Axis, Mesh};
use meshwork_tensor::op::RowGroups;
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

/// `gelu(x · Wupᵀ + bup) · Wdownᵀ + bdown` of each expert: GPT-2's MLP. The biases are optional.
#[derive(Clone, Copy, Debug)]
pub struct GroupedMlp {
    shape: ExpertShape,
    up: ParamId,
    down: ParamId,
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
        let mut declare = |part: &str, dims: &[usize], cut, role, init| {
            let of_each = Matrices::new(1, 1);
            let group = if role == Role::Weight { ParamGroup::hidden(of_each) } else { ParamGroup::bias(of_each) };
            params.declare_in(format!("{name}.{part}"), dims, shape.placement(cut), role, init, group)
        };
        let [up, down] = [
            declare("up.weight", &[experts, ffn, hidden], Some(1), Role::Weight, up)?,
            declare("down.weight", &[experts, hidden, ffn], Some(2), Role::Weight, down)?,
        ];
        let biases = match bias {
            true => Some([
                declare("up.bias", &[experts, ffn], Some(1), Role::Bias, Init::Zeros)?,
                declare("down.bias", &[experts, hidden], None, Role::Bias, Init::Zeros)?,
            ]),
            false => None,
        };
        Ok(Self { shape, up, down, biases })
    }
}

impl Experts for GroupedMlp {
    fn forward(&self, tape: &Tape, rows: &Var, groups: &Rc<RowGroups>) -> Result<Var> {
        let x = self.shape.enter(rows)?; // [rows, hidden]
        let mut inner = x.grouped_linear(&tape.param(self.up)?, 1, groups)?; // [rows, ffn/tp]
        if let Some([bias, _]) = self.biases {
            inner = inner.grouped_bias(&tape.param(bias)?, groups)?;
        }
        let y = inner.gelu()?.grouped_linear(&tape.param(self.down)?, 1, groups)?; // [rows, hidden], Partial
        let y = self.shape.leave(&y)?; // Σ_tp
        if let Some([_, bias]) = self.biases { y.grouped_bias(&tape.param(bias)?, groups) } else { Ok(y) }
    }
}

/// `(silu(x · Wgateᵀ) · (x · Wupᵀ)) · Wdownᵀ` of each expert: the MLP of Llama and Mixtral.
#[derive(Clone, Copy, Debug)]
pub struct GroupedSwiGlu {
    shape: ExpertShape,
    gate_up: ParamId,
    down: ParamId,
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
            let (placement, group) = (shape.placement(Some(cut)), ParamGroup::hidden(of_each));
            params.declare_in(format!("{name}.{part}.weight"), dims, placement, Role::Weight, init, group)
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
        let x = self.shape.enter(rows)?; // [rows, hidden]
        let inner = x.grouped_linear_swiglu(&tape.param(self.gate_up)?, 1, groups)?; // [rows, ffn/tp]
        let y = inner.grouped_linear(&tape.param(self.down)?, 1, groups)?; // [rows, hidden], Partial
        self.shape.leave(&y) // Σ_tp
    }
}
