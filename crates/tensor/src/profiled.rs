//! A device that records the work of another one: one [`Span`] per call of a kernel.
//!
//! FLOPs are counted by the wrapped device's meter during the call. Bytes are the minimum that must move: each input
//! read once and each output written once. The [table of kernels](crate::kernel) says for each method what it moves.
//!
//! While it records, each call of a device that queues its work waits for it: spans hold that work, and the step takes
//! longer than without a profile.

use crate::device::{Device, Download, Kernels, Meter, Upload};
use crate::error::Result;
use crate::kernel::{Outcome, Precision, Traffic};
use crate::launches::Launches;
use crate::pinned::Pinned;
use meshwork_core::profile::{Class, Recorder, Span};
use meshwork_core::{Buffer, DType, pass_on};
use std::sync::Arc;

/// See the [module](self).
#[derive(Debug)]
pub struct Profiled {
    inner: Arc<dyn Device>,
    recorder: Recorder,
}

impl Profiled {
    /// `inner`, recorded.
    pub fn device(inner: Arc<dyn Device>, recorder: Recorder) -> Arc<dyn Device> {
        Arc::new(Self { inner, recorder })
    }

    /// Runs `work` as a span that moves `traffic.bytes` and writes the result.
    pub(crate) fn record<T: Outcome>(
        &self,
        traffic: Traffic,
        work: impl FnOnce(&dyn Device) -> Result<T>,
    ) -> Result<T> {
        if !self.recorder.is_on() {
            return work(&*self.inner);
        }
        let Traffic { class, name, detail, dtype, mut bytes } = traffic;
        self.inner.synchronize()?; // collectives that are queued on a device are none of this call's work
        let (before, start) = (self.inner.meter().total_flops(), self.recorder.now());
        let result = work(&*self.inner)?;
        self.inner.synchronize()?;
        let (end, flops) = (self.recorder.now(), self.inner.meter().total_flops() - before);
        let result = result.map(&mut |buffer, _| {
            bytes += buffer.bytes() as u64;
            Ok(buffer)
        });
        self.recorder.record(Span { class, name, detail, dtype, start, end, flops, bytes });
        result
    }
}

impl Device for Profiled {
    // Not recorded: memory is allocated too often, and by too short calls.
    pass_on! {
        self.inner =>
        fn name(&self) -> &str;
        fn precision(&self) -> Precision;
        fn operand_dtype(&self, dtype: DType) -> DType;
        fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer>;
        fn has_values(&self) -> bool;
        fn takes_all(&self) -> bool;
        fn download_later(&self, buffer: &Buffer) -> Result<Download>;
        fn upload_later(&self, into: Buffer) -> Result<Upload>;
        fn synchronize(&self) -> Result<()>;
        fn pinned(&self) -> Option<&dyn Pinned>;
        fn meter(&self) -> &Meter;
        fn launches(&self) -> Option<Launches>;
    }

    fn zeros(&self, dtype: DType, count: usize) -> Result<Buffer> {
        self.record(Traffic::call(Class::Memory, "zeros", &[]), |device| device.zeros(dtype, count))
    }

    fn upload(&self, host: &Buffer) -> Result<Buffer> {
        self.record(Traffic::call(Class::Memory, "upload", &[host]), |device| device.upload(host))
    }

    fn upload_into(&self, host: &Buffer, dst: &mut Buffer, at: usize) -> Result<()> {
        // Read and written.
        self.record(Traffic::call(Class::Memory, "upload", &[host, host]), |device| device.upload_into(host, dst, at))
    }

    fn download(&self, buffer: &Buffer) -> Result<Buffer> {
        self.record(Traffic::call(Class::Memory, "download", &[buffer]), |device| device.download(buffer))
    }

    fn kernels(&self) -> Kernels<'_> {
        self.inner.kernels().through(self)
    }
}
