//! The partition of a run over the mesh: the model into stages, their parameters into flat buffers and slices, the
//! batch into micro-batches.

use super::prelude::*;
use crate::agreement::require_same_model;
use crate::compress::crossing::{Crossing, Staged, crossings};
use crate::compress::matrices;
use crate::fit::require_synchronous;
use crate::layout::Layout;
use crate::model_plan::Tied;
use crate::{LocalModel, one_rank, update};
use meshwork_tensor::tape::Mode;

/// See the module docs.
pub(super) struct Cut {
    pub model: ModelPlan,
    pub schedule: Schedule,
    /// Every parameter of the whole model.
    pub parameters: Vec<ParamSpec>,
    pub tied: Tied,
    /// The stages of this rank, until they run as chunks.
    pub local: LocalModel,
    pub layout: Layout,
    /// The compressed values of a step that this rank sends or receives.
    pub crossings: Vec<Crossing>,
    /// Micro-batches of a step on this rank.
    pub micros: usize,
    /// Samples of each.
    pub micro_batch: usize,
}

impl Cut {
    /// Cuts a model. Collective over the world.
    pub fn new(model: Arc<dyn Model>, plan: &Plan, rank: &Rank) -> Result<Self> {
        let (micros, micro_batch) = (plan.num_microbatches()?, plan.micro_batch_size()?);
        let schedule = plan.build_schedule()?;
        let model = ModelPlan::new(model, plan)?;
        let parameters = model.parameters()?;
        require_same_model(&model, &parameters, rank)?;
        require_synchronous(plan, &schedule, &model)?;
        let tied = Tied::join(rank, model.tied_weights(&schedule)?)?;
        let micro = Batch::blank(&model.model().fields(), micro_batch);
        one_rank::compare(&model, rank.world_rank(), &micro, Mode::Train, plan.verify)?;
        let local = model.local_model(&schedule, rank.coords().get(Axis::Pp))?;
        let layout = Layout::new(plan, &model, &local, &schedule, &tied.weights, rank.world_rank())?;
        update::require_matrices(&plan.optimizer, &parameters)?;
        matrices::require_matrices(&plan.compress, &parameters)?;
        let crossings = crossings(Staged { plan, model: &model, schedule: &schedule }, rank.coords())?;
        Ok(Self { model, schedule, parameters, tied, local, layout, crossings, micros, micro_batch })
    }
}
