//! A contiguous, row-major, reference-counted array on a device.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::shape::Shape;
use meshwork_core::{Buffer, DType, Element};
use std::sync::Arc;

/// A contiguous, row-major array. Cloning shares the memory.
#[derive(Clone, Debug)]
pub struct Tensor {
    buffer: Buffer,
    shape: Shape,
    device: Arc<dyn Device>,
}

impl Tensor {
    /// A tensor over a buffer with as many elements as `shape`.
    pub fn from_buffer(device: &Arc<dyn Device>, buffer: Buffer, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.count() != buffer.count() {
            return Err(Error::Shape {
                op: "tensor",
                problem: format!("a buffer of {} elements cannot have {} of them", buffer.count(), shape.count()),
                shapes: vec![shape.to_vec()],
            });
        }
        Ok(Self { buffer, shape, device: Arc::clone(device) })
    }

    /// A tensor on `device` with the values of a host slice.
    pub fn from_slice<T: Element>(device: &Arc<dyn Device>, values: &[T], shape: impl Into<Shape>) -> Result<Self> {
        let buffer = device.upload(&Buffer::from_vec(values.to_vec()))?;
        Self::from_buffer(device, buffer, shape)
    }

    /// All zeros.
    pub fn zeros(device: &Arc<dyn Device>, dtype: DType, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        Self::from_buffer(device, device.zeros(dtype, shape.count())?, shape)
    }

    /// The values, copied to the host.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        Ok(self.device.download(&self.buffer)?.as_slice::<T>()?.to_vec())
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.buffer.dtype()
    }

    /// The number of elements.
    pub fn count(&self) -> usize {
        self.buffer.count()
    }

    /// The memory.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// The memory, for writing. Writing is an error if another tensor shares it.
    pub fn buffer_mut(&mut self) -> &mut Buffer {
        &mut self.buffer
    }

    /// The memory, taken out.
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }

    /// A shape and type without elements.
    pub(crate) fn without_memory(self) -> Self {
        Self { buffer: Buffer::zeros(self.buffer.dtype(), 0), ..self }
    }

    /// The memory, for writing in place: the tensor's own if nothing else holds it, else a copy.
    pub fn into_owned_buffer(self) -> Result<Buffer> {
        if self.buffer.is_unique() { Ok(self.buffer) } else { self.copy_buffer() }
    }

    /// A copy of the memory.
    pub fn copy_buffer(&self) -> Result<Buffer> {
        self.device.layout()?.copy(&self.buffer)
    }

    /// The device of the memory.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The same memory with another shape of the same number of elements.
    pub fn reshape(self, shape: impl Into<Shape>) -> Result<Self> {
        Self::from_buffer(&self.device, self.buffer, shape)
    }

    /// The values in another type, each rounded to the nearest: between f32 and types of 16 bits.
    ///
    /// # Errors
    /// A type that the device does not convert to.
    pub fn cast(self, dtype: DType) -> Result<Self> {
        if self.dtype() == dtype {
            return Ok(self);
        }
        let cast = self.device.pointwise()?.cast(&self.buffer, dtype)?;
        Self::from_buffer(&self.device, cast, self.shape)
    }

    /// `self + other`, in place if nothing else holds `self`. Shapes must be equal.
    pub fn accumulate(mut self, other: &Tensor) -> Result<Self> {
        if self.shape != other.shape {
            return Err(Error::Shape {
                op: "accumulate",
                problem: "a sum of different shapes".to_owned(),
                shapes: vec![self.shape.to_vec(), other.shape.to_vec()],
            });
        }
        let pointwise = self.device.pointwise()?;
        if self.buffer.is_unique() {
            pointwise.add_assign(&mut self.buffer, 0, &other.buffer)?;
            return Ok(self);
        }
        let sum = pointwise.add(&self.buffer, &other.buffer)?;
        Self::from_buffer(&self.device, sum, self.shape)
    }
}
