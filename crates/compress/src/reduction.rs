//! The sum of one value over a group in every step, with feedback.

use crate::compressor::{Draws, SumMethod};
use crate::feedback::Sender;
use crate::sum::{SumBuffers, shard_len, shards, sum, traffic};
use crate::{CompressError, Compressor, Feedback, Result, Shape};
use meshwork_core::{Group, Record};
use std::ops::{Deref, Range};

/// One rank's part of a value: the value is the sum over the ranks, which is still to be computed.
#[derive(Clone, Copy, Debug)]
pub struct Partial<'a>(pub &'a [f32]);

/// A value that is the same on every rank. It is not a [`Partial`]: summing it again would count it once for each rank.
///
/// ```compile_fail,E0308
/// use meshwork_compress::{CompressError, Partial, Reduction};
///
/// fn twice(reduction: &mut Reduction, group: &meshwork_core::Group, x: Partial<'_>) -> Result<()> {
///     let sum = reduction.all_reduce(group, 0, x)?.to_vec();
///     let once = reduction.all_reduce(group, 1, Partial(&sum))?; // says that it is a part
///     reduction.all_reduce(group, 2, once)?; // does not compile
///     Ok(())
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Replicated<'a>(&'a [f32]);

impl Deref for Replicated<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        self.0
    }
}

/// How a state is held by the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// Each replica has its own; only their sum matters. To change the number of replicas: [`reshard`](crate::reshard).
    PerReplica,
    /// Every rank holds the same values.
    Replicated,
    /// Each rank holds a slice of one vector.
    Slice,
}

/// The name, dims and slice of a state, as a checkpoint needs them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// `NAME.residual`, `NAME.estimate`, `NAME.momentum`, `NAME.sum_estimate`, `NAME.warm`, `NAME.shard_residual`.
    pub name: String,
    /// Dims of the whole state, over all ranks.
    pub dims: Vec<usize>,
    /// This rank's range of each dim.
    pub slice: Vec<Range<usize>>,
    /// How the other ranks hold it.
    pub kind: StateKind,
}

/// The sum of one value over a group in every step: scheme, feedback and their states.
#[derive(Debug)]
pub struct Reduction {
    name: String,
    compressor: Box<dyn Compressor>,
    feedback: Feedback,
    shape: Shape,
    rank: usize,
    ranks: usize,
    seed: u64,
    sender: Sender,
    /// G of EF21: the estimate of the sum.
    sum_estimate: Vec<f32>,
    warm: Vec<f32>,
    shard_residual: Vec<f32>,
    last: Option<u64>,
    /// The value to compress, the part of it that was sent, and the sum.
    scratch: [Vec<f32>; 3],
}

impl Reduction {
    /// The sums of the value called `name`, on rank `rank` of `ranks`. All ranks use the same name, compressor,
    /// feedback, shape and seed.
    ///
    /// # Errors
    /// A shape or a feedback that the scheme does not support.
    pub fn new(
        name: &str,
        compressor: Box<dyn Compressor>,
        feedback: Feedback,
        shape: Shape,
        [rank, ranks]: [usize; 2],
        seed: u64,
    ) -> Result<Reduction> {
        compressor.check(shape)?;
        feedback.check(&*compressor, shape)?;
        if rank >= ranks {
            return Err(CompressError::Group {
                name: name.to_owned(),
                rank,
                ranks,
                group_rank: rank,
                group_ranks: ranks,
            });
        }
        let len = shape.len();
        let keeps = |keeps: bool, len: usize| vec![0.0; if keeps { len } else { 0 }];
        Ok(Reduction {
            name: name.to_owned(),
            feedback,
            shape,
            rank,
            ranks,
            seed,
            sender: feedback.sender(len),
            sum_estimate: keeps(feedback.keeps_estimate(), len),
            warm: vec![0.0; compressor.warm_len(shape)],
            shard_residual: keeps(feedback != Feedback::None, shard_len(&*compressor, shape, rank, ranks)),
            last: None,
            scratch: [const { Vec::new() }; 3],
            compressor,
        })
    }

    /// Computes the sum over the group, bitwise identical on every rank. Steps must increase.
    ///
    /// # Errors
    /// A second use in one step, a group other than the planned one, a part of the wrong length, or a failed
    /// collective. After a failed collective the states are inconsistent: load them again.
    pub fn all_reduce(&mut self, group: &Group, step: u64, part: Partial<'_>) -> Result<Replicated<'_>> {
        if [group.rank(), group.size()] != [self.rank, self.ranks] {
            return Err(CompressError::Group {
                name: self.name.clone(),
                rank: self.rank,
                ranks: self.ranks,
                group_rank: group.rank(),
                group_ranks: group.size(),
            });
        }
        if let Some(last) = self.last.filter(|&last| step <= last) {
            return Err(CompressError::Twice { name: self.name.clone(), step, last });
        }
        crate::error::require_count("the part", part.0.len(), self.shape.len())?;
        self.scratch.iter_mut().for_each(|scratch| scratch.resize(self.shape.len(), 0.0));
        let [target, sent, out] = &mut self.scratch;
        self.feedback.outgoing(part.0, self.last.is_none(), &mut self.sender, target);
        self.last = Some(step);
        let buffers = SumBuffers { sum: out, sent, warm: &mut self.warm, shard: &mut self.shard_residual };
        let draws = Draws::new(self.seed, &self.name, step);
        sum(group, &*self.compressor, target, self.shape, draws, buffers)?;
        self.feedback.sent(target, sent, &mut self.sender);
        self.feedback.received(&mut self.sum_estimate, out);
        Ok(Replicated(out))
    }

    /// The communication of a step on this rank, call by call, as in the group's log.
    pub fn traffic(&self, group: &str) -> Result<Vec<Record>> {
        traffic(&*self.compressor, self.shape, group, self.rank, self.ranks)
    }

    /// Bytes of the states on this rank.
    pub fn state_bytes(&self) -> usize {
        self.states().into_iter().map(|(_, values)| 4 * values.len()).sum()
    }

    /// The last step that was summed; `None` before the first. It is part of the state.
    pub fn last_step(&self) -> Option<u64> {
        self.last
    }

    /// The states that are in use, with the declarations by which a checkpoint saves and reshards them.
    pub fn states(&self) -> Vec<(StateSpec, &[f32])> {
        let values = [
            &self.sender.residual,
            &self.sender.estimate,
            &self.sender.momentum,
            &self.sum_estimate,
            &self.warm,
            &self.shard_residual,
        ];
        let used = self.specs().into_iter().zip(values).filter(|(_, values)| !values.is_empty());
        used.map(|(spec, values)| (spec, &values[..])).collect()
    }

    /// Replaces each state by the values that `read` gives for its declaration.
    ///
    /// # Errors
    /// Errors of `read`, and values of the wrong length. Some states may then already be replaced.
    pub fn load<E: From<CompressError>>(
        &mut self,
        last: Option<u64>,
        mut read: impl FnMut(&StateSpec) -> Result<Vec<f32>, E>,
    ) -> Result<(), E> {
        let specs = self.specs();
        let places = [
            &mut self.sender.residual,
            &mut self.sender.estimate,
            &mut self.sender.momentum,
            &mut self.sum_estimate,
            &mut self.warm,
            &mut self.shard_residual,
        ];
        for (spec, place) in specs.into_iter().zip(places).filter(|(_, place)| !place.is_empty()) {
            let values = read(&spec)?;
            crate::error::require_count("the state", values.len(), place.len())?;
            *place = values;
        }
        self.last = last;
        Ok(())
    }

    fn specs(&self) -> [StateSpec; 6] {
        let (rows, cols) = (self.shape.rows(), self.shape.cols());
        let name = |state: &str| format!("{}.{state}", self.name);
        let replica = |state: &str, dims: &[usize]| StateSpec {
            name: name(state),
            dims: [&[self.ranks], dims].concat(),
            slice: std::iter::once(self.rank..self.rank + 1).chain(dims.iter().map(|&dim| 0..dim)).collect(),
            kind: StateKind::PerReplica,
        };
        let same = |state: &str, dims: &[usize]| StateSpec {
            name: name(state),
            dims: dims.to_vec(),
            slice: dims.iter().map(|&dim| 0..dim).collect(),
            kind: StateKind::Replicated,
        };
        let method = self.compressor.sum();
        let shard = match method {
            SumMethod::ScatterGather(per) => shards(per, self.shape, self.ranks)[self.rank].clone(),
            _ => 0..0,
        };
        let warm = [self.warm.len()];
        [
            replica("residual", &[rows, cols]),
            replica("estimate", &[rows, cols]),
            replica("momentum", &[rows, cols]),
            same("sum_estimate", &[rows, cols]),
            if matches!(method, SumMethod::Factors(_)) { same("warm", &warm) } else { replica("warm", &warm) },
            StateSpec {
                name: name("shard_residual"),
                dims: vec![self.shape.len()],
                slice: vec![shard],
                kind: StateKind::Slice,
            },
        ]
    }
}
