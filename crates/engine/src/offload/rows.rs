//! Rows of a matrix that are read and written by their numbers, in memory or on a disk. On a disk the rows that are
//! needed next can be read ahead, and the next write waits for the writes before it. Reads see all writes before
//! them.

use super::disk::{Disk, Reading, Writing};
use super::space::Region;
use crate::prelude::*;
use std::mem::take;

/// Rows of f32s.
#[derive(Debug)]
pub struct Rows {
    /// Elements of a row.
    row: usize,
    held: Held,
    device: Arc<dyn Device>,
}

#[derive(Debug)]
enum Held {
    Memory(Buffer),
    Disk {
        disk: Rc<Disk>,
        region: Rc<Region>,
        /// Rows that are being read, and their numbers.
        ahead: Option<(Vec<usize>, Vec<Reading>)>,
        behind: Vec<Writing>,
    },
}

impl Rows {
    /// `count` rows of `row` elements, all zero.
    pub fn new(count: usize, row: usize, disk: Option<&Rc<Disk>>, device: &Arc<dyn Device>) -> Result<Self> {
        let held = match disk {
            None => Held::Memory(device.zeros(DType::F32, count * row)?),
            Some(disk) => {
                let region = disk.region(count * row * DType::F32.size());
                Held::Disk { disk: disk.clone(), region, ahead: None, behind: Vec::new() }
            }
        };
        Ok(Self { row, held, device: device.clone() })
    }

    /// Elements of a row.
    pub fn row(&self) -> usize {
        self.row
    }

    /// Some rows, one after another.
    ///
    /// # Errors
    /// No memory; a disk that fails.
    pub fn read(&mut self, numbers: &[usize]) -> Result<Buffer> {
        let (row, layout) = (self.row, self.device.layout()?);
        let mut rows = self.device.alloc(DType::F32, numbers.len() * row)?;
        match &mut self.held {
            Held::Memory(kept) => {
                for (at, number) in numbers.iter().enumerate() {
                    layout.copy_into(kept, number * row..(number + 1) * row, &mut rows, at * row)?;
                }
            }
            Held::Disk { disk, region, ahead, .. } => {
                let readings = match ahead.take() {
                    Some((of, readings)) if of == numbers => readings,
                    _ => begin(disk, region, row, numbers)?,
                };
                for (at, reading) in readings.into_iter().enumerate() {
                    layout.copy_into(&reading.wait()?, 0..row, &mut rows, at * row)?;
                }
            }
        }
        Ok(rows)
    }

    /// Begins to read rows that are needed next.
    pub fn expect(&mut self, numbers: Vec<usize>) -> Result<()> {
        if let Held::Disk { disk, region, ahead, .. } = &mut self.held {
            let readings = begin(disk, region, self.row, &numbers)?;
            *ahead = Some((numbers, readings));
        }
        Ok(())
    }

    /// Writes rows of `from`: to each number the row at that place.
    pub fn write(&mut self, from: &Buffer, places: &[(usize, usize)]) -> Result<()> {
        let row = self.row;
        self.flush()?;
        for &(number, at) in places {
            let source = at * row..(at + 1) * row;
            match &mut self.held {
                Held::Memory(kept) => self.device.layout()?.copy_into(from, source, kept, number * row)?,
                Held::Disk { disk, region, behind, .. } => {
                    let held = from.slice(source)?;
                    behind.push(disk.write(region, offset(number, row), held)?);
                }
            }
        }
        Ok(())
    }

    /// Waits for all writes, and forgets rows that were read ahead.
    pub fn flush(&mut self) -> Result<()> {
        if let Held::Disk { ahead, behind, .. } = &mut self.held {
            *ahead = None;
            take(behind).into_iter().try_for_each(|writing| writing.wait().map(drop))?;
        }
        Ok(())
    }

    /// A range of rows in host memory that no device counts.
    pub fn to_host(&self, range: Range<usize>) -> Result<Buffer> {
        let elements = range.start * self.row..range.end * self.row;
        match &self.held {
            Held::Memory(kept) => Ok(self.device.download(&kept.slice(elements)?)?),
            Held::Disk { disk, region, .. } => {
                disk.read_now(region, offset(range.start, self.row), DType::F32, elements.len())
            }
        }
    }

    /// Replaces the rows from `first` on by those in host memory.
    pub fn load(&mut self, first: usize, values: Vec<f32>) -> Result<()> {
        let values = Buffer::from_vec(values);
        match &mut self.held {
            Held::Memory(kept) => Ok(self.device.upload_into(&values, kept, first * self.row)?),
            Held::Disk { disk, region, .. } => disk.write_now(region, offset(first, self.row), values),
        }
    }
}

/// Where a row begins, in bytes.
fn offset(number: usize, row: usize) -> u64 {
    (number * row * DType::F32.size()) as u64
}

fn begin(disk: &Rc<Disk>, region: &Region, row: usize, numbers: &[usize]) -> Result<Vec<Reading>> {
    numbers.iter().map(|&number| disk.read(region, offset(number, row), DType::F32, row)).collect()
}
