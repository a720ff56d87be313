//! AQ-SGD at the cuts (Wang et al. 2022, arXiv:2206.01299): sender and receiver keep the last activation m of every sample. The first time that
//! samples cross, they cross as they are; after that the message is of a - m, and both sides add what it restores to m, which is what the
//! receiver goes on with.
//!
//! A step crosses a cut in one way: as it is where any of its samples is new there.

use crate::feedback::Crossing;
use crate::{StateKey, TrainError};
use meshwork_core::{Buffer, DType};
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Category, Device, Shape};

/// What a rank keeps of the samples that crossed a cut.
#[derive(Debug)]
pub struct History {
    /// The name of the value.
    name: String,
    /// Extents of the value, over all samples.
    dims: Shape,
    /// What this rank holds of it.
    slice: LocalSlice,
    /// Its activations, one sample after another.
    kept: Buffer,
    /// 1 for each sample that has crossed, else 0.
    seen: Vec<f32>,
    /// Whether the step under way has a sample that is new here.
    fresh: bool,
}

/// The extents, and the slice of a rank, of the activations of `samples` samples.
pub fn of_samples(crossing: &Crossing, samples: usize) -> (Shape, LocalSlice) {
    let mut slice = crossing.slice.clone();
    slice.stored = slice.stored.with(0, samples);
    slice.ranges[0] = 0..samples;
    (crossing.dims.with(0, samples), slice)
}

impl History {
    /// The name of the state of activations.
    pub const SAMPLES: &str = "samples";
    /// That of the samples that have crossed.
    pub const SEEN: &str = "seen";

    /// Memory for `samples` samples of what crosses, none of which has crossed.
    ///
    /// # Errors
    /// No memory.
    pub fn new(crossing: &Crossing, samples: usize, device: &dyn Device) -> Result<Self, TrainError> {
        let (dims, slice) = of_samples(crossing, samples);
        let _states = device.meter().enter(Category::Optimizer);
        let kept = device.zeros(DType::F32, slice.stored.count())?;
        Ok(Self { name: crossing.name.clone(), dims, slice, kept, seen: vec![0.0; samples], fresh: false })
    }

    /// Begins a step of these samples.
    ///
    /// # Errors
    /// A sample that there is no room for.
    pub fn begin(&mut self, numbers: &[u32]) -> Result<(), TrainError> {
        let seen = |&number: &u32| match self.seen.get(number as usize) {
            Some(seen) => Ok(*seen != 0.0),
            None => Err(TrainError::Sample { number, samples: self.seen.len() }),
        };
        self.fresh = false;
        for number in numbers {
            self.fresh |= !seen(number)?;
        }
        Ok(())
    }

    /// Whether the step under way crosses as it is.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Forgets all samples.
    pub fn forget(&mut self) {
        self.seen.fill(0.0);
    }

    fn row(&self) -> usize {
        self.kept.count() / self.seen.len().max(1)
    }

    /// m of some samples, zeros in a step that crosses as it is: then the difference is the activation.
    pub fn read(&self, numbers: &[u32], count: usize, device: &dyn Device) -> Result<Buffer, TrainError> {
        let _buffers = device.meter().enter(Category::Buffers);
        let (row, mut rows) = (self.row(), device.zeros(DType::F32, count)?);
        for (at, &number) in numbers.iter().enumerate().filter(|_| !self.fresh) {
            let start = number as usize * row;
            device.layout()?.copy_into(&self.kept, start..start + row, &mut rows, at * row)?;
        }
        Ok(rows)
    }

    /// Keeps the new m of some samples.
    pub fn write(&mut self, numbers: &[u32], rows: &Buffer, device: &dyn Device) -> Result<(), TrainError> {
        let row = self.row();
        for (at, &number) in numbers.iter().enumerate() {
            device.layout()?.copy_into(rows, at * row..(at + 1) * row, &mut self.kept, number as usize * row)?;
            self.seen[number as usize] = 1.0;
        }
        Ok(())
    }

    /// The states, with extents and slice, and where their elements are.
    pub fn states(&self) -> [(StateKey, Shape, LocalSlice); 2] {
        let key = |state: &str| StateKey { parameter: self.name.clone(), state: Some(state.to_owned()) };
        let [samples, seen] = [Self::SAMPLES, Self::SEEN].map(key);
        let all = Shape::new(&[self.seen.len()]);
        [(samples, self.dims, self.slice.clone()), (seen, all, crate::state::whole(all))]
    }

    /// The activations, and the samples that have crossed.
    pub fn kept(&self) -> (&Buffer, &[f32]) {
        (&self.kept, &self.seen)
    }

    /// The same, for writing.
    pub fn kept_mut(&mut self) -> (&mut Buffer, &mut Vec<f32>) {
        (&mut self.kept, &mut self.seen)
    }
}
