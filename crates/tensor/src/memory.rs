//! What holds a device's memory, by category, and a limit on it.

use crate::error::{Error, Result};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a buffer is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// Weights.
    Parameters,
    /// Gradients of weights, those on their way to other ranks among them.
    Gradients,
    /// States of the optimizer.
    Optimizer,
    /// What forward keeps for backward, and what either needs while it runs.
    Activations,
    /// Messages between stages, weights that are brought together for a while, and copies for an update.
    Buffers,
    /// Everything else: batches, sums for reports.
    #[default]
    Other,
}

impl Category {
    /// All of them, in the order of reports.
    pub const ALL: [Self; 6] =
        [Self::Parameters, Self::Gradients, Self::Optimizer, Self::Activations, Self::Buffers, Self::Other];

    /// `parameters`, ...
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Buffers => "buffers",
            Self::Other => "other",
        }
    }
}

/// Bytes by category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse([u64; Category::ALL.len()]);

impl MemoryUse {
    /// From the bytes of each category, in the order of [`Category::ALL`].
    pub const fn new(bytes: [u64; Category::ALL.len()]) -> Self {
        Self(bytes)
    }

    /// The bytes of a category.
    pub const fn of(&self, category: Category) -> u64 {
        self.0[category as usize]
    }

    /// The bytes of all categories.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Each category with its bytes.
    pub fn iter(&self) -> impl Iterator<Item = (Category, u64)> + '_ {
        Category::ALL.into_iter().map(|category| (category, self.of(category)))
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

/// The live buffers of a device.
#[derive(Debug, Default)]
pub(crate) struct Accounts(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    live: MemoryUse,
    peak: MemoryUse,
    /// The category of new buffers.
    current: Category,
    limit: Option<u64>,
}

/// Makes new buffers belong to a category while it lives.
#[derive(Debug)]
#[must_use = "the category ends with it"]
pub struct CategoryScope<'a> {
    accounts: &'a Accounts,
    before: Category,
}

impl Drop for CategoryScope<'_> {
    fn drop(&mut self) {
        self.accounts.lock().current = self.before;
    }
}

impl Accounts {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn enter(&self, category: Category) -> CategoryScope<'_> {
        let before = std::mem::replace(&mut self.lock().current, category);
        CategoryScope { accounts: self, before }
    }

    pub(crate) fn set_limit(&self, bytes: Option<u64>) {
        self.lock().limit = bytes;
    }

    /// Counts a new buffer; returns its category.
    pub(crate) fn grow(&self, bytes: u64) -> Result<Category> {
        let State { live, peak, current, limit } = &mut *self.lock();
        let total = live.total() + bytes;
        if let Some(limit) = limit.filter(|&limit| total > limit) {
            return Err(Error::MemoryLimit { bytes, limit, category: *current, held: Box::new(*live) });
        }
        live.0[*current as usize] += bytes;
        if total > peak.total() {
            *peak = *live;
        }
        Ok(*current)
    }

    pub(crate) fn shrink(&self, bytes: u64, category: Category) {
        self.lock().live.0[category as usize] -= bytes;
    }

    pub(crate) fn live(&self) -> MemoryUse {
        self.lock().live
    }

    pub(crate) fn peak(&self) -> MemoryUse {
        self.lock().peak
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_told_by_what_held_it_then() {
        let accounts = Accounts::default();
        let weights = {
            let _scope = accounts.enter(Category::Parameters);
            accounts.grow(10).unwrap()
        };
        let activation = {
            let _outer = accounts.enter(Category::Activations);
            let gradient = {
                let _inner = accounts.enter(Category::Gradients);
                accounts.grow(5).unwrap()
            };
            let activation = accounts.grow(7).unwrap();
            accounts.shrink(5, gradient);
            activation
        };
        assert_eq!((weights, activation), (Category::Parameters, Category::Activations));
        accounts.shrink(7, activation);
        assert_eq!(accounts.grow(11).unwrap(), Category::Other);
        assert_eq!(accounts.live(), MemoryUse::new([10, 0, 0, 0, 0, 11]));
        assert_eq!(accounts.peak(), MemoryUse::new([10, 5, 0, 7, 0, 0]));
        assert_eq!(accounts.peak().to_string(), "parameters 10 B, gradients 5 B, activations 7 B");
    }

    #[test]
    fn a_buffer_above_the_limit_is_refused_and_not_counted() {
        let accounts = Accounts::default();
        accounts.set_limit(Some(4096));
        let _scope = accounts.enter(Category::Activations);
        accounts.grow(3000).unwrap();
        let error = accounts.grow(2000).unwrap_err().to_string();
        assert_eq!(
            error,
            "2.0 KiB of activations more would exceed the limit of 4.0 KiB that this rank has: it holds activations 2.9 KiB"
        );
        assert_eq!(accounts.live().total(), 3000);
        accounts.grow(1096).unwrap();
    }
}
