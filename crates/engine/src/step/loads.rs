//! Weights and states that come from outside. A load is no collective: nothing compares the values given to one rank
//! with the values of others. So the first step after a load is verified, whatever the plan says but
//! [`Off`](crate::Verify::Off): a rank that loaded says so in the numbers that every step sums over the world, and
//! before the update all ranks then compare weights, optimizer states, and the values that were loaded for each
//! parameter. Slices of a parameter differ between ranks anyway: only the loaded values show that one rank alone was
//! given a new slice.

use super::prelude::*;
use crate::Verify;
use meshwork_tensor::verify::Claims;

/// The loads since ranks last compared them. Only the last load of something counts: ranks that could not read a
/// checkpoint all took an older one, however far each of them had come with the newer.
#[derive(Debug, Default)]
pub(super) struct Loads {
    /// The hash of the values loaded for single parameters, by name.
    parameters: BTreeMap<String, u64>,
    /// Whether all weights were loaded, and the hash of the load of a whole state.
    weights: bool,
    state: u64,
    /// Whether the others are still to be told.
    untold: bool,
    /// The step in which a rank has told of a load that is still to be compared.
    pub(super) told: Option<u64>,
}

impl Loads {
    /// Notes a load of one parameter.
    pub(super) fn note(&mut self, name: &str, hash: u64) {
        self.untold = true;
        self.parameters.insert(name.to_owned(), hash);
    }

    /// Notes a load of all weights.
    pub(super) fn note_weights(&mut self) {
        *self = Self { untold: true, weights: true, state: self.state, told: self.told, ..Self::default() };
    }

    /// Notes a load of a whole state.
    pub(super) fn note_state(&mut self, hash: u64) {
        *self = Self { untold: true, state: hash, told: self.told, ..Self::default() };
    }

    /// The hash of all that was loaded of a parameter.
    pub(super) fn hash_of(&self, name: &str) -> u64 {
        combine(combine(self.state, u64::from(self.weights)), self.parameters.get(name).copied().unwrap_or(0))
    }
}

impl Trainer {
    /// Says in the numbers of a step, at [`loads_at`](Self::loads_at), whether this rank has loaded something since the
    /// step before.
    pub(super) fn tell_loads(&mut self, numbers: &mut Buffer) -> Result<()> {
        let several = self.rank.world().size() > 1 && self.device.has_values();
        if std::mem::take(&mut self.loads.untold) && several && self.plan.verify != Verify::Off {
            self.device.upload_into(&Buffer::from_vec(vec![1.0f64]), numbers, self.loads_at())?;
        }
        Ok(())
    }

    /// Compares weights, states and loads over all ranks, if a rank has told of a load. Collective,
    /// and so for a place in the step where no rank waits for a message of another one: behind all actions of a step,
    /// or between steps.
    ///
    /// # Errors
    /// The first claim that does not hold.
    pub(super) fn verify_told(&mut self) -> Result<()> {
        let Some(step) = self.loads.told.take() else { return Ok(()) };
        let claims = || Claims::new(self.rank.clone(), step);
        let (weights, gradients) = (claims(), claims());
        self.claim_parameters(&weights, &gradients, &StatisticSums::new())?;
        self.compare_claims([weights])?;
        self.loads = Loads::default();
        Ok(())
    }
}
