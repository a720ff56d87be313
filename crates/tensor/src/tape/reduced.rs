//! Saved tensors in 16 bits (delayed precision reduction: Gist, Jain et al. 2018, section 4.3). Forward computes with the values in f32. What it
//! keeps for backward is rounded once, and backward reads the rounded values.

use super::hooks::{Saved, SavedPolicy, SavedTensor};
use crate::error::Result;
use crate::shape::Shape;
use crate::tensor::Tensor;
use meshwork_core::{Buffer, DType, Memory};
use std::cell::RefCell;
use std::ptr;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Weak as WeakArc};

/// Types of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HalfType {
    /// bfloat16: 8 bits of precision, in the range of f32.
    Bf16,
    /// IEEE: 11 bits of precision, and infinity from 65,520 on.
    F16,
}

impl HalfType {
    /// The type of buffers.
    pub fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::Bf16,
            Self::F16 => DType::F16,
        }
    }
}

/// Rounds what another policy then keeps. A tensor that several operations save is rounded once. Tensors that are no f32, and those that an
/// operation saves [exactly](super::Forward::save_exact), stay as they are.
///
/// Each element is rounded by itself, and nothing is computed again from rounded values. So the numbers of a run depend neither on its mesh nor on
/// where it is cut into segments that are recomputed.
#[derive(Debug)]
pub struct Reduced {
    policy: Rc<dyn SavedPolicy>,
    to: HalfType,
    known: RefCell<Vec<(Elements, Weak<Rounded>)>>,
}

/// Elements in memory. While this exists, nothing else gets the address of that memory, and nothing writes it.
#[derive(Debug)]
struct Elements {
    memory: WeakArc<dyn Memory>,
    first: usize,
    count: usize,
}

impl Elements {
    fn of(buffer: &Buffer) -> Self {
        Self { memory: Arc::downgrade(buffer.memory()), first: buffer.offset(), count: buffer.count() }
    }

    fn are_those_of(&self, buffer: &Buffer) -> bool {
        ptr::addr_eq(self.memory.as_ptr(), Arc::as_ptr(buffer.memory()))
            && (self.first, self.count) == (buffer.offset(), buffer.count())
    }
}

#[derive(Debug)]
struct Rounded(Saved);

/// A rounded tensor as an operation holds it.
#[derive(Debug)]
struct Handle {
    rounded: Rc<Rounded>,
    shape: Shape,
}

impl SavedTensor for Handle {
    fn restore(&self) -> Result<Tensor> {
        let rounded = self.rounded.0.restore()?;
        let exact = rounded.device().pointwise()?.cast(rounded.buffer(), DType::F32)?;
        Tensor::from_buffer(rounded.device(), exact, self.shape)
    }
}

impl Reduced {
    /// Rounds to `to` what `policy` keeps.
    pub fn new(policy: Rc<dyn SavedPolicy>, to: HalfType) -> Self {
        Self { policy, to, known: RefCell::default() }
    }
}

impl SavedPolicy for Reduced {
    fn save(&self, op: &'static str, tensor: Tensor) -> Result<Saved> {
        if tensor.dtype() != DType::F32 {
            return self.policy.save(op, tensor);
        }
        let mut known = self.known.borrow_mut();
        known.retain(|(_, rounded)| rounded.strong_count() > 0);
        let same = known.iter().find(|(elements, _)| elements.are_those_of(tensor.buffer()));
        let rounded = match same.and_then(|(_, rounded)| rounded.upgrade()) {
            Some(rounded) => rounded,
            None => {
                let cast = tensor.device().pointwise()?.cast(tensor.buffer(), self.to.dtype())?;
                let cast = Tensor::from_buffer(tensor.device(), cast, [tensor.count()])?;
                let rounded = Rc::new(Rounded(self.policy.save(op, cast)?));
                known.push((Elements::of(tensor.buffer()), Rc::downgrade(&rounded)));
                rounded
            }
        };
        Ok(Saved::Packed(Box::new(Handle { rounded, shape: tensor.shape() })))
    }

    fn save_exact(&self, op: &'static str, tensor: Tensor) -> Result<Saved> {
        self.policy.save_exact(op, tensor)
    }

    /// Nothing: what is computed from rounded values is not what forward had.
    fn recomputes(&self) -> bool {
        false
    }
}
