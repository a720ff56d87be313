//! What travels over the cuts of a pipeline in place of a value: the value itself, or a message that its scheme makes of it.
//!
//! A message is made of the whole value that a rank has; where that is the same on every tp rank, each of them makes the same message
//! and sends its part of the bytes. So what is lost does not depend on tp. Rows are samples.

use crate::compress::NOTHING;
use crate::feedback::Crossing;
use crate::pass::Purpose;
use crate::{Compress, Plan, PlanError, TrainError};
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Compressor, Draws, Fold, Scheme, Shape as Matrix, wire_bytes};
use meshwork_core::{Axis, Buffer, DType, Mesh, Rank, Ty};
use meshwork_nn::Activation;
use meshwork_pipeline::{Direction, Tag};
use meshwork_tensor::{Category, Device, Shape};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The step of each micro-batch of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// What the pass is for.
    pub purpose: Purpose,
    /// The step of the pass, from 0.
    pub step: u64,
    /// Number of its first micro-batch, less that by which the schedule's count is behind.
    pub first_micro: i64,
    /// Micro-batches of a step.
    pub micros: usize,
}

impl Clock {
    /// The clock of a pass that does not train. `micros` is its number of micro-batches.
    pub fn beside(purpose: Purpose, step: u64, micros: usize) -> Self {
        Self { purpose, step, first_micro: 0, micros }
    }

    /// The step of a micro-batch as the schedule counts them, and its number in that step.
    fn of(&self, micro: usize) -> (u64, usize) {
        let (after, micros) = (micro as i64 - self.first_micro, self.micros.max(1) as i64);
        (self.step.saturating_add_signed(after.div_euclid(micros)), after.rem_euclid(micros) as usize)
    }
}

/// A value as its scheme makes a message of it.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    /// The scheme.
    pub scheme: Scheme,
    /// The value as a matrix.
    pub shape: Matrix,
    /// Bytes of the message.
    pub bytes: usize,
}

/// How one rank codes what it sends over cuts, and decodes what it receives.
#[derive(Debug)]
pub struct Codec {
    compress: Compress,
    device: Arc<dyn Device>,
    clock: Clock,
    seed: u64,
    /// This rank's number among those that have the same micro-batches in other samples.
    data_rank: usize,
    tp: [usize; 2],
    /// What this rank keeps of each message of a step, where there is feedback: its states as sender, or its estimate as receiver.
    kept: BTreeMap<Tag, (Crossing, Sender<Buffer>)>,
}

impl Codec {
    /// The codec of a plan, in passes that do not train: without feedback.
    ///
    /// # Errors
    /// A device without kernels for compression.
    pub fn plain(
        compress: &Compress,
        seed: u64,
        rank: &Rank,
        device: &Arc<dyn Device>,
        clock: Clock,
    ) -> Result<Self, TrainError> {
        if compress.is_some() {
            device.compression()?;
        }
        let coords = rank.coords();
        Ok(Self {
            compress: *compress,
            device: device.clone(),
            clock,
            seed,
            data_rank: rank.mesh().data_rank(coords),
            tp: [coords.get(Axis::Tp), rank.mesh().degree(Axis::Tp)],
            kept: BTreeMap::new(),
        })
    }

    /// The codec of a plan, in training, with the states of feedback of every message that this rank sends or receives in a step.
    ///
    /// # Errors
    /// A device without kernels for compression; no memory.
    pub fn training(
        plan: &Plan,
        crossings: Vec<Crossing>,
        rank: &Rank,
        device: &Arc<dyn Device>,
    ) -> Result<Self, TrainError> {
        let clock = Clock::beside(Purpose::Train, 0, plan.num_microbatches()?);
        let mut codec = Self::plain(&plan.compress, plan.seed, rank, device, clock)?;
        for crossing in crossings {
            let names: Vec<_> = crossing.states(plan).collect();
            let state = |name| codec.zeros(if names.contains(&name) { crossing.packed.shape.len() } else { 0 });
            let [residual, estimate, momentum] = Sender::<Buffer>::NAMES.map(state);
            let kept = Sender { residual: residual?, estimate: estimate?, momentum: momentum? };
            if !names.is_empty() {
                codec.kept.insert(crossing.tag, (crossing, kept));
            }
        }
        Ok(codec)
    }

    /// Every state of feedback, with its name and its place in the state of a run.
    pub fn states(&self) -> impl Iterator<Item = (&Crossing, &'static str, &Buffer)> {
        let all = self.kept.values().flat_map(|(crossing, kept)| {
            Sender::<Buffer>::NAMES.into_iter().zip(kept.all()).map(move |(name, state)| (crossing, name, state))
        });
        all.filter(|(_, _, state)| state.count() > 0)
    }

    /// The same, for writing.
    pub fn states_mut(&mut self) -> impl Iterator<Item = (&Crossing, &'static str, &mut Buffer)> {
        let all = self.kept.values_mut().flat_map(|(crossing, kept)| {
            let crossing = &*crossing;
            Sender::<Buffer>::NAMES.into_iter().zip(kept.all_mut()).map(move |(name, state)| (crossing, name, state))
        });
        all.filter(|(_, _, state)| state.count() > 0)
    }

    fn zeros(&self, count: usize) -> Result<Buffer, TrainError> {
        let _states = self.device.meter().enter(Category::Optimizer);
        Ok(self.device.zeros(DType::F32, count)?)
    }

    /// Begins a pass.
    pub fn begin(&mut self, clock: Clock) {
        self.clock = clock;
    }

    /// How a value is compressed, if it is.
    pub fn packed(&self, tag: Tag, value: &Activation) -> Result<Option<Packed>, TrainError> {
        let scheme =
            scheme(&self.compress, tag.direction).filter(|_| self.compress.includes(self.clock.of(tag.micro).0));
        scheme.map(|scheme| pack(scheme, tag, value)).transpose()
    }

    /// The message of a value, in memory of `room` bytes.
    pub fn pack(
        &mut self,
        tag: Tag,
        of: &Packed,
        Activation { types, .. }: &Activation,
        value: Buffer,
        room: usize,
    ) -> Result<Buffer, TrainError> {
        let (step, micro) = self.clock.of(tag.micro);
        // Ranks that have the same value draw the same.
        let differs = matches!(types.get(Axis::Tp), Some(Ty::Shard(_) | Ty::Varying));
        let [tp_rank, tp] = if differs { self.tp } else { [0, 1] };
        let (kind, pass) = (kind(tag.direction), self.clock.purpose);
        let name = match pass {
            Purpose::Train => format!("{kind} of stage {}", tag.stage),
            _ => format!("{kind} of stage {} in {pass:?}", tag.stage),
        };
        let before = ((self.data_rank * self.clock.micros + micro) * tp + tp_rank) * of.shape.len();
        let draws = Draws::new(self.seed, &name, step).skip(before);
        let (kernels, feedback) = (self.device.compression()?, self.compress.feedback);
        let _buffers = self.device.meter().enter(Category::Buffers);
        let mut message = self.device.alloc(DType::U8, room)?;
        let kept = self.kept.get_mut(&Tag { micro, ..tag }).filter(|_| pass == Purpose::Train);
        let Some((_, sender)) = kept else {
            kernels.pack(&of.scheme, of.shape, draws, &value, &mut message, 0)?;
            return Ok(message);
        };
        let target = kernels.outgoing(feedback, &value, self.compress.begins_at(step), sender)?;
        drop(value);
        kernels.pack(&of.scheme, of.shape, draws, &target, &mut message, 0)?;
        let mut sent = self.device.alloc(DType::F32, of.shape.len())?;
        kernels.unpack(&of.scheme, of.shape, &part(&message, of.bytes)?, Fold::Replace, &mut sent, 0)?;
        kernels.sent(feedback, &target, &sent, sender)?;
        Ok(message)
    }

    /// The value of a message.
    pub fn unpack(&mut self, tag: Tag, of: &Packed, message: &Buffer) -> Result<Buffer, TrainError> {
        let (_, micro) = self.clock.of(tag.micro);
        let message = part(message, of.bytes)?;
        let kernels = self.device.compression()?;
        let kept = self.kept.get_mut(&Tag { micro, ..tag }).filter(|_| self.clock.purpose == Purpose::Train);
        let Some((_, Sender { estimate, .. })) = kept.filter(|(_, kept)| kept.estimate.count() > 0) else {
            let mut value = self.device.alloc(DType::F32, of.shape.len())?;
            kernels.unpack(&of.scheme, of.shape, &message, Fold::Replace, &mut value, 0)?;
            return Ok(value);
        };
        kernels.unpack(&of.scheme, of.shape, &message, Fold::Add, estimate, 0)?;
        Ok(self.device.layout()?.copy(estimate)?)
    }
}

/// The activation, or its gradient, that a message with this tag carries: the tag names the stage that made it.
pub fn expected(activations: &[Activation], tag: Tag) -> Activation {
    match tag.direction {
        Direction::Activation => activations[tag.stage],
        Direction::Gradient => {
            let activation = activations[tag.stage - 1];
            Activation { types: activation.types.dual(), ..activation }
        }
    }
}

fn scheme(compress: &Compress, direction: Direction) -> Option<Scheme> {
    let scheme = match direction {
        Direction::Activation => compress.activations,
        Direction::Gradient => compress.activation_gradients,
    };
    (scheme != NOTHING).then_some(scheme)
}

fn kind(direction: Direction) -> &'static str {
    match direction {
        Direction::Activation => "activation",
        Direction::Gradient => "activation gradient",
    }
}

/// The first bytes of what was received: all but the padding of its parts.
fn part(message: &Buffer, bytes: usize) -> Result<Buffer, TrainError> {
    Ok(message.slice(0..bytes).map_err(meshwork_tensor::Error::from)?)
}

/// A value as a matrix with a row for each sample.
fn matrix(shape: &Shape) -> Result<Matrix, meshwork_compress::CompressError> {
    let rows = shape.first().copied().unwrap_or(1).max(1);
    Matrix::matrix(rows, shape.count() / rows)
}

fn pack(scheme: Scheme, tag: Tag, value: &Activation) -> Result<Packed, TrainError> {
    let packed =
        matrix(&value.shape).and_then(|shape| Ok(Packed { scheme, shape, bytes: wire_bytes(&scheme, shape)? }));
    packed.map_err(|error| refuse(scheme, tag, error.to_string()).into())
}

/// The error of a value that is not compressed so.
pub fn refuse(scheme: Scheme, tag: Tag, problem: String) -> PlanError {
    let place = if tag.direction == Direction::Activation { "activations" } else { "activation gradients" };
    PlanError::Compress { place, scheme: scheme.name(), problem: format!("stage {}: {problem}", tag.stage) }
}

/// How a value is compressed in training, if it is, refused where that would lose its meaning.
pub fn require(compress: &Compress, tag: Tag, value: &Activation, mesh: &Mesh) -> Result<Option<Packed>, TrainError> {
    let Some(scheme) = scheme(compress, tag.direction) else { return Ok(None) };
    let refuse = |problem: String| Err(refuse(scheme, tag, problem).into());
    if value.dtype != DType::F32 {
        return refuse(format!("it sends {}, and only f32 is compressed", value.dtype));
    }
    let mut split = value.types.iter().filter(|(axis, _)| mesh.degree(*axis) > 1);
    if let Some((axis, _)) = split.find(|(_, ty)| *ty == Ty::Partial) {
        return refuse(format!(
            "it sends shares of a sum over {axis}, and the sum of compressed shares is not the compressed sum: let the model send the sum, \
             Invariant or Shard on {axis}, or do not compress it"
        ));
    }
    let packed = pack(scheme, tag, value)?;
    match compress.feedback.check(&scheme, packed.shape) {
        Ok(()) => Ok(Some(packed)),
        Err(error) => refuse(error.to_string()),
    }
}
