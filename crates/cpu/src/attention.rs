use super::kernels::{self, attention, dropout};
use super::{Cpu, for_float, for_stored};
use attention::{Angles, Groups, Masks, Misplaced, Packing, Saved, Tiled};
use kernels::Float;
use meshwork_core::{Buffer, Element};
use meshwork_tensor::device::{Device, Work};
use meshwork_tensor::kernel::{
    Attention, AttentionMasks, AttentionShape, DocumentPositions, GroupedShape, Pointwise, Reach, Rotary, TableGrad,
    TurnedHeads,
};
use meshwork_tensor::{Error, Result};
use std::sync::{Mutex, PoisonError};

fn dims(shape: GroupedShape) -> attention::Dims {
    let AttentionShape { batch, seq, heads, head_dim } = shape.queries;
    let GroupedShape { keys: count, first_query, first_key: first, sequence, .. } = shape;
    let keys = attention::Keys { count, first_query, first, sequence };
    attention::Dims { batch, seq, heads, head_dim, keys }
}

/// The documents of a call, checked.
fn packing(op: &'static str, shape: GroupedShape, masks: &AttentionMasks<'_>) -> Result<Option<Packing>> {
    let Some(DocumentPositions { positions, apart }) = masks.documents else { return Ok(None) };
    let (batch, seq) = (shape.queries.batch, shape.sequence);
    let refuse = |problem: String| Error::Shape { op, problem, shapes: vec![vec![batch, seq]] };
    let positions = positions.as_slice::<i32>()?;
    if positions.len() != batch * seq {
        return Err(refuse(format!("{} positions: every token has one", positions.len())));
    }
    if let Some(run) = masks.runs(shape).into_iter().chain([shape.key_tokens()]).find(|run| run.end > seq) {
        return Err(refuse(format!("tokens {run:?}, and positions of {seq}")));
    }
    let packing = Packing::new(positions, [batch, seq], apart).map_err(|Misplaced { sample, place, position }| {
        refuse(format!(
            "token {place} of sample {sample} is at position {position} of its document: 0 begins a document, each other position \
             is one more than the one before, and all are below {seq}"
        ))
    })?;
    Ok(Some(packing))
}

/// What the host knows of the masks of a call, checked: its documents, and the keys of each sequence.
#[derive(Default)]
struct Known {
    packing: Option<Packing>,
    lengths: Option<Vec<usize>>,
}

impl Known {
    fn new(op: &'static str, shape: GroupedShape, masks: &AttentionMasks<'_>) -> Result<Self> {
        Ok(Self { packing: packing(op, shape, masks)?, lengths: lengths(op, shape, masks)? })
    }
}

/// The keys of each sequence, checked.
fn lengths(op: &'static str, shape: GroupedShape, masks: &AttentionMasks<'_>) -> Result<Option<Vec<usize>>> {
    let Some(lengths) = masks.lengths else { return Ok(None) };
    let (batch, keys) = (shape.queries.batch, shape.key_tokens().end);
    let refuse = |problem: String| Error::Shape { op, problem, shapes: vec![vec![batch, keys]] };
    let given = lengths.as_slice::<i32>()?;
    if given.len() != batch {
        return Err(refuse(format!("{} lengths: every sequence has one", given.len())));
    }
    let length = |(sample, &length): (usize, &i32)| match usize::try_from(length).ok().filter(|&length| length <= keys)
    {
        Some(length) => Ok(length),
        None => Err(refuse(format!("sample {sample} has {length} keys, and a sequence has from none to {keys}"))),
    };
    given.iter().enumerate().map(length).collect::<Result<_>>().map(Some)
}

fn masks<'a>(masks: AttentionMasks<'a>, shape: GroupedShape, known: &'a Known) -> Masks<'a> {
    let dropout = masks.dropout.map(|d| attention::Dropout {
        mask: dropout::Mask { key: d.key, p: d.p },
        first_sample: d.first_sample,
        first_head: d.first_head,
        global_heads: d.global_heads,
    });
    let (Reach { ahead, window }, Known { packing, lengths }) = (masks.reach(shape), known);
    Masks {
        dropout,
        packing: packing.as_ref(),
        window,
        ahead,
        lengths: lengths.as_deref(),
        runs: masks.runs,
        cap: masks.cap,
        slopes: masks.slopes,
    }
}

/// The share of the operations of whole sequences without documents, `flops`, that documents and lengths leave.
fn left(flops: u64, shape: GroupedShape, masks: &AttentionMasks<'_>, known: &Known) -> u64 {
    if known.packing.is_none() && known.lengths.is_none() {
        return flops;
    }
    let (batch, reach) = (shape.queries.batch, masks.reach(shape));
    let of_run = |run| {
        let tokens = [run, shape.key_tokens()];
        attention::pairs(batch, known.packing.as_ref(), tokens, reach, known.lengths.as_deref())
    };
    let pairs: u64 = masks.runs(shape).into_iter().map(of_run).sum();
    flops / shape.pairs(masks).max(1) * shape.queries.heads as u64 * pairs
}

/// The positions that the angles of a call must have.
fn positions(shape: GroupedShape, masks: &AttentionMasks<'_>) -> usize {
    masks.runs(shape).iter().map(|run| run.end).fold(shape.sequence, usize::max)
}

fn groups(shape: GroupedShape) -> Groups {
    Groups { size: shape.group, kv_heads: shape.kv_heads, first: shape.first_kv_head }
}

/// The last angles that a device computed, `[positions, 2, head_dim / 2]`: all layers of a model share them.
#[derive(Debug, Default)]
pub(super) struct LastAngles(Mutex<Option<(Rotary, usize, Buffer)>>);

impl LastAngles {
    /// The angles for at least `seq` positions.
    fn table<T: Float + Element>(&self, rotary: Rotary, seq: usize, head_dim: usize) -> Buffer {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |of: &(Rotary, usize, Buffer)| {
            (of.0, of.1, of.2.dtype()) == (rotary, head_dim, T::DTYPE) && of.2.count() >= seq * head_dim
        };
        if let Some((.., angles)) = last.as_ref().filter(|last| fits(last)) {
            return angles.clone();
        }
        let angles = Buffer::from_vec(rotary.table(seq, head_dim).map(T::from_f64).collect::<Vec<T>>());
        *last = Some((rotary, head_dim, angles.clone()));
        angles
    }
}

impl Attention for Cpu {
    fn causal(&self, shape: AttentionShape, qkv: &Buffer, with: AttentionMasks<'_>) -> Result<(Buffer, Buffer)> {
        let all = GroupedShape::alone(shape);
        let known = Known::new("attention", all, &with)?;
        self.meter().add_flops(Work::Attention, left(all.forward_flops(&with), all, &with, &known));
        for_stored!(self, "attention", qkv, S, T => {
            let qkv = qkv.as_slice::<S>()?;
            let mut lse = self.output::<T>(shape.batch * shape.heads * shape.seq, |_| {})?;
            let rows = lse.as_mut_slice::<T>()?;
            let out = self.output::<S>(qkv.len() / 3, |out| {
                attention::forward(T::tiles(self.precision), dims(all), qkv, out, rows, masks(with, all, &known));
            })?;
            Ok((out, lse))
        })
    }

    fn causal_grad(
        &self,
        shape: AttentionShape,
        dout: &Buffer,
        qkv: &Buffer,
        out: &Buffer,
        lse: &Buffer,
        with: AttentionMasks<'_>,
    ) -> Result<Buffer> {
        let all = GroupedShape::alone(shape);
        let known = Known::new("attention", all, &with)?;
        self.meter().add_flops(Work::Attention, left(all.backward_flops(&with), all, &with, &known));
        for_stored!(self, "attention", qkv, S, T => {
            let all_heads = qkv.as_slice::<S>()?;
            let saved = Saved {
                q: all_heads,
                kv: all_heads,
                out: out.as_slice::<S>()?,
                lse: lse.as_slice::<T>()?,
            };
            let dout = dout.as_slice::<S>()?;
            self.output::<S>(qkv.count(), |dqkv| {
                attention::backward(T::tiles(self.precision), dims(all), saved, dout, dqkv, masks(with, all, &known));
            })
        })
    }

    fn grouped(
        &self,
        shape: GroupedShape,
        q: &Buffer,
        kv: &Buffer,
        with: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        let of = shape.queries;
        let known = Known::new("grouped_attention", shape, &with)?;
        self.meter().add_flops(Work::Attention, left(shape.forward_flops(&with), shape, &with, &known));
        for_stored!(self, "grouped_attention", q, S, T => {
            let angles = shape.rotary.map(|rotary| self.angles.table::<T>(rotary, positions(shape, &with), of.head_dim));
            let angles = angles.as_ref().map(|angles| angles.as_slice().map(Angles)).transpose()?;
            let operands = [q.as_slice::<S>()?, kv.as_slice::<S>()?];
            let bias = with.bias.map(|bias| bias.as_slice::<T>()).transpose()?;
            let mut lse = self.output::<T>(of.batch * of.heads * of.seq, |_| {})?;
            let (rows, groups, masks) = (lse.as_mut_slice::<T>()?, groups(shape), masks(with, shape, &known));
            let out = self.output::<S>(q.count(), |out| {
                attention::grouped_forward(T::tiles(self.precision), dims(shape), groups, angles, operands, out, rows, masks, bias);
            })?;
            Ok((out, lse))
        })
    }

    fn turn(&self, of: TurnedHeads, x: &Buffer) -> Result<Buffer> {
        let TurnedHeads { rotary, seq, first, all, heads, head_dim } = of;
        for_float!(self, "attention", x, T => {
            // More than are needed now, so that the table is not written for each token.
            let angles = self.angles.table::<T>(rotary, (first + seq).next_power_of_two(), head_dim);
            let (angles, x) = (Angles(&angles.as_slice()?[first * head_dim..]), x.as_slice::<T>()?);
            self.output::<T>(x.len(), |turned| attention::turn(angles, [seq, all, heads, head_dim], x, turned))
        })
    }

    fn grouped_grad(
        &self,
        shape: GroupedShape,
        dout: &Buffer,
        q: &Buffer,
        kv: &Buffer,
        out: &Buffer,
        lse: &Buffer,
        with: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        let of = shape.queries;
        let known = Known::new("grouped_attention", shape, &with)?;
        self.meter().add_flops(Work::Attention, left(shape.backward_flops(&with), shape, &with, &known));
        for_stored!(self, "grouped_attention", q, S, T => {
            let angles = shape.rotary.map(|rotary| self.angles.table::<T>(rotary, positions(shape, &with), of.head_dim));
            let angles = angles.as_ref().map(|angles| angles.as_slice().map(Angles)).transpose()?;
            let saved = Saved {
                q: q.as_slice::<S>()?,
                kv: kv.as_slice::<S>()?,
                out: out.as_slice::<S>()?,
                lse: lse.as_slice::<T>()?,
            };
            let (dout, groups, masks) = (dout.as_slice::<S>()?, groups(shape), masks(with, shape, &known));
            let bias = with.bias.map(|bias| bias.as_slice::<T>()).transpose()?;
            let mut dq = self.alloc(S::DTYPE, q.count())?;
            let mut dkv = self.alloc(S::DTYPE, kv.count())?;
            let gradients = [dq.as_mut_slice::<S>()?, dkv.as_mut_slice::<S>()?];
            attention::grouped_backward(T::tiles(self.precision), dims(shape), groups, angles, saved, dout, gradients, masks, bias);
            Ok((dq, dkv))
        })
    }

    fn pair_bias_grad(
        &self,
        shape: GroupedShape,
        dout: &Buffer,
        q: &Buffer,
        kv: &Buffer,
        out: &Buffer,
        lse: &Buffer,
        with: AttentionMasks<'_>,
        into: TableGrad<'_>,
    ) -> Result<()> {
        let known = Known::new("grouped_attention", shape, &with)?;
        self.meter().add_flops(Work::Attention, left(shape.forward_flops(&with), shape, &with, &known));
        let wide = |x: &Buffer| if x.dtype() == lse.dtype() { Ok(x.clone()) } else { self.cast(x, lse.dtype()) };
        let [dout, q, kv, out] = [dout, q, kv, out].map(wide);
        let (dout, q, kv, out) = (dout?, q?, kv?, out?);
        for_float!(self, "grouped_attention", lse, T => {
            let saved = Saved {
                q: q.as_slice::<T>()?,
                kv: kv.as_slice::<T>()?,
                out: out.as_slice::<T>()?,
                lse: lse.as_slice::<T>()?,
            };
            let TableGrad { buffer, start, rows, width, accumulate, blocks } = into;
            let Some(bias) = with.bias.map(|bias| bias.as_slice::<T>()).transpose()? else { return Ok(()) };
            let into = (blocks, accumulate, &mut buffer.as_mut_slice::<T>()?[start..start + rows * width]);
            let masks = masks(with, shape, &known);
            attention::pair_bias_grad(self.precision, dims(shape), groups(shape), saved, dout.as_slice()?, masks, bias, into);
            Ok(())
        })
    }

    fn join(
        &self,
        shape: AttentionShape,
        out: &mut Buffer,
        lse: &mut Buffer,
        part: &Buffer,
        part_lse: &Buffer,
    ) -> Result<()> {
        for_float!(self, "attention_join", lse, T => {
            let of = [part.as_slice::<T>()?, part_lse.as_slice::<T>()?];
            attention::join(dims(GroupedShape::alone(shape)), [out.as_mut_slice::<T>()?, lse.as_mut_slice::<T>()?], of);
            Ok(())
        })
    }
}
