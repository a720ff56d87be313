//! Muon: momentum whose matrices are made orthogonal.
//!
//! ```text
//! g = scale·grad
//! m = m + (1 - μ)·(g - m)
//! u = g + μ·(m - g)                                   (Nesterov)
//! X = u / ‖u‖                                         for each matrix, the shorter side as rows
//! A = X·Xᵀ,  X = a·X + (b·A + c·A²)·X                 five times: Newton-Schulz
//! w = w·(1 - lr·decay) - lr·0.2·√max(rows, columns)·X
//! ```
//! Jordan et al. (2024), in the arithmetic of PyTorch's `Muon` but for products in f32, with the step size of Liu et
//! al., "Muon is Scalable for LLM Training" (2025), which matches the root mean square of AdamW's steps, so that both
//! share a learning rate.

use crate::{ParamShape, Pass, Result, Run, State, Transform, Update, WholeOptimizer};

/// Muon (Jordan et al.), for matrices of hidden layers. State: `momentum_buffer`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Muon {
    /// Share of the running mean of gradients that is kept, in [0, 1).
    pub momentum: f64,
    /// Weight decay: a step subtracts this share of the weight, times the learning rate.
    pub weight_decay: f64,
}

impl Default for Muon {
    fn default() -> Self {
        Self { momentum: 0.95, weight_decay: 0.1 }
    }
}

impl Muon {
    /// By what the orthogonal matrix is multiplied before it is subtracted.
    #[must_use]
    pub fn size(&self, update: &Update, shape: &ParamShape) -> f32 {
        (update.lr * 0.2 * (shape.rows.max(shape.columns) as f64).sqrt()) as f32
    }
}

const NEWTON_SCHULZ: Transform = Transform::Orthogonal { coefficients: [3.4445, -4.7750, 2.0315], iterations: 5 };

impl WholeOptimizer for Muon {
    fn name(&self) -> &str {
        "muon"
    }

    fn states(&self, _shape: &ParamShape) -> Vec<State> {
        vec![State::of_elements("momentum_buffer")]
    }

    fn passes(&self, _shape: &ParamShape) -> Vec<Pass> {
        Vec::new()
    }

    fn gathers(&self, _shape: &ParamShape) -> Option<Transform> {
        Some(NEWTON_SCHULZ)
    }

    fn measure(&self, _pass: usize, weights: &[f32], run: &mut Run<'_, '_>, out: &mut [&mut [f32]]) -> Result<()> {
        let (update, grads) = (run.update, run.grads);
        let [mean] = run.states(self.name(), weights.len())?;
        let [steps] = Run::out(self.name(), out)?;
        let (old, new) = (self.momentum as f32, (1.0 - self.momentum) as f32);
        for ((&grad, m), u) in grads.iter().zip(mean.iter_mut()).zip(steps.iter_mut()) {
            let g = update.grad_scale * grad;
            *m += new * (g - *m);
            *u = g + old * (*m - g);
        }
        Ok(())
    }

    fn update(&self, weights: &mut [f32], run: &mut Run<'_, '_>) -> Result<()> {
        let keep = run.update.keep(self.weight_decay);
        let size = self.size(&run.update, &run.shape);
        weights.iter_mut().zip(run.gathered).for_each(|(w, &u)| *w = *w * keep - size * u);
        Ok(())
    }
}
