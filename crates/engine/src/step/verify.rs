//! When a step is verified, and what it claims about parameters.

use super::{Driver, Trainer};
use crate::statistics::StatisticSums;
use crate::verify::{Claims, Over, of_doubles, of_floats};
use crate::{TrainError, Vector};
use meshwork_core::Axis;
use meshwork_data_parallel::cuts_batch;
use meshwork_tensor::ParamId;
use meshwork_tensor::param::StatisticId;
use std::ops::Range;
use std::sync::Arc;

impl Trainer {
    /// Begins to note claims, if this step is verified.
    pub(super) fn begin_claims(&mut self) {
        let verified = self.verify.includes(self.steps_of_trainer) && self.device.has_values();
        self.steps_of_trainer += 1;
        self.claims = (verified && self.rank.world().size() > 1).then(Arc::default);
    }

    /// Compares the claims of this step with those of the other ranks, before weights are updated. Collective over each axis.
    ///
    /// # Errors
    /// The first claim that does not hold.
    pub(super) fn verify_claims(&mut self, statistics: &StatisticSums) -> Result<(), TrainError> {
        let Some(values) = self.claims.take() else { return Ok(()) };
        // Weights first: where they have drifted apart, so have values and gradients, on other ranks too.
        let weights = Claims::default();
        self.claim_parameters(&weights, &values, statistics)?;
        // The exchange is no part of the step.
        let records = self.rank.log().drain();
        let step = self.steps_begun + 1;
        for claims in [&weights, &*values] {
            for axis in self.rank.mesh().value_axes().filter(|&axis| self.rank.mesh().degree(axis) > 1) {
                claims.compare(self.rank.group(axis), &Over::Axis(axis), step)?;
            }
            for (pp_ranks, group) in self.tied_groups.iter().filter(|(_, group)| group.size() > 1) {
                claims.compare(group, &Over::Tied(pp_ranks.clone()), step)?;
            }
        }
        self.rank.log().drain();
        records.into_iter().for_each(|record| self.rank.log().push(record));
        Ok(())
    }

    /// Refuses a count of terms that depends on how samples are put together, and so on the mesh.
    pub(super) fn require_additive(&self, samples: Range<usize>, terms: u64, alone: u64) -> Result<(), TrainError> {
        if terms == alone {
            return Ok(());
        }
        Err(TrainError::Claim {
            step: self.steps_begun + 1,
            claim: format!("the loss of samples {samples:?} of this rank has {terms} terms"),
            broken: format!("those of the samples one by one add up to {alone}"),
            valid: "count in Model::loss_terms the terms of each sample, whatever samples there are beside it",
        })
    }

    /// Claims that the replicas of weights and optimizer states are the same, and those of gradients and of the sums that update buffers.
    fn claim_parameters(
        &self,
        weights: &Claims,
        gradients: &Claims,
        statistics: &StatisticSums,
    ) -> Result<(), TrainError> {
        let params = self.params();
        let mesh = self.rank.mesh();
        // Stages declare what they share in orders of their own: claims are compared in the order of the names.
        let mut ids: Vec<ParamId> = params.declarations().ids().collect();
        ids.sort_by_key(|&id| &params.declarations().spec(id).name);
        for id in ids {
            let spec = params.declarations().spec(id);
            let uncut =
                |&axis: &Axis| mesh.degree(axis) > 1 && spec.placement.shards().iter().all(|(cut, _)| *cut != axis);
            let tied = self.tied.iter().find(|tied| tied.name == spec.name);
            let tied: Vec<Over> = tied.map(|tied| Over::Tied(tied.pp_ranks.clone())).into_iter().collect();
            // What ranks share out is not the same on those that cut the batch.
            let over = |vector: Vector| -> Vec<Over> {
                let cut = self.is_cut(id, vector);
                let same = mesh.value_axes().filter(uncut).filter(|&axis| !(cut && cuts_batch(axis)));
                same.map(Over::Axis).chain(tied.iter().cloned()).collect()
            };
            let sets = self.set_states(id)?.concat();
            if over(Vector::Weights).is_empty() && over(Vector::Gradients).is_empty() && sets.is_empty() {
                continue;
            }
            let states = of_floats(self.optimizer_states(id)?.concat())?;
            let mut parts = vec![
                (over(Vector::Weights), weights, "weights", of_floats(params.read(id)?)?),
                (over(Vector::States), weights, "optimizer states", states),
            ];
            if !sets.is_empty() {
                // Whole on every rank, whatever cuts the parameter.
                let all = mesh.value_axes().filter(|&axis| mesh.degree(axis) > 1).map(Over::Axis);
                parts.push((all.chain(tied.iter().cloned()).collect(), weights, "optimizer states", of_floats(sets)?));
            }
            // Asynchronous schedules have gradients of the next update under way.
            if let Driver::Synchronous(_) = self.driver {
                parts.push((over(Vector::Gradients), gradients, "gradient", of_floats(self.gradient(id)?)?));
            }
            let updates = |of: &StatisticId| params.declarations().statistics()[of.index()].buffers.contains(&id);
            let sums = statistics.iter().filter(|(of, _)| updates(of)).map(|(_, sums)| of_doubles(sums));
            let whole = mesh.value_axes().filter(uncut).map(Over::Axis).chain(tied.iter().cloned()).collect::<Vec<_>>();
            parts.extend(sums.map(|hash| (whole.clone(), gradients, "statistics", hash)));
            for (over, claims, part, hash) in &parts {
                over.iter().for_each(|over| claims.parameter(over, part, &spec.name, *hash));
            }
        }
        Ok(())
    }
}
