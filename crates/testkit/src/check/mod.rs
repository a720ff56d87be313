//! Whole checks of an operation or a layer: its SPMD rule and its gradient, over all types and 1 to 4 ranks.
//!
//! [`check_op`] finds by itself which types an operation accepts, and tries each of them. [`check_layer`] tries a layer
//! that has parameters with the types that it is given.

mod array;
mod layer;
mod op;
mod report;
mod run;

pub use layer::{LayerInput, check_layer};
pub use op::{OpInput, check_op};
pub use report::{CheckError, Difference, Problem, Report, WrongCase};

/// The numbers of ranks that are tried.
const DEGREES: [usize; 4] = [1, 2, 3, 4];

/// The largest difference between two runs in f64 that add up in another order, in units of one plus the norm.
const TOLERANCE_F64: f64 = 1e-10;

/// The same in f32, in which parameters are.
const TOLERANCE_F32: f64 = 1e-5;
