//! Clipping by the global gradient norm.

/// The factor that scales a gradient of norm `norm` down to `max_norm`: `max_norm / (norm + 1e-6)`, at most 1, as
/// in PyTorch's `clip_grad_norm_`. A `max_norm` of 0 means no clipping.
///
/// A norm that is NaN gives NaN, so that an invalid gradient stays visible.
///
/// ```
/// use meshwork_optim::clip_factor;
///
/// assert_eq!(clip_factor(0.5, 1.0), 1.0);
/// assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
/// assert_eq!(clip_factor(4.0, 0.0), 1.0);
/// ```
#[must_use]
pub fn clip_factor(norm: f64, max_norm: f64) -> f32 {
    // A comparison, because `f64::min` would turn NaN into 1.
    let factor = max_norm / (norm + 1e-6);
    if max_norm == 0.0 || factor > 1.0 { 1.0 } else { factor as f32 }
}
