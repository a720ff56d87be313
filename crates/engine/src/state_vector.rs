//! The vectors of the state of a run: their names, which slices of them a rank holds, and where these are stored. One
//! table of them says what a checkpoint contains, and serves saving and loading.

use crate::message::Site;
use crate::prelude::*;
use crate::zero::Vector;
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Role, Shape};
use std::fmt;

/// Names one vector of the state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateKey {
    /// The parameter.
    pub parameter: String,
    /// The optimizer state that goes with it, by the name that the update rule gives it; `None` for the weights
    /// themselves.
    pub state: Option<String>,
}

impl StateKey {
    /// The state of this name that goes with a parameter or another value.
    pub(crate) fn new(value: &str, state: &str) -> Self {
        Self { parameter: value.to_owned(), state: Some(state.to_owned()) }
    }
}

impl fmt::Display for StateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            None => f.write_str(&self.parameter),
            Some(state) => write!(f, "{} ({state})", self.parameter),
        }
    }
}

/// The owner of a vector of the state, and whether a run needs it to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// A parameter of this role, or a state of the optimizer that goes with it.
    Parameter(Role),
    /// Follows from earlier steps and belongs to no parameter: what compression lost, for feedback; the loss scale. A
    /// run may begin without it.
    Feedback,
    /// Error feedback of gradients: each data-parallel replica holds a residual of its own, and dim 0 counts the
    /// replicas. Training depends on the sum of the residuals alone, so a run resumes with another number of replicas.
    PerReplica,
}

/// One vector of the state, as one rank holds it.
#[derive(Clone, Debug)]
pub(crate) struct StateVector {
    pub key: StateKey,
    pub kind: StateKind,
    pub dims: Shape,
    /// The type in which its elements are saved.
    pub dtype: DType,
    pub storage: Storage,
    /// The slices that the rank holds, with their elements in the storage.
    pub slices: Vec<(LocalSlice, Range<usize>)>,
}

impl StateVector {
    pub fn whole(key: StateKey, kind: StateKind, dims: Shape, storage: Storage) -> Self {
        let slices = vec![(LocalSlice::whole(dims), 0..dims.count())];
        Self { key, kind, dims, dtype: DType::F32, storage, slices }
    }
}

/// Where a rank stores a vector of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    Weights(ParamId),
    /// The weights in f32 that the optimizer updates, of a parameter in 16 bits.
    Masters(ParamId),
    /// The reduced gradient of a parameter: no part of the state that is saved.
    Gradient(ParamId),
    /// A state of the elements of a parameter, by its number.
    Elements(ParamId, usize),
    /// A state of rows, columns or other sets of the elements of a parameter, by its number.
    Sets(ParamId, usize),
    /// The loss scale, and the steps without overflow since it was changed.
    LossScale,
    /// A state that the compressed sums of a bucket of gradients keep.
    Sums {
        bucket: usize,
        name: &'static str,
    },
    /// A state of the feedback of a value that crosses a cut.
    Feedback {
        site: Site,
        name: &'static str,
    },
    /// The activations of samples that AQ-SGD keeps at a cut, sample by sample.
    Samples {
        cut: usize,
    },
    /// 1 for each sample that has crossed a cut, else 0.
    Seen {
        cut: usize,
    },
}

impl Storage {
    /// The vector of a flat buffer that it is part of; `None` if the rank has it whole.
    pub fn vector(self) -> Option<Vector> {
        match self {
            Self::Weights(_) => Some(Vector::Weights),
            Self::Gradient(_) => Some(Vector::Gradients),
            Self::Masters(_) | Self::Elements(..) => Some(Vector::States),
            _ => None,
        }
    }
}
