//! The layout of gradients, and what they are reduced over. Both follow from placements and from the types with which
//! parameters are read.

use crate::trace::Trace;
use crate::{LocalModel, PlanError, TiedWeight, TrainError};
use meshwork_core::{Axis, DType, Group, Rank, Types};
use meshwork_data_parallel::{Bucket, BucketPlan, Member, Reducer, plan, rounds};
use meshwork_tensor::param::reduction_axes;
use meshwork_tensor::{Device, ParamId, ParamSpec, Params};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Name of the groups that sum the gradients of tied weights across stages (Megatron's embedding group).
pub const TIED: &str = "tied";

/// Gradients are reduced in buckets of up to this many elements (1 MiB of f32): large enough to run at memory speed, small
/// enough that most are done before backward ends.
const BUCKET_ELEMENTS: usize = 1 << 18;

/// What gradients of one bucket are reduced over: their Partial axes, and for a tied parameter the pp ranks that hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The Partial axes, in the order of the rounds.
    pub axes: Vec<Axis>,
    /// The pp ranks that hold it, if it is tied across stages.
    pub tied_ranks: Option<Vec<usize>>,
    /// Copies in which gradients are kept until they are reduced: see [`GradShard`](meshwork_tensor::tape::GradShard).
    pub copies: usize,
}

/// The embedding groups, the pp ranks that hold tied parameters. Every rank makes them once, in the same order.
pub fn join_tied(rank: &Rank, tied: &[TiedWeight]) -> Result<BTreeMap<Vec<usize>, Group>, TrainError> {
    let mut groups = BTreeMap::new();
    for TiedWeight { pp_ranks, .. } in tied {
        if groups.contains_key(pp_ranks) {
            continue;
        }
        let members: Vec<usize> = match pp_ranks.contains(&rank.coords().get(Axis::Pp)) {
            true => pp_ranks.iter().map(|&stage| rank.mesh().rank_at(rank.coords().with(Axis::Pp, stage))).collect(),
            false => vec![rank.world_rank()],
        };
        groups.insert(pp_ranks.clone(), rank.subgroup(TIED, &members)?);
    }
    Ok(groups)
}

/// Which parameters share a flat buffer, in the order in which their gradients become final. A tied parameter has a
/// buffer of its own, so that its layout is the same on every holder. Behind the buckets lie frozen parameters, without
/// a key: those that statistics update in one flat buffer, the others in another.
///
/// # Errors
/// A parameter that nothing reads in training and that is not frozen.
pub fn buckets(
    model: &LocalModel,
    found: &Trace,
    tied: &[TiedWeight],
    rank: &Rank,
) -> Result<(Vec<Vec<ParamId>>, Vec<Key>), PlanError> {
    let specs = |id: ParamId| model.declarations.spec(id);
    let unread = |id: &ParamId| !specs(*id).group.frozen && !found.ready.contains(id);
    if let Some(id) = model.declarations.ids().find(unread) {
        return Err(PlanError::Unread { name: specs(id).name.clone() });
    }
    let updated = |id: &ParamId| model.declarations.statistics().iter().any(|of| of.buffers.contains(id));
    let frozen: (Vec<ParamId>, Vec<ParamId>) =
        model.declarations.ids().filter(|&id| specs(id).group.frozen).partition(updated);
    let ids: BTreeMap<usize, ParamId> = found.ready.iter().map(|&id| (id.index(), id)).collect();
    let (mut shared, single): (Vec<_>, Vec<_>) = found
        .ready
        .iter()
        .map(|&id| {
            let spec = model.declarations.spec(id);
            let types = found.reads.get(&id).copied().unwrap_or(Types::NONE);
            let axes = reduction_axes(types);
            let tied_ranks = tied.iter().find(|tied| tied.name == spec.name).map(|tied| tied.pp_ranks.clone());
            let copies = found.copies[id.index()];
            let elements = copies * spec.local(rank.mesh(), rank.coords()).stored.count();
            Member { id: id.index(), elements, key: Key { axes, tied_ranks, copies } }
        })
        .partition(|member| member.key.tied_ranks.is_some());
    // The holders of tied weights make them ready in different orders, and reduce them in the order of their names.
    shared.sort_by_key(|member| &specs(ids[&member.id]).name);
    let plans = plan(&single, BUCKET_ELEMENTS).into_iter().chain(plan(&shared, 0));
    let bucket = |bucket: BucketPlan<Key>| (bucket.members.iter().map(|id| ids[id]).collect::<Vec<_>>(), bucket.key);
    let (mut layout, keys): (Vec<_>, Vec<_>) = plans.map(bucket).unzip();
    layout.extend([frozen.0, frozen.1].into_iter().filter(|frozen| !frozen.is_empty()));
    Ok((layout, keys))
}

/// Buckets of gradients with the same layout as the weights in `params`, and with the groups of each bucket's key; and
/// per parameter its (bucket, member).
pub fn reducer(
    params: &Params,
    layout: &[Vec<ParamId>],
    keys: &[Key],
    rank: &Rank,
    embedding_groups: &BTreeMap<Vec<usize>, Group>,
    device: &Arc<dyn Device>,
) -> Result<(Reducer, Vec<(usize, usize)>), TrainError> {
    let mut places = vec![(0, 0); params.declarations().specs().len()];
    let mut filled = Vec::with_capacity(layout.len());
    for (bucket, (members, key)) in layout.iter().zip(keys).enumerate() {
        for (member, id) in members.iter().enumerate() {
            places[id.index()] = (bucket, member);
        }
        let tied = key.tied_ranks.as_ref().and_then(|tied_ranks| embedding_groups.get(tied_ranks).cloned());
        // Each member has its copies one after the other. Their sums have the layout of the weights.
        let with_copies = |range: Range<usize>| key.copies * range.start..key.copies * range.end;
        filled.push(Bucket {
            gradients: device.zeros(DType::F32, key.copies * params.flats()[bucket].count())?,
            members: members.iter().map(|&id| with_copies(params.place(id).1)).collect(),
            rounds: rounds(rank, key.axes.iter().copied()),
            last: tied.filter(|group| group.size() > 1),
        });
    }
    Ok((Reducer::new(filled), places))
}

/// A part of a parameter that this rank counts in the gradient norm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NormShard {
    /// The flat buffer.
    pub flat: usize,
    /// Its first range in the flat buffer.
    pub range: Range<usize>,
    /// Number of ranges.
    pub segments: usize,
    /// Distance from the start of one range to the start of the next.
    pub pitch: usize,
    /// The sum that it is added to. In canonical numerics each sum is that of one block, which one rank computes whole.
    pub slot: usize,
}

/// The parts of a rank's parameters that it counts in the norm, and the number of sums in the whole model. Ranks that hold the same
/// elements share them out, so that each element is counted once.
///
/// In canonical numerics the blocks are slices of each parameter, along the dim that its placement cuts if there is one, and
/// the order of parameters is that of the whole `model`.
pub fn norm_shards(params: &Params, model: &[ParamSpec], tied: &[TiedWeight], rank: &Rank) -> (Vec<NormShard>, usize) {
    let declarations = params.declarations();
    let mut shards = Vec::new();
    for id in declarations.ids() {
        let (flat, range) = params.place(id);
        let spec = declarations.spec(id);
        if spec.group.frozen {
            continue;
        }
        let (index, replicas) = replica(spec, tied, rank);
        let Some(blocks) = declarations.reduction_blocks() else {
            let share = |index: usize| range.start + range.len() * index / replicas;
            shards.push(NormShard { flat, range: share(index)..share(index + 1), segments: 1, pitch: 0, slot: 0 });
            continue;
        };
        let (mesh, coords) = (rank.mesh(), rank.coords());
        let stored = spec.local(mesh, coords).stored;
        let (held, first, before) = match spec.placement.shards().first() {
            Some(&(axis, dim)) => {
                let held = blocks / mesh.degree(axis);
                (held, coords.get(axis) * held, stored[..dim].iter().product::<usize>())
            }
            None => (blocks, 0, 1),
        };
        let pitch = range.len() / before.max(1);
        let number = model.iter().position(|other| other.name == spec.name).unwrap_or(0);
        for block in (0..held).filter(|block| (first + block) % replicas == index) {
            let within = |block: usize| range.start + pitch * block / held;
            let slot = number * blocks + first + block;
            shards.push(NormShard { flat, range: within(block)..within(block + 1), segments: before, pitch, slot });
        }
    }
    (shards, declarations.reduction_blocks().map_or(1, |blocks| blocks * model.len()))
}

/// The index of this rank among the ranks that hold the same elements of a parameter, and the number of those ranks.
pub fn replica(spec: &ParamSpec, tied: &[TiedWeight], rank: &Rank) -> (usize, usize) {
    let (mut index, mut replicas) = (0, 1);
    for axis in rank.mesh().value_axes() {
        if !spec.placement.shards().iter().any(|&(cut, _)| cut == axis) {
            index = index * rank.mesh().degree(axis) + rank.coords().get(axis);
            replicas *= rank.mesh().degree(axis);
        }
    }
    if let Some(TiedWeight { pp_ranks, .. }) = tied.iter().find(|tied| tied.name == spec.name) {
        let place = pp_ranks.iter().position(|&stage| stage == rank.coords().get(Axis::Pp)).unwrap_or(0);
        index = index * pp_ranks.len() + place;
        replicas *= pp_ranks.len();
    }
    (index, replicas)
}
