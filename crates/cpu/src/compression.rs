use super::prelude::*;
use meshwork_compress::feedback::Sender;
use meshwork_compress::{
    Draws, Feedback, Fold, PowerSgd, Scheme, Shape, Sparse, TILE, compress_into, restore, restore_tiles, wire_bytes,
};
use meshwork_core::BufferError;
use meshwork_tensor::kernel::{Compression, compress_error as failed, require_count, require_factors};

/// The first elements of memory to be written.
fn first<T>(all: &mut [T], count: usize) -> Result<&mut [T]> {
    let held = all.len();
    all.get_mut(..count).ok_or_else(|| BufferError::Range { start: 0, end: count, count: held }.into())
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
    fn pack(&self, scheme: &Scheme, shape: Shape, draws: Draws, x: &Buffer, message: &mut Buffer) -> Result<()> {
        let bytes = wire_bytes(scheme, shape).map_err(failed("pack"))?;
        let to = first(message.as_mut_slice::<u8>()?, bytes)?;
        compress_into(scheme, x.as_slice()?, shape, draws, &mut [], to).map_err(failed("pack"))
    }

    fn unpack(&self, scheme: &Scheme, shape: Shape, message: &Buffer, fold: Fold, out: &mut Buffer) -> Result<()> {
        let to = first(out.as_mut_slice::<f32>()?, shape.len())?;
        let message = message.as_slice::<u8>()?;
        let (&Scheme::Values(values), true) = (scheme, to.len() > PIECE) else {
            return restore(message, scheme, shape, fold, to).map_err(failed("unpack"));
        };
        let mut restored: Vec<_> = to.chunks(PIECE).map(|_| Ok(())).collect();
        for_each(to.chunks_mut(PIECE).zip(&mut restored).enumerate(), |(piece, (to, restored))| {
            *restored = restore_tiles(message, values, shape, fold, piece * (PIECE / TILE), to);
        });
        restored.into_iter().collect::<Result<_, _>>().map_err(failed("unpack"))
    }

    fn take(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, x: &Buffer) -> Result<Buffer> {
        let indices = sparse.read_indices(indices.as_slice()?, shape).map_err(failed("take"))?;
        let x = x.as_slice::<f32>()?;
        require_count(x.len(), shape.len())?;
        let mut out = self.alloc(DType::F32, indices.len())?;
        out.as_mut_slice()?.copy_from_slice(&sparse.take(x, shape, &indices));
        Ok(out)
    }

    fn put(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, values: &Buffer) -> Result<Buffer> {
        let indices = sparse.read_indices(indices.as_slice()?, shape).map_err(failed("put"))?;
        let values = values.as_slice::<f32>()?;
        require_count(values.len(), indices.len())?;
        let mut out = self.zeros(DType::F32, shape.len())?;
        let all = out.as_mut_slice::<f32>()?;
        indices.iter().zip(values).for_each(|(&index, &value)| all[index as usize] = value);
        Ok(out)
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

    fn left_factor(
        &self,
        of: PowerSgd,
        shape: Shape,
        draws: Draws,
        m: &Buffer,
        [p, q]: [&mut Buffer; 2],
    ) -> Result<()> {
        require_factors(of, shape, m, [p, q])?;
        let q = q.as_mut_slice::<f32>()?;
        of.start(q, shape, draws);
        of.times(m.as_slice()?, q, shape, p.as_mut_slice()?);
        Ok(())
    }

    fn right_factor(&self, of: PowerSgd, shape: Shape, m: &Buffer, [p, q]: [&mut Buffer; 2]) -> Result<()> {
        require_factors(of, shape, m, [p, q])?;
        let p = p.as_mut_slice::<f32>()?;
        of.orthogonalise(p);
        of.transposed_times(m.as_slice()?, p, shape, q.as_mut_slice()?);
        Ok(())
    }

    fn join(&self, of: PowerSgd, shape: Shape, [p, q]: &[Buffer; 2], among: usize, out: &mut Buffer) -> Result<()> {
        require_factors(of, shape, out, [p, q])?;
        let out = out.as_mut_slice::<f32>()?;
        of.product(p.as_slice()?, q.as_slice()?, shape, Fold::Replace, out);
        if among > 1 {
            out.iter_mut().for_each(|out| *out /= among as f32);
        }
        Ok(())
    }
}
