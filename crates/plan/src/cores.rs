//! Cores that the ranks of a host share, and how long work takes on them.

use serde::Deserialize;

/// Cores that all ranks of a host share. A core whose rank waits works for other ranks.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Cores {
    /// How many there are.
    pub count: usize,
    /// How many times as fast a rank is that has all of them, against one while the others are busy: 1 to `count`.
    pub help: f64,
    /// The share of its time that a rank on a core of its own waits for ranks with as much work: no two cores are
    /// equally fast at any moment.
    #[serde(default)]
    pub uneven: f64,
    /// Processes of a host, which have equally many of its ranks. They count together which of their threads compute.
    #[serde(default = "one")]
    pub processes: usize,
}

fn one() -> usize {
    1
}

impl Cores {
    /// What contradicts itself for this number of ranks of a host, and what would be valid.
    pub(crate) fn fault(&self, ranks: usize) -> Option<(String, &'static str)> {
        let Self { count, help, uneven, processes } = *self;
        if count == 0 || !(1.0..=count as f64).contains(&help) {
            let valid = "count is at least 1; help, how many times as fast a rank is with all cores, is 1 to count";
            return Some(("cores.count and cores.help contradict each other".to_owned(), valid));
        }
        if !(0.0..=1.0).contains(&uneven) {
            let valid = "uneven, the share of its time that a rank waits for others with as much work, is 0 to 1";
            return Some(("cores.uneven is no share".to_owned(), valid));
        }
        let even = processes > 0 && ranks.is_multiple_of(processes);
        (!even)
            .then(|| (format!("{processes} processes for {ranks} ranks of a host"), "use a number that divides them"))
    }

    /// The slowdown of each rank when `active` ranks of a host compute at once: its time over that of a rank with a
    /// core of its own.
    pub fn stretch(&self, active: f64) -> f64 {
        let Self { count, help, uneven, .. } = *self;
        let (count, waits) = (count as f64, if active > 1.0 { 1.0 + uneven } else { 1.0 });
        if active >= count || count == 1.0 {
            // More ranks than cores leave none of them idle.
            return (active / count).max(waits);
        }
        // The cores that are left over help all ranks alike.
        waits / (1.0 + (help - 1.0) * (count / active - 1.0) / (count - 1.0))
    }

    /// The text of its part of a cluster's file.
    pub(crate) fn to_toml(self) -> String {
        let Self { count, help, uneven, processes } = self;
        let processes = if processes > 1 { format!("processes = {processes}\n") } else { String::new() };
        format!("\n[cores]\ncount = {count}\nhelp = {help:.3}\nuneven = {uneven:.3}\n{processes}")
    }
}
