//! The vectors of the state of a run, by name: those of each parameter, and the loss scale.

use crate::zero::Vector;
use meshwork_core::DType;
use meshwork_optim::{Kept, Rule, State};
use meshwork_tensor::{ParamSpec, Shape};
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

impl fmt::Display for StateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            None => f.write_str(&self.parameter),
            Some(state) => write!(f, "{} ({state})", self.parameter),
        }
    }
}

/// A vector of a parameter in the state of a run.
#[derive(Clone, Debug)]
pub(crate) struct StateVector {
    pub key: StateKey,
    /// Extents of the whole vector.
    pub dims: Shape,
    pub dtype: DType,
    pub place: Place,
}

/// Where a vector of a parameter lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Weights,
    /// The weights in f32 that the optimizer updates, of parameters in 16 bits.
    Masters,
    /// The number of a state of elements.
    Elements(usize),
    /// The number of a state of sets.
    Sets(usize),
}

impl Place {
    /// The vector whose slices ranks have; `None` for what each of them has whole.
    pub fn vector(self) -> Option<Vector> {
        match self {
            Self::Weights => Some(Vector::Weights),
            Self::Masters | Self::Elements(_) => Some(Vector::States),
            Self::Sets(_) => None,
        }
    }
}

/// Where the state of a run has the loss scale, and the steps without overflow since it was changed.
pub(crate) fn loss_scale() -> (StateKey, Shape) {
    (StateKey { parameter: "loss_scale".to_owned(), state: Some("dynamic".to_owned()) }, Shape::new(&[2]))
}

/// The vectors of a parameter in the state of a run: its weights, then the states of the update rule.
/// With `mixed` precision weights are those in f32 that the optimizer updates.
pub(crate) fn vectors(spec: &ParamSpec, rule: &Rule, mixed: bool) -> Vec<StateVector> {
    let key = |state: Option<&str>| StateKey { parameter: spec.name.clone(), state: state.map(str::to_owned) };
    let place = if mixed && !spec.group.frozen { Place::Masters } else { Place::Weights };
    let mut vectors = vec![StateVector { key: key(None), dims: spec.dims, dtype: DType::F32, place }];
    if spec.group.frozen {
        return vectors;
    }
    let (shape, mut elements, mut sets) = (spec.shape(), 0.., 0..);
    for State { name, kept } in rule.states(&shape) {
        let (dims, place) = match kept {
            Kept::Elements | Kept::Codes => (spec.dims, elements.next().map(Place::Elements)),
            Kept::Sets(over) => (Shape::new(&over.extents(&shape)), sets.next().map(Place::Sets)),
        };
        let dtype = if kept == Kept::Codes { DType::U8 } else { DType::F32 };
        vectors.extend(place.map(|place| StateVector { key: key(Some(name)), dims, dtype, place }));
    }
    vectors
}
