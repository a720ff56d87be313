//! The types-only pass before step 1: runs this rank's stages on the meta device, and so finds on which axes each parameter's
//! gradient is Partial, and the order in which gradients become final.

use super::{Blueprint, RankModel, TrainError};
use meshwork_core::{DType, Rank, Types};
use meshwork_tensor::meta::Meta;
use meshwork_tensor::tape::{GradSink, Mode, Position, Share, Weights};
use meshwork_tensor::{Error, ParamId, Params, Tape, Tensor, Var};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What the pass found.
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
    /// The first of them that a stage fills, where it is not the first of all.
    pub first_copy: BTreeMap<(usize, ParamId), usize>,
}

#[derive(Debug, Default)]
struct Order {
    ready: Vec<ParamId>,
    /// Copies that the stage at hand fills.
    copies: BTreeMap<ParamId, usize>,
}

impl GradSink for Order {
    fn accumulate(&mut self, share: &Share, _grad: Tensor) -> Result<(), Error> {
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

/// Traces the stages of one rank, which computes micro-batches of `micro_batch` sequences.
pub fn trace(
    blueprint: &Blueprint,
    model: &RankModel,
    world_rank: usize,
    micro_batch: usize,
) -> Result<Trace, TrainError> {
    let rank = Arc::new(Rank::recording(blueprint.mesh(), world_rank)?);
    let device = Meta::device();
    let declarations = Arc::new(model.declarations.clone());
    let layout = [declarations.ids().collect::<Vec<_>>()];
    let params = Arc::new(Params::new(declarations.clone(), blueprint.mesh(), rank.coords(), &device, &layout, 0)?);
    let seq_len = blueprint.model().seq_len;
    let ids = Tensor::zeros(&device, DType::I32, [micro_batch, seq_len])?;

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
        let tokens = || tape.constant(ids.clone(), super::chunk::token_types(&rank));
        let boundary = stage.boundary(micro_batch, seq_len);
        let input: Var = match number {
            0 => tokens(),
            _ => tape.input(Tensor::zeros(&device, DType::F32, boundary.shape)?, boundary.types),
        };
        let mut output = stage.forward(&tape, &input)?;
        if number + 1 == blueprint.stages() {
            output = stage.loss(&output, &tokens())?;
        }
        let seed = Tensor::zeros(&device, output.tensor().dtype(), output.shape())?;
        tape.backward(&output, seed, Weights::Now, &mut order)?;
        for (id, copies) in std::mem::take(&mut order.copies) {
            let of_stage = &mut found.copies[id.index()];
            match (declarations.leaves(), *of_stage) {
                (_, 0) => *of_stage = copies,
                // In fast numerics stages add to each other's.
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
