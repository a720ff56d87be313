//! Saved tensors in another form (Gist, Jain et al. 2018). Forward computes with the values as they are; what it keeps
//! for backward is encoded once and decoded when backward reads it.
//!
//! | encoding | what is kept | what backward reads |
//! |---|---|---|
//! | [`Encoding::Half`], delayed precision reduction (section 4.3) | 16 bits of each element | rounded values |
//! | [`Encoding::Sparse`], sparse storage and dense compute (section 4.2) | a bit of each element, and the elements that are not zero | the same bits |

use super::hooks::{SavedPolicy, SavedTensor};
use super::prelude::*;
use meshwork_core::Memory;
use std::ptr;
use std::rc::Weak;
use std::sync::Weak as WeakArc;

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

/// A form in which saved tensors are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// Rounds tensors of f32. Each element is rounded by itself, and nothing is computed again from rounded values. So
    /// the numbers of a run depend neither on its mesh nor on where it is cut into segments that are recomputed.
    Half(HalfType),
    /// Leaves out the zeros of tensors of floats, where that takes less memory
    /// ([`Layout::pack_nonzeros`](crate::kernel::Layout::pack_nonzeros)). Outputs of ReLU and of max pooling behind it
    /// are about half zeros. Lossless.
    Sparse,
}

impl Encoding {
    fn takes(self, dtype: DType) -> bool {
        match self {
            Self::Half(_) => dtype == DType::F32,
            Self::Sparse => dtype == DType::F32 || dtype.is_half(),
        }
    }

    /// The parts that are kept of a tensor, each with one dim.
    fn encode(self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let (device, x) = (tensor.device(), tensor.buffer());
        let part = |buffer: Buffer| {
            let count = buffer.count();
            Tensor::from_buffer(device, buffer, [count])
        };
        match self {
            Self::Half(to) => Ok(vec![part(device.pointwise()?.cast(x, to.dtype())?)?]),
            Self::Sparse => match device.layout()?.pack_nonzeros(x)? {
                Some([bits, values]) => Ok(vec![part(bits)?, part(values)?]),
                None => Ok(vec![part(x.clone())?]),
            },
        }
    }

    /// The elements, from the parts.
    fn decode(self, parts: &[Tensor], count: usize) -> Result<Buffer> {
        match (self, parts) {
            (Self::Half(_), [rounded, ..]) => rounded.device().pointwise()?.cast(rounded.buffer(), DType::F32),
            (Self::Sparse, [bits, values]) => {
                bits.device().layout()?.unpack_nonzeros(bits.buffer(), values.buffer(), count)
            }
            (_, parts) => Ok(parts.first().map_or_else(Buffer::empty, |whole| whole.buffer().clone())),
        }
    }
}

/// Encodes what another policy then keeps. A tensor that several operations save is encoded once. Tensors that an
/// encoding does not take, and tensors that an operation saves [exactly](super::Forward::save_exact), stay as they are.
#[derive(Debug)]
pub struct Encoded {
    policy: Rc<dyn SavedPolicy>,
    encoding: Encoding,
    known: RefCell<Vec<(Elements, Weak<Stored>)>>,
}

/// Elements in memory. While this exists, nothing else gets the address of that memory, and nothing writes it.
#[derive(Debug)]
struct Elements {
    memory: WeakArc<dyn Memory>,
    first: usize,
    count: usize,
}

impl Elements {
    fn new(buffer: &Buffer) -> Self {
        Self { memory: Arc::downgrade(buffer.memory()), first: buffer.offset(), count: buffer.count() }
    }

    fn are_those_of(&self, buffer: &Buffer) -> bool {
        ptr::addr_eq(self.memory.as_ptr(), Arc::as_ptr(buffer.memory()))
            && (self.first, self.count) == (buffer.offset(), buffer.count())
    }
}

/// The parts of an encoded tensor, as the policy keeps them.
#[derive(Debug)]
struct Stored(Vec<Saved>);

/// An encoded tensor as an operation holds it.
#[derive(Debug)]
struct Handle {
    stored: Rc<Stored>,
    encoding: Encoding,
    shape: Shape,
}

impl SavedTensor for Handle {
    fn restore(&self) -> Result<Tensor> {
        let parts = self.stored.0.iter().map(Saved::restore).collect::<Result<Vec<_>>>()?;
        let elements = self.encoding.decode(&parts, self.shape.count())?;
        Tensor::from_buffer(parts[0].device(), elements, self.shape)
    }
}

impl Encoded {
    /// Encodes what `policy` keeps.
    pub fn new(policy: Rc<dyn SavedPolicy>, encoding: Encoding) -> Self {
        Self { policy, encoding, known: RefCell::default() }
    }
}

impl SavedPolicy for Encoded {
    fn save(&self, op: &'static str, tensor: Tensor) -> Result<Saved> {
        if !self.encoding.takes(tensor.dtype()) {
            return self.policy.save(op, tensor);
        }
        let mut known = self.known.borrow_mut();
        known.retain(|(_, stored)| stored.strong_count() > 0);
        let same = known.iter().find(|(elements, _)| elements.are_those_of(tensor.buffer()));
        let stored = match same.and_then(|(_, stored)| stored.upgrade()) {
            Some(stored) => stored,
            None => {
                let parts = self.encoding.encode(&tensor)?.into_iter().map(|part| self.policy.save(op, part));
                let stored = Rc::new(Stored(parts.collect::<Result<_>>()?));
                known.push((Elements::new(tensor.buffer()), Rc::downgrade(&stored)));
                stored
            }
        };
        Ok(Saved::Packed(Box::new(Handle { stored, encoding: self.encoding, shape: tensor.shape() })))
    }

    fn save_exact(&self, op: &'static str, tensor: Tensor) -> Result<Saved> {
        self.policy.save_exact(op, tensor)
    }

    /// Results recomputed from rounded values differ from the results of forward.
    fn recomputes(&self) -> bool {
        match self.encoding {
            Encoding::Half(_) => false,
            Encoding::Sparse => self.policy.recomputes(),
        }
    }
}
