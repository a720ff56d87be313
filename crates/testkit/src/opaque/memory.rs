//! Memory with a size that the host cannot read, and the host memory behind it.

use meshwork_core::{Buffer, BufferError, DType, HostMemory, Memory};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// Memory that looks like another device's. The host memory behind it is passed to the kernels that compute on
/// it, and is absent while one writes to it.
#[derive(Debug)]
struct Opaque {
    bytes: usize,
    behind: Mutex<Option<Arc<dyn Memory>>>,
}

impl Memory for Opaque {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The host memory behind opaque memory, lent to an operation that only reads it: while the operation has it, the
/// opaque memory counts as shared.
#[derive(Debug)]
struct Lent {
    behind: Arc<dyn Memory>,
    opaque: Arc<dyn Memory>,
}

impl Memory for Lent {
    fn bytes(&self) -> usize {
        self.behind.bytes()
    }

    fn host(&self) -> Option<&HostMemory> {
        self.behind.host()
    }

    fn host_mut(&mut self) -> Option<&mut HostMemory> {
        None
    }
}

fn is<T: Memory>(memory: &Arc<dyn Memory>) -> Option<&T> {
    let memory: &dyn Any = &**memory;
    memory.downcast_ref()
}

/// Elements `offset..offset + count` of `memory`.
fn window(memory: Arc<dyn Memory>, dtype: DType, offset: usize, count: usize) -> Buffer {
    let whole = Buffer::from_memory(memory, dtype, offset + count);
    whole
        .and_then(|whole| whole.slice(offset..offset + count))
        .unwrap_or_else(|error| unreachable!("as before: {error}"))
}

/// The same elements of other memory.
fn on(memory: Arc<dyn Memory>, buffer: &Buffer) -> Buffer {
    window(memory, buffer.dtype(), buffer.offset(), buffer.count())
}

/// Hides host memory from the host. Lent memory becomes the opaque memory that it was.
pub(super) fn hide(host: Buffer) -> Buffer {
    if let Some(Lent { opaque, .. }) = is::<Lent>(host.memory()) {
        return on(opaque.clone(), &host);
    }
    let memory = Opaque { bytes: host.memory().bytes(), behind: Mutex::new(Some(host.memory().clone())) };
    on(Arc::new(memory), &host)
}

/// Whether a buffer is hidden.
pub(super) fn is_hidden(buffer: &Buffer) -> bool {
    is::<Opaque>(buffer.memory()).is_some()
}

/// The host memory behind a buffer, for reading it now.
///
/// # Panics
/// If the buffer is not of the opaque device: a kernel of another device could not read it either.
#[track_caller]
pub(super) fn host(buffer: &Buffer) -> Buffer {
    let Some(memory) = is::<Opaque>(buffer.memory()) else {
        panic!("a kernel of the opaque device was given memory of another one: {buffer:?}")
    };
    let behind = memory.behind.lock().unwrap_or_else(PoisonError::into_inner);
    match &*behind {
        Some(memory) => on(memory.clone(), buffer),
        None => panic!("{buffer:?} is read while it is written"),
    }
}

/// Runs `work` on the host memory behind `buffer`, which it may write if nothing else refers to the buffer.
#[track_caller]
pub(super) fn with_host<T>(buffer: &mut Buffer, work: impl FnOnce(&mut Buffer) -> T) -> T {
    let mut behind = take(buffer);
    let result = work(&mut behind);
    give_back(buffer, behind);
    result
}

/// Takes the host memory from behind `buffer`, until it is [given back](give_back). If other buffers refer to it, it
/// also stays there and cannot be written.
#[track_caller]
pub(super) fn take(buffer: &mut Buffer) -> Buffer {
    let behind = host(buffer);
    if buffer.is_unique() {
        put(buffer, None);
    }
    behind
}

/// Puts the host memory back behind `buffer`.
pub(super) fn give_back(buffer: &mut Buffer, behind: Buffer) {
    put(buffer, Some(behind.memory().clone()));
}

fn put(buffer: &Buffer, memory: Option<Arc<dyn Memory>>) {
    if let Some(opaque) = is::<Opaque>(buffer.memory()) {
        *opaque.behind.lock().unwrap_or_else(PoisonError::into_inner) = memory;
    }
}

/// The host memory behind a buffer, for an operation that keeps it until the operation is over. It can be written if
/// nothing else refers to the buffer; otherwise it is lent for reading.
#[track_caller]
pub(super) fn into_host(buffer: Buffer) -> Buffer {
    let behind = host(&buffer);
    if buffer.is_unique() {
        return behind; // the only reference, once `buffer` is gone
    }
    let lent = Lent { behind: behind.memory().clone(), opaque: buffer.memory().clone() };
    on(Arc::new(lent), &behind)
}

/// A host copy.
pub(super) fn copy(buffer: &Buffer) -> Result<Buffer, BufferError> {
    let mut copy = Buffer::zeros(buffer.dtype(), buffer.count());
    copy.as_bytes_mut()?.copy_from_slice(host(buffer).as_bytes()?);
    Ok(copy)
}
