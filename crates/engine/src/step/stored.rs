//! The store of a rank: weights, gradients and optimizer states of this rank, in memory or offloaded.

use super::cut::Cut;
use super::driver::Driver;
use super::prediction::predict;
use super::prelude::*;
use crate::MixedPrecision;
use crate::gathers::Gathers;
use crate::gradients::Gradients;
use crate::layout::Layout;
use crate::offload::Offload;
use crate::offload::disk::Disk;
use crate::offload::parked::Parked;
use crate::offload::saved::Shelf;
use crate::reduction::Reduction;
use crate::state::{beside_parameters, of_parameters};
use crate::update::Updates;
use crate::weights::{NewStore, WeightStore};
use crate::zero::{Vector, ZeroGroups, ZeroStage};
use meshwork_data_parallel::Parking;

/// See the module docs.
pub(super) struct Store {
    pub weights: RefCell<WeightStore>,
    /// All-gathers weights that ZeRO-3 shards.
    pub gathers: Option<Arc<Gathers>>,
    /// Takes what backward needs out of memory until then.
    pub shelf: Option<Rc<Shelf>>,
    /// Where offloaded memory is.
    pub disk: Option<Rc<Disk>>,
    /// Every vector of the state that this rank holds.
    pub state: Rc<[StateVector]>,
}

impl Store {
    /// Allocates and initialises. Collective over the world.
    pub fn new(plan: &Plan, cut: &Cut, driver: &Driver, rank: &Arc<Rank>, device: &Arc<dyn Device>) -> Result<Self> {
        let disk = plan.offload.as_ref().map(|offload| Disk::open(offload, rank, device)).transpose()?;
        let offloads = |what: fn(&Offload) -> bool| disk.as_ref().filter(|_| plan.offload.as_ref().is_some_and(what));
        let (layout, zero) = (&cut.layout, ZeroGroups::new(rank, plan.zero)?);
        let gathers = || Gathers::new(plan, &cut.model, &cut.local, layout, &zero, device).map(Arc::new);
        let gathers = (plan.zero.stage == ZeroStage::Weights).then(gathers).transpose()?;
        let params = params(layout, gathers.clone(), plan.seed, device)?;
        let sums: Vec<_> = (0..layout.flats.len()).map(|flat| layout.sum_plan(plan, flat, driver.updates())).collect();
        let tapes = |stage| cut.schedule.micros_at(stage, rank.coords().get(Axis::Pp)) / driver.updates();
        let (tied, dtype) = (&cut.tied, MixedPrecision::reduced_in(plan.mixed));
        let reduction = Reduction { rank, layout, zero: &zero, tied, sums: &sums, tapes: &tapes, dtype, device };
        let parking = offloads(|of| of.gradients).map(|disk| Box::new(Parked::on(disk)) as Box<dyn Parking>);
        let gradients = Gradients::new(layout.clone(), reduction.reducer(parking)?, device.clone());
        let updater = Updates::join(&plan.optimizer, layout, &cut.parameters, rank, device.clone())?;
        let state = [of_parameters(plan, layout, &sums)?, beside_parameters(plan, &cut.crossings)].concat();
        let mut weights = WeightStore::new(NewStore {
            states: updater.states(offloads(|of| of.optimizer))?,
            lr: plan.lr,
            norm_shards: layout.norm_shards(&tied.weights),
            kept: driver.versions_kept(rank.coords().get(Axis::Pp)),
            layout: layout.clone(),
            device: device.clone(),
            params,
            gradients,
            updater,
            zero,
        });
        weights.set_masters(|id| layout.declarations.spec(id).initial(&layout.local(id), plan.seed))?;
        let shelf = offloads(|of| of.activations).map(|disk| Rc::new(Shelf::new(disk)));
        let store = Self { weights: RefCell::new(weights), gathers, shelf, disk, state: state.into() };
        store.reserve(plan, cut, rank)?;
        Ok(store)
    }

    /// Reserves room for offloaded memory: a disk that is too full is found now, and not in the middle of a step.
    fn reserve(&self, plan: &Plan, cut: &Cut, rank: &Rank) -> Result<()> {
        let Some(disk) = self.disk.as_ref().filter(|disk| disk.device().has_values()) else { return Ok(()) };
        disk.reserve(predict(cut.model.model(), plan, rank.world_rank())?.offloaded.room)
    }
}

/// The weights that this rank keeps, with their initial values.
fn params(layout: &Layout, gathers: Option<Arc<Gathers>>, seed: u64, device: &Arc<dyn Device>) -> Result<Params> {
    let (declarations, mesh) = (layout.declarations.clone(), &layout.mesh);
    let windows: Vec<_> = (0..layout.flats.len()).map(|flat| layout.window(flat, Vector::Weights)).collect();
    let coords = mesh.coords(layout.world_rank);
    let mut params = Params::in_windows(declarations, mesh, coords, device, &layout.flats, &windows, seed)?;
    if let Some(gathers) = gathers {
        params.gather_with(gathers);
    }
    Ok(params)
}
