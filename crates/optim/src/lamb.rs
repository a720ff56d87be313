//! LAMB: Adam whose step is scaled to the norm of each matrix.
//!
//! ```text
//! g = scale·grad
//! m = m + (1 - β₁)·(g - m)               m̂ = m / (1 - β₁ᵗ)
//! v = β₂·v + (1 - β₂)·g²                 v̂ = v / (1 - β₂ᵗ)
//! u = m̂ / (√v̂ + ε) + decay·w
//! w = w - lr·‖w‖/‖u‖·u
//! ```
//! You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2019), algorithm 2 with φ(x)
//! = x. The norms are taken over a whole matrix or vector: queries, keys and values have one each, and so has each
//! expert. Where one of them is 0, the ratio is 1.

use crate::adamw::power;
use crate::{Over, ParamShape, Pass, PassTotals, Result, Run, SetPart, State, Update, WholeOptimizer};
use meshwork_core::simd::wide;

/// LAMB (You et al.). States: `exp_avg` and `exp_avg_sq`, as in [`AdamW`](crate::AdamW).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lamb {
    /// Decay of the running mean of the gradient, in [0, 1).
    pub beta1: f64,
    /// Decay of the running mean of the squared gradient, in [0, 1).
    pub beta2: f64,
    /// Added to the root of the mean square, above 0.
    pub eps: f64,
    /// Weight decay: this share of the weight is part of the step whose norm is taken.
    pub weight_decay: f64,
}

impl Default for Lamb {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-6, weight_decay: 0.01 }
    }
}

/// The numbers of one update that are the same for all elements, rounded once from f64.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LambFactors {
    /// 1 - β₁.
    pub mean_new: f32,
    /// β₂.
    pub square_old: f32,
    /// 1 - β₂.
    pub square_new: f32,
    /// 1 / (1 - β₁ᵗ).
    pub mean_hat: f32,
    /// √(1 - β₂ᵗ).
    pub root_hat: f32,
    /// ε.
    pub eps: f32,
    /// Weight decay.
    pub decay: f32,
}

impl LambFactors {
    /// The direction of an element before it is scaled.
    #[inline(always)]
    fn direction(self, w: f32, m: f32, v: f32) -> f32 {
        m * self.mean_hat / (v.sqrt() / self.root_hat + self.eps) + self.decay * w
    }
}

impl Lamb {
    /// The factors of an update, for the kernel of a device.
    pub fn factors(&self, update: &Update) -> LambFactors {
        LambFactors {
            mean_new: (1.0 - self.beta1) as f32,
            square_old: self.beta2 as f32,
            square_new: (1.0 - self.beta2) as f32,
            mean_hat: (1.0 / (1.0 - power(self.beta1, update.step))) as f32,
            root_hat: (1.0 - power(self.beta2, update.step)).sqrt() as f32,
            eps: self.eps as f32,
            decay: (self.weight_decay * update.decay_factor) as f32,
        }
    }
}

impl WholeOptimizer for Lamb {
    fn name(&self) -> &str {
        "lamb"
    }

    fn states(&self, _shape: &ParamShape) -> Vec<State> {
        vec![State::of_elements("exp_avg"), State::of_elements("exp_avg_sq")]
    }

    fn passes(&self, _shape: &ParamShape) -> Vec<Pass> {
        vec![Pass::Squares(vec![Over::Matrix, Over::Matrix])] // of w and of u
    }

    fn measure(&self, _pass: usize, weights: &[f32], run: &mut Run<'_, '_>, out: &mut [&mut [f32]]) -> Result<()> {
        let (update, grads) = (run.update, run.grads);
        let [mean, square] = run.states(self.name(), weights.len())?;
        let [of_weights, of_steps] = Run::out(self.name(), out)?;
        let factors = self.factors(&update);
        let LambFactors { mean_new, square_old, square_new, .. } = factors;
        of_weights.copy_from_slice(weights);
        wide!({
            let moments = mean.iter_mut().zip(square.iter_mut());
            for (((&w, &grad), (m, v)), u) in weights.iter().zip(grads).zip(moments).zip(of_steps.iter_mut()) {
                let g = update.grad_scale * grad;
                *m += mean_new * (g - *m);
                *v = square_old * *v + square_new * (g * g);
                *u = factors.direction(w, *m, *v);
            }
        });
        Ok(())
    }

    /// Leaves the ratio of the norms in the place of the first.
    fn finish_pass(&self, PassTotals { totals, .. }: PassTotals<'_, '_>) -> Result<()> {
        let [weights, steps] = totals else { return Err(Run::wrong(self.name(), "measures", totals.len(), 2)) };
        for (weights, steps) in weights.iter_mut().zip(steps.iter()) {
            let [of_weights, of_steps] = [weights.sqrt(), steps.sqrt()];
            *weights = if of_weights > 0.0 && of_steps > 0.0 { of_weights / of_steps } else { 1.0 };
        }
        Ok(())
    }

    fn update(&self, weights: &mut [f32], run: &mut Run<'_, '_>) -> Result<()> {
        let (update, factors, ratios) = (run.update, self.factors(&run.update), run.totals[0]);
        let parts = Over::Matrix.sets(&run.shape, run.first, weights.len());
        let [mean, square] = run.states(self.name(), weights.len())?;
        for SetPart { range, set, .. } in parts {
            let lr = (update.lr * ratios[set]) as f32;
            let (weights, mean, square) = (&mut weights[range.clone()], &mean[range.clone()], &square[range]);
            wide!({
                for ((w, &m), &v) in weights.iter_mut().zip(mean).zip(square) {
                    *w -= lr * factors.direction(*w, m, v);
                }
            });
        }
        Ok(())
    }
}
