//! The backward pass of a tape.

use super::hooks::{GradSink, Observer, Saved, Seen, Weights};
use super::op::{Backward, Op};
use super::reduction_blocks::GradShard;
use super::uses::Uses;
use super::{Source, Tape, Var, replaced};
use crate::error::{Error, Result};
use crate::param::ParamId;
use crate::shape::Shape;
use crate::tensor::Tensor;
use meshwork_core::{SpmdError, Ty, Types};
use std::rc::Rc;

/// One recorded operation, or an input.
#[derive(Debug)]
pub(super) struct Node {
    /// `None` for an input.
    op: Option<Box<dyn Op>>,
    /// Number of operations applied before it.
    number: usize,
    sources: Vec<Source>,
    /// Shared with the recipe of the result.
    saved: Rc<[Saved]>,
    /// Shape of the value that it made.
    shape: Shape,
    types: Types,
}

impl Node {
    pub(super) fn input(shape: Shape, types: Types) -> Self {
        Self { op: None, number: 0, sources: Vec::new(), saved: Rc::default(), shape, types }
    }

    pub(super) fn operation(
        op: Box<dyn Op>,
        number: usize,
        sources: Vec<Source>,
        saved: Rc<[Saved]>,
        shape: Shape,
        types: Types,
    ) -> Self {
        Self { op: Some(op), number, sources, saved, shape, types }
    }

    fn has_param(&self) -> bool {
        self.sources.iter().any(|source| matches!(source, Source::Param(_)))
    }
}

impl Tape {
    /// Runs backward from the losses of samples (f64), whose gradients are `scale` on every rank: 1 / N for the mean over N
    /// tokens.
    ///
    /// On every axis they must be `Invariant`, or add up over the ranks: `Shard` (other samples on each) or `Partial`.
    /// `Replicate` losses are refused, because each rank would add its own copy of the same gradient.
    pub fn backward_from_loss(&self, loss: &Var, scale: f64, weights: Weights, sink: &mut dyn GradSink) -> Result<()> {
        self.backward(loss, self.loss_seed(loss, scale)?, weights, sink)
    }

    /// The gradient from which [`backward_from_loss`](Self::backward_from_loss) starts, refused for the same types.
    pub fn loss_seed(&self, loss: &Var, scale: f64) -> Result<Tensor> {
        if let Some((axis, ty)) = loss.types().iter().find(|(_, ty)| matches!(ty, Ty::Replicate | Ty::Varying)) {
            return Err(SpmdError {
                op: "backward_from_loss".to_owned(),
                axis,
                problem: format!("the loss is {ty}: each rank would add a gradient of its own"),
                fix:
                    "end in a loss that is Invariant or Partial: gather with all_gather_invariant, sum with all_reduce"
                        .to_owned(),
            }
            .into());
        }
        Tensor::from_slice(self.device(), &vec![scale; loss.shape().count()], loss.shape())
    }

    /// Runs backward from `output`, whose gradient is `seed` and has the duals of its types, once. Saved tensors are
    /// freed as they are used. Gradients of parameters go to `sink`; [`take_grad`](Self::take_grad) returns those of
    /// inputs.
    pub fn backward(&self, output: &Var, seed: Tensor, weights: Weights, sink: &mut dyn GradSink) -> Result<()> {
        if !output.source().takes_gradient() {
            return Err(Error::Backward("the output depends on nothing that needs a gradient".to_owned()));
        }
        self.backward_from(vec![(output, seed)], weights, sink)
    }

    /// Runs backward from several values at once: an output and auxiliary losses. Roots that do not depend on anything
    /// that needs a gradient are skipped; without roots this does nothing.
    pub fn backward_from(&self, roots: Vec<(&Var, Tensor)>, weights: Weights, sink: &mut dyn GradSink) -> Result<()> {
        let inner = &*self.inner;
        if inner.ran_backward.replace(true) {
            return Err(Error::Backward("this tape has already been walked".to_owned()));
        }
        let mut nodes = inner.nodes.borrow_mut();
        let mut uses = Uses::of(nodes.iter().flat_map(|node| &node.sources));
        let mut grads: Vec<Option<Tensor>> = vec![None; nodes.len()];
        for (output, seed) in roots {
            if seed.shape() != output.shape() {
                return Err(Error::Shape {
                    op: "backward",
                    problem: "the seed is the gradient of the output and has its shape".to_owned(),
                    shapes: vec![seed.shape().to_vec(), output.shape().to_vec()],
                });
            }
            if let Source::Node(root) = output.source() {
                grads[root] = Some(match grads[root].take() {
                    None => seed,
                    Some(sum) => sum.accumulate(&seed)?,
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
                uses.mark_done(&nodes[at].sources, sink)?;
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
            let params = weights == Weights::Now;
            let grads_so_far = &mut grads[..];
            let mut cx = Backward {
                tape: self,
                sink: &mut *sink,
                saved,
                sources,
                grads: grads_so_far,
                at,
                uses: &uses,
                params,
                values: true,
                summed: Vec::new(),
            };
            let name = op.name();
            let input_grads = op.backward(&mut cx, grad).map_err(|error| error.during(name))?;
            let summed = cx.summed;
            for (slot, input_grad) in input_grads.into_iter().enumerate() {
                let Some(input_grad) = input_grad else { continue };
                match nodes[at].sources[slot] {
                    Source::Constant | Source::Frozen(_) => {}
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
                            Some(observer) => self.show_gradient(&**observer, &nodes, (at, slot, from), input_grad)?,
                        };
                        debug_assert_eq!(input_grad.shape(), nodes[from].shape, "gradient has the value's shape");
                        grads[from] = Some(match grads[from].take() {
                            None => input_grad,
                            Some(sum) => sum.accumulate(&input_grad)?,
                        });
                    }
                }
            }
            if !deferred {
                nodes[at].saved = Rc::default();
                uses.mark_done(&nodes[at].sources, sink)?;
            }
        }
        Ok(())
    }

    /// Shows an observer the gradient that node `at` returned for its input `slot`, which node `from` made. Returns the
    /// gradient to use.
    fn show_gradient(
        &self,
        observer: &dyn Observer,
        nodes: &[Node],
        (at, slot, from): (usize, usize, usize),
        tensor: Tensor,
    ) -> Result<Tensor> {
        let Node { op: Some(op), number, sources, .. } = &nodes[at] else { return Ok(tensor) };
        let maker = &nodes[from];
        let seen = Seen {
            op: op.name(),
            number: *number,
            operand: op.operands().get(slot).copied(),
            maker: maker.op.is_some().then_some(maker.number),
            params: &self.param_names(sources.iter().copied()),
            inputs: &[],
            position: self.inner.position,
            types: maker.types.dual(),
            tensor: &tensor,
        };
        replaced(&seen, observer.see(&seen)?)
    }

    /// Computes the parameter gradients that a [`Weights::Deferred`] backward deferred, in the same order.
    pub fn weight_gradients(&self, sink: &mut dyn GradSink) -> Result<()> {
        let inner = &*self.inner;
        let mut nodes = inner.nodes.borrow_mut();
        let deferred = inner.deferred.take();
        let mut uses = Uses::of(deferred.iter().flat_map(|(at, _)| &nodes[*at].sources));
        for (at, grad) in deferred {
            inner.rank.heartbeat();
            let Node { op, sources, saved, .. } = &mut nodes[at];
            let Some(op) = op else { continue };
            let mut cx = Backward {
                tape: self,
                sink: &mut *sink,
                saved,
                sources,
                grads: &mut [],
                at,
                uses: &uses,
                params: true,
                values: false,
                summed: Vec::new(),
            };
            let input_grads = op.backward(&mut cx, grad).map_err(|error| error.during(op.name()))?;
            for (source, input_grad) in sources.iter().zip(input_grads) {
                if let (Source::Param(id), Some(input_grad)) = (source, input_grad) {
                    sink.accumulate(&self.whole(*id, op.name())?, input_grad)?;
                }
            }
            nodes[at].saved = Rc::default();
            uses.mark_done(&nodes[at].sources, sink)?;
        }
        Ok(())
    }

    /// The share of all samples on this tape. An operation that returns a gradient does not tell its samples apart.
    fn whole(&self, id: ParamId, op: &str) -> Result<GradShard> {
        let name = || &self.inner.params.declarations().spec(id).name;
        match self.reduction_blocks() {
            None => Ok(GradShard { id, samples: 0..0, copies: 0..1, of: 1 }),
            Some(_) => Err(Error::Backward(format!(
                "{op} gave a gradient of {} summed over all samples, and in canonical numerics their order must not depend \
                 on the mesh: give it by write_grad or sum_blocks",
                name()
            ))),
        }
    }

    /// The gradient of a value made by [`Tape::input`], once backward has run.
    pub fn take_grad(&self, input: &Var) -> Option<Tensor> {
        match input.source() {
            Source::Node(at) => self.inner.grads.borrow_mut().remove(&at),
            _ => None,
        }
    }
}
