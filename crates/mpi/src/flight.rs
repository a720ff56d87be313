//! An operation of one rank under way: what it has sent, what has arrived, and its memory.

use std::ops::Range;
use std::sync::Arc;

use meshwork_core::comm::thread::reduce_parts;
use meshwork_core::comm::{OpInfo, Peer, Site};
use meshwork_core::{Buffer, BufferError, Call, DType, OpKind};

use crate::ground::{Claim, Ground};
use crate::packet::{Body, Bytes, Info, Key};
use crate::plan::{Dest, Plan};

/// Lanes of a reduction whose parts may arrive at the same time: the others wait at their senders.
const WINDOW: usize = 4;

/// An operation under way.
pub(crate) struct Flight {
    pub(crate) key: Key,
    pub(crate) site: Site,
    pub(crate) info: OpInfo,
    pub(crate) plan: Plan,
    /// World ranks of the members.
    pub(crate) ranks: Arc<[usize]>,
    dtype: DType,
    input: Option<Arc<Buffer>>,
    output: Option<Ground>,
    lanes: Vec<Lane>,
    /// Lanes before this one have been added up.
    summed: usize,
    /// Messages that have not arrived, from each member.
    expected: Vec<usize>,
    heard: Vec<bool>,
    /// Whether nobody will wait for it.
    pub(crate) detached: bool,
}

#[derive(Default)]
struct Lane {
    /// The parts of a sum, by member.
    parts: Vec<Option<Part>>,
    /// Messages that have not arrived, in each stage.
    expected: [usize; 2],
    /// Whether the sum has been taken, if one is.
    summed: bool,
    /// Whether the messages of the second stage have been sent.
    passed: bool,
}

/// The bytes of one member's part of a sum.
pub(crate) enum Part {
    Body(Body),
    Landed(Claim),
}

impl Part {
    fn bytes(&self) -> &[u8] {
        match self {
            Part::Body(body) => body.bytes().unwrap_or_default(),
            Part::Landed(claim) => claim,
        }
    }
}

/// A message that is sent.
pub(crate) struct Outgoing {
    pub(crate) stage: usize,
    pub(crate) lane: usize,
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

impl Flight {
    pub(crate) fn new(
        key: Key,
        site: Site,
        info: OpInfo,
        ranks: Arc<[usize]>,
        me: usize,
        call: Call,
    ) -> Result<Flight, BufferError> {
        let plan = Plan::new(&call, me, ranks.len());
        let dtype = info.dtype.unwrap_or(DType::U8);
        let input = call.input.map(|input| input.as_bytes().map(drop).map(|()| Arc::new(input))).transpose()?;
        let output = call.output.map(Ground::new).transpose()?;
        let mut expected = vec![0; plan.members];
        let mut lanes = Vec::with_capacity(plan.lanes);
        for number in 0..plan.lanes {
            let mut lane = Lane { summed: plan.reduce.is_none(), ..Lane::default() };
            for (stage, count) in lane.expected.iter_mut().enumerate() {
                for from in plan.others().filter(|&from| plan.receives(stage, number, from).is_some()) {
                    *count += 1;
                    expected[from] += 1;
                }
            }
            if plan.reduce.is_some() {
                lane.parts.resize_with(plan.members, || None);
            }
            lanes.push(lane);
        }
        let heard = expected.iter().map(|&count| count == 0).collect();
        let (summed, detached) = (0, false);
        Ok(Flight { key, site, info, plan, ranks, dtype, input, output, lanes, summed, expected, heard, detached })
    }

    /// The bytes of a range that is sent in a stage; `None` while the range is in use.
    fn source(&self, stage: usize, range: Range<usize>) -> Option<Bytes> {
        match &self.input {
            _ if range.is_empty() => Some(Bytes::None),
            Some(input) if stage == 0 => Some(Bytes::Input(input.clone(), range.start, range.end)),
            _ => Some(Bytes::Claim(Arc::new(self.output.as_ref()?.claim(range)?))),
        }
    }

    /// The messages of a stage of a lane; `None` while its memory is in use.
    fn outgoing(&self, stage: usize, lane: usize) -> Option<Vec<Outgoing>> {
        let (mut messages, mut last): (Vec<Outgoing>, Option<(Range<usize>, Bytes)>) = (Vec::new(), None);
        for to in self.plan.others() {
            let Some(range) = self.plan.sends(stage, lane, to) else { continue };
            // The same bytes for several members are one claim.
            let bytes = match last {
                Some((before, bytes)) if before == range => bytes,
                _ => self.source(stage, range.clone())?,
            };
            last = Some((range, bytes.clone()));
            messages.push(Outgoing { stage, lane, to, bytes });
        }
        Some(messages)
    }

    /// Starts the operation: what it sends first.
    pub(crate) fn begin(&mut self) -> Vec<Outgoing> {
        if let (Some((from, to)), Some(input), Some(output)) = (self.plan.copies(), &self.input, &self.output)
            && let (Ok(input), Some(mut output)) = (input.as_bytes(), output.claim(to))
        {
            output.copy_from_slice(&input[from]);
        }
        // Nothing has claimed a part of the output yet, and the ranges of one stage do not overlap.
        (0..self.lanes.len()).filter_map(|lane| self.outgoing(0, lane)).flatten().collect()
    }

    /// Takes a message of another member. `scratch` gives memory for a part of a sum that is at another process.
    pub(crate) fn arrive(
        &mut self,
        stage: usize,
        lane: usize,
        from: usize,
        body: Body,
        scratch: impl FnOnce(usize) -> Option<Claim>,
    ) -> Place {
        self.heard[from] = true;
        let Some(dest) = (lane < self.lanes.len()).then(|| self.plan.receives(stage, lane, from)).flatten() else {
            return Place::Wrong;
        };
        match dest {
            Dest::Nothing if body.len() == 0 => {}
            Dest::Output(range) if body.len() == range.len() => {
                let Some(mut claim) = self.output.as_ref().and_then(|output| output.claim(range)) else {
                    return Place::Later(body);
                };
                match body.bytes() {
                    Some(bytes) => claim.copy_from_slice(bytes),
                    None => return Place::Receive(claim),
                }
            }
            Dest::Sum if self.plan.sums(lane).is_some_and(|(to, _)| to.len() == body.len()) => {
                if body.bytes().is_some() {
                    self.lanes[lane].parts[from] = Some(Part::Body(body));
                } else if lane >= self.summed + WINDOW {
                    return Place::Later(body);
                } else {
                    return scratch(body.len()).map_or(Place::Wrong, Place::Receive);
                }
            }
            _ => return Place::Wrong,
        }
        self.arrived(stage, lane, from);
        Place::Taken
    }

    /// The bytes of a message have landed in the memory that [`arrive`](Self::arrive) gave for them.
    pub(crate) fn landed(&mut self, stage: usize, lane: usize, from: usize, claim: Claim) {
        if self.plan.receives(stage, lane, from) == Some(Dest::Sum) {
            self.lanes[lane].parts[from] = Some(Part::Landed(claim));
        }
        self.arrived(stage, lane, from);
    }

    fn arrived(&mut self, stage: usize, lane: usize, from: usize) {
        self.expected[from] -= 1;
        self.lanes[lane].expected[stage] -= 1;
    }

    /// Does what can be done now: takes sums, and returns the messages of second stages.
    pub(crate) fn go_on(&mut self) -> Vec<Outgoing> {
        let mut messages = Vec::new();
        for lane in 0..self.lanes.len() {
            if self.lanes[lane].passed || self.lanes[lane].expected[0] > 0 {
                continue;
            }
            if !self.lanes[lane].summed && !self.sum(lane) {
                continue;
            }
            if let Some(next) = self.outgoing(1, lane) {
                self.lanes[lane].passed = true;
                messages.extend(next);
            }
        }
        while self.lanes.get(self.summed).is_some_and(|lane| lane.summed) {
            self.summed += 1;
        }
        messages
    }

    /// Adds up the parts of a lane; false while its memory is in use.
    fn sum(&mut self, lane: usize) -> bool {
        let (Some(reduce), Some((to, own)), Some(output)) = (self.plan.reduce, self.plan.sums(lane), &self.output)
        else {
            return true;
        };
        let Some(mut into) = output.claim(to) else { return false };
        let state = &mut self.lanes[lane];
        let own = self.input.as_ref().and_then(|input| input.as_bytes().ok()).map(|input| &input[own]);
        // Only this member has no part there.
        let parts: Vec<Option<&[u8]>> =
            state.parts.iter().map(|part| part.as_ref().map_or(own, |part| Some(part.bytes()))).collect();
        reduce_parts(reduce, self.dtype, &parts, &mut into);
        state.parts.clear();
        state.summed = true;
        true
    }

    /// Whether everything has arrived and been sent, and its memory is free.
    pub(crate) fn is_done(&self) -> bool {
        let done = |lane: &Lane| lane.passed && lane.expected == [0, 0];
        self.lanes.iter().all(done)
            && self.output.as_ref().is_none_or(Ground::is_free)
            && self.input.as_ref().is_none_or(|input| Arc::strong_count(input) == 1)
    }

    /// The buffer that the member gets back from an operation that is done.
    pub(crate) fn into_result(self) -> Buffer {
        let buffer = match self.info.kind {
            OpKind::Send => self.input.and_then(Arc::into_inner),
            _ => self.output.and_then(Ground::into_buffer),
        };
        buffer.unwrap_or_else(Buffer::empty)
    }

    /// World ranks without which it cannot go on: those that have not come, else those whose bytes have not, else those
    /// that may not have taken this one's.
    pub(crate) fn lacks(&self) -> Vec<usize> {
        let of = |which: &dyn Fn(usize) -> bool| -> Vec<usize> {
            self.plan.others().filter(|&member| which(member)).map(|member| self.ranks[member]).collect()
        };
        let missing = of(&|member| !self.heard[member]);
        if !missing.is_empty() {
            return missing;
        }
        let late = of(&|member| self.expected[member] > 0);
        if late.is_empty() { of(&|_| true) } else { late }
    }

    /// What this member tells another one of the operation.
    pub(crate) fn info_for(&self, to: usize) -> Info {
        let expects = self.plan.is_uneven().then(|| self.elements(self.plan.receives(0, 0, to)));
        Info { op: self.info.clone(), expects }
    }

    fn elements(&self, dest: Option<Dest>) -> usize {
        match dest {
            Some(Dest::Output(range)) => range.len() / self.plan.element(),
            _ => 0,
        }
    }

    /// This member's and another one's operations, as far as they differ: from what that one says, and from its first
    /// message, of this many bytes.
    pub(crate) fn difference(&self, from: usize, theirs: &Info, bytes: usize) -> Option<(OpInfo, OpInfo)> {
        if !self.info.agrees(&theirs.op) {
            return Some((self.info.clone(), theirs.op.clone()));
        }
        let expects = theirs.expects?;
        let (me, them) = (self.site.world_rank, self.ranks[from]);
        let part = |elements, peer| OpInfo { elements, peer: Some(peer), ..self.info.clone() };
        let sends = self.plan.sends(0, 0, from).map_or(0, |range| range.len() / self.plan.element());
        if sends != expects {
            return Some((part(sends, Peer::To(them)), part(expects, Peer::From(me))));
        }
        let (sent, expected) = (bytes / self.plan.element(), self.elements(self.plan.receives(0, 0, from)));
        (sent != expected).then(|| (part(expected, Peer::From(them)), part(sent, Peer::To(me))))
    }
}
