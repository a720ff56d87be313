//! Sums over the ranks of a group, of values that each rank compresses.

use crate::compressor::{Draws, SumMethod};
use crate::error::require_count;
use crate::message::{restore, wire_bytes};
use crate::values::cast_bf16;
use crate::{Compressor, Fold, Message, Per, Result, Shape};
use meshwork_core::{DType, Group, OpKind, Record, ReduceOp, bf16};
use std::ops::Range;

/// The results of a sum, and the states of a rank between sums.
#[derive(Debug)]
pub struct SumBuffers<'a> {
    /// The sum, of the value's length. Overwritten.
    pub sum: &'a mut [f32],
    /// This rank's part of the sum, as long as the value: the part of `x` that it sent where ranks send messages, or an
    /// equal share of the sum of PowerSGD, as its authors' feedback has it. Overwritten.
    pub sent: &'a mut [f32],
    /// The warm state of the compressor, of [`Compressor::warm_len`] elements; the same on every rank for PowerSGD.
    pub warm: &'a mut [f32],
    /// The loss of the second compression, of this rank's shard of the sum, to be added to the next sum (the server
    /// error of 1-bit Adam), of [`shard_len`] elements. Empty: it stays lost.
    pub shard: &'a mut [f32],
}

/// The shape of the elements in `range`: rows stay rows.
fn shape_of(range: &Range<usize>, per: Per, shape: Shape) -> Result<Shape> {
    match per {
        Per::Row if range.len().is_multiple_of(shape.cols()) => Shape::matrix(range.len() / shape.cols(), shape.cols()),
        _ => Shape::vector(range.len()),
    }
}

/// The range of each rank's shard in a sum by [`SumMethod::ScatterGather`]: equal numbers of parts, fewer or none for
/// the last ranks. A value of one part is cut between any elements.
pub fn shards(per: Per, shape: Shape, ranks: usize) -> Vec<Range<usize>> {
    let unit = if per.parts(shape) > 1 { per.unit(shape) } else { 1 };
    let (len, each) = (shape.len(), shape.len().div_ceil(unit).div_ceil(ranks) * unit);
    (0..ranks).map(|rank| (rank * each).min(len)..((rank + 1) * each).min(len)).collect()
}

/// The shard of each rank, its shape and the bytes of its message; no bytes if the shard is empty.
fn shard_messages(
    compressor: &(impl Compressor + ?Sized),
    per: Per,
    shape: Shape,
    ranks: usize,
) -> Result<Vec<(Range<usize>, Shape, usize)>> {
    let message = |range: Range<usize>| {
        let shape = shape_of(&range, per, shape)?;
        Ok((range, shape, if shape.is_empty() { 0 } else { wire_bytes(compressor, shape)? }))
    };
    shards(per, shape, ranks).into_iter().map(message).collect()
}

/// Elements of [`SumBuffers::shard`] on a rank.
pub fn shard_len(compressor: &(impl Compressor + ?Sized), shape: Shape, rank: usize, ranks: usize) -> usize {
    if let SumMethod::ScatterGather(per) = compressor.sum() { shards(per, shape, ranks)[rank].len() } else { 0 }
}

/// The communication of one [`sum`] on one rank, call by call, as in the log of the group.
///
/// # Errors
/// A shape that the scheme does not support.
pub fn traffic(
    compressor: &(impl Compressor + ?Sized),
    shape: Shape,
    group: &str,
    rank: usize,
    ranks: usize,
) -> Result<Vec<Record>> {
    let message = wire_bytes(compressor, shape)?;
    if ranks == 1 || shape.is_empty() {
        return Ok(Vec::new());
    }
    let calls = match compressor.sum() {
        SumMethod::Gather => vec![(OpKind::AllGather, DType::U8, ranks * message)],
        SumMethod::AllReduce => vec![(OpKind::AllReduce, DType::F32, shape.len())],
        SumMethod::AllReduceBf16 => vec![(OpKind::AllReduce, DType::Bf16, shape.len())],
        SumMethod::SharedIndices(sparse) => vec![(OpKind::AllReduce, DType::F32, sparse.count(shape))],
        SumMethod::Factors(low_rank) => {
            low_rank.factors(shape).map(|len| (OpKind::AllReduce, DType::F32, len)).to_vec()
        }
        SumMethod::ScatterGather(per) => {
            let bytes: Vec<usize> =
                shard_messages(compressor, per, shape, ranks)?.into_iter().map(|shard| shard.2).collect();
            let (all, longest) = (bytes.iter().sum::<usize>(), bytes.iter().copied().max().unwrap_or(0));
            vec![(OpKind::AllToAll, DType::U8, all - bytes[rank]), (OpKind::AllGather, DType::U8, ranks * longest)]
        }
    };
    let record = |(op, dtype, elements)| Record { group: group.to_owned(), op, dtype, elements, ranks };
    Ok(calls.into_iter().map(record).collect())
}

/// The sum over the ranks of a group of each rank's compressed `x`, in `sum`: the same bits on every
/// rank. All ranks call it with the same compressor, shape and draws.
///
/// If ranks draw independently, rank r of a group draws from element r·n on; the second compression draws from element
/// `ranks`·n on.
///
/// # Errors
/// A shape that the scheme does not support, slices of the wrong length, or a failed collective.
pub fn sum(
    group: &Group,
    compressor: &(impl Compressor + ?Sized),
    x: &[f32],
    shape: Shape,
    draws: Draws,
    buffers: SumBuffers<'_>,
) -> Result<()> {
    compressor.check(shape)?;
    let SumBuffers { sum: out, sent, warm, shard } = buffers;
    let len = shape.len();
    for (what, elements) in [("the value", x.len()), ("the sum", out.len()), ("what was sent", sent.len())] {
        require_count(what, elements, len)?;
    }
    require_count("the warm state", warm.len(), compressor.warm_len(shape))?;
    if shape.is_empty() {
        return Ok(());
    }
    let (rank, ranks) = (group.rank(), group.size());
    let own_draws = draws.skip(rank * len);
    match compressor.sum() {
        SumMethod::Gather => {
            let message = Message::compress(compressor, x, shape, own_draws, warm)?;
            message.restore(compressor, shape, Fold::Replace, sent)?;
            let mut all = vec![0; ranks * message.as_bytes().len()];
            group.all_gather_slice(message.as_bytes(), &mut all)?;
            out.fill(0.0);
            for message in all.chunks_exact(message.as_bytes().len()) {
                restore(message, compressor, shape, Fold::Add, out)?;
            }
        }
        SumMethod::AllReduce => {
            sent.copy_from_slice(x);
            out.copy_from_slice(x);
            group.all_reduce_slice(out, ReduceOp::Sum)?;
        }
        SumMethod::AllReduceBf16 => {
            let mut cast = vec![bf16::ZERO; len];
            cast_bf16(x, &mut cast);
            sent.iter_mut().zip(&cast).for_each(|(sent, x)| *sent = x.to_f32());
            group.all_reduce_slice(&mut cast, ReduceOp::Sum)?;
            out.iter_mut().zip(&cast).for_each(|(out, x)| *out = x.to_f32());
        }
        SumMethod::SharedIndices(sparse) => {
            let indices = sparse.indices(x, shape, draws);
            let mut values = sparse.take(x, shape, &indices);
            let put = |values: &[f32], out: &mut [f32]| {
                out.fill(0.0);
                indices.iter().zip(values).for_each(|(&index, &value)| out[index as usize] = value);
            };
            put(&values, sent);
            group.all_reduce_slice(&mut values, ReduceOp::Sum)?;
            put(&values, out);
        }
        SumMethod::Factors(low_rank) => {
            let mut p = vec![0.0; low_rank.factors(shape)[0]];
            low_rank.start(warm, shape, draws);
            low_rank.times(x, warm, shape, &mut p);
            group.all_reduce_slice(&mut p, ReduceOp::Sum)?;
            low_rank.orthogonalise(&mut p);
            low_rank.transposed_times(x, &p, shape, warm);
            group.all_reduce_slice(warm, ReduceOp::Sum)?;
            low_rank.product(&p, warm, shape, Fold::Replace, out);
            sent.iter_mut().zip(out).for_each(|(sent, sum)| *sent = *sum / ranks as f32);
        }
        SumMethod::ScatterGather(per) => {
            let shards = shard_messages(compressor, per, shape, ranks)?;
            let buffers = SumBuffers { sum: out, sent, warm, shard };
            scatter_gather(group, compressor, x, shape, draws, buffers, &shards)?;
        }
    }
    Ok(())
}

fn scatter_gather(
    group: &Group,
    compressor: &(impl Compressor + ?Sized),
    x: &[f32],
    shape: Shape,
    draws: Draws,
    buffers: SumBuffers<'_>,
    shards: &[(Range<usize>, Shape, usize)],
) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let SumBuffers { sum: out, sent, shard: lost, .. } = buffers;
    let mut messages = Vec::with_capacity(shards.iter().map(|shard| shard.2).sum());
    for (range, part, bytes) in shards.iter().filter(|shard| !shard.1.is_empty()) {
        let draws = draws.skip(rank * shape.len() + range.start);
        let message = Message::compress(compressor, &x[range.clone()], *part, draws, &mut [])?;
        message.restore(compressor, *part, Fold::Replace, &mut sent[range.clone()])?;
        debug_assert_eq!(message.as_bytes().len(), *bytes);
        messages.extend_from_slice(message.as_bytes());
    }
    // The message of each rank for this rank's shard.
    let (mine, part, bytes) = &shards[rank];
    let mut received = vec![0; ranks * bytes];
    let send_counts: Vec<usize> = shards.iter().map(|shard| shard.2).collect();
    group.all_to_all_slice(&messages, &mut received, &send_counts, &vec![*bytes; ranks])?;

    let longest = send_counts.iter().copied().max().unwrap_or(0);
    let mut padded = vec![0; longest];
    if !part.is_empty() {
        let mut total = vec![0.0; mine.len()];
        for message in received.chunks_exact(*bytes) {
            restore(message, compressor, *part, Fold::Add, &mut total)?;
        }
        total.iter_mut().zip(&*lost).for_each(|(total, lost)| *total += lost);
        let message =
            Message::compress(compressor, &total, *part, draws.skip(ranks * shape.len() + mine.start), &mut [])?;
        if !lost.is_empty() {
            require_count("what the shard lost", lost.len(), mine.len())?;
            message.restore(compressor, *part, Fold::Replace, lost)?;
            lost.iter_mut().zip(&total).for_each(|(lost, total)| *lost = total - *lost);
        }
        padded[..*bytes].copy_from_slice(message.as_bytes());
    }
    let mut all = vec![0; ranks * longest];
    group.all_gather_slice(&padded, &mut all)?;
    for ((range, part, bytes), message) in shards.iter().zip(all.chunks_exact(longest)) {
        if !part.is_empty() {
            restore(&message[..*bytes], compressor, *part, Fold::Replace, &mut out[range.clone()])?;
        }
    }
    Ok(())
}
