//! Ring attention: a hybrid whose places have one rank each.

use crate::Hybrid;
use meshwork_core::Axes;
use meshwork_tensor::op::{Exchange, Exchanged};
use meshwork_tensor::{Result, Tensor};

/// Ring attention over some axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    axes: Axes,
}

impl Ring {
    /// Over the ranks of `axes`.
    pub fn over(axes: impl Into<Axes>) -> Self {
        Self { axes: axes.into() }
    }

    /// With a place of its own for each rank.
    fn of_all(&self, call: &Exchanged<'_>) -> Hybrid {
        Hybrid::over(self.axes, call.tape.rank().group_over(&self.axes).size())
    }
}

impl Exchange for Ring {
    fn name(&self) -> &'static str {
        "ring_attention"
    }

    fn axes(&self) -> Axes {
        self.axes
    }

    fn attend(&self, call: &Exchanged<'_>, q: &Tensor, kv: &Tensor) -> Result<(Tensor, [Tensor; 4])> {
        self.of_all(call).attend(call, q, kv)
    }

    fn gradients(&self, call: &Exchanged<'_>, dout: &Tensor, saved: [Tensor; 4]) -> Result<(Tensor, Tensor)> {
        self.of_all(call).gradients(call, dout, saved)
    }
}
