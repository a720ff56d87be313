//! Gradients on a disk, bucket by bucket. With each that comes back the next one is read, in the direction in which the
//! last two lay: backward and the update go over them in order, and the norm nearly so, from the other end.

use super::disk::{Disk, Reading, Writing};
use super::space::Region;
use meshwork_core::{Buffer, DType};
use meshwork_data_parallel::{Parking, VectorError};
use meshwork_tensor::Category;
use std::collections::BTreeMap;
use std::rc::Rc;

/// The gradients of a rank, on its disk.
#[derive(Debug)]
pub struct Parked {
    disk: Rc<Disk>,
    places: BTreeMap<usize, Place>,
    /// The write under way, which the next one waits for.
    writing: Option<Writing>,
    ahead: Option<(usize, Reading)>,
    /// The place that was asked for last.
    last: usize,
}

/// Where a vector was written to, what it is made of, and whether that was in this step.
#[derive(Debug)]
struct Place {
    region: Rc<Region>,
    dtype: DType,
    count: usize,
    fresh: bool,
}

impl Parked {
    /// Nothing is parked yet.
    pub fn on(disk: &Rc<Disk>) -> Self {
        let (places, writing, ahead, last) = Default::default();
        Self { disk: disk.clone(), places, writing, ahead, last }
    }

    fn place(&self, place: usize) -> Result<&Place, VectorError> {
        Ok(self.places.get(&place).ok_or("these gradients were never parked")?)
    }

    fn read(&self, place: usize) -> Result<Reading, VectorError> {
        let _gradients = self.disk.device().meter().enter(Category::Gradients);
        let Place { region, dtype, count, .. } = self.place(place)?;
        Ok(self.disk.read(region, 0, *dtype, *count)?)
    }
}

impl Parking for Parked {
    fn put(&mut self, place: usize, vector: Buffer) -> Result<(), VectorError> {
        self.ahead.take_if(|(ahead, _)| *ahead == place);
        if let Some(writing) = self.writing.take() {
            writing.wait()?;
        }
        let (dtype, count) = (vector.dtype(), vector.count());
        let new = || Place { region: self.disk.region(vector.bytes()), dtype, count, fresh: true };
        let place = self.places.entry(place).or_insert_with(new);
        place.fresh = true;
        self.writing = Some(self.disk.write(&place.region, 0, vector)?);
        Ok(())
    }

    fn get(&mut self, place: usize) -> Result<Buffer, VectorError> {
        let reading = match self.ahead.take() {
            Some((ahead, reading)) if ahead == place => reading,
            _ => self.read(place)?,
        };
        let vector = reading.wait()?;
        let back = place < std::mem::replace(&mut self.last, place);
        let (before, behind) = (self.places.range(..place).next_back(), self.places.range(place + 1..).next());
        let next = if back { before } else { behind }.filter(|(_, next)| next.fresh).map(|(&next, _)| next);
        self.ahead = next.map(|next| self.read(next).map(|reading| (next, reading))).transpose()?;
        Ok(vector)
    }

    fn peek(&self, place: usize) -> Result<Buffer, VectorError> {
        let Place { region, dtype, count, .. } = self.place(place)?;
        Ok(self.disk.read_now(region, 0, *dtype, *count)?)
    }

    fn begin(&mut self) {
        (self.writing, self.ahead, self.last) = (None, None, 0);
        self.places.values_mut().for_each(|place| place.fresh = false);
    }
}
