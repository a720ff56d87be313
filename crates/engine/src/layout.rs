//! The flat buffers of one rank's parameters: which parameters lie together, over which ranks their gradients are
//! summed, and which elements are this rank's own. All of this follows from placements and from the types with which
//! parameters are read.

use crate::compress::settings::NOTHING;
use crate::prelude::*;
use crate::trace::{Trace, trace};
use crate::zero::{Cuts, Replica, Vector, Zero, ZeroGroups, ZeroStage};
use crate::{LocalModel, TiedWeight};
use meshwork_compress::{Per, Values};
use meshwork_core::FlatSlice;
use meshwork_data_parallel::{BucketPlan, Member, cuts_batch, plan as fill};
use meshwork_optim::{Kept, State};
use meshwork_tensor::param::{LocalSlice, reduction_axes};
use meshwork_tensor::{Declarations, Role};

/// Gradients are reduced in buckets of up to this many elements (1 MiB of f32): large enough to run at memory speed,
/// small enough that most are done before backward ends.
const BUCKET_ELEMENTS: usize = 1 << 18;

/// With ZeRO stages 2 and 3 a rank has a few whole buckets in memory at a time. Each is at most this part of the
/// rank's parameters, about a layer.
const BUCKETS_OF_SLICES: usize = 16;

/// The properties that all parameters of a bucket share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketKey {
    /// The axes over which gradients are Partial, in the order of the rounds of the reduction.
    pub axes: Vec<Axis>,
    /// The pp ranks that hold the parameter, if it is tied across stages.
    pub tied_ranks: Option<Vec<usize>>,
    /// The stages of this rank that read the parameters: their tapes add to the gradients.
    pub readers: Vec<usize>,
    /// Copies in which gradients are kept until they are reduced: see
    /// [`GradShard`](meshwork_tensor::tape::GradShard).
    pub copies: usize,
    /// The states of the update rule that have one number for each element.
    pub states: Vec<State>,
    /// Where gradients are compressed: the axes over which the parameters are cut. Only parameters that are cut alike
    /// share a message, so that ranks with the same elements make the same message.
    pub cut: Vec<Axis>,
}

#[derive(Clone, Debug, Default)]
pub struct Span {
    pub flat: usize,
    pub range: Range<usize>,
    /// The number of the parameter in the flat buffer.
    pub member: usize,
}

/// The properties that all frozen parameters of a flat buffer share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrozenKey {
    /// The axes over which ranks share it out.
    axes: Vec<Axis>,
    /// Its slices have multiples of this number of elements: blocks of parameters that are packed.
    unit: usize,
}

/// A range of the gradients that a rank keeps of a flat buffer, which this rank counts in the gradient norm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NormShard {
    pub flat: usize,
    pub range: Range<usize>,
}

/// The flat buffers of one rank's parameters, and how ranks share them out. A pure function of model, plan and rank.
#[derive(Clone, Debug)]
pub struct Layout {
    pub declarations: Arc<Declarations>,
    /// The results of the pass before the first step.
    pub trace: Rc<Trace>,
    /// The parameters of each flat buffer, in order. Flat buffers behind the buckets hold frozen parameters.
    pub flats: Rc<[Vec<ParamId>]>,
    pub keys: Rc<[BucketKey]>,
    /// Of the flat buffers behind the buckets.
    frozen: Rc<[FrozenKey]>,
    pub mesh: Mesh,
    pub world_rank: usize,
    pub cuts: Cuts,
    zero: Zero,
    spans: Rc<[Span]>,
    /// Per flat buffer.
    pub elements: Rc<[usize]>,
}

impl Layout {
    /// The layout on the rank `world_rank`, without communication.
    ///
    /// # Errors
    /// A program that is wrongly distributed; a parameter that nothing reads in training and that is not frozen.
    pub fn new(
        plan: &Plan,
        model: &ModelPlan,
        local: &LocalModel,
        schedule: &Schedule,
        tied: &[TiedWeight],
        world_rank: usize,
    ) -> Result<Self> {
        let micro = Batch::blank(&model.model().fields(), plan.micro_batch_size()?);
        let mut trace = trace(model, local, world_rank, &micro)?;
        trace.number_tied_copies(model, local, schedule, tied, world_rank, &micro)?;
        let mut layout = Self {
            declarations: local.declarations.clone(),
            trace: Rc::new(trace),
            flats: Rc::default(),
            keys: Rc::default(),
            frozen: Rc::default(),
            mesh: model.mesh().clone(),
            world_rank,
            cuts: plan.cuts(),
            zero: plan.zero,
            spans: Rc::default(),
            elements: Rc::default(),
        };
        let (mut flats, keys) = layout.buckets(tied, plan)?;
        let (behind, frozen) = layout.frozen_buckets();
        flats.extend(behind);
        let mut spans = vec![Span::default(); local.declarations.specs().len()];
        let mut elements = Vec::with_capacity(flats.len());
        for (flat, members) in flats.iter().enumerate() {
            let mut end = 0;
            for (member, id) in members.iter().enumerate() {
                let start = end;
                end += layout.local(*id).stored.count();
                spans[id.index()] = Span { flat, range: start..end, member };
            }
            elements.push(end);
        }
        (layout.flats, layout.keys, layout.frozen) = (flats.into(), keys.into(), frozen.into());
        (layout.spans, layout.elements) = (spans.into(), elements.into());
        Ok(layout)
    }

    /// The layout of another rank that holds the same stages.
    pub fn on(&self, world_rank: usize) -> Self {
        Self { world_rank, ..self.clone() }
    }

    /// Which parameters share a flat buffer, in the order in which their gradients become final. A tied parameter has a
    /// buffer of its own, so that its layout is the same on every rank that holds it.
    fn buckets(&self, tied: &[TiedWeight], plan: &Plan) -> Result<(Vec<Vec<ParamId>>, Vec<BucketKey>), PlanError> {
        let (declarations, ready) = (&self.declarations, &self.trace.ready);
        let unread = |id: &ParamId| !declarations.spec(*id).group.frozen && !ready.contains(id);
        if let Some(id) = declarations.ids().find(unread) {
            return Err(PlanError::Unread { name: declarations.spec(id).name.clone() });
        }
        let ids: BTreeMap<usize, ParamId> = ready.iter().map(|&id| (id.index(), id)).collect();
        let members = ready.iter().map(|&id| {
            let key = self.key(id, tied, plan);
            Member { id: id.index(), elements: key.copies * self.local(id).stored.count(), key }
        });
        let (mut shared, single): (Vec<_>, Vec<_>) = members.partition(|member| member.key.tied_ranks.is_some());
        // The ranks that hold tied weights make them ready in different orders, and reduce them in the order of their
        // names.
        shared.sort_by_key(|member| &declarations.spec(ids[&member.id]).name);
        let all: usize = single.iter().map(|member| member.elements).sum();
        let limit = match plan.zero.stage >= ZeroStage::Gradients {
            true => BUCKET_ELEMENTS.min(all / BUCKETS_OF_SLICES),
            false => BUCKET_ELEMENTS,
        };
        let plans = fill(&single, limit).into_iter().chain(fill(&shared, 0));
        let bucket =
            |bucket: BucketPlan<BucketKey>| (bucket.members.iter().map(|id| ids[id]).collect::<Vec<_>>(), bucket.key);
        Ok(plans.map(bucket).unzip())
    }

    /// The flat buffers behind the buckets, of frozen parameters: the buffers of statistics lie in one, those that are
    /// packed in another, the rest in a third. Ranks that share out weights bring them together when they are read: the
    /// rest in buckets, in the order of declaration, and each packed one by itself.
    fn frozen_buckets(&self) -> (Vec<Vec<ParamId>>, Vec<FrozenKey>) {
        let declarations = &self.declarations;
        let updated = |id: &ParamId| declarations.statistics().iter().any(|of| of.buffers.contains(id));
        let frozen = declarations.ids().filter(|&id| declarations.spec(id).group.frozen);
        let (buffers, others): (Vec<ParamId>, Vec<ParamId>) = frozen.partition(updated);
        let (packed, others): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|&id| declarations.spec(id).packed.is_some());
        let all: usize = others.iter().map(|&id| self.local(id).stored.count()).sum();
        let [of_others, of_packed] = match self.cuts.cuts(Vector::Weights) {
            true => [BUCKET_ELEMENTS.min(all / BUCKETS_OF_SLICES), 0],
            false => [usize::MAX; 2],
        };
        let fill = |(ids, limit): (Vec<ParamId>, usize)| {
            let member = |(at, &id): (usize, &ParamId)| Member {
                id: at,
                elements: self.local(id).stored.count(),
                key: self.frozen_key(id),
            };
            let members: Vec<_> = ids.iter().enumerate().map(member).collect();
            let bucket = |bucket: BucketPlan<FrozenKey>| {
                (bucket.members.iter().map(|&at| ids[at]).collect::<Vec<_>>(), bucket.key)
            };
            fill(&members, limit).into_iter().map(bucket).collect::<Vec<_>>()
        };
        [(buffers, usize::MAX), (others, of_others), (packed, of_packed)].into_iter().flat_map(fill).unzip()
    }

    /// How a frozen parameter is shared out: over the axes along which ranks hold the same of it for other parts of the
    /// batch, but for buffers, which are small and in a type of their own.
    fn frozen_key(&self, id: ParamId) -> FrozenKey {
        let spec = self.declarations.spec(id);
        if !self.cuts.cuts(Vector::Weights) || spec.role == Role::Buffer {
            return FrozenKey { axes: Vec::new(), unit: 1 };
        }
        let cut = |axis: &Axis| spec.placement.shards().iter().any(|(cut, _)| cut == axis);
        let axes = self.mesh.axes().filter(|axis| cuts_batch(*axis) && !cut(axis)).collect();
        let unit = match spec.packed.map(Values::per) {
            Some(Per::Block(block)) => block,
            _ => 1,
        };
        FrozenKey { axes, unit }
    }

    /// The key of a parameter: parameters with equal keys may share a bucket.
    fn key(&self, id: ParamId, tied: &[TiedWeight], plan: &Plan) -> BucketKey {
        let (spec, trace) = (self.declarations.spec(id), &self.trace);
        let mut states = plan.optimizer.states(&spec.shape());
        states.retain(|state| !matches!(state.kept, Kept::Sets(_)));
        let cut = spec.placement.shards().iter().map(|&(axis, _)| axis);
        BucketKey {
            axes: reduction_axes(trace.reads.get(&id).copied().unwrap_or(Types::NONE)),
            tied_ranks: tied.iter().find(|tied| tied.name == spec.name).map(|tied| tied.pp_ranks.clone()),
            readers: trace.readers[id.index()].clone(),
            copies: trace.copies[id.index()],
            states,
            cut: cut.filter(|_| plan.compress.gradients != NOTHING).collect(),
        }
    }

    /// The slice of a parameter that this rank holds.
    pub fn local(&self, id: ParamId) -> LocalSlice {
        self.declarations.spec(id).local(&self.mesh, self.mesh.coords(self.world_rank))
    }

    pub fn span(&self, id: ParamId) -> &Span {
        &self.spans[id.index()]
    }

    /// The parameters of the flat buffers that are updated.
    pub fn trained(&self) -> &[Vec<ParamId>] {
        &self.flats[..self.keys.len()]
    }

    /// Whether a parameter is updated.
    pub fn is_trained(&self, id: ParamId) -> bool {
        self.span(id).flat < self.trained().len()
    }

    /// The slice of a flat buffer that is this rank's own, by which ranks share out work and, with ZeRO, memory. Frozen
    /// parameters are shared out where weights are.
    pub fn slice(&self, flat: usize) -> FlatSlice {
        let slice = |elements| self.zero.slice(&self.mesh, self.world_rank, self.axes(flat), elements);
        let (elements, whole) = (self.elements[flat], slice(self.elements[flat]));
        match flat.checked_sub(self.keys.len()) {
            Some(frozen) => slice(elements.next_multiple_of(self.frozen[frozen].unit * whole.place()[1])),
            None => whole,
        }
    }

    /// The axes over which a flat buffer is shared out.
    fn axes(&self, flat: usize) -> &[Axis] {
        match flat.checked_sub(self.keys.len()) {
            Some(frozen) => &self.frozen[frozen].axes,
            None => &self.keys[flat].axes,
        }
    }

    /// Whether other ranks have slices of a flat buffer.
    pub fn is_cut(&self, flat: usize) -> bool {
        let slice = self.slice(flat);
        slice.padded() > slice.count()
    }

    /// The ranks that have slices of a flat buffer; `None` if it is not shared out.
    pub fn sharers<'a>(&self, groups: &'a ZeroGroups, flat: usize) -> Option<&'a Group> {
        groups.get(self.axes(flat)).map(|groups| &groups.sharers)
    }

    /// The elements of a flat buffer that this rank keeps of a vector.
    pub fn window(&self, flat: usize, vector: Vector) -> Range<usize> {
        self.cuts.window(vector, self.slice(flat))
    }

    /// The elements of a parameter that this rank keeps of a vector, counted from the parameter's first one.
    pub fn part(&self, id: ParamId, vector: Vector) -> Range<usize> {
        let Span { flat, range, .. } = self.span(id);
        let here = overlap(range, &self.window(*flat, vector));
        here.start - range.start..here.end - range.start
    }

    /// The slices of a parameter that this rank keeps of a vector, each with its elements, counted from the first one
    /// that is kept: one slice, what the placement says, unless ZeRO cuts the vector.
    pub fn slices(&self, id: ParamId, vector: Vector) -> Vec<(LocalSlice, Range<usize>)> {
        let part = self.part(id, vector);
        let from = part.start;
        let boxes = self.local(id).boxes(part).into_iter();
        boxes.map(|(slice, place)| (slice, place.start - from..place.end - from)).collect()
    }

    /// The same elements, counted from the first one that this rank keeps of the flat buffer.
    pub fn place_in(&self, id: ParamId, vector: Vector) -> Range<usize> {
        let Span { flat, range, .. } = self.span(id);
        let window = self.window(*flat, vector);
        let here = overlap(range, &window);
        if here.is_empty() { 0..0 } else { here.start - window.start..here.end - window.start }
    }

    /// The elements of a flat buffer that its parameters hold as padding.
    pub fn padding(&self, flat: usize) -> Vec<Range<usize>> {
        let padding = self.flats[flat].iter().flat_map(|&id| {
            let Span { range, .. } = self.span(id);
            let (mut end, mut padding) = (range.start, Vec::new());
            self.local(id).for_each_run(self.declarations.spec(id).dims, |_, run| {
                padding.push(end..range.start + run.start);
                end = range.start + run.end;
            });
            padding.push(end..range.end);
            padding.into_iter().filter(|padding| !padding.is_empty())
        });
        padding.collect()
    }

    /// The place of this rank among the ranks that hold the same elements of a parameter. Axes to `leave` do not count.
    pub fn replica(&self, spec: &ParamSpec, tied: &[TiedWeight], leave: impl Fn(Axis) -> bool) -> Replica {
        let coords = self.mesh.coords(self.world_rank);
        let cut = |axis: Axis| spec.placement.shards().iter().any(|&(cut, _)| cut == axis);
        let axes = self.mesh.value_axes().filter(|&axis| !leave(axis) && !cut(axis));
        let replica = axes.fold(Replica::ONE, |all, axis| all.within(coords.get(axis), self.mesh.degree(axis)));
        match tied.iter().find(|tied| tied.name == spec.name) {
            None => replica,
            Some(TiedWeight { pp_ranks, .. }) => replica.within_list(pp_ranks, coords.get(Axis::Pp)),
        }
    }

    /// This rank's group of ZeRO among the groups that have all slices of a flat buffer each.
    pub fn zero_replica(&self, flat: usize) -> Replica {
        self.zero.replica(&self.mesh, self.world_rank, &self.keys[flat].axes)
    }

    /// The elements that this rank counts in the gradient norm. Each element of the model is counted once: ranks that
    /// hold the same elements share them out, data-parallel ranks by their slices of the flat buffers, whether or not
    /// they keep more of the gradients than that.
    pub fn norm_shards(&self, tied: &[TiedWeight]) -> Vec<NormShard> {
        let mut shards = Vec::new();
        for id in self.declarations.ids().filter(|&id| !self.declarations.spec(id).group.frozen) {
            let &Span { flat, ref range, .. } = self.span(id);
            let (slice, axes) = (self.slice(flat), &self.keys[flat].axes);
            let by_slices = |axis| cuts_batch(axis) && axes.contains(&axis);
            // Where groups of data-parallel ranks have all slices each, the groups share out too.
            let of_zero = self.zero_replica(flat);
            let replica = self.replica(self.declarations.spec(id), tied, by_slices).within(of_zero.index, of_zero.of);
            let part = slice.part_of(range.clone());
            let origin = self.cuts.window(Vector::Gradients, slice).start;
            let cut = |index: usize| part.start - origin + part.len() * index / replica.of;
            if !part.is_empty() {
                shards.push(NormShard { flat, range: cut(replica.index)..cut(replica.index + 1) });
            }
        }
        shards
    }
}

/// The elements of `range` that lie in `window`; an empty range within `range` if there are none.
fn overlap(range: &Range<usize>, window: &Range<usize>) -> Range<usize> {
    let start = window.start.clamp(range.start, range.end);
    start..window.end.clamp(start, range.end)
}
