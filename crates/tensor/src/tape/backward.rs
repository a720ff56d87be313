//! The backward pass of a tape.

use super::hooks::{Observers, Seen, Weights};
use super::op::{Backward, Op};
use super::prelude::*;
use super::seed::{Normaliser, Seed};
use super::sink::GradShard;
use super::uses::Uses;

/// One recorded operation, or an input.
#[derive(Debug)]
pub(super) struct Node {
    /// `None` for an input.
    op: Option<Box<dyn Op>>,
    /// Number of operations applied before it.
    number: usize,
    /// The part of the samples that it was applied to.
    part: usize,
    sources: Vec<Source>,
    /// Shared with the recipe of the result.
    saved: Rc<[Saved]>,
    /// Shape of the value that it made.
    shape: Shape,
    dtype: DType,
    types: Types,
    padding: Padding,
}

impl Node {
    pub(super) fn input(value: &Tensor, types: Types) -> Self {
        let (shape, dtype) = (value.shape(), value.dtype());
        let padding = Padding::default();
        Self { op: None, number: 0, part: 0, sources: Vec::new(), saved: Rc::default(), shape, dtype, types, padding }
    }

    pub(super) fn operation(
        op: Box<dyn Op>,
        (number, part): (usize, usize),
        sources: Vec<Source>,
        saved: Rc<[Saved]>,
        (value, types, padding): (&Tensor, Types, Padding),
    ) -> Self {
        Self { op: Some(op), number, part, sources, saved, shape: value.shape(), dtype: value.dtype(), types, padding }
    }

    /// The inputs that it uses. Of an operation on several parts of the samples the first part counts, which comes last
    /// in backward.
    fn uses(&self) -> &[Source] {
        if self.part == 0 { &self.sources } else { &[] }
    }

    fn has_param(&self) -> bool {
        self.sources.iter().any(|source| matches!(source, Source::Param(_)))
    }
}

impl Tape {
    /// Runs backward from the losses of samples (f64): from their mean over all terms of the batch, or their sum times
    /// a factor, as `normaliser` says.
    ///
    /// On every axis they must be `Invariant`, or add up over the ranks: `Shard` (other samples on each) or `Partial`.
    /// `Replicate` losses are refused, because each rank would add its own copy of the same gradient.
    ///
    /// [Auxiliary losses](Self::add_loss) that nobody [took](Self::take_notes) are trained too: each by its coefficient
    /// and the mean over the samples of the batch, which are [the samples of each rank](super::Position::rank_samples)
    /// times the data-parallel degree.
    ///
    /// # Errors
    /// Auxiliary losses on a tape whose position does not say how many samples a rank has, or with
    /// [`Normaliser::Scale`], which does not say what part of it is a mean; statistics that nobody took.
    pub fn backward_from_loss(
        &self,
        loss: &Var,
        normaliser: Normaliser,
        weights: Weights,
        sink: &mut dyn GradSink,
    ) -> Result<()> {
        let seed = self.loss_seed(loss, normaliser)?;
        let auxiliary = self.auxiliary_roots(normaliser)?;
        self.require_output(loss)?;
        let roots = auxiliary.iter().map(|(value, seed)| (value, seed.clone()));
        self.walk([(loss, seed)].into_iter().chain(roots).collect(), weights, sink)
    }

    /// Runs backward from `output`, whose gradient is `seed` and has the duals of its types, once. Saved tensors are
    /// freed as they are used. Gradients of parameters go to `sink`; [`take_grad`](Self::take_grad) returns those of
    /// inputs.
    pub fn backward(
        &self,
        output: &Var,
        seed: impl Into<Seed>,
        weights: Weights,
        sink: &mut dyn GradSink,
    ) -> Result<()> {
        self.require_output(output)?;
        self.backward_from(vec![(output, seed.into())], weights, sink)
    }

    fn require_output(&self, output: &Var) -> Result<()> {
        output.require_unpadded("backward", "the output")?;
        match output.source().takes_gradient() {
            true => Ok(()),
            false => Err(Error::Backward("the output depends on nothing that needs a gradient".to_owned())),
        }
    }

    /// Runs backward from several values at once: an output and auxiliary losses. Roots that do not depend on anything
    /// that needs a gradient are skipped; without roots this does nothing.
    ///
    /// # Errors
    /// [Notes](Self::take_notes) that nobody took: auxiliary losses, which are roots, and statistics.
    pub fn backward_from(&self, roots: Vec<(&Var, Seed)>, weights: Weights, sink: &mut dyn GradSink) -> Result<()> {
        self.require_taken()?;
        self.walk(roots, weights, sink)
    }

    fn walk(&self, roots: Vec<(&Var, Seed)>, weights: Weights, sink: &mut dyn GradSink) -> Result<()> {
        self.require_taken_statistics()?;
        for (output, seed) in &roots {
            self.require_own("backward", "output", output)?;
            seed.require_gradient_of(output)?;
        }
        let inner = &*self.inner;
        if inner.ran_backward.replace(true) {
            return Err(Error::Backward("this tape has already been walked".to_owned()));
        }
        let mut nodes = inner.nodes.borrow_mut();
        let mut uses = Uses::new(nodes.iter().flat_map(Node::uses));
        let mut grads: Vec<Option<Tensor>> = vec![None; nodes.len()];
        for (output, seed) in roots {
            if let Source::Node(root) = output.source() {
                grads[root] = Some(match grads[root].take() {
                    None => seed.tensor,
                    Some(sum) => sum.accumulate(&seed.tensor)?,
                });
            }
        }
        let canonical = self.reduction_blocks().is_some();
        let mut given = vec![false; nodes.len()];
        for at in (0..nodes.len()).rev() {
            inner.rank.heartbeat();
            let Some(grad) = grads[at].take() else {
                // No gradient flows here, so its parameters get no share from it.
                nodes[at].saved = Rc::default();
                uses.mark_done(nodes[at].uses(), sink)?;
                continue;
            };
            let deferred = weights == Weights::Deferred && nodes[at].has_param();
            let Node { op, sources, saved, .. } = &mut nodes[at];
            let Some(op) = op else {
                inner.grads.borrow_mut().insert(at, grad);
                continue;
            };
            if deferred {
                inner.deferred.borrow_mut().push((at, grad.clone()));
            }
            let (name, params) = (op.name(), weights == Weights::Now);
            let (input_grads, summed) = {
                let (tape, sink, uses, grads) = (self, &mut *sink, &uses, &mut grads[..]);
                let (values, summed, written) = (true, Vec::new(), Vec::new());
                let cx =
                    Backward { op: name, tape, sink, saved, sources, grads, at, uses, params, values, summed, written };
                cx.run(&**op, grad)?
            };
            for (slot, input_grad) in input_grads.into_iter().enumerate() {
                let Some(input_grad) = input_grad else { continue };
                let input_grad = self.fitted(&nodes, (at, slot), input_grad)?;
                match nodes[at].sources[slot] {
                    Source::Constant | Source::Unrecorded | Source::Frozen(_) => {}
                    Source::Param(id) => sink.accumulate(&self.whole(id, name)?, input_grad)?,
                    Source::Node(from) => {
                        let again = std::mem::replace(&mut given[from], true);
                        if canonical && again && nodes[from].types.iter().any(|(_, ty)| ty == Ty::Replicate) {
                            return Err(Error::NotCanonical {
                                op: name,
                                problem: "it reads a Replicate value that another operation reads too, and each rank would add up its \
                                          shares of both gradients before the ranks' are",
                                valid: "a copy or all_gather for each of them",
                            });
                        }
                        // The operation asked for a sum that something else holds (as deferred gradients of weights
                        // do), so it returned only its share. An observer should still see the same values.
                        let input_grad = match grads[from].take_if(|_| summed.contains(&slot)) {
                            Some(sum) => sum.accumulate(&input_grad)?,
                            None => input_grad,
                        };
                        let input_grad = match inner.observer.get() {
                            None => input_grad,
                            Some(observers) => self.show_gradient(observers, &nodes, (at, slot, from), input_grad)?,
                        };
                        grads[from] = Some(match grads[from].take() {
                            None => input_grad,
                            Some(sum) => sum.accumulate(&input_grad)?,
                        });
                    }
                }
            }
            if !deferred {
                nodes[at].saved = Rc::default();
                uses.mark_done(nodes[at].uses(), sink)?;
            }
        }
        Ok(())
    }

    /// Shows an observer the gradient that node `at` returned for its input `slot`, which node `from` made. Returns the
    /// gradient to use.
    fn show_gradient(
        &self,
        observers: &Observers,
        nodes: &[Node],
        (at, slot, from): (usize, usize, usize),
        tensor: Tensor,
    ) -> Result<Tensor> {
        let Node { op: Some(op), number, part, sources, .. } = &nodes[at] else { return Ok(tensor) };
        let maker = &nodes[from];
        let seen = Seen {
            op: op.name(),
            number: *number,
            part: *part,
            operand: op.operands().get(slot).copied(),
            makers: &[maker.op.is_some().then_some(maker.number)],
            params: &self.param_names(sources.iter().copied()),
            inputs: &[],
            scalars: &[],
            tokens: &[],
            position: self.inner.position,
            types: maker.types.dual(),
            padding: &maker.padding,
            tensor: &tensor,
        };
        Ok(observers.see(&seen)?.unwrap_or(tensor.clone()))
    }

    /// Whether gradients of weights are still to be computed.
    pub(crate) fn defers_gradients(&self) -> bool {
        !self.inner.deferred.borrow().is_empty()
    }

    /// Computes the parameter gradients that a [`Weights::Deferred`] backward deferred, in the same order.
    pub fn weight_gradients(&self, sink: &mut dyn GradSink) -> Result<()> {
        let inner = &*self.inner;
        let mut nodes = inner.nodes.borrow_mut();
        let deferred = inner.deferred.take();
        let mut uses = Uses::new(deferred.iter().flat_map(|(at, _)| nodes[*at].uses()));
        for (at, grad) in deferred {
            inner.rank.heartbeat();
            let Node { op, sources, saved, .. } = &mut nodes[at];
            let Some(op) = op else { continue };
            let name = op.name();
            let (input_grads, _) = {
                let (tape, sink, uses, grads) = (self, &mut *sink, &uses, &mut [][..]);
                let (params, values, summed, written) = (true, false, Vec::new(), Vec::new());
                let cx =
                    Backward { op: name, tape, sink, saved, sources, grads, at, uses, params, values, summed, written };
                cx.run(&**op, grad)?
            };
            for (slot, input_grad) in input_grads.into_iter().enumerate() {
                if let (Source::Param(id), Some(input_grad)) = (nodes[at].sources[slot], input_grad) {
                    let input_grad = self.fitted(&nodes, (at, slot), input_grad)?;
                    sink.accumulate(&self.whole(id, name)?, input_grad)?;
                }
            }
            nodes[at].saved = Rc::default();
            uses.mark_done(nodes[at].uses(), sink)?;
        }
        Ok(())
    }

    /// The gradient that node `at` gave of its input `slot`, which must have the shape and dtype of the input. A matmul
    /// operand in 16 bits has a gradient in f32. In a model of 16 bits sums over rows come in f32: the sum of a value
    /// is rounded here, the sum of a parameter is added up in the type of its memory.
    fn fitted(&self, nodes: &[Node], (at, slot): (usize, usize), grad: Tensor) -> Result<Tensor> {
        let Node { op: Some(op), sources, .. } = &nodes[at] else { return Ok(grad) };
        let declarations = self.inner.params.declarations();
        let (shape, dtype) = match sources[slot] {
            Source::Node(from) => (nodes[from].shape, nodes[from].dtype),
            Source::Param(id) if grad.dtype() == DType::F32 => (self.inner.params.shape(id), DType::F32),
            Source::Param(id) => (self.inner.params.shape(id), declarations.stored_dtype(id)),
            Source::Constant | Source::Unrecorded | Source::Frozen(_) => return Ok(grad),
        };
        let operand = dtype.is_half() && declarations.dtype() == DType::F32;
        // The gradient of a value that ranks use differently comes in shares.
        let shares =
            matches!(sources[slot], Source::Node(from) if nodes[from].types.dual().partial_axes().next().is_some());
        let wanted = match dtype {
            _ if operand => DType::F32,
            _ if shares => self.share_dtype(dtype),
            _ => dtype,
        };
        if (grad.shape(), grad.dtype()) == (shape, wanted) {
            return Ok(grad);
        }
        if (grad.shape(), grad.dtype()) == (shape, DType::F32) && wanted.is_half() {
            return grad.cast(wanted);
        }
        Err(Error::Gradient {
            op: op.name(),
            operand: op.operands()[slot],
            problem: format!("is {} of {:?}", grad.dtype(), grad.shape()),
            valid: format!("the operand is {dtype} of {shape:?}, and its gradient must be {wanted} of that shape"),
        })
    }

    /// The types of the gradient of a parameter: the duals of the types with which it was read.
    pub(super) fn gradient_types(&self, id: ParamId) -> Types {
        self.inner.reads.borrow().get(&id).map_or(Types::NONE, Types::dual)
    }

    /// The share of all samples on this tape: an operation that returned a gradient says nothing about its samples.
    fn whole(&self, id: ParamId, op: &str) -> Result<GradShard> {
        let name = || &self.inner.params.declarations().spec(id).name;
        match self.reduction_blocks() {
            None => Ok(GradShard { id, types: self.gradient_types(id), samples: 0..0, copies: 0..1, of: 1 }),
            Some(_) => Err(Error::Backward(format!(
                "{op} gave a gradient of {} summed over all samples, and in canonical numerics their order must not depend \
                 on the mesh: give it by write_grad or sum_blocks",
                name()
            ))),
        }
    }

    /// The gradient of a value made by [`Tape::input`] of this tape, once backward has run.
    pub fn take_grad(&self, input: &Var) -> Option<Tensor> {
        match input.source() {
            Source::Node(at) if Rc::ptr_eq(&self.inner, &input.tape().inner) => {
                self.inner.grads.borrow_mut().remove(&at)
            }
            _ => None,
        }
    }
}
