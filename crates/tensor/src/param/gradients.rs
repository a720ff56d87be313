//! Gradients for your own training loop: the axes over which they are summed, and a sink.

use super::{Declarations, ParamId, Params};
use crate::error::{Error, Result};
use crate::kernel::Map;
use crate::tape::{GradShard, GradSink, Tape};
use crate::tensor::Tensor;
use meshwork_core::{Axis, ReduceOp, Ty, Types};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The axes over which the gradient of a parameter must be summed, in that order, from the types with which it was read
/// (see [`Tape::reads`]): those on which it was `Replicate`, where its gradient is `Partial`. Data parallelism comes
/// first: the remaining sums are smaller once its sum is sharded.
pub fn reduction_axes(read: Types) -> Vec<Axis> {
    let mut axes: Vec<Axis> = read.dual().partial_axes().collect();
    axes.sort_by_key(|&axis| (!axis.is_data() && !axis.is_context(), axis));
    axes
}

impl Declarations {
    /// Per parameter, the axes over which its gradient must be summed: [`reduction_axes`] of each read. Empty for a
    /// parameter that was not read.
    pub fn reduction_axes(&self, reads: &BTreeMap<ParamId, Types>) -> Vec<Vec<Axis>> {
        self.ids().map(|id| reads.get(&id).map_or_else(Vec::new, |&read| reduction_axes(read))).collect()
    }
}

/// The gradients of parameters, each in its own tensor: the simplest sink. They add up over uses, tapes and
/// micro-batches.
///
/// ```
/// # use meshwork_core::{Axis, Mesh, Rank, Ty, Types};
/// # use meshwork_cpu::Cpu;
/// # use meshwork_tensor::{Declarations, Error, Init, Params, Placement, Role, Tape, Tensor};
/// # use meshwork_tensor::{param::Gradients, tape::{Mode, Normaliser, Position, Weights}};
/// # use std::sync::Arc;
/// # let rank = Arc::new(Rank::recording(&Mesh::new([(Axis::Dp, 1)])?, 0)?);
/// # let (device, mut all) = (Cpu::device(), Declarations::new());
/// let w = all.declare("w", &[1, 2], Placement::replicated(), Role::Weight, Init::Ones)?;
/// let mut params = Arc::new(Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &[vec![w]], 0)?);
/// # let data = |tape: &Tape, values: &[f32], shape: [usize; 2]| {
/// #     Tensor::from_slice(tape.device(), values, shape).map(|data| tape.constant(data, Types::new(&[(Axis::Dp, Ty::Shard(0))])))
/// # };
///
/// let tape = Tape::new(rank, params.clone(), device, Mode::Train, Position::default());
/// let (x, t) = (data(&tape, &[1.0, 2.0], [1, 2])?, data(&tape, &[5.0], [1, 1])?);
/// let loss = x.linear(&tape.param(w)?, 1)?.mean_squared_error(&t)?;
/// let mut gradients = Gradients::default();
/// tape.backward_from_loss(&loss, Normaliser::LocalTerms(1), Weights::Now, &mut gradients)?;
/// gradients.all_reduce(&tape)?;
/// assert_eq!(gradients.get(w).unwrap().to_vec::<f32>()?, [-4.0, -8.0]);
///
/// drop((tape, x, t, loss)); // nobody else reads the weights
/// gradients.descend(&mut params, 0.125)?;
/// assert_eq!(params.value(w)?.to_vec::<f32>()?, [1.5, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Gradients(BTreeMap<ParamId, Gradient>);

#[derive(Debug)]
struct Gradient {
    value: Tensor,
    /// `Partial` where it is still to be summed.
    types: Types,
}

impl Gradients {
    /// The gradient of a parameter, if it has one.
    pub fn get(&self, id: ParamId) -> Option<&Tensor> {
        self.0.get(&id).map(|gradient| &gradient.value)
    }

    /// All gradients, in the order of declaration.
    pub fn iter(&self) -> impl Iterator<Item = (ParamId, &Tensor)> {
        self.0.iter().map(|(&id, gradient)| (id, &gradient.value))
    }

    /// All gradients with their types, in the order of declaration.
    pub(crate) fn typed(&self) -> impl Iterator<Item = (ParamId, &Tensor, Types)> {
        self.0.iter().map(|(&id, gradient)| (id, &gradient.value, gradient.types))
    }

    /// Sums each gradient over the axes on which it is `Partial`, once all backward passes have run. `tape` is the tape
    /// of any of them. Canonical numerics are refused, because they need the order of samples, which this sink does not
    /// keep. So is a tape that still [defers](crate::tape::Weights::Deferred) gradients of weights, which would be
    /// missing.
    pub fn all_reduce(&mut self, tape: &Tape) -> Result<()> {
        if tape.defers_gradients() {
            return Err(Error::Backward(
                "gradients of weights are deferred, and would be missing from the sums: call Tape::weight_gradients first".to_owned(),
            ));
        }
        if tape.reduction_blocks().is_some() {
            return Err(Error::NotCanonical {
                op: "Gradients::all_reduce",
                problem: "gradients of samples are added up in the order in which they come",
                valid: "the trainer, or a sink that keeps subtrees of samples",
            });
        }
        for Gradient { value, types } in self.0.values_mut() {
            for axis in reduction_axes(types.dual()) {
                let (device, shape) = (Arc::clone(value.device()), value.shape());
                let sum = tape.rank().group(axis).all_reduce(value.copy_buffer()?, ReduceOp::Sum)?;
                *value = Tensor::from_buffer(&device, sum, shape)?;
                *types = types.with(axis, Ty::Invariant);
            }
        }
        Ok(())
    }

    /// One step of plain gradient descent, `w -= rate · gradient`: for first experiments. The rate of a parameter is
    /// `rate` times the rate of its [group](crate::param::ParamGroup::learning_rate).
    ///
    /// # Errors
    /// A tape or anything else still reads the weights; a gradient is still to be summed over ranks.
    pub fn descend(&self, params: &mut Arc<Params>, rate: f64) -> Result<()> {
        let Some(params) = Arc::get_mut(params) else {
            return Err(Error::Backward("weights are still read: drop the tape and its values first".to_owned()));
        };
        for (&id, Gradient { value: gradient, types }) in &self.0 {
            let spec = params.declarations().spec(id);
            let axes: Vec<String> = types.partial_axes().map(|axis| axis.to_string()).collect();
            if !axes.is_empty() {
                return Err(Error::StillPartial { name: spec.name.clone(), axes: axes.join(", ") });
            }
            let (flat, range) = params.place(id);
            let device = gradient.device();
            let rate = rate * spec.group.learning_rate;
            let change = device.elementwise()?.map(Map::Scale(-rate), gradient.buffer())?;
            device.pointwise()?.add_assign(&mut params.flats_mut()[flat], range.start, &change)?;
        }
        Ok(())
    }
}

impl GradSink for Gradients {
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()> {
        let value = match self.0.remove(&share.id) {
            None => grad,
            Some(sum) if sum.types == share.types => sum.value.accumulate(&grad)?,
            Some(sum) => {
                return Err(Error::Backward(format!(
                    "a gradient of parameter #{} is {} and another {}: sum after all backward passes have run",
                    share.id.index(),
                    share.types,
                    sum.types
                )));
            }
        };
        self.0.insert(share.id, Gradient { value, types: share.types });
        Ok(())
    }

    fn ready(&mut self, _id: ParamId) -> Result<()> {
        Ok(())
    }
}
