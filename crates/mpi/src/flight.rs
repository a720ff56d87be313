//! An operation of one rank under way: what it has sent, what has arrived, and its memory.
//!
//! More than 400 lines: half of them run every collective over members that are anywhere, and count what travels.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use meshwork_core::comm::thread::{Part, reduce_parts};
use meshwork_core::comm::{OpInfo, Peer, Site};
use meshwork_core::hash::{combine, hash};
use meshwork_core::{Buffer, BufferError, Call, DType, Op, OpKind};
use smallvec::{SmallVec, smallvec};

use crate::cells::{Cells, Nodes, element_of};
use crate::ground::{Claim, Ground};
use crate::lookout::Ring;
use crate::native::{Reduction, Sum};
use crate::packet::{Body, Bytes, Key, Says, Used};
use crate::plan::{Dest, Plan, Source, Step, Then};

/// Lanes of a reduction whose parts may arrive at the same time: the others wait at their senders.
const WINDOW: usize = 4;

/// What a member does in all operations of one shape, which it prepares once.
#[derive(Debug)]
pub(crate) struct Course {
    op: Op,
    /// Of an operation in which members only meet: what it is with its elements.
    meets: Option<Op>,
    pub(crate) info: OpInfo,
    plan: Plan,
    /// World ranks of the members.
    pub(crate) ranks: Arc<[usize]>,
    dtype: DType,
    units: Vec<Way>,
    /// The sums that this member takes, by lane.
    sums: SmallVec<[usize; 1]>,
    hash: u64,
    written: Arc<[u8]>,
}

/// What a member does in a unit.
#[derive(Debug)]
struct Way {
    steps: Vec<Step>,
    /// What arrives in all steps, by member: the step, and what to do with it.
    awaited: Vec<(usize, usize, Dest)>,
    /// The messages that arrive in each step.
    missing: SmallVec<[usize; 2]>,
}

/// An operation under way.
pub(crate) struct Flight {
    pub(crate) key: Key,
    pub(crate) site: Site,
    pub(crate) course: Arc<Course>,
    input: Option<Arc<Buffer>>,
    output: Option<Ground>,
    /// Of the rank, when a message has let go of either.
    ring: Ring,
    units: SmallVec<[Unit; 2]>,
    /// Units that are not over.
    open: SmallVec<[usize; 2]>,
    /// The sums that this member has not taken, by lane, and the first lane that has any.
    sums: SmallVec<[usize; 1]>,
    summing: usize,
    /// Members to whom it has said what it does, and who have said it.
    told: Members,
    heard: Members,
    /// Whether nobody will wait for it.
    pub(crate) detached: bool,
}

/// A unit of the plan under way.
struct Unit {
    /// The step that it is in, and whether its messages have been sent.
    at: usize,
    sent: bool,
    /// Of what is awaited, by its place: what has arrived.
    arrived: Members,
    /// Messages that have not arrived, in each step.
    missing: SmallVec<[usize; 2]>,
    /// Sums of nodes that have arrived, by the step in which they are added up.
    parts: Vec<(usize, Nodes, Body)>,
    /// What this member has added up.
    joined: Option<(Nodes, Bytes)>,
}

/// A set of members, or of other small numbers: one bit for each.
#[derive(Debug, Default)]
struct Members(SmallVec<[u64; 1]>);

impl Members {
    fn contains(&self, member: usize) -> bool {
        self.0.get(member / 64).is_some_and(|word| word & 1 << (member % 64) != 0)
    }

    /// Adds a member. Whether it was not there.
    fn insert(&mut self, member: usize) -> bool {
        if self.0.len() <= member / 64 {
            self.0.resize(member / 64 + 1, 0);
        }
        let (word, bit) = (&mut self.0[member / 64], 1 << (member % 64));
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    fn iter(&self) -> impl Iterator<Item = usize> {
        (0..64 * self.0.len()).filter(|&member| self.contains(member))
    }
}

/// Messages that are sent.
pub(crate) type Messages = SmallVec<[Outgoing; 2]>;

/// A message that is sent.
pub(crate) struct Outgoing {
    pub(crate) unit: usize,
    pub(crate) to: usize,
    pub(crate) bytes: Bytes,
}

/// Where a message that has arrived goes.
pub(crate) enum Place {
    /// Its bytes are where they belong.
    Taken,
    /// Its bytes, which are at another process, go into this memory.
    Receive(Claim),
    /// It must wait: its memory is still read, or earlier lanes come first.
    Later(Body),
    /// Its length is not what this member expects.
    Wrong,
}

impl Way {
    fn new(mut steps: Vec<Step>) -> Way {
        let missing = steps.iter().map(|step| step.receives.len()).collect();
        let mut awaited = Vec::new();
        for (at, step) in steps.iter_mut().enumerate() {
            awaited.extend(step.receives.drain(..).map(|(from, dest)| (from, at, dest)));
        }
        awaited.sort_unstable_by_key(|(from, ..)| *from);
        Way { steps, awaited, missing }
    }
}

/// A hash that two members' operations have in common if they [agree](OpInfo::agrees), and otherwise not.
fn agreement(info: &OpInfo) -> u64 {
    let (message, exchange) = (matches!(info.kind, OpKind::Send | OpKind::Recv), info.kind == OpKind::AllToAll);
    let kind = if message { OpKind::Send } else { info.kind };
    let all = |it: Option<u64>| it.filter(|_| !(message || exchange)).map_or(0, |it| it + 1);
    let peer = info.peer.map(|peer| match peer {
        Peer::Root(rank) | Peer::To(rank) | Peer::From(rank) => rank as u64,
    });
    let caller = info.caller.as_ref().filter(|_| !message).map_or(0, |caller| hash(caller.name.as_bytes()));
    let signature = info.signature.filter(|_| !exchange);
    let small =
        kind as u64 | all(info.reduce.map(|it| it as u64)) << 8 | info.dtype.map_or(0, |it| it as u64 + 1) << 16;
    let elements = if exchange { 0 } else { info.elements as u64 };
    let signed = signature.is_some() as u64;
    [elements, all(peer), caller, signed, signature.unwrap_or_default()].into_iter().fold(small, combine)
}

impl Course {
    pub(crate) fn new(
        call: &Call,
        (info, meets): (OpInfo, Option<Op>),
        ranks: Arc<[usize]>,
        (me, cells): (usize, Arc<Cells>),
        reduction: Reduction,
    ) -> Course {
        let plan = Plan::new(call, me, cells, reduction);
        let units: Vec<Way> = (0..plan.units()).map(|unit| Way::new(plan.steps(unit))).collect();
        let mut sums = smallvec![0; units.len().checked_sub(1).map_or(0, |last| plan.lane_of(last) + 1)];
        for (number, unit) in units.iter().enumerate() {
            sums[plan.lane_of(number)] += unit.steps.iter().filter(|step| step.then != Then::Nothing).count();
        }
        // Plain data in memory can always be written.
        let written = postcard::to_allocvec(&info).unwrap_or_default().into();
        let (op, dtype, hash) = (call.op.clone(), info.dtype.unwrap_or(DType::U8), agreement(&info));
        let hash = combine(hash, u64::from(meets.is_some()));
        Course { op, meets, info, plan, ranks, dtype, units, sums, hash, written }
    }

    /// Whether a call has this shape.
    pub(crate) fn is_for(&self, call: &Call, (info, meets): (&OpInfo, Option<&Op>)) -> bool {
        self.op == call.op && self.info == *info && self.meets.as_ref() == meets
    }

    /// The elements that this member of an uneven all-to-all sends to another one, and expects of it.
    fn uneven(&self, other: usize) -> Option<(usize, usize)> {
        match &self.meets {
            Some(Op::AllToAll { send_counts, recv_counts }) => Some((send_counts[other], recv_counts[other])),
            _ => self.plan.uneven(other),
        }
    }

    /// About how many messages it has.
    pub(crate) fn messages(&self) -> usize {
        let sends = |way: &Way| way.steps.iter().map(|step| step.sends.len()).sum::<usize>();
        self.units.iter().map(|way| way.awaited.len() + sends(way)).sum()
    }
}

impl Flight {
    pub(crate) fn new(
        key: Key,
        site: Site,
        course: Arc<Course>,
        call: Call,
        ring: Ring,
    ) -> Result<Flight, BufferError> {
        let input = call.input.map(|input| input.as_bytes().map(drop).map(|()| Arc::new(input))).transpose()?;
        let output = call.output.map(Ground::new).transpose()?;
        let unit = |way: &Way| Unit {
            at: 0,
            sent: false,
            arrived: Members::default(),
            missing: way.missing.clone(),
            parts: Vec::new(),
            joined: None,
        };
        let (units, open) = (course.units.iter().map(unit).collect(), course.plan.order().collect());
        let (told, heard, sums) = (Members::default(), Members::default(), course.sums.clone());
        Ok(Flight {
            key,
            site,
            course,
            input,
            output,
            ring,
            units,
            open,
            sums,
            summing: 0,
            told,
            heard,
            detached: false,
        })
    }

    /// The bytes that are sent; `None` while they are in use.
    fn bytes(&self, unit: usize, source: &Source) -> Option<Bytes> {
        let output = |range: &Range<usize>| match range.is_empty() {
            true => Some(Bytes::None),
            false => Some(Bytes::Claim(Used::new(Arc::new(self.output.as_ref()?.claim(range.clone())?), &self.ring))),
        };
        match (source, &self.input) {
            (Source::Nothing, _) => Some(Bytes::None),
            (Source::Input(range), _) if range.is_empty() => Some(Bytes::None),
            (Source::Input(range), Some(input)) => {
                Some(Bytes::Input(Used::new(input.clone(), &self.ring), range.start, range.end))
            }
            (Source::Input(range) | Source::Output(range), _) => output(range),
            (Source::Outputs(ranges), _) if ranges.len() == 1 => output(&ranges[0]),
            (Source::Outputs(ranges), _) => {
                let mut copy = Vec::new();
                for range in ranges {
                    copy.extend_from_slice(output(range)?.as_ref());
                }
                Some(Bytes::of(copy))
            }
            (Source::Sums, _) => self.units[unit].joined.as_ref().map(|(_, bytes)| bytes.clone()),
        }
    }

    /// Whether the library takes the sum.
    pub(crate) fn is_native(&self) -> bool {
        self.course.plan.native().is_some()
    }

    /// The sum that the library takes, if it does.
    pub(crate) fn native<T>(&self, world: u64, what: T) -> Option<Sum<T>> {
        let summed = self.course.plan.native()?;
        let into = self.output.as_ref()?.claim_all()?;
        let all = |input: &Arc<Buffer>| {
            Bytes::Input(Used::new(input.clone(), &self.ring), 0, input.count() * input.dtype().size())
        };
        let input = self.input.as_ref().filter(|_| summed.scatters).map(all);
        Some(Sum { group: (world, self.key.group), seq: self.key.seq, summed, input, into, what })
    }

    /// Starts the operation: what it sends first.
    pub(crate) fn begin(&mut self, scratch: &mut impl FnMut(usize) -> Option<Claim>) -> Messages {
        if let (Some((from, to)), Some(input), Some(output)) =
            (self.course.plan.copies(), &self.input, &mut self.output)
            && let Ok(input) = input.as_bytes()
        {
            output.write(to, &input[from]);
        }
        self.go_on(scratch)
    }

    /// Takes a message of another member. `scratch` gives memory for a part of a sum that is at another process.
    pub(crate) fn arrive(
        &mut self,
        number: usize,
        from: usize,
        body: Body,
        scratch: &mut impl FnMut(usize) -> Option<Claim>,
    ) -> Place {
        self.heard.insert(from);
        let course = self.course.clone();
        let is_late = !self.sums.is_empty() && course.plan.lane_of(number) >= self.summing + WINDOW;
        let Some((place, step, dest)) = self.awaits(&course, number, from) else { return Place::Wrong };
        let bytes = body.len();
        match dest {
            Dest::Nothing if bytes == 0 => {}
            Dest::Output(range) if bytes == range.len() => {
                let Some(output) = &mut self.output else { return Place::Wrong };
                match body.bytes() {
                    Some(bytes) if output.write(range.clone(), bytes) => {}
                    Some(_) => return Place::Later(body),
                    None => return output.claim(range.clone()).map_or(Place::Later(body), Place::Receive),
                }
            }
            Dest::Outputs(ranges) if bytes == ranges.iter().map(Range::len).sum::<usize>() => {
                let (Some(mut bytes), Some(output)) = (body.bytes(), &mut self.output) else { return Place::Wrong };
                for range in ranges {
                    let (own, rest) = bytes.split_at(range.len());
                    if !output.write(range.clone(), own) {
                        return Place::Later(body);
                    }
                    bytes = rest;
                }
            }
            Dest::Sums(nodes) if bytes == course.plan.bytes_of(number, nodes, course.dtype) => match body {
                Body::Far { .. } if is_late => return Place::Later(body),
                Body::Far { .. } => return scratch(bytes).map_or(Place::Wrong, Place::Receive),
                body => self.units[number].parts.push((step, nodes.clone(), body)),
            },
            _ => return Place::Wrong,
        }
        self.arrived(number, place, step);
        Place::Taken
    }

    /// What a unit awaits of a member, which sends at most one message, if that has not arrived: its place among all
    /// that is awaited, the step, and what to do with it.
    fn awaits<'a>(&self, course: &'a Course, number: usize, from: usize) -> Option<(usize, usize, &'a Dest)> {
        let way = course.units.get(number)?;
        let place = way.awaited.binary_search_by_key(&from, |(from, ..)| *from).ok()?;
        let (_, step, dest) = &way.awaited[place];
        (!self.units[number].arrived.contains(place)).then_some((place, *step, dest))
    }

    /// The bytes of a message have landed in the memory that [`arrive`](Self::arrive) gave for them.
    pub(crate) fn landed(&mut self, number: usize, from: usize, claim: Claim) {
        let course = self.course.clone();
        let Some((place, step, dest)) = self.awaits(&course, number, from) else { return };
        if let Dest::Sums(nodes) = dest {
            self.units[number].parts.push((
                step,
                nodes.clone(),
                Body::Near(Bytes::Claim(Used::new(Arc::new(claim), &Ring::default()))),
            ));
        }
        self.arrived(number, place, step);
    }

    fn arrived(&mut self, number: usize, place: usize, step: usize) {
        let unit = &mut self.units[number];
        unit.arrived.insert(place);
        unit.missing[step] -= 1;
    }

    /// Does what can be done now: sends, and takes sums.
    pub(crate) fn go_on(&mut self, scratch: &mut impl FnMut(usize) -> Option<Claim>) -> Messages {
        let (mut messages, course) = (SmallVec::new(), self.course.clone());
        let mut open = std::mem::take(&mut self.open);
        open.retain(|number| !self.step(&course, *number, &mut messages, scratch));
        self.open = open;
        while self.sums.get(self.summing) == Some(&0) {
            self.summing += 1;
        }
        messages
    }

    /// Takes the steps of a unit that can be taken. Whether it is over.
    fn step(
        &mut self,
        course: &Course,
        number: usize,
        messages: &mut Messages,
        scratch: &mut impl FnMut(usize) -> Option<Claim>,
    ) -> bool {
        while let Some(step) = course.units[number].steps.get(self.units[number].at) {
            let at = self.units[number].at;
            if !self.units[number].sent {
                let before = messages.len();
                let mut last: Option<(&Source, Bytes)> = None;
                for (to, source) in &step.sends {
                    // The same bytes for several members are one claim.
                    let bytes = match &last {
                        Some((before, bytes)) if *before == source => Some(bytes.clone()),
                        _ => self.bytes(number, source),
                    };
                    let Some(bytes) = bytes else {
                        messages.truncate(before);
                        return false;
                    };
                    if *source != Source::Nothing {
                        last = Some((source, bytes.clone()));
                    }
                    messages.push(Outgoing { unit: number, to: *to, bytes });
                }
                self.units[number].sent = true;
            }
            if self.units[number].missing[at] > 0 || !self.sum(course, number, scratch) {
                return false;
            }
            let unit = &mut self.units[number];
            (unit.at, unit.sent) = (at + 1, false);
        }
        let unit = &mut self.units[number];
        (unit.joined, unit.parts) = (None, Vec::new());
        true
    }

    /// Adds up what a unit has, if its step says so; false while memory is in use.
    fn sum(&mut self, course: &Course, number: usize, scratch: &mut impl FnMut(usize) -> Option<Claim>) -> bool {
        let (plan, dtype, unit) = (&course.plan, course.dtype, &self.units[number]);
        let (own, result) = match &course.units[number].steps[unit.at].then {
            Then::Nothing => return true,
            Then::Join { own, nodes } => (own, Err(nodes)),
            Then::Finish { own, into } => (own, Ok(into)),
        };
        let (Some(reduce), Some(output)) = (plan.reduce, &self.output) else { return true };
        // In place the result's memory has this member's part.
        let me = plan.me;
        let in_place = self.input.is_none() && result.is_ok() && unit.joined.is_none();
        let mine = match (&unit.joined, in_place) {
            (Some(_), _) | (None, true) => None,
            (None, false) => match self.bytes(number, &Source::Input(own.clone())) {
                Some(bytes) => Some(bytes),
                None => return false,
            },
        };
        let element = plan.element();
        let mut parts: Vec<Part<'_>> = Vec::new();
        let arrived = unit.parts.iter().filter(|(step, ..)| *step <= unit.at);
        let arrived = arrived.map(|(_, nodes, body)| (nodes, body.bytes().unwrap_or_default()));
        for (nodes, mut rest) in arrived.chain(unit.joined.iter().map(|(nodes, bytes)| (nodes, bytes.as_ref()))) {
            for node in nodes.iter() {
                let (bytes, others) = rest.split_at(own.len() / element * element_of(node, dtype));
                parts.push(Part { ranks: node.clone(), bytes: Some(bytes) });
                rest = others;
            }
        }
        if unit.joined.is_none() {
            parts.push(Part { ranks: me..me + 1, bytes: mine.as_ref().map(AsRef::as_ref) });
        }
        parts.sort_unstable_by_key(|part| part.ranks.start);
        let joined = match result {
            Ok(into) => {
                let Some(mut into) = output.claim(into.clone()) else { return false };
                reduce_parts(reduce, dtype, &parts, &mut into, true);
                None
            }
            Err(nodes) => {
                let Some(mut into) = scratch(plan.bytes_of(number, nodes, dtype)) else { return false };
                let (mut rest, mut parts) = (&mut *into, &*parts);
                for node in nodes.iter() {
                    let (sum, others) = rest.split_at_mut(own.len() / element * element_of(node, dtype));
                    let (of_node, more) = parts.split_at(parts.partition_point(|part| part.ranks.start < node.end));
                    match of_node {
                        [Part { bytes: Some(bytes), .. }] => sum.copy_from_slice(bytes),
                        _ => reduce_parts(reduce, dtype, of_node, sum, false),
                    }
                    (rest, parts) = (others, more);
                }
                Some((nodes.clone(), Bytes::Claim(Used::new(Arc::new(into), &self.ring))))
            }
        };
        let unit = &mut self.units[number];
        let at = unit.at;
        unit.parts.retain(|(step, ..)| *step > at);
        unit.joined = joined;
        self.sums[plan.lane_of(number)] -= 1;
        true
    }

    /// Whether everything has arrived and been sent, and its memory is free.
    pub(crate) fn is_done(&self) -> bool {
        self.open.is_empty()
            && self.output.as_ref().is_none_or(Ground::is_free)
            && self.input.as_ref().is_none_or(|input| Arc::strong_count(input) == 1)
    }

    /// The buffer that the member gets back from an operation that is done.
    pub(crate) fn into_result(self) -> Buffer {
        let buffer = match self.course.info.kind {
            OpKind::Send => self.input.and_then(Arc::into_inner),
            _ => self.output.and_then(Ground::into_buffer),
        };
        buffer.unwrap_or_else(Buffer::empty)
    }

    /// World ranks without which it cannot go on: those that have not come, else those whose bytes have not, else those
    /// that may not have taken this one's.
    pub(crate) fn lacks(&self) -> Vec<usize> {
        let mut late = BTreeSet::new();
        for &number in &self.open {
            let (way, arrived) = (&self.course.units[number], &self.units[number].arrived);
            // What a member awaits of itself, the library does.
            let (me, others) = (self.course.plan.me, way.awaited.iter().enumerate());
            let all = others.filter(|(place, (from, ..))| !arrived.contains(*place) && *from != me);
            late.extend(all.map(|(_, (from, ..))| *from));
        }
        let missing: BTreeSet<usize> = late.iter().copied().filter(|&from| !self.heard.contains(from)).collect();
        let members = [missing, late].into_iter().find(|members| !members.is_empty());
        members.unwrap_or_else(|| self.told.iter().collect()).into_iter().map(|it| self.course.ranks[it]).collect()
    }

    /// What this member tells another one of the operation, once.
    pub(crate) fn says(&mut self, to: usize) -> Option<Says> {
        let course = &*self.course;
        let expects = || course.uneven(to).map(|(_, expects)| expects);
        let says = || Says { hash: course.hash, expects: expects(), op: course.written.clone() };
        self.told.insert(to).then(says)
    }

    /// This member's and another one's operations, as far as they differ: from what that one says, and from its first
    /// message, of this many bytes.
    pub(crate) fn difference(&self, from: usize, theirs: &Says, bytes: usize) -> Option<(OpInfo, OpInfo)> {
        let Course { info, meets, plan, ranks, hash, .. } = &*self.course;
        if *hash != theirs.hash {
            // Another build would write otherwise; the handshake of a run tells it.
            let theirs = postcard::from_bytes(&theirs.op).unwrap_or_else(|_| info.clone());
            return Some((info.clone(), theirs));
        }
        let ((sends, expected), expects) = (self.course.uneven(from)?, theirs.expects?);
        let (me, them) = (self.site.world_rank, ranks[from]);
        let part = |elements, peer| OpInfo { elements, peer: Some(peer), ..info.clone() };
        if sends != expects {
            return Some((part(sends, Peer::To(them)), part(expects, Peer::From(me))));
        }
        if meets.is_some() {
            return None; // the other one finds what this one expects
        }
        let sent = bytes / plan.element();
        (sent != expected).then(|| (part(expected, Peer::From(them)), part(sent, Peer::To(me))))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashMap, VecDeque};

    use super::*;
    use meshwork_core::ReduceOp;
    use meshwork_core::comm::Caller;
    use meshwork_testkit::Rng;

    /// What members of a group in these processes get of their calls, and the bytes between processes. Messages arrive
    /// in any order, but for each sender and receiver in that of sending. `plan` has the processes that members know
    /// of.
    fn run(processes: &[usize], plan: &[usize], calls: Vec<Call>) -> (Vec<Buffer>, usize) {
        let cells = Arc::new(Cells::new(plan.iter().copied()));
        let (members, ranks): (usize, Arc<[usize]>) = (calls.len(), (0..calls.len()).collect());
        let key = Key { group: 0, message: None, seq: 0 };
        let flight = |(me, call): (usize, Call)| {
            call.check(me, members).unwrap();
            let info = call.info(&ranks);
            let site = Site { group: "world".into(), group_id: 0, world_rank: me, seq: 0, op: Some(info.clone()) };
            let course = Course::new(&call, (info, None), ranks.clone(), (me, cells.clone()), Reduction::Tree);
            Flight::new(key, site, Arc::new(course), call, Ring::default()).unwrap()
        };
        let mut flights: Vec<Flight> = calls.into_iter().enumerate().map(flight).collect();
        let mut scratch = |bytes| Ground::new(Buffer::zeros(DType::U8, bytes)).ok()?.claim_first(bytes);
        let mut ways: BTreeMap<(usize, usize), VecDeque<(usize, Body)>> = BTreeMap::new();
        let (mut far, mut tags, mut between, mut rng) = (HashMap::new(), 0, 0, Rng::new(members as u64));
        let (mut begun, mut idle) = (false, 0);
        // What one member has taken may free the memory of another one.
        while idle < 3 || !ways.values().all(VecDeque::is_empty) {
            idle += 1;
            for (me, flight) in flights.iter_mut().enumerate() {
                let sent = if begun { flight.go_on(&mut scratch) } else { flight.begin(&mut scratch) };
                for Outgoing { unit, to, bytes } in sent {
                    idle = 0;
                    let crosses = processes[me] != processes[to];
                    between += if crosses { bytes.as_ref().len() } else { 0 };
                    let body = match bytes.as_ref().len() {
                        ..=crate::block::EAGER => Body::Here(bytes.as_ref().into(), 0),
                        bytes if crosses => {
                            tags += 1;
                            Body::Far { process: processes[me], tag: tags, bytes }
                        }
                        _ => Body::Near(bytes.clone()),
                    };
                    if let Body::Far { tag, .. } = body {
                        far.insert(tag, bytes);
                    }
                    ways.entry((me, to)).or_default().push_back((unit, body));
                }
            }
            begun = true;
            for ((from, to), way) in &mut ways {
                if rng.below(3) == 0 {
                    continue;
                }
                let Some((unit, body)) = way.pop_front() else { continue };
                idle = 0;
                let tag = if let Body::Far { tag, .. } = body { tag } else { 0 };
                match flights[*to].arrive(unit, *from, body, &mut scratch) {
                    Place::Taken => {}
                    Place::Receive(mut claim) => {
                        claim.copy_from_slice(far.remove(&tag).unwrap().as_ref());
                        flights[*to].landed(unit, *from, claim);
                    }
                    Place::Later(body) => way.push_front((unit, body)),
                    Place::Wrong => panic!("{from} to {to}, unit {unit} of {:?}", flights[*to].course.info),
                }
            }
        }
        let ended = |flight: Flight| {
            assert!(flight.is_done(), "{:?}", flight.course.info);
            assert!(flight.lacks().len() < members);
            flight.into_result()
        };
        (flights.into_iter().map(ended).collect(), between)
    }

    fn elements(dtype: DType, member: usize, count: usize) -> Buffer {
        let mut rng = Rng::new((member * 1_000_003 + count) as u64);
        let values: Vec<f32> = (0..count).map(|_| rng.signed() * 10f32.powi(rng.below(5) as i32)).collect();
        match dtype {
            DType::F32 => Buffer::from_vec(values),
            _ => Buffer::from_vec(values.into_iter().map(meshwork_core::bf16::from_f32).collect()),
        }
    }

    fn bytes(buffer: &Buffer) -> &[u8] {
        buffer.as_bytes().unwrap()
    }

    /// The sum of all members' elements, as threads have it.
    fn sum(dtype: DType, members: usize, count: usize) -> Vec<u8> {
        let inputs: Vec<Buffer> = (0..members).map(|member| elements(dtype, member, count)).collect();
        let part = |member: usize| Part { ranks: member..member + 1, bytes: Some(bytes(&inputs[member])) };
        let mut sum = vec![0; count * dtype.size()];
        reduce_parts(ReduceOp::Sum, dtype, &(0..members).map(part).collect::<Vec<_>>(), &mut sum, true);
        sum
    }

    /// Every collective, of members that are in these processes.
    fn every_collective(processes: &[usize], dtype: DType, count: usize) {
        let n = processes.len();
        let zeros = |count| Some(Buffer::zeros(dtype, count));
        let own = |count: usize| move |member| Some(elements(dtype, member, count));
        let all = |call: &dyn Fn(usize) -> Call| run(processes, processes, (0..n).map(call).collect()).0;
        let what = format!("{processes:?}, {count} elements of {dtype}");

        let expected = sum(dtype, n, count);
        let reduced = all(&|member| match member % 2 {
            0 => Call::new(Op::AllReduce(ReduceOp::Sum), None, own(count)(member)),
            _ => Call::new(Op::AllReduce(ReduceOp::Sum), own(count)(member), zeros(count)),
        });
        assert!(reduced.iter().all(|sum| bytes(sum) == expected), "all_reduce, {what}");

        let expected = sum(dtype, n, n * count);
        let parts = all(&|member| Call::new(Op::ReduceScatter(ReduceOp::Sum), own(n * count)(member), zeros(count)));
        let parts: Vec<u8> = parts.iter().flat_map(|part| bytes(part).to_vec()).collect();
        assert!(parts == expected, "reduce_scatter, {what}");

        let expected: Vec<u8> = (0..n).flat_map(|member| bytes(&elements(dtype, member, count)).to_vec()).collect();
        let gathered = all(&|member| Call::new(Op::AllGather, own(count)(member), zeros(n * count)));
        assert!(gathered.iter().all(|all| bytes(all) == expected), "all_gather, {what}");

        for root in [0, n / 2, n - 1] {
            let sent = all(&|member| Call::new(Op::Broadcast { root }, None, own(count)(member)));
            let expected = elements(dtype, root, count);
            assert!(sent.iter().all(|it| bytes(it) == bytes(&expected)), "broadcast of {root}, {what}");
        }

        let part = |from: usize, to: usize| (from + 2 * to + count) % 5;
        let exchanged = all(&|member| {
            let send_counts: Vec<usize> = (0..n).map(|to| part(member, to)).collect();
            let recv_counts: Vec<usize> = (0..n).map(|from| part(from, member)).collect();
            let [sent, received] = [&send_counts, &recv_counts].map(|counts| counts.iter().sum());
            Call::new(Op::AllToAll { send_counts, recv_counts }, own(sent)(member), zeros(received))
        });
        for (to, received) in exchanged.iter().enumerate() {
            let of = |from: usize| {
                let [all, before] = [n, to].map(|end| (0..end).map(|to| part(from, to)).sum::<usize>() * dtype.size());
                bytes(&elements(dtype, from, all / dtype.size()))[before..][..part(from, to) * dtype.size()].to_vec()
            };
            assert_eq!(bytes(received), (0..n).flat_map(of).collect::<Vec<_>>(), "all_to_all, {what}");
        }
        all(&|_| Call::new(Op::Barrier, None, None));
    }

    /// Processes of equally many ranks, of unequal numbers, and ranks that are not neighbours: where subtrees of the
    /// tree lie inside a process, and where they do not.
    #[test]
    fn every_collective_has_the_bits_of_threads_wherever_members_are() {
        let placed: [&[usize]; 9] = [
            &[0],
            &[0, 1, 2],
            &[0, 0, 0, 0, 1, 1, 1, 1],
            &[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3],
            &[0, 1, 0, 1, 0, 1],
            &[2, 0, 0, 0, 0, 1, 1],
            &[0, 0, 0, 0],
            &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17],
            &[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5],
        ];
        for processes in placed {
            for (dtype, count) in [(DType::F32, 0), (DType::F32, 1), (DType::F32, 4999), (DType::Bf16, 8701)] {
                every_collective(processes, dtype, count);
            }
        }
        every_collective(&[0, 0, 1], DType::F32, 270_001); // several lanes
    }

    #[test]
    fn hashes_are_equal_where_operations_agree_and_nowhere_else() {
        let caller = |name: &str, about: &str| Some(Arc::new(Caller { name: name.into(), about: Some(about.into()) }));
        let mut infos = Vec::new();
        for kind in [OpKind::AllReduce, OpKind::AllToAll, OpKind::Broadcast, OpKind::Send, OpKind::Recv] {
            let info = |elements, caller| {
                let (reduce, dtype, peer, signature) = (None, Some(DType::F32), None, None);
                OpInfo { kind, reduce, dtype, elements, peer, signature, caller }
            };
            infos.extend([
                info(1, None),
                info(2, caller("a", "x")),
                info(2, caller("a", "y")),
                info(2, caller("b", "x")),
            ]);
            infos.push(OpInfo { dtype: None, ..info(1, None) });
            infos.push(OpInfo { dtype: Some(DType::Bf16), ..info(1, None) });
            infos.extend([ReduceOp::Sum, ReduceOp::Max].map(|it| OpInfo { reduce: Some(it), ..info(1, None) }));
            infos.extend([0, 1].map(|it| OpInfo { signature: Some(it), ..info(1, None) }));
            // Messages have peers of their own kind, which agreement does not look at.
            infos.extend([0, 1].map(|it| OpInfo { peer: Some(Peer::Root(it)), ..info(1, None) }));
        }
        for (a, b) in infos.iter().flat_map(|a| infos.iter().map(move |b| (a, b))) {
            // Two senders, or two receivers, never meet.
            if (a.kind, b.kind) != (OpKind::Send, OpKind::Send) && (a.kind, b.kind) != (OpKind::Recv, OpKind::Recv) {
                assert_eq!(agreement(a) == agreement(b), a.agrees(b), "{a} and {b}: {a:?} {b:?}");
            }
        }
    }

    /// Between two processes of four ranks, and four processes of three, whose subtrees do not lie inside: the bytes
    /// that travel, where ranks know of their processes and where each were a process of its own.
    #[test]
    fn what_ranks_of_a_process_have_in_common_leaves_it_once() {
        let count = 12_000;
        let between = |processes: &[usize], dtype: DType, op: Op| {
            let (n, full) = (processes.len(), |member| Some(elements(dtype, member, count)));
            let part = |member| Some(elements(dtype, member, count / n));
            let call = |member| match &op {
                Op::AllGather => Call::new(op.clone(), part(member), full(0)),
                Op::ReduceScatter(_) => Call::new(op.clone(), full(member), part(0)),
                _ => Call::new(op.clone(), None, full(member)),
            };
            let alone: Vec<usize> = (0..n).collect();
            [&*alone, processes].map(|plan| run(processes, plan, (0..n).map(call).collect()).1 / dtype.size())
        };
        let (sum, two) = (Op::AllReduce(ReduceOp::Sum), [0, 0, 0, 0, 1, 1, 1, 1]);
        let [before, after] = between(&two, DType::F32, sum.clone());
        assert_eq!((before, after), (8 * count, 2 * count));
        let [before, after] = between(&two, DType::F32, Op::ReduceScatter(ReduceOp::Sum));
        assert_eq!((before, after), (4 * count, count));
        let [before, after] = between(&two, DType::F32, Op::AllGather);
        assert_eq!((before, after), (4 * count, count));
        let [before, after] = between(&two, DType::F32, Op::Broadcast { root: 2 });
        assert_eq!((before, after), (4 * count, count));
        // Sums of 16-bit floats travel in f32: they are rounded once.
        let [before, after] = between(&two, DType::Bf16, sum.clone());
        assert_eq!((before, after), (8 * count, 3 * count));
        // A process of three ranks has two nodes of the tree: the sum of two ranks, and one.
        let four = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3];
        let [before, after] = between(&four, DType::F32, sum);
        assert_eq!((before, after), (18 * count, 9 * count));
    }
}
