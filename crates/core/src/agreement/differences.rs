//! Every difference between ranks, in words: for ranks that compare their settings before they begin.

use super::{Agreement, End, SHOWN, classes, ends, gather, runs};
use crate::comm::{CommError, Group};
use crate::hash::combine;

/// The largest number of differences whose values are exchanged.
const MOST: usize = 20;

impl Agreement {
    /// Every fact on which ranks differ, a line each: `rank 3 on host b: optimizer.lr 0.001, others 0.0003`. `place` is
    /// this rank's, in words that follow its number. All facts are [values](super::Fact::value), which should agree;
    /// the same lines on every rank. Collective over the group.
    ///
    /// If ranks do not differ, it is one exchange of six numbers.
    pub fn differences(&self, group: &Group, place: &str) -> Result<Vec<String>, CommError> {
        if group.size() == 1 {
            return Ok(Vec::new());
        }
        let group = &group.unlogged();
        let whole = |of: fn(&super::Fact) -> u64| self.facts.iter().fold(0, |all, fact| combine(all, of(fact)));
        let summary = [self.facts.len() as u64, whole(super::Fact::name), whole(|fact| fact.hash)];
        let summary = ends(group, &summary)?;
        if summary.iter().all(End::is_one) {
            return Ok(Vec::new());
        }
        let count = summary[0].largest as usize;
        let all: Vec<u64> =
            (0..count).flat_map(|at| self.facts.get(at).map_or([0, 0], |fact| [fact.name(), fact.hash])).collect();
        let places = gather(group, place)?;
        let (mut lines, mut found) = (Vec::new(), 0);
        for (at, [name, hash]) in ends(group, &all)?.as_chunks().0.iter().enumerate() {
            // Ranks that compare other facts are other programs.
            let Some(fact) = self.facts.get(at).filter(|_| name.is_one()) else {
                lines.push(self.other_facts(group, at)?.to_string());
                break;
            };
            if hash.is_one() {
                continue;
            }
            found += 1;
            if found <= MOST {
                let texts = gather(group, fact.value.as_deref().unwrap_or_default())?;
                let name = fact.claim.strip_suffix(" should be the same").unwrap_or(&fact.claim);
                lines.extend(in_lines(name, &texts, group.world_ranks(), &places));
            }
        }
        if found > MOST {
            lines.push(format!("and {} more", found - MOST));
        }
        Ok(lines)
    }
}

/// The ranks whose value of `name` differs from the value of most.
fn in_lines(name: &str, texts: &[String], ranks: &[usize], places: &[String]) -> Vec<String> {
    let shown = |text: &str| match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    };
    let whose = |of: &[usize]| {
        // The places in the order of their first ranks, each with its ranks.
        let mut at: Vec<(&str, Vec<usize>)> = Vec::new();
        for (&rank, place) in ranks.iter().zip(places).filter(|(rank, _)| of.contains(rank)) {
            match at.iter_mut().find(|(other, _)| other == place) {
                Some((_, same)) => same.push(rank),
                None => at.push((place, vec![rank])),
            }
        }
        let words = |(place, ranks): &(&str, Vec<usize>)| {
            let word = if ranks.len() == 1 { "rank" } else { "ranks" };
            format!("{word} {} {place}", runs(ranks)).trim_end().to_owned()
        };
        at.iter().map(words).collect::<Vec<_>>().join(" and ")
    };
    let (classes, others) = classes(texts, ranks);
    match classes.iter().find(|(_, of)| !others.contains(&of[0])) {
        Some((most, _)) => {
            let differ = classes.iter().filter(|(text, _)| text != most);
            differ.map(|(text, of)| format!("{}: {name} {}, others {}", whose(of), shown(text), shown(most))).collect()
        }
        None => {
            let of = classes.iter().map(|(text, of)| format!("{} on {}", shown(text), whose(of)));
            vec![format!("{name}: {}", of.collect::<Vec<_>>().join(", "))]
        }
    }
}
