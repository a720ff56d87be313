//! The plan of a save: which rank writes which slices. It is a pure function of the slices on every rank, so all ranks
//! compute the same plan without communication.
//!
//! Ranks that hold the same elements share the work of writing them: large slices are cut, and each part goes to the
//! holder with the fewest bytes so far. Slices with few holders come first, because they leave little choice; then
//! larger slices.

use crate::{Dtype, Slice, Tensor};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A slice of a tensor, and the ranks that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The index of the tensor in the plan.
    pub tensor: usize,
    /// The slice.
    pub slice: Slice,
    /// The ranks that hold the whole slice.
    pub ranks: Vec<usize>,
}

/// A slice with its unique writer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedPiece {
    /// The index of the tensor in the plan.
    pub tensor: usize,
    /// The slice.
    pub slice: Slice,
    /// The rank that writes it.
    pub writer: usize,
    /// The range of its bytes in the writer's data.
    pub bytes: Range<u64>,
}

/// The slices of each tensor that each rank writes, and their places in the rank's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavePlan {
    tensors: Vec<Tensor>,
    names: BTreeMap<String, usize>,
    /// By writer, in the order of the writer's file.
    pieces: Vec<Vec<PlannedPiece>>,
    /// The writers of each tensor.
    writers: Vec<BTreeSet<usize>>,
}

/// A state that cannot be saved.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant names its fields")]
pub enum PlanError {
    /// Two tensors with the same name.
    #[error("two tensors are called {name}: give each a name of its own")]
    Name { name: String },
    /// A tensor with more bytes than a file can hold.
    #[error("{name} of {dims:?} has more bytes than can be counted")]
    Size { name: String, dims: Vec<u64> },
    /// A slice outside its tensor.
    #[error("slice {slice} of {name} does not lie in its extents {dims:?}")]
    Slice { name: String, slice: Slice, dims: Vec<u64> },
    /// An unknown tensor or rank.
    #[error("slice {slice} is of tensor {tensor} on ranks {ranks:?}; there are {tensors} tensors and {world} ranks")]
    Holder { tensor: usize, slice: Slice, ranks: Vec<usize>, tensors: usize, world: usize },
    /// Elements that no rank holds.
    #[error("no rank holds {missing} of the {elements} elements of {name} {dims:?}")]
    Missing { name: String, dims: Vec<u64>, missing: u64, elements: u64 },
}

debug_as_display!(PlanError);

/// Each rank writes at least about this many pieces, so that the last assigned piece changes the balance only a little.
const PIECES_PER_WRITER: u64 = 32;
/// Smaller pieces are not cut, because each piece costs a line of the index.
const SMALLEST_CUT: u64 = 4096;

impl SavePlan {
    /// The plan for `world` ranks that hold these slices. Slices of one tensor may overlap; together they must cover
    /// the tensor.
    ///
    /// # Errors
    /// Duplicate names, slices outside their tensor, elements that no rank holds.
    pub fn new(world: usize, tensors: Vec<Tensor>, held: &[Held]) -> Result<Self, PlanError> {
        let mut names = BTreeMap::new();
        for (at, Tensor { name, dims, .. }) in tensors.iter().enumerate() {
            if names.insert(name.clone(), at).is_some() {
                return Err(PlanError::Name { name: name.clone() });
            }
            if tensors[at].size().is_none() {
                return Err(PlanError::Size { name: name.clone(), dims: dims.clone() });
            }
        }
        let mut holders: Vec<BTreeMap<&Slice, BTreeSet<usize>>> = vec![BTreeMap::new(); tensors.len()];
        for Held { tensor, slice, ranks } in held {
            let Some(of) = tensors.get(*tensor).filter(|_| !ranks.is_empty() && ranks.iter().all(|&rank| rank < world))
            else {
                let (tensor, slice, ranks, tensors) = (*tensor, slice.clone(), ranks.clone(), tensors.len());
                return Err(PlanError::Holder { tensor, slice, ranks, tensors, world });
            };
            if !slice.fits(&of.dims) {
                let (name, slice, dims) = (of.name.clone(), slice.clone(), of.dims.clone());
                return Err(PlanError::Slice { name, slice, dims });
            }
            holders[*tensor].entry(slice).or_default().extend(ranks);
        }
        let mut regions = Vec::new();
        for (tensor, held) in holders.iter().enumerate() {
            let regions_of_it = disjoint(held);
            let covered: u64 = regions_of_it.iter().map(|(slice, _)| slice.elements()).sum();
            let of = &tensors[tensor];
            let elements = of.size().map_or(0, |(elements, _)| elements);
            if covered != elements {
                let (name, dims, missing) = (of.name.clone(), of.dims.clone(), elements - covered);
                return Err(PlanError::Missing { name, dims, missing, elements });
            }
            regions.extend(regions_of_it.into_iter().map(|(slice, ranks)| (tensor, slice, ranks)));
        }
        let pieces = shared_out(world, &tensors, regions);
        let mut writers = vec![BTreeSet::new(); tensors.len()];
        pieces.iter().flatten().for_each(|piece| _ = writers[piece.tensor].insert(piece.writer));
        Ok(Self { tensors, names, pieces, writers })
    }

    /// The tensors.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The index of a tensor in the plan.
    pub fn tensor(&self, name: &str) -> Option<usize> {
        self.names.get(name).copied()
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.pieces.len()
    }

    /// The pieces that a rank writes, in the order of its file.
    pub fn pieces(&self, rank: usize) -> &[PlannedPiece] {
        self.pieces.get(rank).map_or(&[], Vec::as_slice)
    }

    /// Whether a rank writes any part of a tensor.
    pub fn writes(&self, rank: usize, name: &str) -> bool {
        self.tensor(name).is_some_and(|tensor| self.writers[tensor].contains(&rank))
    }

    /// The bytes that a rank writes, which its snapshot has too.
    pub fn bytes(&self, rank: usize) -> u64 {
        self.pieces(rank).last().map_or(0, |piece| piece.bytes.end)
    }
}

/// Disjoint slices that cover all held elements, each with the ranks that hold it.
fn disjoint(held: &BTreeMap<&Slice, BTreeSet<usize>>) -> Vec<(Slice, BTreeSet<usize>)> {
    let mut regions: Vec<(Slice, BTreeSet<usize>)> = Vec::new();
    let mut seen: Vec<&Slice> = Vec::new();
    for &slice in held.keys() {
        if slice.elements() == 0 {
            continue;
        }
        let new = seen.iter().fold(vec![slice.clone()], |parts, other| {
            parts.iter().flat_map(|part| part.minus(other)).collect::<Vec<_>>()
        });
        for part in new {
            let ranks = held.iter().filter(|(other, _)| other.contains(&part)).flat_map(|(_, ranks)| ranks).copied();
            regions.push((part.clone(), ranks.collect()));
        }
        seen.push(slice);
    }
    regions
}

/// Assigns a writer to each region (cutting large ones), and orders the file of each writer.
fn shared_out(
    world: usize,
    tensors: &[Tensor],
    regions: Vec<(usize, Slice, BTreeSet<usize>)>,
) -> Vec<Vec<PlannedPiece>> {
    let size = |tensor: usize, slice: &Slice| slice.elements() * tensors[tensor].dtype.size();
    let total: u64 = regions.iter().map(|(tensor, slice, _)| size(*tensor, slice)).sum();
    let most = (total / (PIECES_PER_WRITER * world.max(1) as u64)).max(SMALLEST_CUT);
    let mut parts = Vec::new();
    for (tensor, slice, ranks) in regions {
        let most = if ranks.len() > 1 { most / tensors[tensor].dtype.size() } else { u64::MAX };
        parts.extend(slice.cut(most).into_iter().map(|part| (tensor, part, ranks.clone())));
    }
    parts.sort_by_cached_key(|(tensor, slice, ranks)| {
        (ranks.len(), Reverse(size(*tensor, slice)), *tensor, slice.clone())
    });
    let mut load = vec![0; world];
    let mut written: Vec<Vec<PlannedPiece>> = vec![Vec::new(); world];
    for (tensor, slice, ranks) in parts {
        let Some(writer) = ranks.into_iter().min_by_key(|&rank| load[rank]) else { continue };
        load[writer] += size(tensor, &slice);
        written[writer].push(PlannedPiece { tensor, slice, writer, bytes: 0..0 });
    }
    for pieces in &mut written {
        // Wide elements first, so that each piece is aligned.
        let width = |piece: &PlannedPiece| Reverse(Dtype::size(tensors[piece.tensor].dtype));
        pieces.sort_by(|a, b| (width(a), a.tensor, &a.slice).cmp(&(width(b), b.tensor, &b.slice)));
        let mut end = 0;
        for piece in pieces {
            let start = end;
            end += size(piece.tensor, &piece.slice);
            piece.bytes = start..end;
        }
    }
    written
}
