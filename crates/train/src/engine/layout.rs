//! Where gradients lie and what they are reduced over: all of it follows from placements and from the types with which parameters
//! are read.

use super::{RankModel, Tie, Trace, TrainError};
use meshwork_core::{Axis, DType, Group, Rank, Types};
use meshwork_data_parallel::{Bucket, Member, Reducer, plan};
use meshwork_tensor::{Device, ParamId, ParamSpec, Params};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Name of the groups that sum tied weights across stages.
pub const TIES: &str = "ties";

/// Gradients are reduced in buckets of up to this many elements (1 MiB of f32): large enough to run at memory speed, small
/// enough that most are done before backward ends.
const BUCKET_ELEMENTS: usize = 1 << 18;

/// What gradients of one bucket are reduced over: their Partial axes, and for a tied parameter the pp ranks that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The Partial axes, in the order of the rounds.
    pub axes: Vec<Axis>,
    /// The pp ranks that hold it, if it is tied across stages.
    pub holders: Option<Vec<usize>>,
    /// Copies in which gradients are kept until they are reduced: see [`Share`](meshwork_tensor::tape::Share).
    pub copies: usize,
}

/// The groups of the pp ranks that hold tied parameters: made once, by every rank in the same order.
pub fn join_ties(rank: &Rank, ties: &[Tie]) -> Result<BTreeMap<Vec<usize>, Group>, TrainError> {
    let mut groups = BTreeMap::new();
    for tie in ties {
        if groups.contains_key(&tie.holders) {
            continue;
        }
        let members: Vec<usize> = match tie.holders.contains(&rank.coords().get(Axis::Pp)) {
            true => tie.holders.iter().map(|&stage| rank.mesh().rank_at(rank.coords().with(Axis::Pp, stage))).collect(),
            false => vec![rank.world_rank()],
        };
        groups.insert(tie.holders.clone(), rank.subgroup(TIES, &members)?);
    }
    Ok(groups)
}

/// Which parameters share a flat buffer, in the order in which their gradients become final. A tied parameter has one alone, so
/// that its layout is the same on every holder.
pub fn buckets(model: &RankModel, found: &Trace, ties: &[Tie], rank: &Rank) -> (Vec<Vec<ParamId>>, Vec<Key>) {
    let ids: BTreeMap<usize, ParamId> = found.ready.iter().map(|&id| (id.index(), id)).collect();
    let (tied, single): (Vec<_>, Vec<_>) = found
        .ready
        .iter()
        .map(|&id| {
            let spec = model.declarations.spec(id);
            let types = found.reads.get(&id).copied().unwrap_or(Types::NONE);
            // The gradient of a Replicate read is Partial. dp first: what is left is smaller once that is sharded.
            let mut axes: Vec<Axis> = types.dual().partial_axes().collect();
            axes.sort_by_key(|&axis| (axis != Axis::Dp && axis != Axis::Cp, axis));
            let holders = ties.iter().find(|tie| tie.name == spec.name).map(|tie| tie.holders.clone());
            let copies = found.copies[id.index()];
            let elements = copies * spec.local(rank.mesh(), rank.coords()).stored.count();
            Member { id: id.index(), elements, key: Key { axes, holders, copies } }
        })
        .partition(|member| member.key.holders.is_some());
    let plans = plan(&single, BUCKET_ELEMENTS).into_iter().chain(plan(&tied, 0));
    plans.map(|bucket| (bucket.members.iter().map(|id| ids[id]).collect(), bucket.key)).unzip()
}

/// Buckets of gradients that lie as the weights in `params` do, with the groups of each bucket's key; and per parameter its (bucket,
/// member).
pub fn reducer(
    params: &Params,
    layout: &[Vec<ParamId>],
    keys: &[Key],
    rank: &Rank,
    tie_groups: &BTreeMap<Vec<usize>, Group>,
    device: &Arc<dyn Device>,
) -> Result<(Reducer, Vec<(usize, usize)>), TrainError> {
    let mut places = vec![(0, 0); params.declarations().specs().len()];
    let mut filled = Vec::with_capacity(layout.len());
    for (bucket, (members, key)) in layout.iter().zip(keys).enumerate() {
        for (member, id) in members.iter().enumerate() {
            places[id.index()] = (bucket, member);
        }
        let mut rounds: Vec<Group> = key.axes.iter().map(|&axis| rank.group(axis).clone()).collect();
        rounds.extend(key.holders.as_ref().and_then(|holders| tie_groups.get(holders).cloned()));
        // Every member with its copies one after the other; added up, they lie as the weights do.
        let with_copies = |range: Range<usize>| key.copies * range.start..key.copies * range.end;
        filled.push(Bucket {
            gradients: device.zeros(DType::F32, key.copies * params.flats()[bucket].count())?,
            members: members.iter().map(|&id| with_copies(params.place(id).1)).collect(),
            rounds,
        });
    }
    Ok((Reducer::new(filled), places))
}

/// A part of a parameter that this rank counts in the gradient norm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// The flat buffer.
    pub flat: usize,
    /// The first of its ranges there,
    pub range: Range<usize>,
    /// how many there are,
    pub blocks: usize,
    /// and how far one is from the next.
    pub pitch: usize,
    /// The sum to which it goes. In canonical numerics each is that of one leaf, which one rank gives whole.
    pub slot: usize,
}

/// The parts of a rank's parameters that it counts in the norm, and the number of sums in the whole model. Ranks that hold the same
/// elements share them out, so that each element is counted once.
///
/// In canonical numerics the leaves are slices of each parameter, along the dim that its placement cuts if there is one, and
/// the order of parameters is that of the whole `model`.
pub fn counted(params: &Params, model: &[ParamSpec], ties: &[Tie], rank: &Rank) -> (Vec<Counted>, usize) {
    let declarations = params.declarations();
    let mut counted = Vec::new();
    for id in declarations.ids() {
        let (flat, range) = params.place(id);
        let spec = declarations.spec(id);
        let (index, replicas) = replica(spec, ties, rank);
        let Some(leaves) = declarations.leaves() else {
            let share = |index: usize| range.start + range.len() * index / replicas;
            counted.push(Counted { flat, range: share(index)..share(index + 1), blocks: 1, pitch: 0, slot: 0 });
            continue;
        };
        let (mesh, coords) = (rank.mesh(), rank.coords());
        let stored = spec.local(mesh, coords).stored;
        let (held, first, before) = match spec.placement.shards().first() {
            Some(&(axis, dim)) => {
                let held = leaves / mesh.degree(axis);
                (held, coords.get(axis) * held, stored[..dim].iter().product::<usize>())
            }
            None => (leaves, 0, 1),
        };
        let pitch = range.len() / before.max(1);
        let number = model.iter().position(|other| other.name == spec.name).unwrap_or(0);
        for leaf in (0..held).filter(|leaf| (first + leaf) % replicas == index) {
            let within = |leaf: usize| range.start + pitch * leaf / held;
            let slot = number * leaves + first + leaf;
            counted.push(Counted { flat, range: within(leaf)..within(leaf + 1), blocks: before, pitch, slot });
        }
    }
    (counted, declarations.leaves().map_or(1, |leaves| leaves * model.len()))
}

/// The number of this rank among those that hold the same elements of a parameter, and how many they are.
fn replica(spec: &ParamSpec, ties: &[Tie], rank: &Rank) -> (usize, usize) {
    let (mut index, mut replicas) = (0, 1);
    for axis in rank.mesh().value_axes() {
        if !spec.placement.shards().iter().any(|&(cut, _)| cut == axis) {
            index = index * rank.mesh().degree(axis) + rank.coords().get(axis);
            replicas *= rank.mesh().degree(axis);
        }
    }
    if let Some(tie) = ties.iter().find(|tie| tie.name == spec.name) {
        let place = tie.holders.iter().position(|&stage| stage == rank.coords().get(Axis::Pp)).unwrap_or(0);
        index = index * tie.holders.len() + place;
        replicas *= tie.holders.len();
    }
    (index, replicas)
}
