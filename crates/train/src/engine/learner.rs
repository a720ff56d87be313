//! What learns on one rank: gradients on their way, the weights in every version that somebody still reads, and the optimizer that
//! makes the next one.

use super::{Counted, Gradients, TrainError};
use meshwork_core::{Buffer, DType};
use meshwork_optim::{LrSchedule, Rule, Update};
use meshwork_tensor::{Device, Error, ParamId, Params, Role};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

/// The optimizer's state vectors, per flat buffer.
type States = Vec<Vec<Buffer>>;

/// Weights, gradients and optimizer of one rank.
///
/// A version of the weights lives as long as somebody holds it: a tape, from the forward that reads it to its backward; this, while
/// forwards to come may ask for it, or while an update may still be taken back. Where nobody holds the newest version, it is
/// updated in place; else a copy of it is.
pub struct Learner {
    /// Where backward passes add their shares.
    pub gradients: Gradients,
    /// The newest last.
    versions: VecDeque<Arc<Params>>,
    /// Versions that forwards may ask for.
    kept: usize,
    /// Number of the newest version.
    updates: u64,
    states: Arc<States>,
    rule: Rule,
    lr: LrSchedule,
    /// What this rank counts in the gradient norm, and the sums of which that is made.
    counted: Vec<Counted>,
    norm_slots: usize,
    /// Weights and states before an update that may be taken back.
    before: Option<(Arc<Params>, Arc<States>)>,
    /// Squared norms of the updates that were made within a stream, by step.
    norms: BTreeMap<u64, (usize, Vec<f64>)>,
    /// Older versions that may be alive. Not the newest: it could not be written while it is watched.
    older: Vec<Weak<Params>>,
    most_versions: usize,
    device: Arc<dyn Device>,
}

/// What becomes of the version that an update starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Old {
    /// Nobody may read it any more.
    Replaced,
    /// Forwards, backwards or a later change of mind may need it.
    Kept,
}

impl Learner {
    /// Starts from `params`. Forwards may ask for the `kept` newest versions. `norm_slots` are the sums of which `counted` makes the
    /// squared norm.
    pub fn new(
        params: Params,
        gradients: Gradients,
        rule: Rule,
        lr: LrSchedule,
        (counted, norm_slots): (Vec<Counted>, usize),
        kept: usize,
        device: Arc<dyn Device>,
    ) -> Result<Self, TrainError> {
        let mut states = States::new();
        for flat in params.flats() {
            let zeros = rule.state_names().iter().map(|_| device.zeros(DType::F32, flat.count()));
            states.push(zeros.collect::<Result<Vec<_>, Error>>()?);
        }
        let params = Arc::new(params);
        Ok(Self {
            gradients,
            older: Vec::new(),
            most_versions: 1,
            versions: VecDeque::from([params]),
            kept: kept.max(1),
            updates: 0,
            states: Arc::new(states),
            rule,
            lr,
            counted,
            norm_slots,
            before: None,
            norms: BTreeMap::new(),
            device,
        })
    }

    /// The newest weights.
    pub fn params(&self) -> &Arc<Params> {
        self.versions.back().unwrap_or_else(|| unreachable!("there is always a newest version"))
    }

    /// The newest weights, to be written: nothing while somebody reads them.
    pub fn params_mut(&mut self) -> Option<&mut Params> {
        self.versions.back_mut().and_then(Arc::get_mut)
    }

    /// The version made by so many updates; nothing where no forward should ask for it any more.
    pub fn version(&self, updates: u64) -> Option<&Arc<Params>> {
        let behind = usize::try_from(self.updates.checked_sub(updates)?).ok()?;
        self.versions.get(self.versions.len().checked_sub(behind + 1)?)
    }

    /// Updates so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// The most versions that were alive at once.
    pub fn most_versions(&self) -> usize {
        self.most_versions
    }

    /// The optimizer's state vectors of a flat buffer.
    pub fn states(&self, flat: usize) -> &[Buffer] {
        &self.states[flat]
    }

    /// The learning rate of a step.
    pub fn lr(&self, step: u64) -> f64 {
        self.lr.lr(step)
    }

    /// The gradient of a parameter as it was reduced last.
    pub fn gradient(&self, id: ParamId) -> Result<Vec<f32>, TrainError> {
        let (flat, _) = self.params().place(id);
        let Some(all) = self.gradients.bucket(flat) else { return Ok(Vec::new()) };
        Ok(self.params().read_from(id, all)?)
    }

    /// This rank's share of the sums that make up the squared norm of the reduced gradients: each element of the model is counted
    /// by one rank.
    pub fn norms(&self) -> Result<Vec<f64>, TrainError> {
        let optim = self.device.optim()?;
        let mut sums = self.device.zeros(DType::F64, self.norm_slots)?;
        for Counted { flat, range, blocks, pitch, slot } in &self.counted {
            if let Some(all) = self.gradients.bucket(*flat) {
                optim.sum_of_squares(all, range.clone(), *blocks, *pitch, &mut sums, *slot)?;
            }
        }
        Ok(self.device.download(&sums)?.as_slice::<f64>().map_err(Error::from)?.to_vec())
    }

    /// Makes the next version from the reduced gradients, which are multiplied by `grad_scale`. Nobody may read the old one.
    pub fn update(&mut self, lr: f64, grad_scale: f32) -> Result<(), TrainError> {
        self.next_version(lr, grad_scale, Old::Replaced)
    }

    /// The same, until it is [confirmed](Self::confirm) or [taken back](Self::take_back): the old weights and states stay.
    pub fn update_tentatively(&mut self, lr: f64, grad_scale: f32) -> Result<(), TrainError> {
        self.before = Some((self.params().clone(), self.states.clone()));
        self.next_version(lr, grad_scale, Old::Kept)
    }

    /// Lets go of what a tentative update started from.
    pub fn confirm(&mut self) {
        self.before = None;
    }

    /// Undoes a tentative update, bit by bit. Who read the new weights must be gone.
    pub fn take_back(&mut self) {
        if let Some((params, states)) = self.before.take() {
            self.versions.clear();
            self.older.clear();
            self.versions.push_back(params);
            self.states = states;
            self.updates -= 1;
        }
    }

    /// Within a stream: reduces the gradients since the last update, makes the next version of them, and begins anew. `step` is
    /// that of the last micro-batch in it.
    pub fn update_within(&mut self, step: u64) -> Result<(), TrainError> {
        self.gradients.finish()?;
        let squares = self.norms()?;
        let (updates, sums) = self.norms.entry(step).or_insert_with(|| (0, vec![0.0; squares.len()]));
        *updates += 1;
        sums.iter_mut().zip(squares).for_each(|(sum, square)| *sum += square);
        self.next_version(self.lr(step), 1.0, Old::Kept)?;
        self.gradients.begin();
        Ok(())
    }

    /// The mean of the squared norms of a step's updates within a stream, as sums to be added up over the world.
    pub fn take_norms(&mut self, step: u64) -> Vec<f64> {
        let (updates, sums) = self.norms.remove(&step).unwrap_or_else(|| (1, vec![0.0; self.norm_slots]));
        sums.into_iter().map(|sum| sum / updates as f64).collect()
    }

    /// Weight decay goes by role: weights only.
    fn next_version(&mut self, lr: f64, grad_scale: f32, old: Old) -> Result<(), TrainError> {
        let newest = self.versions.back_mut().unwrap_or_else(|| unreachable!("there is always a newest version"));
        if Arc::get_mut(newest).is_none() || self.kept > 1 {
            if old == Old::Replaced {
                let problem = "weights are still being read at the end of the step";
                return Err(TrainError::Stage { stage: 0, micro: 0, problem });
            }
            // What nobody will ask for goes first, so that its memory serves again; the newest itself is copied before it goes.
            while self.versions.len() > 1 && self.versions.len() >= self.kept {
                self.versions.pop_front();
            }
            let copy = Arc::new(self.params().copy()?);
            self.older.push(Arc::downgrade(self.params()));
            self.versions.push_back(copy);
            self.older.retain(|version| version.strong_count() > 0);
            self.most_versions = self.most_versions.max(self.older.len() + 1);
            while self.versions.len() > self.kept {
                self.versions.pop_front();
            }
        }
        if Arc::get_mut(&mut self.states).is_none() {
            let copy = |flat: &Vec<Buffer>| flat.iter().map(|state| copied(&*self.device, state)).collect();
            self.states = Arc::new(self.states.iter().map(copy).collect::<Result<States, TrainError>>()?);
        }
        let newest = self.versions.back_mut().and_then(Arc::get_mut);
        let (Some(params), Some(states)) = (newest, Arc::get_mut(&mut self.states)) else {
            unreachable!("copied where they were shared")
        };
        self.updates += 1;
        let declarations = params.declarations().clone();
        let optim = self.device.optim()?;
        for id in declarations.ids() {
            let (flat, range) = params.place(id);
            let decay_factor = if declarations.spec(id).role == Role::Weight { 1.0 } else { 0.0 };
            let update = Update { step: self.updates, lr, grad_scale, decay_factor };
            if let Some(grads) = self.gradients.bucket(flat) {
                optim.update(&self.rule, update, &mut params.flats_mut()[flat], grads, &mut states[flat], range)?;
            }
        }
        Ok(())
    }
}

fn copied(device: &dyn Device, buffer: &Buffer) -> Result<Buffer, TrainError> {
    Ok(device.layout()?.copy(buffer)?)
}
