//! Stochastic gradient descent with momentum, like PyTorch's `SGD` (no dampening, no Nesterov).
//!
//! ```text
//! g = scale·grad + decay·w
//! b = momentum·b + g
//! w = w - lr·b
//! ```
//! Weight decay is coupled (L2): it is added to the gradient after clipping, and so enters the momentum.

use crate::{Optimizer, Result, Update};
use meshwork_core::simd::wide;

/// SGD with momentum and coupled (L2) weight decay. State: `momentum_buffer`, or none if the momentum is 0.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sgd {
    /// Share of the previous direction that is kept, in [0, 1); 0 = no momentum.
    pub momentum: f64,
    /// Multiple of the weight that is added to its gradient.
    pub weight_decay: f64,
}

impl Optimizer for Sgd {
    fn name(&self) -> &str {
        "sgd"
    }

    fn state_names(&self) -> &[&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }

    fn update(&self, update: Update, weights: &mut [f32], grads: &[f32], states: &mut [&mut [f32]]) -> Result<()> {
        let Update { lr, grad_scale, decay_factor, .. } = update;
        let decay = (self.weight_decay * decay_factor) as f32;
        let (lr, momentum) = (lr as f32, self.momentum as f32);

        if self.state_names().is_empty() {
            let [] = update.check("sgd without momentum", weights, grads, states)?;
            wide!({
                for (w, &grad) in weights.iter_mut().zip(grads) {
                    *w -= lr * (grad_scale * grad + decay * *w);
                }
            });
        } else {
            let [buffer] = update.check("sgd with momentum", weights, grads, states)?;
            wide!({
                for ((w, &grad), b) in weights.iter_mut().zip(grads).zip(buffer.iter_mut()) {
                    *b = momentum * *b + (grad_scale * grad + decay * *w);
                    *w -= lr * *b;
                }
            });
        }
        Ok(())
    }
}
