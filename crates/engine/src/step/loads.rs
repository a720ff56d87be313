//! Weights and states that come from outside. A load is no collective: nothing holds what one rank was given against what others have. So
//! the first step after a load is verified, whatever the plan says but [`Off`](crate::Verify::Off): a rank that loaded says so in the numbers
//! that every step sums over the world, and before the update all ranks then compare weights, optimizer states, and what was loaded of each
//! parameter. The last tells of a parameter that is cut, of which no rank has what another has: one rank alone with a new slice.

use super::Trainer;
use crate::statistics::StatisticSums;
use crate::{TrainError, Verify};
use meshwork_core::Buffer;
use meshwork_core::hash::{combine, hash};
use meshwork_tensor::verify::Claims;
use std::collections::BTreeMap;

/// What was loaded since ranks last compared it.
#[derive(Debug, Default)]
pub(super) struct Loads {
    /// The hash of what was loaded of single parameters, by name.
    of: BTreeMap<String, u64>,
    /// The hash of the loads of all parameters.
    of_all: u64,
    /// Whether the others are still to be told.
    untold: bool,
}

impl Loads {
    /// Notes a load of one parameter, or of all.
    pub(super) fn note(&mut self, name: Option<&str>, hash: u64) {
        self.untold = true;
        let of = match name {
            Some(name) => self.of.entry(name.to_owned()).or_default(),
            None => &mut self.of_all,
        };
        *of = combine(*of, hash);
    }

    /// The hash of all that was loaded of a parameter.
    pub(super) fn of(&self, name: &str) -> u64 {
        combine(self.of_all, self.of.get(name).copied().unwrap_or(0))
    }

    /// Forgets what ranks have compared.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

impl Trainer {
    /// Says in the numbers of a step, at [`loads_at`](Self::loads_at), whether this rank has loaded something since the step before.
    pub(super) fn tell_loads(&mut self, numbers: &mut Buffer) -> Result<(), TrainError> {
        let several = self.rank.world().size() > 1 && self.device.has_values();
        if std::mem::take(&mut self.loads.untold) && several && self.verify != Verify::Off {
            self.device.upload_into(&Buffer::from_vec(vec![1.0f64]), numbers, self.loads_at())?;
        }
        Ok(())
    }

    /// Compares weights, states and loads with those of the other ranks, if one of them has said that it loaded something. Collective.
    ///
    /// # Errors
    /// The first claim that does not hold.
    pub(super) fn verify_loads(&mut self, step: u64, told: bool) -> Result<(), TrainError> {
        if told {
            let claims = || Claims::new(self.rank.clone(), step);
            let (weights, gradients) = (claims(), claims());
            self.claim_parameters(&weights, &gradients, &StatisticSums::new())?;
            self.compare_claims([weights])?;
            self.loads.forget();
        }
        Ok(())
    }
}

/// The hash of a whole parameter.
pub(super) fn of_values(values: &[f32]) -> u64 {
    Buffer::from_slice(values).as_bytes().map_or(0, hash)
}
