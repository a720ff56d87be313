//! An update rule as data: its kind, its hyper-parameters and the names of its states.

use std::sync::Arc;

use crate::{AdamW, OptimError, Optimizer, Sgd, Update};

/// An update rule as data, so that a device can match on it and run a kernel of its own.
///
/// ```
/// use meshwork_optim::{AdamW, Rule, Sgd};
///
/// let rule = Rule::from(AdamW::default());
/// assert_eq!((rule.name(), rule.state_names()), ("adamw", &["exp_avg", "exp_avg_sq"][..]));
/// assert_eq!(Rule::from(Sgd::default()).state_names().len(), 0); // no momentum, no state
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Rule {
    /// [`AdamW`], on every device.
    AdamW(AdamW),
    /// [`Sgd`], on every device.
    Sgd(Sgd),
    /// A user-written rule. It runs where weights lie in host memory; other devices refuse it.
    Custom(Arc<dyn Optimizer>),
}

impl Rule {
    /// A user-written rule.
    pub fn custom(rule: impl Optimizer + 'static) -> Self {
        Self::Custom(Arc::new(rule))
    }

    /// The rule's name, such as `adamw`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.on_host().name()
    }

    /// Names of its state vectors, in order. Each vector is as long as the weights, and all zero before the first step.
    #[must_use]
    pub fn state_names(&self) -> &[&'static str] {
        self.on_host().state_names()
    }

    /// Runs the rule on host slices: [`Optimizer::update`].
    ///
    /// # Errors
    /// When the step is 0, when the slices do not fit together, or when a user-written rule refuses.
    pub fn update(
        &self,
        update: Update,
        weights: &mut [f32],
        grads: &[f32],
        states: &mut [&mut [f32]],
    ) -> Result<(), OptimError> {
        self.on_host().update(update, weights, grads, states)
    }

    fn on_host(&self) -> &dyn Optimizer {
        match self {
            Self::AdamW(rule) => rule,
            Self::Sgd(rule) => rule,
            Self::Custom(rule) => &**rule,
        }
    }
}

impl From<AdamW> for Rule {
    fn from(rule: AdamW) -> Self {
        Self::AdamW(rule)
    }
}

impl From<Sgd> for Rule {
    fn from(rule: Sgd) -> Self {
        Self::Sgd(rule)
    }
}
