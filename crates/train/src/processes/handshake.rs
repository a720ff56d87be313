//! What the processes of a run compare before the first step. They may run other binaries, read other files or have
//! other flags, and nothing in a step would say so.

use crate::config::Config;
use crate::config::keys::{self, Effect};
use crate::error::RankError;
use meshwork_core::agreement::{Agreement, Fact};
use meshwork_core::hash::{combine, hash};
use meshwork_core::{CommError, Group, ReduceOp};
use std::fs::File;
use std::io::Read;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Clocks may differ by so much.
const CLOCK: Duration = Duration::from_secs(1);

/// What this process compares with the others.
#[derive(Debug)]
pub struct Handshake {
    facts: Agreement,
    /// Name of the host.
    pub(crate) host: String,
}

impl Handshake {
    /// What this process has: version and build of the program, byte order, the configuration key by key, and the hash
    /// of its `input`: the data, or a prompt.
    pub fn new(config: &Config, input: String) -> Self {
        let mut facts = Agreement::default();
        let mut fact = |name: &str, value: String| facts.push(Fact::value(name, &format_args!("{value}"), ""));
        fact("the version of meshwork", env!("CARGO_PKG_VERSION").to_owned());
        fact("the build of the program, by hash,", build().map_or("unknown".to_owned(), |hash| format!("{hash:016x}")));
        fact("the byte order", if cfg!(target_endian = "little") { "little endian" } else { "big endian" }.to_owned());
        // Where data lie may differ: the hash of the data decides.
        let resolved = serde_json::to_value(config).unwrap_or_default();
        for (section, key) in keys::all().filter(|(_, key)| key.effect != Effect::Data) {
            fact(&format!("{section}.{}", key.name), resolved[section][key.name].to_string());
        }
        fact("--device", config.device.to_string());
        fact("the hash of the input", input);
        Self { facts, host: gethostname::gethostname().to_string_lossy().into_owned() }
    }

    /// Compares it with the other ranks. Returns warnings, on rank 0. Collective over the world.
    ///
    /// # Errors
    /// Every difference, with ranks and hosts.
    pub fn compare(&self, world: &Group) -> Result<Vec<String>, RankError> {
        let differences = self.facts.differences(world, &format!("on host {}", self.host))?;
        if !differences.is_empty() {
            return Err(RankError::Differences(differences));
        }
        // What the clock of this host said at a moment that all ranks share.
        let since = world.communicator().membership().origin().elapsed();
        let moment = SystemTime::now().checked_sub(since).and_then(|moment| moment.duration_since(UNIX_EPOCH).ok());
        Ok(clocks(world, &self.host, moment.unwrap_or_default())?)
    }
}

/// The hash of the program's file.
fn build() -> Option<u64> {
    let mut file = File::open(std::env::current_exe().ok()?).ok()?;
    let (mut piece, mut all) = (vec![0; 1 << 20], 0);
    loop {
        match file.read(&mut piece).ok()? {
            0 => return Some(all),
            read => all = combine(all, hash(&piece[..read])),
        }
    }
}

/// Warnings, on rank 0, of clocks that differ. Each rank passes what its clock said at one moment.
fn clocks(world: &Group, host: &str, moment: Duration) -> Result<Vec<String>, CommError> {
    let own = moment.as_micros() as i64;
    let mut ends = [own, -own];
    world.all_reduce_slice(&mut ends, ReduceOp::Max)?;
    if ends[0] + ends[1] <= CLOCK.as_micros() as i64 {
        return Ok(Vec::new());
    }
    let all = world.gather_bytes(format!("{own} {host}").into_bytes())?;
    let of = |told: &Vec<u8>| {
        let (moment, host) = std::str::from_utf8(told).ok()?.split_once(' ')?;
        Some((moment.parse::<i64>().ok()? - own, host.to_owned()))
    };
    let mut off: Vec<(i64, String)> =
        all.iter().filter_map(of).filter(|(by, _)| by.abs() > CLOCK.as_micros() as i64).collect();
    off.sort_by(|a, b| a.1.cmp(&b.1));
    off.dedup_by(|a, b| a.1 == b.1);
    let text = |(by, host): (i64, String)| {
        let (seconds, way) = (by.unsigned_abs() as f64 / 1e6, if by > 0 { "ahead of" } else { "behind" });
        format!(
            "warning: the clock of host {host} is {seconds:.1} s {way} that of rank 0: times of files and logs do not compare"
        )
    };
    Ok(off.into_iter().map(text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Args;
    use meshwork_core::World;

    fn handshake(settings: &str, host: &str) -> Handshake {
        let config = Config::from_args(&Args::parse(settings.split_whitespace())).unwrap();
        Handshake { host: host.to_owned(), ..Handshake::new(&config, "1f".to_owned()) }
    }

    fn differences(of: [&Handshake; 4]) -> Vec<String> {
        let compared = World::Threads(4).run(|world| match of[world.rank()].compare(&world) {
            Err(RankError::Differences(lines)) => Ok(lines),
            Err(other) => Err(other),
            Ok(_) => Ok(Vec::new()),
        });
        compared.unwrap().swap_remove(0)
    }

    #[test]
    fn every_difference_between_ranks_is_named() {
        let same = handshake("--mesh dp=4", "a");
        assert!(differences([&same; 4]).is_empty());
        let other = handshake("--mesh dp=4 --set optimizer.lr=1e-3 --set training.seed=7 --set checkpoint.dir=/x", "b");
        assert_eq!(
            differences([&same, &same, &same, &other]),
            [
                "rank 3 on host b: training.seed 7, others 1234",
                "rank 3 on host b: optimizer.lr 0.001, others 0.0003",
                "rank 3 on host b: checkpoint.dir \"/x\", others null",
            ]
        );
        // Ranks on threads have one program and one byte order: what another one would say is put in its place.
        let mut old = handshake("--mesh dp=4", "b");
        let changed =
            ["the version of meshwork", "the build of the program", "the byte order", "the hash of the input"];
        let mut facts = Agreement::default();
        for fact in old.facts.facts() {
            let changed = changed.iter().any(|name| fact.claim.starts_with(name));
            let value = if changed { "other" } else { fact.value.as_deref().unwrap_or_default() };
            let name = fact.claim.trim_end_matches(" should be the same");
            facts.push(Fact::value(name, &format_args!("{value}"), ""));
        }
        old.facts = facts;
        let lines = differences([&same, &old, &same, &same]);
        assert_eq!(lines.len(), 4, "{lines:?}");
        for (line, name) in lines.iter().zip(changed) {
            assert!(
                line.starts_with(&format!("rank 1 on host b: {name}")) && line.contains(" other, others "),
                "{line}"
            );
        }
    }

    /// Data may lie elsewhere on another host.
    #[test]
    fn the_place_of_the_data_may_differ() {
        let [here, there] = ["/a", "/b"].map(|path| handshake(&format!("--mesh dp=4 --data {path}"), "a"));
        assert!(differences([&here, &there, &here, &here]).is_empty());
    }

    #[test]
    fn clocks_that_differ_are_told_by_rank_0() {
        let told = |seconds: [f64; 3]| {
            let all = World::Threads(3).run(|world| {
                let rank = world.rank();
                clocks(&world, ["a", "b", "c"][rank], Duration::from_secs_f64(1.7e9 + seconds[rank]))
            });
            let all = all.unwrap();
            assert!(all[1].is_empty() && all[2].is_empty());
            all[0].clone()
        };
        assert!(told([0.0, 0.4, -0.3]).is_empty());
        let lines = told([0.0, 37.25, -2.0]);
        assert!(lines[0].starts_with("warning: the clock of host b is 37.2 s ahead of that of rank 0"), "{lines:?}");
        assert!(lines[1].starts_with("warning: the clock of host c is 2.0 s behind that of rank 0"), "{lines:?}");
    }
}
