//! How weights change while a schedule runs.

/// How weights change while a schedule runs, and so which version of them a micro-batch uses.
///
/// Versions of a stage are counted in updates: version 0 is the start of training. The backward of a micro-batch
/// always reads the version that its forward at the same stage has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Weights {
    /// Synchronous training, as in GPipe and PipeDream-flush: one update per step, outside of the schedule. All
    /// micro-batches of step t use version t everywhere. The schedule holds no `U`.
    Flush,
    /// PipeDream's weight stashing (Harlap et al., 2018, section 3.3): a forward takes the latest version that its
    /// stage has, so that stages may differ; an `U` follows each backward.
    Stash,
    /// PipeDream's vertical sync (the same section): all stages take the version that stage 0 had when the micro-batch
    /// entered.
    VerticalSync,
    /// PipeDream-2BW (Narayanan et al., 2021, section 3.1): weights are updated once per batch, and the micro-batches
    /// of batch t take version max(t - 1, 0): two versions are enough.
    DoubleBuffered,
}

impl Weights {
    /// All variants.
    pub const ALL: [Self; 4] = [Self::Flush, Self::Stash, Self::VerticalSync, Self::DoubleBuffered];

    /// Its name in the text form of a schedule.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flush => "flush",
            Self::Stash => "stash",
            Self::VerticalSync => "vertical_sync",
            Self::DoubleBuffered => "double_buffered",
        }
    }

    /// Whether weights do not change while a step runs.
    pub fn is_synchronous(self) -> bool {
        self == Self::Flush
    }
}
