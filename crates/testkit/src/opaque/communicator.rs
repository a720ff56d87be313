//! A communicator for opaque memory: the collectives of another one on the host memory behind it.

use super::memory::{hide, into_host, is_hidden};
use meshwork_core::comm::{Call, Decorator, OpKind, PendingOp};
use meshwork_core::{Buffer, CommError, Communicator, Pending};
use std::sync::Arc;

/// `inner`, working on [opaque](super) memory as a device's own communication library works on device memory. Buffers
/// in host memory pass through.
pub fn communicator(inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
    Arc::new(Behind(inner))
}

#[derive(Debug)]
struct Behind(Arc<dyn Communicator>);

impl Decorator for Behind {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.0
    }

    fn pass(&self, Call { op, input, output, caller }: Call) -> Result<Pending, CommError> {
        let returned = if op.kind() == OpKind::Send { &input } else { &output };
        let hidden = returned.as_ref().is_some_and(is_hidden);
        let unhide =
            |buffer: Option<Buffer>| buffer.map(|buffer| if is_hidden(&buffer) { into_host(buffer) } else { buffer });
        let (input, mut output) = (unhide(input), unhide(output));
        if self.0.size() == 1
            && let (Some(input), Some(output)) = (&input, &mut output)
        {
            // With one rank every collective is the identity; a communicator that only records does not copy.
            output.as_bytes_mut()?.copy_from_slice(input.as_bytes()?);
        }
        let pending = self.0.start(Call { op, input, output, caller })?;
        Ok(if hidden { Pending::new(Hidden(pending)) } else { pending })
    }

    fn around(&self, part: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        communicator(part)
    }
}

/// An operation whose result is hidden from the host again.
struct Hidden(Pending);

impl PendingOp for Hidden {
    fn wait(self: Box<Self>) -> Result<Buffer, CommError> {
        Ok(hide(self.0.wait()?))
    }

    fn is_done(&self) -> bool {
        self.0.is_done()
    }
}
