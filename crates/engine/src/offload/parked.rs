//! Gradients on a disk, bucket by bucket. While one bucket is used, the next one is read ahead: the one behind it if
//! the last two were read upwards, else the one before it. Backward and the update read the buckets in order, and the
//! norm reads them nearly in the reverse order.

use super::disk::{Disk, Reading, Writing};
use super::space::Region;
use crate::prelude::*;
use meshwork_data_parallel::{Parking, VectorError};

/// The gradients of a rank, on its disk.
#[derive(Debug)]
pub struct Parked {
    disk: Rc<Disk>,
    /// By bucket.
    stored: BTreeMap<usize, Stored>,
    /// The write under way, which the next one waits for.
    writing: Option<Writing>,
    /// The bucket that is read ahead.
    ahead: Option<(usize, Reading)>,
    /// The bucket that was read last.
    last: usize,
}

/// A vector on the disk.
#[derive(Debug)]
struct Stored {
    region: Rc<Region>,
    dtype: DType,
    count: usize,
    /// Whether it was written in this step.
    fresh: bool,
}

impl Parked {
    /// Nothing is parked yet.
    pub fn on(disk: &Rc<Disk>) -> Self {
        let (stored, writing, ahead, last) = Default::default();
        Self { disk: disk.clone(), stored, writing, ahead, last }
    }

    fn stored(&self, bucket: usize) -> Result<&Stored, VectorError> {
        Ok(self.stored.get(&bucket).ok_or("these gradients were never parked")?)
    }

    fn read(&self, bucket: usize) -> Result<Reading, VectorError> {
        let _gradients = self.disk.device().meter().enter(Category::Gradients);
        let Stored { region, dtype, count, .. } = self.stored(bucket)?;
        Ok(self.disk.read(region, 0, *dtype, *count)?)
    }
}

impl Parking for Parked {
    fn put(&mut self, bucket: usize, vector: Buffer) -> Result<(), VectorError> {
        self.ahead.take_if(|(ahead, _)| *ahead == bucket);
        if let Some(writing) = self.writing.take() {
            writing.wait()?;
        }
        let (dtype, count) = (vector.dtype(), vector.count());
        let new = || Stored { region: self.disk.region(vector.bytes()), dtype, count, fresh: true };
        let stored = self.stored.entry(bucket).or_insert_with(new);
        stored.fresh = true;
        self.writing = Some(self.disk.write(&stored.region, 0, vector)?);
        Ok(())
    }

    fn get(&mut self, bucket: usize) -> Result<Buffer, VectorError> {
        let reading = match self.ahead.take() {
            Some((ahead, reading)) if ahead == bucket => reading,
            _ => self.read(bucket)?,
        };
        let vector = reading.wait()?;
        let back = bucket < std::mem::replace(&mut self.last, bucket);
        let (before, behind) = (self.stored.range(..bucket).next_back(), self.stored.range(bucket + 1..).next());
        let next = if back { before } else { behind }.filter(|(_, next)| next.fresh).map(|(&next, _)| next);
        self.ahead = next.map(|next| self.read(next).map(|reading| (next, reading))).transpose()?;
        Ok(vector)
    }

    fn peek(&self, bucket: usize) -> Result<Buffer, VectorError> {
        let Stored { region, dtype, count, .. } = self.stored(bucket)?;
        Ok(self.disk.read_now(region, 0, *dtype, *count)?)
    }

    fn begin(&mut self) {
        (self.writing, self.ahead, self.last) = (None, None, 0);
        self.stored.values_mut().for_each(|stored| stored.fresh = false);
    }
}
