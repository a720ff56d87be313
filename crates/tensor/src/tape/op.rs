//! The trait of operations.

use super::hooks::{Make, Observers, ReadAgain, Recipe};
use super::padding::Padded;
use super::prelude::*;
use super::uses::Uses;
use crate::param::Params;
use meshwork_core::rules::Operand;
use std::fmt::{Debug, Display};

/// An operation with forward, backward and SPMD rule. A crate adds its own by implementing this and calling
/// [`Tape::apply`](super::Tape::apply). If backward needs only inputs and result, [`Tape::custom`](super::Tape::custom)
/// makes one from closures; for a function of one number, use [`Var::map`].
pub trait Op: Debug {
    /// Its name, in errors and profiles.
    fn name(&self) -> &'static str;

    /// The names of its operands, one each.
    fn operands(&self) -> &'static [&'static str] {
        &["x"]
    }

    /// The types of the result, or a refusal. Reads of parameters have been resolved.
    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError>;

    /// Whether it must be given values, and no [matmul operands](crate::Device::operand_dtype): its kernels take
    /// tensors of 16 bits, and would take an operand that is stored so for one.
    fn reads_values(&self) -> bool {
        false
    }

    /// Whether forward and backward only move elements, as a transpose does, or sum them over ranks. In canonical
    /// numerics the result of any other operation must not be `Replicate`: its gradient comes in one share per rank,
    /// and backward would round each share before they are added up.
    fn only_moves(&self) -> bool {
        false
    }

    /// Its result on operands whose shards are padded with zeros, because the degree does not divide their extent.
    fn padded(&self) -> Padded {
        Padded::Refused
    }

    /// The numbers that it computes with beside its operands, by name: a factor, an epsilon, the key of a mask. They
    /// are the same on every mesh as on one rank; a trainer refuses an operation whose numbers differ.
    fn scalars(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// The tokens at the places that this rank has of a sequence, in runs, if the operation knows the order in which
    /// tokens lie before axes of [context parallelism](meshwork_core::Axis::CONTEXT) cut it.
    fn tokens(&self, _tape: &Tape) -> Vec<Range<usize>> {
        Vec::new()
    }

    /// Computes the result, and saves the tensors that backward needs.
    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor>;

    /// The gradients of the inputs that [`Backward::needs`] asks for, at least one; `None` for the others. With
    /// deferred weight gradients it may be called twice, with different needs.
    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>>;
}

/// The context of an operation in forward.
pub struct Forward<'a> {
    tape: &'a Tape,
    op: &'static str,
    types: Types,
    inputs: &'a [&'a Var],
    records: bool,
    saved: Vec<Saved>,
    again: Again,
}

/// How the result is available again in backward.
enum Again {
    /// It must be kept.
    Kept,
    /// Like the input with this index.
    SameAs(usize),
    Made(Box<Make>),
}

impl<'a> Forward<'a> {
    pub(super) fn new(
        tape: &'a Tape,
        (op, types): (&'static str, Types),
        inputs: &'a [&'a Var],
        records: bool,
    ) -> Self {
        Self { tape, op, types, inputs, records, saved: Vec::new(), again: Again::Kept }
    }

    /// An operand in the type of the result, where the result is a share of a sum over ranks, `Partial`. In canonical
    /// numerics it is f32, for a sum that is [rounded](Var::stored) once, after its shares are added up.
    pub fn share(&self, operand: &Tensor) -> Result<Tensor> {
        match self.types.partial_axes().next() {
            Some(_) => operand.clone().cast(self.tape.share_dtype(operand.dtype())),
            None => Ok(operand.clone()),
        }
    }

    /// The type of a product with these weights: that of values, also if the weights are stored in fewer bits.
    pub fn product_dtype(&self, weights: &Tensor) -> DType {
        let values = self.tape.params().declarations().dtype();
        if weights.dtype().is_half() { values } else { weights.dtype() }
    }

    /// Keeps a tensor for backward, where `cx.saved(i)` returns the i-th saved one.
    pub fn save(&mut self, tensor: &Tensor) -> Result<()> {
        if self.records {
            self.saved.push(self.tape.save(self.op, tensor.clone())?);
        }
        Ok(())
    }

    /// The same for a tensor that no policy may round.
    pub fn save_exact(&mut self, tensor: &Tensor) -> Result<()> {
        if self.records {
            self.saved.push(self.tape.inner.policy.save_exact(self.op, tensor.clone())?);
        }
        Ok(())
    }

    /// Keeps input `i`, as [`save`](Self::save) does. If the input has a recipe, the recipe is kept instead. A
    /// parameter is held anyway, whatever the policy; one that is not whole here, or is packed, is gathered or restored
    /// again for backward, and the memory of its numbers is free until then.
    pub fn save_input(&mut self, i: usize) -> Result<()> {
        let input = self.inputs[i];
        let params = &self.tape.inner.params;
        if let Source::Param(id) | Source::Frozen(id) = input.source {
            if self.records {
                self.saved.push(match params.is_kept(id) {
                    true => Saved::Kept(input.tensor.clone()),
                    false => {
                        let as_stored = input.tensor.dtype() != params.declarations().dtype();
                        let read = if as_stored { Params::matrix } else { Params::value };
                        Saved::Packed(Box::new(ReadAgain { params: params.clone(), id, read }))
                    }
                });
            }
            return Ok(());
        }
        match &input.recipe {
            Some(recipe) if self.records => self.saved.push(Saved::Packed(Box::new(Rc::clone(recipe)))),
            Some(_) => {}
            None => self.save(&input.tensor)?,
        }
        Ok(())
    }

    /// Keeps input `i` as [`save_input`](Self::save_input) does, for the gradient of input `of` alone: nothing where
    /// that takes none, as a frozen weight. Then `cx.saved(..)` of it is an error.
    pub fn save_input_for(&mut self, i: usize, of: usize) -> Result<()> {
        if self.inputs[of].source.takes_gradient() {
            return self.save_input(i);
        }
        if self.records {
            self.saved.push(Saved::Taken);
        }
        Ok(())
    }

    /// Whether a [recipe](Self::recipe) would be used: tensors that it alone needs are saved only then.
    pub fn recomputes(&self) -> bool {
        self.records && self.tape.inner.policy.recomputes()
    }

    /// Sets the recipe of the result: how to recompute it, bit for bit, from the tensors that this operation saves
    /// anyway. With a policy that [recomputes](super::SavedPolicy::recomputes), operations that need the result in
    /// backward do not keep it, but recompute it when they need it. For results that take a pass over memory or two: a
    /// norm, an activation.
    pub fn recipe(&mut self, make: impl Fn(&[Saved]) -> Result<Tensor> + 'static) {
        if self.tape.inner.policy.recomputes() {
            self.again = Again::Made(Box::new(make));
        }
    }

    /// The result is input `i` itself, and has the same recipe.
    pub fn same_as(&mut self, i: usize) {
        self.again = Again::SameAs(i);
    }

    /// The tape.
    pub fn tape(&self) -> &Tape {
        self.tape
    }

    /// Refuses operands whose shapes do not fit.
    pub fn require(&self, fits: bool, problem: impl Display) -> Result<()> {
        if fits {
            return Ok(());
        }
        let shapes = self.inputs.iter().map(|input| input.tensor.shape().to_vec()).collect();
        Err(Error::Shape { op: self.op, problem: problem.to_string(), shapes })
    }

    /// The saved tensors, and the recipe of the result.
    pub(super) fn finish(self) -> (Rc<[Saved]>, Option<Rc<Recipe>>) {
        let saved: Rc<[Saved]> = self.saved.into();
        let recipe = match self.again {
            Again::Made(make) if self.records => Some(Rc::new(Recipe { saved: Rc::clone(&saved), make })),
            Again::SameAs(i) => self.inputs[i].recipe.clone(),
            _ => None,
        };
        (saved, recipe)
    }
}

/// The context of an operation in backward.
pub struct Backward<'a> {
    /// The operation.
    pub(super) op: &'static str,
    pub(super) tape: &'a Tape,
    pub(super) sink: &'a mut dyn GradSink,
    pub(super) saved: &'a mut Rc<[Saved]>,
    pub(super) sources: &'a [Source],
    /// The gradients of all values on the tape, as far as they are summed up.
    pub(super) grads: &'a mut [Option<Tensor>],
    /// The index of the value that this operation made.
    pub(super) at: usize,
    pub(super) uses: &'a Uses,
    /// The kinds of inputs whose gradients this call computes.
    pub(super) params: bool,
    pub(super) values: bool,
    /// Inputs whose sum was taken.
    pub(super) summed: Vec<usize>,
    /// Inputs whose gradient was written where it is kept.
    pub(super) written: Vec<usize>,
}

impl Backward<'_> {
    /// Whether the gradient of input `i` is needed now.
    pub fn needs(&self, i: usize) -> bool {
        match self.sources[i] {
            Source::Constant | Source::Unrecorded | Source::Frozen(_) => false,
            Source::Param(_) => self.params,
            Source::Node(_) => self.values,
        }
    }

    /// The gradients that an operation gives where any is needed, and the inputs whose sum they contain.
    pub(super) fn run(mut self, op: &dyn Op, grad: Tensor) -> Result<(Vec<Option<Tensor>>, Vec<usize>)> {
        if !(0..self.sources.len()).any(|input| self.needs(input)) {
            return Ok((Vec::new(), Vec::new()));
        }
        let gradients = op.backward(&mut self, grad).map_err(|error| error.during(self.op))?;
        Ok((self.checked(op, gradients)?, self.summed))
    }

    /// The gradients that an operation gave, without those that were not asked for; an error if one is missing.
    fn checked(&self, op: &dyn Op, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let operands = op.operands();
        let refuse = |slot: usize, problem: String, valid: &str| {
            let operand = operands.get(slot).copied().unwrap_or("an operand");
            Err(Error::Gradient { op: op.name(), operand, problem, valid: valid.to_owned() })
        };
        if gradients.len() != operands.len() {
            let (slot, given) = (gradients.len().min(operands.len()), gradients.len());
            let problem = format!("is one of {}, and backward gave {given}", operands.len());
            return refuse(slot, problem, "backward gives one gradient, or None, for each operand");
        }
        let wanted = |slot| self.needs(slot);
        match gradients
            .iter()
            .enumerate()
            .position(|(slot, given)| wanted(slot) && given.is_none() && !self.written.contains(&slot))
        {
            Some(slot) => refuse(
                slot,
                "is missing".to_owned(),
                "backward gives the gradient of each operand that needs one (Backward::needs), a zero tensor if nothing flows",
            ),
            None => Ok(gradients.into_iter().enumerate().map(|(slot, given)| given.filter(|_| wanted(slot))).collect()),
        }
    }

    /// Whether a gradient flows to the value that the operation right before this one made: if both read the same
    /// value, every operation that reads it has then run backward.
    pub(crate) fn flows_before(&self) -> bool {
        self.at.checked_sub(1).and_then(|before| self.grads.get(before)).is_some_and(Option::is_some)
    }

    /// The gradient of input `i` is a part of the gradient that an operation returns later.
    pub(crate) fn leave_to_later(&mut self, i: usize) {
        self.written.push(i);
    }

    /// An operand of the gradient of a value, in the type of the shares of a sum over ranks: see [`Forward::share`].
    pub fn share(&self, operand: Tensor) -> Result<Tensor> {
        let dtype = self.tape.share_dtype(operand.dtype());
        operand.cast(dtype)
    }

    /// The i-th tensor that forward saved.
    pub fn saved(&self, i: usize) -> Result<Tensor> {
        self.saved[i].restore()
    }

    /// Takes the i-th tensor that forward saved: its memory can be written if nothing else holds it. An operation with
    /// parameters, whose backward may run twice, must [replace it](Self::replace_saved).
    pub fn take_saved(&mut self, i: usize) -> Result<Tensor> {
        let Some(saved) = Rc::get_mut(self.saved) else { return self.saved[i].restore() };
        match std::mem::replace(&mut saved[i], Saved::Taken) {
            Saved::Kept(tensor) => Ok(tensor),
            other => other.restore(),
        }
    }

    /// Replaces the i-th tensor that forward saved by one that was [taken](Self::take_saved) and changed, for the
    /// second call for deferred gradients of weights. Returns whether that was possible; it is not if a recipe still
    /// needs the saved tensor.
    pub fn replace_saved(&mut self, i: usize, tensor: Tensor) -> bool {
        let Some(saved) = Rc::get_mut(self.saved) else { return false };
        saved[i] = Saved::Kept(tensor);
        true
    }

    /// The sum of the gradients of other uses of input `i` so far, in memory that nothing else holds. An operation that
    /// adds its own share in the pass that computes it returns sum + share, element by element, as the gradient of the
    /// input. If this is `None`, the operation returns only its share, and the tape adds it.
    pub fn take_sum(&mut self, i: usize) -> Option<Tensor> {
        match self.sources[i] {
            Source::Node(from) if self.values => {
                self.summed.push(i);
                // In 16 bits sum + share is rounded once where the operation adds, twice where the tape does. Whether
                // something else holds the sum depends on the schedule; in canonical numerics the tape always adds.
                let rounds_alike = |sum: &Tensor| self.tape.share_dtype(sum.dtype()) == sum.dtype();
                self.grads[from].take_if(|sum| sum.buffer().is_unique() && rounds_alike(sum))
            }
            _ => None,
        }
    }

    /// Whether an observer [compares meshes](super::Observer::compares_meshes).
    pub fn is_compared(&self) -> bool {
        self.tape.inner.observer.get().is_some_and(Observers::compare_meshes)
    }

    /// The tape.
    pub fn tape(&self) -> &Tape {
        self.tape
    }
}
