//! How a parameter is updated, as chosen in its declaration.

use super::{ParamSpec, Role};
use meshwork_optim::ParamShape;

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
    /// For the weights of a hidden layer: how their dims make matrices, for rules that read rows, columns or whole matrices. `None` for
    /// tables, heads, biases and norms.
    pub matrices: Option<Matrices>,
}

/// How the dims of a weight make matrices `[rows, columns]`: `[stacked.., rows.., columns..]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrices {
    /// The number of leading dims that number matrices: experts; queries, keys and values.
    pub stacked: usize,
    /// The number of trailing dims that are columns: input features.
    pub columns: usize,
}

impl ParamGroup {
    /// The group of a role: only weights have weight decay, and buffers are frozen.
    pub const fn of(role: Role) -> Self {
        let weight_decay = if matches!(role, Role::Weight) { 1.0 } else { 0.0 };
        Self { learning_rate: 1.0, weight_decay, frozen: matches!(role, Role::Buffer), matrices: None }
    }

    /// The group of the weights of a hidden layer.
    ///
    /// ```
    /// use meshwork_tensor::param::ParamGroup;
    /// use meshwork_tensor::{Declarations, Init, Placement, Role};
    ///
    /// let mut params = Declarations::new();
    /// let (whole, qkv) = (Placement::replicated(), ParamGroup::hidden(1, 1)); // three matrices, each of as many rows as features
    /// let id = params.declare_in("qkv", &[3, 4, 16, 64], whole, Role::Weight, Init::Zeros, qkv)?;
    /// let shape = params.spec(id).shape();
    /// assert_eq!((shape.matrices, shape.rows, shape.columns), (3, 64, 64));
    /// # Ok::<(), meshwork_tensor::Error>(())
    /// ```
    pub const fn hidden(stacked: usize, columns: usize) -> Self {
        Self { matrices: Some(Matrices { stacked, columns }), ..Self::of(Role::Weight) }
    }

    /// A parameter that training does not change.
    pub const FROZEN: Self = Self { learning_rate: 0.0, weight_decay: 0.0, frozen: true, matrices: None };
}

impl ParamSpec {
    /// The parameter as an update rule sees it. A weight that declares no matrices is one of as many columns as its last dim has elements.
    pub fn shape(&self) -> ParamShape {
        let dims = &self.dims;
        match (self.group.matrices, self.role) {
            (Some(Matrices { stacked, columns }), _) => {
                let rows = dims.len() - columns;
                let count = |dims: &[usize]| dims.iter().product();
                let (matrices, rows, columns) =
                    (count(&dims[..stacked]), count(&dims[stacked..rows]), count(&dims[rows..]));
                ParamShape { matrices, rows, columns, hidden: rows > 1 && columns > 1 }
            }
            (None, Role::Weight) if dims.len() > 1 => {
                let (rows, columns) = dims.rows_columns(1);
                ParamShape { matrices: 1, rows, columns, hidden: false }
            }
            _ => ParamShape::vector(dims.count()),
        }
    }
}
