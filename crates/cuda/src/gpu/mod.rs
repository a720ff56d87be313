//! A GPU, through NVIDIA's driver: feature `cuda`.
//!
//! The libraries are looked for when a GPU is opened ([`Gpu::open`]), so that the same binary runs without them.
//! Kernels are compiled by NVRTC for the GPU's architecture at the first use of their file, and cached on disk. Bytes
//! go to and from the GPU through pinned memory.
//!
//! All users of a GPU in a process share one context, and so its memory. Several GPUs are in `peers.rs`.
//!
//! More than 400 lines: many driver calls, each with its safety argument.

mod compile;
mod graph;
mod libraries;
mod nccl;
mod peers;
mod product;
mod staging;

use crate::device::Products;
use crate::driver::{
    Address, Argument, Driver, DriverError, Event, Graph, Nccl, Priority, Product, Properties, Reach, Remote, Result,
    Stream, Watch, Work,
};
use compile::Compiler;
use cudarc::driver::result::{
    self as cuda, DriverError as Code, ctx, device, event, free_sync,
    function::set_function_attribute,
    malloc_sync, mem_get_info, memcpy_dtod_async, memcpy_dtoh_async, memcpy_htod_async, memset_d8_async, module,
    primary_ctx,
    stream::{StreamKind, create_with_priority, get_priority_range},
};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUevent_flags, CUevent_wait_flags, CUfunction,
    CUfunction_attribute_enum, CUmodule, CUresult, CUstream, cuStreamQuery,
};
use libraries::{Found, attribute, failed, is_of_work, meaning};
use meshwork_kernels::{KERNELS, Kernel, Launch, SOURCES, Source};
use product::Library;
use staging::{SLOT, Staging};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt::Display;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, ThreadId};
use std::time::Duration;

pub use libraries::{GpuError, count};
pub use nccl::nccl;

/// Checks all requirements of the GPU with this number, including the library if its products are requested. Returns
/// the number of GPUs.
///
/// # Errors
/// Names the library or GPU that is missing or too old.
pub fn check(ordinal: usize, products: Products) -> std::result::Result<usize, GpuError> {
    libraries::find(ordinal)?;
    if products == Products::OfTheLibrary {
        libraries::find_products()?;
    }
    count()
}

/// Compiles those of the files of kernels that are not yet in the folder `kernels`, for the GPU with this number,
/// several side by side. A run that compiles each at its first use does so in a row. Files with a kernel that has no
/// room on the GPU are left out, because another form is used there.
///
/// # Errors
/// Names the library or GPU that is missing or too old, or an error of NVRTC.
pub fn prepare(ordinal: usize, kernels: &Path, sources: &[&'static Source]) -> std::result::Result<(), GpuError> {
    let Found { device, architecture, nvrtc, .. } = libraries::find(ordinal)?;
    let shared = attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    let fits = |kernel: &Kernel| i64::from(kernel.geometry.shared()) <= i64::from(shared);
    let fit = |source: &Source| KERNELS.iter().filter(|kernel| kernel.source == source).all(fits);
    let sources: Vec<_> = sources.iter().copied().filter(|source| fit(source)).collect();
    Ok(Compiler::new(kernels, &architecture, nvrtc).prepare(&sources)?)
}

/// Events of a stream. The next one replaces the oldest. A wait for a replaced event waits for a later moment of the
/// same stream, which is queued already, so that no wait is for work that follows it.
const EVENTS: u64 = 256;

/// The number of an event is its moment in the stream, times this, plus the number of the stream.
const STREAMS: u64 = 256;

/// Bytes of the pages that the driver gives out.
const GRANULE: usize = 2 << 20;

/// Pieces of pinned memory that are copied to before the host waits: for the elements of a download, and for the faults
/// that kernels found.
const READ_AT_ONCE: usize = 2;

/// A GPU of one rank.
#[derive(Debug)]
pub struct Gpu {
    properties: Properties,
    context: Context,
    compiler: Compiler,
    /// The version of the driver, in CUDA's version numbers.
    driver: i32,
    /// Whether it waits after each call.
    blocking: bool,
    state: Mutex<State>,
    /// Access to the memory of other GPUs, by their numbers.
    reaches: Mutex<HashMap<usize, Reach>>,
    comms: nccl::Comms,
    /// Notified when a capture ends.
    released: Condvar,
}

/// The context that all users of a GPU in a process share.
#[derive(Debug)]
struct Context {
    device: CUdevice,
    handle: CUcontext,
}

// SAFETY: a context may be used by any thread that made it current, even by several at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes it the current context of this thread.
    fn enter(&self) -> Result<()> {
        // SAFETY: it is retained until this is dropped.
        unsafe { ctx::set_current(self.handle) }.map_err(failed("cuCtxSetCurrent"))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once for this.
        _ = unsafe { primary_ctx::release(self.device) };
    }
}

/// The objects of a rank on a GPU.
#[derive(Debug, Default)]
struct State {
    queues: Vec<Queue>,
    staging: Staging,
    modules: Vec<CUmodule>,
    /// By file and name.
    functions: HashMap<[&'static str; 2], CUfunction>,
    library: Option<Library>,
    graphs: graph::Graphs,
}

// SAFETY: CUDA handles are not bound to a thread; only the context is, and each call makes it current. The memory
// behind the handles is used by one thread at a time, under the lock.
unsafe impl Send for State {}

/// A stream and its events.
#[derive(Debug)]
struct Queue {
    stream: CUstream,
    events: Vec<CUevent>,
    recorded: u64,
    /// The thread that captures it. Other threads wait, because their work would become part of the graph, or would be
    /// refused and end the capture.
    captured: Option<ThreadId>,
}

impl Gpu {
    /// Opens the GPU with this number. Compiled kernels are cached in `kernels`. The library of products is needed only
    /// if `products` asks for it.
    ///
    /// # Errors
    /// A missing or too old driver or library, or no GPU with this number.
    pub fn open(ordinal: usize, kernels: &Path, products: Products) -> std::result::Result<Self, GpuError> {
        check(ordinal, products)?;
        let Found { device: number, name, architecture, nvrtc } = libraries::find(ordinal)?;
        let shared = attribute(number, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let shared = u32::try_from(shared).unwrap_or(0);
        // SAFETY: the number is valid for a GPU.
        let memory = unsafe { device::total_mem(number) }.map_err(failed("cuDeviceTotalMem"))? as u64;
        // SAFETY: the number is valid for a GPU; the context is released when it is dropped.
        let handle = unsafe { primary_ctx::retain(number) }.map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let gpu = Self {
            properties: Properties {
                name,
                ordinal,
                memory,
                shared,
                granule: GRANULE,
                architecture: architecture.clone(),
            },
            context: Context { device: number, handle },
            compiler: Compiler::new(kernels, &architecture, nvrtc),
            driver: libraries::version()?,
            blocking: false,
            state: Mutex::default(),
            reaches: Mutex::default(),
            comms: nccl::Comms::default(),
            released: Condvar::new(),
        };
        if products == Products::OfTheLibrary {
            gpu.state()?.library = Some(Library::new()?);
        }
        Ok(gpu)
    }

    /// The same GPU, which waits after each call that queues work, if `on`: an error then belongs to that kernel or
    /// copy, and names it ([`DriverError::Culprit`]). It captures no graphs, and is slow.
    #[must_use]
    pub fn blocking(mut self, on: bool) -> Self {
        self.blocking = on;
        self
    }

    /// The same GPU, which waits at most this long for other ranks that make a communicator of NCCL, or use it for the
    /// first time; five minutes by default.
    #[must_use]
    pub fn patience(mut self, longest: Duration) -> Self {
        self.comms.patience = longest;
        self
    }

    /// Compiles every file of kernels that is not yet on disk, several side by side; otherwise a file is compiled at
    /// the first use of one of its kernels.
    ///
    /// # Errors
    /// An error of NVRTC or the driver.
    pub fn compile_all(&self) -> Result<()> {
        self.compiler.prepare(SOURCES)?;
        let mut state = self.state()?;
        KERNELS.iter().try_for_each(|kernel| self.function(&mut state, kernel).map(drop))
    }

    /// The state, with the context current.
    fn state(&self) -> Result<MutexGuard<'_, State>> {
        self.context.enter()?;
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The GPU's event for this event, which a stream of another GPU may wait for: no context need be current.
    fn event(&self, call: &'static str, event: Event) -> Result<CUevent> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).event(call, event)
    }

    /// The state, with the context current, and the GPU's handle of a stream that no other thread captures. Callers
    /// keep the guard until their work is queued.
    fn queue_of(&self, call: &'static str, stream: Stream) -> Result<(MutexGuard<'_, State>, CUstream)> {
        let mut state = self.state()?;
        loop {
            let Queue { stream: queue, captured, .. } = *state.queue(call, stream)?;
            if captured.is_none_or(|by| by == thread::current().id()) {
                return Ok((state, queue));
            }
            state = self.released.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// With `cuda.launch_blocking`, waits until the stream is done. The caller holds the lock, so a fault belongs to
    /// the call that was just queued.
    fn settle(&self, queue: CUstream, work: impl Display) -> Result<()> {
        if !self.blocking {
            return Ok(());
        }
        let culprit = |code| DriverError::Culprit { work: work.to_string(), why: meaning(code) };
        if self.comms.watched.get().is_some() {
            return self.comms.until(|| is_idle(queue).map_err(culprit));
        }
        // SAFETY: the stream exists until the GPU is dropped.
        unsafe { cuda::stream::synchronize(queue) }.map_err(culprit)
    }

    /// Makes the host wait for an event. The context must be current.
    fn until(&self, event: CUevent) -> Result<()> {
        if self.comms.watched.get().is_none() {
            // SAFETY: it exists until the GPU is dropped.
            return unsafe { event::synchronize(event) }.map_err(failed("cuEventSynchronize"));
        }
        // SAFETY: as above.
        self.comms.until(|| answer(unsafe { event::query(event) }).map_err(failed("cuEventQuery")))
    }

    /// Makes the host wait for all work. The context must be current.
    fn drain(&self, state: &State) -> Result<()> {
        if self.comms.watched.get().is_some() {
            state.queues.iter().try_for_each(|queue| self.comms.until(|| idle(queue.stream)))?;
        }
        ctx::synchronize().map_err(failed("cuCtxSynchronize"))
    }

    /// Launches a kernel, whose arguments have been checked.
    fn run(
        &self,
        state: &mut State,
        queue: CUstream,
        kernel: &'static Kernel,
        launch: Launch,
        args: &[Argument],
    ) -> Result<()> {
        let function = self.function(state, kernel)?;
        let mut values: Vec<u64> = args.iter().map(Argument::bits).collect();
        let mut places: Vec<*mut c_void> = values.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        let [grid, block] = [launch.grid, launch.block].map(|[x, y, z]| (x, y, z));
        // SAFETY: the arguments match the table, which the host build asserts against the source; they are copied
        // during the call. The caller guarantees the addresses.
        let queued = unsafe { cuda::launch_kernel(function, grid, block, launch.shared, queue, &mut places) };
        queued.map_err(|code| match format!("cuLaunchKernel: {}", meaning(code)) {
            why if is_of_work(code) => DriverError::Found { at: format!("the launch of {}", kernel.name), why },
            why => DriverError::Kernel { kernel: kernel.name, why },
        })?;
        self.settle(queue, format_args!("kernel {}", kernel.name))
    }

    /// Queues a library product that has been checked.
    fn multiply(&self, state: &mut State, stream: Stream, queue: CUstream, product: Product) -> Result<()> {
        let [m, n, k] = product.mnk;
        if k == 0 {
            let bytes = if product.accumulate { 0 } else { m * n * product.result().size() };
            return self.fill(queue, product.c, bytes);
        }
        let closed =
            || DriverError::Call { call: "cublasLtMatmul", why: "the GPU was opened without cuBLASLt".to_owned() };
        state.library.as_mut().ok_or_else(closed)?.product(stream, queue, product)?;
        self.settle(queue, format_args!("the product of {m} × {k} by {k} × {n}"))
    }

    /// Queues a fill with zeros.
    fn fill(&self, queue: CUstream, at: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(()); // zero bytes, which the driver may refuse
        }
        // SAFETY: the caller guarantees the address.
        unsafe { memset_d8_async(at.0, 0, bytes, queue) }.map_err(failed("cuMemsetD8Async"))?;
        self.settle(queue, format_args!("zeros in {bytes} bytes"))
    }

    /// The function of a kernel, whose file is compiled and loaded at its first use.
    fn function(&self, state: &mut State, kernel: &'static Kernel) -> Result<CUfunction> {
        if let Some(&function) = state.functions.get(&[kernel.source.name, kernel.name]) {
            return Ok(function);
        }
        let module = self.load(kernel.source)?;
        state.modules.push(module);
        // The file of a variant has only that kernel.
        for kernel in KERNELS.iter().filter(|other| other.source == kernel.source).chain([kernel]) {
            let name = CString::new(kernel.name);
            let name = name.map_err(|error| DriverError::Kernel { kernel: kernel.name, why: error.to_string() })?;
            // SAFETY: the module is loaded, and unloaded only when launches are no longer possible.
            let function = unsafe { module::get_function(module, name) }.map_err(failed("cuModuleGetFunction"))?;
            // A kernel without room is refused when it is launched.
            if (1..=self.properties.shared).contains(&kernel.geometry.shared()) {
                let most = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: the function was found just now.
                let set = unsafe { set_function_attribute(function, most, kernel.geometry.shared() as i32) };
                set.map_err(failed("cuFuncSetAttribute"))?;
            }
            state.functions.insert([kernel.source.name, kernel.name], function);
        }
        let missing = || DriverError::Kernel { kernel: kernel.name, why: "is not in its file".to_owned() };
        state.functions.get(&[kernel.source.name, kernel.name]).copied().ok_or_else(missing)
    }

    /// Loads a file of kernels. A damaged image on disk, which does not load, is compiled anew.
    fn load(&self, source: &'static Source) -> Result<CUmodule> {
        let load = |anew| -> Result<CUmodule> {
            let image = self.compiler.image(source, anew)?;
            // SAFETY: the driver reads an image of machine code, whose header contains its length, before this returns.
            unsafe { module::load_data(image.as_ptr().cast()) }.map_err(failed("cuModuleLoadData"))
        };
        load(false).or_else(|error| match error {
            DriverError::Call { call: "cuModuleLoadData", .. } => load(true),
            other => Err(other),
        })
    }
}

/// Whether something is over, by the driver's answer.
fn answer(query: std::result::Result<(), Code>) -> std::result::Result<bool, Code> {
    match query {
        Ok(()) => Ok(true),
        Err(Code(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        Err(other) => Err(other),
    }
}

/// Whether a stream has done its work. Its context must be current.
fn is_idle(queue: CUstream) -> std::result::Result<bool, Code> {
    // SAFETY: the caller has made the stream, and not destroyed it.
    answer(unsafe { cuStreamQuery(queue) }.result())
}

fn idle(queue: CUstream) -> Result<bool> {
    is_idle(queue).map_err(failed("cuStreamQuery"))
}

/// Memory of the current context, which the caller frees.
fn allocate(bytes: usize) -> Result<CUdeviceptr> {
    // SAFETY: as the seam states, the caller must not read it before it is written.
    match unsafe { malloc_sync(bytes) } {
        Ok(at) => Ok(at),
        Err(Code(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
            let (free, total) = mem_get_info().map_err(failed("cuMemGetInfo"))?;
            let (held, memory) = (total.saturating_sub(free) as u64, total as u64);
            Err(DriverError::OutOfMemory { bytes, held, memory })
        }
        Err(other) => Err(failed("cuMemAlloc")(other)),
    }
}

impl State {
    fn queue(&mut self, call: &'static str, stream: Stream) -> Result<&mut Queue> {
        let unknown = || DriverError::Unknown { call, what: format!("{stream:?}") };
        self.queues.get_mut(stream.0).ok_or_else(unknown)
    }

    /// The GPU's event for this event, or for a later moment of the same stream.
    fn event(&mut self, call: &'static str, event: Event) -> Result<CUevent> {
        let (stream, moment) = (Stream((event.0 % STREAMS) as usize), event.0 / STREAMS);
        let unknown = || DriverError::Unknown { call, what: format!("{event:?}") };
        let queue = self.queue(call, stream).map_err(|_| unknown())?;
        let known = (moment < queue.recorded).then(|| queue.events.get((moment % EVENTS) as usize));
        known.flatten().copied().ok_or_else(unknown)
    }
}

impl Driver for Gpu {
    fn name(&self) -> &str {
        "cuda"
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn stream_with(&self, priority: Priority) -> Result<Stream> {
        let mut state = self.state()?;
        if state.queues.len() as u64 >= STREAMS {
            return Err(DriverError::Call { call: "cuStreamCreate", why: format!("a rank has at most {STREAMS}") });
        }
        let priority = match priority {
            Priority::Usual => 0,
            Priority::Highest => get_priority_range().map_err(failed("cuCtxGetStreamPriorityRange"))?.1,
        };
        let stream = create_with_priority(StreamKind::NonBlocking, priority).map_err(failed("cuStreamCreate"))?;
        state.queues.push(Queue { stream, events: Vec::new(), recorded: 0, captured: None });
        Ok(Stream(state.queues.len() - 1))
    }

    fn alloc(&self, bytes: usize) -> Result<Address> {
        let _state = self.state()?;
        allocate(bytes.max(1)).map(Address)
    }

    fn free_all(&self, all: &[Address]) -> Result<()> {
        let _captures = graph::without_captures();
        self.drain(&*self.state()?)?;
        // SAFETY: `alloc` returned them, as the driver checks, and no queued work uses them any more.
        all.iter().try_for_each(|at| unsafe { free_sync(at.0) }.map_err(failed("cuMemFree")))
    }

    fn alloc_host(&self, bytes: usize) -> Result<Address> {
        let _state = self.state()?;
        staging::allocate(bytes.max(1)).map(|at| Address(at as u64))
    }

    fn free_host(&self, at: Address) -> Result<()> {
        let _captures = graph::without_captures();
        self.drain(&*self.state()?)?;
        staging::free(at)
    }

    fn queue(&self, stream: Stream, work: Work) -> Result<()> {
        work.check()?;
        let call = match work {
            Work::Discard { .. } => return Ok(()),
            Work::Launch { .. } => "launch",
            _ => work.name(),
        };
        let (mut state, queue) = self.queue_of(call, stream)?;
        match work {
            Work::Launch { kernel, launch, args } => self.run(&mut state, queue, kernel.0, launch, &args),
            Work::Product(product) => self.multiply(&mut state, stream, queue, product),
            Work::Save { from, to, bytes } => {
                staging::save(queue, from, to, bytes)?;
                self.settle(queue, format_args!("a copy of {bytes} bytes to pinned memory"))
            }
            Work::Load { from, to, bytes } => {
                staging::load(queue, from, to, bytes)?;
                self.settle(queue, format_args!("a copy of {bytes} bytes from pinned memory"))
            }
            Work::Discard { .. } | Work::Copy { bytes: 0, .. } => Ok(()),
            Work::Copy { from, to, bytes } => {
                // SAFETY: the caller guarantees both addresses, and that the ranges do not overlap.
                unsafe { memcpy_dtod_async(to.0, from.0, bytes, queue) }.map_err(failed("cuMemcpyDtoDAsync"))?;
                self.settle(queue, format_args!("a copy of {bytes} bytes"))
            }
            Work::Zero { at, bytes } => self.fill(queue, at, bytes),
            Work::Exchange { on, exchange } => {
                self.comms.exchange(on, &exchange, queue)?;
                self.settle(queue, exchange.name())
            }
        }
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        let (mut state, _) = self.queue_of("record", stream)?;
        let queue = state.queue("record", stream)?;
        let (moment, slot) = (queue.recorded, (queue.recorded % EVENTS) as usize);
        if slot == queue.events.len() {
            let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING;
            queue.events.push(event::create(flags).map_err(failed("cuEventCreate"))?);
        }
        // SAFETY: both exist until the GPU is dropped.
        unsafe { event::record(queue.events[slot], queue.stream) }.map_err(failed("cuEventRecord"))?;
        queue.recorded += 1;
        Ok(Event(moment * STREAMS + stream.0 as u64))
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        let (mut state, queue) = self.queue_of("wait", stream)?;
        let event = state.event("wait", event)?;
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both exist until the GPU is dropped.
        unsafe { cuda::stream::wait_event(queue, event, flags) }.map_err(failed("cuStreamWaitEvent"))
    }

    fn reach(&self, other: &dyn Driver) -> Result<Reach> {
        peers::reach(self, other)
    }

    fn wait_for(&self, stream: Stream, other: &dyn Driver, event: Event) -> Result<()> {
        peers::wait_for(self, stream, other, event)
    }

    fn copy_between(&self, stream: Stream, from: Remote<'_>, to: Remote<'_>, bytes: usize) -> Result<()> {
        peers::copy_between(self, stream, from, to, bytes)
    }

    fn finish(&self, event: Event) -> Result<()> {
        let event = self.state()?.event("finish", event)?;
        self.until(event) // not under the lock, so that other threads continue
    }

    fn write(&self, stream: Stream, to: Address, bytes: &[u8]) -> Result<()> {
        let (mut state, queue) = self.queue_of("write", stream)?;
        for (part, bytes) in bytes.chunks(SLOT).enumerate() {
            let mut slot = state.staging.take()?;
            self.until(slot.done)?;
            let staged = slot.bytes(bytes.len());
            staged.copy_from_slice(bytes);
            // SAFETY: the slot keeps the bytes until the event that follows the copy; the caller guarantees the
            // destination.
            let queued = unsafe { memcpy_htod_async(to.offset(part * SLOT).0, staged, queue) };
            queued.map_err(failed("cuMemcpyHtoDAsync"))?;
            // SAFETY: both exist until the GPU is dropped.
            unsafe { event::record(slot.done, queue) }.map_err(failed("cuEventRecord"))?;
            state.staging.give_back(slot);
            self.settle(queue, format_args!("a copy of {} bytes from the host", bytes.len()))?;
        }
        Ok(())
    }

    fn read_all(&self, stream: Stream, places: &mut [(Address, &mut [u8])]) -> Result<()> {
        let parts = places.iter_mut().flat_map(|(from, into)| {
            into.chunks_mut(SLOT).enumerate().map(|(part, into)| (from.offset(part * SLOT), into))
        });
        let mut parts = parts.collect::<Vec<_>>();
        for parts in parts.chunks_mut(READ_AT_ONCE) {
            let (mut state, queue) = self.queue_of("read", stream)?;
            let mut slots = Vec::with_capacity(parts.len());
            for (from, into) in &*parts {
                let mut slot = state.staging.take()?;
                self.until(slot.done)?;
                // SAFETY: the slot belongs to this call until the copy is done; the caller guarantees the source.
                let queued = unsafe { memcpy_dtoh_async(slot.bytes(into.len()), from.0, queue) };
                queued.map_err(failed("cuMemcpyDtoHAsync"))?;
                // SAFETY: both exist until the GPU is dropped.
                unsafe { event::record(slot.done, queue) }.map_err(failed("cuEventRecord"))?;
                slots.push(slot);
            }
            drop(state); // other threads continue while this one waits
            slots.last().map_or(Ok(()), |slot| self.until(slot.done))?; // copies of a stream are done in order
            for (mut slot, (_, into)) in slots.into_iter().zip(parts) {
                into.copy_from_slice(slot.bytes(into.len()));
                self.state()?.staging.give_back(slot);
            }
        }
        Ok(())
    }

    fn nccl(&self) -> Result<&dyn Nccl> {
        self.comms.find().map(|()| self as &dyn Nccl)
    }

    fn watch(&self, watch: Weak<dyn Watch>) {
        self.comms.watched.set(watch);
    }

    fn capture(&self, stream: Stream, work: &[Work]) -> Result<Option<Graph>> {
        graph::capture(self, stream, work)
    }

    fn replay(&self, stream: Stream, graph: Graph, changed: &[(usize, &[Argument])]) -> Result<()> {
        let (state, queue) = self.queue_of("replay", stream)?;
        state.graphs.launch(queue, graph, changed)?;
        self.settle(queue, format_args!("{graph:?}"))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let _captures = graph::without_captures();
        // First: work of theirs may wait for ranks that are gone.
        if self.context.enter().is_ok() {
            self.comms.end_all();
        }
        // A GPU that failed keeps its memory until the process ends.
        if self.context.enter().and_then(|()| ctx::synchronize().map_err(failed("cuCtxSynchronize"))).is_err() {
            return;
        }
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.staging.drop_all();
        state.library.iter_mut().for_each(Library::drop_all);
        state.graphs.drop_all();
        for queue in state.queues.drain(..) {
            // SAFETY: created by this, no work is queued, and they are removed from the list.
            unsafe {
                queue.events.into_iter().for_each(|event| _ = event::destroy(event));
                _ = cuda::stream::destroy(queue.stream);
            }
        }
        for module in state.modules.drain(..) {
            // SAFETY: loaded by this; none of its functions runs, and none can be launched again.
            _ = unsafe { module::unload(module) };
        }
    }
}
