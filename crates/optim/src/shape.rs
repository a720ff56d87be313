//! A parameter as an update rule sees it, and the states and measures of a rule.

use std::ops::Range;

/// The extents of a parameter: matrices, each `[rows, columns]`, row-major. A vector is one row.
///
/// A parameter may hold several projections: queries, keys and values; gate and up; the projections of each expert.
/// Each is a matrix (or a vector) of its own to every rule, as if it were a parameter by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ParamShape {
    /// Matrices: 1, or one for each projection of each expert.
    pub matrices: usize,
    /// Matrices whose rows take turns in memory, as gate's and up's do; 1 where each lies behind the one before.
    /// Rules do not see this: [`Run::first`](crate::Run::first) counts elements matrix by matrix.
    pub interleaved: usize,
    /// Rows of each: output features.
    pub rows: usize,
    /// Columns of each: input features.
    pub columns: usize,
    /// Whether these are matrices of a hidden layer: no table, head, bias or norm.
    pub hidden: bool,
}

impl ParamShape {
    /// One vector.
    #[must_use]
    pub const fn vector(elements: usize) -> Self {
        Self { matrices: 1, interleaved: 1, rows: 1, columns: elements, hidden: false }
    }

    /// One matrix of a hidden layer.
    #[must_use]
    pub const fn matrix(rows: usize, columns: usize) -> Self {
        Self { matrices: 1, interleaved: 1, rows, columns, hidden: true }
    }

    /// Number of elements.
    #[must_use]
    pub const fn elements(&self) -> usize {
        self.matrices * self.each()
    }

    /// Number of elements of each matrix.
    #[must_use]
    pub const fn each(&self) -> usize {
        self.rows * self.columns
    }

    /// Whether there are several rows and columns.
    #[must_use]
    pub const fn is_matrix(&self) -> bool {
        self.rows > 1 && self.columns > 1
    }

    /// The number, counted matrix by matrix, of the element that is number `stored` in memory.
    ///
    /// ```
    /// use meshwork_optim::ParamShape;
    ///
    /// // Gate and up [2, 3], stored as gate row 0, up row 0, gate row 1, up row 1.
    /// let gate_up = ParamShape { matrices: 2, interleaved: 2, ..ParamShape::matrix(2, 3) };
    /// assert_eq!([0, 3, 6, 10].map(|stored| gate_up.counted(stored)), [0, 6, 3, 10]);
    /// ```
    #[must_use]
    pub const fn counted(&self, stored: usize) -> usize {
        let (line, column) = (stored / self.columns, stored % self.columns);
        let (of_turn, turn) = (line / self.interleaved, line % self.interleaved);
        let (stack, row) = (of_turn / self.rows, of_turn % self.rows);
        ((stack * self.interleaved + turn) * self.rows + row) * self.columns + column
    }
}

/// A division of the elements of each matrix of a parameter into sets. No set has elements of two matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Over {
    /// A set for each matrix.
    Matrix,
    /// A set for each row of each matrix.
    Rows,
    /// A set for each column of each matrix.
    Columns,
    /// A set for each so many consecutive elements of each matrix, its last one shorter.
    Blocks(usize),
}

/// Consecutive elements that are in one set, or in one each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetPart {
    /// The elements, counted from the first of those that were asked for.
    pub range: Range<usize>,
    /// The set of the first of them.
    pub set: usize,
    /// Whether each element is in the next set; otherwise all are in one set.
    pub each: bool,
}

impl Over {
    /// The number of sets, as `[matrices, sets of each]`.
    #[must_use]
    pub fn extents(self, shape: &ParamShape) -> [usize; 2] {
        let each = match self {
            Self::Matrix => 1,
            Self::Rows => shape.rows,
            Self::Columns => shape.columns,
            Self::Blocks(length) => shape.each().div_ceil(length.max(1)),
        };
        [shape.matrices, each]
    }

    /// The number of sets.
    #[must_use]
    pub fn count(self, shape: &ParamShape) -> usize {
        self.extents(shape).iter().product()
    }

    /// The sets of `count` elements from `first` on, counted matrix by matrix.
    ///
    /// ```
    /// use meshwork_optim::{Over, ParamShape};
    ///
    /// let two = ParamShape { matrices: 2, ..ParamShape::matrix(2, 3) };
    /// let sets = |over: Over| over.sets(&two, 4, 5).map(|part| (part.range, part.set)).collect::<Vec<_>>();
    /// assert_eq!(sets(Over::Matrix), [(0..2, 0), (2..5, 1)]);
    /// assert_eq!(sets(Over::Rows), [(0..2, 1), (2..5, 2)]);
    /// assert_eq!(sets(Over::Columns), [(0..2, 1), (2..5, 3)]); // each in a set of its own
    /// assert_eq!(sets(Over::Blocks(4)), [(0..2, 1), (2..5, 2)]);
    /// ```
    pub fn sets(self, shape: &ParamShape, first: usize, count: usize) -> impl Iterator<Item = SetPart> + use<> {
        let (shape, mut at) = (*shape, 0);
        std::iter::from_fn(move || {
            if at >= count {
                return None;
            }
            let (matrix, element) = ((first + at) / shape.each(), (first + at) % shape.each());
            let (length, set) = match self {
                Self::Matrix => (shape.each(), 0),
                Self::Rows => (shape.columns, element / shape.columns),
                Self::Columns => (shape.columns, element % shape.columns),
                Self::Blocks(length) => (length.max(1), element / length.max(1)),
            };
            let held = (length - element % length).min(shape.each() - element).min(count - at);
            let [_, each] = self.extents(&shape);
            at += held;
            Some(SetPart { range: at - held..at, set: matrix * each + set, each: self == Self::Columns })
        })
    }
}

/// A state vector of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct State {
    /// Its name, for messages and checkpoints: `exp_avg`.
    pub name: &'static str,
    /// The things that it has a number for.
    pub kept: Kept,
}

/// The things that a state vector has a number for. All are zero before the first step.
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

/// A measure over whole matrices, which a rule needs before it goes on. Ranks that hold parts of a parameter bring
/// their measures together, for all parameters at once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Pass {
    /// For each of these the sum of the squares of a number per element, over each set.
    Squares(Vec<Over>),
    /// For each of these the largest absolute value of a number per element, over each set.
    Largest(Vec<Over>),
}

impl Pass {
    /// The measure.
    #[must_use]
    pub fn over(&self) -> &[Over] {
        match self {
            Self::Squares(over) | Self::Largest(over) => over,
        }
    }
}
