//! Optimizers on flat slices, gradient clipping and learning-rate schedules.
//!
//! Nothing here knows tensors, meshes or devices: weights, gradients and optimizer states are plain `f32`
//! slices, so that a rank may update whole parameters, a ZeRO slice, or a buffer of its own making.
//!
//! ```
//! use meshwork_optim::{AdamW, Optimizer, Update, clip_factor};
//!
//! let adamw = AdamW::default();
//! let (mut weights, grads) = ([1.0f32, -2.0], [0.5f32, 4.0]);
//! let (mut mean, mut square) = ([0.0f32; 2], [0.0f32; 2]); // one vector for each of adamw.state_names(), zero at first
//!
//! let norm = f64::sqrt(0.5 * 0.5 + 4.0 * 4.0);
//! let update = Update { step: 1, lr: 1e-3, grad_scale: clip_factor(norm, 1.0), decay_factor: 1.0 };
//! adamw.update(update, &mut weights, &grads, &mut [&mut mean, &mut square])?;
//! assert!(weights[0] < 1.0 && weights[1] < -2.0);
//! # Ok::<(), meshwork_optim::OptimError>(())
//! ```
#![forbid(unsafe_code)]

mod adamw;
mod clip;
mod optimizer;
mod rule;
mod schedule;
mod sgd;

pub use adamw::AdamW;
pub use clip::clip_factor;
pub use optimizer::{OptimError, Optimizer, Update};
pub use rule::Rule;
pub use schedule::{Decay, LrSchedule};
pub use sgd::Sgd;
