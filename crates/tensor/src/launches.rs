//! Launches of a device that queues repeated work as one.

use std::ops::{Add, Sub};

/// How work was queued on a device that queues repeated work as graphs: `asked` pieces by as many `launches`.
///
/// ```
/// use meshwork_tensor::Launches;
///
/// let (before, now) = (Launches { asked: 10, ..Launches::default() }, Launches { asked: 17, ..Launches::default() });
/// assert_eq!((now - before).asked, 7);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launches {
    /// Kernels, products, copies and fillings that the program asked for: launches without graphs.
    pub asked: u64,
    /// Launches: graphs, and work that was queued call by call.
    pub launches: u64,
    /// Graphs among them.
    pub graphs: u64,
    /// Graphs that were captured now.
    pub captured: u64,
    /// Kernels of graphs whose numbers were set anew.
    pub changed: u64,
    /// Work that was queued call by call, because it was not seen before: the first steps, other sizes, other
    /// addresses.
    pub new: u64,
    /// The same, because there was too little of it between two waits.
    pub short: u64,
    /// The same, because the driver captures no graphs, or there are as many as are kept.
    pub refused: u64,
}

impl Launches {
    /// The counts with their names.
    pub fn by_name(&self) -> [(&'static str, u64); 8] {
        let Self { asked, launches, graphs, captured, changed, new, short, refused } = *self;
        [
            ("asked", asked),
            ("launches", launches),
            ("graphs", graphs),
            ("captured", captured),
            ("changed", changed),
            ("new", new),
            ("short", short),
            ("refused", refused),
        ]
    }

    fn combine(self, other: Self, with: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            asked: with(self.asked, other.asked),
            launches: with(self.launches, other.launches),
            graphs: with(self.graphs, other.graphs),
            captured: with(self.captured, other.captured),
            changed: with(self.changed, other.changed),
            new: with(self.new, other.new),
            short: with(self.short, other.short),
            refused: with(self.refused, other.refused),
        }
    }
}

impl Add for Launches {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.combine(other, u64::wrapping_add)
    }
}

impl Sub for Launches {
    type Output = Self;

    /// The work queued since `before`.
    fn sub(self, before: Self) -> Self {
        self.combine(before, u64::wrapping_sub)
    }
}
