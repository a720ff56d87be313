//! One table of what a rank holds of each parameter: gradient, weights and states of the update rule, by name and
//! slice. Verification, comparisons of runs and the accessors of single vectors read it.

use super::prelude::*;
use crate::Vector;
use crate::state_vector::{StateKey, Storage};
use meshwork_tensor::param::{LocalSlice, host_floats};

/// A vector of a parameter, as far as a rank holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldVector {
    /// Its name: the name that a checkpoint has for it, and `gradient` for the gradient.
    pub key: StateKey,
    /// The vector of flat buffers that it is a part of; `None` for a state of rows, columns or other sets of elements,
    /// which every rank that holds some of the parameter keeps whole.
    pub vector: Option<Vector>,
    /// The slices that the rank holds, in the order of their elements. None of the gradient of a frozen parameter.
    pub slices: Vec<LocalSlice>,
    storage: Storage,
}

impl Trainer {
    /// The vectors of a parameter that this rank holds: its gradient, its weights, and the states of the update rule.
    /// [`values`](Self::values) reads one.
    pub fn held(&self, id: ParamId) -> Vec<HeldVector> {
        let layout = &self.cut.layout;
        let (parameter, trained) = (&layout.declarations.spec(id).name, layout.is_trained(id));
        let name = |state: Option<&str>| StateKey { parameter: parameter.clone(), state: state.map(str::to_owned) };
        let gradient = (name(Some("gradient")), Storage::Gradient(id), Some(Vector::Gradients).filter(|_| trained));
        let weights = (name(None), Storage::Weights(id), Some(Vector::Weights));
        let held = |(key, storage, vector): (_, Storage, Option<Vector>)| {
            let slices = vector.map_or(Vec::new(), |vector| self.slices(id, vector));
            HeldVector { key, vector: storage.vector(), slices, storage }
        };
        let of_rule = self.store.state.iter().filter(|vector| match vector.storage {
            Storage::Elements(of, _) | Storage::Sets(of, _) => of == id,
            _ => false,
        });
        let of_rule = of_rule.map(|StateVector { key, storage, slices, .. }| {
            let slices = slices.iter().map(|(slice, _)| slice.clone()).collect();
            HeldVector { key: key.clone(), vector: storage.vector(), slices, storage: *storage }
        });
        [gradient, weights].map(held).into_iter().chain(of_rule).collect()
    }

    /// The elements of a vector, slice by slice. A gradient is as of the last update: summed over its batch and all
    /// ranks, before clipping; empty where its update has taken the memory.
    pub fn values(&self, held: &HeldVector) -> Result<Vec<f32>> {
        let count = held.slices.iter().map(|slice| slice.stored.count()).sum();
        let host = self.store.weights.borrow().read(held.storage, 0..count)?;
        let mut values = host_floats(&host)?;
        if held.vector == Some(Vector::Gradients) {
            let scale = self.reduced_scale;
            values.iter_mut().for_each(|element| *element = (f64::from(*element) / scale) as f32);
        }
        Ok(values)
    }

    /// The slices of a parameter that this rank keeps of a vector, in the order of its [`values`](Self::values): one,
    /// what the placement says, unless ZeRO cuts the vector.
    pub fn slices(&self, id: ParamId, vector: Vector) -> Vec<LocalSlice> {
        self.cut.layout.slices(id, vector).into_iter().map(|(slice, _)| slice).collect()
    }

    /// The gradient of a parameter, as [`values`](Self::values) has it. Empty for a frozen one.
    pub fn gradient(&self, id: ParamId) -> Result<Vec<f32>> {
        Ok(self.values_of(id, Some(Vector::Gradients))?.concat())
    }

    /// The optimizer's states of the elements of a parameter, as far as this rank keeps them.
    pub fn optimizer_states(&self, id: ParamId) -> Result<Vec<Vec<f32>>> {
        self.values_of(id, Some(Vector::States))
    }

    fn values_of(&self, id: ParamId, vector: Option<Vector>) -> Result<Vec<Vec<f32>>> {
        self.held(id).iter().filter(|held| held.vector == vector).map(|held| self.values(held)).collect()
    }
}
