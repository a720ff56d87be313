//! [`Device`] over the [seam](crate::driver): device memory, and the kernels of `meshwork-kernels`.
//!
//! Kernels run in one stream, copies from and to the host in another, collectives in a third, copies for offload in a
//! fourth; events order them. Nothing blocks the host but [`download`](Device::download). Each kernel trait has a file
//! here, as on the CPU; an operation without a kernel is an error that names it.

mod address_tables;
mod attention;
mod blocks;
mod channel_norm;
mod checked;
mod collectives;
mod communicators;
mod compression;
mod documents;
mod elementwise;
mod embedding;
mod exchange;
mod grouped;
mod indexing;
mod launch;
mod layout;
mod loss;
mod matmul;
mod memory;
mod nccl;
mod nonzeros;
mod norm;
mod optim;
mod permutation;
mod pinned;
mod pointwise;
mod reduction;
mod room;
mod rotary;
mod routing;
mod rows;
mod tables;
mod vectors;
mod whole;
mod windows;

/// Items that most kernels use.
mod prelude {
    pub(super) use super::checked::Checked;
    pub(super) use super::launch::{Operand, Operands, launch};
    pub(super) use super::{CudaDevice, Products};
    pub(super) use crate::driver::Address;
    pub(super) use meshwork_core::{Buffer, BufferError, DType};
    pub(super) use meshwork_tensor::tape::{RowBlocks, Terms};
    pub(super) use meshwork_tensor::{Device, Error, Precision, Result, Work};
    pub(super) use std::ops::Range;
    pub(super) use std::sync::{Mutex, PoisonError};
}

use crate::driver::{Address, Argument, BIAS_ALIGNED, Driver, DriverError};
use crate::tuning::{Tuning, fitting};
use memory::{DeviceMemory, Origin, Pool};
use meshwork_core::{Buffer, BufferError, DType};
use meshwork_kernels::Kernel;
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::{Layout, Pointwise, check_copy};
use meshwork_tensor::pinned::Pinned;
use meshwork_tensor::{Category, Device, Download, Error, Kernels, Launches, Meter, Result, Upload};
pub use nccl::{MOST_LINKED, Reduction};
use rotary::LastAngles;
use rows::Cuts;
use std::any::Any;
use std::sync::Arc;
use tables::Tables;
use whole::Codes;

/// The order of sums of matrix products. Sums that are cut into blocks have the CPU's order either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    /// The CPU's order: the same bits, but slow.
    OfTheCpu,
    /// The order of the device's library.
    OfTheLibrary,
}

/// Bytes of the largest loads of a thread, and of the chunks in which epilogues of products read a bias.
const ALIGNED: u64 = BIAS_ALIGNED;

/// A device of one rank.
#[derive(Debug)]
pub struct CudaDevice {
    pool: Arc<Pool>,
    products: Products,
    precision: Precision,
    tuning: Tuning,
    cuts: Cuts,
    tables: Tables,
    angles: LastAngles,
    codes: Codes,
    /// The faults that kernels found in integers.
    found: DeviceMemory,
}

impl CudaDevice {
    /// A device that works through `driver`, with products in f32.
    pub fn new(driver: Arc<dyn Driver>, products: Products) -> Result<Self> {
        Self::with_precision(driver, products, Precision::F32)
    }

    /// A device whose products, those of attention too, take operands in this precision.
    pub fn with_precision(driver: Arc<dyn Driver>, products: Products, precision: Precision) -> Result<Self> {
        let device = driver.name().to_owned();
        let failed = |fault: DriverError| Error::Device { op: "open", device: device.clone(), fault: fault.into() };
        let tuning = Tuning::built_in(&driver.properties().architecture);
        let pool = Arc::new(Pool::new(driver).map_err(failed)?);
        Self::over(pool, products, precision, tuning)
    }

    fn over(pool: Arc<Pool>, products: Products, precision: Precision, tuning: Tuning) -> Result<Self> {
        let found = pool.memory(checked::BYTES, Origin::Compute, false)?;
        let zeroed = pool.driver.zero(pool.compute, found.at(), checked::BYTES);
        zeroed.map_err(|fault| pool.refused("open", Category::default(), fault))?;
        Ok(Self {
            pool,
            products,
            precision,
            tuning,
            cuts: Cuts::default(),
            tables: Tables::default(),
            angles: LastAngles::default(),
            codes: Codes::default(),
            found,
        })
    }

    /// The same device and memory, but with kernel forms chosen by this table instead of the built-in one.
    pub fn with_tuning(&self, tuning: Tuning) -> Result<Self> {
        Self::over(self.pool.clone(), self.products, self.precision, tuning)
    }

    fn buffer(&self, dtype: DType, count: usize, origin: Origin, counted: bool) -> Result<Buffer> {
        let memory = self.pool.memory(count * dtype.size(), origin, counted)?;
        Ok(Buffer::from_memory(Arc::new(memory), dtype, count)?)
    }

    /// Memory that the meter does not count, in place of the CPU's stack.
    fn scratch(&self, dtype: DType, count: usize) -> Result<Buffer> {
        self.buffer(dtype, count, Origin::Compute, false)
    }

    /// A copy of host memory, for which the compute stream waits.
    fn uploaded(&self, host: &Buffer, counted: bool) -> Result<Buffer> {
        let buffer = self.buffer(host.dtype(), host.count(), Origin::Copies, counted)?;
        let Pool { driver, compute, copies, .. } = &*self.pool;
        let at = self.place("upload", &buffer)?;
        let copied = driver.write(*copies, at, host.as_bytes()?).and_then(|()| driver.record(*copies));
        copied.and_then(|copied| driver.wait(*compute, copied)).map_err(self.failed("upload"))?;
        Ok(buffer)
    }

    /// Copies host memory to the elements of `dst` from `at` on.
    pub(crate) fn store(&self, host: &Buffer, dst: &mut Buffer, at: usize) -> Result<()> {
        check_copy(host, &(0..host.count()), dst, at)?;
        let to = self.place_mut("upload", dst)?.offset(at * dst.dtype().size());
        let Pool { driver, compute, copies, .. } = &*self.pool;
        let bytes = host.as_bytes()?;
        let queue = || {
            driver.wait(*copies, driver.record(*compute)?)?; // earlier reads and writes of the same memory
            driver.write(*copies, to, bytes)?;
            driver.wait(*compute, driver.record(*copies)?)
        };
        queue().map_err(self.failed("upload"))
    }

    /// A copy in host memory, once the device has written it; or the fault that kernels found in integers until then.
    pub(crate) fn fetch(&self, buffer: &Buffer) -> Result<Buffer> {
        let from = self.place("download", buffer)?;
        let Pool { driver, compute, copies, .. } = &*self.pool;
        let mut host = Buffer::zeros(buffer.dtype(), buffer.count());
        let mut found = [0; checked::BYTES];
        let bytes = host.as_bytes_mut()?;
        let mut queue = || {
            driver.wait(*copies, driver.record(*compute)?)?;
            driver.read_all(*copies, &mut [(from, &mut *bytes), (self.found.at(), &mut found)])
        };
        // Work that was aborted has no result.
        queue().and_then(|()| self.pool.sound()).map_err(self.failed("download"))?;
        checked::fault(&found).map_or(Ok(host), Err)
    }

    /// The address of a buffer's elements.
    fn place(&self, op: &'static str, buffer: &Buffer) -> Result<Address> {
        self.pool.sound().map_err(self.failed(op))?;
        let memory: &dyn Any = &**buffer.memory();
        match memory.downcast_ref::<DeviceMemory>().filter(|memory| memory.is_of(&self.pool)) {
            Some(memory) => Ok(memory.at().offset(buffer.offset() * buffer.dtype().size())),
            None => {
                let fault = format!("{buffer:?} is memory of another device").into();
                Err(Error::Device { op, device: self.name().to_owned(), fault })
            }
        }
    }

    /// The address of a buffer, or the null address.
    fn place_or_none(&self, op: &'static str, buffer: Option<&Buffer>) -> Result<Argument> {
        Ok(buffer.map_or(Ok(Address::NULL), |buffer| self.place(op, buffer))?.into())
    }

    /// The same, for writing.
    fn place_mut(&self, op: &'static str, buffer: &mut Buffer) -> Result<Address> {
        match buffer.is_unique() {
            true => self.place(op, buffer),
            false => Err(BufferError::Shared { dtype: buffer.dtype(), count: buffer.count() }.into()),
        }
    }

    /// Rejects operands of types other than f32.
    fn f32s(&self, op: &'static str, operands: &[&Buffer]) -> Result<()> {
        let other = operands.iter().find(|operand| operand.dtype() != DType::F32);
        other.map_or(Ok(()), |other| Err(self.no_f32(op, other.dtype())))
    }

    fn no_f32(&self, op: &'static str, dtype: DType) -> Error {
        Error::DType { op, device: self.name().to_owned(), dtype, valid: "f32" }
    }

    /// The type of operands that all have f32, or all the same 16 bits.
    fn storage(&self, op: &'static str, operands: &[&Buffer]) -> Result<DType> {
        let dtype = operands.first().map_or(DType::F32, |first| first.dtype());
        if !dtype.is_half() || operands.iter().any(|operand| operand.dtype() != dtype) {
            self.f32s(op, operands)?;
        }
        Ok(dtype)
    }

    /// An operand for a kernel that takes only this type: converted if necessary, in memory that the meter does not
    /// count.
    fn read_as(&self, x: &Buffer, dtype: DType) -> Result<Buffer> {
        let (from, halves) = (x.dtype(), x.dtype().is_half() && dtype.is_half());
        let x = if halves && from != dtype { self.read_as(x, DType::F32)? } else { x.clone() };
        if x.dtype() == dtype {
            return Ok(x);
        }
        let mut copy = self.scratch(dtype, x.count())?;
        self.cast_into(&x, &mut copy, 0)?;
        Ok(copy)
    }

    /// Memory where such a kernel writes `count` numbers of a result of type `dtype`: the result itself, or memory that
    /// the meter does not count.
    fn room(&self, kernels: DType, dtype: DType, count: usize) -> Result<Buffer> {
        if kernels == dtype { self.alloc(dtype, count) } else { self.scratch(kernels, count) }
    }

    /// Converts the numbers in [`room`](Self::room) to the result of type `dtype`.
    fn settled(&self, room: Buffer, dtype: DType) -> Result<Buffer> {
        if room.dtype() == dtype {
            return Ok(room);
        }
        let halves = room.dtype().is_half() && dtype.is_half();
        let room = if halves { self.read_as(&room, DType::F32)? } else { room };
        self.cast(&room, dtype)
    }

    /// An operand for work that reads 16 bytes at a time without an alignment check: an unaligned operand, such as a
    /// part of a flat buffer, is copied to memory that the meter does not count.
    fn aligned(&self, op: &'static str, x: &Buffer) -> Result<Buffer> {
        if self.place(op, x)?.0.is_multiple_of(ALIGNED) {
            return Ok(x.clone());
        }
        let mut copy = self.scratch(x.dtype(), x.count())?;
        self.copy_into(x, 0..x.count(), &mut copy, 0)?;
        Ok(copy)
    }

    /// The form of a kernel for `[items, width]` of its geometry: the table's, or the usual one, or the first
    /// variant that has room on the device.
    fn form(&self, name: &str, sizes: [u64; 2]) -> Option<&'static Kernel> {
        self.tuning.form(name, sizes).or_else(|| fitting(name, self.pool.driver.properties().shared))
    }

    /// The error for an operation without a kernel.
    fn lacks(&self, op: &'static str, dtype: DType) -> Error {
        Error::MissingOperation { op, device: self.name().to_owned(), dtype }
    }

    fn failed(&self, op: &'static str) -> impl Fn(DriverError) -> Error {
        move |fault| self.pool.refused(op, Category::default(), fault)
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        self.pool.driver.name()
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer> {
        self.buffer(dtype, count, Origin::Compute, true)
    }

    fn zeros(&self, dtype: DType, count: usize) -> Result<Buffer> {
        let mut buffer = self.alloc(dtype, count)?;
        self.optim()?.zero(&mut buffer, 0..count)?;
        Ok(buffer)
    }

    fn upload(&self, host: &Buffer) -> Result<Buffer> {
        self.pool.meter.add_upload(host.bytes());
        self.uploaded(host, true)
    }

    fn upload_into(&self, host: &Buffer, dst: &mut Buffer, at: usize) -> Result<()> {
        self.store(host, dst, at)?;
        self.pool.meter.add_upload(host.bytes());
        Ok(())
    }

    fn download(&self, buffer: &Buffer) -> Result<Buffer> {
        self.pool.meter.add_download(buffer.bytes());
        self.fetch(buffer)
    }

    fn download_later(&self, buffer: &Buffer) -> Result<Download> {
        let (pool, from) = (self.pool.clone(), self.place("download", buffer)?);
        let (dtype, count, failed) = (buffer.dtype(), buffer.count(), self.failed("download"));
        let moment = pool.driver.record(pool.compute).map_err(failed)?;
        pool.meter.add_download(buffer.bytes());
        Ok(Download::new(move || {
            let mut host = Buffer::zeros(dtype, count);
            let bytes = host.as_bytes_mut()?;
            let waits = pool.driver.wait(pool.copies, moment);
            let read = waits.and_then(|()| pool.driver.read(pool.copies, from, bytes)).and_then(|()| pool.sound());
            read.map_err(|fault| pool.refused("download", Category::default(), fault))?;
            Ok(host)
        }))
    }

    fn upload_later(&self, mut into: Buffer) -> Result<Upload> {
        let (pool, to) = (self.pool.clone(), self.place_mut("upload", &mut into)?);
        // Earlier reads and writes of the same memory.
        let moment = pool.driver.record(pool.compute).map_err(self.failed("upload"))?;
        Ok(Upload::new(move |_, values| {
            check_copy(values, &(0..values.count()), &into, 0)?;
            let Pool { driver, compute, copies, meter, .. } = &*pool;
            meter.add_upload(values.bytes());
            let bytes = values.as_bytes()?;
            let queue = || {
                driver.wait(*copies, moment)?;
                driver.write(*copies, to, bytes)?;
                driver.wait(*compute, driver.record(*copies)?)
            };
            queue().map_err(|fault| pool.refused("upload", Category::default(), fault))?;
            Ok(into)
        }))
    }

    fn synchronize(&self) -> Result<()> {
        let Pool { driver, compute, .. } = &*self.pool;
        driver.record(*compute).and_then(|moment| driver.finish(moment)).map_err(self.failed("synchronize"))
    }

    fn pinned(&self) -> Option<&dyn Pinned> {
        Some(self)
    }

    fn meter(&self) -> &Meter {
        &self.pool.meter
    }

    fn launches(&self) -> Option<Launches> {
        let Pool { driver, compute, copies, collectives, .. } = &*self.pool;
        driver.launches(&[*compute, *copies, *collectives])
    }

    fn precision(&self) -> Precision {
        self.precision
    }

    fn kernels(&self) -> Kernels<'_> {
        Kernels::all(self)
    }
}
