//! Column- and row-parallel linear layers over structural dims, and one that is whole on every rank.

use crate::Region;
use crate::adapter::InBlock;
use meshwork_core::{Axis, Mesh};
use meshwork_tensor::op::LowRank;
use meshwork_tensor::param::{Matrices, ParamGroup};
use meshwork_tensor::{Declarations, Error, Init, ParamId, Placement, Result, Role, Tape, Var};

/// `Y = X · Wᵀ + b` with the output features cut: rank i holds `W_i` and `b_i` and computes `Y_i = X · W_iᵀ + b_i`. The
/// bias is optional.
///
/// X is `Replicate` (enter the block first), Y is `Shard`. This layer does not communicate. The input's gradient is
/// `Partial`; it is summed in the backward of entering the block.
///
/// Its weight may have [adapters](meshwork_tensor::param::Adapters), which read x in front of the block: a layer
/// adds them by [`forward_adapted`](Self::forward_adapted).
#[derive(Clone, Debug)]
pub struct ColumnLinear {
    weight: ParamId,
    bias: Option<ParamId>,
    adapters: LowRank,
}

impl ColumnLinear {
    /// Declares `{name}.weight` `[out.., input]` and, with a bias, `{name}.bias` `[out..]`, cut along dim `cut` of
    /// `out` over tp. Dims of `out` before the cut number projections: queries, keys and values. Each is a
    /// [matrix](Matrices) of its own.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        input: usize,
        (out, cut): (&[usize], usize),
        bias: bool,
        init: Init,
    ) -> Result<Self> {
        Self::of_matrices(params, mesh, name, input, (out, cut, Matrices::new(cut, 1)), bias, init)
    }

    /// The same for pairs `out = [features, 2]`, of which [`forward_swiglu`](Self::forward_swiglu) takes the SwiGLU:
    /// gate and up are a matrix each, whose rows lie next to each other.
    pub fn pairs(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        input: usize,
        features: usize,
        bias: bool,
        init: Init,
    ) -> Result<Self> {
        let matrices = Matrices::new(0, 1).interleaved(1);
        Self::of_matrices(params, mesh, name, input, (&[features, 2], 0, matrices), bias, init)
    }

    fn of_matrices(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        input: usize,
        (out, cut, matrices): (&[usize], usize, Matrices),
        bias: bool,
        init: Init,
    ) -> Result<Self> {
        require_even_blocks(params, mesh, name, out, cut)?;
        let placement = || Placement::replicated().shard(Axis::Tp, cut);
        let dims = [out, &[input]].concat();
        let mut declare = |part: &str, dims: &[usize], role, init, group| {
            params.declare_in(format!("{name}.{part}"), dims, placement(), role, init, group)
        };
        let weight = declare("weight", &dims, Role::Weight, init, ParamGroup::hidden(matrices))?;
        let zeros = || declare("bias", out, Role::Bias, Init::Zeros, ParamGroup::bias(matrices));
        let bias = bias.then(zeros).transpose()?;
        Ok(Self { weight, bias, adapters: LowRank::new(params, weight)? })
    }

    /// `x [.., input]`, `Replicate` on tp, → `[.., out..]`, `Shard` along the dim `cut` of `out`, which has 1/tp of its
    /// extent on each rank.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let weight = tape.matrix(self.weight)?;
        if let Some(bias) = self.bias { x.linear_bias(&weight, &tape.param(bias)?, 1) } else { x.linear(&weight, 1) }
    }

    /// [`forward`](Self::forward) of the entered `x`, and what the adapters of the weight add to it. They read the
    /// input of the block: `normed` `[.., input]`, in the region.
    pub fn forward_adapted(&self, tape: &Tape, x: &Var, normed: &Var, region: Region) -> Result<Var> {
        let inner = self.adapters.of_column(tape, normed, region)?;
        let (Some(b), Some(inner)) = (self.adapters.whole(), inner.first()) else {
            return self.adapters.add_column(self.forward(tape, x)?, &inner);
        };
        let bias = self.bias.map(|bias| tape.param(bias)).transpose()?;
        x.linear_plus(&tape.matrix(self.weight)?, bias.as_ref(), 1, [inner, &tape.param(b)?])
    }

    /// `y`, the result of [`forward`](Self::forward), and what the adapters of the weight add to it, as
    /// [`forward_adapted`](Self::forward_adapted) does.
    pub fn adapted(&self, tape: &Tape, y: Var, normed: &Var, region: Region) -> Result<Var> {
        self.adapters.add_column(y, &self.adapters.of_column(tape, normed, region)?)
    }

    /// Whether [`adapted`](Self::adapted) adds something: a function of the result comes behind it.
    pub fn is_adapted(&self, tape: &Tape) -> bool {
        self.adapters.is_on(tape)
    }

    /// [`forward`](Self::forward) of two layers that read the same x, whose gradient is computed for
    /// [both at once](Var::linear_pair).
    pub fn forward_pair(pair: [&Self; 2], tape: &Tape, x: &Var) -> Result<[Var; 2]> {
        let [w, v] = [tape.matrix(pair[0].weight)?, tape.matrix(pair[1].weight)?];
        let [b, c] = pair.map(|layer| layer.bias.map(|bias| tape.param(bias)).transpose());
        x.linear_pair([(&w, b?.as_ref()), (&v, c?.as_ref())], 1)
    }

    /// `gelu(x · Wᵀ + b)`, in one pass: shape and type of [`forward`](Self::forward).
    pub fn forward_gelu(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let bias = self.bias.map(|bias| tape.param(bias)).transpose()?;
        x.linear_gelu(&tape.matrix(self.weight)?, bias.as_ref(), 1)
    }

    /// The [SwiGLU](Var::swiglu) of `x · Wᵀ + b`, for pairs `out = [features, 2]`: `[.., features/tp]`, `Shard` along
    /// the last dim. In one pass without the bias.
    pub fn forward_swiglu(&self, tape: &Tape, x: &Var) -> Result<Var> {
        match self.bias {
            Some(_) => self.forward(tape, x)?.swiglu(),
            None => x.linear_swiglu(&tape.matrix(self.weight)?, 1),
        }
    }
}

/// `Y = X · Wᵀ` with a weight that is whole on every rank of tp: each rank computes the tokens that it has in the
/// region between blocks, in which both X and Y are. For results of few features, as latent vectors are, where a cut
/// would save little work and cost a collective.
///
/// Its [adapters](meshwork_tensor::param::Adapters) are whole as it is, and read the same x.
#[derive(Clone, Debug)]
pub struct ReplicatedLinear {
    weight: ParamId,
    adapters: LowRank,
}

impl ReplicatedLinear {
    /// Declares `{name}.weight` `[output, input]`, whole.
    pub fn new(params: &mut Declarations, name: &str, input: usize, output: usize, init: Init) -> Result<Self> {
        let (name, group) = (format!("{name}.weight"), ParamGroup::hidden(Matrices::new(0, 1)));
        let weight = params.declare_in(name, &[output, input], Placement::replicated(), Role::Weight, init, group)?;
        Ok(Self { weight, adapters: LowRank::new(params, weight)? })
    }

    /// `x [.., input]` → `[.., output]`, of the same types.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let inner = self.adapters.of_whole(tape, x)?;
        self.adapters.add_column(x.linear(&tape.matrix(self.weight)?, 1)?, &inner)
    }
}

/// `Y = X · Wᵀ + b` with the input features cut: `Y = Σ_i X_i · W_iᵀ + b`, the sum over tp. The bias is optional, and
/// so is the residual that is added to it.
///
/// X is `Shard` along the contracted dims, the product is `Partial`, and leaving the block sums it. The bias is added
/// once, after the sum, together with the residual, as at the end of most transformer blocks.
#[derive(Clone, Debug)]
pub struct RowLinear {
    name: String,
    weight: ParamId,
    bias: Option<ParamId>,
    contract: usize,
    adapters: LowRank,
}

impl RowLinear {
    /// Declares `{name}.weight` `[output, input..]`, cut along dim `cut` of `input` over tp, and, with a bias,
    /// `{name}.bias` `[output]`, whole.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        (input, cut): (&[usize], usize),
        output: usize,
        bias: bool,
        init: Init,
    ) -> Result<Self> {
        require_even_blocks(params, mesh, name, input, cut)?;
        let dims = [&[output], input].concat();
        let placement = Placement::replicated().shard(Axis::Tp, cut + 1);
        let group = ParamGroup::hidden(Matrices::new(0, input.len()));
        let weight = params.declare_in(format!("{name}.weight"), &dims, placement, Role::Weight, init, group)?;
        let whole = Placement::replicated();
        let zeros = || params.declare(format!("{name}.bias"), &[output], whole, Role::Bias, Init::Zeros);
        let bias = bias.then(zeros).transpose()?;
        let adapters = LowRank::new(params, weight)?;
        Ok(Self { name: name.to_owned(), weight, bias, contract: input.len(), adapters })
    }

    /// `x [.., input..]`, `Shard` on tp along the dim `cut` of `input`, → `residual + dropout(Σ_tp x · Wᵀ + b)`
    /// `[.., output]` in the region between blocks, in which the residual is too. `dropout` is the probability of
    /// dropping an element.
    pub fn forward(&self, tape: &Tape, x: &Var, region: Region, residual: Option<&Var>, dropout: f32) -> Result<Var> {
        let inner = self.adapters.of_row(tape, x, region)?;
        let y = region.leave(&x.linear(&tape.matrix(self.weight)?, self.contract)?)?;
        let mut y = self.adapters.add_row(tape, y, &inner, region)?;
        let bias = self.bias.map(|bias| tape.param(bias)).transpose()?;
        if let (Some(bias), Some(residual), 0.0) = (&bias, residual, dropout) {
            return y.bias_residual(bias, residual); // one pass
        }
        if let Some(bias) = bias {
            y = y.bias(&bias)?;
        }
        if dropout > 0.0 {
            y = y.dropout(dropout, &self.name)?;
        }
        if let Some(residual) = residual { y.add(residual) } else { Ok(y) }
    }
}

/// Refuses features that tp does not divide in canonical numerics, where the order of their sum would depend on it. In
/// fast numerics the last ranks hold zeros beyond them.
fn require_even_blocks(params: &Declarations, mesh: &Mesh, name: &str, dims: &[usize], cut: usize) -> Result<()> {
    if params.reduction_blocks().is_some() { require_even(mesh, name, dims, cut) } else { Ok(()) }
}

/// Refuses a dim that tp does not divide.
pub(crate) fn require_even(mesh: &Mesh, name: &str, dims: &[usize], cut: usize) -> Result<()> {
    let (extent, degree) = (dims[cut], mesh.degree(Axis::Tp));
    if extent.is_multiple_of(degree) { Ok(()) } else { Err(Error::uneven(name, cut, extent, Axis::Tp, degree)) }
}
