//! How a parameter is updated, as chosen in its declaration.

use super::Role;

/// The parameter group of a parameter: what the optimizer does with it. Factors multiply the hyper-parameters of the run.
///
/// ```
/// use meshwork_tensor::Role;
/// use meshwork_tensor::param::ParamGroup;
///
/// // Weight decay is for weights alone; buffers are no subject of training.
/// assert_eq!(ParamGroup::of(Role::Weight).weight_decay, 1.0);
/// assert_eq!(ParamGroup::of(Role::Norm).weight_decay, 0.0);
/// assert!(ParamGroup::of(Role::Buffer).frozen);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParamGroup {
    /// Factor on the learning rate.
    pub learning_rate: f64,
    /// Factor on the weight decay; 0 = none.
    pub weight_decay: f64,
    /// Whether the parameter does not change: it has no gradient, no optimizer state, and no part in the gradient norm.
    pub frozen: bool,
}

impl ParamGroup {
    /// The group of a role: only weights have weight decay, and buffers are frozen.
    pub const fn of(role: Role) -> Self {
        let weight_decay = if matches!(role, Role::Weight) { 1.0 } else { 0.0 };
        Self { learning_rate: 1.0, weight_decay, frozen: matches!(role, Role::Buffer) }
    }

    /// A parameter that training does not change.
    pub const FROZEN: Self = Self { learning_rate: 0.0, weight_decay: 0.0, frozen: true };
}
