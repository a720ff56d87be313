//! ZeRO-3: a rank has a slice of the weights, and gathers what a layer reads just before it does, forward and backward.
//! Which parameters a stage reads in which order is recorded before the first step, in a pass without data; so the next
//! ones are on their way while a layer computes, and all ranks gather in one order.

use crate::compress::settings::NOTHING;
use crate::compress::weight_messages::{Now, WeightMessages};
use crate::layout::{Layout, OnDevice};
use crate::trace::{Uses, uses};
use crate::walk::Walk;
use crate::zero::Shared;
use crate::{LocalModel, ModelPlan, Plan, TrainError};
use meshwork_core::Buffer;
use meshwork_data_parallel::{GatherError, GatherEvent, GatherPass, Gatherer, SharedVector};
use meshwork_nn::Batch;
use meshwork_tensor::param::Gather;
use meshwork_tensor::{Category, Device, Error, Params};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Gathers the weights of the stages of one rank.
#[derive(Debug)]
pub struct Gathers {
    gatherer: Gatherer,
    /// The flat buffers that a segment uses in a walk, in order.
    orders: BTreeMap<(usize, Walk), Vec<usize>>,
    /// The compression of slices in this step: on or off, and for which weights.
    now: Arc<Now>,
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
        (layout, shared): (&Layout, &[Shared]),
        world_rank: usize,
        device: &Arc<dyn Device>,
    ) -> Result<Self, TrainError> {
        let micro = Batch::blank(&model.model().fields(), plan.micro_batch_size()?);
        let mut orders = BTreeMap::new();
        for (segment, Uses(walks)) in uses(model, local, world_rank, &micro, plan.recompute)? {
            for (walk, ids) in walks {
                // Frozen parameters are whole.
                let flats = ids.into_iter().map(|id| layout.place(id).0).filter(|&flat| flat < layout.keys.len());
                let mut order: Vec<usize> = flats.filter(|&flat| shared[flat].is_cut()).collect();
                order.dedup();
                orders.insert((segment, walk), order);
            }
        }
        let vector = |shared: &Shared| {
            let sharers = shared.sharers.clone().filter(|_| shared.is_cut())?;
            Some(SharedVector { slice: shared.slice, sharers })
        };
        let mut gatherer = Gatherer::new(
            shared.iter().map(vector).collect(),
            OnDevice(device.clone(), Category::Buffers, local.declarations.dtype()),
        );
        let now = Arc::new(Now::default());
        if plan.compress.weights != NOTHING {
            let declarations = &local.declarations;
            let messages = WeightMessages::new(plan, declarations, layout, shared, world_rank, device, now.clone())?;
            gatherer = gatherer.with_messages(messages);
        }
        Ok(Self { gatherer, orders, now })
    }

    /// Begins walks of segments with these weights, one after the other.
    pub fn begin(&self, walks: &[(usize, Walk)], params: &Params) -> GatherPass<'_> {
        self.now.set_updates(params.updates());
        let order = walks.iter().filter_map(|walk| self.orders.get(walk)).flatten();
        self.gatherer.begin(&order.copied().collect::<Vec<_>>(), params.flats())
    }

    /// Sets whether slices are compressed from now on, where the plan compresses any.
    pub fn set_compresses(&self, compresses: bool) {
        self.now.set_compresses(compresses);
    }

    /// Begins the timeline of a step.
    pub fn begin_step(&self) {
        self.gatherer.clear_events();
    }

    /// The timeline of the last step.
    pub fn events(&self) -> Vec<(Instant, GatherEvent)> {
        self.gatherer.events()
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
