//! The fault that stopped a world. Every rank gets the same report.

use super::{Caller, OpInfo, Peer};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A place in a program: an operation of one group, seen by one of its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// Name of the group.
    pub group: Arc<str>,
    /// Distinguishes groups with the same name.
    pub group_id: u64,
    /// World rank of the member at this place.
    pub world_rank: usize,
    /// Number of the operation: collectives are counted per group, messages per sender and receiver.
    pub seq: u64,
    /// The operation; `None` for a split.
    pub op: Option<OpInfo>,
}

impl Site {
    /// Whether two members are at the same place of their programs: in the same collective, or at the two ends of
    /// one message.
    pub fn is_at(&self, other: &Site) -> bool {
        let key = |site: &Site| (site.group_id, site.seq, site.op.is_some(), site.message());
        key(self) == key(other)
    }

    /// Sender and receiver of a message.
    fn message(&self) -> Option<(usize, usize)> {
        match self.op.as_ref()?.peer? {
            Peer::To(rank) => Some((self.world_rank, rank)),
            Peer::From(rank) => Some((rank, self.world_rank)),
            Peer::Root(_) => None,
        }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.op.is_some() { "op" } else { "split" };
        write!(f, "{} group of world rank {}, {what} #{}", self.group, self.world_rank, self.seq)
    }
}

/// The kind of a fault. All ranks are world ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum FaultKind {
    /// Two ranks are in different operations at the same place.
    Disagreement {
        /// The rank that came first, and its operation.
        first: (usize, OpInfo),
        /// The rank that came later, and its operation.
        second: (usize, OpInfo),
    },
    /// Two ranks name parts of a group that do not fit together.
    SplitDisagreement {
        /// The rank that came first, with its part's name and members (world ranks).
        first: (usize, String, Vec<usize>),
        /// The rank that came later, with its part's.
        second: (usize, String, Vec<usize>),
    },
    /// A rank panicked.
    Panicked { rank: usize, message: String },
    /// A rank has ended, and others need it.
    Gone { rank: usize, how: Activity },
    /// Ranks that wait for each other.
    Deadlock {
        /// Each waits for the next, the last for the first.
        cycle: Vec<usize>,
    },
    /// A rank made no progress for too long.
    Timeout {
        rank: usize,
        after: Duration,
        /// Each waits for the next: the first noticed the timeout, the last is `rank`.
        chain: Vec<usize>,
    },
    /// A device refused the work of an operation.
    Device {
        /// The rank that queued it for all members: the last to arrive.
        rank: usize,
        message: String,
    },
}

impl FaultKind {
    fn is_disagreement(&self) -> bool {
        matches!(self, FaultKind::Disagreement { .. } | FaultKind::SplitDisagreement { .. })
    }

    /// The world rank to look at first.
    pub fn culprit(&self) -> usize {
        match self {
            FaultKind::Disagreement { second, .. } => second.0,
            FaultKind::SplitDisagreement { second, .. } => second.0,
            FaultKind::Panicked { rank, .. } | FaultKind::Gone { rank, .. } | FaultKind::Timeout { rank, .. } => *rank,
            FaultKind::Device { rank, .. } => *rank,
            FaultKind::Deadlock { cycle } => cycle.first().copied().unwrap_or_default(),
        }
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FaultKind::Disagreement { first: (a, x), second: (b, y) } => {
                write!(f, "rank {a} is in {x}, rank {b} in {y}")?;
                f.write_str(if x.is_part_of(y) { "" } else { SAME_CALLS })
            }
            FaultKind::SplitDisagreement { first: (a, x, xs), second: (b, y, ys) } => {
                write!(f, "rank {a} splits into {x} = {xs:?}, rank {b} into {y} = {ys:?}; ")?;
                f.write_str("every rank of a group splits it, and all members of a part name the same list")
            }
            FaultKind::Panicked { rank, message } => write!(f, "rank {rank} panicked: {message}"),
            FaultKind::Device { rank, message } => write!(f, "the device of rank {rank}: {message}"),
            FaultKind::Gone { rank, how } => write!(f, "rank {rank} {how} and takes no part"),
            FaultKind::Deadlock { cycle } => {
                f.write_str("deadlock: ")?;
                write_chain(f, cycle.iter().chain(cycle.first()))
            }
            FaultKind::Timeout { rank, after, chain } => {
                write!(f, "rank {rank} made no progress for {after:?}: ")?;
                write_chain(f, chain)
            }
        }
    }
}

/// What would be valid where ranks are in different calls.
const SAME_CALLS: &str = "; every rank makes the same calls, in the same order";

fn write_chain<'a>(f: &mut fmt::Formatter<'_>, chain: impl IntoIterator<Item = &'a usize>) -> fmt::Result {
    for (i, rank) in chain.into_iter().enumerate() {
        let link = ["", " waits for ", ", which waits for "][i.min(2)];
        write!(f, "{link}rank {rank}")?;
    }
    Ok(())
}

/// The activity of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Activity {
    /// It does its own work, or an operation for which it waits for no rank.
    Computing,
    /// It waits for its last operation, or for an earlier one.
    Waiting,
    /// It returned, without an error.
    Returned,
    /// It returned this error.
    Failed(String),
    /// It panicked with this message.
    Panicked(String),
    /// It dropped all its communicators.
    Left,
    /// Its process ended without a word, or cannot be reached.
    Lost(String),
}

impl Activity {
    /// The activity of one rank or of several, in words.
    fn in_words(&self, plural: bool) -> String {
        let choose = |one: &'static str, several: &'static str| if plural { several } else { one };
        let has = choose("has", "have");
        match self {
            Activity::Computing => choose("computes", "compute").to_owned(),
            Activity::Waiting => choose("waits", "wait").to_owned(),
            Activity::Returned => format!("{has} returned"),
            // The error may itself be a report of many lines; only its first line is used.
            Activity::Failed(error) => {
                format!("{has} returned an error ({})", error.lines().next().unwrap_or_default())
            }
            Activity::Panicked(message) => format!("panicked ({message})"),
            Activity::Left => format!("{has} dropped {} communicators", choose("its", "their")),
            Activity::Lost(why) => format!("{} lost ({why})", choose("is", "are")),
        }
    }

    /// The end of `rank` as the cause of a failure.
    pub fn failure(&self, rank: usize) -> String {
        match self {
            Activity::Failed(error) => format!("rank {rank} returned an error: {error}"),
            Activity::Panicked(message) => format!("rank {rank} panicked: {message}"),
            other => format!("rank {rank} {other}"),
        }
    }
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.in_words(false))
    }
}

/// The activity of one rank when the world stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankReport {
    /// World rank.
    pub rank: usize,
    /// Its activity.
    pub activity: Activity,
    /// The operation it waits for, else the last one it started.
    pub site: Option<Site>,
}

impl RankReport {
    /// The activity of one rank, or of several, and its place.
    fn in_words(&self, plural: bool) -> String {
        let activity = self.activity.in_words(plural);
        let Some(site) = &self.site else {
            return format!("{activity}, no operation yet");
        };
        let word = if self.activity == Activity::Waiting { " in" } else { ", last in" };
        let op = site.op.as_ref().map_or(String::new(), |op| format!(" {op}"));
        format!("{activity}{word} {} #{}{op}", site.group, site.seq)
    }
}

impl fmt::Display for RankReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} {}", self.rank, self.in_words(false))
    }
}

/// The reports of ranks, with equal reports on one line: `rank 3 computes`, `ranks 0-2, 4 wait`. `one` and
/// `several` are the words after the ranks; ranks whose `several` are equal share a line.
pub(crate) fn grouped(reports: impl IntoIterator<Item = (usize, String, String)>) -> Vec<String> {
    let mut lines: Vec<(Vec<usize>, String, String)> = Vec::new();
    for (rank, one, several) in reports {
        match lines.iter_mut().find(|(_, _, words)| *words == several) {
            Some((ranks, ..)) => ranks.push(rank),
            None => lines.push((vec![rank], one, several)),
        }
    }
    let line = |(ranks, one, several): (Vec<usize>, String, String)| match ranks[..] {
        [rank] => format!("rank {rank} {one}"),
        _ => format!("ranks {} {several}", runs(&ranks)),
    };
    lines.into_iter().map(line).collect()
}

/// Ascending numbers in short: `0-2, 4`.
pub(crate) fn runs(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|a, b| a + 1 == *b).flat_map(|run| match run {
        [first, .., last] if run.len() > 2 => vec![format!("{first}-{last}")],
        few => few.iter().map(usize::to_string).collect(),
    });
    runs.collect::<Vec<_>>().join(", ")
}

/// The reason why a world stopped: the first fault, and the activity of every rank then.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// The fault.
    pub kind: FaultKind,
    /// Its place; `None` if it happened outside any operation.
    pub site: Option<Site>,
    /// The activity of each rank.
    pub ranks: Vec<RankReport>,
}

impl Fault {
    /// The fault in one line.
    pub fn headline(&self) -> String {
        if let Some(site) = &self.site { format!("{site}: {}", self.cause()) } else { self.cause() }
    }

    /// The fault in words, with the calls of the program in which it happened.
    pub(crate) fn cause(&self) -> String {
        let caller = |site: &Option<Site>| site.as_ref()?.op.as_ref()?.caller.clone();
        match &self.kind {
            FaultKind::Gone { .. } => match caller(&self.site) {
                Some(caller) => format!("{} in {caller}, which every rank calls", self.kind),
                None => self.kind.to_string(),
            },
            FaultKind::Deadlock { cycle } => {
                let of = |rank: &usize| caller(&self.ranks.iter().find(|report| report.rank == *rank)?.site);
                let callers: Vec<_> = cycle.iter().map(of).collect();
                if callers.windows(2).all(|pair| pair[0] == pair[1]) {
                    return self.kind.to_string();
                }
                let word = |caller: &Option<Arc<Caller>>| {
                    caller.as_ref().map_or("no named call".to_owned(), |caller| caller.to_string())
                };
                let at = cycle.iter().zip(&callers).map(|(rank, caller)| format!("rank {rank} is in {}", word(caller)));
                format!("{}; {}{SAME_CALLS}", self.kind, at.collect::<Vec<_>>().join(", "))
            }
            kind => kind.to_string(),
        }
    }

    /// The activities of the ranks: a line for each rank, or for several that did the same.
    pub fn report_lines(&self) -> Vec<String> {
        grouped(self.ranks.iter().map(|rank| (rank.rank, rank.in_words(false), rank.in_words(true))))
    }

    /// The fault as seen by a rank that was at `here`.
    pub fn describe(&self, here: &Site) -> String {
        let op = here.op.as_ref().map(|op| format!("{op} ")).unwrap_or_default();
        let cause = self.cause();
        let mut text = match &self.site {
            // The kind names the operations of both ranks, this one's among them.
            Some(site) if site.is_at(here) && self.kind.is_disagreement() => format!("{here}: {cause}"),
            Some(site) if !site.is_at(here) => {
                format!("{here}: {op}stopped because in the {site}: {cause}")
            }
            _ => format!("{here}: {op}stopped because {cause}"),
        };
        for line in self.report_lines() {
            text += &format!("\n  {line}");
        }
        text
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.headline())?;
        self.report_lines().iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_reports_share_a_line() {
        let report = |rank: usize| (rank, format!("is {}", rank % 3), format!("are {}", rank % 3));
        assert_eq!(grouped((0..4).map(report)), ["ranks 0, 3 are 0", "rank 1 is 1", "rank 2 is 2"]);
        let same = |rank: usize| (rank, String::from("waits"), String::from("wait"));
        assert_eq!(grouped([0, 1, 2, 4, 7, 8].map(same)), ["ranks 0-2, 4, 7, 8 wait"]);
        assert_eq!(grouped([5].map(same)), ["rank 5 waits"]);
        assert!(grouped([]).is_empty());
    }

    #[test]
    fn several_ranks_take_a_plural() {
        let several = |activity: Activity| RankReport { rank: 0, activity, site: None }.in_words(true);
        assert_eq!(several(Activity::Computing), "compute, no operation yet");
        assert_eq!(several(Activity::Returned), "have returned, no operation yet");
        assert_eq!(several(Activity::Left), "have dropped their communicators, no operation yet");
        assert_eq!(Activity::Left.to_string(), "has dropped its communicators");
    }
}
