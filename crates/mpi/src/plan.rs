//! Who sends what to whom in an operation: ranges of bytes, as data.
//!
//! An operation is cut into units, each of which goes its way by itself, in steps: a member sends, receives, and adds
//! up. There are two ways.
//!
//! - **Segments**, for much data: each member owns one, 1/n of the elements. Of a sum each member brings its part of
//!   the segment to the owner, which adds them up in the balanced tree, and then the owner brings the sum to all.
//!   Inside a process that costs no message: between two processes one member sends for all of its process (the *agent*
//!   of the owner there; each member is the agent of some owners), either the sums of the nodes of the tree that its
//!   process has, or on the way back the sum, which it hands on. So 2(p-1)/p of the bytes leave a process, as in a ring
//!   of p processes, however many ranks it has.
//! - **Rounds**, for little data: one member of each process has what its process has, and exchanges it with others, in
//!   [rounds](Round) that bring everything to all. A member of n sends a few messages times log n.
//!
//! A sum that the library takes (see [`Reduction`]) has a barrier in rounds, in which members say what they do, and
//! then a step in which each member sends to itself: that is the library's own reduction.
//!
//! So not all members meet. Of two that disagree about the operation some neighbours do, since what a member has at the
//! end comes from all, and each of its messages is the first to say what the sender does.
//!
//! Large segments are cut into lanes, which are units by themselves, so that sums are taken while other lanes are under
//! way.
//!
//! More than 400 lines: the ways of all collectives.

use std::ops::Range;
use std::sync::Arc;

use meshwork_core::{Call, DType, Op, ReduceOp};

use crate::block::EAGER;
use crate::cells::{Cells, Nodes, Round, element_of};
use crate::library::Summed;
use crate::native::Reduction;

/// Bytes of a segment that go their way together.
const LANE: usize = 1 << 20;

/// What a member sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// That it is here.
    Nothing,
    /// A range of the input; in place, of the output.
    Input(Range<usize>),
    /// A range of the output.
    Output(Range<usize>),
    /// Ranges of the output, one after the other: few bytes.
    Outputs(Vec<Range<usize>>),
    /// The sums of nodes that it has taken in this unit.
    Sums,
}

/// What to do with bytes that arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Dest {
    /// They say that the sender is here; there are none.
    Nothing,
    /// They belong into this range of the output.
    Output(Range<usize>),
    /// They belong into these ranges: few bytes.
    Outputs(Vec<Range<usize>>),
    /// They are the sums of these nodes.
    Sums(Nodes),
}

/// What a member does when all of a step has arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Nothing,
    /// Adds up what it has as far as nodes: these. Its own part is this range of the input.
    Join {
        own: Range<usize>,
        nodes: Nodes,
    },
    /// Adds up everything, into this range of the output.
    Finish {
        own: Range<usize>,
        into: Range<usize>,
    },
}

/// A step of a member.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) sends: Vec<(usize, Source)>,
    pub(crate) receives: Vec<(usize, Dest)>,
    pub(crate) then: Then,
}

impl Step {
    fn sends(sends: Vec<(usize, Source)>) -> Step {
        Step { sends, receives: Vec::new(), then: Then::Nothing }
    }

    fn receives(receives: Vec<(usize, Dest)>, then: Then) -> Step {
        Step { sends: Vec::new(), receives, then }
    }
}

#[derive(Clone, Debug)]
enum Shape {
    /// Segments: added up by their owners or not, brought to all or not.
    Segments {
        sum: bool,
        to_all: bool,
    },
    /// Segments of the elements of one member.
    Broadcast {
        root: usize,
    },
    Rounds(Rounds),
    /// The library adds up.
    Native(Summed),
    /// Where the part of each member begins in the input and in the output, in elements, and the end.
    AllToAll {
        send: Vec<usize>,
        recv: Vec<usize>,
    },
    Send,
    Recv,
}

/// What cells exchange in rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rounds {
    Barrier,
    Sum,
    Gather,
    Broadcast { root: usize },
}

/// The plan of one member of an operation. Members are numbered as in the group; of a message the sender is 0 and the
/// receiver 1.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    shape: Shape,
    cells: Arc<Cells>,
    pub(crate) me: usize,
    element: usize,
    /// Elements of the full buffer.
    elements: usize,
    /// Members that own segments.
    owners: Vec<usize>,
    lanes: usize,
    /// How parts are added up, if they are.
    pub(crate) reduce: Option<ReduceOp>,
}

impl Plan {
    /// The plan of a checked call of member `me` of a group with these cells.
    pub(crate) fn new(call: &Call, me: usize, cells: Arc<Cells>, reduction: Reduction) -> Plan {
        let buffer = call.input.as_ref().or(call.output.as_ref());
        let element = buffer.map_or(1, |buffer| buffer.dtype().size());
        let elements = call.elements();
        let ends = |counts: &[usize]| {
            let sum = |sum: &mut usize, count: &usize| {
                *sum += count;
                Some(*sum)
            };
            [0].into_iter().chain(counts.iter().scan(0, sum)).collect::<Vec<_>>()
        };
        let is_small = elements * element <= EAGER;
        let shape = match &call.op {
            Op::Barrier => Shape::Rounds(Rounds::Barrier),
            Op::AllGather if is_small => Shape::Rounds(Rounds::Gather),
            Op::AllGather => Shape::Segments { sum: false, to_all: true },
            Op::AllReduce(_) if is_small => Shape::Rounds(Rounds::Sum),
            Op::AllReduce(_) => Shape::Segments { sum: true, to_all: true },
            Op::ReduceScatter(_) => Shape::Segments { sum: true, to_all: false },
            Op::Broadcast { root } if is_small => Shape::Rounds(Rounds::Broadcast { root: *root }),
            Op::Broadcast { root } => Shape::Broadcast { root: *root },
            Op::AllToAll { send_counts, recv_counts } => {
                Shape::AllToAll { send: ends(send_counts), recv: ends(recv_counts) }
            }
            Op::Send { .. } => Shape::Send,
            Op::Recv { .. } => Shape::Recv,
        };
        let shape = reduction.of(call, &cells).map_or(shape, Shape::Native);
        let reduce = match call.op {
            Op::AllReduce(reduce) | Op::ReduceScatter(reduce) => Some(reduce),
            _ => None,
        };
        let owners = match shape {
            Shape::Segments { .. } => (0..cells.members()).collect(),
            // Its own process has all of it.
            Shape::Broadcast { root } if cells.len() == 1 => vec![root],
            Shape::Broadcast { root } => (0..cells.members()).filter(|&it| cells.of(it) != cells.of(root)).collect(),
            _ => Vec::new(),
        };
        let mut plan = Plan { shape, cells, me, element, elements, owners, lanes: 1, reduce };
        // Bytes that nobody adds up or hands on need no lanes.
        let is_flat = plan.cells.len() == plan.cells.members();
        if !plan.owners.is_empty() && (plan.reduce.is_some() || !is_flat) {
            plan.lanes = (elements.div_ceil(plan.owners.len()) * element).div_ceil(LANE).max(1);
        }
        plan
    }

    /// The bytes of a segment.
    fn segment(&self, number: usize) -> Range<usize> {
        let start = |number: usize| {
            let (whole, rest) = (self.elements / self.owners.len(), self.elements % self.owners.len());
            (number * whole + number.min(rest)) * self.element
        };
        start(number)..start(number + 1)
    }

    /// The bytes of a lane of a segment.
    fn lane(&self, segment: usize, lane: usize) -> Range<usize> {
        let Range { start, end } = self.segment(segment);
        if self.lanes == 1 {
            return start..end;
        }
        let step = LANE / self.element * self.element;
        (start + lane * step).min(end)..(start + (lane + 1) * step).min(end)
    }

    fn whole(&self) -> Range<usize> {
        0..self.elements * self.element
    }

    /// The number of units.
    pub(crate) fn units(&self) -> usize {
        match self.shape {
            Shape::Segments { .. } => self.lanes * self.owners.len(),
            // The last one tells the root that all are here.
            Shape::Broadcast { .. } => self.lanes * self.owners.len() + 1,
            _ => 1,
        }
    }

    /// The lane of a unit: units of earlier lanes begin first.
    pub(crate) fn lane_of(&self, unit: usize) -> usize {
        unit / self.owners.len().max(1)
    }

    /// The units in the order in which this member begins them: in each lane with the segment after its own, so that
    /// not all members send to the first one first.
    pub(crate) fn order(&self) -> impl Iterator<Item = usize> + use<> {
        let (units, owners, me) = (self.units(), self.owners.len().max(1), self.me);
        (0..units).step_by(owners).flat_map(move |first| {
            let lane = owners.min(units - first);
            (1..=lane).map(move |step| first + (me + step) % lane)
        })
    }

    /// The bytes of the sums of nodes in a unit.
    pub(crate) fn bytes_of(&self, unit: usize, nodes: &Nodes, dtype: DType) -> usize {
        let elements = match self.shape {
            Shape::Segments { .. } => self.lane(unit % self.owners.len(), self.lane_of(unit)).len() / self.element,
            _ => self.elements,
        };
        elements * nodes.iter().map(|node| element_of(node, dtype)).sum::<usize>()
    }

    /// What this member does in a unit.
    pub(crate) fn steps(&self, unit: usize) -> Vec<Step> {
        let (me, whole) = (self.me, self.whole());
        match &self.shape {
            &Shape::Segments { sum, to_all } => {
                let (at, lane) = (unit % self.owners.len(), unit / self.owners.len());
                let (owner, range, start) = (self.owners[at], self.lane(at, lane), self.segment(at).start);
                let within = range.start - start..range.end - start;
                let mut steps = Vec::new();
                if sum {
                    let into = if to_all { range.clone() } else { within.clone() };
                    steps.extend(self.up(owner, Some((range.clone(), into))));
                }
                if to_all {
                    let source = if sum { Source::Output(range.clone()) } else { Source::Input(within) };
                    steps.extend(self.down(owner, &range, source, None));
                }
                steps
            }
            &Shape::Broadcast { root } if unit + 1 == self.units() => self.up(root, None),
            &Shape::Broadcast { root } => {
                let (at, lane) = (unit % self.owners.len(), unit / self.owners.len());
                let (owner, range) = (self.owners[at], self.lane(at, lane));
                let (source, dest) = (Source::Output(range.clone()), Dest::Output(range.clone()));
                let beside = self.cells.of(me) == self.cells.of(root);
                let mut steps = Vec::new();
                if me == root {
                    let to = self.cells.beside(root).chain((owner != root).then_some(owner));
                    steps.push(Step::sends(to.map(|to| (to, source.clone())).collect()));
                } else if me == owner || beside {
                    steps.push(Step::receives(vec![(root, dest)], Then::Nothing));
                }
                if !beside {
                    steps.extend(self.down(owner, &range, source, Some(self.cells.of(root))));
                }
                steps
            }
            &Shape::Rounds(of) => self.rounds(of),
            Shape::Native(_) => {
                let (sends, receives) = (vec![(me, Source::Nothing)], vec![(me, Dest::Output(whole))]);
                let sum = Step { sends, receives, then: Then::Nothing };
                self.rounds(Rounds::Barrier).into_iter().chain([sum]).collect()
            }
            Shape::AllToAll { send, recv } => {
                let bytes = |ends: &[usize], at: usize| ends[at] * self.element..ends[at + 1] * self.element;
                let sends = self.others().map(|to| (to, Source::Input(bytes(send, to)))).collect();
                let receives = self.others().map(|from| (from, Dest::Output(bytes(recv, from)))).collect();
                vec![Step { sends, receives, then: Then::Nothing }]
            }
            Shape::Send => vec![
                Step::sends(vec![(1, Source::Input(whole))]),
                Step::receives(vec![(1, Dest::Nothing)], Then::Nothing),
            ],
            Shape::Recv => vec![
                Step::receives(vec![(0, Dest::Output(whole))], Then::Nothing),
                Step::sends(vec![(0, Source::Nothing)]),
            ],
        }
    }

    /// Brings parts to their owner, which adds them up: the range of the input, and where the sum goes. Without a range
    /// it brings only that all are here.
    fn up(&self, owner: usize, sum: Option<(Range<usize>, Range<usize>)>) -> Vec<Step> {
        let (me, cells) = (self.me, &self.cells);
        let agent = cells.agent(cells.of(me), owner);
        let part = || sum.as_ref().map_or(Source::Nothing, |(own, _)| Source::Input(own.clone()));
        let dest = |members: &[usize]| if sum.is_some() { Dest::Sums(cells.nodes(members)) } else { Dest::Nothing };
        let beside = || cells.beside(me).map(|from| (from, dest(&[from])));
        if me == owner {
            let agents = cells.agents(owner).map(|from| (from, dest(cells.members_of(cells.of(from)))));
            let finish =
                |(own, into): &(Range<usize>, Range<usize>)| Then::Finish { own: own.clone(), into: into.clone() };
            return vec![Step::receives(beside().chain(agents).collect(), sum.as_ref().map_or(Then::Nothing, finish))];
        }
        if me != agent {
            return vec![Step::sends(vec![(agent, part())])];
        }
        let own = cells.members_of(cells.of(me));
        if own.len() == 1 {
            return vec![Step::sends(vec![(owner, part())])];
        }
        let join = |(range, _): &(Range<usize>, _)| Then::Join { own: range.clone(), nodes: cells.nodes(own) };
        let gather = Step::receives(beside().collect(), sum.as_ref().map_or(Then::Nothing, join));
        let source = if sum.is_some() { Source::Sums } else { Source::Nothing };
        vec![gather, Step::sends(vec![(owner, source)])]
    }

    /// Brings what an owner has, at `source`, to all others; a cell that has it may be left out.
    fn down(&self, owner: usize, range: &Range<usize>, source: Source, without: Option<usize>) -> Vec<Step> {
        let (me, cells) = (self.me, &self.cells);
        let agent = cells.agent(cells.of(me), owner);
        let to = |to: Vec<usize>, source: Source| Step::sends(to.into_iter().map(|to| (to, source.clone())).collect());
        if me == owner {
            let agents = cells.agents(owner).filter(|&agent| without != Some(cells.of(agent)));
            return vec![to(cells.beside(me).chain(agents).collect(), source)];
        }
        let from = if me == agent { owner } else { agent };
        let receives = Step::receives(vec![(from, Dest::Output(range.clone()))], Then::Nothing);
        if me == agent && cells.of(me) != cells.of(owner) {
            return vec![receives, to(cells.beside(me).collect(), Source::Output(range.clone()))];
        }
        vec![receives]
    }

    /// The steps of rounds: the first member of each cell has what its cell has, exchanges it, and hands it on.
    fn rounds(&self, of: Rounds) -> Vec<Step> {
        let (me, cells, whole) = (self.me, &*self.cells, self.whole());
        let part = |member: usize| {
            let bytes = self.elements / cells.members() * self.element;
            member * bytes..(member + 1) * bytes
        };
        let parts = |members: &[usize]| -> Vec<Range<usize>> {
            // Neighbours are one range.
            let mut parts: Vec<Range<usize>> = Vec::new();
            for range in members.iter().map(|&member| part(member)) {
                match parts.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => parts.push(range),
                }
            }
            parts
        };
        let source = |members: &[usize]| match of {
            Rounds::Sum if members.len() == 1 => Source::Input(whole.clone()),
            Rounds::Sum => Source::Sums,
            Rounds::Gather if members == [me] => Source::Input(0..part(me).len()),
            Rounds::Gather => Source::Outputs(parts(members)),
            Rounds::Broadcast { root } if members.contains(&root) => Source::Output(whole.clone()),
            Rounds::Broadcast { .. } | Rounds::Barrier => Source::Nothing,
        };
        let dest = |members: &[usize]| match of {
            Rounds::Sum => Dest::Sums(cells.nodes(members)),
            Rounds::Gather => Dest::Outputs(parts(members)),
            Rounds::Broadcast { root } if members.contains(&root) => Dest::Output(whole.clone()),
            Rounds::Broadcast { .. } | Rounds::Barrier => Dest::Nothing,
        };
        let then = |members: &[usize]| match of {
            Rounds::Sum if members.len() == cells.members() => Then::Finish { own: whole.clone(), into: whole.clone() },
            Rounds::Sum => Then::Join { own: whole.clone(), nodes: cells.nodes(members) },
            _ => Then::Nothing,
        };
        // What the first of a cell hands on at the end.
        let end = |member: usize| match of {
            Rounds::Barrier => (Source::Nothing, Dest::Nothing),
            Rounds::Broadcast { root } if root == member => (Source::Nothing, Dest::Nothing),
            _ => (Source::Output(whole.clone()), Dest::Output(whole.clone())),
        };
        let cell = cells.of(me);
        let first = |cell: usize| cells.members_of(cell)[0];
        if me != first(cell) {
            let receives = Step::receives(vec![(first(cell), end(me).1)], Then::Nothing);
            return vec![Step::sends(vec![(first(cell), source(&[me]))]), receives];
        }
        let own = cells.members_of(cell);
        let mut steps = Vec::new();
        if own.len() > 1 || cells.len() == 1 {
            steps.push(Step::receives(cells.beside(me).map(|from| (from, dest(&[from]))).collect(), then(own)));
        }
        for Round { has, sends, receives } in Round::of(cell, cells.len()) {
            let source = source(&cells.members_in(has.clone()));
            let runs = receives.iter().map(|(_, run)| run).chain([&has]);
            let (from, to) = runs.fold((cell, cell + 1), |(from, to), run| (from.min(run.start), to.max(run.end)));
            steps.push(Step {
                sends: sends.into_iter().map(|to| (first(to), source.clone())).collect(),
                receives: receives.into_iter().map(|(from, run)| (first(from), dest(&cells.members_in(run)))).collect(),
                then: then(&cells.members_in(from..to)),
            });
        }
        steps.push(Step::sends(cells.beside(me).map(|to| (to, end(to).0)).collect()));
        steps
    }

    /// What a member copies from its input to its output: ranges of both, of equal length.
    pub(crate) fn copies(&self) -> Option<(Range<usize>, Range<usize>)> {
        match &self.shape {
            Shape::Segments { sum: false, .. } | Shape::Rounds(Rounds::Gather) => {
                let part = self.elements / self.cells.members() * self.element;
                Some((0..part, self.me * part..(self.me + 1) * part))
            }
            // All members do it in place, or none may.
            Shape::Native(summed) if !summed.scatters => Some((self.whole(), self.whole())),
            Shape::AllToAll { send, recv } => {
                let of = |ends: &[usize]| ends[self.me] * self.element..ends[self.me + 1] * self.element;
                Some((of(send), of(recv)))
            }
            _ => None,
        }
    }

    /// The other members, the next one first.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, members) = (self.me, self.cells.members());
        (1..members).map(move |step| (me + step) % members)
    }

    /// The elements that this member of an uneven all-to-all sends to another one, and expects of it: the other one
    /// compares them.
    pub(crate) fn uneven(&self, other: usize) -> Option<(usize, usize)> {
        let Shape::AllToAll { send, recv } = &self.shape else { return None };
        Some((send[other + 1] - send[other], recv[other + 1] - recv[other]))
    }

    pub(crate) fn element(&self) -> usize {
        self.element
    }

    /// What the library adds up, if it takes this sum.
    pub(crate) fn native(&self) -> Option<Summed> {
        if let Shape::Native(summed) = self.shape { Some(summed) } else { None }
    }
}
