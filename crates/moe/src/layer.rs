//! A mixture of experts in place of a feed-forward block.

use crate::dispatch::Dispatch;
use crate::{Experts, Router};
use meshwork_core::{Axes, Axis};
use meshwork_tensor::{Result, Tape, Var};
use std::sync::Arc;

/// `y_t = Σ_e w_e(t) · E_e(x_t)` over the experts e that the router chose for token t (Switch, equation 2). A token
/// that no expert takes gives zero, so that only the residual connection of the block passes it on.
///
/// Each rank of the experts' axis holds an equal run of the experts, and other sequences; the rows go to the experts'
/// ranks and back ([`dispatch`](crate::dispatch)). Sequences that axes cut, as tp with sequence parallelism, are
/// gathered first: an expert's capacity and the losses are counted by sequence.
#[derive(Clone, Debug)]
pub struct MoeLayer {
    router: Router,
    experts: Arc<dyn Experts>,
    axis: Axis,
}

impl MoeLayer {
    /// A layer of experts that are distributed over `axis`.
    pub fn new(router: Router, experts: impl Experts + 'static, axis: Axis) -> Self {
        Self { router, experts: Arc::new(experts), axis }
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
        let cut_over: Axes = normed.types().cuts(1).collect();
        let x = match cut_over.is_empty() {
            false => normed.all_gather_invariant(cut_over, 1)?,
            true => normed.clone(),
        }; // [b, s, hidden], whole sequences
        let routed = self.router.route(tape, &x)?;
        let dispatch = Dispatch::new(tape, &routed.chosen, self.axis)?;
        // rows [rows, hidden] by expert, a chunk of the samples at a time
        let results = dispatch.through(&x, |rows, groups| self.experts.forward(tape, rows, groups))?;
        let y = dispatch.combine(&results, &routed.weights)?; // [b, s, hidden]
        if cut_over.is_empty() { Ok(y) } else { y.split(cut_over, 1) }
    }
}
