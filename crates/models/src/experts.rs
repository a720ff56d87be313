//! Feed-forward blocks of language models: one MLP, or a mixture of experts in its place, with shared experts beside
//! it.
//!
//! ```text
//! dense:    MLP(x̂)
//! experts:  Σ_e w_e(x̂) · E_e(x̂) + Shared(x̂)
//! ```
//!
//! x̂ is the normed hidden state, and the result is added to the hidden state ([`decoder`](crate::decoder)).
//!
//! Experts have the shape of the MLP that they replace. Shared experts (DeepSeekMoE, equation 9) take every token;
//! together they are one MLP as wide as all of them.

use crate::language::{HiddenModule, Sequences};
use meshwork_core::Mesh;
pub use meshwork_moe::balance::{TOKENS, imbalance};
pub use meshwork_moe::{AuxLossScope, ExpertGroups, MoeConfig, MoeError, Overflow, RouterKind};
use meshwork_moe::{ExpertShape, GroupedMlp, GroupedSwiGlu, Laid, MoeLayer, Router};
use meshwork_nn::{LayerNorm, Metric, Per, RmsNorm};
use meshwork_tensor::op::{MlpKind, Order};
use meshwork_tensor::{Declarations, Error, Init, Result, Tape, Var};
use meshwork_tensor_parallel::ParallelMlp;

/// Experts in place of the MLPs of some layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// The experts of a layer and their router. [`MoeConfig::layers`] is set by the model.
    pub moe: MoeConfig,
    /// Every so many layers have experts, the last of them first: with 2 layers 1, 3, .. (from 0), as in GShard.
    pub every_n_layers: usize,
    /// Number of layers at the start of the model that are dense: they have no experts.
    pub first_dense_layers: usize,
    /// Shared experts beside the routed ones.
    pub num_shared_experts: usize,
    /// Inner features of each expert.
    pub expert_hidden_size: usize,
    /// Whether the inner features of experts are cut over tp; else they are whole on its ranks.
    pub over_tp: bool,
}

impl ExpertsConfig {
    /// Whether a layer has experts.
    pub fn has(&self, layer: usize) -> bool {
        layer >= self.first_dense_layers && (layer + 1).is_multiple_of(self.every_n_layers.max(1))
    }

    /// Layers with experts among the first `layers`.
    pub fn count(&self, layers: usize) -> usize {
        (0..layers).filter(|&layer| self.has(layer)).count()
    }
}

/// The metrics of a model with experts: those that routers report.
pub fn metrics(experts: Option<&ExpertsConfig>) -> Vec<Metric> {
    let all = experts.map_or(&[][..], |_| &meshwork_moe::router::METRICS);
    all.iter().map(|&name| Metric { name, per: Per::Sample }).collect()
}

/// A norm of a hidden state.
#[derive(Clone, Debug)]
pub(crate) enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
}

impl Norm {
    fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        match self {
            Self::Layer(norm) => norm.forward(tape, x),
            Self::Rms(norm) => norm.forward(tape, x),
        }
    }

    /// For matrix products alone.
    pub fn operand(&self, tape: &Tape, x: &Var) -> Result<Var> {
        match self {
            Self::Layer(norm) => norm.operand(tape, x),
            Self::Rms(norm) => norm.operand(tape, x),
        }
    }
}

/// In front of the head, whose product alone reads it.
impl HiddenModule for Norm {
    fn forward(&self, tape: &Tape, x: &Var, _sequences: Sequences<'_>) -> Result<Var> {
        self.operand(tape, x)
    }
}

/// `scale · x`.
pub(crate) fn scaled(x: Var, scale: f64) -> Result<Var> {
    if scale == 1.0 { Ok(x) } else { x.scale(scale) }
}

/// A branch of the residual stream, `x ← x + scale · behind(f(before(x)))`; either norm may be missing.
#[derive(Clone, Debug)]
pub(crate) struct Branch {
    pub before: Option<Norm>,
    pub behind: Option<Norm>,
    pub scale: f64,
}

impl Branch {
    /// `residual + scale · behind(f(before(x)))`. `f` takes the normed input, an operand of products alone, and adds
    /// the residual itself if it is given one.
    fn forward_of(
        &self,
        normed: &Var,
        residual: &Var,
        tape: &Tape,
        f: impl FnOnce(&Var, Option<&Var>) -> Result<Var>,
    ) -> Result<Var> {
        if self.behind.is_none() && self.scale == 1.0 {
            return f(normed, Some(residual));
        }
        let y = f(normed, None)?;
        let y = self.behind.as_ref().map_or(Ok(y.clone()), |norm| norm.forward(tape, &y))?;
        residual.add(&scaled(y, self.scale)?)
    }

    /// The same for an `f` whose products alone read its input.
    pub fn forward(
        &self,
        tape: &Tape,
        x: &Var,
        residual: &Var,
        f: impl FnOnce(&Var, Option<&Var>) -> Result<Var>,
    ) -> Result<Var> {
        let normed = self.before.as_ref().map_or(Ok(x.clone()), |norm| norm.operand(tape, x))?;
        self.forward_of(&normed, residual, tape, f)
    }
}

/// The feed-forward block of a layer.
#[derive(Clone, Debug)]
pub(crate) enum FeedForward {
    Dense(ParallelMlp),
    Experts { name: String, layer: Box<MoeLayer>, shared: Option<ParallelMlp> },
}

/// What the feed-forward blocks of a model have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FeedForwardSpec {
    pub hidden: usize,
    pub ffn: usize,
    pub mlp: MlpKind,
    /// Whether networks with a GELU have biases.
    pub bias: bool,
    pub num_layers: usize,
    pub experts: Option<ExpertsConfig>,
}

impl FeedForward {
    /// Declares the block of a layer. `init` has the initial values of the products into and out of the inner features;
    /// a router starts as the first of them.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: String,
        spec: FeedForwardSpec,
        layer: usize,
        init: [Init; 2],
    ) -> Result<Self> {
        let FeedForwardSpec { hidden, mlp, bias, .. } = spec;
        let dense = |params: &mut Declarations, name: &str, ffn| {
            ParallelMlp::new(params, mesh, name, mlp, [hidden, ffn], bias, init)
        };
        let Some(experts) = spec.experts.filter(|experts| experts.has(layer)) else {
            return Ok(Self::Dense(dense(params, &name, spec.ffn)?));
        };
        let moe = MoeConfig { layers: experts.count(spec.num_layers), ..experts.moe };
        moe.check(mesh.expert_degree()).map_err(|mut wrong| wrong.remove(0))?;
        let shape = ExpertShape {
            experts: moe.num_experts,
            hidden,
            ffn: experts.expert_hidden_size,
            axes: mesh.expert_axes(),
            over_tp: experts.over_tp,
        };
        let router = Router::new(params, &format!("{name}.router"), hidden, moe, init[0])?;
        let networks = format!("{name}.experts");
        let layer = match mlp {
            MlpKind::Gelu => {
                let networks = GroupedMlp::new(params, mesh, &networks, shape, bias, init)?;
                MoeLayer::new(router, networks, mesh.expert_axes())
            }
            MlpKind::ExactGelu | MlpKind::GeGlu => {
                let problem = format!("experts have a GELU, tanh form, or a SwiGLU, not {mlp:?}");
                return Err(Error::Shape { op: "experts", problem, shapes: Vec::new() });
            }
            MlpKind::SwiGlu => {
                MoeLayer::new(router, GroupedSwiGlu::new(params, mesh, &networks, shape, init)?, mesh.expert_axes())
            }
        };
        let shared = match experts.num_shared_experts * experts.expert_hidden_size {
            0 => None,
            ffn => Some(dense(params, &format!("{name}.shared"), ffn)?),
        };
        Ok(Self::Experts { name, layer: Box::new(layer), shared })
    }

    /// The branch of x, added to `residual` or, without one, to x itself, of tokens that lie as in `sequences`.
    pub fn forward(
        &self,
        tape: &Tape,
        x: &Var,
        residual: Option<&Var>,
        branch: &Branch,
        sequences: Sequences<'_>,
        dropout: f32,
    ) -> Result<Var> {
        let Sequences { region, block, .. } = sequences;
        match self {
            Self::Dense(mlp) if block > 0 => {
                let (mlp, branch) = (mlp.clone(), branch.clone());
                let of = move |tape: &Tape, x: &Var, residual: &Var| {
                    branch.forward(tape, x, residual, |normed, residual| {
                        mlp.forward(tape, normed, region, residual, dropout)
                    })
                };
                match residual {
                    None => x.in_blocks(block, move |tape, x| of(tape, x, x)),
                    Some(residual) => {
                        tape.in_blocks(&[x, residual], block, move |tape, parts, _| of(tape, &parts[0], &parts[1]))
                    }
                }
            }
            Self::Dense(mlp) => branch.forward(tape, x, residual.unwrap_or(x), |normed, residual| {
                mlp.forward(tape, normed, region, residual, dropout)
            }),
            Self::Experts { name, layer, shared } => {
                let normed = branch.before.as_ref().map_or(Ok(x.clone()), |norm| norm.forward(tape, x))?;
                let shared_of = |residual: Option<&Var>| match (shared.clone(), residual) {
                    (Some(shared), Some(residual)) if block > 0 => tape
                        .in_blocks(&[&normed, residual], block, move |tape, parts, _| {
                            shared.forward(tape, &parts[0], region, Some(&parts[1]), dropout)
                        })
                        .map(Some),
                    (Some(shared), residual) => shared.forward(tape, &normed, region, residual, dropout).map(Some),
                    (None, residual) => Ok(residual.cloned()),
                };
                let natural = Order::default();
                let order = sequences.context.map_or(&natural, |context| context.order());
                let laid = Laid { order, tokens: sequences.context.map(|_| sequences.tokens), block };
                branch.forward_of(&normed, residual.unwrap_or(x), tape, |normed, residual| {
                    let beside = shared_of(residual)?;
                    let routed = layer.forward_laid(tape, normed, laid)?.dropout(dropout, name)?;
                    beside.map_or(Ok(routed.clone()), |beside| beside.add(&routed))
                })
            }
        }
    }
}
