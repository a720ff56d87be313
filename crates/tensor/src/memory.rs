//! The uses of memory.

use std::fmt;

meshwork_core::named! {
    /// The use of a buffer.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Category {
        /// Weights.
        Parameters = "parameters",
        /// Gradients of weights, those on their way to other ranks among them.
        Gradients = "gradients",
        /// States of the optimizer.
        Optimizer = "optimizer",
        /// Values that forward keeps for backward, and that either needs while it runs.
        Activations = "activations",
        /// Messages between stages, weights that are brought together for a while, and copies for an update.
        Buffers = "buffers",
        /// Everything else: batches, sums for reports.
        #[default]
        Other = "other",
    }
    name: "`parameters`, ...", ALL: "All of them, in the order of reports."
}

/// Bytes by category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse(pub(crate) [u64; Category::ALL.len()]);

impl MemoryUse {
    /// From the bytes of each category, in the order of [`Category::ALL`].
    pub const fn new(bytes: [u64; Category::ALL.len()]) -> Self {
        Self(bytes)
    }

    /// The bytes of a category.
    pub const fn bytes_of(&self, category: Category) -> u64 {
        self.0[category as usize]
    }

    /// The bytes of all categories.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Each category with its bytes.
    pub fn iter(&self) -> impl Iterator<Item = (Category, u64)> + '_ {
        Category::ALL.into_iter().map(|category| (category, self.bytes_of(category)))
    }
}

/// `parameters 1,024 B, activations 4,096 B`: the categories that have bytes.
impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held: Vec<_> = self.iter().filter(|&(_, bytes)| bytes > 0).collect();
        if held.is_empty() {
            return f.write_str("nothing");
        }
        for (at, (category, bytes)) in held.into_iter().enumerate() {
            let comma = if at > 0 { ", " } else { "" };
            write!(f, "{comma}{} {}", category.name(), Bytes(bytes))?;
        }
        Ok(())
    }
}

/// Bytes as a person reads them: `512 B`, `1.5 MiB`.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut value, mut unit) = (self.0 as f64, "B");
        for larger in ["KiB", "MiB", "GiB", "TiB"] {
            if value < 1024.0 {
                break;
            }
            (value, unit) = (value / 1024.0, larger);
        }
        if unit == "B" { write!(f, "{value} B") } else { write!(f, "{value:.1} {unit}") }
    }
}
