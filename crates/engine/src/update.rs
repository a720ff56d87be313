//! The update of parameters as their rules declare it. Which elements, sets and matrices a rule reads is data, so
//! nothing here knows a rule.
//!
//! A rule that reads whole parameters takes passes: each rank measures the elements that it updates, one all-reduce
//! brings together the measures of all parameters, and every rank finishes the pass with the totals. In canonical
//! numerics sums travel as the digits of [exact ones](meshwork_core::exact): they do not depend on who has which
//! elements.
//!
//! More than 400 lines: the states, passes, gathers and updates of a parameter, which follow from one table of
//! declarations.

use crate::layout::Layout;
use crate::offload::disk::Disk;
use crate::offload::pages::{Elements, Flat, Page};
use crate::prelude::*;
use crate::zero::{Cuts, Vector, ZeroStage};
use meshwork_core::CommError;
use meshwork_core::exact::LIMBS;
use meshwork_data_parallel::cuts_batch;
use meshwork_optim::{Kept, ParamShape, Pass, Rule, State, Transform, Update};
use meshwork_tensor::Shape;
use meshwork_tensor::kernel::{FlatParts, Measured, WholePart, WholeVectors};
use meshwork_tensor::orthogonal::transform;
use meshwork_tensor::param::LocalSlice;

/// Name of the groups in which ranks bring together the measures of whole parameters.
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

/// How one parameter is updated.
#[derive(Debug)]
struct ParamRule {
    shape: ParamShape,
    dims: Shape,
    /// The slice that this rank holds.
    slice: LocalSlice,
    states: Vec<State>,
    passes: Vec<Pass>,
    /// Per pass: where its totals begin among the totals of all parameters.
    starts: Vec<usize>,
    transform: Option<Transform>,
    /// Whether this rank's elements count: of ranks that update the same ones, only one counts.
    counted: bool,
}

/// How the parameters of one rank are updated.
#[derive(Debug)]
pub struct Updates {
    rule: Rule,
    /// Per parameter; `None` for frozen ones.
    rules: Vec<Option<ParamRule>>,
    /// The parameters whose rules read them whole, in the order of the flat buffers: the same on all ranks of the
    /// group.
    whole: Vec<ParamId>,
    /// Flat buffers whose matrices are gathered at once: so many that each rank of the group has one to transform.
    pub rounds: Vec<Range<usize>>,
    /// The ranks that update other elements of the same parameters, where a rule reads whole parameters.
    pub group: Option<Group>,
    layout: Layout,
    device: Arc<dyn Device>,
}

/// The measures of each pass: sums, then maxima.
pub type Totals = Vec<[Option<Buffer>; 2]>;

/// How the measures of passes are reduced: each kind by itself.
const REDUCTIONS: [ReduceOp; 2] = [ReduceOp::Sum, ReduceOp::Max];

fn reduction(pass: &Pass) -> usize {
    match pass {
        Pass::Squares(_) => 0,
        Pass::Largest(_) => 1,
    }
}

/// The transformed matrices of some parameters: ranks share out that work, and each then has all of them.
#[derive(Debug)]
pub struct Gathered {
    /// As many elements of each rank of the group.
    all: Buffer,
    /// Where the matrices of each parameter begin.
    starts: BTreeMap<ParamId, Vec<usize>>,
}

/// The elements of a parameter that this rank updates in a step.
#[derive(Clone, Debug)]
pub struct ParamUpdate {
    pub id: ParamId,
    /// The elements, as this rank stores the parameter.
    pub elements: Range<usize>,
    /// Where they begin in the windows of weights, gradients and states.
    pub start: usize,
    pub update: Update,
}

/// The input of a rule that reads a whole parameter, before the update.
#[derive(Debug)]
pub struct Before {
    pub param: ParamUpdate,
    pub flat: usize,
    /// The window of the flat buffer that this rank updates, and its gradients.
    pub weights: Buffer,
    pub grads: Buffer,
}

/// The part of a flat buffer that this rank updates in a step.
#[derive(Debug)]
pub struct FlatUpdate {
    pub flat: usize,
    /// The window of its weights, which nothing else holds.
    pub weights: Buffer,
    /// The window of its gradients.
    pub grads: Buffer,
    /// Its parameters, in order.
    pub params: Vec<ParamUpdate>,
}

/// The elements of a flat buffer whose states are on one page.
#[derive(Debug)]
struct OpenPage<'a> {
    weights: meshwork_core::Window<'a>,
    /// The weights in f32, where those above have 16 bits.
    masters: Option<&'a mut Buffer>,
    grads: Buffer,
    states: &'a mut [Buffer],
    /// Counted from the page's first element.
    params: Vec<ParamUpdate>,
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

/// The axes along which ranks update other elements of a parameter.
fn axes(mesh: &Mesh, cuts: Cuts, parameters: &[ParamSpec]) -> Vec<Axis> {
    let cut = |axis: &Axis| {
        let placed = |spec: &ParamSpec| spec.placement.shards().iter().any(|(cut, _)| cut == axis);
        cuts_batch(*axis) && cuts.stage >= ZeroStage::States || parameters.iter().any(placed)
    };
    mesh.value_axes().filter(cut).collect()
}

impl Updates {
    /// The updates of the parameters in `layout` by `rule`. `parameters` has all of the model. Collective over
    /// the world where the rule reads any of them whole: the ranks that update the same parameters, or other elements
    /// of them, then have a group.
    pub fn join(
        rule: &Rule,
        layout: &Layout,
        parameters: &[ParamSpec],
        rank: &Rank,
        device: Arc<dyn Device>,
    ) -> Result<Self, CommError> {
        let reads_whole = |spec: &ParamSpec| !spec.group.frozen && !rule.is_elementwise(&spec.shape());
        let shared = axes(&layout.mesh, layout.cuts, parameters);
        let group = match parameters.iter().any(reads_whole) {
            true => Some(rank.subgroup(OPTIMIZER, &rank.mesh().group(rank.world_rank(), &shared))?),
            false => None,
        };
        let mut rules: Vec<Option<ParamRule>> = layout.declarations.specs().iter().map(|_| None).collect();
        let mut ends: Vec<[usize; 2]> = Vec::new();
        for &id in layout.trained().iter().flatten() {
            rules[id.index()] = Some(ParamRule::new(rule, layout, id, &shared, &mut ends));
        }
        let is_whole = |id: &ParamId| reads_whole(layout.declarations.spec(*id));
        let whole = layout.trained().iter().flatten().copied().filter(is_whole).collect();
        let rounds = rounds(layout, &rules, group.as_ref().map_or(1, Group::size));
        Ok(Self { rule: rule.clone(), rules, whole, rounds, group, layout: layout.clone(), device })
    }

    /// Whether weights are stored in 16 bits, so that states have those in f32.
    pub fn mixed(&self) -> bool {
        self.layout.declarations.dtype() != DType::F32
    }

    /// The states of a page that the rule declares, and the weights in f32 if they are among them.
    fn split<'a>(&self, states: &'a mut [Buffer]) -> (&'a mut [Buffer], Option<&'a mut Buffer>) {
        let (states, masters) = states.split_at_mut(states.len() - usize::from(self.mixed() && !states.is_empty()));
        (states, masters.first_mut())
    }

    fn rule_of(&self, id: ParamId) -> Option<&ParamRule> {
        self.rules.get(id.index())?.as_ref()
    }

    /// Whether the rule of a parameter reads no more than one element at a time.
    fn is_elementwise(&self, of: &ParamRule) -> bool {
        self.rule.is_elementwise(&of.shape)
    }

    /// The elements of a parameter that are updated here, as its rule sees them.
    fn whole_part<'a>(&'a self, of: &'a ParamRule, param: &ParamUpdate) -> WholePart<'a> {
        WholePart {
            rule: self.rule.for_shape(&of.shape),
            update: param.update,
            shape: of.shape,
            dims: of.dims,
            slice: &of.slice,
            part: param.elements.clone(),
            at: param.start,
        }
    }

    /// The states of all parameters, all zero. States of elements are on `disk`, if there is one.
    pub fn states(&self, disk: Option<&Rc<Disk>>) -> Result<States> {
        let _optimizer = self.device.meter().enter(Category::Optimizer);
        let layout = &self.layout;
        let flat = |(flat, members): (usize, &Vec<ParamId>)| {
            let states = members.first().and_then(|&id| self.rule_of(id)).map_or(&[][..], |of| &of.states);
            let dtypes = states.iter().filter_map(|state| match state.kept {
                Kept::Elements => Some(DType::F32),
                Kept::Codes => Some(DType::U8),
                Kept::Sets(_) => None,
            });
            let states = dtypes.chain(self.mixed().then_some(DType::F32)).collect();
            let measured = |id: &&ParamId| self.rule_of(**id).is_some_and(|of| !self.is_elementwise(of));
            let whole = members.iter().filter(measured).map(|&id| layout.place_in(id, Vector::States));
            let whole = whole.filter(|range| !range.is_empty()).collect();
            Flat { states, elements: layout.window(flat, Vector::States).len(), whole }
        };
        let flats = layout.trained().iter().enumerate().map(flat).collect();
        let mut elements = Elements::new(flats, disk, &self.device)?;
        let order = self.order(&elements);
        elements.set_order(order);
        let sets = |of: &Option<ParamRule>| {
            let sets = of.iter().flat_map(|of| of.states.iter().zip(std::iter::repeat(&of.shape)));
            let sets = sets.filter_map(|(state, shape)| match state.kept {
                Kept::Sets(over) => Some(self.device.zeros(DType::F32, over.count(shape))),
                _ => None,
            });
            sets.collect::<Result<Vec<Buffer>, Error>>()
        };
        Ok(States { elements, sets: self.rules.iter().map(sets).collect::<Result<_, Error>>()? })
    }

    /// The pages of states in the order in which [`measure`](Self::measure), [`gather`](Self::gather) and
    /// [`update`](Self::update) need them.
    fn order(&self, elements: &Elements) -> Vec<usize> {
        let pages =
            |id: &ParamId| elements.cover(self.layout.span(*id).flat, &self.layout.place_in(*id, Vector::States));
        let mut order = Vec::new();
        let passes = self.whole.iter().filter_map(|&id| Some(self.rule_of(id)?.passes.len())).max().unwrap_or(0);
        for (pass, number) in (0..passes).flat_map(|pass| (0..REDUCTIONS.len()).map(move |number| (pass, number))) {
            let takes =
                |id: &&ParamId| self.rule_of(**id).and_then(|of| of.passes.get(pass)).map(reduction) == Some(number);
            order.extend(self.whole.iter().filter(takes).flat_map(pages));
        }
        for round in &self.rounds {
            let ids = || self.layout.flats[round.clone()].iter().flatten();
            let gathered =
                |id: &&ParamId| self.group.is_some() && self.rule_of(**id).is_some_and(|of| of.transform.is_some());
            order.extend(ids().filter(gathered).flat_map(pages));
            order.extend(ids().flat_map(pages));
        }
        order
    }

    /// Takes the passes of all parameters that are read whole. `read` gives the part of a parameter that is updated
    /// here. Changes states; weights stay.
    pub fn measure(&self, read: impl Fn(ParamId) -> Result<Before>, states: &mut States) -> Result<Totals> {
        let (optim, whole_optim) = (self.device.optim()?, self.device.whole_optim()?);
        let exact_sums = self.layout.declarations.reduction_blocks().is_some();
        let mut totals = Totals::new();
        let rules = || self.whole.iter().filter_map(|&id| Some((id, self.rule_of(id)?)));
        let passes = rules().map(|(_, of)| of.passes.len()).max().unwrap_or(0);
        for pass in 0..passes {
            let mut measured = [None, None];
            for (number, op) in REDUCTIONS.into_iter().enumerate() {
                let takers = || rules().filter(|(_, of)| of.passes.get(pass).map(reduction) == Some(number));
                let count: usize = takers().map(|(_, of)| of.count(&of.passes[pass])).sum();
                if count == 0 {
                    continue;
                }
                let exact = exact_sums && op == ReduceOp::Sum;
                let mut sums = self.device.zeros(DType::F64, count * if exact { LIMBS } else { 1 })?;
                for (id, of) in takers() {
                    let into = of.counted.then_some(match exact {
                        true => Measured::Digits(&mut sums, of.starts[pass] * LIMBS),
                        false => Measured::Sums(&mut sums, of.starts[pass]),
                    });
                    self.measure_one(of, pass, read(id)?, states, &totals, into)?;
                }
                if let Some(group) = &self.group {
                    sums = group.all_reduce(sums, op)?;
                }
                if exact {
                    sums = optim.exact_sums(&sums)?;
                }
                for (id, of) in takers() {
                    let (part, sets) = (self.whole_part(of, &read(id)?.param), &mut states.sets[id.index()]);
                    whole_optim.finish_pass(&part, pass, &mut sums, of.starts[pass], sets)?;
                }
                measured[number] = Some(sums);
            }
            totals.push(measured);
        }
        Ok(totals)
    }

    /// Takes one pass over the elements of a parameter that this rank updates, if it has any. The pass behind the last
    /// one gives the matrices that are transformed.
    fn measure_one(
        &self,
        of: &ParamRule,
        pass: usize,
        Before { param, flat, weights, grads }: Before,
        states: &mut States,
        totals: &Totals,
        into: Option<Measured<'_>>,
    ) -> Result<()> {
        let Some(page) = states.elements.cover(flat, &param.window()).next() else { return Ok(()) };
        let (totals, sets) = (of.totals(totals)?, &states.sets[param.id.index()]);
        let open = states.elements.page(page);
        let range = open.range.start..open.range.end.min(weights.count());
        let grads = grads.slice(range.start..range.end.min(grads.count()))?;
        let weights = weights.slice(range)?;
        let param = param.on_page(open).unwrap_or_else(|| unreachable!("the page covers the elements"));
        let (elements, masters) = self.split(states.elements.get(page)?);
        let weights = masters.map_or(&weights, |masters| masters);
        let vectors = WholeVectors { grads: &grads, states: elements, sets, totals: &totals, gathered: None };
        Ok(self.device.whole_optim()?.measure(&self.whole_part(of, &param), pass, weights, vectors, into)?)
    }

    /// Brings together the matrices of the parameters whose rules read them, and transforms them. Each rank
    /// transforms some.
    pub fn gather<'a>(
        &self,
        ids: impl Iterator<Item = &'a ParamId>,
        read: impl Fn(ParamId) -> Result<Before>,
        states: &mut States,
        totals: &Totals,
    ) -> Result<Option<Gathered>> {
        let gathers = |&id| Some((id, self.rule_of(id)?, self.rule_of(id)?.transform?));
        let members: Vec<_> = ids.filter_map(gathers).collect();
        let Some(group) = self.group.as_ref().filter(|_| !members.is_empty()) else { return Ok(None) };
        let layout = self.device.layout()?;
        // Each matrix goes to the rank with the fewest elements so far.
        let mut loads = vec![0; group.size()];
        let mut owners: BTreeMap<ParamId, Vec<(usize, usize)>> = BTreeMap::new();
        for (id, ParamRule { shape, .. }, _) in &members {
            let owner = |_| {
                let owner = (0..loads.len()).min_by_key(|&rank| loads[rank]).unwrap_or(0);
                loads[owner] += shape.each();
                (owner, loads[owner] - shape.each())
            };
            owners.insert(*id, (0..shape.matrices).map(owner).collect());
        }
        let most = loads.iter().copied().max().unwrap_or(0);
        let mut all = self.device.zeros(DType::F32, group.size() * most)?;
        for &(id, of, _) in &members {
            let before = read(id)?;
            if before.param.elements.is_empty() {
                continue;
            }
            let (mut values, count) = (self.device.zeros(DType::F32, of.shape.elements())?, of.shape.each());
            let into = of.counted.then_some(Measured::Values(&mut values));
            self.measure_one(of, of.passes.len(), before, states, totals, into)?;
            for (matrix, (owner, at)) in owners[&id].iter().enumerate() {
                layout.copy_into(&values, matrix * count..(matrix + 1) * count, &mut all, owner * most + at)?;
            }
        }
        let mut own = group.reduce_scatter(all, self.device.alloc(DType::F32, most)?, ReduceOp::Sum)?;
        for (id, of, of_matrices) in &members {
            for &(_, at) in owners[id].iter().filter(|(owner, _)| *owner == group.rank()) {
                transform(&*self.device, *of_matrices, [of.shape.rows, of.shape.columns], &mut own, at)?;
            }
        }
        let all = group.all_gather(own, self.device.alloc(DType::F32, group.size() * most)?)?;
        let starts = |owners: Vec<(usize, usize)>| owners.into_iter().map(|(owner, at)| owner * most + at).collect();
        Ok(Some(Gathered { all, starts: owners.into_iter().map(|(id, owners)| (id, starts(owners))).collect() }))
    }

    /// Updates the weights of flat buffers. Rules that read whole parameters (LAMB, Adafactor, Muon) go through one
    /// parameter after the other; all elements with the same elementwise rule and factors are updated by one call.
    pub fn update(
        &self,
        flats: &mut [FlatUpdate],
        states: &mut States,
        totals: &Totals,
        gathered: Option<&Gathered>,
    ) -> Result<()> {
        let States { elements, sets } = states;
        let covered =
            |of: &FlatUpdate| of.params.iter().flat_map(|part| elements.cover(of.flat, &part.window())).collect();
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
    fn open<'a>(&self, page: &Page, states: &'a mut [Buffer], of: &'a mut FlatUpdate) -> Result<OpenPage<'a>> {
        let range = page.range.start..page.range.end.min(of.weights.count());
        let grads = of.grads.slice(range.start..range.end.min(of.grads.count()))?;
        let params = of.params.iter().filter_map(|param| param.on_page(page)).collect();
        let (states, masters) = self.split(states);
        Ok(OpenPage { weights: of.weights.window(range)?, masters, grads, states, params })
    }

    /// Updates the parameters that their rules read whole.
    fn update_whole(
        &self,
        open: &mut [OpenPage<'_>],
        sets: &[Vec<Buffer>],
        totals: &Totals,
        gathered: Option<&Gathered>,
    ) -> Result<()> {
        let optim = self.device.whole_optim()?;
        for OpenPage { weights, masters, grads, states, params } in open {
            let weights = masters.as_deref_mut().unwrap_or(weights);
            for param in params.iter() {
                let Some(of) = self.rule_of(param.id).filter(|of| !self.is_elementwise(of)) else { continue };
                let matrices =
                    match gathered.and_then(|gathered| Some((&gathered.all, gathered.starts.get(&param.id)?))) {
                        None => None,
                        Some((all, starts)) => {
                            let count = of.shape.each();
                            let mut matrices = self.device.alloc(DType::F32, of.shape.elements())?;
                            for (matrix, &at) in starts.iter().enumerate() {
                                self.device.layout()?.copy_into(all, at..at + count, &mut matrices, matrix * count)?;
                            }
                            Some(matrices)
                        }
                    };
                let (totals, sets) = (of.totals(totals)?, &sets[param.id.index()][..]);
                let vectors = WholeVectors { grads, states, sets, totals: &totals, gathered: matrices.as_ref() };
                optim.update_whole(&self.whole_part(of, param), weights, vectors)?;
            }
        }
        Ok(())
    }

    /// Updates the parameters whose rule updates each element by itself, such as AdamW. One call takes all elements
    /// with the same rule and factors.
    fn update_elements(&self, open: &mut [OpenPage<'_>]) -> Result<()> {
        let optim = self.device.optim()?;
        let alike = |param: &ParamUpdate| {
            let of = self.rule_of(param.id).filter(|of| self.is_elementwise(of))?;
            Some((self.rule.for_shape(&of.shape), param.update))
        };
        let same = |one: (&Rule, Update), other: (&Rule, Update)| std::ptr::eq(one.0, other.0) && one.1 == other.1;
        let mut updates: Vec<(&Rule, Update)> = Vec::new();
        for of in open.iter().flat_map(|page| &page.params).filter_map(alike) {
            if !updates.iter().any(|&known| same(known, of)) {
                updates.push(of);
            }
        }
        for of in updates {
            let is_of = |param: &&ParamUpdate| alike(param).is_some_and(|other| same(of, other));
            let ranges = |page: &OpenPage<'_>| page.params.iter().filter(is_of).map(ParamUpdate::window).collect();
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
    fn narrow(&self, page: OpenPage<'_>) -> Result<()> {
        let OpenPage { mut weights, masters: Some(masters), params, .. } = page else { return Ok(()) };
        let windows = || params.iter().map(ParamUpdate::window);
        // The parameters lie one behind the other.
        let start = windows().map(|window| window.start).min().unwrap_or(0);
        let end = windows().map(|window| window.end).max().unwrap_or(start);
        let updated = masters.slice(start..end)?;
        Ok(self.device.pointwise()?.cast_into(&updated, &mut weights, start)?)
    }
}

/// Flat buffers whose matrices are gathered at once, where `ranks` ranks share out the transforms.
fn rounds(layout: &Layout, rules: &[Option<ParamRule>], ranks: usize) -> Vec<Range<usize>> {
    let matrices = |id: &ParamId| {
        let of = rules[id.index()].as_ref().filter(|of| of.transform.is_some());
        of.map_or(0, |of| of.shape.matrices)
    };
    let (mut rounds, mut first, mut count) = (Vec::new(), 0, 0);
    for (flat, ids) in layout.trained().iter().enumerate() {
        count += ids.iter().map(matrices).sum::<usize>();
        if count >= ranks || flat + 1 == layout.keys.len() {
            rounds.push(first..flat + 1);
            (first, count) = (flat + 1, 0);
        }
    }
    rounds
}

impl ParamUpdate {
    /// Its elements in the windows of weights, gradients and states.
    pub fn window(&self) -> Range<usize> {
        self.start..self.start + self.elements.len()
    }

    /// The elements that lie on a page, counted from the page's first element; `None` if none do.
    fn on_page(&self, page: &Page) -> Option<Self> {
        let (start, end) = (self.start.max(page.range.start), self.window().end.min(page.range.end));
        let first = self.elements.start + start.checked_sub(self.start)?;
        (start < end).then(|| Self {
            elements: first..first + end - start,
            start: start - page.range.start,
            ..self.clone()
        })
    }
}

impl OpenPage<'_> {
    /// The weights that the rule updates, with their gradients and states.
    fn vectors(&mut self) -> (&mut Buffer, &Buffer, &mut [Buffer]) {
        let weights = if let Some(masters) = &mut self.masters { &mut **masters } else { &mut *self.weights };
        (weights, &self.grads, &mut *self.states)
    }
}

impl ParamRule {
    /// How `rule` updates a parameter. `shared` are the axes along which ranks update other elements of parameters,
    /// `ends` the totals of the parameters before it, pass by pass.
    fn new(rule: &Rule, layout: &Layout, id: ParamId, shared: &[Axis], ends: &mut Vec<[usize; 2]>) -> Self {
        let (spec, flat, stage) = (layout.declarations.spec(id), layout.span(id).flat, layout.cuts.stage);
        let shape = spec.shape();
        let by_slices = &layout.keys[flat].axes;
        let cut = |axis: Axis| stage >= ZeroStage::States && cuts_batch(axis) && by_slices.contains(&axis);
        let replica = layout.replica(spec, &[], |axis| !shared.contains(&axis) || cut(axis));
        // Groups of data-parallel ranks that share out among themselves have all slices each.
        let counted = replica.index == 0 && (stage < ZeroStage::States || layout.zero_replica(flat).index == 0);
        let mut of = Self {
            dims: spec.dims,
            slice: layout.local(id),
            states: rule.states(&shape),
            shape,
            passes: rule.passes(&shape),
            starts: Vec::new(),
            transform: rule.gathers(&shape),
            counted,
        };
        ends.resize(ends.len().max(of.passes.len()), [0; 2]);
        for (pass, ends) in of.passes.iter().zip(ends) {
            let end = &mut ends[reduction(pass)];
            of.starts.push(*end);
            *end += of.count(pass);
        }
        of
    }

    fn count(&self, pass: &Pass) -> usize {
        pass.over().iter().map(|over| over.count(&self.shape)).sum()
    }

    /// Its totals of the passes so far.
    fn totals(&self, totals: &Totals) -> Result<Vec<Buffer>> {
        let mut own = Vec::new();
        for ((pass, &start), measured) in self.passes.iter().zip(&self.starts).zip(totals) {
            if let Some(all) = &measured[reduction(pass)] {
                own.push(all.slice(start..start + self.count(pass))?);
            }
        }
        Ok(own)
    }
}
