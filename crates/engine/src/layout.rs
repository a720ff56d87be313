//! The layout of gradients, and what they are reduced over. Both follow from placements and from the types with which
//! parameters are read.
//!
//! More than 400 lines: one pass over the parameters decides slices, buckets and sums together.

use crate::compress::factor_sum::FactorSum;
use crate::compress::lossy_sum::LossySum;
use crate::compress::matrices::FactoredParameter;
use crate::compress::settings::NOTHING;
use crate::compress::sum_plan::{self, Replica, Replicas, SumPlan, SumState};
use crate::trace::{Trace, trace};
use crate::zero::{Cuts, ZeroGroups};
use crate::{LocalModel, ModelPlan, Plan, PlanError, TiedWeight, TrainError, Vector, Zero, ZeroStage};
use meshwork_compress::Scheme;
use meshwork_core::{Axis, Buffer, DType, FlatSlice, Group, Mesh, Rank, Types};
use meshwork_data_parallel::{
    Bucket, BucketPlan, Member, Parking, Reducer, Sum, VectorError, Vectors, cuts_batch, plan as fill, rounds,
};
use meshwork_nn::Batch;
use meshwork_optim::{Kept, State};
use meshwork_pipeline::Schedule;
use meshwork_tensor::param::reduction_axes;
use meshwork_tensor::{Category, Declarations, Device, ParamId, ParamSpec, Params};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Name of the groups that sum the gradients of tied weights across stages (Megatron's embedding group).
pub const TIED: &str = "tied";

/// Gradients are reduced in buckets of up to this many elements (1 MiB of f32): large enough to run at memory speed,
/// small enough that most are done before backward ends.
const BUCKET_ELEMENTS: usize = 1 << 18;

/// Where ranks keep slices of gradients or weights, a few whole buckets are the memory that is left of them: each has
/// at most this share of a rank's parameters, about a layer.
const BUCKETS_OF_SLICES: usize = 16;

/// What gradients of one bucket are reduced over: their Partial axes, and for a tied parameter the pp ranks that hold
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The Partial axes, in the order of the rounds.
    pub axes: Vec<Axis>,
    /// The pp ranks that hold it, if it is tied across stages.
    pub tied_ranks: Option<Vec<usize>>,
    /// The stages of this rank that read it: their tapes add to its gradient.
    pub readers: Vec<usize>,
    /// Copies in which gradients are kept until they are reduced: see [`GradShard`](meshwork_tensor::tape::GradShard).
    pub copies: usize,
    /// What the update rule keeps of each element.
    pub states: Vec<State>,
    /// Where gradients are compressed: the axes over which the parameters are cut. A message of a bucket that mixes
    /// what is cut with what ranks hold alike would not be the same on them.
    pub cut: Vec<Axis>,
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
fn buckets(
    model: &LocalModel,
    found: &Trace,
    tied: &[TiedWeight],
    rank: &Rank,
    plan: &Plan,
) -> Result<(Vec<Vec<ParamId>>, Vec<Key>), PlanError> {
    let Plan { optimizer: rule, compress, .. } = plan;
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
            let (copies, readers) = (found.copies[id.index()], found.readers[id.index()].clone());
            let elements = copies * spec.local(rank.mesh(), rank.coords()).stored.count();
            let mut states = rule.states(&spec.shape());
            states.retain(|state| !matches!(state.kept, Kept::Sets(_)));
            let cut = match compress.gradients == NOTHING {
                true => Vec::new(),
                false => spec.placement.shards().iter().map(|&(axis, _)| axis).collect(),
            };
            Member { id: id.index(), elements, key: Key { axes, tied_ranks, readers, copies, states, cut } }
        })
        .partition(|member| member.key.tied_ranks.is_some());
    // The holders of tied weights make them ready in different orders, and reduce them in the order of their names.
    shared.sort_by_key(|member| &specs(ids[&member.id]).name);
    let all: usize = single.iter().map(|member| member.elements).sum();
    let limit = match plan.zero.stage >= ZeroStage::Gradients {
        true => BUCKET_ELEMENTS.min(all / BUCKETS_OF_SLICES),
        false => BUCKET_ELEMENTS,
    };
    let plans = fill(&single, limit).into_iter().chain(fill(&shared, 0));
    let bucket = |bucket: BucketPlan<Key>| (bucket.members.iter().map(|id| ids[id]).collect::<Vec<_>>(), bucket.key);
    let (mut layout, keys): (Vec<_>, Vec<_>) = plans.map(bucket).unzip();
    layout.extend([frozen.0, frozen.1].into_iter().filter(|frozen| !frozen.is_empty()));
    Ok((layout, keys))
}

/// The flat buffers of one rank's parameters, and how ranks share them out. A pure function of model, plan and rank.
#[derive(Debug)]
pub struct Layout {
    /// What the pass before the first step found.
    pub found: Trace,
    /// Per flat buffer its parameters, in order. Those behind the buckets are frozen.
    pub flats: Vec<Vec<ParamId>>,
    /// Per bucket.
    pub keys: Vec<Key>,
    /// Per parameter its flat buffer, its range there and its place among the members.
    places: Vec<(usize, Range<usize>, usize)>,
    /// Per flat buffer.
    elements: Vec<usize>,
    zero: Zero,
}

impl Layout {
    /// The layout on `rank`, which may be one that only records: no communication takes place.
    ///
    /// # Errors
    /// A program that is wrongly distributed; a parameter that nothing reads in training and that is not frozen.
    pub fn new(
        plan: &Plan,
        model: &ModelPlan,
        local: &LocalModel,
        schedule: &Schedule,
        tied: &[TiedWeight],
        rank: &Rank,
    ) -> Result<Self, TrainError> {
        let micro = Batch::blank(&model.model().fields(), plan.micro_batch_size()?);
        let mut found = trace(model, local, rank.world_rank(), &micro)?;
        found.number_tied_copies(model, local, schedule, tied, rank, &micro)?;
        let (flats, keys) = buckets(local, &found, tied, rank, plan)?;
        let mut places = vec![(0, 0..0, 0); local.declarations.specs().len()];
        let mut elements = Vec::with_capacity(flats.len());
        for (flat, members) in flats.iter().enumerate() {
            let mut end = 0;
            for (member, id) in members.iter().enumerate() {
                let start = end;
                end += local.declarations.spec(*id).local(rank.mesh(), rank.coords()).stored.count();
                places[id.index()] = (flat, start..end, member);
            }
            elements.push(end);
        }
        Ok(Self { found, flats, keys, places, elements, zero: plan.zero })
    }

    /// The flat buffer of a parameter, and its range there.
    pub fn place(&self, id: ParamId) -> (usize, Range<usize>) {
        let (flat, range, _) = &self.places[id.index()];
        (*flat, range.clone())
    }

    /// Per parameter its bucket, and its place among the members.
    pub fn members(&self) -> Vec<(usize, usize)> {
        self.places.iter().map(|(flat, _, member)| (*flat, *member)).collect()
    }

    /// The slice of a flat buffer that is a rank's own, by which ranks share out work and, with ZeRO, memory. Frozen
    /// parameters are not shared out.
    pub fn slice(&self, mesh: &Mesh, world_rank: usize, flat: usize) -> FlatSlice {
        match self.keys.get(flat) {
            Some(key) => self.zero.slice(mesh, world_rank, &key.axes, self.elements[flat]),
            None => FlatSlice::whole(self.elements[flat]),
        }
    }

    /// The index of a rank's group among those that have all slices each of what is summed over `axes`, and the number
    /// of these.
    pub fn replica(&self, mesh: &Mesh, world_rank: usize, axes: &[Axis]) -> (usize, usize) {
        self.zero.replica(mesh, world_rank, axes)
    }

    /// How the gradients of a flat buffer are summed over data-parallel ranks, where they are compressed. `updates` is
    /// their number in a step.
    pub fn sum_plan(
        &self,
        plan: &Plan,
        declarations: &Declarations,
        world_rank: usize,
        (flat, updates): (usize, usize),
    ) -> Option<SumPlan> {
        let (mesh, key) = (&plan.mesh, self.keys.get(flat).filter(|_| plan.compress.gradients != NOTHING)?);
        let axes: Vec<Axis> = key.axes.iter().copied().filter(|&axis| cuts_batch(axis)).collect();
        let group = mesh.group(world_rank, &axes);
        let among = group.iter().position(|&rank| rank == world_rank)?;
        let slice = self.slice(mesh, world_rank, flat);
        let scatter = Cuts::of(plan).scatter() && slice.place()[1] > 1;
        let [rank, ranks] = if scatter { slice.place() } else { [among, group.len()] };
        let factored = match plan.compress.gradients {
            Scheme::PowerSgd(of) => {
                let coords = mesh.coords(world_rank);
                let factored = |id| FactoredParameter::new(of, declarations.spec(id), mesh, coords, self.place(id).1);
                self.flats[flat].iter().copied().map(factored).collect()
            }
            _ => Vec::new(),
        };
        let name = |id: &ParamId| format!("gradient of {}", declarations.spec(*id).name);
        (ranks > 1).then(|| SumPlan {
            scheme: plan.compress.gradients,
            feedback: plan.compress.feedback,
            name: self.flats[flat].first().map_or_else(String::new, name),
            seed: plan.seed,
            starts_at: plan.compress.start_step.saturating_sub(1) * updates as u64,
            elements: self.elements[flat],
            rank,
            ranks,
            scatter,
            padding: self.padding(flat, declarations, mesh, world_rank),
            factored,
        })
    }

    /// The elements of a flat buffer that its parameters hold as padding.
    pub fn padding(
        &self,
        flat: usize,
        declarations: &Declarations,
        mesh: &Mesh,
        world_rank: usize,
    ) -> Vec<Range<usize>> {
        let padding = self.flats[flat].iter().flat_map(|&id| {
            let (spec, range) = (declarations.spec(id), self.place(id).1);
            let (mut end, mut padding) = (0, Vec::new());
            let local = spec.local(mesh, mesh.coords(world_rank));
            local.for_each_run(spec.dims, |_, run| {
                padding.push(range.start + end..range.start + run.start);
                end = run.end;
            });
            padding.push(range.start + end..range.end);
            padding.into_iter().filter(|padding| !padding.is_empty())
        });
        padding.collect()
    }

    /// The replica of a state of compressed gradients of a flat buffer that a rank has.
    pub fn replica_of_sum(&self, mesh: &Mesh, world_rank: usize, flat: usize, replicas: Replicas) -> Replica {
        let (coords, one) = (mesh.coords(world_rank), Replica::ONE);
        let Some(key) = self.keys.get(flat) else { return one };
        let axes = key.axes.iter().filter(|&&axis| replicas == Replicas::Ranks || !cuts_batch(axis));
        let replica = axes.fold(one, |all, &axis| all.within(coords.get(axis), mesh.degree(axis)));
        key.tied_ranks.as_ref().map_or(replica, |tied| {
            let place = tied.iter().position(|&stage| stage == coords.get(Axis::Pp));
            replica.within(place.unwrap_or(0), tied.len())
        })
    }

    /// The reducer of the buckets. `tapes` counts the tapes of a stage between two updates.
    ///
    /// # Errors
    /// No memory.
    pub fn reducer(
        &self,
        rank: &Rank,
        cuts: Cuts,
        (zero, tied): (&ZeroGroups, &BTreeMap<Vec<usize>, Group>),
        tapes: impl Fn(usize) -> usize,
        lossy: &[Option<SumPlan>],
        (device, gradients, parking): (&Arc<dyn Device>, DType, Option<Box<dyn Parking>>),
    ) -> Result<Reducer, TrainError> {
        let bucket = |(flat, key): (usize, &Key)| -> Result<Bucket, TrainError> {
            let tied = key.tied_ranks.as_ref().and_then(|tied_ranks| tied.get(tied_ranks).cloned());
            let mut sums = rounds(rank, key.axes.iter().copied());
            let mut scatter = false;
            if let (true, Some((sharers, replicas))) = (cuts.scatter(), zero.of(&key.axes))
                && sharers.size() > 1
            {
                let others = rounds(rank, key.axes.iter().copied().filter(|&axis| !cuts_batch(axis)));
                let replicas = Some(replicas.clone()).filter(|group| group.size() > 1);
                sums = std::iter::once(sharers.clone()).chain(replicas).chain(others).collect();
                scatter = true;
            }
            let shares = key.readers.iter().map(|&stage| tapes(stage)).sum();
            let (shares, fills) = if scatter && cuts.scatter_each() { (1, shares) } else { (shares, 1) };
            // Each member has its copies one after the other. Their sums have the layout of the weights.
            let with_copies = |range: Range<usize>| key.copies * range.start..key.copies * range.end;
            let sum = lossy[flat].clone().map(|plan| {
                let (scheme, name) = (plan.scheme.to_string(), plan.name.clone());
                let refuse =
                    |error| PlanError::Compress { place: "gradients", scheme, problem: format!("{name}: {error}") };
                let sum: Result<Box<dyn Sum>, _> = match plan.scheme {
                    Scheme::PowerSgd(of) => FactorSum::new(of, plan, device.clone()).map(|sum| Box::new(sum) as _),
                    _ => LossySum::new(plan, device.clone()).map(|sum| Box::new(sum) as _),
                };
                sum.map_err(refuse)
            });
            Ok(Bucket {
                members: self.flats[flat].iter().map(|&id| with_copies(self.place(id).1)).collect(),
                elements: key.copies * self.elements[flat],
                rounds: sums,
                sum: sum.transpose()?,
                last: tied.filter(|group| group.size() > 1),
                scatter,
                shares,
                fills,
            })
        };
        let buckets = self.keys.iter().enumerate().map(bucket).collect::<Result<_, _>>()?;
        Ok(Reducer::parked(buckets, OnDevice(device.clone(), Category::Gradients, gradients), parking)?)
    }
}

/// Vectors in the memory of a device, of one category and type.
#[derive(Debug)]
pub struct OnDevice(pub Arc<dyn Device>, pub Category, pub DType);

impl Vectors for OnDevice {
    fn alloc(&self, count: usize) -> Result<Buffer, VectorError> {
        let _category = self.0.meter().enter(self.1);
        Ok(self.0.alloc(self.2, count)?)
    }

    fn zero(&self, vector: &mut Buffer, range: Range<usize>) -> Result<(), VectorError> {
        Ok(self.0.optim()?.zero(vector, range)?)
    }

    fn add(&self, sum: &mut Buffer, vector: &Buffer) -> Result<(), VectorError> {
        Ok(self.0.pointwise()?.add_assign(sum, 0, vector)?)
    }
}

/// What a rank keeps of compressed gradients, with the flat buffer that each slice is of.
pub fn kept_of_gradients(
    layout: &Layout,
    sums: &[Option<SumPlan>],
    declarations: &Declarations,
    mesh: &Mesh,
    world_rank: usize,
) -> Result<Vec<(usize, SumState)>, TrainError> {
    let mut all = Vec::new();
    for (flat, plan) in sums.iter().enumerate() {
        let Some(plan) = plan else { continue };
        let member = |&id| sum_plan::Member { spec: declarations.spec(id), range: layout.place(id).1 };
        let members: Vec<_> = layout.flats[flat].iter().map(member).collect();
        let replica = |replicas| layout.replica_of_sum(mesh, world_rank, flat, replicas);
        let found = plan.kept(replica, &members, mesh, mesh.coords(world_rank));
        let found = found.map_err(|error| PlanError::Compress {
            place: "gradients",
            scheme: plan.scheme.to_string(),
            problem: format!("{}: {error}", plan.name),
        })?;
        all.extend(found.into_iter().map(|kept| (flat, kept)));
    }
    Ok(all)
}

/// A part of a parameter that this rank counts in the gradient norm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NormShard {
    /// The flat buffer.
    pub flat: usize,
    /// Its range in the gradients of the flat buffer that a rank keeps.
    pub range: Range<usize>,
}

/// The parts of a rank's parameters that it counts in the norm. Ranks that hold the same elements share them out, so
/// that each element is counted once: data-parallel ranks by their slices of the flat buffers, whether or not they keep
/// more of the gradients than that.
pub fn norm_shards(params: &Params, layout: &Layout, cuts: Cuts, tied: &[TiedWeight], rank: &Rank) -> Vec<NormShard> {
    let (declarations, mesh) = (params.declarations(), rank.mesh());
    let mut shards = Vec::new();
    for id in declarations.ids() {
        let (flat, range) = layout.place(id);
        let spec = declarations.spec(id);
        if spec.group.frozen {
            continue;
        }
        let slice = layout.slice(mesh, rank.world_rank(), flat);
        let by_slices = layout.keys[flat].axes.clone();
        let (index, replicas) = replica(spec, tied, rank, |axis| cuts_batch(axis) && by_slices.contains(&axis));
        // Where groups of data-parallel ranks have all slices each, the groups share out too.
        let (group, groups) = layout.replica(mesh, rank.world_rank(), &by_slices);
        let (index, replicas) = (index * groups + group, replicas * groups);
        let part = slice.part_of(range);
        let origin = cuts.window(Vector::Gradients, slice).start;
        let share = |index: usize| part.start - origin + part.len() * index / replicas;
        if !part.is_empty() {
            shards.push(NormShard { flat, range: share(index)..share(index + 1) });
        }
    }
    shards
}

/// The index of this rank among the ranks that hold the same elements of a parameter, and the number of those ranks,
/// not counting along the axes to `leave`.
pub fn replica(spec: &ParamSpec, tied: &[TiedWeight], rank: &Rank, leave: impl Fn(Axis) -> bool) -> (usize, usize) {
    let (mut index, mut replicas) = (0, 1);
    for axis in rank.mesh().value_axes().filter(|&axis| !leave(axis)) {
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
