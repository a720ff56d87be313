//! The rank that judges: it finds the first fault of a world and tells it to all.
//!
//! Messages of operations go straight between their members, and a rank that finds another one in a different operation
//! tells the judge. Everything else is found from waits: a rank that has waited for a while tells the judge for whom.
//! What it knows of others may be old, because messages are under way. So the judge asks the ranks that seem to be
//! missed whether they have started that operation, and what they do now. Then
//!
//! - a rank that has ended without it, as it says when it has ended, is **gone**;
//! - ranks in a circle, each in a wait that has gone on since it was told, and none with the operation that the one
//!   before it waits for, are in a **deadlock**;
//! - a rank at the end of a chain of waits that makes no progress, or does not answer, is **late** after the timeout. A
//!   rank that waits says so again and again: the judge forgets a wait of which it hears no more.
//!
//! A rank that waits for its device attends to work in which all ranks take part, such as collectives of devices.
//! Others see it as one that computes. But it needs their processes, so the judge asks all ranks whether they are
//! there: one that has failed, or is lost, is gone; one that does not answer for the timeout is late.
//!
//! A world whose ranks do not wait tells its judge nothing. The judge is rank 0, or the first rank whose process lives.
//!
//! More than 400 lines: every judgement and what it rests on, with the cases that once went wrong as tests.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use meshwork_core::comm::{Activity, Ended, Fault, FaultKind, RankReport, Site};

use crate::packet::{Judge, Key, Tell};

/// How often the judge looks at waits again, and asks again.
const LOOKS: [Duration; 2] = [Duration::from_millis(5), Duration::from_secs(1)];

/// How long a process may say nothing before others give it up, however short the timeout: on a busy machine it may get
/// no core. After a fault ranks may take as long to say what they do, and to end.
pub(crate) const SILENCE: Duration = Duration::from_secs(2);

/// A wait, as its rank told it.
struct Wait {
    number: u64,
    since: Instant,
    heard: Instant,
    key: Key,
    site: Site,
    lacks: BTreeSet<usize>,
}

/// A rank's wait for its device.
struct Attends {
    number: u64,
    heard: Instant,
    site: Site,
}

/// That a rank, in a wait, lacks another one.
type Edge = (usize, u64, usize);

/// What a rank answered about an edge that leads to it, when it had not started the operation.
struct Confirmed {
    /// The wait that it was in.
    waits: Option<u64>,
    /// Whether it had ended, so that it never starts the operation. Before its end it may yet start it and send what
    /// others need, which may come to them later than its end comes to the judge.
    ended: bool,
}

/// A rank at the end of a chain of waits: its beats, since when they are the same, and when it answered last. Only time
/// in which it answers, and the judge asks, counts as no progress.
struct Still {
    beats: u64,
    since: Instant,
    heard: Instant,
}

impl Still {
    fn new(now: Instant) -> Still {
        Still { beats: u64::MAX, since: now, heard: now }
    }

    /// Takes an answer, of which there is one in `often`.
    fn hear(&mut self, beats: u64, now: Instant, often: Duration) {
        let silent = now.duration_since(self.heard);
        self.since = if beats == self.beats { self.since + lacked(silent, often) } else { now };
        (self.beats, self.heard) = (beats, now);
    }

    /// The judge got no core for so long.
    fn excuse(&mut self, lacked: Duration, now: Instant) {
        self.since = (self.since + lacked).min(now);
        self.heard = (self.heard + lacked).min(now);
    }

    /// Whether it made no progress for the timeout while it answered, or answers no more.
    fn is_late(&self, now: Instant, timeout: Duration, often: Duration) -> bool {
        let silent = now.duration_since(self.heard);
        let still = now.duration_since(self.since).saturating_sub(lacked(silent, often));
        still >= timeout || silent >= timeout.max(SILENCE)
    }
}

/// The part of a silence in which a process or the judge had no core: what is longer than between two questions.
fn lacked(silent: Duration, often: Duration) -> Duration {
    if silent > 2 * often { silent - often } else { Duration::ZERO }
}

/// A fault that is being written down.
struct Found {
    kind: FaultKind,
    site: Option<Site>,
    at: Instant,
    reports: Vec<Option<RankReport>>,
}

/// The judge of a world.
pub(crate) struct Bench {
    timeout: Option<Duration>,
    waits: BTreeMap<usize, Wait>,
    confirmed: HashMap<Edge, Confirmed>,
    asked: HashMap<u64, Edge>,
    asked_at: HashMap<Edge, Instant>,
    questions: u64,
    /// By rank.
    still: HashMap<usize, Still>,
    attends: BTreeMap<usize, Attends>,
    /// When ranks were heard last, while one attends to its device.
    alive: BTreeMap<usize, Instant>,
    ended: Vec<Option<Activity>>,
    /// Ranks that do not answer.
    missing: BTreeSet<usize>,
    first: Option<(usize, String)>,
    found: Option<Found>,
    fault: Option<(Arc<Fault>, Instant)>,
    /// When the first rank ended.
    ending: Option<Instant>,
    over: Option<Option<Ended>>,
    looked: Instant,
}

/// To whom the judge says something.
pub(crate) enum To {
    All,
    Rank(usize),
}

impl Bench {
    pub(crate) fn new(ranks: usize, timeout: Option<Duration>) -> Bench {
        Bench {
            timeout,
            waits: BTreeMap::new(),
            confirmed: HashMap::new(),
            asked: HashMap::new(),
            asked_at: HashMap::new(),
            questions: 0,
            still: HashMap::new(),
            attends: BTreeMap::new(),
            alive: BTreeMap::new(),
            ended: vec![None; ranks],
            missing: BTreeSet::new(),
            first: None,
            found: None,
            fault: None,
            ending: None,
            over: None,
            looked: Instant::now(),
        }
    }

    /// Hears a rank.
    pub(crate) fn hear(&mut self, from: usize, told: Tell, say: &mut Vec<(To, Judge)>) {
        if let Some(heard) = self.alive.get_mut(&from) {
            *heard = Instant::now();
        }
        match told {
            Tell::Found { kind, site } => self.stop(kind, site, say),
            Tell::Waits { number, since_millis, key, site, lacks } => {
                let since = Instant::now().checked_sub(Duration::from_millis(since_millis));
                let since = since.unwrap_or_else(Instant::now);
                let heard = Instant::now();
                let wait = Wait { number, since, heard, key, site, lacks: lacks.into_iter().collect() };
                self.waits.insert(from, wait);
                self.compare(from, say);
                self.look(say);
            }
            Tell::Goes { number } => {
                if self.waits.get(&from).is_some_and(|wait| wait.number <= number) {
                    self.waits.remove(&from);
                }
                if self.attends.get(&from).is_some_and(|wait| wait.number <= number) {
                    self.attends.remove(&from);
                }
            }
            Tell::Attends { number, site } => {
                self.attends.insert(from, Attends { number, heard: Instant::now(), site });
            }
            Tell::Ends { how, .. } => self.end(from, how, say),
            Tell::Answer { asked, posted, lacks, waits, ended, beats } => {
                let often = self.often();
                if let Some(still) = self.still.get_mut(&from) {
                    still.hear(beats, Instant::now(), often);
                }
                let Some(edge) = self.asked.remove(&asked) else { return };
                if posted {
                    // It waits for those that this rank lacks: not all members of an operation meet.
                    let wait = self.waits.get_mut(&edge.0).filter(|wait| wait.number == edge.1);
                    wait.into_iter().for_each(|wait| {
                        wait.lacks.remove(&edge.2);
                        wait.lacks.extend(lacks.iter().filter(|&&lacked| lacked != edge.0));
                    });
                } else {
                    self.confirmed.insert(edge, Confirmed { waits, ended });
                }
                self.look(say);
            }
            Tell::Report(report) => {
                if let Some(found) = &mut self.found {
                    let rank = report.rank;
                    found.reports[rank] = Some(report);
                }
                self.write_down(say);
            }
            Tell::Asks => say.push((To::Rank(from), Judge::Hears)),
            Tell::Forks { .. } => {} // its endpoint has seen to that
            Tell::Missing { rank, how } => {
                self.missing.insert(rank);
                self.end(rank, how, say);
            }
        }
    }

    /// Looks after what needs no message.
    pub(crate) fn tick(&mut self, say: &mut Vec<(To, Judge)>) {
        let (often, now) = (self.often(), Instant::now());
        let gap = now.duration_since(self.looked);
        if gap < often {
            return;
        }
        self.looked = now;
        // A judge that got no core had no chance to hear answers, and ends: that time makes nobody late.
        let lacked = lacked(gap, often);
        self.still.values_mut().for_each(|still| still.excuse(lacked, now));
        let heard = self.waits.values_mut().map(|wait| &mut wait.heard);
        let heard = heard.chain(self.attends.values_mut().map(|wait| &mut wait.heard)).chain(self.alive.values_mut());
        heard.for_each(|at| *at = (*at + lacked).min(now));
        let ends = self.fault.as_mut().map(|(_, at)| at).into_iter().chain(&mut self.ending);
        ends.for_each(|at| *at = (*at + lacked).min(now));
        self.write_down(say);
        self.look_at_processes(say);
        self.look(say);
        self.finish(say);
    }

    /// Looks for a rank whose process is not there, as long as one waits for its device.
    fn look_at_processes(&mut self, say: &mut Vec<(To, Judge)>) {
        self.attends.retain(|_, wait| wait.heard.elapsed() < SILENCE);
        if self.is_stopped() || self.attends.is_empty() {
            return self.alive.clear();
        }
        let now = Instant::now();
        for rank in 0..self.ended.len() {
            let Some((&waiting, wait)) = self.attends.iter().find(|(waiting, _)| **waiting != rank) else { continue };
            match &self.ended[rank] {
                Some(how @ (Activity::Failed(_) | Activity::Panicked(_) | Activity::Lost(_))) => {
                    let (kind, site) = (FaultKind::Gone { rank, how: how.clone() }, wait.site.clone());
                    return self.stop(kind, Some(site), say);
                }
                Some(_) => _ = self.alive.remove(&rank), // its device does what it has queued
                None => {
                    let silent = now.duration_since(*self.alive.entry(rank).or_insert(now));
                    if let Some(after) = self.timeout.filter(|timeout| silent >= (*timeout).max(SILENCE)) {
                        let (chain, site) = (vec![waiting, rank], wait.site.clone());
                        return self.stop(FaultKind::Timeout { rank, after, chain }, Some(site), say);
                    }
                    // A question of no edge: the answer alone counts.
                    let key = Key { group: wait.site.group_id, message: None, seq: wait.site.seq };
                    say.push((To::Rank(rank), Judge::Ask { asked: 0, key }));
                }
            }
        }
    }

    /// Whether some rank may be missing for which others attend to their devices.
    fn lacks_a_process(&self) -> bool {
        let often = self.often();
        self.alive.values().any(|heard| heard.elapsed() > 3 * often)
    }

    /// How often it looks and asks.
    fn often(&self) -> Duration {
        self.timeout.map_or(LOOKS[1], |timeout| (timeout / 16).clamp(LOOKS[0], LOOKS[1]))
    }

    fn is_stopped(&self) -> bool {
        self.found.is_some() || self.fault.is_some()
    }

    /// Two ranks that wait at the same place for different operations.
    fn compare(&mut self, rank: usize, say: &mut Vec<(To, Judge)>) {
        let Some(wait) = self.waits.get(&rank) else { return };
        let other = self.waits.iter().find_map(|(other, theirs)| {
            let (mine, theirs) =
                (wait.site.op.as_ref()?, theirs.site.op.as_ref().filter(|_| theirs.site.is_at(&wait.site))?);
            (!mine.agrees(theirs)).then(|| ((*other, theirs.clone()), (rank, mine.clone())))
        });
        if let Some((a, b)) = other {
            let (first, second) = if a.0 < b.0 { (a, b) } else { (b, a) };
            let site = Some(wait.site.clone());
            self.stop(FaultKind::Disagreement { first, second }, site, say);
        }
    }

    /// Asks a rank about an edge that leads to it, unless it was asked a short time ago.
    fn ask(&mut self, edge: Edge, say: &mut Vec<(To, Judge)>) {
        let Some(key) = self.waits.get(&edge.0).filter(|wait| wait.number == edge.1).map(|wait| wait.key) else {
            return;
        };
        let now = Instant::now();
        let again = self.timeout.map_or(LOOKS[1], |timeout| (timeout / 16).clamp(LOOKS[0], LOOKS[1] / 4));
        if self.asked_at.get(&edge).is_some_and(|asked| now.duration_since(*asked) < again) {
            return;
        }
        self.asked_at.insert(edge, now);
        self.questions += 1;
        self.asked.insert(self.questions, edge);
        say.push((To::Rank(edge.2), Judge::Ask { asked: self.questions, key }));
    }

    /// Looks for a rank that is gone, a circle, or a rank that is late.
    fn look(&mut self, say: &mut Vec<(To, Judge)>) {
        if self.is_stopped() || self.waits.is_empty() {
            self.still.clear();
            return;
        }
        self.waits.retain(|_, wait| wait.heard.elapsed() < SILENCE);
        let current = |waits: &BTreeMap<usize, Wait>, edge: &Edge| {
            waits.get(&edge.0).is_some_and(|wait| wait.number == edge.1 && wait.lacks.contains(&edge.2))
        };
        let waits = &self.waits;
        self.confirmed.retain(|edge, _| current(waits, edge));
        self.asked_at.retain(|edge, _| current(waits, edge));
        self.asked.retain(|_, edge| current(waits, edge));
        let edges: Vec<Edge> = self
            .waits
            .iter()
            .flat_map(|(&rank, wait)| wait.lacks.iter().map(move |&lacked| (rank, wait.number, lacked)))
            .collect();
        for edge in edges {
            if self.ended[edge.2].is_none() {
                continue;
            }
            let missing = self.missing.contains(&edge.2);
            if missing || self.confirmed.get(&edge).is_some_and(|it| it.ended) {
                let how = self.ended[edge.2].clone().unwrap_or(Activity::Left);
                let site = self.waits.get(&edge.0).map(|wait| wait.site.clone());
                return self.stop(FaultKind::Gone { rank: edge.2, how }, site, say);
            }
            self.ask(edge, say);
        }
        if let Some(cycle) = self.cycle() {
            let next = |at: usize| cycle[(at + 1) % cycle.len()];
            let edges: Vec<Edge> =
                cycle.iter().enumerate().map(|(at, rank)| (*rank, self.waits[rank].number, next(at))).collect();
            let holds = |edge: &Edge| {
                self.confirmed.get(edge).is_some_and(|it| it.waits == self.waits.get(&edge.2).map(|wait| wait.number))
            };
            let open: Vec<Edge> = edges.into_iter().filter(|edge| !holds(edge)).collect();
            if open.is_empty() {
                let site = self.waits.get(&cycle[0]).map(|wait| wait.site.clone());
                return self.stop(FaultKind::Deadlock { cycle }, site, say);
            }
            open.into_iter().for_each(|edge| self.ask(edge, say));
        }
        let Some(timeout) = self.timeout else { return };
        let (now, often) = (Instant::now(), self.often());
        let chains: Vec<Vec<usize>> = self.waits.keys().flat_map(|&rank| self.chains(rank)).collect();
        // What a rank said when others waited for it before tells nothing of the time between.
        let last: BTreeSet<usize> = chains.iter().filter_map(|chain| chain.last().copied()).collect();
        self.still.retain(|rank, _| last.contains(rank));
        for chain in chains {
            let [.., before, last] = chain[..] else { continue };
            if self.ended[last].is_some() {
                continue;
            }
            let Some(number) = self.waits.get(&before).map(|wait| wait.number) else { continue };
            let late = self.still.entry(last).or_insert_with(|| Still::new(now)).is_late(now, timeout, often);
            self.ask((before, number, last), say);
            if self.attends.contains_key(&last) && self.lacks_a_process() {
                continue; // its device waits for another one
            }
            let waits = self.waits.get(&chain[0]).is_some_and(|wait| now.duration_since(wait.since) >= timeout);
            if waits && late {
                let site = self.waits.get(&chain[0]).map(|wait| wait.site.clone());
                return self.stop(FaultKind::Timeout { rank: last, after: timeout, chain }, site, say);
            }
        }
    }

    /// The waiting ranks that a waiting rank lacks.
    fn next(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        self.waits.get(&rank).into_iter().flat_map(|wait| wait.lacks.iter().copied())
    }

    /// A circle of waits, which begins with its lowest rank.
    fn cycle(&self) -> Option<Vec<usize>> {
        // Walks depth first; `done` ranks lead to no circle.
        let mut done = BTreeSet::new();
        for &start in self.waits.keys() {
            let mut path: Vec<(usize, Vec<usize>)> = vec![(start, self.next(start).collect())];
            while let Some((rank, next)) = path.last_mut() {
                let rank = *rank;
                match next.pop() {
                    None => {
                        done.insert(rank);
                        path.pop();
                    }
                    Some(next) if done.contains(&next) || !self.waits.contains_key(&next) => {}
                    Some(next) => {
                        if let Some(at) = path.iter().position(|(rank, _)| *rank == next) {
                            let mut cycle: Vec<usize> = path[at..].iter().map(|(rank, _)| *rank).collect();
                            let lowest =
                                cycle.iter().enumerate().min_by_key(|(_, rank)| **rank).map_or(0, |(at, _)| at);
                            cycle.rotate_left(lowest);
                            return Some(cycle);
                        }
                        path.push((next, self.next(next).collect()));
                    }
                }
            }
        }
        None
    }

    /// For each rank that does not wait, at the end of waits that begin at `rank`: the chain.
    fn chains(&self, rank: usize) -> Vec<Vec<usize>> {
        let (mut seen, mut open, mut chains) = (BTreeSet::from([rank]), vec![vec![rank]], Vec::new());
        while let Some(chain) = open.pop() {
            let Some(&last) = chain.last() else { continue };
            if !self.waits.contains_key(&last) {
                chains.push(chain);
                continue;
            }
            for next in self.next(last).filter(|&next| seen.insert(next)) {
                open.push(chain.iter().copied().chain([next]).collect());
            }
        }
        chains
    }

    fn end(&mut self, rank: usize, how: Activity, say: &mut Vec<(To, Judge)>) {
        if let Some(over) = self.over.clone() {
            say.push((To::Rank(rank), Judge::Over(over))); // it comes after all
            return;
        }
        if self.ended[rank].is_some() {
            return;
        }
        self.ended[rank] = Some(how.clone());
        self.ending.get_or_insert_with(Instant::now);
        self.waits.remove(&rank);
        self.attends.remove(&rank);
        // What it has answered before is old: it is asked again at once.
        self.asked_at.retain(|edge, _| edge.2 != rank);
        if !self.is_stopped() {
            match &how {
                Activity::Panicked(message) => {
                    let kind = FaultKind::Panicked { rank, message: message.clone() };
                    self.stop(kind, None, say);
                }
                Activity::Failed(_) | Activity::Lost(_) if self.first.is_none() => {
                    self.first = Some((rank, how.failure(rank)));
                }
                _ => {}
            }
        }
        self.look(say);
        self.write_down(say);
        self.finish(say);
    }

    /// Records the first fault, and asks all ranks what they do.
    fn stop(&mut self, kind: FaultKind, site: Option<Site>, say: &mut Vec<(To, Judge)>) {
        if self.is_stopped() {
            return;
        }
        let reports = vec![None; self.ended.len()];
        self.found = Some(Found { kind, site, at: Instant::now(), reports });
        say.push((To::All, Judge::Report));
    }

    /// Tells the fault, once all ranks have said what they do, or do not answer.
    fn write_down(&mut self, say: &mut Vec<(To, Judge)>) {
        let missing = &self.missing;
        let is_complete = |found: &Found| {
            let told = |(rank, report): (usize, &Option<RankReport>)| report.is_some() || missing.contains(&rank);
            found.reports.iter().enumerate().all(told) || found.at.elapsed() >= SILENCE
        };
        let Some(Found { kind, site, reports, .. }) = self.found.take_if(|found| is_complete(found)) else { return };
        let silent = |rank: usize| {
            let ended = self.ended[rank].clone();
            ended.unwrap_or_else(|| Activity::Lost("its process does not answer".to_owned()))
        };
        let report = |(rank, report): (usize, Option<RankReport>)| {
            report.unwrap_or_else(|| RankReport { rank, activity: silent(rank), site: None })
        };
        let ranks = reports.into_iter().enumerate().map(report).collect();
        let fault = Arc::new(Fault { kind, site, ranks });
        self.first.get_or_insert_with(|| (fault.kind.culprit(), fault.headline()));
        self.fault = Some((fault.clone(), Instant::now()));
        say.push((To::All, Judge::Stopped(fault)));
        self.finish(say);
    }

    /// Ends the world when all ranks have ended, or have had the time to.
    fn finish(&mut self, say: &mut Vec<(To, Judge)>) {
        if self.over.is_some() || self.found.is_some() {
            return;
        }
        let all = self.ended.iter().all(Option::is_some);
        let silent = |rank: usize| {
            let report = self.fault.as_ref().map(|(fault, _)| &fault.ranks[rank].activity);
            matches!(report, Some(Activity::Lost(_)))
        };
        // One that did not say what it does need not be waited for longer than it takes to get a core.
        let answer = self.ended.iter().enumerate().any(|(rank, how)| how.is_none() && !silent(rank));
        let progress = self.timeout.map_or(Duration::MAX, |timeout| timeout.max(SILENCE));
        let patience = if answer { progress } else { SILENCE };
        // A rank that has ended waits no longer for others that were told to end.
        let waits = self.fault.as_ref().zip(self.ending).map(|((_, at), ending)| ending.max(*at).elapsed());
        let late = waits.is_some_and(|waits| waits >= patience);
        if !(all || late) {
            return;
        }
        let fault = self.fault.as_ref().map(|(fault, _)| fault.clone());
        let activity = |(rank, how): (usize, &Option<Activity>)| {
            let then = || fault.as_ref()?.ranks.get(rank).map(|report| report.activity.clone());
            how.clone().or_else(then).unwrap_or(Activity::Computing)
        };
        let ranks: Vec<Activity> = self.ended.iter().enumerate().map(activity).collect();
        let well = fault.is_none() && self.first.is_none() && ranks.iter().all(|how| *how == Activity::Returned);
        let over = (!well).then(|| Ended { first: self.first.clone(), fault, ranks });
        self.over = Some(over.clone());
        say.push((To::All, Judge::Over(over)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OP: Key = Key { group: 0, message: None, seq: 0 };

    fn hear(bench: &mut Bench, from: usize, told: Tell) -> Vec<(To, Judge)> {
        let mut say = Vec::new();
        bench.hear(from, told, &mut say);
        say
    }

    /// Rank 0 waits in its first operation for rank 1.
    fn waits(bench: &mut Bench) -> Vec<(To, Judge)> {
        let site = Site { group: "world".into(), group_id: 0, world_rank: 0, seq: 0, op: None };
        hear(bench, 0, Tell::Waits { number: 1, since_millis: 20, key: OP, site, lacks: vec![1] })
    }

    /// The question to rank 1 that the judge asks, and nothing else.
    #[track_caller]
    fn question(say: &[(To, Judge)]) -> u64 {
        match say {
            [(To::Rank(1), Judge::Ask { asked, key })] if *key == OP => *asked,
            _ => panic!("{:?}", say.iter().map(|(_, said)| said).collect::<Vec<_>>()),
        }
    }

    fn answer(asked: u64, posted: bool, ended: bool, beats: u64) -> Tell {
        Tell::Answer { asked, posted, lacks: Vec::new(), waits: None, ended, beats }
    }

    fn stops(say: &[(To, Judge)]) -> bool {
        say.iter().any(|(_, said)| matches!(said, Judge::Report))
    }

    /// Rank 1 is asked before it comes to a barrier. Then it passes the barrier and ends, and the judge hears of its
    /// end before rank 0 has its message.
    #[test]
    fn a_rank_whose_last_message_is_under_way_when_it_ends_is_not_gone() {
        let mut bench = Bench::new(2, Some(Duration::from_secs(600)));
        let asked = question(&waits(&mut bench));
        assert!(!stops(&hear(&mut bench, 1, answer(asked, false, false, 3))));
        let asked = question(&hear(&mut bench, 1, Tell::Ends { how: Activity::Returned, forks: 0 }));
        assert!(!stops(&hear(&mut bench, 1, answer(asked, true, true, 4))));
        hear(&mut bench, 0, Tell::Goes { number: 1 });
        let over = hear(&mut bench, 0, Tell::Ends { how: Activity::Returned, forks: 0 });
        assert!(matches!(over[..], [(To::All, Judge::Over(None))]), "all is well");
    }

    /// Two ranks wait for each other's messages when the link between them goes down: they looked like a circle to the
    /// judge, of which it never heard more, and the ranks on its side waited for ever.
    #[test]
    fn a_rank_that_waited_when_its_link_went_down_is_late() {
        let second = Duration::from_secs(1);
        let mut bench = Bench::new(2, Some(second));
        let site = Site { group: "world".into(), group_id: 0, world_rank: 1, seq: 0, op: None };
        hear(&mut bench, 1, Tell::Waits { number: 1, since_millis: 20, key: OP, site, lacks: vec![0] });
        waits(&mut bench);
        let mut later = |change: &dyn Fn(&mut Bench)| {
            change(&mut bench);
            bench.looked -= second / 8;
            let mut say = Vec::new();
            bench.tick(&mut say);
            stops(&say)
        };
        assert!(!later(&|bench| bench.waits.get_mut(&1).unwrap().heard -= 2 * SILENCE));
        assert!(later(&|bench| {
            bench.still.get_mut(&1).unwrap().heard -= 2 * SILENCE;
            bench.waits.get_mut(&0).unwrap().since -= 2 * second;
        }));
    }

    /// The timeout is a second, in which the judge looks sixteen times.
    #[test]
    fn the_time_before_a_rank_is_waited_for_and_in_which_the_judge_stood_still_makes_it_not_late() {
        let second = Duration::from_secs(1);
        let mut bench = Bench::new(2, Some(second));
        let asked = question(&waits(&mut bench));
        hear(&mut bench, 1, answer(asked, false, false, 3));
        hear(&mut bench, 0, Tell::Goes { number: 1 });
        bench.looked -= second / 8;
        bench.tick(&mut Vec::new());
        assert!(bench.still.is_empty(), "nobody waits for it");
        // The wait is old when the judge hears of it.
        let site = Site { group: "world".into(), group_id: 0, world_rank: 0, seq: 1, op: None };
        let key = Key { seq: 1, ..OP };
        let told = Tell::Waits { number: 2, since_millis: 2000, key, site, lacks: vec![1] };
        assert!(!stops(&hear(&mut bench, 0, told)));
        // Then the judge gets no core.
        assert!(!stops(&after(&mut bench, 2 * second, 2 * second)));
    }

    /// Lets time pass, in which the judge looked last so long ago, and has it look.
    fn after(bench: &mut Bench, time: Duration, looked: Duration) -> Vec<(To, Judge)> {
        for still in bench.still.values_mut() {
            (still.since, still.heard) = (still.since - time, still.heard - time);
        }
        bench.fault.iter_mut().for_each(|(_, at)| *at -= time);
        bench.ending.iter_mut().for_each(|at| *at -= time);
        bench.looked -= looked;
        bench.asked_at.clear();
        let mut say = Vec::new();
        bench.tick(&mut say);
        say
    }

    /// A rank that answers, and has done nothing since, is late after the timeout. The time in which its process did
    /// not answer is no part of that; a process that answers no more is late too.
    #[test]
    fn a_process_without_a_core_is_not_late_when_it_answers_again() {
        let (second, often) = (Duration::from_secs(1), Duration::from_millis(63));
        let begin = || {
            let mut bench = Bench::new(2, Some(second));
            let asked = question(&waits(&mut bench));
            hear(&mut bench, 1, answer(asked, false, false, 3));
            bench.waits.values_mut().for_each(|wait| wait.since -= 10 * second);
            bench
        };
        let mut silent = begin();
        let asked = question(&after(&mut silent, second * 3 / 2, often));
        assert!(!stops(&hear(&mut silent, 1, answer(asked, false, false, 3))), "it may have had no core");
        let mut stopped = begin();
        assert!(stops(&after(&mut stopped, SILENCE, often)));
        let mut idle = begin();
        for look in 1..=16 {
            let said = after(&mut idle, often, often);
            assert_eq!(stops(&said), look == 16, "look {look}");
            if look < 16 {
                assert!(!stops(&hear(&mut idle, 1, answer(question(&said), false, false, 3))));
            }
        }
    }

    /// Rank 1 was told to end, and its process gets no core for longer than the timeout.
    #[test]
    fn a_process_without_a_core_may_end_later_than_the_timeout() {
        let (short, kind) = (Duration::from_millis(100), FaultKind::Panicked { rank: 0, message: "no".to_owned() });
        let mut bench = Bench::new(2, Some(short));
        hear(&mut bench, 0, Tell::Ends { how: Activity::Panicked("no".to_owned()), forks: 0 });
        for rank in [0, 1] {
            let report = RankReport { rank, activity: Activity::Computing, site: None };
            hear(&mut bench, rank, Tell::Report(report));
        }
        assert!(bench.fault.as_ref().is_some_and(|(fault, _)| fault.kind == kind));
        assert!(after(&mut bench, 15 * short, short / 16).is_empty());
        let over = after(&mut bench, SILENCE, short / 16);
        assert!(matches!(&over[..], [(To::All, Judge::Over(Some(_)))]), "the others do not wait for ever");
    }

    /// Rank 1 made no progress for a minute, and does not say what it does: the others wait four seconds more, and not
    /// another minute.
    #[test]
    fn a_process_that_stands_still_is_not_waited_for_twice() {
        let mut bench = Bench::new(2, Some(Duration::from_secs(60)));
        let kind = FaultKind::Timeout { rank: 1, after: Duration::from_secs(60), chain: vec![0, 1] };
        hear(&mut bench, 0, Tell::Found { kind, site: None });
        hear(&mut bench, 0, Tell::Report(RankReport { rank: 0, activity: Activity::Waiting, site: None }));
        assert!(bench.fault.is_none(), "it may yet say what it does");
        bench.found.as_mut().unwrap().at -= SILENCE;
        let stopped = after(&mut bench, Duration::ZERO, LOOKS[1]);
        assert!(matches!(&stopped[..], [(To::All, Judge::Stopped(_))]));
        assert!(hear(&mut bench, 0, Tell::Ends { how: Activity::Failed("told".to_owned()), forks: 0 }).is_empty());
        let over = after(&mut bench, SILENCE, LOOKS[1]);
        assert!(matches!(&over[..], [(To::All, Judge::Over(Some(_)))]), "nothing more is waited for");
    }

    /// Rank 0 waits for its device. Rank 1 is not late as long as its process answers, whatever it does, and is gone if
    /// it fails; others that wait for rank 0 do not blame it while rank 1 is silent.
    #[test]
    fn a_rank_that_waits_for_its_device_needs_the_processes_of_all() {
        let (second, often) = (Duration::from_secs(1), Duration::from_millis(63));
        let begin = || {
            let mut bench = Bench::new(2, Some(second));
            let site = Site { group: "dp".into(), group_id: 7, world_rank: 0, seq: 3, op: None };
            hear(&mut bench, 0, Tell::Attends { number: 1, site });
            bench
        };
        let later = |bench: &mut Bench, time: Duration| {
            bench.alive.values_mut().for_each(|heard| *heard -= time);
            after(bench, Duration::ZERO, often)
        };
        let kind = |bench: &Bench| bench.found.as_ref().map(|found| found.kind.clone());
        let mut bench = begin();
        for _ in 0..100 {
            let said = later(&mut bench, often);
            assert!(matches!(said[..], [(To::Rank(1), Judge::Ask { asked: 0, .. })]), "{}", said.len());
            assert!(hear(&mut bench, 1, answer(0, false, false, 3)).is_empty());
        }
        assert!(!stops(&later(&mut bench, SILENCE / 2)) && bench.lacks_a_process());
        assert!(stops(&later(&mut bench, SILENCE / 2)));
        assert_eq!(kind(&bench), Some(FaultKind::Timeout { rank: 1, after: second, chain: vec![0, 1] }));

        let (mut failed, mut returned, mut gone) = (begin(), begin(), begin());
        let how = Activity::Failed("no memory".to_owned());
        hear(&mut failed, 1, Tell::Ends { how: how.clone(), forks: 0 });
        assert!(stops(&later(&mut failed, often)));
        assert_eq!(kind(&failed), Some(FaultKind::Gone { rank: 1, how }));
        hear(&mut returned, 1, Tell::Ends { how: Activity::Returned, forks: 0 });
        assert!(later(&mut returned, SILENCE).is_empty(), "it has queued its part");
        hear(&mut gone, 0, Tell::Goes { number: 1 });
        assert!(later(&mut gone, SILENCE).is_empty(), "nobody waits");
    }

    #[test]
    fn a_rank_that_ended_without_an_operation_is_gone_once_it_says_so() {
        let mut bench = Bench::new(2, Some(Duration::from_secs(600)));
        waits(&mut bench);
        let asked = question(&hear(&mut bench, 1, Tell::Ends { how: Activity::Returned, forks: 0 }));
        assert!(stops(&hear(&mut bench, 1, answer(asked, false, true, 4))));
    }
}
