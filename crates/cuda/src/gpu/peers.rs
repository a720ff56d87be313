//! Several GPUs of one process: how one reaches the memory of another.
//!
//! Memory of `cuMemAlloc` is open to a peer as soon as its context was told so, and so is memory allocated later. Where
//! two GPUs cannot be peers, the driver copies between them by way of the host, in the order of the stream and without
//! a wait of the program.

use super::{Gpu, libraries::failed};
use crate::driver::{Driver, DriverError, Event, Reach, Remote, Result, Stream};
use cudarc::driver::result::{DriverError as Code, memcpy_peer_async, stream::wait_event};
use cudarc::driver::sys::{CUevent_wait_flags, CUresult, cuCtxEnablePeerAccess, cuDeviceCanAccessPeer};
use std::any::Any;
use std::sync::PoisonError;

/// The GPU behind a driver.
fn gpu<'a>(call: &'static str, one: &Gpu, other: &'a dyn Driver) -> Result<&'a Gpu> {
    let any: &dyn Any = other;
    let apart = || {
        let [one, other] = [one as &dyn Driver, other].map(|of| format!("{} {}", of.name(), of.properties().ordinal));
        DriverError::Apart { call, one, other }
    };
    any.downcast_ref::<Gpu>().ok_or_else(apart)
}

/// Enables access of this GPU's kernels to the memory of `other`, if the two can be peers. Each pair is queried once.
pub(super) fn reach(this: &Gpu, other: &dyn Driver) -> Result<Reach> {
    let other = gpu("reach", this, other)?;
    if this.context.handle == other.context.handle {
        return Ok(Reach::Direct);
    }
    let mut reaches = this.reaches.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&known) = reaches.get(&other.properties.ordinal) {
        return Ok(known);
    }
    this.context.enter()?;
    let mut can = 0;
    // SAFETY: both numbers are valid for GPUs; writes one number.
    let asked = unsafe { cuDeviceCanAccessPeer(&mut can, this.context.device, other.context.device) }.result();
    asked.map_err(failed("cuDeviceCanAccessPeer"))?;
    // SAFETY: the context of this GPU is current, and the other GPU retains its context.
    let opened = || unsafe { cuCtxEnablePeerAccess(other.context.handle, 0) }.result();
    let reach = match if can == 0 { Err(Code(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)) } else { opened() } {
        // Another user of this GPU in the process may have enabled it.
        Ok(()) | Err(Code(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) => Reach::Direct,
        // A GPU has a limited number of peers.
        Err(Code(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED | CUresult::CUDA_ERROR_TOO_MANY_PEERS)) => Reach::Copies,
        Err(other) => return Err(failed("cuCtxEnablePeerAccess")(other)),
    };
    Ok(*reaches.entry(other.properties.ordinal).or_insert(reach))
}

/// [`Driver::wait_for`].
pub(super) fn wait_for(this: &Gpu, stream: Stream, other: &dyn Driver, event: Event) -> Result<()> {
    let event = gpu("wait_for", this, other)?.event("wait_for", event)?;
    let (_state, queue) = this.queue_of("wait_for", stream)?;
    let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: both exist until their GPUs are dropped. Events of one context can be waited for in streams of another.
    unsafe { wait_event(queue, event, flags) }.map_err(failed("cuStreamWaitEvent"))
}

/// [`Driver::copy_between`].
pub(super) fn copy_between(this: &Gpu, stream: Stream, from: Remote<'_>, to: Remote<'_>, bytes: usize) -> Result<()> {
    let ends = (gpu("copy_between", this, from.driver)?, gpu("copy_between", this, to.driver)?);
    let (_state, queue) = this.queue_of("copy_between", stream)?;
    if bytes == 0 {
        return Ok(());
    }
    let [from_context, to_context] = [ends.0, ends.1].map(|gpu| gpu.context.handle);
    // SAFETY: both contexts are retained; the caller guarantees the addresses, and that the ranges do not overlap.
    let queued = unsafe { memcpy_peer_async(to_context, to.at.0, from_context, from.at.0, bytes, queue) };
    queued.map_err(failed("cuMemcpyPeerAsync"))?;
    this.settle(queue, format_args!("a copy of {bytes} bytes between GPUs"))
}
