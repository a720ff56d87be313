//! The types-only pass before step 1: runs this rank's stages on the meta device, and so finds on which axes each parameter's
//! gradient is Partial, and the order in which gradients become final.

use crate::{LocalModel, ModelPlan, TrainError};
use meshwork_core::{Rank, Types};
use meshwork_nn::Batch;
use meshwork_tensor::meta::Meta;
use meshwork_tensor::tape::{GradShard, GradSink, Mode, Position, Seed, Weights};
use meshwork_tensor::{Error, ParamId, Params, Tape, Tensor, Var};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The results of the pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Types with which each parameter is read: on axes where that is `Replicate` its gradient is `Partial`.
    pub reads: BTreeMap<ParamId, Types>,
    /// Per parameter: the stages of this rank that read it.
    pub readers: Vec<Vec<usize>>,
    /// The parameters in the order in which their gradients become final.
    pub ready: Vec<ParamId>,
    /// Per parameter: the copies in which its gradient is kept until it is reduced.
    pub copies: Vec<usize>,
    /// The first of them that a stage fills, for stages where this is not copy 0.
    pub first_copy: BTreeMap<(usize, ParamId), usize>,
}

#[derive(Debug, Default)]
struct Order {
    ready: Vec<ParamId>,
    /// Copies that the current stage fills.
    copies: BTreeMap<ParamId, usize>,
}

impl GradSink for Order {
    fn accumulate(&mut self, share: &GradShard, _grad: Tensor) -> Result<(), Error> {
        self.copies.insert(share.id, share.of);
        Ok(())
    }

    fn ready(&mut self, id: ParamId) -> Result<(), Error> {
        // A later tape may read it again: the last time counts.
        self.ready.retain(|&other| other != id);
        self.ready.push(id);
        Ok(())
    }
}

/// Traces the stages of one rank on a micro-batch like `batch`.
pub fn trace(plan: &ModelPlan, model: &LocalModel, world_rank: usize, batch: &Batch) -> Result<Trace, TrainError> {
    let rank = Arc::new(Rank::recording(plan.mesh(), world_rank)?);
    let device = Meta::device();
    let declarations = Arc::new(model.declarations.clone());
    let layout = [declarations.ids().collect::<Vec<_>>()];
    let params = Arc::new(Params::new(declarations.clone(), plan.mesh(), rank.coords(), &device, &layout, 0)?);
    let activations = plan.activations(batch)?;

    let parameters = declarations.specs().len();
    let mut found = Trace {
        reads: BTreeMap::new(),
        readers: vec![Vec::new(); parameters],
        ready: Vec::new(),
        copies: vec![0; parameters],
        first_copy: BTreeMap::new(),
    };
    let mut order = Order::default();
    // Later stages go backward first.
    for (number, stage) in model.stages.iter().rev() {
        let tape = Tape::new(rank.clone(), params.clone(), device.clone(), Mode::Train, Position::default());
        let input = match number.checked_sub(1).map(|before| activations[before]) {
            None => None,
            Some(cut) => Some(tape.input(Tensor::zeros(&device, cut.dtype, cut.shape)?, cut.types)),
        };
        let mut output = stage.forward(&tape, batch, input.as_ref())?;
        if number + 1 == plan.stages().len() {
            output = stage.loss(&tape, batch, &output)?;
        }
        let notes = tape.take_notes();
        let seed = |value: &Var| {
            let zeros = Tensor::zeros(&device, value.tensor().dtype(), value.shape())?;
            Ok::<_, Error>(Seed::typed(zeros, value.types().dual()))
        };
        let mut roots = vec![(&output, seed(&output)?)];
        for note in notes.per_sample.iter().filter(|note| note.coefficient.is_some()) {
            roots.push((&note.value, seed(&note.value)?));
        }
        tape.backward_from(roots, Weights::Now, &mut order)?;
        for (id, copies) in std::mem::take(&mut order.copies) {
            let of_stage = &mut found.copies[id.index()];
            match (declarations.reduction_blocks(), *of_stage) {
                (_, 0) => *of_stage = copies,
                // In fast numerics all stages add to the same copy.
                (None, _) => {}
                (Some(_), before) => {
                    found.first_copy.insert((*number, id), before);
                    *of_stage += copies;
                }
            }
        }
        for (id, types) in tape.reads() {
            found.readers[id.index()].push(*number);
            let first = *found.reads.entry(id).or_insert(types);
            if first != types {
                return Err(Error::ReadBothWays {
                    name: declarations.spec(id).name.clone(),
                    first: first.to_string(),
                    second: types.to_string(),
                }
                .into());
            }
        }
    }
    found.ready = order.ready;
    found.copies.iter_mut().for_each(|copies| *copies = (*copies).max(1));
    Ok(found)
}
