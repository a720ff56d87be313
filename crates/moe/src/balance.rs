//! Losses and measures that keep experts evenly loaded. Each is one f64 for every sequence, so the same on any mesh;
//! training minimises coefficients times their means over the sequences of the batch
//! ([`add_loss`](meshwork_tensor::Tape::add_loss)).
//!
//! For a sequence of T tokens, N experts, k experts per token, `c_i` tokens that chose expert i, and router
//! probabilities `p_i(t)`:
//!
//! - Switch (equations 4 to 6): `N · Σ_i f_i · P_i` with `f_i = c_i / T` and `P_i = 1/T Σ_t p_i(t)`; 1 if the load is
//!   even. With k experts per token, `f_i = c_i / (k T)`, as in DeepSeek-V3 (equations 17 to 20) and Megatron-LM. (The
//!   loss of `transformers` for Mixtral does not divide by k, and counts all tokens of a batch as one sequence.)
//! - GShard (section 2.2, algorithm 1): `1/N · Σ_i c_i/T · P_i`, where `c_i` counts only first choices.
//! - z-loss (ST-MoE, equation 5): `1/T Σ_t ln(Σ_i e^{x_i(t)})²` for the logits x.
//!
//! DeepSeek-V3 balances by a bias instead ([`BiasUpdate`]): after each step, the bias of each expert with more tokens
//! than the mean falls by γ, and the bias of each expert with fewer rises by γ.

use meshwork_core::rules::{Operand, per_axis};
use meshwork_core::{DType, ReduceOp, SpmdError, Ty, Types};
use meshwork_tensor::param::StatisticRule;
use meshwork_tensor::tape::{Backward, Forward, Op};
use meshwork_tensor::{Error, Result, Shape, Tensor, Var};

/// The load: how many choices each expert got, per sequence, or over all sequences that the ranks compute at the same
/// time.
#[derive(Clone, Debug)]
pub struct Load {
    counts: Tensor,
    /// Tokens that were counted together.
    tokens: usize,
    /// Choices per token.
    k: usize,
}

impl Load {
    /// Counts the choices `[samples, seq, k]` of each sequence.
    pub fn of_sequences(choices: &Tensor, experts: usize) -> Result<Self> {
        let &[samples, seq, k] = &choices.shape()[..] else { return Err(no_choices(choices)) };
        let device = choices.device();
        let counts = device.permutation()?.counts(choices.buffer(), samples, 0..experts)?;
        Ok(Self { counts: Tensor::from_buffer(device, counts, [samples, experts])?, tokens: seq, k })
    }

    /// Counts the choices of all sequences, over the ranks with different sequences: the axes on which `scores` are
    /// `Shard(0)`.
    pub fn of_all(choices: &Tensor, experts: usize, scores: &Var) -> Result<Self> {
        let &[samples, seq, k] = &choices.shape()[..] else { return Err(no_choices(choices)) };
        let (device, rank) = (choices.device(), scores.tape().rank());
        scores.tape().mixes_samples();
        let axes: Vec<_> = scores.types().iter().filter(|(_, ty)| *ty == Ty::Shard(0)).map(|(axis, _)| axis).collect();
        let group = rank.group_over(&axes);
        let counts = device.permutation()?.counts(choices.buffer(), 1, 0..experts)?;
        let counts = group.all_reduce(counts, ReduceOp::Sum)?;
        Ok(Self { counts: Tensor::from_buffer(device, counts, [1, experts])?, tokens: samples * seq * group.size(), k })
    }
}

fn no_choices(choices: &Tensor) -> Error {
    let problem = "choices are [samples, seq, k]".to_owned();
    Error::Shape { op: "load", problem, shapes: vec![choices.shape().to_vec()] }
}

/// Switch's loss for each sequence, `[samples]` in f64, from the probabilities `[samples, seq, experts]` and the load:
/// 1 if the load is even. It has the SPMD type of the probabilities, as for
/// [`Tape::add_loss`](meshwork_tensor::Tape::add_loss).
pub fn switch_loss(probabilities: &Var, load: &Load) -> Result<Var> {
    let experts = load.counts.shape()[1] as f64;
    balance(probabilities, load, experts / load.k as f64)
}

/// GShard's loss for each sequence, likewise; the load must count first choices.
pub fn gshard_loss(probabilities: &Var, load: &Load) -> Result<Var> {
    balance(probabilities, load, 1.0 / load.counts.shape()[1] as f64)
}

/// `factor · Σ_i c_i/T · P_i`.
fn balance(probabilities: &Var, load: &Load, factor: f64) -> Result<Var> {
    let seq = probabilities.shape().get(1).copied().unwrap_or(1);
    let scale = factor / (load.tokens * seq) as f64;
    OfSequences::apply(AuxLoss::Balance { load: load.counts.clone(), scale }, probabilities)
}

/// The z-loss of the logits `[samples, seq, experts]` for each sequence, `[samples]` in f64, with the SPMD type of the
/// logits.
pub fn z_loss(logits: &Var) -> Result<Var> {
    OfSequences::apply(AuxLoss::Z, logits)
}

/// The mean entropy of the router's choice for each sequence, `[samples]` in f64, from probabilities
/// `[samples, seq, experts]`: ln N if all experts are equally likely, 0 if the choice is certain. A metric, without a
/// gradient.
pub fn entropy(scores: &Var) -> Result<Var> {
    OfSequences::apply(AuxLoss::Entropy, &scores.detach())
}

/// The fraction of the choices `[samples, seq, k]` of each sequence that are dropped, `[samples]` in f64, for tokens
/// distributed like `scores`. A metric.
pub fn unused(kept: &Tensor, scores: &Var) -> Result<Var> {
    let kept = scores.tape().constant(kept.clone(), scores.types());
    OfSequences::apply(AuxLoss::Unused, &kept)
}

/// `max / mean` of the tokens per expert: 1 if the load is even.
///
/// ```
/// assert_eq!(meshwork_moe::balance::imbalance(&[3.0, 1.0, 0.0, 0.0]), 3.0);
/// ```
pub fn imbalance(tokens: &[f64]) -> f64 {
    let (max, sum) = tokens.iter().fold((0.0, 0.0), |(max, sum), &count| (count.max(max), count + sum));
    if sum > 0.0 { max * tokens.len() as f64 / sum } else { 1.0 }
}

/// One number for each sequence.
#[derive(Debug)]
struct OfSequences {
    kind: AuxLoss,
    shape: Shape,
    dtype: DType,
}

impl OfSequences {
    fn apply(kind: AuxLoss, x: &Var) -> Result<Var> {
        x.tape().apply(Self { kind, shape: x.shape(), dtype: x.tensor().dtype() }, &[x])
    }
}

#[derive(Debug)]
enum AuxLoss {
    /// `scale · Σ_i c_i Σ_t p_i(t)`
    Balance {
        load: Tensor,
        scale: f64,
    },
    Z,
    Entropy,
    Unused,
}

impl Op for OfSequences {
    fn name(&self) -> &'static str {
        match self.kind {
            AuxLoss::Balance { .. } => "balance_loss",
            AuxLoss::Z => "z_loss",
            AuxLoss::Entropy => "router_entropy",
            AuxLoss::Unused => "unused_choices",
        }
    }

    fn operands(&self) -> &'static [&'static str] {
        &["scores"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        whole_sequences(self.name(), operands[0])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let x = inputs[0];
        let &[samples, _, experts] = &x.shape()[..] else {
            return cx.require(false, "scores are [samples, seq, experts]").map(|()| x.clone());
        };
        let routing = x.device().routing()?;
        let out = match &self.kind {
            AuxLoss::Balance { load, scale } => {
                let fits = load.shape()[1] == experts && [1, samples].contains(&load.shape()[0]);
                cx.require(fits, format_args!("the load is of {:?} sequences and experts", load.shape()))?;
                cx.save(load)?;
                routing.balance(x.buffer(), load.buffer(), samples, experts, *scale)?
            }
            AuxLoss::Z => {
                cx.save_input(0)?;
                routing.z_loss(x.buffer(), samples, experts)?
            }
            AuxLoss::Entropy => routing.entropy(x.buffer(), samples, experts)?,
            AuxLoss::Unused => routing.unused(x.buffer(), samples)?,
        };
        Tensor::from_buffer(x.device(), out, [samples])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if !cx.needs(0) {
            return Ok(vec![None]);
        }
        let (tokens, experts) = self.shape.rows_columns(1);
        let (device, dout) = (grad.device(), grad.buffer());
        let dx = match &self.kind {
            AuxLoss::Balance { load, scale } => {
                device.routing()?.balance_grad(dout, load.buffer(), [tokens, experts], *scale, self.dtype)?
            }
            AuxLoss::Z => device.routing()?.z_loss_grad(cx.saved(0)?.buffer(), dout, experts)?,
            AuxLoss::Entropy | AuxLoss::Unused => return Ok(vec![None]),
        };
        Ok(vec![Some(Tensor::from_buffer(device, dx, self.shape)?)])
    }
}

/// Types of a function of whole sequences: rejects an x that is sharded along sequences or experts.
pub(crate) fn whole_sequences(op: &str, x: Operand<'_>) -> std::result::Result<Types, SpmdError> {
    per_axis(op, &[x], |axis, types| match types[0] {
        Ty::Shard(dim @ 1..) => Err((
            format!("dim {dim} of {} is sharded, and {op} needs whole sequences and all experts on one rank", x.name),
            format!("all_gather_invariant {} along dim {dim} first", x.name),
        )),
        Ty::Partial => Err((
            format!("{} is Partial, and {op} of a sum is not the sum of {op}", x.name),
            format!("all_reduce {} over {axis} first", x.name),
        )),
        ty => Ok(ty),
    })
}

/// The name, in the report of a step, of the tokens of each expert, for every layer.
pub const TOKENS: &str = "moe_tokens";

/// Updates the tokens of experts, and their bias, from the counts of a step's whole batch.
///
/// A statistic of a layer: each micro-batch notes the counts of its choices, and the sums over all micro-batches and
/// ranks update the buffers at the end of the step. So no rank can update a bias from only its own counts, because
/// buffers change only this way.
#[derive(Clone, Copy, Debug)]
pub struct BiasUpdate {
    /// γ: the increase of the bias of an expert with fewer tokens than the mean.
    pub rate: f32,
}

impl StatisticRule for BiasUpdate {
    fn terms(&self, _weight: f64, values: &[f32]) -> Vec<f64> {
        values.iter().map(|&count| f64::from(count)).collect()
    }

    fn reported(&self) -> Option<&'static str> {
        Some(TOKENS)
    }

    /// `buffers` are the tokens of the step, then the bias if the router has one.
    fn update(&self, sums: &[f64], buffers: &mut [Vec<f32>]) {
        let mean = sums.iter().sum::<f64>() / sums.len().max(1) as f64;
        if let Some(tokens) = buffers.first_mut() {
            tokens.iter_mut().zip(sums).for_each(|(tokens, &sum)| *tokens = sum as f32);
        }
        if let Some(bias) = buffers.get_mut(1) {
            for (bias, &sum) in bias.iter_mut().zip(sums) {
                *bias += match sum.total_cmp(&mean) {
                    std::cmp::Ordering::Less => self.rate,
                    std::cmp::Ordering::Equal => 0.0,
                    std::cmp::Ordering::Greater => -self.rate,
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bias_of_an_expert_with_many_tokens_falls() {
        let mut buffers = [vec![0.0; 4], vec![0.5, 0.0, -1.0, 0.25]];
        let rule = BiasUpdate { rate: 0.125 };
        rule.update(&rule.terms(1.0, &[7.0, 0.0, 4.0, 5.0]), &mut buffers);
        assert_eq!(buffers, [vec![7.0, 0.0, 4.0, 5.0], vec![0.375, 0.125, -1.0, 0.125]]);
        let mut no_bias = [vec![0.0; 2]];
        rule.update(&[2.0, 1.0], &mut no_bias);
        assert_eq!(no_bias, [vec![2.0, 1.0]]);
        assert_eq!(imbalance(&[2.0, 2.0]), 1.0);
        assert_eq!(imbalance(&[0.0, 0.0]), 1.0, "no tokens at all");
    }
}
