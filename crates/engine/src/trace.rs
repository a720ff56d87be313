//! The types-only passes before step 1, on the meta device. One over this rank's stages finds on which axes each
//! parameter's gradient is Partial, and the order in which gradients become final. One over all stages finds names of
//! randomness that are used twice, and lists the operations that are
//! [held against the operations of one rank](crate::one_rank).

use crate::message::outgoing;
use crate::prelude::*;
use crate::program::{Listing, ListingOf, Program};
use crate::walk::Walk;
use crate::{LocalModel, Recompute, Segment, TiedWeight};
use meshwork_nn::Activation;
use meshwork_tensor::meta::Meta;
use meshwork_tensor::param::Gather;
use meshwork_tensor::tape::{GradShard, GradSink, Mode, Notes, Position, Seed, Weights};
use meshwork_tensor::{Declarations, Tape};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// The results of the pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Types with which each parameter is read: on axes where that is `Replicate` its gradient is `Partial`.
    pub reads: BTreeMap<ParamId, Types>,
    /// Per parameter: the stages of this rank that read it, once for each segment that does.
    pub readers: Vec<Vec<usize>>,
    /// Per parameter: the types of its gradient; `None` if nothing reads it.
    pub types: Vec<Option<Types>>,
    /// The parameters in the order in which their gradients become final.
    pub ready: Vec<ParamId>,
    /// Per parameter: the copies in which its gradient is kept until it is reduced.
    pub copies: Vec<usize>,
    /// The first copy that a segment fills, for segments where this is not copy 0.
    pub first_copy: BTreeMap<(usize, ParamId), usize>,
    /// The number of copies that each segment fills.
    filled: BTreeMap<(usize, ParamId), usize>,
}

#[derive(Debug, Default)]
struct Order {
    ready: Vec<ParamId>,
    types: BTreeMap<ParamId, Types>,
    /// Copies that the current stage fills.
    copies: BTreeMap<ParamId, usize>,
}

impl GradSink for Order {
    fn accumulate(&mut self, share: &GradShard, _grad: Tensor) -> Result<(), Error> {
        self.types.insert(share.id, share.types);
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

/// Runs stages forward without computing anything.
struct Forward<'a> {
    batch: &'a Batch,
    rank: Arc<Rank>,
    device: Arc<dyn Device>,
    params: Arc<Params>,
    activations: Vec<Activation>,
    recompute: Recompute,
    mode: Mode,
    /// The parameters that were read since they were last taken.
    read: Arc<Reads>,
    listing: Option<Arc<Listing>>,
}

/// Stands in for the memory of parameters, and notes which are read.
#[derive(Debug)]
struct Reads {
    device: Arc<dyn Device>,
    elements: Vec<usize>,
    read: Mutex<Vec<usize>>,
}

impl Gather for Reads {
    fn whole(&self, flat: usize, window: &Buffer) -> Result<Buffer, Error> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner).push(flat);
        self.device.alloc(window.dtype(), self.elements[flat])
    }

    fn is_shared(&self, _flat: usize) -> bool {
        true
    }
}

impl<'a> Forward<'a> {
    /// A pass that trains and recomputes nothing, on a device without values.
    fn new(
        plan: &ModelPlan,
        declarations: &Arc<Declarations>,
        world_rank: usize,
        batch: &'a Batch,
        device: Arc<dyn Device>,
    ) -> Result<Self> {
        let rank = Arc::new(Rank::recording(plan.mesh(), world_rank)?);
        let (mesh, coords, device) = (plan.mesh(), rank.coords(), plan.device(device));
        // Each parameter has a buffer of its own, of which this rank holds nothing, so that every read is noted.
        let layout: Vec<Vec<ParamId>> = declarations.ids().map(|id| vec![id]).collect();
        let nothing = vec![0..0; layout.len()];
        let elements = declarations.specs().iter().map(|spec| spec.local(mesh, coords).stored.count()).collect();
        let mut params = Params::in_windows(declarations.clone(), mesh, coords, &device, &layout, &nothing, 0)?;
        let read = Arc::new(Reads { device: device.clone(), elements, read: Mutex::default() });
        params.gather_with(read.clone());
        let (activations, params) = (plan.activations(batch)?, Arc::new(params));
        let (recompute, mode) = (Recompute::None, Mode::Train);
        Ok(Self { batch, rank, device, params, activations, recompute, mode, read, listing: None })
    }

    /// The parameters that were read since the last call.
    fn take_read(&self) -> Vec<ParamId> {
        let read = std::mem::take(&mut *self.read.read.lock().unwrap_or_else(PoisonError::into_inner));
        let ids: Vec<ParamId> = self.params.declarations().ids().collect();
        read.into_iter().map(|at| ids[at]).collect()
    }

    /// The outputs with which the backward of a stage begins, and their gradients.
    fn roots<'v>(&self, output: &'v Var, notes: &'v Notes) -> Result<Vec<(&'v Var, Seed)>, Error> {
        let auxiliary = notes.per_sample.iter().filter(|note| note.coefficient.is_some()).map(|note| &note.value);
        let seed = |value: &'v Var| {
            let zeros = Tensor::zeros(&self.device, value.tensor().dtype(), value.shape())?;
            Ok((value, Seed::typed(zeros, value.types().dual())))
        };
        std::iter::once(output).chain(auxiliary).map(seed).collect()
    }

    /// Runs the segments of a stage, and gives the tape of each and its output, of the last one the losses, to `then`.
    fn stage(
        &self,
        number: usize,
        segments: &[Segment],
        mut then: impl FnMut(&Segment, Tape, Var) -> Result<()>,
    ) -> Result<()> {
        let mut input = match number.checked_sub(1).map(|before| self.activations[before]) {
            None => None,
            Some(cut) => Some((Tensor::zeros(&self.device, cut.dtype, cut.shape)?, cut.types, true)),
        };
        let mut applied = 0;
        for (place, segment) in segments.iter().enumerate() {
            let Segment { spec, stage, .. } = segment;
            let (rank, params, device) = (self.rank.clone(), self.params.clone(), self.device.clone());
            let policy = self.recompute.policy();
            let tape = Tape::with_policy(rank, params, device, self.mode, Position::default(), policy);
            tape.count_from(applied);
            if let Some(listing) = &self.listing {
                tape.observe(Rc::new(ListingOf { listing: listing.clone(), stage: number }));
            }
            let input_here = input.map(|(tensor, types, takes_gradient)| match takes_gradient {
                true => tape.input(tensor, types),
                false => tape.input_without_gradient(tensor, types),
            });
            let mut output = stage.forward(&tape, self.batch, input_here.as_ref())?;
            if spec.part.last && self.mode == Mode::Train {
                output = stage.loss(&tape, self.batch, &output)?;
            }
            match self.activations.get(number) {
                Some(activation) if place + 1 == segments.len() => drop(outgoing(number, &output, activation)?),
                _ => output.require_unpadded("a cut between segments", "the activation")?,
            }
            applied = tape.applied();
            input = Some((output.tensor().clone(), output.types(), output.takes_gradient()));
            then(segment, tape, output)?;
        }
        Ok(())
    }
}

/// All stages of a model as one rank of a mesh runs them, up to the loss where it trains.
#[derive(Debug)]
pub struct Whole {
    pub declarations: Arc<Declarations>,
    /// The activation that crosses each cut.
    pub activations: Vec<Activation>,
    pub program: Program,
    /// The metrics and auxiliary losses that layers note, in order: their names, and the coefficients of the latter.
    pub noted: Vec<(&'static str, Option<f64>)>,
}

impl Whole {
    /// Runs `model`, all stages of `plan`, on a micro-batch like `batch`.
    ///
    /// # Errors
    /// Two operations that draw randomness under one name, on whichever stages they lie: on one stage the tape would
    /// refuse them, and cut apart they would draw the same numbers. A program that is wrongly distributed.
    pub fn new(
        plan: &ModelPlan,
        LocalModel { declarations, stages }: LocalModel,
        world_rank: usize,
        batch: &Batch,
        mode: Mode,
    ) -> Result<Self> {
        let listing = Arc::new(Listing::default());
        let forward = Forward::new(plan, &declarations, world_rank, batch, Meta::keeping_uploads())?;
        let forward = Forward { mode, listing: Some(listing.clone()), ..forward };
        let (mut drawn, mut noted) = (BTreeSet::new(), Vec::new());
        for (number, segments) in &stages {
            forward.stage(*number, segments, |_, tape, _| {
                noted.extend(tape.take_notes().per_sample.iter().map(|note| (note.name, note.coefficient)));
                match tape.random_names().into_iter().find(|name| !drawn.insert(name.clone())) {
                    Some(name) => Err(Error::RandomName { name }.into()),
                    None => Ok(()),
                }
            })?;
        }
        Ok(Self { declarations, program: listing.take(plan.mesh()), activations: forward.activations, noted })
    }
}

/// Whether the model takes a micro-batch like `batch`: one whose operations count their samples by a number of their
/// own takes no other.
pub fn takes(plan: &ModelPlan, world_rank: usize, batch: &Batch) -> bool {
    let run = || {
        let LocalModel { declarations, stages } = plan.whole_model()?;
        let forward = Forward::new(plan, &declarations, world_rank, batch, Meta::device())?;
        stages.iter().try_for_each(|(number, segments)| forward.stage(*number, segments, |_, _, _| Ok(())))
    };
    let ran: Result<()> = run();
    ran.is_ok()
}

/// The parameters that each segment of one rank reads in each walk, in order, on a micro-batch like `batch`.
pub fn uses(
    plan: &ModelPlan,
    model: &LocalModel,
    world_rank: usize,
    batch: &Batch,
    recompute: Recompute,
) -> Result<BTreeMap<(usize, Walk), Vec<ParamId>>> {
    let forward = Forward::new(plan, &model.declarations, world_rank, batch, Meta::device())?;
    let forward = Forward { recompute, ..forward };
    let mut all = BTreeMap::new();
    for (number, segments) in &model.stages {
        let mut sink = Order::default();
        for (weights, backward) in [(Weights::Now, Walk::Backward), (Weights::Deferred, Walk::Inputs)] {
            forward.stage(*number, segments, |segment, tape, output| {
                let mut reads = |walk| all.insert((segment.number, walk), forward.take_read());
                reads(Walk::Forward);
                let notes = tape.take_notes();
                tape.backward_from(forward.roots(&output, &notes)?, weights, &mut sink)?;
                reads(backward);
                if weights == Weights::Deferred {
                    tape.weight_gradients(&mut sink)?;
                    reads(Walk::Weights);
                }
                Ok(())
            })?;
        }
    }
    Ok(all)
}

/// Traces the stages of one rank on a micro-batch like `batch`.
pub fn trace(plan: &ModelPlan, model: &LocalModel, world_rank: usize, batch: &Batch) -> Result<Trace> {
    let declarations = &model.declarations;
    let forward = Forward::new(plan, declarations, world_rank, batch, Meta::device())?;
    let parameters = declarations.specs().len();
    let mut found = Trace {
        reads: BTreeMap::new(),
        readers: vec![Vec::new(); parameters],
        types: vec![None; parameters],
        ready: Vec::new(),
        copies: vec![0; parameters],
        first_copy: BTreeMap::new(),
        filled: BTreeMap::new(),
    };
    let mut order = Order::default();
    let mut tapes = Vec::new();
    for (number, segments) in &model.stages {
        forward.stage(*number, segments, |segment, tape, output| {
            tapes.push((*number, segment.number, tape, output));
            Ok(())
        })?;
    }
    // Later segments go backward first.
    for (stage, segment, tape, output) in tapes.into_iter().rev() {
        let notes = tape.take_notes();
        let roots = forward.roots(&output, &notes)?;
        tape.backward_from(roots, Weights::Now, &mut order)?;
        for (id, copies) in std::mem::take(&mut order.copies) {
            found.filled.insert((segment, id), copies);
            let of_all = &mut found.copies[id.index()];
            match (declarations.reduction_blocks(), *of_all) {
                (_, 0) => *of_all = copies,
                // In fast numerics all segments add to the same copy.
                (None, _) => {}
                (Some(_), before) => {
                    found.first_copy.insert((segment, id), before);
                    *of_all += copies;
                }
            }
        }
        for (id, types) in tape.reads() {
            found.readers[id.index()].push(stage);
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
    order.types.into_iter().for_each(|(id, types)| found.types[id.index()] = Some(types));
    found.copies.iter_mut().for_each(|copies| *copies = (*copies).max(1));
    Ok(found)
}

impl Trace {
    /// In canonical numerics, numbers the copies of tied weights over the stages of all ranks, later stages first, as
    /// one rank does. Two uses on two ranks need no copies: the order of two summands does not matter.
    pub fn number_tied_copies(
        &mut self,
        plan: &ModelPlan,
        model: &LocalModel,
        schedule: &Schedule,
        tied: &[TiedWeight],
        world_rank: usize,
        batch: &Batch,
    ) -> Result<()> {
        if model.declarations.reduction_blocks().is_none() || tied.is_empty() {
            return Ok(());
        }
        let (mesh, coords) = (plan.mesh(), plan.mesh().coords(world_rank));
        // By name: the copies that each segment of the whole model fills.
        let mut filled: BTreeMap<String, BTreeMap<usize, usize>> = BTreeMap::new();
        for pp_rank in 0..mesh.degree(Axis::Pp) {
            let (there, found);
            let (model, found) = match pp_rank == coords.get(Axis::Pp) {
                true => (model, &*self),
                false => {
                    there = plan.local_model(schedule, pp_rank)?;
                    found = trace(plan, &there, mesh.rank_at(coords.with(Axis::Pp, pp_rank)), batch)?;
                    (&there, &found)
                }
            };
            for (&(segment, id), &copies) in &found.filled {
                let name = model.declarations.spec(id).name.clone();
                filled.entry(name).or_default().insert(segment, copies);
            }
        }
        for TiedWeight { name, .. } in tied {
            let (Some(id), Some(segments)) = (model.declarations.find(name), filled.get(name)) else { continue };
            let copies: usize = segments.values().sum();
            if copies == 2 && segments.len() == 2 {
                continue;
            }
            self.copies[id.index()] = copies;
            let mut before = 0;
            for (&segment, &copies) in segments.iter().rev() {
                self.first_copy.insert((segment, id), before);
                before += copies;
            }
        }
        Ok(())
    }
}
