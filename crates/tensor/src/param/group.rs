//! How a parameter is updated, as chosen in its declaration.

use super::{ParamSpec, Role};
use meshwork_optim::ParamShape;

/// The parameter group of a parameter: what the optimizer does with it. Factors multiply the hyper-parameters of the
/// run.
///
/// ```
/// use meshwork_tensor::Role;
/// use meshwork_tensor::param::ParamGroup;
///
/// // Weight decay is for weights alone; buffers are no subject of training.
/// assert_eq!(ParamGroup::for_role(Role::Weight).weight_decay, 1.0);
/// assert_eq!(ParamGroup::for_role(Role::Norm).weight_decay, 0.0);
/// assert!(ParamGroup::for_role(Role::Buffer).frozen);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParamGroup {
    /// Factor on the learning rate.
    pub learning_rate: f64,
    /// Factor on the weight decay; 0 = none.
    pub weight_decay: f64,
    /// Whether the parameter does not change: it has no gradient, no optimizer state, and no part in the gradient norm.
    pub frozen: bool,
    /// How its dims make matrices, for rules that read rows, columns or whole matrices: for the weights of a hidden
    /// layer, and for biases of several projections, which are as many vectors. `None` for what is one table, head,
    /// vector or norm.
    pub matrices: Option<Matrices>,
}

/// How the dims of a parameter make matrices `[rows, columns]`: `[stacked.., rows.., interleaved.., columns..]`.
///
/// A parameter may hold several projections, because one product then computes them: queries, keys and values, gate and
/// up, those of all experts. Whatever reads a whole matrix (the update rules LAMB, Adafactor, Muon and 8-bit Adam,
/// PowerSGD) takes each by itself, so the numbers are the same as in a model that keeps them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrices {
    /// The number of leading dims that number matrices: experts; queries, keys and values.
    pub stacked: usize,
    /// The number of dims behind the rows that number matrices, whose rows so lie next to each other: gate and up.
    pub interleaved: usize,
    /// The number of trailing dims that are columns: input features.
    pub columns: usize,
}

impl Matrices {
    /// Matrices that lie one behind the other, numbered by `stacked` leading dims.
    pub const fn new(stacked: usize, columns: usize) -> Self {
        Self { stacked, interleaved: 0, columns }
    }

    /// The same, with `interleaved` dims between rows and columns that number matrices too.
    pub const fn interleaved(self, interleaved: usize) -> Self {
        Self { interleaved, ..self }
    }

    /// The matrices of the biases `[stacked.., rows.., interleaved..]` of such weights: vectors.
    pub const fn of_bias(self) -> Self {
        Self { columns: 0, ..self }
    }

    /// The dims that number matrices, of `dims` dims.
    pub fn numbering(self, dims: usize) -> impl Iterator<Item = usize> + Clone {
        let columns = dims - self.columns.min(dims);
        (0..self.stacked).chain(columns - self.interleaved.min(columns)..columns)
    }
}

impl ParamGroup {
    /// The group of a role: only weights have weight decay, and buffers are frozen.
    pub const fn for_role(role: Role) -> Self {
        let weight_decay = if matches!(role, Role::Weight) { 1.0 } else { 0.0 };
        Self { learning_rate: 1.0, weight_decay, frozen: matches!(role, Role::Buffer), matrices: None }
    }

    /// The group of the weights of a hidden layer.
    ///
    /// ```
    /// use meshwork_tensor::param::{Matrices, ParamGroup};
    /// use meshwork_tensor::{Declarations, Init, Placement, Role};
    ///
    /// let mut params = Declarations::new();
    /// let mut shape = |name, dims: &[usize], matrices| {
    ///     let (whole, group) = (Placement::replicated(), ParamGroup::hidden(matrices));
    ///     let id = params.declare_in(name, dims, whole, Role::Weight, Init::Zeros, group)?;
    ///     Ok::<_, meshwork_tensor::Error>(params.spec(id).shape())
    /// };
    /// // Three matrices, one behind the other, each of as many rows as features.
    /// let qkv = shape("qkv", &[3, 4, 16, 64], Matrices::new(1, 1))?;
    /// assert_eq!((qkv.matrices, qkv.rows, qkv.columns), (3, 64, 64));
    /// // Two matrices, whose rows take turns.
    /// let gate_up = shape("gate_up", &[256, 2, 64], Matrices::new(0, 1).interleaved(1))?;
    /// assert_eq!((gate_up.matrices, gate_up.rows, gate_up.columns), (2, 256, 64));
    /// # Ok::<(), meshwork_tensor::Error>(())
    /// ```
    pub const fn hidden(matrices: Matrices) -> Self {
        Self { matrices: Some(matrices), ..Self::for_role(Role::Weight) }
    }

    /// The group of the biases of such weights.
    pub const fn bias(matrices: Matrices) -> Self {
        Self { matrices: Some(matrices.of_bias()), ..Self::for_role(Role::Bias) }
    }

    /// A parameter that training does not change.
    pub const FROZEN: Self = Self { learning_rate: 0.0, weight_decay: 0.0, frozen: true, matrices: None };
}

impl ParamSpec {
    /// The parameter as an update rule sees it. A weight that declares no matrices is one of as many columns as its
    /// last dim has elements.
    pub fn shape(&self) -> ParamShape {
        let dims = &self.dims;
        match (self.group.matrices, self.role) {
            (Some(matrices), role) => {
                let count = |dims: &[usize]| dims.iter().product();
                let (rest, columns) = dims.split_at(dims.len() - matrices.columns);
                let (rest, turns) = rest.split_at(rest.len() - matrices.interleaved);
                let (stacked, rows) = rest.split_at(matrices.stacked);
                let [stacked, rows, interleaved, columns] = [stacked, rows, turns, columns].map(count);
                let matrices = stacked * interleaved;
                // The dims of vectors that lie one behind the other are taken together.
                let [rows, columns] = match role {
                    Role::Weight => [rows, columns],
                    _ if interleaved == 1 => [1, rows * columns],
                    _ => [rows, columns],
                };
                let hidden = role == Role::Weight && rows > 1 && columns > 1;
                ParamShape { matrices, interleaved, rows, columns, hidden }
            }
            (None, Role::Weight) if dims.len() > 1 => {
                let (rows, columns) = dims.rows_columns(1);
                ParamShape { hidden: false, ..ParamShape::matrix(rows, columns) }
            }
            _ => ParamShape::vector(dims.count()),
        }
    }
}
