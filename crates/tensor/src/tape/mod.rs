//! The tape: operations on [`Var`]s are applied, typed and recorded; [`Tape::backward`] runs them in reverse.
//!
//! There is one tape per micro-batch and segment of a stage; without recomputation of layers, a stage is one segment.
//! It has three hooks for memory and overlap features, and one for observers:
//! - *saved tensors* ([`SavedPolicy`]): how an operation's saved values are stored for the backward pass. With
//!   [`Selective`], values that are cheap to recompute ([`Forward::recipe`]) are not stored at all;
//! - *deferred weight gradients* ([`Weights::Deferred`]): backward first computes only the gradients of inputs, and
//!   [`Tape::weight_gradients`] computes the rest later;
//! - *gradient ready* ([`GradSink::ready`]): called when the last use of a parameter on this tape has added its share;
//! - *observer* ([`Observer`]): sees every output and every gradient of an input, and may replace it.
//!
//! More than 400 lines: the documented public calls of one type.

mod backward;
mod blocks;
mod cut_cache;
mod decisions;
mod decoding;
mod encoded;
mod extents;
mod hooks;
mod notes;
mod op;
mod padding;
pub mod reduction_blocks;
mod rows;
mod seed;
mod sink;
mod uses;
mod var;

/// Items that most of the tape's files use.
mod prelude {
    pub(super) use super::{GradSink, Mode, Padding, Saved, Source, Tape, Var};
    pub(super) use crate::error::{Error, Result};
    pub(super) use crate::param::ParamId;
    pub(super) use crate::shape::Shape;
    pub(super) use crate::tensor::Tensor;
    pub(super) use meshwork_core::{Axis, Buffer, DType, SpmdError, Ty, Types};
    pub(super) use std::cell::RefCell;
    pub(super) use std::ops::Range;
    pub(super) use std::rc::Rc;
    pub(super) use std::sync::Arc;
}

pub use blocks::Block;
pub use decisions::Decisions;
pub use decoding::KeyValueCache;
pub use encoded::{Encoded, Encoding, HalfType};
pub use hooks::{Keep, Observer, Saved, SavedPolicy, SavedTensor, Seen, Selective, Weights};
pub use notes::{Notes, PerSample, StatisticNote};
pub use op::{Backward, Forward, Op};
pub use padding::{Padded, Padding};
pub use reduction_blocks::{BlockSlot, RowBlocks, Terms, Tokens};
pub use rows::{RowCodec, RowFlow, RowPacking, RowSchemes};
pub use seed::{Normaliser, Seed};
pub use sink::{GradShard, GradSink, GradSlot};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::param::{ParamId, Params};
use crate::random;
use crate::tensor::Tensor;
use backward::Node;
use hooks::{Observers, Recipe};
use meshwork_core::rules::{Operand, Origin, resolve_constants, resolve_reads};
use meshwork_core::{Axis, DType, Rank, Ty, Types};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

/// The run's seed, the step, and the global index of the first sample on this tape. They make the randomness of a
/// forward pass a function of global positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Position {
    /// Seed of the run.
    pub seed: u64,
    /// Step, from 0.
    pub step: u64,
    /// Global index, within the step's batch, of the sample in row 0 of dim 0.
    pub first_sample: u64,
    /// Samples of the step on each data-parallel rank, in all micro-batches; the first samples of neighbouring ranks
    /// are as far apart. 0 if unknown. It gives the mean of [auxiliary losses](Tape::add_loss), and shows a dry run,
    /// which receives nothing, which samples other ranks have.
    pub rank_samples: u64,
}

/// Whether a tape records operations for a backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Records operations; dropout is active.
    Train,
    /// Records nothing; dropout is the identity.
    Evaluate,
}

/// A recording of operations. Cheap to clone; clones share the recording.
#[derive(Clone, Debug)]
pub struct Tape {
    inner: Rc<Inner>,
}

#[derive(Debug)]
struct Inner {
    rank: Arc<Rank>,
    device: Arc<dyn Device>,
    params: Arc<Params>,
    mode: Mode,
    position: Position,
    policy: Rc<dyn SavedPolicy>,
    /// Empty on a tape that nobody observes.
    observer: OnceCell<Observers>,
    /// Earlier tokens, on a tape that decodes.
    cache: OnceCell<KeyValueCache>,
    /// Number of operations applied so far.
    applied: Cell<usize>,
    /// The part of the samples that operations are applied to, see [`Tape::for_parts`].
    part: Cell<usize>,
    nodes: RefCell<Vec<Node>>,
    reads: RefCell<BTreeMap<ParamId, Types>>,
    /// Gradients of inputs, once backward has run.
    grads: RefCell<BTreeMap<usize, Tensor>>,
    deferred: RefCell<Vec<(usize, Tensor)>>,
    ran_backward: Cell<bool>,
    notes: RefCell<notes::Kept>,
    decided: RefCell<decisions::Decided>,
    /// The compression of the rows that layers exchange.
    rows: Cell<RowSchemes>,
    /// Whether layers compute without their adapters.
    plain: Cell<bool>,
    /// On a tape for a block of tokens: what it knows of it.
    within: OnceCell<blocks::Within>,
    /// Names under which randomness has been drawn.
    random: RefCell<BTreeSet<String>>,
}

/// A value on a tape: a tensor, its SPMD types, and the destination of its gradient.
#[derive(Clone, Debug)]
pub struct Var {
    tape: Tape,
    tensor: Tensor,
    types: Types,
    padding: Padding,
    source: Source,
    /// Number of the operation that made it; `None` if it came from outside.
    maker: Option<usize>,
    /// How it is recomputed in backward, if it need not be kept.
    recipe: Option<Rc<Recipe>>,
}

/// The destination of a value's gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// No gradient: given, or computed from what is given.
    Constant,
    /// No gradient: computed by a tape that does not record, or given to it.
    Unrecorded,
    /// No gradient: a parameter that is not trained.
    Frozen(ParamId),
    /// The parameter's gradient.
    Param(ParamId),
    /// The node that made the value.
    Node(usize),
}

impl Source {
    fn origin(self) -> Origin {
        match self {
            Self::Constant => Origin::Constant,
            Self::Param(_) | Self::Frozen(_) => Origin::Parameter,
            Self::Unrecorded | Self::Node(_) => Origin::Value,
        }
    }

    fn takes_gradient(self) -> bool {
        matches!(self, Self::Param(_) | Self::Node(_))
    }
}

impl Tape {
    /// A tape of one rank of a mesh, which keeps saved tensors unchanged.
    pub fn new(rank: Arc<Rank>, params: Arc<Params>, device: Arc<dyn Device>, mode: Mode, position: Position) -> Self {
        Self::with_policy(rank, params, device, mode, position, Rc::new(Keep))
    }

    /// The same with another policy for saved tensors.
    pub fn with_policy(
        rank: Arc<Rank>,
        params: Arc<Params>,
        device: Arc<dyn Device>,
        mode: Mode,
        position: Position,
        policy: Rc<dyn SavedPolicy>,
    ) -> Self {
        let inner = Inner {
            rank,
            device,
            params,
            mode,
            position,
            policy,
            observer: OnceCell::new(),
            cache: OnceCell::new(),
            applied: Cell::new(0),
            part: Cell::new(0),
            nodes: RefCell::default(),
            reads: RefCell::default(),
            grads: RefCell::default(),
            deferred: RefCell::default(),
            ran_backward: Cell::new(false),
            notes: RefCell::default(),
            decided: RefCell::default(),
            rows: Cell::default(),
            plain: Cell::default(),
            within: OnceCell::new(),
            random: RefCell::default(),
        };
        Self { inner: Rc::new(inner) }
    }

    /// Shows every value from now on to `observer`. Of several observers, each sees the value that the observer before
    /// it returned.
    pub fn observe(&self, observer: Rc<dyn Observer>) {
        self.inner.observer.get_or_init(Observers::default).add(observer);
    }

    pub(crate) fn position(&self) -> Position {
        self.inner.position
    }

    fn is_observed(&self) -> bool {
        self.inner.observer.get().is_some()
    }

    /// Counts operations from `number` on, for observers: the operations of a stage may lie on several tapes.
    pub fn count_from(&self, number: usize) {
        self.inner.applied.set(number);
    }

    /// Number of operations applied so far, operations before this tape included.
    pub fn applied(&self) -> usize {
        self.inner.applied.get()
    }

    /// Applies the same operations to each of several parts of the samples, in turn: what `apply` does with part 0,
    /// with part 1, .. They have the same numbers, and are together one use of each parameter that they read, so that
    /// the gradients have the bits of one operation on all samples. Backward goes through the parts from the last to
    /// the first.
    pub fn for_parts(&self, parts: usize, mut apply: impl FnMut(usize) -> Result<()>) -> Result<()> {
        let Inner { applied, part, .. } = &*self.inner;
        let first = applied.get();
        for number in 0..parts {
            applied.set(first);
            part.set(number);
            let done = apply(number);
            part.set(0);
            done?;
        }
        Ok(())
    }

    /// Applies operations with the [adapters](crate::param::Adapters) of all layers off: `apply` computes the frozen
    /// model, without a copy of it.
    pub fn without_adapters<T>(&self, apply: impl FnOnce() -> T) -> T {
        let around = self.inner.plain.replace(true);
        let applied = apply();
        self.inner.plain.set(around);
        applied
    }

    /// Whether layers add what their adapters compute.
    pub fn has_adapters(&self) -> bool {
        !self.inner.plain.get()
    }

    /// The rank that this tape computes for.
    pub fn rank(&self) -> &Arc<Rank> {
        &self.inner.rank
    }

    /// The device of every value here.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.inner.device
    }

    /// The parameters that it reads.
    pub fn params(&self) -> &Arc<Params> {
        &self.inner.params
    }

    /// Train or evaluate.
    pub fn mode(&self) -> Mode {
        self.inner.mode
    }

    /// A stream of randomness for one use, named after the layer: the same on any mesh.
    ///
    /// # Errors
    /// A name that was used on this tape: both uses would draw the same numbers.
    pub fn random_key(&self, name: &str) -> Result<random::Key> {
        if !self.inner.random.borrow_mut().insert(name.to_owned()) {
            return Err(Error::RandomName { name: name.to_owned() });
        }
        let position = self.inner.position;
        Ok(random::key(position.seed, &format!("{name}@{}", position.step)))
    }

    /// The names under which operations drew randomness, in alphabetical order.
    pub fn random_names(&self) -> Vec<String> {
        self.inner.random.borrow().iter().cloned().collect()
    }

    fn show_source(&self, kind: &'static str, types: Types, tensor: &Tensor) {
        if let Some(observer) = self.inner.observer.get() {
            observer.source(kind, types, tensor);
        }
    }

    /// Refuses a value of another tape.
    fn require_own(&self, op: &'static str, operand: &'static str, value: &Var) -> Result<()> {
        if Rc::ptr_eq(&self.inner, &value.tape.inner) { Ok(()) } else { Err(Error::OtherTape { op, operand }) }
    }

    /// Global index of the first sample on this tape.
    pub fn first_sample(&self) -> u64 {
        self.inner.position.first_sample
    }

    /// Samples of the step on each data-parallel rank; 0 if unknown.
    pub fn rank_samples(&self) -> u64 {
        self.inner.position.rank_samples
    }

    /// A value that needs no gradient: token ids, targets, a mask. One that is the same on every rank may be declared
    /// `Invariant` or `Replicate`: an operation that refuses that type
    /// [reads it](meshwork_core::rules::resolve_constants) as it reads a parameter.
    pub fn constant(&self, tensor: Tensor, types: Types) -> Var {
        self.show_source("a constant", types, &tensor);
        self.value(tensor, types, Source::Constant)
    }

    /// A value from outside, such as one that a previous pipeline stage sent. [`take_grad`](Self::take_grad) returns
    /// its gradient after backward.
    pub fn input(&self, tensor: Tensor, types: Types) -> Var {
        if self.inner.mode == Mode::Evaluate {
            return self.input_without_gradient(tensor, types);
        }
        self.show_source("an input", types, &tensor);
        let node = self.push(Node::input(&tensor, types));
        self.value(tensor, types, Source::Node(node))
    }

    /// An [input](Self::input) that takes no gradient, because all that it was computed from is frozen or is not
    /// recorded. It is no [constant](Self::constant): operations hold it to its types.
    pub fn input_without_gradient(&self, tensor: Tensor, types: Types) -> Var {
        self.show_source("a constant", types, &tensor);
        self.value(tensor, types, Source::Unrecorded)
    }

    /// A value from outside.
    fn value(&self, tensor: Tensor, types: Types, source: Source) -> Var {
        Var { tape: self.clone(), tensor, types, padding: Padding::default(), source, maker: None, recipe: None }
    }

    /// Reads a parameter. A [frozen](crate::param::ParamGroup::frozen) one gets no gradient.
    pub fn param(&self, id: ParamId) -> Result<Var> {
        self.read(id, self.inner.params.value(id)?)
    }

    /// Reads a parameter that only the weight of [`linear`](Var::linear) and its forms is: one that is stored in bf16
    /// is not restored, because products widen it as they read it, with the same bits.
    pub fn matrix(&self, id: ParamId) -> Result<Var> {
        self.read(id, self.inner.params.matrix(id)?)
    }

    fn read(&self, id: ParamId, tensor: Tensor) -> Result<Var> {
        let params = &self.inner.params;
        let types = params.types(id);
        let frozen = params.declarations().spec(id).group.frozen;
        let source = if frozen { Source::Frozen(id) } else { Source::Param(id) };
        Ok(Var { padding: self.padding_of(id)?, ..self.value(tensor, types, source) })
    }

    /// The types with which each parameter was read. On axes where that is `Replicate` its gradient is `Partial`.
    pub fn reads(&self) -> BTreeMap<ParamId, Types> {
        self.inner.reads.borrow().clone()
    }

    /// Applies an operation: infers its types, computes it, and records it if a gradient will flow through it.
    pub fn apply(&self, op: impl Op + 'static, inputs: &[&Var]) -> Result<Var> {
        let inner = &*self.inner;
        inner.rank.heartbeat();
        let number = inner.applied.replace(inner.applied.get() + 1);
        let names = op.operands();
        if names.len() != inputs.len() {
            return Err(Error::Shape {
                op: op.name(),
                problem: format!("it takes {names:?}, and {} values were given", inputs.len()),
                shapes: inputs.iter().map(|input| input.shape().to_vec()).collect(),
            });
        }
        names.iter().zip(inputs).try_for_each(|(name, input)| self.require_own(op.name(), name, input))?;
        let stored = inner.device.operand_dtype(DType::F32);
        if op.reads_values() && stored.is_half() && inputs.iter().any(|input| input.tensor.dtype() == stored) {
            let device = inner.device.name().to_owned();
            return Err(Error::DType { op: op.name(), device, dtype: stored, valid: "f32 or f64" });
        }
        let declared = |(var, name): (&&Var, &&'static str)| Operand {
            name,
            types: var.types,
            ndim: var.tensor.shape().len(),
            origin: var.source.origin(),
            repeats: 0,
        };
        let mut operands: Vec<Operand<'_>> = inputs.iter().zip(names).map(declared).collect();
        resolve_reads(&mut operands);
        let types = op.infer(&operands).or_else(|refusal| {
            operands = inputs.iter().zip(names).map(declared).collect();
            if !resolve_constants(&mut operands) {
                return Err(refusal);
            }
            resolve_reads(&mut operands);
            op.infer(&operands).map_err(|_| refusal)
        })?;
        let padding = extents::of_result(&op, inputs, types)?;
        for (var, operand) in inputs.iter().zip(&operands) {
            if let Source::Param(id) = var.source {
                self.note_read(id, operand.types)?;
            }
        }

        let recording = inner.within.get().is_none_or(|within| within.records);
        let records = recording && inner.mode == Mode::Train && inputs.iter().any(|var| var.source.takes_gradient());
        let replicate = |types: Types| types.iter().any(|(_, ty)| ty == Ty::Replicate);
        if records && self.reduction_blocks().is_some() && replicate(types) && !op.only_moves() {
            return Err(Error::NotCanonical {
                op: op.name(),
                problem: "its result is Replicate, and each rank would round its share of the gradient before the shares are added up",
                valid: "it on an Invariant or Shard value: before copy or all_gather, or on samples in place of a parameter",
            });
        }
        let gathered = |var: &&Var| {
            let data = |axis| var.types.get(axis) == Some(Ty::Replicate);
            matches!(var.source, Source::Node(_)) && Axis::DATA.into_iter().any(data)
        };
        if records && self.reduction_blocks().is_some() && !op.only_moves() && inputs.iter().any(gathered) {
            return Err(Error::NotCanonical {
                op: op.name(),
                problem: "an operand is Replicate over the ranks with other samples, and its gradient would be a sum over samples in an order \
                          that depends on the mesh",
                valid: "the same work on every rank: all_gather_invariant in place of all_gather",
            });
        }
        let mut forward = Forward::new(self, (op.name(), types), inputs, records);
        let tensors: Vec<&Tensor> = inputs.iter().map(|var| &var.tensor).collect();
        let tensor = op.forward(&mut forward, &tensors).map_err(|error| error.during(op.name()))?;
        if tensor.dtype() != self.share_dtype(tensor.dtype()) && types.partial_axes().next().is_some() {
            return Err(Error::NotCanonical {
                op: op.name(),
                problem: "its result is Partial in 16 bits, and each rank would round its share of a sum before the shares are added up",
                valid: "operands in f32: Forward::share",
            });
        }
        let (saved, mut recipe) = forward.finish();
        let tensor = match inner.observer.get() {
            None => tensor,
            Some(observer) => {
                let params = self.param_names(inputs.iter().map(|var| var.source));
                let makers: Vec<Option<usize>> = inputs.iter().map(|var| var.maker).collect();
                let position = inner.position;
                let seen = Seen {
                    op: op.name(),
                    number,
                    part: inner.part.get(),
                    operand: None,
                    makers: &makers,
                    params: &params,
                    inputs: &tensors,
                    scalars: &op.scalars(),
                    tokens: &op.tokens(self),
                    position,
                    types,
                    padding: &padding,
                    tensor: &tensor,
                };
                match observer.see(&seen)? {
                    None => tensor,
                    Some(by) => {
                        recipe = None; // it would make what was replaced
                        by
                    }
                }
            }
        };
        let source = if records {
            let sources = inputs.iter().map(|var| var.source).collect();
            Source::Node(self.push(Node::operation(
                Box::new(op),
                (number, inner.part.get()),
                sources,
                saved,
                (&tensor, types, padding.clone()),
            )))
        } else if inputs.iter().all(|var| var.source == Source::Constant) {
            Source::Constant
        } else {
            Source::Unrecorded
        };
        Ok(Var { padding, recipe, maker: Some(number), ..self.value(tensor, types, source) })
    }

    fn push(&self, node: Node) -> usize {
        let mut nodes = self.inner.nodes.borrow_mut();
        nodes.push(node);
        nodes.len() - 1
    }

    /// Names of the parameters among the inputs of an operation.
    fn param_names(&self, sources: impl Iterator<Item = Source>) -> Vec<&str> {
        let specs = self.inner.params.declarations();
        let name = |source| match source {
            Source::Param(id) | Source::Frozen(id) => Some(&*specs.spec(id).name),
            _ => None,
        };
        sources.filter_map(name).collect()
    }

    fn note_read(&self, id: ParamId, types: Types) -> Result<()> {
        let mut reads = self.inner.reads.borrow_mut();
        let first = *reads.entry(id).or_insert(types);
        if first == types {
            return Ok(());
        }
        Err(Error::ReadBothWays {
            name: self.inner.params.declarations().spec(id).name.clone(),
            first: first.to_string(),
            second: types.to_string(),
        })
    }

    fn save(&self, op: &'static str, tensor: Tensor) -> Result<Saved> {
        self.inner.policy.save(op, tensor)
    }
}
