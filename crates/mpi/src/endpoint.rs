//! One rank's end of a world: its groups, its operations under way, its waits, and what it was told of faults.
//!
//! All of it is behind one lock, which the rank takes when it starts an operation or waits, and the thread of MPI while
//! the rank computes. The holder of the lock goes through what has arrived and does what can be done.
//!
//! More than 400 lines: everything that the one lock guards.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use meshwork_core::comm::{Activity, Ended, Fault, FaultKind, OpInfo, RankReport, Site};
use meshwork_core::hash::{combine, hash};
use meshwork_core::pool::yield_core;
use meshwork_core::{Buffer, Call, CommError, DType, Op};
use rustc_hash::FxHashMap;

use crate::cells::Cells;
use crate::flight::{Course, Flight, Messages, Outgoing, Place};
use crate::ground::{Claim, Ground};
use crate::judge::{Bench, SILENCE, To};
use crate::lookout::Ring;
use crate::packet::{Arrival, Body, Head, Judge, Key, Part, Tell, What};
use crate::port::{Hosts, Inbox, Landing, Port, Station};

/// How long a rank waits before it tells the judge.
const PATIENCE: Duration = Duration::from_millis(15);

/// How often a rank that waits tells the judge again, if nothing has changed.
const AGAIN: Duration = Duration::from_secs(1);

/// Blocks of memory kept for parts of sums.
const SCRATCH: usize = 32;

/// Courses kept for a group, and the most messages of one that is kept.
const COURSES: usize = 8;
const LARGEST_COURSE: usize = 256;

/// How long the ranks of a world wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// For a rank that makes no progress; `None`: as long as its process lives, which may write a large file.
    pub(crate) progress: Option<Duration>,
    /// For an answer of the rank that judges, which its process gives whatever the rank does.
    pub(crate) answer: Option<Duration>,
}

/// One rank's end of a world.
pub(crate) struct Endpoint {
    pub(crate) port: Arc<Port>,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) world: u64,
    pub(crate) rank: usize,
    pub(crate) name: Arc<str>,
    pub(crate) ranks: Arc<[usize]>,
    hosts: Hosts,
    /// Of all ranks, and of the two of a message.
    cells: [Arc<Cells>; 2],
    pub(crate) origin: Instant,
    patience: Patience,
    /// Grows as long as the rank makes progress.
    beats: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    groups: FxHashMap<u64, Counts>,
    flights: FxHashMap<Key, Flight>,
    /// Messages of operations that this rank has not started.
    early: FxHashMap<Key, Vec<Early>>,
    /// Messages that wait for memory, or for earlier lanes.
    later: Vec<Early>,
    landings: Landings,
    scratch: Vec<Ground>,
    /// The names of groups that were split.
    group_names: FxHashMap<u64, Arc<str>>,
    splits: FxHashMap<(u64, u64), Named>,
    /// The hashes of parts that others named before this rank came to the split.
    early_splits: FxHashMap<(u64, u64), Vec<(usize, u64)>>,
    waits: Vec<Wait>,
    waited: u64,
    last: Option<Site>,
    ended: Option<Activity>,
    forks: u64,
    /// The worlds beside this one that rank 0 has come to, to which it tells who has ended.
    forked: Vec<Arc<Endpoint>>,
    ends: BTreeMap<usize, (Activity, u64)>,
    fault: Option<(Arc<Fault>, Instant)>,
    over: Option<Option<Ended>>,
    bench: Option<Box<Bench>>,
    /// When this rank heard the judge last, and since when, and last, it has asked whether it is there.
    heard: Option<Instant>,
    asked: Option<(Instant, Instant)>,
    /// Whether this rank has found a fault, of which it will be told: until then no wait of it ends well.
    found: bool,
    /// Why ranks are lost.
    lost: BTreeMap<usize, String>,
}

/// The operation, unit and member of each large message on its way, and of each sum of the library, by number.
#[derive(Default)]
struct Landings {
    last: u64,
    expected: FxHashMap<u64, (Key, usize, usize)>,
}

impl Landings {
    /// The number of one more.
    fn expect(&mut self, place: (Key, usize, usize)) -> u64 {
        self.last += 1;
        self.expected.insert(self.last, place);
        self.last
    }
}

/// The part of a split that a rank named: its name and world ranks.
type Named = (String, Vec<usize>);

/// A message of an operation that has not started.
type Early = (Part, Body);

/// What this rank has started in a group.
#[derive(Default)]
struct Counts {
    /// Of the shapes that came last.
    courses: VecDeque<Arc<Course>>,
    collectives: u64,
    /// By sender and receiver, world ranks.
    messages: FxHashMap<(usize, usize), u64>,
    splits: u64,
}

/// A wait of this rank.
struct Wait {
    number: u64,
    /// The operation; `None` of a wait for the device.
    key: Option<Key>,
    site: Site,
    since: Instant,
    told: Option<(Instant, Vec<usize>)>,
}

/// A group of which this rank is a member.
#[derive(Clone, Debug)]
pub(crate) struct GroupOf {
    pub(crate) id: u64,
    pub(crate) name: Arc<str>,
    /// World ranks.
    pub(crate) ranks: Arc<[usize]>,
    pub(crate) member: usize,
    cells: Arc<Cells>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code under the lock should panic; if it does, errors still reach every rank.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of the group of all ranks.
pub(crate) const WORLD: u64 = 0;

impl Endpoint {
    /// A rank comes to a world.
    pub(crate) fn enter(
        port: &Arc<Port>,
        hosts: &Hosts,
        world: u64,
        name: &str,
        rank: usize,
        patience: Patience,
        origin: Instant,
    ) -> Arc<Endpoint> {
        let all = Cells::new((0..hosts.ranks).map(|rank| hosts.process_of(rank)));
        let endpoint = Arc::new(Endpoint {
            port: port.clone(),
            inbox: Arc::new(Inbox::new(&port.lookout)),
            world,
            rank,
            name: name.into(),
            ranks: (0..hosts.ranks).collect(),
            hosts: hosts.clone(),
            cells: [Arc::new(all), Arc::new(Cells::new([0, 1]))],
            origin,
            patience,
            beats: AtomicU64::new(0),
            state: Mutex::default(),
        });
        port.enter(endpoint.clone());
        endpoint
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn beat(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed);
    }

    /// The group of all ranks.
    pub(crate) fn world_group(&self) -> GroupOf {
        let (name, ranks, cells) = (self.name.clone(), self.ranks.clone(), self.cells[0].clone());
        GroupOf { id: WORLD, name, ranks, member: self.rank, cells }
    }

    fn send(&self, to: usize, what: What) {
        let head = Head { world: self.world, from: self.rank, to, what };
        self.port.tell(self.hosts.process_of(to), head);
    }

    fn tell(&self, state: &State, told: Tell) {
        self.send(state.judge(self), What::Tell(told));
    }

    /// Tells a fault that this rank has found.
    fn found(&self, state: &mut State, kind: FaultKind, site: Option<Site>) {
        state.found = true;
        self.tell(state, Tell::Found { kind, site });
    }

    /// Starts an operation of a group.
    pub(crate) fn start(&self, group: &GroupOf, call: Call) -> Result<(Key, Site), CommError> {
        let info = call.info(&group.ranks);
        self.begin(group, call, (info, None))
    }

    /// Starts an operation of a group in which members only meet.
    pub(crate) fn meet(&self, group: &GroupOf, call: &Call) -> Result<(Key, Site), CommError> {
        let what = (call.info(&group.ranks), Some(call.op.clone()));
        self.begin(group, call.without_elements(group.ranks.len()), what)
    }

    fn begin(
        &self,
        group: &GroupOf,
        call: Call,
        (info, meets): (OpInfo, Option<Op>),
    ) -> Result<(Key, Site), CommError> {
        self.beat();
        let mut state = self.lock();
        let counts = state.groups.entry(group.id).or_default();
        let next = |count: &mut u64| std::mem::replace(count, *count + 1);
        let message = match call.op {
            Op::Send { to, .. } => Some(((self.rank, group.ranks[to]), 0)),
            Op::Recv { from, .. } => Some(((group.ranks[from], self.rank), 1)),
            _ => None,
        };
        let course = match counts.courses.iter().find(|course| course.is_for(&call, (&info, meets.as_ref()))) {
            Some(course) => course.clone(),
            None => {
                let (ranks, place): (Arc<[usize]>, _) = match message {
                    Some(((from, to), me)) => ([from, to].into(), (me, self.cells[1].clone())),
                    None => (group.ranks.clone(), (group.member, group.cells.clone())),
                };
                let course = Arc::new(Course::new(&call, (info.clone(), meets), ranks, place, self.port.reduction));
                if course.messages() <= LARGEST_COURSE {
                    counts.courses.truncate(COURSES - 1);
                    counts.courses.push_front(course.clone());
                }
                course
            }
        };
        let seq = next(message.map_or(&mut counts.collectives, |(pair, _)| counts.messages.entry(pair).or_default()));
        let key = Key { group: group.id, message: message.map(|(pair, _)| pair), seq };
        let site = Site { group: group.name.clone(), group_id: group.id, world_rank: self.rank, seq, op: Some(info) };
        state.last = Some(site.clone());
        if let Some((fault, _)) = &state.fault {
            return Err(CommError::Stopped { site, fault: fault.clone() });
        }
        let mut flight = Flight::new(key, site.clone(), course, call, Ring::of(&self.inbox.bell))?;
        if flight.is_native() {
            self.port.announce((self.world, group.id), seq);
        }
        let first = flight.begin(&mut |bytes| scratch_of(&mut state.scratch, bytes));
        self.ship(&mut state.landings, &mut flight, first);
        state.flights.insert(key, flight);
        self.inbox.bell.fly(state.flights.len());
        if !state.early.is_empty() {
            for (part, body) in state.early.remove(&key).unwrap_or_default() {
                self.part(&mut state, part, body);
            }
        }
        self.advance_in(&mut state);
        Ok((key, site))
    }

    /// Sends messages of an operation. The first one to each member says what it is. What a member sends to itself, the
    /// library adds up.
    fn ship(&self, landings: &mut Landings, flight: &mut Flight, messages: Messages) {
        for Outgoing { unit, to, bytes } in messages {
            if flight.course.ranks[to] == self.rank {
                let what = Landing::Rank(self.inbox.clone(), landings.expect((flight.key, unit, to)));
                if let Some(sum) = flight.native(self.world, what) {
                    let processes = flight.course.ranks.iter().map(|&rank| self.hosts.process_of(rank));
                    self.port.sum(sum, || processes.collect());
                }
                continue;
            }
            let says = flight.says(to);
            let (world, from, to, key) = (self.world, self.rank, flight.course.ranks[to], flight.key);
            self.port.send(self.hosts.process_of(to), Part { world, from, to, key, unit, says }, &bytes);
        }
    }

    /// Goes through what has arrived, and does what can be done. Whether anything has arrived.
    fn advance_in(&self, state: &mut State) -> bool {
        let mut any = false;
        loop {
            let Some(arrival) = self.inbox.next() else { break };
            any = true;
            match arrival {
                Arrival::Part(_, body) if state.fault.is_some() => self.port.discard(body),
                Arrival::Part(part, body) => self.part(state, part, body),
                Arrival::Told(head) => self.told(state, head.from, head.what),
                Arrival::Landed(number, claim) => self.landed(state, number, claim),
                Arrival::Failed(number, why) => self.failed(state, number, why),
                Arrival::Lost(process, why) => self.lost(state, process, &why),
            }
        }
        self.go_on(state);
        any
    }

    fn told(&self, state: &mut State, from: usize, what: What) {
        match what {
            What::Split { parent, seq, part } => match state.splits.contains_key(&(parent, seq)) {
                true => self.compare_parts(state, (parent, seq), (from, part)),
                false => state.early_splits.entry((parent, seq)).or_default().push((from, part)),
            },
            What::Named { parent, seq, name, ranks } => {
                if let Some(own) = state.splits.get(&(parent, seq)).cloned() {
                    self.parts_differ(state, (parent, seq), own, (from, (name, ranks)));
                }
            }
            What::Tell(told) => {
                self.hear_of_forks(state, from, &told);
                if state.bench.is_none() {
                    state.bench = Some(Box::new(Bench::new(self.ranks.len(), self.patience.progress)));
                }
                self.with_bench(state, |bench, say| bench.hear(from, told, say));
            }
            What::Judge(said) => self.hear_judge(state, from, said),
        }
    }

    /// A message of an operation.
    fn part(&self, state: &mut State, mut part: Part, body: Body) {
        let State { flights, scratch, later, landings, early, .. } = state;
        let Some(flight) = flights.get_mut(&part.key) else {
            early.entry(part.key).or_default().push((part, body));
            return;
        };
        let (from, key, unit, says) = (part.from, part.key, part.unit, part.says.take());
        let Some(member) = flight.course.ranks.iter().position(|&rank| rank == from) else { return };
        if let Some((mine, theirs)) = says.and_then(|theirs| flight.difference(member, &theirs, body.len())) {
            let (site, kind) = (Some(flight.site.clone()), disagreement((from, theirs), (self.rank, mine)));
            self.port.discard(body);
            return self.found(state, kind, site);
        }
        let bytes = body.len();
        let far = match &body {
            Body::Far { process, tag, .. } => Some((*process, *tag)),
            _ => None,
        };
        match flight.arrive(unit, member, body, &mut |bytes| scratch_of(scratch, bytes)) {
            Place::Taken => {}
            Place::Later(body) => later.push((part, body)),
            Place::Receive(claim) => {
                let Some((process, tag)) = far else { return };
                let what = Landing::Rank(self.inbox.clone(), landings.expect((key, unit, member)));
                self.port.receive(process, tag, claim, what);
            }
            Place::Wrong => {
                // What members say of themselves agrees, so this is a fault of their programs' builds, or of the wire.
                let mine = flight.course.info.clone();
                let theirs = OpInfo { elements: bytes, dtype: Some(DType::U8), ..mine.clone() };
                let (site, kind) = (Some(flight.site.clone()), disagreement((from, theirs), (self.rank, mine)));
                self.found(state, kind, site);
            }
        }
    }

    fn landed(&self, state: &mut State, number: u64, claim: Claim) {
        let Some((key, unit, member)) = state.landings.expected.remove(&number) else { return };
        if let Some(flight) = state.flights.get_mut(&key) {
            flight.landed(unit, member, claim);
        }
    }

    /// The library has failed in a sum, which this rank then cannot take part in.
    fn failed(&self, state: &mut State, number: u64, why: String) {
        let Some((key, ..)) = state.landings.expected.remove(&number) else { return };
        let site = state.flights.get(&key).map(|flight| flight.site.clone());
        self.found(state, FaultKind::Gone { rank: self.rank, how: Activity::Lost(why) }, site);
    }

    /// Does what the operations under way can do now.
    fn go_on(&self, state: &mut State) {
        for (part, body) in std::mem::take(&mut state.later) {
            match state.flights.contains_key(&part.key) {
                true => self.part(state, part, body),
                false => self.port.discard(body),
            }
        }
        let State { flights, scratch, landings, .. } = state;
        let mut is_over = false;
        for flight in flights.values_mut() {
            let messages = flight.go_on(&mut |bytes| scratch_of(scratch, bytes));
            self.ship(landings, flight, messages);
            is_over |= flight.detached && flight.is_done();
        }
        if is_over {
            flights.retain(|_, flight| !(flight.detached && flight.is_done()));
            self.inbox.bell.fly(flights.len());
        }
    }

    fn lost(&self, state: &mut State, process: usize, why: &str) {
        let ranks: Vec<usize> =
            self.ranks.iter().copied().filter(|&rank| self.hosts.process_of(rank) == process).collect();
        for &rank in &ranks {
            state.lost.insert(rank, why.to_owned());
        }
        for (&rank, why) in state.lost.clone().iter() {
            self.tell(state, Tell::Missing { rank, how: Activity::Lost(why.clone()) });
        }
        // Another rank may judge now, which knows nothing yet.
        if let Some((how, forks)) = state.ended.clone().map(|how| (how, state.forks)) {
            self.tell(state, Tell::Ends { how, forks });
        }
        state.waits.iter_mut().for_each(|wait| wait.told = None);
    }

    /// Has the judge of this rank, if it judges, do something, and says to all what it says.
    fn with_bench(&self, state: &mut State, act: impl FnOnce(&mut Bench, &mut Vec<(To, Judge)>)) {
        let Some(bench) = &mut state.bench else { return };
        let mut say = Vec::new();
        act(bench, &mut say);
        for (to, said) in say {
            let ranks = match to {
                To::All => 0..self.ranks.len(),
                To::Rank(rank) => rank..rank + 1,
            };
            for rank in ranks.filter(|rank| !state.lost.contains_key(rank)) {
                self.send(rank, What::Judge(said.clone()));
            }
        }
    }

    fn hear_judge(&self, state: &mut State, from: usize, said: Judge) {
        (state.heard, state.asked) = (Some(Instant::now()), None);
        let told = match said {
            // It hears of the fault that this rank has found, and not of an effect first.
            Judge::Ask { .. } if state.found => return,
            Judge::Hears => return,
            Judge::Ask { asked, key } => Tell::Answer {
                asked,
                posted: state.has_started(key),
                lacks: state.flights.get(&key).map_or_else(Vec::new, Flight::lacks),
                waits: state.waits.last().map(|wait| wait.number),
                ended: state.ended.is_some(),
                beats: self.beats.load(Ordering::Relaxed),
            },
            Judge::Report => Tell::Report(state.report(self.rank)),
            Judge::Stopped(fault) => {
                if state.fault.is_none() {
                    state.fault = Some((fault, Instant::now()));
                    self.stop(state);
                }
                return;
            }
            Judge::Over(over) => {
                let ended =
                    |how: &Activity| !matches!(how, Activity::Computing | Activity::Waiting | Activity::Lost(_));
                if over.as_ref().is_some_and(|over| !over.ranks.iter().all(ended)) {
                    self.port.abandon();
                }
                let ranks = over.iter().flat_map(|over| over.ranks.iter().enumerate());
                let silent = ranks.filter(|(_, how)| matches!(how, Activity::Lost(_)));
                self.port.give_up(silent.map(|(rank, _)| self.hosts.process_of(rank)));
                state.over.get_or_insert(over);
                self.stop(state);
                self.port.leave((self.world, self.rank));
                return;
            }
        };
        self.send(from, What::Tell(told));
    }

    /// Drops what is under way. Memory that messages still use lives until they are over.
    fn stop(&self, state: &mut State) {
        state.flights.clear();
        self.inbox.bell.fly(0);
        let early = std::mem::take(&mut state.early).into_values().flatten();
        early.chain(std::mem::take(&mut state.later)).for_each(|(_, body)| self.port.discard(body));
        state.scratch.clear();
    }

    /// Blocks until an operation is over. Meanwhile this thread moves the messages of the process.
    pub(crate) fn wait(&self, key: Key, site: &Site) -> Result<Buffer, CommError> {
        if let Some(result) = self.finished(&mut self.lock(), key, site) {
            return result;
        }
        let bell = &self.inbox.bell;
        let result = yield_core(|| {
            let (_waiting, mut pause, mut number) = (bell.enter(), self.port.lookout.pause(), None);
            loop {
                let heard = bell.heard();
                let mut any = self.port.poll();
                let mut state = self.lock();
                any |= self.advance_in(&mut state);
                if let Some(result) = self.finished(&mut state, key, site) {
                    self.end_wait(&mut state, number);
                    return result;
                }
                if any {
                    pause.reset();
                }
                // Short waits are nobody's business.
                if pause.is_long() {
                    self.with_bench(&mut state, |bench, say| bench.tick(say));
                    let number = *number.get_or_insert_with(|| state.begin_wait(Some(key), site));
                    self.tell_wait(&mut state, number);
                }
                drop(state);
                self.port.rest(bell, heard, &mut pause);
            }
        });
        self.beat();
        result
    }

    /// Blocks until the device has `done` work in which all ranks take part, or a fault stops the world. Meanwhile this
    /// thread moves the messages of the process.
    pub(crate) fn attend(&self, site: &Site, done: &mut dyn FnMut() -> bool) -> Result<(), Arc<Fault>> {
        if done() {
            return Ok(());
        }
        let (_waiting, mut pause, mut number) = (self.inbox.bell.enter(), self.port.lookout.pause_at_device(), None);
        let result = loop {
            let mut any = self.port.poll();
            let mut state = self.lock();
            any |= self.advance_in(&mut state);
            if let Some((fault, _)) = &state.fault {
                break Err(fault.clone());
            }
            if pause.is_long() {
                self.with_bench(&mut state, |bench, say| bench.tick(say));
                let number = *number.get_or_insert_with(|| state.begin_wait(None, site));
                self.tell_wait(&mut state, number);
            }
            drop(state);
            if done() {
                break Ok(());
            }
            if any {
                pause.reset();
            }
            pause.rest();
        };
        self.end_wait(&mut self.lock(), number);
        self.beat();
        result
    }

    /// A wait is over, of which the judge may know.
    fn end_wait(&self, state: &mut State, number: Option<u64>) {
        if let Some(at) = state.waits.iter().position(|wait| Some(wait.number) == number)
            && let Wait { told: Some(_), number, .. } = state.waits.remove(at)
        {
            self.tell(state, Tell::Goes { number });
        }
    }

    /// The result of an operation that is over; of an unfinished one the fault, if there is one.
    fn finished(&self, state: &mut State, key: Key, site: &Site) -> Option<Result<Buffer, CommError>> {
        if !state.found && state.flights.get(&key).is_some_and(Flight::is_done) {
            let flight = state.flights.remove(&key);
            self.inbox.bell.fly(state.flights.len());
            return flight.map(|flight| Ok(flight.into_result()));
        }
        let stopped = |fault: &Arc<Fault>| CommError::Stopped { site: site.clone(), fault: fault.clone() };
        if let Some((fault, _)) = &state.fault {
            return Some(Err(stopped(fault)));
        }
        if state.flights.contains_key(&key) {
            return None;
        }
        // The world is over, though this rank has not ended: others had no more patience with it.
        let kind = FaultKind::Gone { rank: self.rank, how: Activity::Computing };
        Some(Err(stopped(&Arc::new(Fault { kind, site: Some(site.clone()), ranks: Vec::new() }))))
    }

    /// Tells the judge of a wait that has lasted.
    fn tell_wait(&self, state: &mut State, number: u64) {
        let Some(at) = state.waits.iter().position(|wait| wait.number == number) else { return };
        let wait = &state.waits[at];
        let now = Instant::now();
        let due = wait.told.as_ref().map_or(wait.since + PATIENCE, |(told, _)| *told + PATIENCE);
        if now < due {
            return;
        }
        self.mind_judge(state);
        let Some(wait) = state.waits.get(at) else { return };
        let lacks = match wait.key {
            Some(key) => state.flights.get(&key).map(Flight::lacks),
            None => Some(Vec::new()),
        };
        let Some(lacks) = lacks else { return };
        if wait.told.as_ref().is_some_and(|(told, before)| *before == lacks && now < *told + AGAIN) {
            return;
        }
        let since_millis = now.duration_since(wait.since).as_millis() as u64;
        let (site, lacked) = (wait.site.clone(), lacks.clone());
        let told = match wait.key {
            Some(key) => Tell::Waits { number, since_millis, key, site, lacks: lacked },
            None => Tell::Attends { number, site },
        };
        self.tell(state, told);
        state.waits[at].told = Some((now, lacks));
    }

    /// Asks the judge from time to time whether it is there. One that does not answer for the timeout is lost, and the
    /// next rank judges.
    fn mind_judge(&self, state: &mut State) {
        let Some(timeout) = self.patience.answer.map(|timeout| timeout.max(SILENCE)) else { return };
        let now = Instant::now();
        let judge = state.judge(self);
        if judge == self.rank {
            return;
        }
        let often = timeout / 4;
        // A rank that got no core had no chance to hear the answer: that time does not count.
        if let Some((first, last)) = &mut state.asked
            && now.duration_since(*last) > 2 * often
        {
            *first = (*first + (now.duration_since(*last) - often)).min(now);
            *last = now - often;
        }
        match state.asked {
            Some((first, _)) if now.duration_since(first) >= timeout => {
                state.asked = None;
                self.port.abandon();
                self.lost(state, self.hosts.process_of(judge), "its process does not answer");
            }
            Some((_, last)) if now.duration_since(last) < often => {}
            None if state.heard.is_some_and(|heard| now.duration_since(heard) < often) => {}
            asked => {
                state.asked = Some((asked.map_or(now, |(first, _)| first), now));
                self.tell(state, Tell::Asks);
            }
        }
    }

    /// Whether a wait for an operation would return at once.
    pub(crate) fn is_finished(&self, key: Key) -> bool {
        if self.port.poll() {
            self.port.lookout.call_if_unattended();
        }
        let mut state = self.lock();
        self.advance_in(&mut state);
        state.flights.get(&key).is_none_or(Flight::is_done)
    }

    /// Nobody will wait for an operation.
    pub(crate) fn detach(&self, key: Key) {
        if let Some(flight) = self.lock().flights.get_mut(&key) {
            flight.detached = true;
        }
    }

    /// Names the part of a group that this rank is in: world ranks. It does not wait for others; who names another part
    /// finds it when it hears of this one.
    pub(crate) fn split(&self, parent: &GroupOf, name: &str, ranks: Vec<usize>) -> Result<GroupOf, CommError> {
        self.beat();
        let mut state = self.lock();
        let counts = state.groups.entry(parent.id).or_default();
        let seq = counts.splits;
        counts.splits += 1;
        if let Some((fault, _)) = &state.fault {
            let site = self.split_site(&parent.name, parent.id, seq);
            return Err(CommError::Stopped { site, fault: fault.clone() });
        }
        let part = (name.to_owned(), ranks);
        state.splits.insert((parent.id, seq), part.clone());
        state.group_names.insert(parent.id, parent.name.clone());
        // Each tells the first of its part, and the first tells all others.
        let leader = part.1[0];
        let told: Vec<usize> = if leader == self.rank { part.1[1..].to_vec() } else { vec![leader] };
        for rank in told {
            self.send(rank, What::Split { parent: parent.id, seq, part: hash_of(&part) });
        }
        for theirs in state.early_splits.remove(&(parent.id, seq)).unwrap_or_default() {
            self.compare_parts(&mut state, (parent.id, seq), theirs);
        }
        let (name, ranks) = part;
        let bytes: Vec<u8> = ranks.iter().flat_map(|rank| rank.to_le_bytes()).collect();
        let id = combine(combine(parent.id, seq), hash(&bytes));
        let member = ranks.iter().position(|&rank| rank == self.rank).unwrap_or_default();
        let cells = Arc::new(Cells::new(ranks.iter().map(|&rank| self.hosts.process_of(rank))));
        Ok(GroupOf { id, name: name.into(), ranks: ranks.into(), member, cells })
    }

    fn split_site(&self, group: &Arc<str>, group_id: u64, seq: u64) -> Site {
        Site { group: group.clone(), group_id, world_rank: self.rank, seq, op: None }
    }

    /// Tells a rank that named another part of a split what this one named: that rank tells the judge.
    fn compare_parts(&self, state: &mut State, (parent, seq): (u64, u64), (from, theirs): (usize, u64)) {
        let Some(own) = state.splits.get(&(parent, seq)) else { return };
        if hash_of(own) != theirs {
            let (name, ranks) = own.clone();
            state.found = true;
            self.send(from, What::Named { parent, seq, name, ranks });
        }
    }

    fn parts_differ(&self, state: &mut State, (parent, seq): (u64, u64), own: Named, (from, theirs): (usize, Named)) {
        let (mine, theirs) = ((self.rank, own.0, own.1), (from, theirs.0, theirs.1));
        let (first, second) = if mine.0 < theirs.0 { (mine, theirs) } else { (theirs, mine) };
        let group = state.group_names.get(&parent).cloned().unwrap_or_else(|| self.name.clone());
        let site = Some(self.split_site(&group, parent, seq));
        self.found(state, FaultKind::SplitDisagreement { first, second }, site);
    }

    /// Another world of the same ranks.
    pub(crate) fn fork(self: &Arc<Self>, name: &str) -> Arc<Endpoint> {
        self.beat();
        let mut state = self.lock();
        let number = state.forks;
        state.forks += 1;
        let fork = self.forked(&mut state, number, name);
        if self.rank != 0 {
            self.send(0, What::Tell(Tell::Forks { number, name: name.to_owned() }));
        }
        fork
    }

    /// This rank's end of a fork. On rank 0 it hears who has ended without coming there.
    fn forked(&self, state: &mut State, number: u64, name: &str) -> Arc<Endpoint> {
        let world = combine(combine(self.world, number), hash(b"fork"));
        let patience = Patience { progress: None, ..self.patience };
        let fork = Endpoint::enter(&self.port, &self.hosts, world, name, self.rank, patience, self.origin);
        if self.rank == 0 {
            for (&rank, (how, forks)) in &state.ends {
                if *forks <= number {
                    tell_end(&fork, rank, how);
                }
            }
            state.forked.push(fork.clone());
        }
        fork
    }

    /// Rank 0 passes on to the forks who has ended without coming there, and comes to a fork that others make after it
    /// has ended.
    fn hear_of_forks(&self, state: &mut State, from: usize, told: &Tell) {
        match told {
            Tell::Ends { how, forks } => {
                state.ends.insert(from, (how.clone(), *forks));
                for fork in state.forked.iter().skip(*forks as usize) {
                    tell_end(fork, from, how);
                }
            }
            Tell::Forks { number, name } if state.ended.is_some() => {
                while state.forked.len() as u64 <= *number {
                    let next = state.forked.len() as u64;
                    self.forked(state, next, name);
                }
            }
            _ => {}
        }
    }

    /// This rank ends; only its first end counts.
    pub(crate) fn end(&self, how: Activity) {
        let mut state = self.lock();
        if state.ended.is_none() {
            state.ended = Some(how.clone());
            let forks = state.forks;
            self.tell(&state, Tell::Ends { how, forks });
        }
    }

    /// Waits until all ranks have ended, and after a fault at most for the timeout: how they did.
    pub(crate) fn wait_for_ends(&self) -> Ended {
        let bell = &self.inbox.bell;
        let (_waiting, begun, mut pause) = (bell.enter(), Instant::now(), self.port.lookout.pause());
        loop {
            let heard = bell.heard();
            let any = self.port.poll();
            let mut state = self.lock();
            if self.advance_in(&mut state) || any {
                pause.reset();
            }
            self.with_bench(&mut state, |bench, say| bench.tick(say));
            if begun.elapsed() >= PATIENCE && state.over.is_none() {
                self.mind_judge(&mut state);
            }
            let patience = self.patience.progress.unwrap_or(Duration::MAX).max(SILENCE).saturating_add(2 * AGAIN);
            let gave_up = state.fault.as_ref().is_some_and(|(_, at)| begun.max(*at).elapsed() >= patience);
            match &state.over {
                Some(Some(ended)) => return ended.clone(),
                Some(None) => {
                    return Ended { ranks: vec![Activity::Returned; self.ranks.len()], ..Ended::default() };
                }
                None if gave_up => {
                    self.port.abandon();
                    return state.as_far_as_known();
                }
                None => {}
            }
            drop(state);
            self.port.rest(bell, heard, &mut pause);
        }
    }
}

impl Station for Endpoint {
    fn place(&self) -> (u64, usize) {
        (self.world, self.rank)
    }

    fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    fn advance(&self) -> bool {
        if self.inbox.bell.is_waiting() {
            return false;
        }
        let mut state = self.lock();
        let any = self.advance_in(&mut state);
        self.with_bench(&mut state, |bench, say| bench.tick(say));
        any
    }

    fn is_over(&self) -> bool {
        self.lock().over.is_some()
    }
}

/// Tells the judge of a fork, which is this rank's end of it, how a rank ended that did not come there.
fn tell_end(fork: &Endpoint, rank: usize, how: &Activity) {
    let what = What::Tell(Tell::Missing { rank, how: how.clone() });
    let head = Head { world: fork.world, from: fork.rank, to: fork.rank, what };
    fork.inbox.put(Arrival::Told(Box::new(head)));
}

fn hash_of((name, ranks): &Named) -> u64 {
    let bytes: Vec<u8> = ranks.iter().flat_map(|rank| rank.to_le_bytes()).collect();
    combine(hash(name.as_bytes()), hash(&bytes))
}

fn disagreement(a: (usize, OpInfo), b: (usize, OpInfo)) -> FaultKind {
    let (first, second) = if a.0 < b.0 { (a, b) } else { (b, a) };
    FaultKind::Disagreement { first, second }
}

/// Memory for a part of a sum, of the blocks that are free.
fn scratch_of(blocks: &mut Vec<Ground>, bytes: usize) -> Option<Claim> {
    if let Some(claim) = blocks.iter().filter(|block| block.is_free()).find_map(|block| block.claim_first(bytes)) {
        return Some(claim);
    }
    if blocks.len() >= SCRATCH {
        blocks.retain(|block| !block.is_free());
    }
    // Fresh memory has no other owner.
    let block = Ground::new(Buffer::zeros(DType::U8, bytes)).ok()?;
    let claim = block.claim_first(bytes);
    blocks.push(block);
    claim
}

impl State {
    /// The rank that judges, as far as `here` knows.
    fn judge(&self, here: &Endpoint) -> usize {
        (0..here.ranks.len()).find(|rank| !self.lost.contains_key(rank)).unwrap_or(here.rank)
    }

    /// The number of a wait that begins.
    fn begin_wait(&mut self, key: Option<Key>, site: &Site) -> u64 {
        self.waited += 1;
        self.waits.push(Wait { number: self.waited, key, site: site.clone(), since: Instant::now(), told: None });
        self.waited
    }

    /// Whether this rank has started an operation.
    fn has_started(&self, key: Key) -> bool {
        let Some(counts) = self.groups.get(&key.group) else { return false };
        let started = match key.message {
            Some(pair) => counts.messages.get(&pair).copied().unwrap_or_default(),
            None => counts.collectives,
        };
        started > key.seq
    }

    fn report(&self, rank: usize) -> RankReport {
        let waiting = self.waits.last();
        let activity = match (&self.ended, waiting) {
            (Some(how), _) => how.clone(),
            (None, Some(_)) => Activity::Waiting,
            (None, None) => Activity::Computing,
        };
        RankReport { rank, activity, site: waiting.map(|wait| wait.site.clone()).or_else(|| self.last.clone()) }
    }

    /// How ranks ended, if the judge says nothing any more.
    fn as_far_as_known(&self) -> Ended {
        let Some((fault, _)) = &self.fault else { return Ended::default() };
        let ranks = fault.ranks.iter().map(|report| report.activity.clone()).collect();
        Ended { first: Some((fault.kind.culprit(), fault.headline())), fault: Some(fault.clone()), ranks }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of world rank {} of {}", self.name, self.rank, self.ranks.len())
    }
}
