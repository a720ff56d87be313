//! A communicator for the memory of devices, by way of the host: the collectives of another communicator on copies in host memory.
//!
//! It is right and slow: a rank waits for its device before an operation starts. Its promises are those of the communicator below it, and
//! so are its faults. Each rank has a device of its own.

use crate::device::CudaDevice;
use meshwork_core::comm::{Call, Op, OpKind, PendingOp};
use meshwork_core::{Buffer, CommError, Communicator, Pending, ReductionOrder};
use meshwork_tensor::Result;
use meshwork_tensor::kernel::Layout;
use std::sync::Arc;

/// `inner`, on the memory of `device`. Buffers in host memory pass through.
pub fn communicator(inner: Arc<dyn Communicator>, device: Arc<CudaDevice>) -> Arc<dyn Communicator> {
    Arc::new(Staged { inner, device })
}

#[derive(Debug)]
struct Staged {
    inner: Arc<dyn Communicator>,
    device: Arc<CudaDevice>,
}

impl Staged {
    /// A device's failure in an operation.
    fn failed<T>(&self, op: OpKind, result: Result<T>) -> std::result::Result<T, CommError> {
        let world_rank = self.world_ranks().get(self.rank()).copied().unwrap_or_default();
        let (group, rank) = (self.name().to_owned(), world_rank);
        result.map_err(|error| CommError::Backend { op, group, world_rank: rank, message: error.to_string() })
    }
}

impl Communicator for Staged {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn world_ranks(&self) -> &[usize] {
        self.inner.world_ranks()
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn reduction_order(&self) -> ReductionOrder {
        self.inner.reduction_order()
    }

    fn start(&self, Call { op, input, output }: Call) -> std::result::Result<Pending, CommError> {
        let kind = op.kind();
        let on_host = |buffer: &Option<Buffer>| buffer.as_ref().is_none_or(Buffer::is_host);
        if on_host(&input) && on_host(&output) {
            return self.inner.start(Call { op, input, output });
        }
        if let (1, Some(from), Some(_)) = (self.size(), &input, &output) {
            // With one rank every collective is the identity.
            let mut to = output.unwrap_or_else(Buffer::empty);
            self.failed(kind, self.device.copy_into(from, 0..from.count(), &mut to, 0))?;
            return Ok(Pending::done(to));
        }
        // What an operation in place reads is in its output.
        let reads_output = input.is_none() && !matches!(op, Op::Recv { .. });
        let fetch = |buffer: &Buffer| match buffer.is_host() {
            true => Ok(buffer.clone()),
            false => self.failed(kind, self.device.fetch(buffer)),
        };
        let host_input = input.as_ref().map(fetch).transpose()?;
        let host_output = match &output {
            Some(output) if reads_output => Some(fetch(output)?),
            Some(output) => Some(Buffer::zeros(output.dtype(), output.count())),
            None => None,
        };
        let pending = self.inner.start(Call { op, input: host_input, output: host_output })?;
        let copy_back = kind != OpKind::Send;
        let Some(to) = (if copy_back { output } else { input }) else { return Ok(pending) };
        let staged = Self { inner: self.inner.clone(), device: self.device.clone() };
        Ok(Pending::new(InFlight { pending, to, copy_back, kind, of: staged }))
    }

    fn split(&self, name: &str, members: &[usize]) -> std::result::Result<Arc<dyn Communicator>, CommError> {
        Ok(communicator(self.inner.split(name, members)?, self.device.clone()))
    }

    fn heartbeat(&self) {
        self.inner.heartbeat();
    }
}

/// An operation on copies, whose result goes to the device when it is waited for.
struct InFlight {
    pending: Pending,
    to: Buffer,
    copy_back: bool,
    kind: OpKind,
    of: Staged,
}

impl PendingOp for InFlight {
    fn wait(self: Box<Self>) -> std::result::Result<Buffer, CommError> {
        let Self { pending, mut to, copy_back, kind, of } = *self;
        let result = pending.wait()?;
        if copy_back {
            of.failed(kind, of.device.store(&result, &mut to, 0))?;
        }
        Ok(to)
    }

    fn is_done(&self) -> bool {
        self.pending.is_done()
    }
}
