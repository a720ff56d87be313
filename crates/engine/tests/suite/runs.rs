//! A model that every rank of a plan trains, and the state that all of them then hold: the runs of the other tests.

use meshwork_core::{Rank, World};
use meshwork_cpu::Cpu;
use meshwork_engine::{Plan, StateKey, StepReport, TrainError, Trainer, WholeState};
use meshwork_nn::{Batch, Model};
use meshwork_tensor::Device;
use meshwork_testkit::opaque::{self, Opaque};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

pub type Vectors = BTreeMap<StateKey, Vec<f32>>;

/// What `body` gives on every rank, and the whole state after it. `hidden`: on a device whose memory the host cannot
/// read, as that of a GPU.
pub fn on_ranks<T: Send>(
    model: &Arc<dyn Model>,
    plan: &Plan,
    hidden: bool,
    body: impl Fn(&mut Trainer) -> Result<T, TrainError> + Sync,
) -> (Vec<T>, WholeState) {
    let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let cpu: Arc<dyn Device> = Arc::new(Cpu::new(plan.precision));
        let (rank, device) = match hidden {
            true => {
                let world = opaque::communicator(Arc::clone(rank.world().communicator()));
                (Arc::new(Rank::new(rank.mesh(), world)?), Opaque::device(cpu))
            }
            false => (rank, cpu),
        };
        let mut trainer = Trainer::new(model.clone(), plan, rank, device)?;
        let found = body(&mut trainer)?;
        Ok::<_, TrainError>((found, trainer.state()?))
    });
    let ranks = ranks.unwrap_or_else(|error| panic!("{}: {error}", plan.mesh));
    let (found, states): (_, Vec<_>) = ranks.into_iter().unzip();
    (found, WholeState::merge(&states).unwrap())
}

/// The reports of some steps, which overlap where the schedule lets them.
pub fn overlapped(
    trainer: &mut Trainer,
    steps: Range<usize>,
    batch: impl Fn(usize, Range<usize>) -> Batch,
) -> Result<Vec<StepReport>, TrainError> {
    let mut reports = Vec::new();
    for step in steps {
        reports.extend(trainer.start_step(&batch(step, trainer.samples()), || false, |_| {})?);
    }
    reports.extend(trainer.flush(|_| {})?);
    Ok(reports)
}

/// The losses of some steps of a run, which may go on from a state, and the state after them.
pub fn losses_from(
    model: &Arc<dyn Model>,
    plan: &Plan,
    from: Option<&WholeState>,
    steps: Range<usize>,
    batch: impl Fn(usize, Range<usize>) -> Batch + Sync,
) -> (Vec<f64>, WholeState) {
    let (mut losses, state) = on_ranks(model, plan, false, |trainer| {
        from.map(|state| trainer.load_state(state)).transpose()?;
        steps.clone().map(|step| Ok(trainer.step(&batch(step, trainer.samples()))?.loss)).collect()
    });
    (losses.swap_remove(0), state)
}

/// All vectors of a state.
pub fn vectors(state: &WholeState) -> Vectors {
    state.keys().map(|key| (key.clone(), state.vector(key).unwrap().to_vec())).collect()
}
