//! A mixture of experts in place of a feed-forward block.

use crate::dispatch::{Chosen, Dispatch};
use crate::router::Routed;
use crate::{Experts, Router};
use meshwork_core::{Axes, Axis, Buffer};
use meshwork_tensor::op::Order;
use meshwork_tensor::{Result, Tape, Tensor, Var};
use std::sync::Arc;

/// The dim of tokens.
const SEQ: usize = 1;

/// `y_t = Σ_e w_e(t) · E_e(x_t)` over the experts e that the router chose for token t (Switch, equation 2). A token
/// that no expert takes gives zero, so that only the residual connection of the block passes it on.
///
/// Each rank of the experts' axes holds an equal run of the experts, and other tokens; the rows go to the experts'
/// ranks and back ([`dispatch`](crate::dispatch)). An expert's capacity and the losses are counted by sequence. Of
/// sequences that axes cut, these are brought together first:
///
/// | cut over | brought together |
/// |---|---|
/// | tp (sequence parallelism) | tokens: each rank of tp has all of them, and its part of each expert, or the same experts |
/// | other axes, such as cp | logits, for which the whole sequence chooses; each rank sends its own tokens to the experts |
/// | other axes, in canonical numerics | tokens, but for axes of the experts: the gradients of weights have no other order |
#[derive(Clone, Debug)]
pub struct MoeLayer {
    router: Router,
    experts: Arc<dyn Experts>,
    axes: Axes,
}

/// How the tokens of a sequence lie before axes other than tp cut it.
#[derive(Clone, Copy, Debug)]
pub struct Laid<'a> {
    /// The order of the places.
    pub order: &'a Order,
    /// The tokens of a sequence, if they are fewer than its places. Those behind them no expert takes and no loss
    /// counts.
    pub tokens: Option<usize>,
    /// Tokens of a sequence that experts take at a time ([`Tape::in_blocks`]); 0: all.
    pub block: usize,
}

impl MoeLayer {
    /// A layer of experts that are distributed over `axes`.
    pub fn new(router: Router, experts: impl Experts + 'static, axes: impl Into<Axes>) -> Self {
        Self { router, experts: Arc::new(experts), axes: axes.into() }
    }

    /// The router.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// The experts.
    pub fn experts(&self) -> &dyn Experts {
        &*self.experts
    }

    /// `normed [b, s, hidden]`, whole sequences or `Shard(1)`, → the same. It is read in the type of the weights, not
    /// as a stored operand of products. The residual and shared experts, which are ordinary blocks beside these, are
    /// the caller's to add.
    pub fn forward(&self, tape: &Tape, normed: &Var) -> Result<Var> {
        self.forward_laid(tape, normed, Laid { order: &Order::default(), tokens: None, block: 0 })
    }

    /// The same of tokens that lie in an order of their own before axes cut them.
    pub fn forward_laid(&self, tape: &Tape, normed: &Var, laid: Laid<'_>) -> Result<Var> {
        let canonical = tape.reduction_blocks().is_some();
        let stays = |axis: &Axis| *axis != Axis::Tp && (!canonical || self.axes.contains(axis));
        let (kept, gathered): (Vec<Axis>, Vec<Axis>) = normed.types().cuts(SEQ).partition(stays);
        let (kept, gathered) = (Axes::from(&kept[..]), Axes::from(&gathered[..]));
        // A cut that is gathered may be outside of one that stays: both are gathered then, and this one is cut again.
        let outside = gathered.last() > kept.first() && !kept.is_empty();
        let cut: Axes = normed.types().cuts(SEQ).collect();
        let x = if outside { over(normed, cut)?.split(kept, SEQ)? } else { over(normed, gathered)? }; // [b, places here, hidden]
        let places = x.shape()[SEQ];
        let y = if kept.is_empty() {
            let x = laid.in_sequence(&x)?;
            let routed = self.router.route(tape, &x, Ok)?;
            laid.at_places(&self.mix(tape, &x, routed, laid.block)?, places)?
        } else {
            let whole = |x: &Var| laid.in_sequence(&over(x, kept)?);
            // The noise of the router is drawn for tokens of whole sequences.
            let routed = match canonical || self.router.config().jitter > 0.0 {
                true => self.router.route(tape, &whole(&x)?, Ok)?,
                false => self.router.route(tape, &x, |logits| whole(&logits))?,
            };
            self.mix(tape, &x, laid.here(routed, kept, places)?, laid.block)?
        };
        match outside {
            true => over(&y, kept)?.split(cut, SEQ),
            false if gathered.is_empty() => Ok(y),
            false => y.split(gathered, SEQ),
        }
    }

    /// The weighted results of the experts of `x [b, s, hidden]`, for `block` tokens of a sequence at a time.
    fn mix(&self, tape: &Tape, x: &Var, Routed { chosen, weights }: Routed, block: usize) -> Result<Var> {
        let (axes, experts) = (self.axes, Arc::clone(&self.experts));
        let of_tokens = move |tape: &Tape, x: &Var, weights: &Var, chosen: &Chosen| {
            let dispatch = Dispatch::new(tape, chosen, axes)?;
            // rows [rows, hidden] by expert, a chunk of the samples at a time
            let results = dispatch.through(x, |rows, groups| experts.forward(tape, rows, groups))?;
            dispatch.combine(&results, weights) // [b, s, hidden]
        };
        if block == 0 {
            return of_tokens(tape, x, &weights, &chosen);
        }
        tape.in_blocks(&[x, &weights.clone()], block, move |tape, parts, block| {
            let seq = chosen.experts.shape()[SEQ].max(1);
            let capacity = chosen.capacity.map(|capacity| (capacity * block.tokens()).div_ceil(seq));
            let chosen = Chosen { experts: block.of(&chosen.experts)?, capacity, ..chosen.clone() };
            of_tokens(tape, &parts[0], &parts[1], &chosen)
        })
    }
}

fn over(x: &Var, axes: Axes) -> Result<Var> {
    if axes.is_empty() { Ok(x.clone()) } else { x.all_gather_invariant(axes, SEQ) }
}

impl Laid<'_> {
    /// The tokens of whole sequences, in their order, of values at all places.
    fn in_sequence(self, x: &Var) -> Result<Var> {
        let x = x.from_order(SEQ, self.order)?;
        match self.tokens.filter(|&tokens| tokens < x.shape()[SEQ]) {
            Some(tokens) => x.narrow(SEQ, 0..tokens),
            None => Ok(x),
        }
    }

    /// Back, with zeros at the places behind the last token.
    fn at_places(self, x: &Var, places: usize) -> Result<Var> {
        let (shape, tape) = (x.shape(), x.tape());
        let x = match places - shape[SEQ] {
            0 => x.clone(),
            behind => {
                let zeros = Tensor::zeros(tape.device(), x.tensor().dtype(), shape.with(SEQ, behind))?;
                x.concat(&tape.constant(zeros, x.types()), SEQ)?
            }
        };
        x.to_order(SEQ, self.order)
    }

    /// The choices of the tokens at the `here` places of this rank, where `axes` cut the sequence.
    fn here(self, Routed { chosen, weights }: Routed, axes: Axes, here: usize) -> Result<Routed> {
        let group = weights.tape().rank().group_over(&axes);
        let (places, first, tokens) = (here * group.size(), here * group.rank(), weights.shape()[SEQ]);
        let weights = self.at_places(&weights, places)?.split(axes, SEQ)?;
        let of_all = &chosen.experts;
        let (device, samples, each) = (of_all.device(), of_all.shape()[0], of_all.shape()[2]);
        let mut experts = device.upload(&Buffer::from_vec(vec![-1; samples * here * each]))?; // no expert
        let runs = self.order.tokens(places, first..first + here)?;
        for sample in 0..samples {
            let mut at = sample * here;
            for run in &runs {
                let [start, end] = [run.start, run.end].map(|token| (sample * tokens + token.min(tokens)) * each);
                device.layout()?.copy_into(of_all.buffer(), start..end, &mut experts, at * each)?;
                at += run.len();
            }
        }
        let experts = Tensor::from_buffer(device, experts, of_all.shape().with(SEQ, here))?;
        let capacity = chosen.capacity.map(|capacity| (capacity * here).div_ceil(tokens.max(1)));
        Ok(Routed { chosen: Chosen { experts, types: weights.types(), capacity, ..chosen }, weights })
    }
}
