//! Communicators of NCCL between GPUs of several processes.
//!
//! All communicators are non-blocking: a call returns before it is done, and its communicator is asked until it is,
//! until its [watch](crate::driver::Watch) gives up, or until ranks have been waited for too long ([`Gpu::patience`]).
//! So a rank that does not come is an error and not a hang, and another thread can end a communicator meanwhile.
//!
//! The first use of a communicator for some kind of work connects the ranks, and waits for the other hosts. Two ranks
//! of a communicator of two exchange a byte in both directions when it is made, so that a first message waits for no
//! host.

mod library;

use super::libraries::failed;
use super::{Gpu, GpuError, idle};
use crate::driver::{Address, DriverError, Exchange, Message, Nccl, NcclComm, Result, UniqueId, Watched};
use cudarc::driver::result::{
    free_sync, malloc_sync,
    stream::{self, StreamKind},
};
use cudarc::driver::sys::CUstream;
use library::{Config, Functions, Handle, IN_PROGRESS, Id, Library, SUCCESS};
use meshwork_core::{DType, ReduceOp};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Which NCCL there is: `NCCL 2.28.9 (libnccl.so.2)`.
///
/// # Errors
/// Where it was looked for, or why it cannot be used.
pub fn nccl() -> std::result::Result<String, GpuError> {
    Library::find().map(|library| format!("{library:?}"))
}

/// How long ranks are waited for by default.
const PATIENCE: Duration = Duration::from_secs(300);

/// The pause between two looks at a communicator that is not done.
const PAUSE: Duration = Duration::from_micros(100);

/// The communicators of a rank.
#[derive(Debug)]
pub(super) struct Comms {
    library: OnceLock<Result<Library>>,
    pub(super) patience: Duration,
    ends: Mutex<Ends>,
    pub(super) watched: Watched,
}

#[derive(Debug, Default)]
struct Ends {
    handles: BTreeMap<u64, Handle>,
    made: u64,
}

impl Default for Comms {
    fn default() -> Self {
        Self { library: OnceLock::new(), patience: PATIENCE, ends: Mutex::default(), watched: Watched::default() }
    }
}

impl Comms {
    /// Whether there is a library.
    pub(super) fn find(&self) -> Result<()> {
        self.library().map(drop)
    }

    /// The library, which is looked for once.
    fn library(&self) -> Result<&Library> {
        let find = || Library::find().map_err(|error| DriverError::Call { call: "nccl", why: error.to_string() });
        self.library.get_or_init(find).as_ref().map_err(Clone::clone)
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the library with a communicator, under the lock: another thread cannot end it meanwhile.
    fn with(&self, call: &'static str, on: NcclComm, run: impl FnOnce(&Functions, Handle) -> c_int) -> Result<c_int> {
        let library = self.library()?;
        let ends = self.ends();
        let gone = || DriverError::Unknown { call, what: format!("{on:?}, which does not exist or was ended,") };
        let handle = *ends.handles.get(&on.0).ok_or_else(gone)?;
        match run(&library.functions, handle) {
            code @ (SUCCESS | IN_PROGRESS) => Ok(code),
            code => Err(library.fault(call, code)),
        }
    }

    /// The same, and waits until it is done.
    fn done(&self, call: &'static str, on: NcclComm, run: impl FnOnce(&Functions, Handle) -> c_int) -> Result<()> {
        match self.with(call, on, run)? {
            SUCCESS => Ok(()),
            _ => self.settle(call, on),
        }
    }

    /// Waits until a communicator has done what it was asked. It is ended if that fails.
    fn settle(&self, call: &'static str, on: NcclComm) -> Result<()> {
        let begun = Instant::now();
        let done = || match self.state(call, on)? {
            SUCCESS => Ok(true),
            _ if begun.elapsed() < self.patience => Ok(false),
            _ => {
                let seconds = self.patience.as_secs_f64();
                let why = format!("it has waited {seconds} s for other ranks, which did not come to the same call");
                Err(DriverError::Comm { call, why })
            }
        };
        self.until(done).inspect_err(|_| self.end(on))
    }

    /// Waits for other ranks until `done`, by the watch if there is one.
    pub(super) fn until(&self, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        if let Some(watch) = self.watched.get() {
            return watch.attend(&mut done);
        }
        while !done()? {
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Whether a communicator is at work, or the error that it has met.
    fn state(&self, call: &'static str, on: NcclComm) -> Result<c_int> {
        let mut state = SUCCESS;
        // SAFETY: the communicator exists, and one number is written.
        self.with(call, on, |nccl, handle| match unsafe { (nccl.async_error)(handle, &raw mut state) } {
            SUCCESS => state,
            code => code,
        })
    }

    fn enter(&self, handle: Handle) -> NcclComm {
        let mut ends = self.ends();
        let number = ends.made;
        ends.made += 1;
        ends.handles.insert(number, handle);
        NcclComm(number)
    }

    /// Ends a communicator at once, if it is there.
    fn end(&self, on: NcclComm) {
        let Ok(library) = self.library() else { return };
        if let Some(handle) = self.ends().handles.remove(&on.0) {
            // SAFETY: it exists, and nobody finds it any more.
            _ = unsafe { (library.functions.abort)(handle) };
        }
    }

    /// Ends all communicators: the GPU is dropped, and its context is current.
    pub(super) fn end_all(&self) {
        let all: Vec<u64> = self.ends().handles.keys().rev().copied().collect();
        all.into_iter().for_each(|number| self.end(NcclComm(number)));
    }

    /// Queues a rank's part of a collective in a stream, and waits until the library has.
    pub(super) fn exchange(&self, on: NcclComm, exchange: &Exchange, queue: CUstream) -> Result<()> {
        let call = exchange.name();
        let stream: library::Stream = queue.cast();
        // SAFETY: the communicator and the stream exist, and belong to this GPU; the caller guarantees the addresses
        // until the work is done.
        self.done(call, on, |nccl, of| unsafe {
            match *exchange {
                Exchange::AllReduce { from, to, count, dtype, reduce } => {
                    (nccl.all_reduce)(at(from.0), at(to.0), count, type_of(dtype), op_of(reduce), of, stream)
                }
                Exchange::ReduceScatter { from, to, count, dtype, reduce } => {
                    (nccl.reduce_scatter)(at(from.0), at(to.0), count, type_of(dtype), op_of(reduce), of, stream)
                }
                Exchange::AllGather { from, to, bytes } => {
                    (nccl.all_gather)(at(from.0), at(to.0), bytes, BYTE, of, stream)
                }
                Exchange::Broadcast { at: place, bytes, root } => {
                    (nccl.broadcast)(at(place.0), at(place.0), bytes, BYTE, root as c_int, of, stream)
                }
                Exchange::Messages(ref all) => messages(nccl, of, all, stream),
            }
        })
    }

    /// Connects the two ranks of a communicator of two, by a byte in each direction.
    fn connect(&self, on: NcclComm) -> Result<()> {
        let call = "ncclCommCount";
        let mut count = 0;
        // SAFETY: the communicator exists, and one number is written.
        self.done(call, on, |nccl, of| unsafe { (nccl.count)(of, &raw mut count) })?;
        if count != 2 {
            return Ok(());
        }
        let mut rank: c_int = 0;
        // SAFETY: as above.
        self.done("ncclCommUserRank", on, |nccl, of| unsafe { (nccl.user_rank)(of, &raw mut rank) })?;
        let queue = stream::create_with_priority(StreamKind::NonBlocking, 0).map_err(failed("cuStreamCreate"))?;
        // SAFETY: only this call uses this memory, and the values that are sent have no meaning.
        let bytes = unsafe { malloc_sync(2) }.map_err(failed("cuMemAlloc"))?;
        let message = |sends, at| Message { peer: 1 - rank as usize, sends, at: Address(at), bytes: 1 };
        let both = Exchange::Messages(vec![message(true, bytes), message(false, bytes + 1)]);
        let exchanged = self.exchange(on, &both, queue);
        // SAFETY: both were made above, and their work is over or has failed.
        unsafe {
            let over = self.until(|| idle(queue));
            let freed = free_sync(bytes).map_err(failed("cuMemFree"));
            let ended = stream::destroy(queue).map_err(failed("cuStreamDestroy"));
            exchanged.and(over).and(freed).and(ended)
        }
    }
}

/// Messages of one group.
///
/// # Safety
/// The communicator and the stream exist, and the addresses hold until the work is done.
unsafe fn messages(nccl: &Functions, of: Handle, all: &[Message], stream: library::Stream) -> c_int {
    // SAFETY: as the caller says; the group ends on this thread, also after an error.
    unsafe {
        let begun = (nccl.group_start)();
        if begun != SUCCESS {
            return begun;
        }
        let send = |&Message { peer, sends, at: place, bytes }: &Message| match sends {
            true => (nccl.send)(at(place.0), bytes, BYTE, peer as c_int, of, stream),
            false => (nccl.receive)(at(place.0), bytes, BYTE, peer as c_int, of, stream),
        };
        let wrong = all.iter().map(send).find(|code| ![SUCCESS, IN_PROGRESS].contains(code));
        let ended = (nccl.group_end)();
        wrong.unwrap_or(ended)
    }
}

fn at(address: u64) -> *mut c_void {
    address as *mut c_void
}

/// `ncclUint8`.
const BYTE: c_int = 1;

fn type_of(dtype: DType) -> c_int {
    match dtype {
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
        _ => BYTE,
    }
}

fn op_of(reduce: ReduceOp) -> c_int {
    match reduce {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
    }
}

impl Nccl for Gpu {
    fn unique_id(&self) -> Result<UniqueId> {
        self.context.enter()?;
        let library = self.comms.library()?;
        let mut id = Id([0; UniqueId::BYTES]);
        // SAFETY: writes an id.
        match unsafe { (library.functions.unique_id)(&raw mut id) } {
            SUCCESS => Ok(UniqueId(id.0)),
            code => Err(library.fault("ncclGetUniqueId", code)),
        }
    }

    fn join(&self, id: &UniqueId, rank: usize, size: usize) -> Result<NcclComm> {
        let call = "ncclCommInitRankConfig";
        self.context.enter()?;
        let library = self.comms.library()?;
        let (mut handle, mut config) = (Handle(null_mut()), Config::non_blocking());
        let (id, config) = (Id(id.0), &raw mut config);
        // SAFETY: the handle is written before this returns, and the configuration is read.
        let code = unsafe { (library.functions.init)(&raw mut handle, size as c_int, id, rank as c_int, config) };
        if ![SUCCESS, IN_PROGRESS].contains(&code) || handle.0.is_null() {
            return Err(library.fault(call, code));
        }
        let made = self.comms.enter(handle);
        self.comms.settle(call, made)?;
        self.comms.connect(made)?;
        Ok(made)
    }

    fn split(&self, of: NcclComm, color: Option<usize>, key: usize) -> Result<Option<NcclComm>> {
        let call = "ncclCommSplit";
        self.context.enter()?;
        // The library may write the handle until `of` is done. After an error it may do so at any time, so that the
        // memory is never freed then.
        let slot = Box::into_raw(Box::new(Handle(null_mut())));
        let mut config = Config::non_blocking();
        let color = color.map_or(-1, |color| color as c_int);
        self.comms.done(call, of, |nccl, of| {
            // SAFETY: the communicator exists, and the memory of the handle stays.
            unsafe { (nccl.split)(of, color, key as c_int, slot, &raw mut config) }
        })?;
        // SAFETY: made above; the library has written it, and is done.
        let handle = *unsafe { Box::from_raw(slot) };
        if handle.0.is_null() {
            return Ok(None);
        }
        let made = self.comms.enter(handle);
        self.comms.settle(call, made)?;
        self.comms.connect(made)?;
        Ok(Some(made))
    }

    fn leave(&self, of: NcclComm) -> Result<()> {
        let call = "ncclCommFinalize";
        self.context.enter()?;
        // SAFETY: the communicator exists.
        self.comms.done(call, of, |nccl, handle| unsafe { (nccl.finalize)(handle) })?;
        let library = self.comms.library()?;
        let Some(handle) = self.comms.ends().handles.remove(&of.0) else { return Ok(()) };
        // SAFETY: its work is over, and nobody finds it any more.
        match unsafe { (library.functions.destroy)(handle) } {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(library.fault("ncclCommDestroy", code)),
        }
    }

    fn abort(&self, of: NcclComm) -> Result<()> {
        self.context.enter()?;
        self.comms.end(of);
        Ok(())
    }

    fn health(&self, of: NcclComm) -> Result<()> {
        self.comms.state("ncclCommGetAsyncError", of).map(drop)
    }
}
