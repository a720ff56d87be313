//! Column- and row-parallel linear layers over structural dims.

use crate::Region;
use meshwork_core::{Axis, Mesh};
use meshwork_tensor::{Declarations, Error, Init, ParamId, Placement, Result, Role, Tape, Var};

/// `Y = X · Wᵀ + b` with the output features cut: rank i holds `W_i` and `b_i` and computes `Y_i = X · W_iᵀ + b_i`.
///
/// X is `Replicate` (enter the block first), Y is `Shard`. No communication here; the input's gradient is `Partial` and summed
/// where the block was entered.
#[derive(Clone, Copy, Debug)]
pub struct ColumnLinear {
    weight: ParamId,
    bias: ParamId,
}

impl ColumnLinear {
    /// Declares `{name}.weight` `[out.., input]` and `{name}.bias` `[out..]`, cut along dim `cut` of `out` over tp.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        input: usize,
        out: &[usize],
        cut: usize,
        init: Init,
    ) -> Result<Self> {
        require_even(mesh, name, out, cut)?;
        let placement = || Placement::replicated().shard(Axis::Tp, cut);
        let dims = [out, &[input]].concat();
        let weight = params.declare(format!("{name}.weight"), &dims, placement(), Role::Weight, init)?;
        let bias = params.declare(format!("{name}.bias"), out, placement(), Role::Bias, Init::Zeros)?;
        Ok(Self { weight, bias })
    }

    /// `x [.., input] → [.., out..]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        x.linear_bias(&tape.param(self.weight)?, &tape.param(self.bias)?, 1)
    }

    /// `gelu(x · Wᵀ + b)`, in one pass.
    pub fn forward_gelu(&self, tape: &Tape, x: &Var) -> Result<Var> {
        x.linear_bias_gelu(&tape.param(self.weight)?, &tape.param(self.bias)?, 1)
    }
}

/// `Y = X · Wᵀ + b` with the input features cut: `Y = Σ_i X_i · W_iᵀ + b`, the sum over tp.
///
/// X is `Shard` along the contracted dims, the product is `Partial`, and leaving the block sums it. The bias is added once, after
/// the sum, by adding to it the residual as well: that is how every transformer block ends.
#[derive(Clone, Debug)]
pub struct RowLinear {
    name: String,
    weight: ParamId,
    bias: ParamId,
    contract: usize,
}

impl RowLinear {
    /// Declares `{name}.weight` `[output, input..]`, cut along dim `cut` of `input` over tp, and `{name}.bias` `[output]`,
    /// whole.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        input: &[usize],
        cut: usize,
        output: usize,
        init: Init,
    ) -> Result<Self> {
        require_even(mesh, name, input, cut)?;
        let dims = [&[output], input].concat();
        let placement = Placement::replicated().shard(Axis::Tp, cut + 1);
        let weight = params.declare(format!("{name}.weight"), &dims, placement, Role::Weight, init)?;
        let bias =
            params.declare(format!("{name}.bias"), &[output], Placement::replicated(), Role::Bias, Init::Zeros)?;
        Ok(Self { name: name.to_owned(), weight, bias, contract: input.len() })
    }

    /// `x [.., input..] → residual + dropout(Σ_tp x · Wᵀ + b)`, in the region between blocks.
    pub fn forward(&self, tape: &Tape, x: &Var, region: Region, residual: &Var, dropout: f32) -> Result<Var> {
        let y = region.leave(&x.linear(&tape.param(self.weight)?, self.contract)?)?;
        let bias = tape.param(self.bias)?;
        if dropout == 0.0 {
            return y.bias_residual(&bias, residual); // one pass
        }
        y.bias(&bias)?.dropout(dropout, &self.name)?.add(residual)
    }
}

fn require_even(mesh: &Mesh, name: &str, dims: &[usize], cut: usize) -> Result<()> {
    let (extent, degree) = (dims[cut], mesh.degree(Axis::Tp));
    if extent.is_multiple_of(degree) {
        return Ok(());
    }
    Err(Error::Placement {
        what: name.to_owned(),
        dim: cut,
        extent,
        axis: Axis::Tp,
        degree,
        problem: "the degree must divide it".to_owned(),
    })
}
