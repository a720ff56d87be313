//! Images with a class each.

use super::permutation::Permutation;
use super::prelude::*;
use meshwork_models::network::{IMAGES, LABELS};
use meshwork_nn::{Batch, BatchSource};
use meshwork_tensor::{Result, Shape};

/// Images of one size, channels last, and the class of each.
#[derive(Clone, Debug, PartialEq)]
pub struct Images {
    sample: Shape,
    pixels: Vec<f32>,
    labels: Vec<i32>,
}

impl Images {
    /// The class of padding, which is not counted.
    pub const PADDING: i32 = -1;

    /// Images `[labels, sample..]`, one after another.
    ///
    /// # Panics
    /// If the number of pixels does not fit `labels.len()` samples.
    pub fn new(sample: impl Into<Shape>, pixels: Vec<f32>, labels: Vec<i32>) -> Self {
        let sample = sample.into();
        assert_eq!(pixels.len(), labels.len() * sample.count(), "pixels of {} images of {sample:?}", labels.len());
        Self { sample, pixels, labels }
    }

    /// Number of images.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Extents of one image.
    pub fn sample(&self) -> Shape {
        self.sample
    }

    /// Pixels of all images, one image after another.
    pub fn pixels(&self) -> &[f32] {
        &self.pixels
    }

    /// Class of each image.
    pub fn labels(&self) -> &[i32] {
        &self.labels
    }

    /// The images at `indices`, in that order.
    pub fn gather(&self, indices: &[usize]) -> Self {
        let n = self.sample.count();
        let pixels = indices.iter().flat_map(|&i| &self.pixels[i * n..(i + 1) * n]).copied().collect();
        Self { sample: self.sample, pixels, labels: indices.iter().map(|&i| self.labels[i]).collect() }
    }

    /// Splits the images into training images and held-out ones: every `nth` image is held out.
    pub fn hold_out(&self, nth: usize) -> (Self, Self) {
        let (held, rest): (Vec<usize>, Vec<usize>) = (0..self.len()).partition(|i| i % nth == nth - 1);
        (self.gather(&rest), self.gather(&held))
    }

    /// Parts of `count` images; the last part is filled up with padding.
    pub fn parts(&self, count: usize) -> impl Iterator<Item = Self> {
        (0..self.len()).step_by(count.max(1)).map(move |at| {
            let indices: Vec<usize> = (at..self.len().min(at + count)).collect();
            let mut part = self.gather(&indices);
            part.pixels.resize(count * self.sample.count(), 0.0);
            part.labels.resize(count, Self::PADDING);
            part
        })
    }

    /// The order of the images in an epoch: a permutation that depends on seed and epoch alone.
    pub fn order(&self, seed: u64, epoch: usize) -> Vec<usize> {
        let order = Permutation::new(self.len().max(1) as u64, seed, epoch as u64);
        (0..self.len() as u64).map(|at| order.at(at) as usize).collect()
    }
}

impl Images {
    /// All images as one batch of a [network](meshwork_models::network::Network).
    ///
    /// # Errors
    /// Never: pixels and labels fit the batch.
    pub fn to_batch(&self) -> Result<Batch> {
        Batch::new(self.len()).with(IMAGES, self.sample, self.pixels.clone())?.with(LABELS, [], self.labels.clone())
    }
}

impl BatchSource for Images {
    /// Takes the images in order, starting again at the end.
    fn batch(&self, step: u64, global_batch_size: usize, samples: Range<usize>) -> Result<Batch> {
        let first = step as usize * global_batch_size;
        let indices: Vec<usize> = samples.map(|sample| (first + sample) % self.len().max(1)).collect();
        self.gather(&indices).to_batch()
    }
}
