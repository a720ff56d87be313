//! Launches of kernels. `launch!` builds the arguments of a kernel from buffers and numbers, in the order of the
//! kernel's table, and checks the types of the buffers against the table, so operations need not check them.
//!
//! A kernel of f32 may have forms for other types, chosen by the type of the first operand: `NAME_16` for bf16 and f16,
//! and `NAME_f64`. If a table ends with `f16`, the launch appends the flag that tells the two 16-bit types apart. On
//! tensor cores f16, and f32 rounded to TF32, have files of their own.

use super::prelude::*;
use crate::driver::Argument;
use meshwork_kernels::{Kernel, Type, f16, tf32};

/// Queues a kernel for `[items, width]` of its geometry: `launch!(device, OP, "kernel", [items, width]; x, &y, count)`.
macro_rules! launch {
    // One expression, so that a temporary buffer lives until the kernel is queued.
    ($device:expr, $op:expr, $kernel:expr, $sizes:expr; $($operand:expr),+ $(,)?) => {
        $crate::device::launch::Operands::new($device, $op)$(.with($operand)?)+.launch($kernel, $sizes)
    };
}
pub(super) use launch;

/// The arguments of a launch.
pub(super) struct Operands<'a> {
    pub(super) device: &'a CudaDevice,
    pub(super) op: &'static str,
    args: Vec<Argument>,
    /// The types of the arguments that are buffers.
    dtypes: Vec<Option<DType>>,
}

/// One argument of a kernel, or several.
pub(super) trait Operand {
    /// Appends its arguments.
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()>;
}

impl<'a> Operands<'a> {
    pub(super) fn new(device: &'a CudaDevice, op: &'static str) -> Self {
        Self { device, op, args: Vec::with_capacity(16), dtypes: Vec::with_capacity(16) }
    }

    pub(super) fn with(mut self, operand: impl Operand) -> Result<Self> {
        operand.add_to(&mut self)?;
        Ok(self)
    }

    fn push(&mut self, argument: impl Into<Argument>, dtype: Option<DType>) -> Result<()> {
        self.args.push(argument.into());
        self.dtypes.push(dtype);
        Ok(())
    }

    /// The types of the buffers for arguments with elements of type `of`.
    fn given(&self, kernel: &'static Kernel, of: Type) -> impl Iterator<Item = DType> {
        let buffers = kernel.args.iter().zip(&self.dtypes).filter(move |(wanted, _)| wanted.of == of);
        buffers.filter_map(|(_, dtype)| *dtype)
    }

    /// Queues the kernel of this name, or its form for the type of its operands.
    pub(super) fn launch(mut self, name: &str, [items, width]: [usize; 2]) -> Result<()> {
        let Self { device, op, .. } = self;
        let sizes = [items as u64, width as u64];
        let mut kernel = device.form(name, sizes).ok_or_else(|| device.lacks(op, DType::F32))?;
        let no_f32 = |dtype: &DType| *dtype != DType::F32;
        let suffix =
            self.given(kernel, Type::F32).find(no_f32).map(|dtype| if dtype.is_half() { "_16" } else { "_f64" });
        if let Some(form) = suffix.and_then(|suffix| device.form(&format!("{name}{suffix}"), sizes)) {
            kernel = form;
        }
        let half = self.given(kernel, Type::Bits16).find(|dtype| dtype.is_half());
        let other_operands = match self.given(kernel, Type::Bits16).next() {
            Some(DType::F16) => f16(name),
            Some(DType::F32) => tf32(name),
            _ => None,
        };
        if let Some(form) = other_operands {
            kernel = form;
        }
        let other =
            self.given(kernel, Type::Bits16).find(|dtype| Some(*dtype) != half).map(|other| half.unwrap_or(other));
        if let Some(dtype) = self.given(kernel, Type::F32).find(no_f32).or(other) {
            return Err(device.no_f32(op, dtype));
        }
        if let Some(actual) = self.given(kernel, Type::F64).find(|dtype| *dtype != DType::F64) {
            return Err(BufferError::DType { actual, asked: DType::F64 }.into());
        }
        if kernel.args.len() == self.args.len() + 1 && kernel.args[self.args.len()].name == "f16" {
            self.args.push(i32::from(half == Some(DType::F16)).into());
        }
        if items == 0 {
            return Ok(());
        }
        let Some(launch) = kernel.geometry.launch(sizes[0], sizes[1]) else {
            let fault = format!("kernel {name}: no grid has {items} items of width {width}").into();
            return Err(Error::Device { op, device: device.name().to_owned(), fault });
        };
        device.pool.driver.launch(device.pool.compute, kernel, launch, &self.args).map_err(device.failed(op))
    }
}

/// The address of a buffer that is read.
impl Operand for &Buffer {
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
        operands.push(operands.device.place(operands.op, self)?, Some(self.dtype()))
    }
}

/// An address of elements of this type.
impl Operand for (Address, DType) {
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
        operands.push(self.0, Some(self.1))
    }
}

/// The address of a buffer that is written, and not shared.
impl Operand for &mut Buffer {
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
        operands.push(operands.device.place_mut(operands.op, self)?, Some(self.dtype()))
    }
}

/// An optional buffer: the kernel gets a null address if it is missing.
impl Operand for Option<&Buffer> {
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
        if let Some(buffer) = self { buffer.add_to(operands) } else { operands.push(Address::NULL, None) }
    }
}

/// No argument.
impl Operand for () {
    fn add_to(self, _operands: &mut Operands<'_>) -> Result<()> {
        Ok(())
    }
}

/// A flag, passed as `int`.
impl Operand for bool {
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
        operands.push(i32::from(self), None)
    }
}

macro_rules! arguments {
    ($($of:ty),*) => { $(impl Operand for $of {
        fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
            operands.push(self, None)
        }
    })* };
}
arguments!(Argument, Address, f32, f64, i32, u32, i64, u64, usize);

impl<T: Operand + Copy> Operand for &[T] {
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
        self.iter().try_for_each(|&operand| operand.add_to(operands))
    }
}

impl<T: Operand, const N: usize> Operand for [T; N] {
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
        self.into_iter().try_for_each(|operand| operand.add_to(operands))
    }
}

impl<T: Operand> Operand for Vec<T> {
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
        self.into_iter().try_for_each(|operand| operand.add_to(operands))
    }
}
