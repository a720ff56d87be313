//! A mixture of experts in place of a feed-forward block.

use crate::dispatch::Dispatch;
use crate::{Experts, Router};
use meshwork_core::{Axis, Ty};
use meshwork_tensor::{Result, Tape, Var};
use std::sync::Arc;

/// `y_t = Σ_e w_e(t) · E_e(x_t)` over the experts e that the router chose for token t (Switch, equation 2). A token
/// that no expert takes gives zero, so that only the residual connection of the block passes it on.
///
/// Each rank of the experts' axis holds an equal run of the experts, and different sequences; rows are sent to the
/// experts' ranks and back ([`dispatch`](crate::dispatch)). Sequences are not sharded over tp here; with sequence
/// parallelism they are gathered first, because capacity and losses are defined per sequence.
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

    /// `normed [b, s, hidden]`, `Invariant` or `Shard(1)` on tp, → the same. It is read in the type of the weights, not
    /// as a stored operand of products. The caller adds the residual and shared experts, which are ordinary blocks.
    pub fn forward(&self, tape: &Tape, normed: &Var) -> Result<Var> {
        let sequence_parallel = normed.types().get(Axis::Tp) == Some(Ty::Shard(1));
        let x = match sequence_parallel {
            true => normed.all_gather_invariant(Axis::Tp, 1)?,
            false => normed.clone(),
        }; // [b, s, hidden], Invariant on tp
        let routed = self.router.route(tape, &x)?;
        let dispatch = Dispatch::new(tape, &routed.chosen, self.axis)?;
        // rows [rows, hidden] by expert, a chunk of the samples at a time
        let results = dispatch.through(&x, |rows, groups| self.experts.forward(tape, rows, groups))?;
        let y = dispatch.combine(&results, &routed.weights)?; // [b, s, hidden]
        match sequence_parallel {
            true => y.split(Axis::Tp, 1),
            false => Ok(y),
        }
    }
}
