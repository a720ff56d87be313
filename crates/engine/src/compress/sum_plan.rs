//! Sums of compressed gradients as data: how the gradients of a bucket are summed over data-parallel ranks, and the
//! states that ranks keep from one sum to the next, by name and slice.

use super::matrices::{FactoredParameter, matrices};
use crate::StateKey;
use crate::prelude::*;
use crate::zero::Replica;
use meshwork_compress::sum::shards;
use meshwork_compress::{CompressError, Compressor, Feedback, Per, PowerSgd, Scheme, Shape, SumMethod, wire_bytes};
use meshwork_core::{Coords, FlatSlice};
use meshwork_tensor::Shape as Dims;
use meshwork_tensor::param::LocalSlice;

/// The names of the states of a sender, saved beside the optimizer's.
pub const STATES: [&str; 3] = ["gradient_residual", "gradient_estimate", "gradient_momentum"];
/// The estimate of the sum.
pub const SUM_ESTIMATE: &str = "gradient_sum_estimate";
/// The loss of the second compression, of a rank's shard of the sum.
pub const SHARD_RESIDUAL: &str = "gradient_shard_residual";
/// All Q of PowerSGD, one after the other.
pub const FACTOR: &str = "gradient_factor";

/// The replicas of a state: which ranks keep different values of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replicas {
    /// One for each rank whose gradients are added up.
    Ranks,
    /// One for each sum over data-parallel ranks, whose ranks keep the same values or slices of them. A gradient has
    /// several such sums where stages share a tied weight, or where other axes are summed afterwards.
    Sums,
}

impl Replica {
    /// The extents of all replicas of a state, in a dim before its own, and the slice of this one.
    pub fn slice_of(self, dims: Dims, slice: LocalSlice) -> (Dims, LocalSlice) {
        let before = |first: usize, dims: &[usize]| Dims::new(&[&[first], dims].concat());
        let ranges = std::iter::once(self.index..self.index + 1).chain(slice.ranges).collect();
        (before(self.of, &dims), LocalSlice { stored: before(1, &slice.stored), ranges })
    }
}

/// The sum of the gradients of one bucket.
#[derive(Clone, Debug)]
pub struct SumPlan {
    pub scheme: Scheme,
    pub feedback: Feedback,
    /// Random numbers are drawn for this name.
    pub name: String,
    pub seed: u64,
    /// The number of the first update that compresses.
    pub starts_at: u64,
    /// Elements of the bucket.
    pub elements: usize,
    /// This rank's number in the group.
    pub rank: usize,
    /// The ranks of the group.
    pub ranks: usize,
    /// Whether each rank keeps only its slice of the sum.
    pub scatter: bool,
    /// Elements that are padding: zero in every gradient and in their sum.
    pub padding: Vec<Range<usize>>,
    /// The parameters as PowerSGD sums them.
    pub factored: Vec<FactoredParameter>,
}

/// A parameter in a bucket.
#[derive(Clone, Debug)]
pub struct Member<'a> {
    pub spec: &'a ParamSpec,
    /// Its elements in the bucket.
    pub range: Range<usize>,
}

/// A shard of the sum, whose owner gets it from the other ranks.
#[derive(Clone, Debug)]
pub struct Shard {
    /// Its elements in the bucket.
    pub range: Range<usize>,
    pub shape: Shape,
    /// Where its message begins among the messages of all shards.
    pub at: usize,
    /// Bytes of its message; 0 if it is empty.
    pub bytes: usize,
}

/// A state that a rank keeps of a whole bucket.
#[derive(Clone, Debug)]
pub struct BucketState {
    pub name: &'static str,
    pub replicas: Replicas,
    /// Its elements in the bucket.
    pub window: Range<usize>,
}

/// A slice of a state, of one parameter.
#[derive(Clone, Debug)]
pub struct SumState {
    pub key: StateKey,
    pub dims: Dims,
    pub slice: LocalSlice,
    /// The state of the bucket that it is a part of, and its elements there.
    pub state: &'static str,
    pub range: Range<usize>,
}

impl SumPlan {
    /// The shards whose messages go to their owners; none where all messages go to all ranks.
    pub fn shards(&self) -> Result<Vec<Shard>, CompressError> {
        let (ranks, whole) = (self.ranks, Shape::vector(self.elements)?);
        let ranges = match self.scheme.sum() {
            _ if self.scatter => {
                (0..ranks).map(|rank| FlatSlice::new(self.elements, ranks, rank).part_of(0..self.elements)).collect()
            }
            SumMethod::ScatterGather(per) => shards(per, whole, ranks),
            SumMethod::AllReduceBf16 => shards(Per::Tensor, whole, ranks),
            _ => return Ok(Vec::new()),
        };
        let mut end = 0;
        let shard = |range: Range<usize>| {
            let (shape, at) = (Shape::vector(range.len())?, end);
            let bytes = if range.is_empty() { 0 } else { wire_bytes(&self.scheme, shape)? };
            end += bytes;
            Ok(Shard { range, shape, at, bytes })
        };
        ranges.into_iter().map(shard).collect()
    }

    /// The states that a rank keeps between sums, but for the factors of PowerSGD.
    ///
    /// # Errors
    /// A scheme that does not compress the bucket.
    pub fn states(&self) -> Result<Vec<BucketState>, CompressError> {
        let state = |name, replicas, window| BucketState { name, replicas, window };
        let of_sender = STATES.into_iter().zip(self.feedback.keeps()).filter(|(_, kept)| *kept);
        let mut states: Vec<_> = of_sender.map(|(name, _)| state(name, Replicas::Ranks, 0..self.elements)).collect();
        if self.feedback.keeps_estimate() {
            states.push(state(SUM_ESTIMATE, Replicas::Sums, 0..self.elements));
        }
        if self.feedback != Feedback::None
            && !self.scatter
            && let Some(shard) = self.shards()?.get(self.rank).filter(|shard| !shard.range.is_empty())
        {
            states.push(state(SHARD_RESIDUAL, Replicas::Sums, shard.range.clone()));
        }
        Ok(states)
    }

    /// The slices that a rank keeps between sums of the members of a bucket. `replica` says which replica of a state
    /// this rank has.
    ///
    /// # Errors
    /// A scheme that does not compress the bucket.
    pub fn kept(
        &self,
        replica: impl Fn(Replicas) -> Replica,
        members: &[Member<'_>],
        mesh: &Mesh,
        coords: Coords,
    ) -> Result<Vec<SumState>, CompressError> {
        let mut all = Vec::new();
        for BucketState { name: state, replicas, window } in self.states()? {
            for Member { spec, range } in members {
                let start = window.start.clamp(range.start, range.end);
                let part = start - range.start..window.end.clamp(start, range.end) - range.start;
                for (slice, place) in spec.local(mesh, coords).boxes(part) {
                    let range = range.start + place.start - window.start..range.start + place.end - window.start;
                    let (dims, slice) = replica(replicas).slice_of(spec.dims, slice);
                    all.push(SumState { key: key(spec, state), dims, slice, state, range });
                }
            }
        }
        if let Scheme::PowerSgd(of) = self.scheme {
            all.extend(self.kept_factors(of, replica(Replicas::Sums), members, mesh, coords));
        }
        Ok(all)
    }

    /// The slices of Q that a rank keeps. Where an axis cuts rows, each of its ranks has a Q of its own.
    fn kept_factors(
        &self,
        of: PowerSgd,
        replica: Replica,
        members: &[Member<'_>],
        mesh: &Mesh,
        coords: Coords,
    ) -> Vec<SumState> {
        let (mut all, mut start) = (Vec::new(), 0);
        for (Member { spec, .. }, factored) in members.iter().zip(&self.factored) {
            let [_, count] = factored.lengths(of);
            let Some(declared) = matrices(spec).filter(|_| count > 0) else { continue };
            let LocalSlice { stored, ranges } = spec.local(mesh, coords);
            let (numbering, columns) = (declared.numbering(spec.dims.len()), spec.dims.len() - declared.columns);
            let cuts_rows = |dim: usize| dim < columns && !numbering.clone().any(|numbers| numbers == dim);
            let shards = spec.placement.shards().iter().filter(|(_, dim)| cuts_rows(*dim));
            let replica = shards.fold(replica, |all, &(axis, _)| all.within(coords.get(axis), mesh.degree(axis)));
            // A Q for each matrix.
            let of_columns = |dims: &[usize]| {
                let numbers: Vec<usize> = numbering.clone().map(|dim| dims[dim]).collect();
                Dims::new(&[&numbers, &[of.rank][..], &dims[columns..]].concat())
            };
            let held = numbering.clone().map(|dim| ranges[dim].clone()).chain(std::iter::once(0..of.rank));
            let held = held.chain(ranges[columns..].iter().cloned()).collect();
            let slice = LocalSlice { stored: of_columns(&stored), ranges: held };
            let (dims, slice) = replica.slice_of(of_columns(&spec.dims), slice);
            all.push(SumState { key: key(spec, FACTOR), dims, slice, state: FACTOR, range: start..start + count });
            start += count;
        }
        all
    }
}

fn key(spec: &ParamSpec, state: &str) -> StateKey {
    StateKey::new(&spec.name, state)
}
