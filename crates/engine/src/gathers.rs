//! ZeRO-3: a rank has a slice of the weights, and gathers the weights of a layer just before the layer reads them,
//! forward and backward. Which parameters a stage reads in which order is recorded before the first step, in a pass
//! without data; so the next ones are on their way while a layer computes, and all ranks gather in one order.

use crate::LocalModel;
use crate::compress::settings::NOTHING;
use crate::compress::weight_messages::{Now, WeightMessages};
use crate::layout::Layout;
use crate::prelude::*;
use crate::reduction::OnDevice;
use crate::trace::uses;
use crate::walk::Walk;
use crate::zero::ZeroGroups;
use meshwork_data_parallel::{GatherError, GatherPass, Gatherer};
use meshwork_tensor::param::Gather;

/// Gathers the weights of the stages of one rank.
#[derive(Debug)]
pub struct Gathers {
    pub gatherer: Gatherer,
    /// The flat buffers that a segment uses in a walk, in order.
    orders: BTreeMap<(usize, Walk), Vec<usize>>,
    /// The compression of slices in this step: on or off, and for which weights.
    pub now: Arc<Now>,
}

impl Gathers {
    /// Records the order in which the stages of `local` use parameters.
    ///
    /// # Errors
    /// A program that is wrongly distributed.
    pub fn new(
        plan: &Plan,
        model: &ModelPlan,
        local: &LocalModel,
        layout: &Layout,
        zero: &ZeroGroups,
        device: &Arc<dyn Device>,
    ) -> Result<Self> {
        let micro = Batch::blank(&model.model().fields(), plan.micro_batch_size()?);
        let is_cut = |flat: &usize| layout.is_cut(*flat);
        let order = |ids: Vec<ParamId>| {
            let mut order: Vec<usize> = ids.into_iter().map(|id| layout.span(id).flat).filter(is_cut).collect();
            order.dedup();
            order
        };
        let uses = uses(model, local, layout.world_rank, &micro, plan.recompute)?;
        let sharers = |flat: usize| layout.sharers(zero, flat).filter(|_| layout.is_cut(flat)).cloned();
        let (category, dtype) = (Category::Buffers, layout.declarations.dtype());
        let vectors = OnDevice { device: device.clone(), category, dtype };
        let mut gatherer = Gatherer::new((0..layout.flats.len()).map(sharers).collect(), vectors);
        let now = Arc::new(Now::default());
        if plan.compress.weights != NOTHING {
            gatherer = gatherer.with_messages(WeightMessages::new(plan, layout, device, now.clone())?);
        }
        Ok(Self { gatherer, orders: uses.into_iter().map(|(walk, ids)| (walk, order(ids))).collect(), now })
    }

    /// Begins walks of segments with these weights, one after the other.
    pub fn begin(&self, walks: &[(usize, Walk)], params: &Params) -> GatherPass<'_> {
        self.now.set_updates(params.updates());
        let order = walks.iter().filter_map(|walk| self.orders.get(walk)).flatten();
        self.gatherer.begin(&order.copied().collect::<Vec<_>>(), params.flats())
    }
}

impl Gather for Gathers {
    fn whole(&self, flat: usize, window: &Buffer) -> Result<Buffer, Error> {
        self.gatherer.whole(flat, window).map_err(|error| match error {
            GatherError::Comm { source, .. } => Error::Comm(source),
            other => Error::Backward(other.to_string()),
        })
    }

    fn is_shared(&self, flat: usize) -> bool {
        self.gatherer.is_shared(flat)
    }
}
