//! The programs that a user writes without a trainer: a loop on tapes with an update of its own, and the passes of a
//! decoder.

use crate::interpret::{Net, misfit, tokens};
use crate::mutate::{Careless, Change};
use crate::run::{Given, STEPS};
use meshwork_core::{Rank, Ty};
use meshwork_cpu::Cpu;
use meshwork_engine::{Decoder, Samples, StateKey, StatePiece, TrainError, TrainState, Verify, one_rank};
use meshwork_nn::{Model, StageSpec};
use meshwork_tensor::param::{Gradients, Piece};
use meshwork_tensor::tape::{Mode, Normaliser, Position, Weights};
use meshwork_tensor::verify::Claims;
use meshwork_tensor::{Declarations, ParamId, ParamSpec, Params, Tape, Var};
use std::sync::Arc;

/// Trains by a loop: the losses of the steps, and the weights behind the last one.
pub fn train(given: &Given<'_>, rank: Arc<Rank>) -> Result<(Vec<Vec<f64>>, TrainState), TrainError> {
    let careless = |of: Careless| matches!(given.change, Some(Change::Loop(does)) if *does == of);
    let (plan, mesh, coords) = (&given.plan, rank.mesh(), rank.coords());
    let mut declarations = Declarations::new();
    let part = StageSpec { layers: 0..given.program.layers(), first: true, last: true };
    let model: Arc<dyn Model> = Arc::new(Net(given.program.clone()));
    one_rank::require_same(&model, plan, rank.world_rank())?;
    let stage = model.stage(&mut declarations, mesh, &part)?;
    let (declarations, device) = (Arc::new(declarations), Cpu::new(plan.precision));
    let device: Arc<dyn meshwork_tensor::Device> = Arc::new(device);
    let layout = [declarations.ids().collect::<Vec<ParamId>>()];
    let seed = plan.seed + u64::from(careless(Careless::OwnSeed));
    let rate = plan.lr.base * if careless(Careless::OwnRate) { 2.0 } else { 1.0 };
    let mut params = Arc::new(Params::new(declarations.clone(), mesh, coords, &device, &layout, seed)?);
    let (micros, held) = (plan.num_microbatches.unwrap_or(1), plan.global_batch_size / mesh.data_degree());
    let (first, size) = (mesh.data_rank(coords) * held, held / micros);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let batch = given.batch(step, first..first + held);
        let claims = (plan.verify != Verify::Off).then(|| Claims::new(rank.clone(), step + 1));
        if let Some(claims) = &claims {
            claims.weights(&params)?;
            if plan.samples == Samples::Distinct {
                claims.samples(batch.hash());
            }
        }
        let own = model.loss_terms(&batch, 0..held)?;
        let normaliser = match careless(Careless::OwnTerms) {
            true => Normaliser::Scale(1.0 / own as f64),
            false => Normaliser::LocalTerms(own),
        };
        let (mut gradients, mut sums) = (Gradients::default(), 0.0);
        for micro in 0..micros {
            let part = batch.part(micro * size..(micro + 1) * size)?;
            let first = if careless(Careless::NoPosition) { 0 } else { first };
            let (first_sample, rank_samples) = ((first + micro * size) as u64, held as u64);
            let position = Position { seed: plan.seed, step, first_sample, rank_samples };
            let tape = Tape::new(rank.clone(), params.clone(), device.clone(), Mode::Train, position);
            claims.iter().for_each(|claims| claims.observe(&tape));
            let output = stage.forward(&tape, &part, None)?;
            let loss = stage.loss(&tape, &part, &output)?;
            sums += whole(&loss)?;
            let seed = tape.loss_seed(&loss, normaliser)?;
            match (careless(Careless::LeavesNotes), micro % 2) {
                (true, _) => tape.backward(&loss, seed, Weights::Now, &mut gradients)?,
                // Auxiliary losses are trained with the loss, or by hand.
                (_, 0) => tape.backward_from_loss(&loss, normaliser, Weights::Now, &mut gradients)?,
                _ => {
                    let (notes, mut roots) = (tape.take_notes().per_sample, vec![(&loss, seed)]);
                    for note in &notes {
                        if let Some(factor) = note.coefficient {
                            let of_batch = Normaliser::Scale(factor / plan.global_batch_size as f64);
                            roots.push((&note.value, tape.loss_seed(&note.value, of_batch)?));
                        }
                    }
                    tape.backward_from(roots, Weights::Now, &mut gradients)?;
                }
            }
            if micro + 1 == micros && !careless(Careless::KeepsGradients) {
                gradients.all_reduce(&tape)?;
            }
        }
        if let Some(claims) = &claims {
            claims.gradients(&params, &gradients)?;
            claims.compare()?;
        }
        let terms = model.loss_terms(&given.batch(step, 0..plan.global_batch_size), 0..plan.global_batch_size)?;
        losses.push(vec![sums / terms as f64]);
        gradients.descend(&mut params, rate)?;
    }
    if plan.verify != Verify::Off {
        let claims = Claims::new(rank.clone(), STEPS);
        claims.weights(&params)?;
        claims.compare()?;
    }
    let pieces = declarations.ids().map(|id| {
        let spec = declarations.spec(id);
        let (rank, slice) = (rank.world_rank(), spec.local(mesh, coords));
        let key = StateKey { parameter: spec.name.clone(), state: None };
        Ok(StatePiece { key, piece: Piece { rank, dims: spec.dims, slice, values: params.read(id)? } })
    });
    let pieces = pieces.collect::<Result<_, TrainError>>()?;
    Ok((losses, TrainState { step: STEPS, updates: STEPS, pieces }))
}

/// The sum of the losses of the samples of all ranks.
fn whole(loss: &Var) -> Result<f64, TrainError> {
    let mut sum = loss.sum(0)?;
    for (axis, ty) in sum.types().iter() {
        if ty == Ty::Partial {
            sum = sum.all_reduce(axis)?;
        }
    }
    Ok(sum.item()?)
}

/// The outputs behind each of some passes, those of this rank's samples.
pub fn decode(given: &Given<'_>, rank: Arc<Rank>, passes: &[usize]) -> Result<Vec<Vec<f64>>, TrainError> {
    let (plan, mesh) = (&given.plan, rank.mesh().clone());
    let held = plan.global_batch_size / mesh.data_degree();
    let first = mesh.data_rank(rank.coords()) * held;
    let batch = given.batch(0, first..first + held);
    let model: Arc<dyn Model> = Arc::new(Net(given.program.clone()));
    let read = |spec: &ParamSpec, slice: &_| Ok::<_, TrainError>(given.nudged(spec.initial(slice, plan.seed)));
    let mut decoder =
        Decoder::new(model, plan, rank.clone(), Arc::new(Cpu::new(plan.precision)), given.program.seq, read)?;
    let mut outputs = Vec::new();
    for &count in passes {
        let now = tokens(&given.program, &batch, decoder.past()..decoder.past() + count)?;
        outputs = decoder.next(&now, count, given.program.outputs())?;
    }
    // Of all samples, in their order: the same on every rank.
    let mut all = vec![0f32; plan.global_batch_size * given.program.outputs()];
    rank.data_group().all_gather_slice(&outputs, &mut all).map_err(|error| misfit(&error.to_string()))?;
    Ok(vec![all.into_iter().map(f64::from).collect()])
}
