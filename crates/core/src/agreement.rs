//! Facts that one rank cannot see: whether the other ranks of a group have the same plan, the same weights, other
//! samples. Ranks list what they take for granted as [`Fact`]s with names, and [compare](Agreement::compare) all of
//! them in one exchange.
//!
//! ```
//! use meshwork_core::agreement::{Agreement, Fact};
//! use meshwork_core::World;
//!
//! let run = |rates: [f64; 3]| {
//!     World::Threads(3).run(|world| {
//!         let advice = "give every rank the same";
//!         let mut facts = Agreement::default();
//!         facts.push(Fact::value("the number of steps", &100, advice));
//!         facts.push(Fact::value("the learning rate", &rates[world.rank()], advice));
//!         facts.compare(&world)
//!     })
//! };
//! assert!(run([0.5, 0.5, 0.5]).is_ok());
//! let told = run([0.5, 0.1, 0.5]).unwrap_err().to_string();
//! assert!(told.contains(
//!     "the learning rate should be the same on all ranks, and ranks 0, 2 have 0.5, rank 1 has 0.1; give every rank the same"
//! ));
//! ```

mod differences;

pub use crate::comm::Disagreement;
use crate::comm::{CommError, Group, ReduceOp, runs};
use crate::hash::{combine, hash};
use std::borrow::Cow;
use std::fmt::{Debug, Display};

/// Something that a rank takes for granted about the ranks of a group.
#[derive(Clone, Debug)]
pub struct Fact {
    /// The claim, as a sentence about the ranks: `the learning rate should be the same`. Every rank has the same claim:
    /// it shows which ranks compare different facts.
    pub claim: String,
    /// How the hashes of the ranks must relate.
    pub must: Must,
    /// Hash of this rank's value. With [`Must::Vary`] and [`Must::Differ`], 0 says that nothing is claimed on this
    /// rank.
    pub hash: u64,
    /// This rank's value, if it is short enough to be printed.
    pub value: Option<String>,
    /// What would be valid.
    pub valid: Cow<'static, str>,
}

/// How the values of the ranks of a group must relate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Must {
    /// All are the same.
    Agree,
    /// Not all are the same.
    Vary,
    /// No two are the same. The only relation for which a rank takes memory for every rank: 8 bytes.
    Differ,
}

impl Fact {
    /// `name` should be the same: a value that can be printed.
    pub fn value(name: impl Display, value: &dyn Debug, valid: impl Into<Cow<'static, str>>) -> Self {
        let value = format!("{value:?}");
        let fact = Self::hash(format!("{name} should be the same"), Must::Agree, hash(value.as_bytes()), valid);
        Self { value: Some(value), ..fact }
    }

    /// A fact whose values are too long to exchange: ranks compare their hashes.
    pub fn hash(claim: impl Into<String>, must: Must, hash: u64, valid: impl Into<Cow<'static, str>>) -> Self {
        Self { claim: claim.into(), must, hash, value: None, valid: valid.into() }
    }

    /// The number by which ranks find that they compare different facts. Never 0, which stands for no fact.
    fn name(&self) -> u64 {
        combine(hash(self.claim.as_bytes()), self.must as u64) | 1
    }
}

/// The facts that the ranks of a group compare.
#[derive(Clone, Debug, Default)]
pub struct Agreement {
    facts: Vec<Fact>,
}

/// The largest text of a value that ranks exchange, in bytes.
const LONGEST: usize = 4096;

/// The largest part of a value that a message shows, in characters.
const SHOWN: usize = 160;

impl Agreement {
    /// Adds a fact. The first one that does not hold is reported: causes come before their effects.
    pub fn push(&mut self, fact: Fact) {
        self.facts.push(fact);
    }

    /// The facts so far, in order.
    pub fn facts(&self) -> &[Fact] {
        &self.facts
    }

    /// Compares the facts of all ranks of `group`, in order. Collective over the group.
    ///
    /// If all of them should be the same and are, it is one exchange of six numbers, whatever the number of facts and
    /// ranks. Values are exchanged only of a fact that does not hold. No record of it is kept in the group's log.
    ///
    /// # Errors
    /// [`CommError::Disagreement`], the same on every rank of the group: the first fact that does not hold, or the
    /// first place at which ranks list different facts. A failed communication.
    pub fn compare(&self, group: &Group) -> Result<(), CommError> {
        self.find(group)?.map_or(Ok(()), |(_, found)| Err(found.into()))
    }

    /// As [`compare`](Self::compare), with the fact that does not hold and its place as a value: for ranks that have
    /// more to compare before they end.
    pub fn find(&self, group: &Group) -> Result<Option<(usize, Disagreement)>, CommError> {
        if group.size() == 1 {
            return Ok(None);
        }
        let group = &group.unlogged();
        let agreed = self.facts.iter().filter(|fact| fact.must == Must::Agree);
        let names = self.facts.iter().fold(0, |all, fact| combine(all, fact.name()));
        let summary = [self.facts.len() as u64, names, agreed.fold(0, |all, fact| combine(all, fact.hash))];
        let ends = ends(group, &summary)?;
        if ends.iter().all(End::is_one) && self.facts.iter().all(|fact| fact.must == Must::Agree) {
            return Ok(None);
        }
        let facts = ends[0].largest as usize;
        let all: Vec<u64> =
            (0..facts).flat_map(|at| self.facts.get(at).map_or([0, 0], |fact| [fact.name(), fact.hash])).collect();
        let ends = self::ends(group, &all)?;
        for (at, &[name, hash]) in ends.as_chunks().0.iter().enumerate() {
            let Some(fact) = self.facts.get(at).filter(|_| name.is_one()) else {
                return Ok(Some((at, self.other_facts(group, at)?)));
            };
            // Every rank asks the same question and gets the same answer.
            let holds = match fact.must {
                Must::Agree => hash.is_one(),
                Must::Vary => !hash.is_one() || hash.largest == 0,
                Must::Differ => hash.is_one() && hash.largest == 0,
            };
            if holds {
                continue;
            }
            let mut hashes = vec![0; group.size()];
            group.all_gather_slice(&[fact.hash as i64], &mut hashes)?;
            let Some(broken) = fact.broken(&hashes, group.world_ranks()) else { continue };
            let shown = if broken.by_value { values(group, fact.value.as_deref().unwrap_or_default())? } else { None };
            let found = Disagreement {
                claim: fact.claim.clone(),
                over: over(group),
                found: shown.unwrap_or(broken.found),
                ranks: broken.ranks,
                valid: fact.valid.to_string(),
            };
            return Ok(Some((at, found)));
        }
        Ok(None)
    }

    /// Ranks that have different facts in a place.
    fn other_facts(&self, group: &Group, at: usize) -> Result<Disagreement, CommError> {
        let own = self.facts.get(at).map_or("nothing", |fact| &fact.claim);
        let texts = gather(group, own)?;
        let (classes, ranks) = classes(&texts, group.world_ranks());
        let claims: Vec<String> =
            classes.iter().map(|(text, ranks)| format!("{} {text:?}", with_verb(ranks, "claims", "claim"))).collect();
        Ok(Disagreement {
            claim: "every rank should claim the same facts in the same order".to_owned(),
            over: over(group),
            found: format!("as number {} {}", at + 1, claims.join(", ")),
            ranks,
            valid: "run the same program on every rank of the group: the same declarations, operations and calls"
                .to_owned(),
        })
    }
}

/// The first of the facts that ranks found not to hold in groups of their own, on all ranks of `group`: the fact of the
/// lowest place, and of the lowest rank. Each rank passes what [`Agreement::find`] gave it. Collective over the group.
pub fn first(group: &Group, found: Option<(usize, Disagreement)>) -> Result<Option<Disagreement>, CommError> {
    let group = &group.unlogged();
    // The earlier the place, and then the rank, the larger.
    let size = group.size() as i64;
    let key = |place: usize| i64::MAX - (place as i64 * size + group.rank() as i64);
    let mut first = [found.as_ref().map_or(0, |(place, _)| key(*place))];
    group.all_reduce_slice(&mut first, ReduceOp::Max)?;
    if first[0] == 0 {
        return Ok(None);
    }
    let root = ((i64::MAX - first[0]) % size) as usize;
    let own = found.filter(|_| group.rank() == root).map(|(_, found)| found.encode()).unwrap_or_default();
    let text = group.broadcast_bytes(own.into_bytes(), root)?;
    Ok(Some(Disagreement::decode(&String::from_utf8_lossy(&text))))
}

impl Disagreement {
    /// The values of ranks that should be the same and are not, where every rank has all of them.
    pub fn between(claim: &str, over: String, values: &[String], ranks: &[usize], valid: &str) -> Option<Self> {
        let (classes, others) = classes(values, ranks);
        (classes.len() > 1).then(|| Self {
            claim: claim.to_owned(),
            over,
            found: in_words(&classes),
            ranks: others,
            valid: valid.to_owned(),
        })
    }

    /// As one text: see [`decode`](Self::decode).
    fn encode(&self) -> String {
        let ranks: Vec<String> = self.ranks.iter().map(usize::to_string).collect();
        [&self.claim, &self.over, &self.found, &ranks.join(","), &self.valid]
            .map(|part| part.replace('\0', " "))
            .join("\0")
    }

    fn decode(text: &str) -> Self {
        let mut parts = text.split('\0').map(str::to_owned);
        let mut part = || parts.next().unwrap_or_default();
        let (claim, over, found, ranks, valid) = (part(), part(), part(), part(), part());
        Self { claim, over, found, ranks: ranks.split(',').filter_map(|rank| rank.parse().ok()).collect(), valid }
    }
}

/// The least and the largest of the numbers of all ranks.
#[derive(Clone, Copy, Debug)]
struct End {
    largest: i64,
    least: i64,
}

impl End {
    fn is_one(&self) -> bool {
        self.largest == self.least
    }
}

/// The least and the largest of each number over all ranks, in one exchange.
fn ends(group: &Group, numbers: &[u64]) -> Result<Vec<End>, CommError> {
    // The largest `!number` belongs to the least number.
    let mut ends: Vec<i64> = numbers.iter().flat_map(|&number| [number as i64, !number as i64]).collect();
    group.all_reduce_slice(&mut ends, ReduceOp::Max)?;
    Ok(ends.as_chunks().0.iter().map(|&[largest, least]| End { largest, least: !least }).collect())
}

/// How a fact does not hold.
struct Broken {
    found: String,
    ranks: Vec<usize>,
    /// Whether the values of the ranks say more.
    by_value: bool,
}

impl Fact {
    /// How the hashes of all ranks contradict the fact, if they do.
    fn broken(&self, hashes: &[i64], ranks: &[usize]) -> Option<Broken> {
        let (classes, others) = classes(hashes, ranks);
        match self.must {
            Must::Agree if classes.len() == 1 => None,
            // With as many ranks on either side nobody can tell which are right.
            Must::Agree if others.len() == ranks.len() => Some(Broken {
                found: format!("ranks {} have different bits", runs(ranks)),
                ranks: others,
                by_value: true,
            }),
            Must::Agree => {
                let found = format!("the bits of rank {} differ from those of the others", runs(&others));
                Some(Broken { found, ranks: others, by_value: true })
            }
            Must::Vary if classes.len() > 1 || *classes[0].0 == 0 => None,
            Must::Vary => {
                let found = "it has the same bits on all of them".to_owned();
                Some(Broken { found, ranks: ranks.to_vec(), by_value: false })
            }
            Must::Differ => {
                let (_, ranks) = classes.into_iter().find(|(hash, ranks)| **hash != 0 && ranks.len() > 1)?;
                Some(Broken { found: format!("those of ranks {} are the same", runs(&ranks)), ranks, by_value: false })
            }
        }
    }
}

/// The ranks that have each value, in the order of their first ranks, and the ranks that have another value than more
/// than half of them: all if more than half have no value in common.
fn classes<'a, T: PartialEq>(values: &'a [T], ranks: &[usize]) -> (Vec<(&'a T, Vec<usize>)>, Vec<usize>) {
    let mut classes: Vec<(&T, Vec<usize>)> = Vec::new();
    for (value, &rank) in values.iter().zip(ranks) {
        match classes.iter_mut().find(|(other, _)| *other == value) {
            Some((_, same)) => same.push(rank),
            None => classes.push((value, vec![rank])),
        }
    }
    let most = classes.iter().find(|(_, same)| 2 * same.len() > ranks.len());
    let others = ranks.iter().filter(|rank| most.is_none_or(|(_, same)| !same.contains(rank))).copied().collect();
    (classes, others)
}

/// The values of all ranks in words. `None` if the texts do not tell them apart.
fn values(group: &Group, own: &str) -> Result<Option<String>, CommError> {
    let texts = gather(group, own)?;
    let (classes, _) = classes(&texts, group.world_ranks());
    Ok((classes.len() > 1).then(|| in_words(&classes)))
}

/// Which ranks have which value: `rank 0 has 1, ranks 1, 2 have 2`.
fn in_words(classes: &[(&String, Vec<usize>)]) -> String {
    // Of long values, the part that differs.
    let long = classes.iter().any(|(text, _)| text.chars().count() > SHOWN);
    let same = (0..).take_while(|&at| {
        let mut chars = classes.iter().map(|(text, _)| text.chars().nth(at));
        let first = chars.next().flatten();
        first.is_some() && chars.all(|char| char == first)
    });
    let start = if long { same.count().saturating_sub(SHOWN / 4) } else { 0 };
    let shown = |text: &str| {
        let part: String = text.chars().skip(start).take(SHOWN).collect();
        let (before, after) = (start > 0, text.chars().count() > start + SHOWN);
        format!("{}{part}{}", if before { ".." } else { "" }, if after { ".." } else { "" })
    };
    let mut words: Vec<String> = classes
        .iter()
        .take(4)
        .map(|(text, ranks)| format!("{} {}", with_verb(ranks, "has", "have"), shown(text)))
        .collect();
    if classes.len() > 4 {
        words.push(format!("and others have {} more values", classes.len() - 4));
    }
    words.join(", ")
}

/// The texts of all ranks, cut where they are too long.
fn gather(group: &Group, own: &str) -> Result<Vec<String>, CommError> {
    let all = group.all_gather_bytes(&own.as_bytes()[..own.len().min(LONGEST)])?;
    Ok(all.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect())
}

/// The ranks of a group in words.
fn over(group: &Group) -> String {
    if group.name() == "world" { "on all ranks".to_owned() } else { format!("over {}", group.name()) }
}

fn with_verb(ranks: &[usize], one: &str, several: &str) -> String {
    if ranks.len() == 1 { format!("rank {} {one}", ranks[0]) } else { format!("ranks {} {several}", runs(ranks)) }
}
