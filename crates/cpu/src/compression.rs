use super::prelude::*;
use meshwork_compress::feedback::Sender;
use meshwork_compress::{
    Compressor, Draws, Feedback, Fold, PowerSgd, Scheme, Shape, Sparse, TILE, compress_into, restore, restore_tiles,
    wire_bytes,
};
use meshwork_core::BufferError;
use meshwork_tensor::kernel::Compression;

/// Elements `at..at + count` of memory to be written.
fn part<T>(all: &mut [T], at: usize, count: usize) -> Result<&mut [T]> {
    let held = all.len();
    let (start, end) = (at, at.saturating_add(count));
    all.get_mut(start..end).ok_or_else(|| BufferError::Range { start, end, count: held }.into())
}

/// Rejects memory whose length differs from the value's.
fn require_count(count: usize, wanted: usize) -> Result<()> {
    if count == wanted { Ok(()) } else { Err(BufferError::Range { start: 0, end: wanted, count }.into()) }
}

/// Rejects a matrix or factors whose lengths do not match the shape.
fn require_factors(of: PowerSgd, shape: Shape, m: &Buffer, [p, q]: [&Buffer; 2]) -> Result<()> {
    of.check(shape).map_err(failed("powersgd"))?;
    let [of_p, of_q] = of.factors(shape);
    [(m, shape.len()), (p, of_p), (q, of_q)]
        .into_iter()
        .try_for_each(|(buffer, len)| require_count(buffer.count(), len))
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
        q: &mut Buffer,
        p: &mut Buffer,
    ) -> Result<()> {
        require_factors(of, shape, m, [p, q])?;
        let q = q.as_mut_slice::<f32>()?;
        of.start(q, shape, draws);
        of.times(m.as_slice()?, q, shape, p.as_mut_slice()?);
        Ok(())
    }

    fn right_factor(&self, of: PowerSgd, shape: Shape, m: &Buffer, p: &mut Buffer, q: &mut Buffer) -> Result<()> {
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
