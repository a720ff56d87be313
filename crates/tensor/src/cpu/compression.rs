use super::Cpu;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::Compression;
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, Fold, Scheme, Shape, compress_into, restore, wire_bytes};
use meshwork_core::{Buffer, BufferError, DType};

/// Elements `at..at + count` of memory that is written.
fn part<T>(all: &mut [T], at: usize, count: usize) -> Result<&mut [T]> {
    let held = all.len();
    let (start, end) = (at, at.saturating_add(count));
    all.get_mut(start..end).ok_or_else(|| BufferError::Range { start, end, count: held }.into())
}

fn failed(op: &'static str) -> impl Fn(meshwork_compress::CompressError) -> Error {
    move |source| Error::Compress { op, source: Box::new(source) }
}

/// The states of a sender as slices.
fn slices(sender: &mut Sender<Buffer>) -> Result<Sender<&mut [f32]>> {
    let Sender { residual, estimate, momentum } = sender;
    Ok(Sender {
        residual: residual.as_mut_slice()?,
        estimate: estimate.as_mut_slice()?,
        momentum: momentum.as_mut_slice()?,
    })
}

impl Compression for Cpu {
    fn pack(
        &self,
        scheme: &Scheme,
        shape: Shape,
        draws: Draws,
        x: &Buffer,
        message: &mut Buffer,
        at: usize,
    ) -> Result<()> {
        let bytes = wire_bytes(scheme, shape).map_err(failed("pack"))?;
        let to = part(message.as_mut_slice::<u8>()?, at, bytes)?;
        compress_into(scheme, x.as_slice()?, shape, draws, &mut [], to).map_err(failed("pack"))
    }

    fn unpack(
        &self,
        scheme: &Scheme,
        shape: Shape,
        message: &Buffer,
        fold: Fold,
        out: &mut Buffer,
        at: usize,
    ) -> Result<()> {
        let to = part(out.as_mut_slice::<f32>()?, at, shape.len())?;
        restore(message.as_slice::<u8>()?, scheme, shape, fold, to).map_err(failed("unpack"))
    }

    fn outgoing(&self, feedback: Feedback, x: &Buffer, first: bool, sender: &mut Sender<Buffer>) -> Result<Buffer> {
        let mut out = self.alloc(DType::F32, x.count())?;
        feedback.outgoing(x.as_slice()?, first, &mut slices(sender)?, out.as_mut_slice()?);
        Ok(out)
    }

    fn sent(&self, feedback: Feedback, target: &Buffer, sent: &Buffer, sender: &mut Sender<Buffer>) -> Result<()> {
        feedback.sent(target.as_slice()?, sent.as_slice()?, &mut slices(sender)?);
        Ok(())
    }
}
