//! Tables of integers that kernels read and that come again in each step: uploaded once, and kept by their content. So
//! a step does not wait for copies that were made before, and its work is the same as in the step before
//! ([`crate::replay`]).

use super::prelude::*;
use std::collections::HashMap;

/// Number of cached tables. When there are more, the cache is cleared, and recurring tables are uploaded again.
const MOST: usize = 4096;

/// The cached tables.
#[derive(Debug, Default)]
pub(super) struct Tables(Mutex<HashMap<Vec<i64>, Buffer>>);

impl CudaDevice {
    /// These numbers on the device, two in each integer of the table.
    pub(super) fn kept_f32(&self, numbers: &[f32]) -> Result<Buffer> {
        let bits = |pair: &[f32]| pair.iter().rev().fold(0, |word, x| word << 32 | i64::from(x.to_bits()));
        self.kept(numbers.chunks(2).map(bits).collect())
    }

    /// These numbers on the device.
    pub(super) fn kept(&self, numbers: Vec<i64>) -> Result<Buffer> {
        let mut tables = self.tables.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = tables.get(&numbers) {
            return Ok(table.clone());
        }
        if tables.len() >= MOST {
            tables.clear();
        }
        let table = self.uploaded(&Buffer::from_slice(&numbers), false)?;
        tables.insert(numbers, table.clone());
        Ok(table)
    }
}
