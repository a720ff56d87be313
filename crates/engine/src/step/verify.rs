//! The steps that are verified, and their claims about parameters.

use super::loads::Loads;
use super::prelude::*;
use crate::{Samples, Vector};
use meshwork_core::agreement::{self, Agreement, Disagreement, Fact, Must};
use meshwork_core::hash::hash;
use meshwork_data_parallel::cuts_batch;
use meshwork_tensor::param::StatisticId;
use meshwork_tensor::verify::{Claims, Over, StatePart};

impl Trainer {
    /// Begins to note claims, if this step is verified. In the first step of a trainer, whatever is verified, and in
    /// those that are, ranks compare their samples. Collective over the world.
    ///
    /// # Errors
    /// Two data-parallel ranks with the same samples.
    pub(super) fn begin_claims(&mut self, batch: &Batch) -> Result<()> {
        let verified = self.plan.verify.includes(self.steps_of_trainer);
        let several = self.device.has_values() && self.rank.world().size() > 1;
        if several && (verified || self.steps_of_trainer == 0) && self.plan.samples == Samples::Distinct {
            self.require_distinct(batch)?;
        }
        self.steps_of_trainer += 1;
        self.claims = (verified && several).then(|| Claims::new(self.rank.clone(), self.steps_begun + 1));
        Ok(())
    }

    /// Refuses a batch that two data-parallel ranks have.
    fn require_distinct(&self, batch: &Batch) -> Result<()> {
        let (model, fields) = (self.cut.model.model(), self.cut.model.model().fields());
        // Samples that count nothing are padding, and samples without fields are all alike.
        let hash = match model.loss_terms(batch, 0..batch.samples())? {
            0 => 0,
            _ if fields.is_empty() => 0,
            _ => batch.hash_of_samples(&fields)?,
        };
        let valid = "give each data-parallel rank its Trainer::samples() of the global batch; if samples repeat on purpose, set Plan::samples to \
                     Samples::MayRepeat";
        let mut facts = Agreement::default();
        facts.push(Fact::hash("the samples of a step should differ", Must::Differ, hash, valid));
        let found = facts.find(self.rank.data_group())?;
        match agreement::first(self.rank.world(), found)? {
            None => Ok(()),
            Some(of) => Err(TrainError::Disagreement { step: self.steps_begun + 1, of: Box::new(of) }),
        }
    }

    /// Compares the claims of this step with the claims of the other ranks, before weights are updated. Collective over
    /// the world.
    ///
    /// # Errors
    /// The first claim that does not hold.
    pub(super) fn verify_claims(&mut self, statistics: &StatisticSums) -> Result<()> {
        let Some(values) = self.claims.take() else { return Ok(()) };
        // Weights first: where they have drifted apart, so have values and gradients, on other ranks too.
        let weights = Claims::new(self.rank.clone(), self.steps_begun + 1);
        self.claim_parameters(&weights, &values, statistics)?;
        self.loads = Loads::default();
        self.compare_claims([weights, values])
    }

    /// Compares the replicas of weights and optimizer states over all ranks, by hash: what a broken memory or a wrong
    /// update leaves behind, at the cost of one pass over them. Collective, between steps.
    ///
    /// # Errors
    /// The first parameter whose replicas differ, and the ranks that differ from most; [`TrainError::Claim`].
    pub fn check_replicas(&self) -> Result<(), TrainError> {
        let _entered = self.enter("check_replicas");
        if self.rank.world().size() == 1 || !self.device.has_values() {
            return Ok(());
        }
        let claims = || Claims::new(self.rank.clone(), self.steps_begun);
        let (weights, gradients) = (claims(), claims());
        self.claim_parameters(&weights, &gradients, &StatisticSums::new())?;
        self.compare_claims([weights])
    }

    /// Compares claims with the claims of the other ranks, in this order. Collective over the world.
    ///
    /// # Errors
    /// The first claim that does not hold.
    pub(super) fn compare_claims(&self, all: impl IntoIterator<Item = Claims>) -> Result<()> {
        let tied = self.cut.tied.groups.iter().filter(|(_, group)| group.size() > 1);
        let tied: Vec<(String, &Group)> = tied.map(|(pp_ranks, group)| (tied_name(pp_ranks), group)).collect();
        for claims in all {
            claims.compare_with(&tied).map_err(|error| match error {
                Error::Claim { step, claim } => {
                    let Disagreement { claim, over, found, valid, .. } = *claim;
                    TrainError::Claim { step, claim: format!("{claim} {over}"), broken: found, valid }
                }
                other => other.into(),
            })?;
        }
        Ok(())
    }

    /// Refuses a count of terms that depends on how samples are put together, and so on the mesh.
    pub(super) fn require_additive(&self, samples: Range<usize>, terms: u64, alone: u64) -> Result<()> {
        if terms == alone {
            return Ok(());
        }
        Err(TrainError::Claim {
            step: self.steps_begun + 1,
            claim: format!("the loss of samples {samples:?} of this rank has {terms} terms"),
            broken: format!("those of the samples one by one add up to {alone}"),
            valid: "count in Model::loss_terms the terms of each sample, whatever samples there are beside it"
                .to_owned(),
        })
    }

    /// Claims that the replicas of weights and optimizer states are the same, and the replicas of gradients and of the
    /// sums that update buffers; and that the same was loaded of a parameter wherever some of it is.
    pub(super) fn claim_parameters(
        &self,
        weights: &Claims,
        gradients: &Claims,
        statistics: &StatisticSums,
    ) -> Result<()> {
        let params = self.params();
        let mesh = self.rank.mesh();
        // Stages declare what they share in orders of their own: claims are compared in the order of the names.
        let mut ids: Vec<ParamId> = params.declarations().ids().collect();
        ids.sort_by_key(|&id| &params.declarations().spec(id).name);
        for id in ids {
            let spec = params.declarations().spec(id);
            let tied = self.cut.tied.find(&spec.name);
            let whole: Vec<Over> = weights
                .uncut(spec)
                .into_iter()
                .chain(tied.map(|tied| Over::Group(tied_name(&tied.pp_ranks))))
                .collect();
            // Vectors that are shared out differ on the ranks that cut the batch.
            let over = |vector: Vector| -> Vec<Over> {
                let layout = &self.cut.layout;
                let cut = layout.cuts.cuts(vector) && layout.is_cut(layout.span(id).flat);
                let shared = |over: &&Over| cut && matches!(over, Over::Axis(axis) if cuts_batch(*axis));
                whole.iter().filter(|over| !shared(over)).cloned().collect()
            };
            let everywhere = || {
                let axes = mesh.value_axes().filter(|&axis| mesh.degree(axis) > 1).map(Over::Axis);
                axes.chain(whole.iter().filter(|over| matches!(over, Over::Group(_))).cloned())
            };
            for held in self.held(id) {
                // Asynchronous schedules have gradients of the next update under way.
                let (claims, part) = match held.vector {
                    Some(Vector::Gradients) if self.pipeline.driver.asynchronous => continue,
                    Some(Vector::Gradients) => (gradients, StatePart::Gradient),
                    Some(Vector::Weights) => (weights, StatePart::Weights),
                    Some(Vector::States) | None => (weights, StatePart::States),
                };
                // A state of sets is whole on every rank, whatever cuts the parameter.
                let over = held.vector.map_or_else(|| everywhere().collect(), over);
                if !over.is_empty() {
                    claims.parameter(&over, part, &spec.name, of_floats(self.values(&held)?)?);
                }
            }
            let updates = |of: &StatisticId| params.declarations().statistics()[of.index()].buffers.contains(&id);
            for (_, sums) in statistics.iter().filter(|(of, _)| updates(of)) {
                gradients.parameter(&whole, StatePart::Statistics, &spec.name, of_doubles(sums));
            }
            for over in everywhere() {
                let claim = format!("what was loaded of {} should be the same", spec.name);
                let valid = "load the same on every rank that holds a part of it";
                weights.fact(over, Fact::hash(claim, Must::Agree, self.loads.hash_of(&spec.name), valid));
            }
        }
        Ok(())
    }
}

/// The pp ranks that share a weight, as messages name them.
fn tied_name(pp_ranks: &[usize]) -> String {
    format!("the pp ranks {pp_ranks:?}, which share it")
}

/// The hash of some elements of a parameter.
pub(super) fn of_floats(values: Vec<f32>) -> Result<u64, Error> {
    Ok(hash(Buffer::from_vec(values).as_bytes()?))
}

/// The hash of the sums of a statistic.
fn of_doubles(values: &[f64]) -> u64 {
    values.iter().map(|value| value.to_bits()).fold(values.len() as u64, combine)
}
