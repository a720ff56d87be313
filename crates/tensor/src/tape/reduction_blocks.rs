//! Reduction blocks: where the sums of an operation are cut so that their bits do not depend on the mesh.
//!
//! In canonical numerics ([`Declarations::canonical`](crate::Declarations::canonical)) every sum that a mesh axis or a
//! micro-batch might cut has fixed blocks, which [the tree](meshwork_core::tree) adds up, whichever rank computes them:
//!
//! | sum | blocks |
//! |---|---|
//! | over a dim that a parameter's placement cuts | equal slices of that dim, as many as declared, over the whole of the dims before it |
//! | over tokens, for the gradient of a weight or table | samples; where cp cuts the sequence, slices of it above them |
//! | over tokens, for the gradient of a bias or norm | slices of the sequence, as many as declared; in each of them, samples |
//!
//! Sums over tokens continue over micro-batches and dp in the same tree over the samples of the batch. The sum over
//! slices of the sequence comes above this tree, and the sum over several uses of a parameter above both: such
//! gradients are kept in several [copies](GradShard::copies) until every rank's samples are included. In fast numerics
//! each of these sums has one block.
//!
//! More than 400 lines: the rule of every sum, and the tape's side of it.

use super::prelude::*;
use super::{Backward, GradShard, GradSlot};
use meshwork_core::{Axes, tree};
use std::slice;

/// How the terms of a contraction are cut. The terms are in consecutive `segments`, and block i is the i-th of `blocks`
/// slices of every segment. Boundaries between slices are rounded down. Within a block, terms follow in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Number of segments of terms, all of the same length.
    pub segments: usize,
    /// Number of blocks, whose sums are added up in the tree.
    pub blocks: usize,
}

impl Terms {
    /// One block.
    pub const WHOLE: Self = Self { segments: 1, blocks: 1 };

    /// Per block, the runs of its terms among k.
    pub fn runs(self, k: usize) -> impl Iterator<Item = impl Iterator<Item = Range<usize>>> {
        let Self { segments, blocks } = self;
        let segment = k / segments;
        let run = move |block: usize| (segment * block / blocks)..(segment * (block + 1) / blocks);
        (0..blocks)
            .map(move |block| (0..segments).map(move |s| s * segment + run(block).start..s * segment + run(block).end))
    }
}

/// How the rows of a sum are cut. The rows are the tokens of `samples` samples, with the same number each, and block
/// (i, s) is the s-th of `slices` slices of sample i. Boundaries between slices are rounded down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBlocks {
    /// Samples.
    pub samples: usize,
    /// Slices of each.
    pub slices: usize,
}

impl RowBlocks {
    /// One block.
    pub const WHOLE: Self = Self { samples: 1, slices: 1 };

    /// Total number of blocks.
    pub fn count(self) -> usize {
        self.samples * self.slices
    }

    /// Rows of a part of a block. Gradients of biases and gains are summed part by part, and then over the parts, so
    /// that threads can share a block, and the order depends on its number of rows alone.
    pub const PART_ROWS: usize = 64;

    /// The number of parts of all blocks, for `rows` rows in total.
    pub fn parts(self, rows: usize) -> usize {
        self.rows(rows).map(|rows| rows.div_ceil(Self::PART_ROWS)).sum()
    }

    /// The number of rows of each block in order, for `rows` rows in total.
    pub fn rows(self, rows: usize) -> impl Iterator<Item = usize> {
        let Self { samples, slices } = self;
        let tokens = rows / samples.max(1);
        (0..samples * slices)
            .map(move |block| block % slices)
            .map(move |s| tokens * (s + 1) / slices - tokens * s / slices)
    }
}

/// The tokens that an operation sums for the gradient of a parameter.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    samples: usize,
    /// The axes that cut the sequence.
    cut_over: Axes,
}

impl From<usize> for Tokens {
    /// Whole sequences of so many samples.
    fn from(samples: usize) -> Self {
        Self { samples, cut_over: [].into() }
    }
}

impl Tokens {
    /// The tokens of a value `[samples, sequence.., features..]` with `features` dims of features.
    pub fn new(x: &Var, features: usize) -> Self {
        let shape = x.shape();
        let sequence = shape.len() > features + 1;
        let cut_over = x.types().cuts(1).filter(|_| sequence).collect();
        Self { samples: shape.first().copied().unwrap_or(1), cut_over }
    }

    /// Whether no axis cuts the sequence.
    pub(crate) fn are_whole(&self) -> bool {
        self.cut_over.is_empty()
    }

    /// The same tokens, of which cp alone cuts the sequence: the gradients of weights are summed over its slices.
    fn over_cp(self) -> Self {
        Self { cut_over: self.cut_over.iter().copied().filter(|axis| axis.is_context()).collect(), ..self }
    }
}

/// The reduction blocks of a sum over the sequence: the slices that this rank has, of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slices {
    pub(crate) here: Range<usize>,
    pub(crate) all: usize,
}

/// The destination of a share of a gradient.
#[derive(Debug)]
pub struct BlockSlot<'a> {
    /// Memory that holds it.
    pub buffer: &'a mut Buffer,
    /// Its first element there.
    pub start: usize,
    /// Whether to add to the old contents instead of overwriting them.
    pub accumulate: bool,
    /// The samples to sum, numbered from the first one on the tape.
    pub samples: Range<usize>,
    /// Blocks to sum them in: one for each sample, or one for all.
    pub blocks: usize,
    /// The slice of each sample's sequence to sum, and the number of slices on this rank.
    pub slice: (usize, usize),
}

impl BlockSlot<'_> {
    /// The rows to sum of a value that has `samples` samples, `[samples, sequence.., features..]`.
    pub fn rows(&self, x: &Tensor, samples: usize) -> Result<Buffer> {
        let each = x.count() / samples.max(1);
        let rows = x.buffer().slice(self.samples.start * each..self.samples.end * each)?;
        let (slice, slices) = self.slice;
        if slices == 1 {
            return Ok(rows);
        }
        let tokens = x.shape()[1];
        let range = tokens * slice / slices..tokens * (slice + 1) / slices;
        x.device().layout()?.narrow(&rows, self.samples.len(), tokens, each / tokens.max(1), range)
    }
}

impl Tape {
    /// Reduction blocks along a dim that a mesh may cut, in canonical numerics; `None` in fast ones.
    pub fn reduction_blocks(&self) -> Option<usize> {
        self.inner.params.declarations().reduction_blocks()
    }

    /// The type of shares of a sum whose result has this type: in canonical numerics shares of sums in 16 bits have
    /// f32.
    pub(crate) fn share_dtype(&self, dtype: DType) -> DType {
        if self.reduction_blocks().is_some() && dtype.is_half() && self.inner.params.declarations().dtype() == dtype {
            DType::F32
        } else {
            dtype
        }
    }

    /// How a sum over these dims of a value is cut.
    pub(crate) fn terms(&self, x: &Var, dims: Range<usize>) -> Terms {
        let cut = x.types().iter().find_map(|(_, ty)| ty.dim().filter(|dim| dims.contains(dim)));
        let uncut = match x.source {
            Source::Param(id) | Source::Frozen(id) => self.inner.params.declarations().spec(id).placement.in_blocks(),
            _ => None,
        };
        match (self.reduction_blocks(), cut.or(uncut.filter(|dim| dims.contains(dim)))) {
            (Some(blocks), Some(dim)) => {
                let degree: usize = x.types().cuts(dim).map(|axis| self.rank().mesh().degree(axis)).product();
                Terms { segments: x.shape()[dims.start..dim].iter().product(), blocks: blocks / degree }
            }
            _ => Terms::WHOLE,
        }
    }

    /// The reduction blocks of a sum over the sequence of `tokens`, in canonical numerics.
    ///
    /// # Errors
    /// Axes that cut the sequence into parts of which some hold no whole subtree of the blocks.
    pub(crate) fn slices(&self, op: &str, tokens: Tokens) -> Result<Option<Slices>> {
        let (Some(all), rank) = (self.reduction_blocks(), self.rank()) else { return Ok(None) };
        let place = |(index, degree), axis: &Axis| {
            let of = rank.mesh().degree(*axis);
            (index * of + rank.coords().get(*axis), degree * of)
        };
        let (index, degree) = tokens.cut_over.iter().rev().fold((0, 1), place);
        match tokens.cut_over.last().filter(|_| !tree::fits(all, degree)) {
            None => Ok(Some(Slices { here: index * (all / degree)..(index + 1) * (all / degree), all })),
            Some(&axis) => Err(Error::Placement {
                what: op.to_owned(),
                dim: 1,
                extent: all,
                axis,
                degree,
                problem: format!("{all} reduction blocks of the sequence fit degrees {:?}", tree::degrees(all)),
            }),
        }
    }
}

impl Backward<'_> {
    /// The blocks in which to sum the rows of `tokens` for the gradient of input `i`, for
    /// [`sum_blocks`](Self::sum_blocks).
    pub fn row_blocks(&self, i: usize, tokens: Tokens) -> RowBlocks {
        match (self.tape.reduction_blocks(), self.sources[i]) {
            (Some(blocks), Source::Param(_)) => {
                let degrees = tokens.cut_over.iter().map(|&axis| self.tape.rank().mesh().degree(axis));
                RowBlocks { samples: tokens.samples, slices: blocks / degrees.product::<usize>() }
            }
            _ => RowBlocks::WHOLE,
        }
    }

    /// The gradient of input `i`, of shape `shape`, from the sums of its blocks, one after the other. `None` if it has
    /// been passed to the sink.
    pub fn sum_blocks(
        &mut self,
        i: usize,
        mut sums: Buffer,
        shape: Shape,
        tokens: Tokens,
        blocks: RowBlocks,
    ) -> Result<Option<Tensor>> {
        let (device, slices, n) = (self.tape.device(), blocks.slices, shape.count());
        let (Some(Slices { here, all }), Source::Param(id)) = (self.tape.slices(self.op, tokens)?, self.sources[i])
        else {
            return Ok(Some(Tensor::from_buffer(device, sums, shape)?));
        };
        self.require_order(id, tokens.cut_over)?;
        self.require_own_samples(id)?;
        self.uses.require_alike(self.op, id, all)?;
        self.written.push(i);
        let used = self.uses.index(id) * all;
        for SampleRun { samples, numbers } in self.parts(slice::from_ref(&self.own(tokens.samples))) {
            let at = samples.start * slices * n;
            device.pointwise()?.tree_sum(&mut sums, at, samples.len(), slices * n, at)?;
            let share = GradShard {
                id,
                types: self.tape.gradient_types(id),
                samples: numbers,
                copies: used + here.start..used + here.start + slices,
                of: self.uses.count(id) * all,
            };
            let sum = Tensor::from_buffer(device, sums.slice(at..at + slices * n)?, [slices * n])?;
            self.sink.accumulate(&share, sum)?;
        }
        Ok(None)
    }

    /// The gradient of input `i`, of this dtype and shape, summed over `tokens`. `write` computes it into new memory,
    /// or directly into the memory of the parameter's gradient, and is called once for each share. `None` if the
    /// gradient is not needed, or has been passed to the sink.
    ///
    /// # Errors
    /// In canonical numerics a gradient that ranks sum over slices of the sequence, other than those of cp: it has no
    /// order that all meshes share.
    pub fn write_grad(
        &mut self,
        i: usize,
        dtype: DType,
        shape: Shape,
        tokens: impl Into<Tokens>,
        write: impl FnMut(BlockSlot<'_>) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        let tokens = tokens.into().over_cp();
        let mut slices = None;
        if let (true, Source::Param(id)) = (self.needs(i), self.sources[i]) {
            self.require_order(id, tokens.cut_over)?;
            if !tokens.cut_over.is_empty() {
                slices = self.tape.slices(self.op, tokens)?;
            }
        }
        self.write_parts(i, dtype, shape, slice::from_ref(&self.own(tokens.samples)), slices, write)
    }

    /// The same for rows that come from other ranks too, as those of experts do: from consecutive runs of the batch's
    /// samples. [`BlockSlot::samples`] are numbered through all of them, from 0.
    pub fn write_grad_of(
        &mut self,
        i: usize,
        dtype: DType,
        shape: Shape,
        sources: &[Range<u64>],
        write: impl FnMut(BlockSlot<'_>) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        if let (true, Source::Param(id)) = (self.needs(i), self.sources[i]) {
            self.require_order(id, [].into())?;
        }
        self.write_parts(i, dtype, shape, sources, None, write)
    }

    /// The same for a gradient of which ranks that cut the sequence have different elements, and zeros elsewhere: their
    /// sum is exact.
    pub(crate) fn write_own_rows(
        &mut self,
        i: usize,
        dtype: DType,
        shape: Shape,
        samples: usize,
        write: impl FnMut(BlockSlot<'_>) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        self.write_parts(i, dtype, shape, slice::from_ref(&self.own(samples)), None, write)
    }

    fn write_parts(
        &mut self,
        i: usize,
        dtype: DType,
        shape: Shape,
        sources: &[Range<u64>],
        slices: Option<Slices>,
        mut write: impl FnMut(BlockSlot<'_>) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        let samples = sources.iter().map(|run| (run.end - run.start) as usize).sum();
        if !self.needs(i) {
            return Ok(None);
        }
        let (device, dtype) = (self.tape.device(), self.tape.share_dtype(dtype));
        let canonical = self.tape.reduction_blocks().is_some();
        let Source::Param(id) = self.sources[i] else {
            let (mut buffer, samples, slice) = (device.alloc(dtype, shape.count())?, 0..samples, (0, 1));
            write(BlockSlot { buffer: &mut buffer, start: 0, accumulate: false, samples, blocks: 1, slice })?;
            return Ok(Some(Tensor::from_buffer(device, buffer, shape)?));
        };
        self.require_own_samples(id)?;
        self.written.push(i);
        let (used, of) = if canonical { (self.uses.index(id), self.uses.count(id)) } else { (0, 1) };
        let Slices { here, all } = slices.unwrap_or(Slices { here: 0..1, all: 1 });
        if canonical {
            self.uses.require_alike(self.op, id, all)?;
        }
        let types = self.tape.gradient_types(id);
        for SampleRun { samples, numbers } in self.parts(sources) {
            let blocks = if canonical { samples.len() } else { 1 };
            for at in here.clone() {
                let (slice, samples, copy) = ((at - here.start, here.len()), samples.clone(), used * all + at);
                let share = GradShard { id, types, samples: numbers.clone(), copies: copy..copy + 1, of: of * all };
                if let Some(GradSlot { buffer, start, first }) = self.sink.place(&share)? {
                    write(BlockSlot { buffer, start, accumulate: !first, samples, blocks, slice })?;
                    continue;
                }
                let mut buffer = device.alloc(dtype, shape.count())?;
                write(BlockSlot { buffer: &mut buffer, start: 0, accumulate: false, samples, blocks, slice })?;
                self.sink.accumulate(&share, Tensor::from_buffer(device, buffer, shape)?)?;
            }
        }
        Ok(None)
    }

    /// Refuses, in canonical numerics, a gradient that is Partial on axes other than the axes of the samples and
    /// `ordered`, over whose slices it is summed in blocks.
    fn require_order(&self, id: ParamId, ordered: Axes) -> Result<()> {
        let summed = |axis: &Axis| !axis.is_data() && !ordered.contains(axis);
        let found = self.tape.reduction_blocks().and_then(|_| self.tape.gradient_types(id).partial_axes().find(summed));
        match found {
            None => Ok(()),
            Some(_) => Err(Error::NotCanonical {
                op: self.op,
                problem: "the gradient of a parameter would be a sum over slices of the tokens, in an order that depends on the mesh",
                valid: "it on a value whose tokens are whole on each rank: all_gather first, or cut the features",
            }),
        }
    }

    /// Refuses, in canonical numerics, a gradient of samples that were gathered: each rank has the sum over the samples
    /// of all.
    fn require_own_samples(&self, id: ParamId) -> Result<()> {
        let types = self.tape.gradient_types(id);
        let gathered = |axis| self.tape.rank().mesh().degree(axis) > 1 && types.get(axis) == Some(Ty::Invariant);
        match self.tape.reduction_blocks().is_some() && Axis::DATA.into_iter().any(gathered) {
            false => Ok(()),
            true => Err(Error::NotCanonical {
                op: self.op,
                problem: "the gradient of a parameter would be a sum over the samples of all ranks on each of them, where others are sums \
                          over each rank's own",
                valid: "it on each rank's own samples, before all_gather_invariant",
            }),
        }
    }

    /// The shares in which samples are summed: all together, or the subtrees that each run consists of.
    fn parts(&self, sources: &[Range<u64>]) -> Vec<SampleRun> {
        if self.tape.reduction_blocks().is_none() {
            let (first, last) =
                (sources.first().cloned().unwrap_or_default(), sources.last().cloned().unwrap_or_default());
            let samples = 0..sources.iter().map(|run| (run.end - run.start) as usize).sum();
            return vec![SampleRun { samples, numbers: first.start..last.end }];
        }
        let (mut parts, mut next) = (Vec::new(), 0);
        for run in sources {
            for part in tree::subtrees(run.start as usize..run.end as usize) {
                parts.push(SampleRun { samples: next..next + part.len(), numbers: part.start as u64..part.end as u64 });
                next += part.len();
            }
        }
        parts
    }

    /// The first `samples` samples of the tape.
    fn own(&self, samples: usize) -> Range<u64> {
        let first = self.tape.first_sample();
        first..first + samples as u64
    }
}

/// Samples that are summed together.
struct SampleRun {
    /// Numbered from the first sample that is here.
    samples: Range<usize>,
    /// Numbers in the batch.
    numbers: Range<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_cover_their_terms_once_and_in_order() {
        let runs = |segments, blocks, k| -> Vec<Vec<[usize; 2]>> {
            let block = |runs: &mut dyn Iterator<Item = Range<usize>>| runs.map(|run| [run.start, run.end]).collect();
            Terms { segments, blocks }.runs(k).map(|mut runs| block(&mut runs)).collect()
        };
        assert_eq!(runs(1, 1, 7), [[[0, 7]]]);
        assert_eq!(runs(1, 4, 10), [[[0, 2]], [[2, 5]], [[5, 7]], [[7, 10]]]);
        assert_eq!(runs(3, 2, 12), [[[0, 2], [4, 6], [8, 10]], [[2, 4], [6, 8], [10, 12]]]);
        // Two ranks that hold half each have the blocks of one rank that holds all.
        let half: Vec<_> = runs(1, 4, 21).into_iter().flatten().map(|run| run.map(|at| at + 21)).collect();
        assert_eq!(half, runs(1, 8, 42).into_iter().flatten().skip(4).collect::<Vec<_>>());
    }

    #[test]
    fn leaves_of_rows_are_slices_of_samples() {
        assert!(RowBlocks { samples: 2, slices: 4 }.rows(20).eq([2, 3, 2, 3, 2, 3, 2, 3]));
        assert!(RowBlocks { samples: 2, slices: 4 }.rows(4).eq([0, 1, 0, 1, 0, 1, 0, 1]));
        assert!(RowBlocks::WHOLE.rows(5).eq([5]));
    }
}
