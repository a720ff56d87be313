//! Tables of integers for kernels that recur in each step: uploaded once, and cached by content. So a step does not
//! wait for copies of known tables, and its work equals the previous step's ([`crate::replay`]).

use super::CudaDevice;
use meshwork_core::Buffer;
use meshwork_tensor::Result;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Number of cached tables. When there are more, the cache is cleared, and recurring tables are uploaded again.
const MOST: usize = 4096;

/// The cached tables.
#[derive(Debug, Default)]
pub(super) struct Tables(Mutex<HashMap<Vec<i64>, Buffer>>);

impl CudaDevice {
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
