//! An update rule as data: its kind, its hyper-parameters, its states and its measures.

use crate::{
    Adafactor, Adam8bit, AdamW, Kept, Lamb, Muon, OptimError, Optimizer, ParamShape, Pass, Result, Sgd, State,
    Transform, Update, WholeOptimizer,
};
use std::sync::Arc;

/// An update rule as data, so that a device can match on it and run a kernel of its own.
///
/// ```
/// use meshwork_optim::{AdamW, ParamShape, Rule, Sgd};
///
/// let (rule, vector) = (Rule::from(AdamW::default()), ParamShape::vector(8));
/// let names: Vec<_> = rule.states(&vector).iter().map(|state| state.name).collect();
/// assert_eq!((rule.name(), &names[..]), ("adamw", &["exp_avg", "exp_avg_sq"][..]));
/// assert_eq!(Rule::from(Sgd::default()).states(&vector).len(), 0); // no momentum, no state
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Rule {
    /// [`AdamW`], on every device.
    AdamW(AdamW),
    /// [`Sgd`], on every device.
    Sgd(Sgd),
    /// [`Lamb`], on every device.
    Lamb(Lamb),
    /// [`Adafactor`], on every device.
    Adafactor(Adafactor),
    /// [`Muon`], on every device. It is for matrices of hidden layers: see [`with_muon`](Rule::with_muon).
    Muon(Muon),
    /// [`Adam8bit`], on every device. It is for matrices of hidden layers: see [`with_adam8bit`](Rule::with_adam8bit).
    Adam8bit(Adam8bit),
    /// A rule for the matrices of hidden layers, and one for everything else: tables, heads, biases, norms.
    Hidden {
        /// The rule of matrices of [hidden](ParamShape::hidden) layers.
        matrices: Box<Rule>,
        /// The rule of the others.
        others: Box<Rule>,
    },
    /// A user-written rule. It runs where weights lie in host memory; other devices refuse it.
    Custom(Arc<dyn Optimizer>),
    /// A user-written rule that needs whole parameters, likewise.
    Whole(Arc<dyn WholeOptimizer>),
}

/// How a rule runs on host memory.
#[derive(Debug, Clone, Copy)]
pub enum OnHost<'a> {
    /// Element by element.
    Elements(&'a dyn Optimizer),
    /// After passes over the whole parameter.
    Whole(&'a dyn WholeOptimizer),
}

impl Rule {
    /// A user-written rule.
    pub fn custom(rule: impl Optimizer + 'static) -> Self {
        Self::Custom(Arc::new(rule))
    }

    /// A user-written rule that needs whole parameters.
    pub fn whole(rule: impl WholeOptimizer + 'static) -> Self {
        Self::Whole(Arc::new(rule))
    }

    /// Muon for the matrices of hidden layers, AdamW for everything else.
    #[must_use]
    pub fn with_muon(muon: Muon, others: AdamW) -> Self {
        Self::Hidden { matrices: Box::new(muon.into()), others: Box::new(others.into()) }
    }

    /// Adam with states of 8 bits for the matrices of hidden layers, and of 32 bits for everything else.
    #[must_use]
    pub fn with_adam8bit(rule: Adam8bit) -> Self {
        Self::Hidden { matrices: Box::new(rule.into()), others: Box::new(rule.adamw.into()) }
    }

    /// The rule of a parameter.
    #[must_use]
    pub fn for_shape(&self, shape: &ParamShape) -> &Self {
        match self {
            Self::Hidden { matrices, others } => if shape.hidden { matrices } else { others }.for_shape(shape),
            rule => rule,
        }
    }

    /// The rule's name, such as `adamw`. Of two rules it is the name of the one for hidden matrices.
    #[must_use]
    pub fn name(&self) -> &str {
        match self.on_host() {
            OnHost::Elements(rule) => rule.name(),
            OnHost::Whole(rule) => rule.name(),
        }
    }

    /// Its states of a parameter, in order; all zero before the first step.
    #[must_use]
    pub fn states(&self, shape: &ParamShape) -> Vec<State> {
        match self.for_shape(shape).on_host() {
            OnHost::Elements(rule) => rule.state_names().iter().map(|name| State::of_elements(name)).collect(),
            OnHost::Whole(rule) => rule.states(shape),
        }
    }

    /// The names of the state vectors of a rule that updates element by element.
    #[must_use]
    pub fn state_names(&self) -> &[&'static str] {
        match self.on_host() {
            OnHost::Elements(rule) => rule.state_names(),
            OnHost::Whole(_) => &[],
        }
    }

    /// The bytes that it keeps of a parameter.
    ///
    /// ```
    /// use meshwork_optim::{Adafactor, AdamW, ParamShape, Rule};
    ///
    /// let matrix = ParamShape::matrix(1024, 4096);
    /// assert_eq!(Rule::from(AdamW::default()).state_bytes(&matrix), 8 * 1024 * 4096);
    /// assert_eq!(Rule::from(Adafactor::default()).state_bytes(&matrix), 4 * (1024 + 4096));
    /// ```
    #[must_use]
    pub fn state_bytes(&self, shape: &ParamShape) -> usize {
        let bytes = |state: State| match state.kept {
            Kept::Elements => 4 * shape.elements(),
            Kept::Codes => shape.elements(),
            Kept::Sets(over) => 4 * over.count(shape),
        };
        self.states(shape).into_iter().map(bytes).sum()
    }

    /// Its passes of measures over a whole parameter before it updates; none, if elements do not depend on each other.
    #[must_use]
    pub fn passes(&self, shape: &ParamShape) -> Vec<Pass> {
        match self.for_shape(shape).on_host() {
            OnHost::Elements(_) => Vec::new(),
            OnHost::Whole(rule) => rule.passes(shape),
        }
    }

    /// The function of whole matrices that it needs before it updates, if it does.
    #[must_use]
    pub fn gathers(&self, shape: &ParamShape) -> Option<Transform> {
        match self.for_shape(shape).on_host() {
            OnHost::Elements(_) => None,
            OnHost::Whole(rule) => rule.gathers(shape),
        }
    }

    /// Whether an element's update depends on that element alone.
    #[must_use]
    pub fn is_elementwise(&self, shape: &ParamShape) -> bool {
        matches!(self.for_shape(shape).on_host(), OnHost::Elements(_))
    }

    /// Runs a rule on host slices of elements that do not depend on each other: [`Optimizer::update`].
    ///
    /// # Errors
    /// When the step is 0, when the slices do not fit together, when a user-written rule refuses, or when the rule
    /// needs whole parameters.
    pub fn update(&self, update: Update, weights: &mut [f32], grads: &[f32], states: &mut [&mut [f32]]) -> Result<()> {
        match self.on_host() {
            OnHost::Elements(rule) => rule.update(update, weights, grads, states),
            OnHost::Whole(rule) => Err(OptimError::NeedsWhole { rule: rule.name().to_owned() }),
        }
    }

    /// How it runs on host memory; of two rules, the one for hidden matrices.
    #[must_use]
    pub fn on_host(&self) -> OnHost<'_> {
        match self {
            Self::AdamW(rule) => OnHost::Elements(rule),
            Self::Sgd(rule) => OnHost::Elements(rule),
            Self::Custom(rule) => OnHost::Elements(&**rule),
            Self::Lamb(rule) => OnHost::Whole(rule),
            Self::Adafactor(rule) => OnHost::Whole(rule),
            Self::Muon(rule) => OnHost::Whole(rule),
            Self::Adam8bit(rule) => OnHost::Whole(rule),
            Self::Whole(rule) => OnHost::Whole(&**rule),
            Self::Hidden { matrices, .. } => matrices.on_host(),
        }
    }

    /// Whether a user wrote it, or one of its two rules.
    #[must_use]
    pub fn is_users(&self) -> bool {
        match self {
            Self::Custom(_) | Self::Whole(_) => true,
            Self::Hidden { matrices, others } => matrices.is_users() || others.is_users(),
            _ => false,
        }
    }
}

meshwork_core::from! {
    Rule: AdamW(AdamW), Sgd(Sgd), Lamb(Lamb), Adafactor(Adafactor), Muon(Muon), Adam8bit(Adam8bit)
}
