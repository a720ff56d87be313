//! Further questions of a trainer to a schedule: where a rank may pause, and which weights it needs.

use crate::ActionKind::{Backward, Forward, InputGradient, RecvActivation, RecvGradient, Update};
use crate::{Action, Lowered};

impl Lowered {
    /// Number of actions of a rank before its first backward and the message for which that backward waits: the
    /// warm-up, in which weights are read and no gradient is written.
    ///
    /// ```
    /// use meshwork_pipeline::{lower, one_f_one_b};
    ///
    /// let lowered = lower(&one_f_one_b(2, 2))?;
    /// let warm_up = |rank: usize| lowered.actions(rank)[..lowered.warm_up(rank)].iter().map(ToString::to_string).collect::<Vec<_>>();
    /// assert_eq!(warm_up(0), ["0F0", "0SF0", "0F1", "0SF1"]);
    /// assert_eq!(warm_up(1), ["1RF0", "1F0"]);
    /// # Ok::<(), meshwork_pipeline::CheckError>(())
    /// ```
    pub fn warm_up(&self, rank: usize) -> usize {
        self.before(rank, |action| matches!(action.kind, Backward | InputGradient | RecvGradient))
    }

    /// Number of actions of a rank before the first forward of a micro-batch from `micro` on, and before the message
    /// for which that forward waits.
    pub fn after_forwards(&self, rank: usize, micro: usize) -> usize {
        self.before(rank, |action| matches!(action.kind, Forward | RecvActivation) && action.micro >= micro)
    }

    /// Number of actions before the first that is `wanted`.
    fn before(&self, rank: usize, wanted: impl Fn(&Action) -> bool) -> usize {
        let actions = self.actions(rank);
        actions.iter().position(wanted).unwrap_or(actions.len())
    }

    /// Per rank: the number of messages that it sends to `to` in its warm-up and that `to` does not receive in its own.
    /// A rank that reruns its warm-up has to drop these. `None` if the warm-up of some rank waits for a message that
    /// another sends only after its own warm-up: then warm-ups cannot be rerun.
    ///
    /// ```
    /// use meshwork_pipeline::{lower, one_f_one_b, zb_h2};
    ///
    /// assert_eq!(lower(&one_f_one_b(3, 4))?.unreceived(2), Some(vec![0, 1, 0]));
    /// assert_eq!(lower(&zb_h2(3, 8))?.unreceived(1), Some(vec![2, 0, 0]));
    /// # Ok::<(), meshwork_pipeline::CheckError>(())
    /// ```
    pub fn unreceived(&self, to: usize) -> Option<Vec<usize>> {
        let ranks = || 0..self.schedule().ranks;
        let closed = ranks().all(|from| ranks().all(|to| self.left_over(from, to).is_some()));
        closed.then(|| ranks().filter_map(|from| self.left_over(from, to)).collect())
    }

    /// Number of messages that `from` sends to `to` in its warm-up and that `to` does not receive in its own; `None` if
    /// it receives more.
    fn left_over(&self, from: usize, to: usize) -> Option<usize> {
        let messages = |rank: usize, peer: usize, sends: bool| {
            let warm_up = &self.actions(rank)[..self.warm_up(rank)];
            warm_up.iter().filter(|action| self.peer(action) == Some(peer) && action.kind.is_send() == sends).count()
        };
        messages(from, to, true).checked_sub(messages(to, from, false))
    }

    /// Number of updates of each stage in the schedule: 0 in a synchronous one.
    pub fn updates(&self) -> usize {
        self.actions(self.schedule().rank_of(0, 0))
            .iter()
            .filter(|action| action.kind == Update && action.stage == 0)
            .count()
    }

    /// The largest number of versions by which the version that a forward of `rank` reads is behind the newest at that
    /// time.
    pub fn versions_behind(&self, rank: usize) -> usize {
        let mut newest = vec![0_usize; self.schedule().stages()];
        let mut behind = 0;
        for action in self.actions(rank) {
            match action.kind {
                Update => newest[action.stage] += 1,
                Forward => {
                    behind = behind.max(newest[action.stage].saturating_sub(self.version(action.stage, action.micro)))
                }
                _ => {}
            }
        }
        behind
    }

    /// The rank at the other end of a message.
    fn peer(&self, action: &Action) -> Option<usize> {
        action.counterpart().map(|other| self.schedule().rank_of(other.stage, other.micro))
    }
}
