//! Work captured as a graph of the driver's.
//!
//! A stream that is captured takes calls as always and runs none of them. Here each call has run before ([`crate::replay`]), so no memory is
//! allocated and nothing is compiled while a stream is captured. What the driver does not capture is queued call by call.

use super::{Gpu, libraries::failed};
use crate::driver::{DriverError, Graph, Result, Stream, Work};
use cudarc::driver::result::{graph, stream as calls};
use cudarc::driver::sys::{CUgraphExec, CUgraphInstantiate_flags, CUstream, CUstreamCaptureMode};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held while a stream is captured, and by those who wait for a whole context, which the driver refuses meanwhile: contexts are those of the process,
/// and so is this.
static CAPTURE: Mutex<()> = Mutex::new(());

/// Nothing is captured until the guard is dropped. To be taken before the state of a GPU.
pub(super) fn without_captures() -> MutexGuard<'static, ()> {
    CAPTURE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The graphs of a GPU, by number.
#[derive(Debug, Default)]
pub(super) struct Graphs(Vec<CUgraphExec>);

impl Graphs {
    pub(super) fn launch(&self, queue: CUstream, which: Graph) -> Result<()> {
        let unknown = || DriverError::Unknown { call: "replay", what: format!("{which:?}") };
        let graph = usize::try_from(which.0).ok().and_then(|at| self.0.get(at)).ok_or_else(unknown)?;
        // SAFETY: both exist until the GPU is dropped; the places are those of calls that the caller answered for, and answers for again.
        unsafe { graph::launch(*graph, queue) }.map_err(failed("cuGraphLaunch"))
    }

    pub(super) fn drop_all(&mut self) {
        for graph in self.0.drain(..) {
            // SAFETY: made below, no work is queued, and it is gone from the list.
            _ = unsafe { graph::exec_destroy(graph) };
        }
    }
}

/// Captures pieces of work and queues them: as a graph, or call by call where they cannot be captured.
pub(super) fn capture(gpu: &Gpu, stream: Stream, work: &[Work]) -> Result<Option<Graph>> {
    let queue = gpu.state()?.stream("capture", stream)?;
    let made = match record(gpu, stream, queue, work) {
        Ok(made) => made,
        Err(_) => {
            work.iter().try_for_each(|work| work.queue(gpu, stream))?;
            return Ok(None);
        }
    };
    let mut state = gpu.state()?;
    state.graphs.0.push(made);
    let graph = Graph(state.graphs.0.len() as u64 - 1);
    state.graphs.launch(queue, graph)?;
    Ok(Some(graph))
}

/// The graph of what the calls queue. The stream is not captured any more when this returns.
fn record(gpu: &Gpu, stream: Stream, queue: CUstream, work: &[Work]) -> Result<CUgraphExec> {
    let _captures = without_captures();
    // Calls of other threads, of other streams, stay what they are.
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream exists until the GPU is dropped.
    unsafe { calls::begin_capture(queue, mode) }.map_err(failed("cuStreamBeginCapture"))?;
    let queued = work.iter().try_for_each(|work| work.queue(gpu, stream));
    // SAFETY: the capture was begun just now.
    let captured = unsafe { calls::end_capture(queue) }.map_err(failed("cuStreamEndCapture"))?;
    let none = CUgraphInstantiate_flags(0);
    // SAFETY: the graph was captured just now.
    let made =
        queued.and_then(|()| unsafe { graph::instantiate(captured, none) }.map_err(failed("cuGraphInstantiate")));
    // SAFETY: as above; what was made of it does not need it.
    _ = unsafe { graph::destroy(captured) };
    made
}
