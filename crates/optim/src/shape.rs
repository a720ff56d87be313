//! A parameter as an update rule sees it, and what a rule keeps and measures of it.

/// The extents of a parameter: a stack of matrices, each `[rows, columns]`, row-major. What is no matrix is one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ParamShape {
    /// Matrices: 1, or one for each expert, or one each for queries, keys and values.
    pub matrices: usize,
    /// Rows of each: output features.
    pub rows: usize,
    /// Columns of each: input features.
    pub columns: usize,
    /// Whether these are matrices of a hidden layer: no table, head, bias or norm.
    pub hidden: bool,
}

impl ParamShape {
    /// A parameter that is no matrix.
    #[must_use]
    pub const fn vector(elements: usize) -> Self {
        Self { matrices: 1, rows: 1, columns: elements, hidden: false }
    }

    /// Number of elements.
    #[must_use]
    pub const fn elements(&self) -> usize {
        self.matrices * self.rows * self.columns
    }

    /// Whether there are several rows and columns.
    #[must_use]
    pub const fn is_matrix(&self) -> bool {
        self.rows > 1 && self.columns > 1
    }
}

/// A division of the elements of a parameter into sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Over {
    /// One set of all elements.
    Parameter,
    /// A set for each row of each matrix.
    Rows,
    /// A set for each column of each matrix.
    Columns,
    /// A set for each so many consecutive elements, the last one shorter.
    Blocks(usize),
}

impl Over {
    /// The number of sets, as `[matrices, sets of each]` for rows and columns.
    #[must_use]
    pub fn extents(self, shape: &ParamShape) -> [usize; 2] {
        match self {
            Self::Parameter => [1, 1],
            Self::Rows => [shape.matrices, shape.rows],
            Self::Columns => [shape.matrices, shape.columns],
            Self::Blocks(length) => [1, shape.elements().div_ceil(length.max(1))],
        }
    }

    /// The number of sets.
    #[must_use]
    pub fn count(self, shape: &ParamShape) -> usize {
        self.extents(shape).iter().product()
    }
}

/// A state vector of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct State {
    /// Its name, for messages and checkpoints: `exp_avg`.
    pub name: &'static str,
    /// What it has a number for.
    pub kept: Kept,
}

/// What a state vector has a number for. All are zero before the first step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kept {
    /// Each element, in f32: ranks keep the elements that they update.
    Elements,
    /// Each element, in a byte.
    Codes,
    /// Each set, in f32. These are few: every rank that holds some of the parameter keeps all of them.
    Sets(Over),
}

impl State {
    /// A number for each element.
    #[must_use]
    pub const fn of_elements(name: &'static str) -> Self {
        Self { name, kept: Kept::Elements }
    }

    /// A byte for each element.
    #[must_use]
    pub const fn of_codes(name: &'static str) -> Self {
        Self { name, kept: Kept::Codes }
    }

    /// A number for each set.
    #[must_use]
    pub const fn of_sets(name: &'static str, over: Over) -> Self {
        Self { name, kept: Kept::Sets(over) }
    }
}

/// What a rule has measured over whole parameters before it goes on. Ranks that hold parts of a parameter bring their measures together, for
/// all parameters at once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Pass {
    /// For each of these the sum of the squares of a number per element, over each set.
    Squares(Vec<Over>),
    /// For each of these the largest absolute value of a number per element, over each set.
    Largest(Vec<Over>),
}

impl Pass {
    /// What is measured.
    #[must_use]
    pub fn over(&self) -> &[Over] {
        match self {
            Self::Squares(over) | Self::Largest(over) => over,
        }
    }
}
