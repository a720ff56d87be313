//! The way of a gradient: added to its bucket by every use and micro-batch, reduced once it is final.

use meshwork_core::Buffer;
use meshwork_data_parallel::{BucketEvent, ReduceError, Reducer};
use meshwork_tensor::tape::{GradSink, Place};
use meshwork_tensor::{Device, Error, ParamId, Result, Tensor};
use std::sync::Arc;
use std::time::Instant;

/// The gradients of one rank's parameters, in the reducer's buckets.
#[derive(Debug)]
pub struct Gradients {
    reducer: Reducer,
    /// Per parameter: (bucket, member within it).
    places: Vec<(usize, usize)>,
    /// Per parameter: how many tapes of a step read it.
    readers: Vec<usize>,
    /// Per parameter: how many of those have not added their share yet.
    missing: Vec<usize>,
    /// Per parameter: whether it has no share yet, and the bucket holds last step's.
    empty: Vec<bool>,
    device: Arc<dyn Device>,
    /// When each bucket's reduction was started, and when it was seen to be over.
    events: Vec<(Instant, BucketEvent)>,
    seen_done: Vec<bool>,
}

impl Gradients {
    /// Gradients in the buckets of `reducer`. `chunks_reading` counts, per parameter, the chunks of this rank that read it; each
    /// does so once per micro-batch.
    pub fn new(
        reducer: Reducer,
        places: Vec<(usize, usize)>,
        chunks_reading: &[usize],
        micros: usize,
        device: Arc<dyn Device>,
    ) -> Self {
        let readers: Vec<usize> = chunks_reading.iter().map(|chunks| chunks * micros).collect();
        let seen_done = vec![false; reducer.buckets()];
        let empty = vec![true; readers.len()];
        Self { reducer, places, missing: readers.clone(), empty, readers, device, events: Vec::new(), seen_done }
    }

    /// Forgets every gradient before a step: the first share of each overwrites it.
    pub fn begin(&mut self) {
        self.missing.copy_from_slice(&self.readers);
        self.empty.fill(true);
        self.events.clear();
        self.seen_done.fill(false);
    }

    /// Waits until every gradient is reduced.
    pub fn finish(&mut self) -> std::result::Result<(), ReduceError> {
        let events = &mut self.events;
        let seen_done = &self.seen_done;
        self.reducer.finish(|event| {
            if !matches!(event, BucketEvent::Done(bucket) if seen_done[bucket]) {
                events.push((Instant::now(), event));
            }
        })
    }

    /// The reduced gradients of a bucket.
    pub fn bucket(&self, bucket: usize) -> Option<&Buffer> {
        self.reducer.gradients(bucket)
    }

    /// The timeline of the last step's reductions.
    pub fn events(&self) -> &[(Instant, BucketEvent)] {
        &self.events
    }

    /// Notes reductions that are over by now.
    pub fn poll(&mut self) {
        for bucket in 0..self.reducer.buckets() {
            if !self.seen_done[bucket] && self.reducer.is_reduced(bucket) {
                self.seen_done[bucket] = true;
                self.events.push((Instant::now(), BucketEvent::Done(bucket)));
            }
        }
    }
}

impl GradSink for Gradients {
    fn accumulate(&mut self, id: ParamId, grad: Tensor) -> Result<()> {
        let device = Arc::clone(&self.device);
        let Some(Place { buffer, start, first }) = self.place(id)? else { return Ok(()) };
        if first {
            device.optim()?.zero(buffer, start..start + grad.buffer().count())?;
        }
        device.pointwise()?.add_assign(buffer, start, grad.buffer())
    }

    fn place(&mut self, id: ParamId) -> Result<Option<Place<'_>>> {
        let (bucket, member) = self.places[id.index()];
        let (buffer, range) = self.reducer.gradient(bucket, member).map_err(as_backward)?;
        let first = std::mem::replace(&mut self.empty[id.index()], false);
        Ok(Some(Place { buffer, start: range.start, first }))
    }

    fn ready(&mut self, id: ParamId) -> Result<()> {
        let missing = &mut self.missing[id.index()];
        *missing = missing.saturating_sub(1);
        if *missing > 0 {
            return Ok(());
        }
        let (bucket, member) = self.places[id.index()];
        if self.empty[id.index()] {
            // No use of it had a gradient.
            let (buffer, range) = self.reducer.gradient(bucket, member).map_err(as_backward)?;
            self.device.optim()?.zero(buffer, range)?;
        }
        if let Some(event) = self.reducer.ready(bucket, member).map_err(as_backward)? {
            self.events.push((Instant::now(), event));
        }
        self.poll();
        Ok(())
    }
}

fn as_backward(error: ReduceError) -> Error {
    match error {
        ReduceError::Comm { source, .. } => Error::Comm(source),
        other => Error::Backward(other.to_string()),
    }
}
