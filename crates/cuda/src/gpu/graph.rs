//! Work captured as a CUDA graph.
//!
//! A stream in capture mode accepts calls but does not run them. Here each call has run before ([`crate::replay`]), so
//! no memory is allocated and nothing is compiled during a capture. Work that the driver cannot capture is queued call
//! by call.
//!
//! The node of each kernel is recorded, because its arguments may change later: after the call, it is the stream's last
//! node.

use super::{Gpu, libraries::failed};
use crate::driver::{Argument, Driver, DriverError, Graph, Result, Stream, Work};
use cudarc::driver::result::{graph, stream as calls};
use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS_v2_st, CUfunction, CUgraph, CUgraphExec, CUgraphInstantiate_flags, CUgraphNode, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus, cuGraphExecKernelNodeSetParams_v2, cuStreamGetCaptureInfo_v3,
};
use meshwork_kernels::Launch;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

/// Held while a stream is captured, and by those who wait for a whole context, which the driver refuses meanwhile:
/// contexts belong to the process, and so does this.
static CAPTURE: Mutex<()> = Mutex::new(());

/// Prevents captures until the guard is dropped. Must be taken before the state of a GPU.
pub(super) fn without_captures() -> MutexGuard<'static, ()> {
    CAPTURE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The oldest driver that reports the node of a call, in CUDA's version numbers.
const OLDEST: i32 = 12_030;

/// The graphs of a GPU, by number.
#[derive(Debug, Default)]
pub(super) struct Graphs(Vec<Captured>);

/// A graph that can be launched, its source, and the kernel of each captured piece of work, if it is one.
#[derive(Debug)]
struct Captured {
    graph: CUgraph,
    launched: CUgraphExec,
    nodes: Vec<Option<Node>>,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    handle: CUgraphNode,
    function: CUfunction,
    launch: Launch,
}

impl Graphs {
    /// Sets the arguments of the kernels in `changed`, and launches the graph.
    pub(super) fn launch(&self, queue: CUstream, which: Graph, changed: &[(usize, &[Argument])]) -> Result<()> {
        let unknown = |what| DriverError::Unknown { call: "replay", what };
        let graph = usize::try_from(which.0).ok().and_then(|at| self.0.get(at));
        let graph = graph.ok_or_else(|| unknown(format!("{which:?}")))?;
        for &(at, args) in changed {
            let node = graph.nodes.get(at).copied().flatten();
            node.ok_or_else(|| unknown(format!("kernel {at} of {which:?}")))?.set(graph.launched, args)?;
        }
        // SAFETY: both exist until the GPU is dropped; the caller has guaranteed the addresses at capture, and
        // guarantees them again.
        unsafe { graph::launch(graph.launched, queue) }.map_err(failed("cuGraphLaunch"))
    }

    pub(super) fn drop_all(&mut self) {
        for Captured { graph, launched, .. } in self.0.drain(..) {
            // SAFETY: created below, no work is queued, and they are removed from the list.
            unsafe {
                _ = graph::exec_destroy(launched);
                _ = graph::destroy(graph);
            }
        }
    }
}

impl Node {
    /// Sets arguments for later launches; queued launches keep the old ones.
    fn set(&self, graph: CUgraphExec, args: &[Argument]) -> Result<()> {
        let mut values: Vec<u64> = args.iter().map(Argument::bits).collect();
        let mut places: Vec<*mut c_void> = values.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        let Launch { grid, block, shared } = self.launch;
        let params = CUDA_KERNEL_NODE_PARAMS_v2_st {
            func: self.function,
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: shared,
            kernelParams: places.as_mut_ptr(),
            extra: null_mut(),
            kern: null_mut(),
            ctx: null_mut(),
        };
        // SAFETY: the node belongs to the source graph, which is kept; the arguments have the kernel's types, like the
        // captured ones, and are copied during the call. The caller guarantees the addresses.
        let set = unsafe { cuGraphExecKernelNodeSetParams_v2(graph, self.handle, &raw const params) };
        set.result().map_err(failed("cuGraphExecKernelNodeSetParams"))
    }
}

/// Captures pieces of work and queues them: as a graph, or call by call if they cannot be captured.
pub(super) fn capture(gpu: &Gpu, stream: Stream, work: &[Work]) -> Result<Option<Graph>> {
    let Ok(made) = record(gpu, stream, work) else {
        work.iter().try_for_each(|work| gpu.queue(stream, work.clone()))?;
        return Ok(None);
    };
    let (mut state, queue) = gpu.queue_of("capture", stream)?;
    state.graphs.0.push(made);
    let graph = Graph(state.graphs.0.len() as u64 - 1);
    state.graphs.launch(queue, graph, &[])?;
    Ok(Some(graph))
}

/// A capture of a stream by this thread, which ends on drop.
struct Capturing<'a>(&'a Gpu, Stream);

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if let Ok(mut state) = self.0.state() {
            state.queue("capture", self.1).into_iter().for_each(|queue| queue.captured = None);
        }
        self.0.released.notify_all();
    }
}

/// The graph of the queued calls. The capture has ended when this returns.
fn record(gpu: &Gpu, stream: Stream, work: &[Work]) -> Result<Captured> {
    let refused = |why: &str| Err(DriverError::Call { call: "cuStreamBeginCapture", why: why.to_owned() });
    if gpu.driver < OLDEST {
        return refused("the driver is older than CUDA 12.3");
    }
    if gpu.blocking {
        return refused("a stream that is captured cannot be waited for after each call");
    }
    let _captures = without_captures();
    let (mut state, queue) = gpu.queue_of("capture", stream)?;
    // Calls of other threads for other streams run as usual; calls for this stream wait.
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream exists until the GPU is dropped.
    unsafe { calls::begin_capture(queue, mode) }.map_err(failed("cuStreamBeginCapture"))?;
    state.queue("capture", stream)?.captured = Some(thread::current().id());
    drop(state);
    let _capturing = Capturing(gpu, stream);
    let queued: Result<Vec<Option<Node>>> = work
        .iter()
        .map(|work| {
            gpu.queue(stream, work.clone())?;
            let Work::Launch { kernel, launch, .. } = work else { return Ok(None) };
            let mut state = gpu.state()?;
            let function = gpu.function(&mut state, kernel.0)?;
            Ok(Some(Node { handle: last_node(queue)?, function, launch: *launch }))
        })
        .collect();
    // SAFETY: the capture was begun just now.
    let captured = unsafe { calls::end_capture(queue) }.map_err(failed("cuStreamEndCapture"))?;
    let none = CUgraphInstantiate_flags(0);
    // SAFETY: the graph was captured just now.
    let launched = || unsafe { graph::instantiate(captured, none) }.map_err(failed("cuGraphInstantiate"));
    let made = queued.and_then(|nodes| Ok(Captured { graph: captured, launched: launched()?, nodes }));
    made.inspect_err(|_| {
        // SAFETY: as above; it has no executable graph.
        _ = unsafe { graph::destroy(captured) };
    })
}

/// The last piece of work of a stream that is captured.
fn last_node(queue: CUstream) -> Result<CUgraphNode> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut nodes, mut edges, mut count) = (null(), null(), 0);
    // SAFETY: the stream exists until the GPU is dropped; the driver writes to the given pointers, and owns the list of
    // nodes until the next call.
    let told = unsafe {
        let (none, graph) = (null_mut(), null_mut());
        cuStreamGetCaptureInfo_v3(queue, &raw mut status, none, graph, &raw mut nodes, &raw mut edges, &raw mut count)
    };
    told.result().map_err(failed("cuStreamGetCaptureInfo"))?;
    let call = "cuStreamGetCaptureInfo";
    if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE || count != 1 {
        return Err(DriverError::Call { call, why: format!("{status:?}, and {count} last pieces of work") });
    }
    // SAFETY: the list has one node.
    Ok(unsafe { *nodes })
}
