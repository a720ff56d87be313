//! The addresses that reductions of several ranks take.

use super::prelude::*;
use crate::driver::{Driver, DriverError, Stream};
use std::collections::{HashMap, VecDeque};

/// Tables of addresses on the device, which reductions read: written once for each set of buffers, which come again in
/// each step, because the allocator gives the same blocks.
#[derive(Debug, Default)]
pub(super) struct AddressTables {
    known: HashMap<Vec<u64>, Address>,
    /// The tables of a length, the oldest first.
    ages: HashMap<usize, VecDeque<Vec<u64>>>,
}

impl AddressTables {
    /// Tables of one length that are kept. A program whose buffers never come again writes one of them anew for each
    /// reduction.
    const MOST: usize = 1024;

    /// Where these addresses lie. A table that is given up is overwritten in the same stream, after its last use.
    pub(super) fn place(
        &mut self,
        driver: &dyn Driver,
        stream: Stream,
        places: Vec<u64>,
    ) -> Result<Address, DriverError> {
        if let Some(known) = self.known.get(&places) {
            return Ok(*known);
        }
        let bytes: Vec<u8> = places.iter().flat_map(|place| place.to_le_bytes()).collect();
        let ages = self.ages.entry(places.len()).or_default();
        let oldest = if ages.len() < Self::MOST { None } else { ages.pop_front() };
        let at = match oldest.and_then(|oldest| self.known.remove(&oldest)) {
            Some(at) => at,
            None => driver.alloc(bytes.len())?,
        };
        driver.write(stream, at, &bytes)?;
        ages.push_back(places.clone());
        self.known.insert(places, at);
        Ok(at)
    }

    /// All of them, when nobody needs them any more.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Address> + use<> {
        std::mem::take(self).known.into_values()
    }
}
