//! The update of parameters as their rules declare it. Which elements, sets and matrices a rule reads is data, so
//! nothing here knows a rule.
//!
//! A rule that reads whole parameters takes passes: each rank measures the elements that it updates, one all-reduce
//! brings together the measures of all parameters, and every rank settles the totals. In canonical numerics sums travel
//! as the digits of [exact ones](meshwork_core::exact): they do not depend on who has which elements.
//!
//! More than 400 lines: the states, passes, gathers and updates of a parameter, which follow from one table of
//! declarations.

use crate::layout::{Layout, replica};
use crate::offload::disk::Disk;
use crate::offload::pages::{Elements, Flat, Page};
use crate::zero::{Cuts, ZeroStage};
use crate::{PlanError, TrainError};
use meshwork_core::exact::LIMBS;
use meshwork_core::{Axis, Buffer, CommError, DType, Group, Rank, ReduceOp};
use meshwork_data_parallel::cuts_batch;
use meshwork_optim::{Kept, ParamShape, Pass, Rule, State, Transform, Update};
use meshwork_tensor::kernel::{FlatParts, Measured, WholePart, WholeVectors};
use meshwork_tensor::orthogonal::transform;
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Category, Device, Error, ParamId, ParamSpec, Params, Shape};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Name of the groups in which ranks bring together what a rule measures of whole parameters.
pub const OPTIMIZER: &str = "optimizer";

/// The optimizer's state on one rank.
#[derive(Debug)]
pub struct States {
    /// The states of elements, this rank's windows of the flat buffers. In mixed precision the last of them are the
    /// weights in f32, which the rule updates: those in 16 bits are made of them.
    pub elements: Elements,
    /// Per parameter: the states of sets, whole.
    pub sets: Vec<Vec<Buffer>>,
}

/// The window of a flat buffer whose states a rank keeps.
#[derive(Clone, Debug)]
pub struct Window {
    /// Its parameters, with the elements of the window that are theirs.
    pub members: Vec<(ParamId, Range<usize>)>,
    /// Elements of the window.
    pub elements: usize,
}

/// How one parameter is updated.
#[derive(Debug)]
struct Member {
    shape: ParamShape,
    dims: Shape,
    /// What this rank holds of it.
    slice: LocalSlice,
    states: Vec<State>,
    passes: Vec<Pass>,
    /// Per pass: where its totals lie among those of the pass.
    places: Vec<usize>,
    transform: Option<Transform>,
    /// Whether this rank's elements count: of ranks that update the same ones, those of one do.
    counted: bool,
}

/// How the parameters of one rank are updated.
#[derive(Debug)]
pub struct Updates {
    rule: Rule,
    /// Per parameter; `None` for frozen ones.
    members: Vec<Option<Member>>,
    /// Those whose rules read them whole, in the order of the flat buffers: the same on all ranks of the group.
    whole: Vec<ParamId>,
    /// Per flat buffer that is updated its parameters.
    flats: Vec<Vec<ParamId>>,
    /// Flat buffers whose matrices are gathered at once: so many that each rank of the group has one to transform.
    rounds: Vec<Range<usize>>,
    /// The ranks that update other elements of the same parameters.
    group: Option<Group>,
    exact: bool,
    /// Whether weights are stored in 16 bits, so that states have those in f32.
    mixed: bool,
    device: Arc<dyn Device>,
}

/// What was measured in each pass: sums, then maxima.
pub type Totals = Vec<[Option<Buffer>; 2]>;

/// The two kinds of passes, which are reduced by themselves.
const KINDS: [ReduceOp; 2] = [ReduceOp::Sum, ReduceOp::Max];

fn kind(pass: &Pass) -> usize {
    match pass {
        Pass::Squares(_) => 0,
        Pass::Largest(_) => 1,
    }
}

/// The transformed matrices of some parameters: ranks share out that work, and each then has all of them.
#[derive(Debug)]
pub struct Gathered {
    /// A chunk for each rank of the group.
    all: Buffer,
    /// Where the matrices of each parameter begin.
    places: BTreeMap<ParamId, Vec<usize>>,
}

/// Elements of a parameter at the time of a step.
#[derive(Clone, Debug)]
pub struct Part {
    /// The parameter.
    pub id: ParamId,
    /// The elements of it that this rank updates, as it stores the parameter.
    pub elements: Range<usize>,
    /// Where they begin in the windows of weights, gradients and states.
    pub at: usize,
    /// The step.
    pub update: Update,
}

/// A flat buffer at the time of a step: what this rank updates of it.
#[derive(Debug)]
pub struct OfFlat {
    /// The flat buffer.
    pub flat: usize,
    /// The window of its weights, which nothing else holds.
    pub weights: Buffer,
    /// That of its gradients.
    pub grads: Buffer,
    /// Its parameters, in order.
    pub parts: Vec<Part>,
}

/// The part of a flat buffer whose states are on one page.
#[derive(Debug)]
struct Open<'a> {
    weights: meshwork_core::Window<'a>,
    /// The weights in f32, where those above have 16 bits.
    masters: Option<&'a mut Buffer>,
    grads: Buffer,
    states: &'a mut [Buffer],
    /// Counted from the page's first element.
    parts: Vec<Part>,
}

/// Refuses a rule for matrices of hidden layers where a model declares none, and where it would be given something
/// else.
pub fn require_matrices(rule: &Rule, parameters: &[ParamSpec]) -> Result<(), PlanError> {
    let refuse = |problem, fix| Err(PlanError::Rule { rule: rule.name().to_owned(), problem, fix });
    let mut trained = parameters.iter().filter(|spec| !spec.group.frozen);
    if matches!(rule, Rule::Hidden { .. }) && !trained.clone().any(|spec| spec.shape().hidden) {
        let problem = "the model declares none".to_owned();
        return refuse(problem, "declare them by ParamGroup::hidden, or use another rule");
    }
    let orthogonal = |spec: &&ParamSpec| matches!(rule.gathers(&spec.shape()), Some(Transform::Orthogonal { .. }));
    match trained.find(|spec| orthogonal(spec) && !spec.shape().is_matrix()) {
        Some(spec) => refuse(format!("{} {:?} is none", spec.name, spec.dims), "give it another rule by Rule::Hidden"),
        None => Ok(()),
    }
}

/// Whether the update rule reads any of these parameters whole.
pub fn reads_whole(rule: &Rule, parameters: &[ParamSpec]) -> bool {
    parameters.iter().any(|spec| !spec.group.frozen && !rule.is_elementwise(&spec.shape()))
}

/// The group of a rank that updates the same parameters, or other elements of them. Collective over the world.
pub fn join(rank: &Rank, rule: &Rule, cuts: Cuts, parameters: &[ParamSpec]) -> Result<Option<Group>, CommError> {
    if !reads_whole(rule, parameters) {
        return Ok(None);
    }
    let axes = axes(rank, cuts, parameters);
    Ok(Some(rank.subgroup(OPTIMIZER, &rank.mesh().group(rank.world_rank(), &axes))?))
}

/// The axes along which ranks update other elements of a parameter.
fn axes(rank: &Rank, cuts: Cuts, parameters: &[ParamSpec]) -> Vec<Axis> {
    let cut = |axis: &Axis| {
        let placed = |spec: &ParamSpec| spec.placement.shards().iter().any(|(cut, _)| cut == axis);
        cuts_batch(*axis) && cuts.stage() >= ZeroStage::States || parameters.iter().any(placed)
    };
    rank.mesh().value_axes().filter(cut).collect()
}

impl Updates {
    /// The updates of the parameters in `layout` by `rule`. `parameters` are those of the whole model, `group` what
    /// [`join`] gave.
    pub fn new(
        rule: &Rule,
        params: &Params,
        layout: &Layout,
        cuts: Cuts,
        (rank, group): (&Rank, Option<Group>),
        parameters: &[ParamSpec],
        device: Arc<dyn Device>,
    ) -> Self {
        let declarations = params.declarations();
        let mixed = declarations.dtype() != DType::F32;
        let shared = axes(rank, cuts, parameters);
        let mut members: Vec<Option<Member>> = declarations.specs().iter().map(|_| None).collect();
        let (mut whole, mut ends): (Vec<ParamId>, Vec<[usize; 2]>) = Default::default();
        for &id in layout.flats.iter().take(layout.keys.len()).flatten() {
            let (spec, flat) = (declarations.spec(id), layout.place(id).0);
            let shape = spec.shape();
            let (passes, transform) = (rule.passes(&shape), rule.gathers(&shape));
            if !rule.is_elementwise(&shape) {
                whole.push(id);
            }
            ends.resize(ends.len().max(passes.len()), [0; 2]);
            let place = |(pass, end): (&Pass, &mut [usize; 2])| {
                let place = end[kind(pass)];
                end[kind(pass)] += pass.over().iter().map(|over| over.count(&shape)).sum::<usize>();
                place
            };
            let places = passes.iter().zip(&mut ends).map(place).collect();
            let by_slices = &layout.keys[flat].axes;
            let cut = |axis: Axis| cuts.stage() >= ZeroStage::States && cuts_batch(axis) && by_slices.contains(&axis);
            let (index, _) = replica(spec, &[], rank, |axis| !shared.contains(&axis) || cut(axis));
            // Groups of data-parallel ranks that share out among themselves have all slices each.
            let (of_groups, _) = layout.replica(rank.mesh(), rank.world_rank(), by_slices);
            let counted = index == 0 && (cuts.stage() < ZeroStage::States || of_groups == 0);
            members[id.index()] = Some(Member {
                dims: spec.dims,
                slice: spec.local(rank.mesh(), rank.coords()),
                states: rule.states(&shape),
                shape,
                passes,
                places,
                transform,
                counted,
            });
        }
        let matrices = |id: &ParamId| {
            let member = members[id.index()].as_ref().filter(|member| member.transform.is_some());
            member.map_or(0, |member| member.shape.matrices)
        };
        let ranks = group.as_ref().map_or(1, Group::size);
        let (mut rounds, mut first, mut count) = (Vec::new(), 0, 0);
        for (flat, ids) in layout.flats.iter().take(layout.keys.len()).enumerate() {
            count += ids.iter().map(matrices).sum::<usize>();
            if count >= ranks || flat + 1 == layout.keys.len() {
                rounds.push(first..flat + 1);
                (first, count) = (flat + 1, 0);
            }
        }
        let flats = layout.flats.iter().take(layout.keys.len()).cloned().collect();
        let exact = declarations.reduction_blocks().is_some();
        Self { rule: rule.clone(), members, whole, flats, rounds, group, exact, mixed, device }
    }

    /// Whether states have weights in f32.
    pub fn mixed(&self) -> bool {
        self.mixed
    }

    /// The states of a page that the rule declares, and the weights in f32 if they are among them.
    fn split<'a>(&self, states: &'a mut [Buffer]) -> (&'a mut [Buffer], Option<&'a mut Buffer>) {
        let (states, masters) = states.split_at_mut(states.len() - usize::from(self.mixed && !states.is_empty()));
        (states, masters.first_mut())
    }

    /// The flat buffers that are updated at once, one after the other.
    pub fn rounds(&self) -> &[Range<usize>] {
        &self.rounds
    }

    /// Whether a rule reads whole parameters, on this rank or on another.
    pub fn reads_whole(&self) -> bool {
        self.group.is_some()
    }

    fn member(&self, id: ParamId) -> Option<&Member> {
        self.members.get(id.index())?.as_ref()
    }

    /// Whether the rule of a parameter reads no more than one element at a time.
    fn is_elementwise(&self, member: &Member) -> bool {
        self.rule.is_elementwise(&member.shape)
    }

    /// A part of a parameter, as its rule sees it.
    fn whole_part<'a>(&'a self, member: &'a Member, part: &Part) -> WholePart<'a> {
        WholePart {
            rule: self.rule.of(&member.shape),
            update: part.update,
            shape: member.shape,
            dims: member.dims,
            slice: &member.slice,
            part: part.elements.clone(),
            at: part.at,
        }
    }

    /// States for the flat buffers, all zero. Those of elements are on `disk`, if there is one.
    pub fn states(&self, flats: &[Window], disk: Option<&Rc<Disk>>) -> Result<States, TrainError> {
        let _optimizer = self.device.meter().enter(Category::Optimizer);
        let of_flat = |Window { members, elements }: &Window| {
            let states = members.first().and_then(|&(id, _)| self.member(id)).map_or(&[][..], |member| &member.states);
            let dtypes = states.iter().filter_map(|state| match state.kept {
                Kept::Elements => Some(DType::F32),
                Kept::Codes => Some(DType::U8),
                Kept::Sets(_) => None,
            });
            let dtypes = dtypes.chain(self.mixed.then_some(DType::F32));
            let measured =
                |(id, _): &&(ParamId, _)| self.member(*id).is_some_and(|member| !self.is_elementwise(member));
            let whole = members.iter().filter(measured).map(|(_, range)| range.clone());
            let whole = whole.filter(|range| !range.is_empty()).collect();
            Flat { states: dtypes.collect(), elements: *elements, whole }
        };
        let mut elements = Elements::new(flats.iter().map(of_flat).collect(), disk, &self.device)?;
        let parts = flats.iter().enumerate().flat_map(|(flat, Window { members, .. })| {
            members.iter().map(move |(id, range)| (*id, (flat, range.clone())))
        });
        let order = self.order(&parts.collect(), &elements);
        elements.set_order(order);
        let of_param = |member: &Option<Member>| {
            let sets = member.iter().flat_map(|member| member.states.iter().zip(std::iter::repeat(&member.shape)));
            let sets = sets.filter_map(|(state, shape)| match state.kept {
                Kept::Sets(over) => Some(self.device.zeros(DType::F32, over.count(shape))),
                _ => None,
            });
            sets.collect::<Result<Vec<Buffer>, Error>>()
        };
        Ok(States { elements, sets: self.members.iter().map(of_param).collect::<Result<_, Error>>()? })
    }

    /// The pages of states in the order in which [`measure`](Self::measure), [`gather`](Self::gather) and
    /// [`update`](Self::update) need them, for parameters that lie in these elements of flat buffers.
    fn order(&self, parts: &BTreeMap<ParamId, (usize, Range<usize>)>, elements: &Elements) -> Vec<usize> {
        let pages = |id: &ParamId| parts.get(id).map_or(0..0, |(flat, range)| elements.cover(*flat, range));
        let mut order = Vec::new();
        let passes = self.whole.iter().filter_map(|&id| Some(self.member(id)?.passes.len())).max().unwrap_or(0);
        for (pass, number) in (0..passes).flat_map(|pass| (0..KINDS.len()).map(move |number| (pass, number))) {
            let of_kind =
                |id: &&ParamId| self.member(**id).and_then(|member| member.passes.get(pass)).map(kind) == Some(number);
            order.extend(self.whole.iter().filter(of_kind).flat_map(pages));
        }
        for round in &self.rounds {
            let mut ids: Vec<ParamId> = self.flats[round.clone()].concat();
            ids.retain(|&id| self.member(id).is_some());
            let gathered = |id: &&ParamId| {
                self.group.is_some() && self.member(**id).is_some_and(|member| member.transform.is_some())
            };
            order.extend(ids.iter().filter(gathered).flat_map(pages));
            order.extend(ids.iter().flat_map(pages));
        }
        order
    }

    /// Takes the passes of all parameters that are read whole: `of` gives the part of a parameter that is updated here,
    /// with its weights and gradients. Changes states; weights stay.
    pub fn measure(
        &self,
        of: impl Fn(ParamId) -> Result<(Part, usize, Buffer, Buffer), TrainError>,
        states: &mut States,
    ) -> Result<Totals, TrainError> {
        let optim = self.device.optim()?;
        let mut totals = Totals::new();
        let members = || self.whole.iter().filter_map(|&id| Some((id, self.member(id)?)));
        let passes = members().map(|(_, member)| member.passes.len()).max().unwrap_or(0);
        for pass in 0..passes {
            let mut measured = [None, None];
            for (number, op) in KINDS.into_iter().enumerate() {
                let of_kind = || members().filter(|(_, member)| member.passes.get(pass).map(kind) == Some(number));
                let count: usize =
                    of_kind().flat_map(|(_, of)| of.passes[pass].over().iter().map(|over| over.count(&of.shape))).sum();
                if count == 0 {
                    continue;
                }
                let exact = self.exact && op == ReduceOp::Sum;
                let mut sums = self.device.zeros(DType::F64, count * if exact { LIMBS } else { 1 })?;
                for (id, member) in of_kind() {
                    let (part, flat, weights, grads) = of(id)?;
                    if part.elements.is_empty() {
                        continue;
                    }
                    let Some(page) = states.elements.cover(flat, &part.window()).next() else { continue };
                    let place = member.places[pass];
                    let into = member.counted.then_some(match exact {
                        true => Measured::Digits(&mut sums, place * LIMBS),
                        false => Measured::Sums(&mut sums, place),
                    });
                    let done = member.totals(&totals)?;
                    let (part, weights, grads) = part.on_page(states.elements.page(page), &weights, &grads)?;
                    let (elements, masters) = self.split(states.elements.get(page)?);
                    let (sets, weights) = (&states.sets[id.index()], masters.map_or(&weights, |masters| masters));
                    let vectors = WholeVectors { grads: &grads, states: elements, sets, totals: &done, gathered: None };
                    optim.measure(&self.whole_part(member, &part), pass, weights, vectors, into)?;
                }
                sums = self.reduce(sums, op)?;
                if exact {
                    sums = optim.exact_sums(&sums)?;
                }
                for (id, member) in of_kind() {
                    let (part, ..) = of(id)?;
                    let sets = &mut states.sets[id.index()];
                    optim.settle(&self.whole_part(member, &part), pass, &mut sums, member.places[pass], sets)?;
                }
                measured[number] = Some(sums);
            }
            totals.push(measured);
        }
        Ok(totals)
    }

    /// Brings together the matrices of those of these parameters whose rules read them, and transforms them. Each rank
    /// transforms some.
    pub fn gather(
        &self,
        ids: impl IntoIterator<Item = ParamId>,
        of: impl Fn(ParamId) -> Result<(Part, usize, Buffer, Buffer), TrainError>,
        states: &mut States,
        totals: &Totals,
    ) -> Result<Option<Gathered>, TrainError> {
        let gathers = |id| Some((id, self.member(id)?, self.member(id)?.transform?));
        let members: Vec<_> = ids.into_iter().filter_map(gathers).collect();
        let Some(group) = self.group.as_ref().filter(|_| !members.is_empty()) else { return Ok(None) };
        let (optim, layout) = (self.device.optim()?, self.device.layout()?);
        // Each matrix goes to the rank with the fewest elements so far.
        let mut loads = vec![0; group.size()];
        let mut places: BTreeMap<ParamId, Vec<(usize, usize)>> = BTreeMap::new();
        for (id, Member { shape, .. }, _) in &members {
            let place = |_| {
                let owner = (0..loads.len()).min_by_key(|&rank| loads[rank]).unwrap_or(0);
                loads[owner] += shape.each();
                (owner, loads[owner] - shape.each())
            };
            places.insert(*id, (0..shape.matrices).map(place).collect());
        }
        let chunk = loads.iter().copied().max().unwrap_or(0);
        let mut all = self.device.zeros(DType::F32, group.size() * chunk)?;
        for &(id, member, _) in &members {
            let (part, flat, weights, grads) = of(id)?;
            if part.elements.is_empty() {
                continue;
            }
            let Some(page) = states.elements.cover(flat, &part.window()).next() else { continue };
            let (mut values, count) = (self.device.zeros(DType::F32, member.shape.elements())?, member.shape.each());
            let done = member.totals(totals)?;
            let (part, weights, grads) = part.on_page(states.elements.page(page), &weights, &grads)?;
            let (elements, masters) = self.split(states.elements.get(page)?);
            let (sets, weights) = (&states.sets[id.index()], masters.map_or(&weights, |masters| masters));
            let vectors = WholeVectors { grads: &grads, states: elements, sets, totals: &done, gathered: None };
            let into = member.counted.then_some(Measured::Values(&mut values));
            optim.measure(&self.whole_part(member, &part), member.passes.len(), weights, vectors, into)?;
            for (matrix, (owner, at)) in places[&id].iter().enumerate() {
                layout.copy_into(&values, matrix * count..(matrix + 1) * count, &mut all, owner * chunk + at)?;
            }
        }
        let mut own = group.reduce_scatter(all, self.device.alloc(DType::F32, chunk)?, ReduceOp::Sum)?;
        for (id, member, of_matrices) in &members {
            for &(_, at) in places[id].iter().filter(|(owner, _)| *owner == group.rank()) {
                transform(&*self.device, *of_matrices, [member.shape.rows, member.shape.columns], &mut own, at)?;
            }
        }
        let all = group.all_gather(own, self.device.alloc(DType::F32, group.size() * chunk)?)?;
        let begin = |places: Vec<(usize, usize)>| places.into_iter().map(|(owner, at)| owner * chunk + at).collect();
        Ok(Some(Gathered { all, places: places.into_iter().map(|(id, places)| (id, begin(places))).collect() }))
    }

    /// Updates the weights of flat buffers. Rules that read whole parameters (LAMB, Adafactor, Muon) go through one
    /// parameter after the other; all elements with the same elementwise rule and factors are updated by one call.
    pub fn update(
        &self,
        flats: &mut [OfFlat],
        states: &mut States,
        totals: &Totals,
        gathered: Option<&Gathered>,
    ) -> Result<(), TrainError> {
        let States { elements, sets } = states;
        let covered = |of: &OfFlat| of.parts.iter().flat_map(|part| elements.cover(of.flat, &part.window())).collect();
        let mut pages: Vec<usize> = flats.iter().flat_map(|of| -> Vec<usize> { covered(of) }).collect();
        pages.dedup();
        elements.visit(&pages, |pages| {
            let (mut open, mut pages) = (Vec::with_capacity(pages.len()), pages.into_iter().peekable());
            for of in &mut *flats {
                if let Some((page, states)) = pages.next_if(|(page, _)| page.flat == of.flat) {
                    open.push(self.open(page, states, of)?);
                }
            }
            self.update_whole(&mut open, sets, totals, gathered)?;
            self.update_elements(&mut open)?;
            open.into_iter().try_for_each(|page| self.narrow(page))
        })
    }

    /// The part of a flat buffer whose states are on this page.
    fn open<'a>(&self, page: &Page, states: &'a mut [Buffer], of: &'a mut OfFlat) -> Result<Open<'a>, TrainError> {
        let range = page.range.start..page.range.end.min(of.weights.count());
        let grads = of.grads.slice(range.start..range.end.min(of.grads.count())).map_err(Error::from)?;
        let parts = of.parts.iter().filter_map(|part| part.of_page(page)).collect();
        let (states, masters) = self.split(states);
        Ok(Open { weights: of.weights.window(range).map_err(Error::from)?, masters, grads, states, parts })
    }

    /// Updates the parameters that their rules read whole.
    fn update_whole(
        &self,
        open: &mut [Open<'_>],
        sets: &[Vec<Buffer>],
        totals: &Totals,
        gathered: Option<&Gathered>,
    ) -> Result<(), TrainError> {
        let optim = self.device.optim()?;
        for Open { weights, masters, grads, states, parts } in open {
            let weights = masters.as_deref_mut().unwrap_or(weights);
            for part in parts.iter() {
                let Some(member) = self.member(part.id).filter(|member| !self.is_elementwise(member)) else { continue };
                let matrices = match gathered.and_then(|gathered| Some((&gathered.all, gathered.places.get(&part.id)?)))
                {
                    None => None,
                    Some((all, places)) => {
                        let count = member.shape.each();
                        let mut matrices = self.device.alloc(DType::F32, member.shape.elements())?;
                        for (matrix, &at) in places.iter().enumerate() {
                            self.device.layout()?.copy_into(all, at..at + count, &mut matrices, matrix * count)?;
                        }
                        Some(matrices)
                    }
                };
                let (totals, sets) = (member.totals(totals)?, &sets[part.id.index()][..]);
                let vectors = WholeVectors { grads, states, sets, totals: &totals, gathered: matrices.as_ref() };
                optim.update_whole(&self.whole_part(member, part), weights, vectors)?;
            }
        }
        Ok(())
    }

    /// Updates the parameters whose rule updates each element by itself, such as AdamW. One call takes all elements
    /// with the same rule and factors.
    fn update_elements(&self, open: &mut [Open<'_>]) -> Result<(), TrainError> {
        let optim = self.device.optim()?;
        let alike = |part: &Part| {
            let member = self.member(part.id).filter(|member| self.is_elementwise(member))?;
            Some((self.rule.of(&member.shape), part.update))
        };
        let same = |one: (&Rule, Update), other: (&Rule, Update)| std::ptr::eq(one.0, other.0) && one.1 == other.1;
        let mut updates: Vec<(&Rule, Update)> = Vec::new();
        for of in open.iter().flat_map(|page| &page.parts).filter_map(alike) {
            if !updates.iter().any(|&known| same(known, of)) {
                updates.push(of);
            }
        }
        for of in updates {
            let is_of = |part: &&Part| alike(part).is_some_and(|other| same(of, other));
            let ranges = |page: &Open<'_>| page.parts.iter().filter(is_of).map(Part::window).collect();
            let ranges: Vec<Vec<Range<usize>>> = open.iter().map(ranges).collect();
            let flats = open.iter_mut().zip(&ranges).filter(|(_, ranges)| !ranges.is_empty());
            let flats = flats.map(|(page, ranges)| {
                let (weights, grads, states) = page.vectors();
                FlatParts { weights, grads, states, ranges }
            });
            optim.update(of.0, of.1, &mut flats.collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Makes the weights in 16 bits of those in f32, if there are any.
    fn narrow(&self, page: Open<'_>) -> Result<(), TrainError> {
        let Open { mut weights, masters: Some(masters), parts, .. } = page else { return Ok(()) };
        let windows = || parts.iter().map(Part::window);
        // The parts lie one behind the other.
        let start = windows().map(|window| window.start).min().unwrap_or(0);
        let end = windows().map(|window| window.end).max().unwrap_or(start);
        let updated = masters.slice(start..end).map_err(Error::from)?;
        Ok(self.device.pointwise()?.cast_into(&updated, &mut weights, start)?)
    }

    fn reduce(&self, numbers: Buffer, op: ReduceOp) -> Result<Buffer, TrainError> {
        match &self.group {
            Some(group) => Ok(group.all_reduce(numbers, op)?),
            None => Ok(numbers),
        }
    }
}

impl Part {
    /// Its elements in the windows of weights, gradients and states.
    pub fn window(&self) -> Range<usize> {
        self.at..self.at + self.elements.len()
    }

    /// The elements that lie on a page, counted from the page's first element; `None` if none do.
    fn of_page(&self, page: &Page) -> Option<Self> {
        let (start, end) = (self.at.max(page.range.start), self.window().end.min(page.range.end));
        let first = self.elements.start + start.checked_sub(self.at)?;
        (start < end).then(|| Self {
            elements: first..first + end - start,
            at: start - page.range.start,
            ..self.clone()
        })
    }

    /// The same, with what the page has of weights and gradients.
    fn on_page(&self, page: &Page, weights: &Buffer, grads: &Buffer) -> Result<(Self, Buffer, Buffer), TrainError> {
        let part = self.of_page(page).unwrap_or_else(|| unreachable!("the page covers the part"));
        let range = page.range.start..page.range.end.min(weights.count());
        let of_grads = range.start..range.end.min(grads.count());
        let weights = weights.slice(range).map_err(Error::from)?;
        Ok((part, weights, grads.slice(of_grads).map_err(Error::from)?))
    }
}

impl Open<'_> {
    /// The weights that the rule updates, with their gradients and states.
    fn vectors(&mut self) -> (&mut Buffer, &Buffer, &mut [Buffer]) {
        let weights = match &mut self.masters {
            Some(masters) => &mut **masters,
            None => &mut *self.weights,
        };
        (weights, &self.grads, &mut *self.states)
    }
}

impl Member {
    /// Its totals of the passes so far.
    fn totals(&self, totals: &Totals) -> Result<Vec<Buffer>, TrainError> {
        let mut own = Vec::new();
        for ((pass, &place), measured) in self.passes.iter().zip(&self.places).zip(totals) {
            let count: usize = pass.over().iter().map(|over| over.count(&self.shape)).sum();
            if let Some(all) = &measured[kind(pass)] {
                own.push(all.slice(place..place + count).map_err(Error::from)?);
            }
        }
        Ok(own)
    }
}
