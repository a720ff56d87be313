//! Images of noise, with a class each: enough for parity.

use meshwork_models::network::{IMAGES, LABELS};
use meshwork_nn::Batch;
use meshwork_tensor::random;
use std::ops::Range;

/// Images of a global batch.
pub const BATCH: usize = 16;

/// Some of the images of a step.
pub fn images(step: usize, samples: Range<usize>) -> Batch {
    let mut pixels = vec![0.0; samples.len() * 64];
    random::fill_uniform(random::key(9, "pixels"), ((step * BATCH + samples.start) * 64) as u64, &mut pixels);
    let labels = samples.map(|sample| ((step * BATCH + sample) * 7 % 10) as i32).collect();
    batch(pixels, labels)
}

/// A batch of these pixels and labels.
pub fn batch(pixels: Vec<f32>, labels: Vec<i32>) -> Batch {
    Batch::new(labels.len()).with(IMAGES, [8, 8, 1], pixels).unwrap().with(LABELS, [], labels).unwrap()
}
