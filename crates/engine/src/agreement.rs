//! Facts that must be the same on all ranks of a trainer or decoder, with names, from one place: ranks compare them
//! before anything else, so that an error says which setting or parameter differs, and how.

use crate::prelude::*;
use meshwork_core::agreement::{Agreement, Fact};
use std::fmt::Debug;

const SAME_PLAN: &str = "give every rank the same Plan";
const SAME_MODEL: &str =
    "give every rank the same model: what differs between ranks is what the mesh cuts, and that is derived";

impl Plan {
    /// Every setting as a fact that must be the same on all ranks.
    #[must_use]
    pub fn agreement(&self) -> Agreement {
        let mut all = Agreement::default();
        let mut fact = |name: &str, value: &dyn Debug, valid| all.push(Fact::value(name, value, valid));
        // A new field does not compile until it is compared.
        let Self {
            mesh,
            schedule,
            partition,
            global_batch_size,
            num_microbatches,
            numerics,
            precision,
            mixed,
            recompute,
            saved,
            optimizer,
            lr,
            max_norm,
            seed,
            scatter_gather,
            zero,
            offload,
            compress,
            virtual_cuts,
            verify,
            samples,
        } = self;
        fact("the mesh (Plan::mesh)", &format_args!("{mesh}"), SAME_PLAN);
        let no_own = "give every rank the same Plan: initial weights and dropout follow from the seed and the place in the whole model and \
                      batch, so no rank needs a seed of its own";
        fact("the seed (Plan::seed)", seed, no_own);
        fact("the learning rate (Plan::lr)", lr, SAME_PLAN);
        fact("the norm at which gradients are clipped (Plan::max_norm)", max_norm, SAME_PLAN);
        fact("the update rule (Plan::optimizer)", optimizer, SAME_PLAN);
        fact("the samples of a step (Plan::global_batch_size)", global_batch_size, SAME_PLAN);
        fact("the number of micro-batches (Plan::num_microbatches)", num_microbatches, SAME_PLAN);
        fact("the layers of each stage (Plan::partition)", partition, SAME_PLAN);
        fact("the schedule (Plan::schedule)", schedule, SAME_PLAN);
        fact("the order of sums (Plan::numerics)", numerics, SAME_PLAN);
        fact("the type of products (Plan::precision)", precision, SAME_PLAN);
        fact("what is stored in 16 bits (Plan::mixed)", mixed, SAME_PLAN);
        fact("what is recomputed (Plan::recompute)", recompute, SAME_PLAN);
        fact("how activations are encoded (Plan::saved)", saved, SAME_PLAN);
        fact("whether activations are sent in parts (Plan::scatter_gather)", scatter_gather, SAME_PLAN);
        fact("what ranks share out (Plan::zero)", zero, SAME_PLAN);
        fact("what is offloaded (Plan::offload)", offload, SAME_PLAN);
        fact("what is compressed (Plan::compress)", compress, SAME_PLAN);
        fact("the virtual cuts (Plan::virtual_cuts)", virtual_cuts, SAME_PLAN);
        fact("the steps that are verified (Plan::verify)", verify, SAME_PLAN);
        fact("whether samples may repeat (Plan::samples)", samples, SAME_PLAN);
        all
    }
}

/// Refuses ranks whose plans differ. Collective over the world.
pub(crate) fn require_same_plan(plan: &Plan, rank: &Rank) -> Result<()> {
    Ok(plan.agreement().compare(rank.world())?)
}

/// Refuses ranks whose models differ, of which these are all `parameters`. Collective over the world.
pub(crate) fn require_same_model(plan: &ModelPlan, parameters: &[ParamSpec], rank: &Rank) -> Result<()> {
    let (mut all, model) = (Agreement::default(), plan.model());
    let mut fact = |name: &str, value: &dyn Debug| all.push(Fact::value(name, value, SAME_MODEL));
    fact("the number of layers", &model.num_layers());
    fact("the fields of a sample", &model.fields());
    fact("the metrics", &model.metrics());
    fact("the number of parameters", &parameters.len());
    for ParamSpec { name, dims, placement, role, init, group, packed } in parameters {
        fact(&format!("the shape of parameter {name}"), dims);
        fact(&format!("the placement of parameter {name}"), placement);
        fact(&format!("the role, initial values, update and form of parameter {name}"), &(role, init, group, packed));
    }
    Ok(all.compare(rank.world())?)
}
