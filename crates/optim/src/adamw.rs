//! AdamW: Adam with decoupled weight decay.
//!
//! ```text
//! g = scale·grad
//! m = m + (1 - β₁)·(g - m)               m̂ = m / (1 - β₁ᵗ)
//! v = β₂·v + (1 - β₂)·g²                 v̂ = v / (1 - β₂ᵗ)
//! w = w·(1 - lr·decay) - lr·m̂ / (√v̂ + ε)
//! ```
//! Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), with the decay scaled by the
//! learning rate and the arithmetic in the order of PyTorch's `AdamW`.

use crate::{Optimizer, Result, Update};
use meshwork_core::simd::wide;

/// AdamW (Loshchilov and Hutter): Adam with weight decay decoupled from the gradient. States: `exp_avg` and
/// `exp_avg_sq`, the running means of the gradient and of its square.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the running mean of the gradient, in [0, 1).
    pub beta1: f64,
    /// Decay of the running mean of the squared gradient, in [0, 1).
    pub beta2: f64,
    /// Added to the root of the mean square, above 0.
    pub eps: f64,
    /// Weight decay: a step subtracts this share of the weight, times the learning rate.
    pub weight_decay: f64,
}

/// The numbers of one update that are the same for all elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWFactors {
    /// The multiple of each gradient.
    pub grad_scale: f32,
    /// 1 - lr·decay.
    pub keep: f32,
    /// lr / (1 - β₁ᵗ).
    pub lr_hat: f32,
    /// √(1 - β₂ᵗ).
    pub root_hat: f32,
    /// 1 - β₁.
    pub mean_new: f32,
    /// β₂.
    pub square_old: f32,
    /// 1 - β₂.
    pub square_new: f32,
    /// ε.
    pub eps: f32,
}

impl AdamW {
    /// The factors of an update, computed in f64 and rounded once, for the kernel of a device.
    pub fn factors(&self, update: Update) -> AdamWFactors {
        let Update { step, lr, grad_scale, .. } = update;
        AdamWFactors {
            grad_scale,
            keep: update.keep(self.weight_decay),
            lr_hat: (lr / (1.0 - power(self.beta1, step))) as f32,
            root_hat: (1.0 - power(self.beta2, step)).sqrt() as f32,
            mean_new: (1.0 - self.beta1) as f32,
            square_old: self.beta2 as f32,
            square_new: (1.0 - self.beta2) as f32,
            eps: self.eps as f32,
        }
    }
}

impl Default for AdamW {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
    }
}

impl Optimizer for AdamW {
    fn name(&self) -> &str {
        "adamw"
    }

    fn state_names(&self) -> &[&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn update(&self, update: Update, weights: &mut [f32], grads: &[f32], states: &mut [&mut [f32]]) -> Result<()> {
        let [mean, square] = update.check(self.name(), weights, grads, states)?;
        let AdamWFactors { grad_scale, keep, lr_hat, root_hat, mean_new, square_old, square_new, eps } =
            self.factors(update);

        wide!({
            let moments = mean.iter_mut().zip(square.iter_mut());
            for ((w, &grad), (m, v)) in weights.iter_mut().zip(grads).zip(moments) {
                let g = grad_scale * grad;
                *m += mean_new * (g - *m);
                *v = square_old * *v + square_new * (g * g);
                *w = *w * keep - lr_hat * (*m / (v.sqrt() / root_hat + eps));
            }
        });
        Ok(())
    }
}

/// `base` to the power `exponent` by squaring: the same bits on every platform, which `powf` does not promise.
pub(crate) fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut product = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            product *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::power;

    #[test]
    fn powers_by_squaring_match_repeated_products() {
        let mut product = 1.0;
        for exponent in 0..200 {
            assert!((power(0.95, exponent) - product).abs() <= 1e-13 * product);
            product *= 0.95;
        }
        assert_eq!(power(0.5, 10), 0.0009765625);
        assert_eq!(power(0.999, u64::MAX), 0.0);
    }
}
