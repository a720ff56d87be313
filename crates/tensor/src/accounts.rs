//! The live memory of a device by category, and a limit on it.

use crate::error::{Error, Result};
use crate::memory::{Category, MemoryUse};
use std::sync::{Mutex, MutexGuard, PoisonError};

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
