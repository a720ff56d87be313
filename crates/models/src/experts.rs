//! Feed-forward blocks of language models: one MLP, or a mixture of experts in its place, with shared experts beside
//! it.
//!
//! ```text
//! dense:    x ← x + MLP(norm(x))
//! experts:  x ← x + Σ_e w_e(x̂) · E_e(x̂) + Shared(x̂),   x̂ = norm(x)
//! ```
//!
//! Experts have the shape of the MLP that they replace. Shared experts (DeepSeekMoE, equation 9) take every token;
//! together they are one MLP as wide as all of them.

use crate::language::Sequences;
use meshwork_core::Mesh;
pub use meshwork_moe::balance::{TOKENS, imbalance};
pub use meshwork_moe::{AuxLossScope, ExpertGroups, MoeConfig, MoeError, Overflow, RouterKind};
use meshwork_moe::{ExpertShape, Experts, Laid, MoeLayer, Router};
use meshwork_nn::{LayerNorm, Metric, Per, RmsNorm};
use meshwork_tensor::op::Order;
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};
use meshwork_tensor_parallel::{ParallelMlp, ParallelSwiGlu, Region};

/// Experts in place of the MLPs of some layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// The experts of a layer and their router. [`MoeConfig::layers`] is set by the model.
    pub moe: MoeConfig,
    /// Every so many layers have experts, the last of them first: with 2 layers 1, 3, .. (from 0), as in GShard.
    pub every_n_layers: usize,
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
        (layer + 1).is_multiple_of(self.every_n_layers.max(1))
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

/// A dense feed-forward block.
pub(crate) trait Mlp {
    fn forward(&self, tape: &Tape, normed: &Var, region: Region, residual: Option<&Var>, dropout: f32) -> Result<Var>;
}

impl Mlp for ParallelMlp {
    fn forward(&self, tape: &Tape, normed: &Var, region: Region, residual: Option<&Var>, dropout: f32) -> Result<Var> {
        ParallelMlp::forward(self, tape, normed, region, residual, dropout)
    }
}

impl Mlp for ParallelSwiGlu {
    fn forward(&self, tape: &Tape, normed: &Var, region: Region, residual: Option<&Var>, dropout: f32) -> Result<Var> {
        ParallelSwiGlu::forward(self, tape, normed, region, residual, dropout)
    }
}

/// A norm, for any reader or for products alone.
pub(crate) trait Norm {
    fn forward(&self, tape: &Tape, x: &Var) -> Result<Var>;
    fn operand(&self, tape: &Tape, x: &Var) -> Result<Var>;
}

impl Norm for LayerNorm {
    fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        LayerNorm::forward(self, tape, x)
    }

    fn operand(&self, tape: &Tape, x: &Var) -> Result<Var> {
        LayerNorm::operand(self, tape, x)
    }
}

impl Norm for RmsNorm {
    fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        RmsNorm::forward(self, tape, x)
    }

    fn operand(&self, tape: &Tape, x: &Var) -> Result<Var> {
        RmsNorm::operand(self, tape, x)
    }
}

/// The feed-forward block of a layer.
#[derive(Clone, Debug)]
pub(crate) enum FeedForward<M> {
    Dense(M),
    Experts { name: String, layer: Box<MoeLayer>, shared: Option<M> },
}

/// What the feed-forward blocks of a model have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FeedForwardSpec {
    pub hidden: usize,
    pub ffn: usize,
    pub num_layers: usize,
    pub experts: Option<ExpertsConfig>,
}

impl<M: Mlp> FeedForward<M> {
    /// Declares the block of a layer: by `dense(params, name, ffn)` an MLP of these inner features, by
    /// `of(params, name, shape)` the networks of experts. `router` has the initial values of the router's weight.
    pub fn new<E: Experts + 'static>(
        params: &mut Declarations,
        mesh: &Mesh,
        name: String,
        (spec, layer, router): (FeedForwardSpec, usize, Init),
        dense: impl FnOnce(&mut Declarations, &str, usize) -> Result<M>,
        of: impl FnOnce(&mut Declarations, &str, ExpertShape) -> Result<E>,
    ) -> Result<Self> {
        let Some(experts) = spec.experts.filter(|experts| experts.has(layer)) else {
            return Ok(Self::Dense(dense(params, &name, spec.ffn)?));
        };
        let moe = MoeConfig { layers: experts.count(spec.num_layers), ..experts.moe };
        moe.check(mesh.expert_degree()).map_err(|mut wrong| wrong.remove(0))?;
        let shape = ExpertShape {
            experts: moe.num_experts,
            hidden: spec.hidden,
            ffn: experts.expert_hidden_size,
            axes: mesh.expert_axes(),
            over_tp: experts.over_tp,
        };
        let router = Router::new(params, &format!("{name}.router"), spec.hidden, moe, router)?;
        let networks = of(params, &format!("{name}.experts"), shape)?;
        let shared = match experts.num_shared_experts * experts.expert_hidden_size {
            0 => None,
            ffn => Some(dense(params, &format!("{name}.shared"), ffn)?),
        };
        Ok(Self::Experts { name, layer: Box::new(MoeLayer::new(router, networks, mesh.expert_axes())), shared })
    }

    /// `x + block(norm(x))`, of tokens that lie as in `sequences`.
    pub fn forward(
        &self,
        tape: &Tape,
        x: &Var,
        norm: &impl Norm,
        sequences: Sequences<'_>,
        dropout: f32,
    ) -> Result<Var> {
        let region = sequences.region;
        match self {
            Self::Dense(mlp) => mlp.forward(tape, &norm.operand(tape, x)?, region, Some(x), dropout),
            Self::Experts { name, layer, shared } => {
                let normed = norm.forward(tape, x)?;
                let x = match shared {
                    Some(shared) => shared.forward(tape, &normed, region, Some(x), dropout)?,
                    None => x.clone(),
                };
                let natural = Order::default();
                let order = sequences.context.map_or(&natural, |context| context.order());
                let laid = Laid { order, tokens: sequences.context.map(|_| sequences.tokens) };
                x.add(&layer.forward_laid(tape, &normed, laid)?.dropout(dropout, name)?)
            }
        }
    }
}
