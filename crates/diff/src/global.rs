//! Global values, assembled from the values of all ranks by their SPMD types.
//!
//! | type | over the ranks of the axis |
//! |---|---|
//! | `Shard(dim)` | joined along `dim`, in rank order; padding at the end is cut off |
//! | `Invariant`, `Replicate` | one of them, and whether they are the same |
//! | `Partial` | summed in the balanced tree that reductions take |
//! | `Varying` | side by side, along a dim of its own in front |
//!
//! Tokens that lie in an order of their own before ranks cut them are brought into the order of the sequence.
//!
//! On `dp` dim 0 of a value is its samples. There a value is cut into samples, which do not depend on how the batch is
//! cut. A value without such a dim, such as a loss summed over a micro-batch, stays whole.

use super::program::Program;
use super::run::{Held, Record, TokenPlaces};
use super::ulps::{Float, Values};
use meshwork_core::{Axis, Coords, Mesh, Ty, tree};
use meshwork_engine::program::Value;
use meshwork_tensor::param::{self, Conflict};
use meshwork_tensor::{Shape, unravel};
use std::collections::BTreeMap;

/// The dim of tokens.
pub(super) const SEQ: usize = 1;

/// The part of a step's batch that a piece of a value belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Unit {
    /// One sample, by its global index.
    Sample(u64),
    /// A micro-batch: its first sample, and its number of samples.
    Micro(u64, usize),
}

/// A piece of a global value.
#[derive(Clone, Debug)]
pub(super) struct GlobalPiece {
    /// The micro-batch that it was computed in.
    pub(super) micro: usize,
    pub(super) dp: usize,
    pub(super) dims: Vec<usize>,
    pub(super) values: Values,
    /// The place at which each token of its sequence lay; empty where that is its own number.
    pub(super) places: Vec<usize>,
}

/// Two ranks that should hold the same and do not.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Replicas {
    pub(super) ranks: [usize; 2],
    pub(super) unit: Option<Unit>,
    pub(super) micro: Option<usize>,
    /// Extents of the value, and the place of its first difference.
    pub(super) dims: Vec<usize>,
    pub(super) index: Vec<usize>,
    pub(super) values: [f64; 2],
    pub(super) ulps: u64,
    pub(super) differing: u64,
}

/// A value of one rank, or assembled from several.
pub(super) struct RankValue<T> {
    pub(super) rank: usize,
    coords: Coords,
    pub(super) dims: Vec<usize>,
    pub(super) values: Vec<T>,
}

impl RankValue<f32> {
    /// An optimizer's state of a set of a parameter's elements, as a rank keeps it.
    pub(super) fn of_set(held: &Held, set: usize) -> Option<Self> {
        let values = held.sets.get(set)?.clone();
        Some(Self { rank: held.rank, coords: Coords::default(), dims: vec![values.len()], values })
    }
}

/// The pieces of value `value` of operation `op`, and the first replicas that differ.
pub(super) fn assemble(
    program: &Program,
    (op, value): (usize, usize),
    records: &[Record],
    tokens: &TokenPlaces,
) -> (BTreeMap<Unit, GlobalPiece>, Option<Replicas>) {
    match records.first().map(|record| &record.values) {
        None => Default::default(),
        Some(Values::F32(_)) => assemble_of::<f32>(program, (op, value), records, tokens),
        Some(Values::F64(_)) => assemble_of::<f64>(program, (op, value), records, tokens),
    }
}

fn assemble_of<T: Float>(
    program: &Program,
    (op, value): (usize, usize),
    records: &[Record],
    tokens: &TokenPlaces,
) -> (BTreeMap<Unit, GlobalPiece>, Option<Replicas>) {
    let lies_in_order = program.run.lies_in_order((op, value));
    let value = &program.run.ops[op].values[value];
    let (Value { types, shape, .. }, real) = (value, value.real());
    let replicated = |ty: Ty| matches!(ty, Ty::Invariant | Ty::Replicate);
    // Of axes that cut one dim the fastest makes the innermost cut, so they join over the fastest first. Replicas are
    // compared last, when both are whole.
    let mut axes: Vec<(Axis, Ty)> = types.iter().filter(|&(axis, ty)| !axis.is_data() || replicated(ty)).collect();
    axes.sort_by_key(|&(_, ty)| replicated(ty));

    // A value with parts on several dp ranks is assembled over them; otherwise each dp rank has its own samples.
    let whole_over_dp = Axis::DATA.into_iter().all(|axis| types.get(axis).is_none_or(replicated));
    let mut groups: BTreeMap<(usize, usize), Vec<&Record>> = BTreeMap::new();
    for record in records {
        let dp = if whole_over_dp { 0 } else { program.run.mesh.data_rank(program.run.mesh.coords(record.rank)) };
        groups.entry((dp, record.micro)).or_default().push(record);
    }
    let (mut pieces, mut differ) = (BTreeMap::new(), None);
    for ((dp, micro), mut records) in groups {
        records.sort_by_key(|record| record.rank);
        let first = records.iter().map(|record| record.first_sample).min().unwrap_or(0);
        let mut parts: Vec<RankValue<T>> = records
            .iter()
            .filter_map(|record| {
                let values = T::slice(&record.values)?.to_vec();
                let coords = program.run.mesh.coords(record.rank);
                Some(RankValue { rank: record.rank, coords, dims: record.dims.clone(), values })
            })
            .collect();
        let cut_by_sample = Axis::DATA.into_iter().any(|axis| types.get(axis) == Some(Ty::Shard(0)));
        let others =
            types.cuts(0).filter(|axis| !axis.is_data()).map(|axis| program.run.mesh.degree(axis)).product::<usize>();
        let by_sample = cut_by_sample && shape.first().map(|rows| rows * others) == Some(program.samples);
        let unit = Unit::Micro(first, program.samples);
        let places = if lies_in_order { places_of(&program.run.mesh, tokens, dp, micro) } else { Vec::new() };
        let mut ordered = places.is_empty();
        for &(axis, ty) in &axes {
            if replicated(ty) && !std::mem::replace(&mut ordered, true) {
                parts.iter_mut().for_each(|part| in_sequence(part, &places));
            }
            let mut joined: BTreeMap<usize, Vec<RankValue<T>>> = BTreeMap::new();
            for part in parts {
                let line = program.run.mesh.rank_at(part.coords.with(axis, 0));
                joined.entry(line).or_default().push(part);
            }
            let mut join = |(line, parts): (usize, Vec<RankValue<T>>)| {
                let coords = program.run.mesh.coords(line);
                if replicated(ty) && differ.is_none() {
                    differ = replicas(&parts).map(|found| found.at(unit, micro, by_sample.then_some(first)));
                }
                join(parts, ty, coords)
            };
            parts = joined.into_iter().filter_map(&mut join).collect();
        }
        for mut part in parts {
            if !ordered {
                in_sequence(&mut part, &places);
            }
            let part = cut_off_padding(part, &real);
            let RankValue { dims, values, .. } = part;
            let places = places.clone();
            if !by_sample {
                pieces.insert(unit, GlobalPiece { micro, dp, dims, values: T::wrap(values), places });
                continue;
            }
            let each = dims[1..].iter().product::<usize>().max(1);
            for (row, values) in values.chunks(each).enumerate() {
                let (dims, values, places) = (dims[1..].to_vec(), T::wrap(values.to_vec()), places.clone());
                let piece = GlobalPiece { micro, dp, dims, values, places };
                pieces.insert(Unit::Sample(first + row as u64), piece);
            }
        }
    }
    (pieces, differ)
}

/// The place of each token of a sequence that ranks of context parallelism cut in an order of its own; nothing where
/// tokens lie at their own numbers.
fn places_of(mesh: &Mesh, tokens: &TokenPlaces, dp: usize, micro: usize) -> Vec<usize> {
    let runs = (0..mesh.context_degree()).map(|rank| tokens.get(&(dp, micro, rank)));
    let Some(runs) = runs.collect::<Option<Vec<_>>>() else { return Vec::new() };
    let tokens: Vec<usize> = runs.into_iter().flatten().cloned().flatten().collect();
    let mut places = vec![0; tokens.len()];
    for (place, token) in tokens.into_iter().enumerate() {
        if let Some(of_token) = places.get_mut(token) {
            *of_token = place;
        }
    }
    places
}

/// Brings the rows of dim [`SEQ`] into the order of the sequence.
fn in_sequence<T: Float>(part: &mut RankValue<T>, places: &[usize]) {
    if part.dims.get(SEQ) != Some(&places.len()) || places.is_sorted() {
        return;
    }
    let inner: usize = part.dims[SEQ + 1..].iter().product();
    let rows = part.values.chunks(places.len() * inner);
    let row = |sample: &[T], place: usize| sample[place * inner..(place + 1) * inner].to_vec();
    part.values = rows.flat_map(|sample| places.iter().flat_map(|&place| row(sample, place))).collect();
}

/// Joins the parts of one line of ranks, in rank order.
fn join<T: Float>(parts: Vec<RankValue<T>>, ty: Ty, coords: Coords) -> Option<RankValue<T>> {
    let (rank, mut dims) = parts.first().map(|part| (part.rank, part.dims.clone()))?;
    let degree = parts.len();
    let values = match ty {
        Ty::Invariant | Ty::Replicate => parts.into_iter().next()?.values,
        Ty::Partial => sum(&parts.iter().map(|part| &part.values[..]).collect::<Vec<_>>()),
        Ty::Varying => {
            match parts.iter().all(|part| part.dims == dims) {
                true => dims.insert(0, degree),
                false => dims[0] = parts.iter().map(|part| part.dims[0]).sum(), // rows, of which each rank has its own number
            }
            parts.into_iter().flat_map(|part| part.values).collect()
        }
        Ty::Shard(dim) => {
            let run: usize = dims[dim..].iter().product();
            let outer: usize = dims[..dim].iter().product();
            dims[dim] *= degree;
            let mut joined = Vec::with_capacity(outer * run * degree);
            for at in 0..outer {
                parts.iter().for_each(|part| joined.extend_from_slice(&part.values[at * run..(at + 1) * run]));
            }
            joined
        }
    };
    Some(RankValue { rank, coords, dims, values })
}

/// The sum in the balanced [tree] that reductions take.
fn sum<T: Float>(parts: &[&[T]]) -> Vec<T> {
    let element = |at: usize| tree::sum(&parts.iter().map(|part| part[at]).collect::<Vec<_>>(), |a, b| a + b);
    (0..parts.first().map_or(0, |part| part.len())).map_while(element).collect()
}

/// The first two of these that differ.
pub(super) fn replicas<T: Float>(parts: &[RankValue<T>]) -> Option<Replicas> {
    let (one, others) = parts.split_first()?;
    others.iter().find_map(|other| {
        let pairs = || one.values.iter().zip(&other.values).map(|(&a, &b)| (a, b, a.ulps(b)));
        let at = pairs().position(|(.., ulps)| ulps > 0)?;
        let (a, b, ulps) = pairs().nth(at)?;
        Some(Replicas {
            ranks: [one.rank, other.rank],
            unit: None,
            micro: None,
            dims: one.dims.clone(),
            index: unravel(at, &one.dims),
            values: [a.into(), b.into()],
            ulps,
            differing: pairs().filter(|(.., ulps)| *ulps > 0).count() as u64,
        })
    })
}

impl Replicas {
    fn at(mut self, unit: Unit, micro: usize, first_sample: Option<u64>) -> Self {
        (self.unit, self.micro) = (Some(unit), Some(micro));
        if let Some(first) = first_sample {
            self.index[0] += first as usize;
            self.unit = Some(Unit::Sample(self.index[0] as u64));
        }
        self
    }
}

/// Cuts off the elements beyond the real extents.
fn cut_off_padding<T: Float>(mut part: RankValue<T>, real: &[Option<usize>]) -> RankValue<T> {
    // A leading dim that the value does not have on a rank has no padding.
    let front = part.dims.len() - real.len();
    for (dim, real) in real.iter().enumerate() {
        let dim = front + dim;
        let Some(real) = real.filter(|&real| real < part.dims[dim]) else { continue };
        let inner: usize = part.dims[dim + 1..].iter().product();
        let rows = part.values.chunks(part.dims[dim] * inner);
        part.values = rows.flat_map(|row| row[..real * inner].to_vec()).collect();
        part.dims[dim] = real;
    }
    part
}

/// Assembles a whole parameter, or a vector that goes with it, from the parts of the ranks: `None` for elements that no
/// rank holds, and `None` in all for a vector that no rank has. Also returns the first replicas that differ.
pub(super) fn whole(held: &[Held], vector: usize, dims: Shape) -> Option<(Vec<Option<f32>>, Option<Replicas>)> {
    let pieces: Vec<_> = held.iter().filter_map(|held| held.vectors.get(vector)).flatten().collect();
    if pieces.is_empty() {
        return None;
    }
    let (whole, conflict) = param::assemble(dims, pieces);
    let differ = conflict.map(|Conflict { element, ranks, values: [a, b], count }| Replicas {
        ranks,
        unit: None,
        micro: None,
        dims: dims.to_vec(),
        index: unravel(element, &dims),
        values: [a.into(), b.into()],
        ulps: a.ulps(b),
        differing: count as u64,
    });
    Some((whole, differ))
}

#[cfg(test)]
pub(super) mod tests;
