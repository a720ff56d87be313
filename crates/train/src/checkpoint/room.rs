//! The room that checkpoints take on their disk, compared with the free room before the first step.

use super::{CheckpointError, save_plan};
use crate::config::{Config, Fault};
use crate::numbers::size;
use meshwork_checkpoint::{folder_name, free_bytes, steps, stored_bytes};
use serde_json::json;
use std::path::Path;

/// The room for the checkpoints of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Room {
    /// Bytes that one takes.
    each: u64,
    /// How many there are while one is written, as configured.
    wanted: u64,
    /// Bytes that are free, and those of the newest checkpoint and of the others that are there; `None` where the
    /// system does not say.
    found: Option<Found>,
    /// How many are written.
    saves: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Found {
    free: u64,
    newest: Option<(u64, u64)>,
    older: u64,
}

impl Room {
    /// The room of a run that saves; `None` for another.
    ///
    /// # Errors
    /// A plan that does not fit the model.
    pub fn from_config(config: &Config) -> Result<Option<Self>, CheckpointError> {
        let Some(dir) = config.checkpoint.dir.as_deref().map(Path::new) else { return Ok(None) };
        let each = save_plan(&config.model(), &config.plan()?)?.file_bytes(&json!({"run": {"config": config}}));
        // The check of the folder tells of files that cannot be read.
        let stored = steps(dir).unwrap_or_default();
        let bytes = |step: &u64| stored_bytes(dir, *step).unwrap_or(0);
        let newest = stored.first().map(|step| (*step, bytes(step)));
        let older = stored.iter().skip(1).map(bytes).sum();
        let found = free_bytes(dir).map(|free| Found { free, newest, older });
        let begun = newest.map_or(0, |(step, _)| step);
        let left = config.training.steps.saturating_sub(begun);
        let saves = match config.checkpoint.every {
            0 => left.min(1),
            every => (config.training.steps / every).saturating_sub(begun / every).max(left.min(1)),
        };
        Ok(Some(Self {
            each,
            wanted: config.checkpoint.keep.saturating_add(1 + u64::from(config.keeps_best())),
            found,
            saves,
        }))
    }

    /// The line of `--steps 0`.
    pub fn report(&self, config: &Config) -> String {
        let keep = config.checkpoint.keep;
        let dir = config.checkpoint.dir.as_deref().unwrap_or_default();
        let free = self.found.map_or(String::new(), |found| format!("; {dir} has {}", size(found.free as f64)));
        let wanted = size(self.each as f64 * self.wanted as f64);
        format!("checkpoint.keep = {keep} takes {wanted} of disk while one more is written{free}\n")
    }

    /// The fault of a disk on which this run could not save, or the notice of a disk on which it must remove
    /// checkpoints before it writes.
    pub fn check(&self, config: &Config) -> Result<Option<String>, Fault> {
        let Some(Found { free, newest, older }) = self.found.filter(|_| self.saves > 0) else { return Ok(None) };
        let dir = config.checkpoint.dir.as_deref().unwrap_or_default();
        let shown = |bytes: u64| size(bytes as f64);
        // The newest whole checkpoint stays until the next one is complete; all others may go before.
        let beside_newest = free.saturating_add(older);
        let needed = if newest.is_some() { self.each } else { self.each.saturating_mul(self.saves.min(2)) };
        if beside_newest < needed {
            let stays = match newest {
                Some((step, _)) => format!(" beside {}, which stays until the next is complete", folder_name(step)),
                None if self.saves > 1 => ": one is kept until the next is complete".to_owned(),
                None => String::new(),
            };
            let [room, each, needed] = [beside_newest, self.each, needed].map(shown);
            let problem = format!("has room for {room}, and checkpoints of {each} need {needed}{stays}");
            let once = if self.saves > 1 { ", or checkpoint.every = 0 to save at the end only" } else { "" };
            return Err(Fault::new("checkpoint.dir", dir, problem, format!("free some, use a larger disk{once}")));
        }
        let all = beside_newest.saturating_add(newest.map_or(0, |(_, bytes)| bytes));
        let wanted = self.each.saturating_mul(self.wanted.min(self.saves.saturating_add(newest.is_some().into())));
        Ok((all < wanted).then(|| {
            format!(
                "{dir} has room for {}, and checkpoint.keep = {} needs {} while a checkpoint of {} is written: older ones will be removed \
                 before a new one is written, and the newest whole one stays",
                shown(all),
                config.checkpoint.keep,
                shown(wanted),
                shown(self.each)
            )
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checkpoints of 100 bytes: (free, newest, older, saves, keep).
    fn check(
        free: u64,
        newest: Option<(u64, u64)>,
        older: u64,
        saves: u64,
        keep: u64,
    ) -> Result<Option<String>, Fault> {
        let mut config = Config::from_toml("").unwrap();
        (config.checkpoint.dir, config.checkpoint.keep) = (Some("disk".to_owned()), keep);
        Room { each: 100, wanted: keep + 1, found: Some(Found { free, newest, older }), saves }.check(&config)
    }

    #[test]
    fn a_disk_is_refused_where_a_save_would_fail_and_told_of_where_older_ones_must_go_first() {
        for (free, newest, older, saves, keep, refused, told) in [
            (300, None, 0, 9, 2, false, false),
            (250, None, 0, 9, 2, false, true),
            (199, None, 0, 9, 2, true, false),
            (199, None, 0, 9, 1, true, false),
            (199, None, 0, 1, 2, false, false),
            (99, None, 0, 1, 2, true, false),
            (0, None, 0, 0, 2, false, false),
            // Checkpoints that are there count as room, except for the newest.
            (0, Some((7, 100)), 200, 9, 2, false, false),
            (50, Some((7, 100)), 100, 9, 2, false, true),
            (50, Some((7, 100)), 0, 9, 2, true, false),
            (50, Some((7, 100)), 0, 0, 2, false, false),
        ] {
            let found = check(free, newest, older, saves, keep);
            let case = format!("{free} {newest:?} {older} {saves} {keep}: {found:?}");
            assert_eq!((found.is_err(), found.is_ok_and(|told| told.is_some())), (refused, told), "{case}");
        }
        let fault = check(150, None, 0, 9, 2).unwrap_err().to_string();
        assert!(
            fault.contains("has room for 150 B, and checkpoints of 100 B need 200 B: one is kept until"),
            "{fault}"
        );
        assert!(fault.contains("checkpoint.every = 0"), "{fault}");
    }
}
