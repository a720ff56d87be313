//! Data parallelism for a training loop of any framework.

use crate::plan::{Member, plan};
use crate::reducer::{Bucket, ReduceError, Reducer};
use crate::vectors::HostVectors;
use meshwork_core::{CommError, Group, ReduceOp};
use std::ops::Range;

/// Why a step of [`Ddp`] failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DdpError {
    /// There is no parameter of this number.
    #[error("there is no parameter {parameter}: {count} were declared")]
    Parameter {
        /// The number given.
        parameter: usize,
        /// The number of parameters.
        count: usize,
    },
    /// A gradient has another length than its parameter.
    #[error("the gradient of parameter {parameter} has {found} elements, the parameter {elements}")]
    Length {
        /// The parameter.
        parameter: usize,
        /// Its elements, as declared.
        elements: usize,
        /// The gradient's.
        found: usize,
    },
    /// Two gradients of one parameter in a micro-batch that is reduced.
    #[error(
        "parameter {parameter} got two gradients in one micro-batch: add them up before, or pass those of earlier micro-batches within `no_sync`"
    )]
    Twice {
        /// The parameter.
        parameter: usize,
    },
    /// The last micro-batch of the step gave a parameter no gradient.
    #[error(
        "parameter {parameter} has no gradient from the last micro-batch (rank {rank}): if its loss does not depend on it, call `unused({parameter})`"
    )]
    Missing {
        /// The first such parameter, in the order in which they were declared.
        parameter: usize,
        /// This rank.
        rank: usize,
    },
    /// The ranks counted nothing, or something that is no count.
    #[error("the ranks have {count} samples together: the gradients' sum is divided by their number")]
    Count {
        /// The sum of the counts.
        count: f64,
    },
    /// A reduction failed.
    #[error(transparent)]
    Reduce(#[from] ReduceError),
    /// The sum of the counts failed.
    #[error("summing the number of samples: {0}")]
    Comm(#[from] CommError),
}

/// Gradients of replicas, summed over their ranks while backward goes on: PyTorch's `DistributedDataParallel`, for any framework whose
/// gradients can be read as `&[f32]`.
///
/// Each rank has all parameters and a part of the batch. In a step it passes the gradient of each parameter to
/// [`gradient`](Self::gradient), best from a hook that runs when backward has it; those of all micro-batches but the last within
/// [`no_sync`](Self::no_sync). Full buckets are reduced at once, in one order on all ranks, in whatever order gradients come.
/// [`finish`](Self::finish) waits for them and divides by the number of samples of all ranks: right for parts of unequal size too.
///
/// ```
/// use meshwork_core::comm::thread::{self, Options};
/// use meshwork_data_parallel::{Ddp, DdpError};
///
/// // The mean of x over three samples, of which rank 0 has two. The gradients are those of the sum over a rank's samples.
/// let means = thread::run(2, Options::default(), |world| {
///     let samples: &[f32] = if world.rank() == 0 { &[1.0, 2.0] } else { &[6.0] };
///     let mut ddp = Ddp::new(world, &[1], 1 << 20)?;
///     ddp.gradient(0, &[samples.iter().sum()])?;
///     ddp.finish(samples.len() as f64)?;
///     Ok::<_, DdpError>(ddp.reduced(0)?[0])
/// })?;
/// assert_eq!(means, [3.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Ddp {
    group: Group,
    reducer: Reducer,
    /// Bucket and member of each parameter.
    places: Vec<(usize, usize)>,
    /// The parameters of each bucket that still have no gradient of the last micro-batch.
    awaited: Vec<usize>,
    /// Whether a parameter's gradient of the last micro-batch is there.
    given: Vec<bool>,
    /// The first bucket whose reduction was not started.
    next: usize,
    sync: bool,
}

impl Ddp {
    /// Replicas over the ranks of `group`, of parameters of so many `elements`, in the order in which forward uses them; reduced in buckets
    /// of at most `bucket_bytes`, or of one parameter.
    ///
    /// # Errors
    /// No memory for the gradients.
    pub fn new(group: Group, elements: &[usize], bucket_bytes: usize) -> Result<Self, DdpError> {
        // Backward has the last one first.
        let members: Vec<_> =
            elements.iter().enumerate().rev().map(|(id, &elements)| Member { id, elements, key: () }).collect();
        let mut places = vec![(0, 0); elements.len()];
        let mut buckets = Vec::new();
        let mut awaited = Vec::new();
        for (at, bucket) in plan(&members, bucket_bytes / size_of::<f32>()).into_iter().enumerate() {
            let mut ranges: Vec<Range<usize>> = Vec::new();
            for (member, &id) in bucket.members.iter().enumerate() {
                places[id] = (at, member);
                let start = ranges.last().map_or(0, |range| range.end);
                ranges.push(start..start + elements[id]);
            }
            awaited.push(ranges.len());
            let rounds = if group.size() > 1 { vec![group.clone()] } else { Vec::new() };
            buckets.push(Bucket {
                members: ranges,
                elements: bucket.elements,
                rounds,
                last: None,
                scatter: false,
                shares: 1,
                fills: 1,
            });
        }
        let reducer = Reducer::new(buckets, HostVectors)?;
        Ok(Self { given: vec![false; places.len()], group, reducer, places, awaited, next: 0, sync: true })
    }

    /// Runs a micro-batch whose gradients only add to those of the step: the next one outside of it is the last, and is reduced.
    ///
    /// # Errors
    /// Those of the micro-batch.
    pub fn no_sync<T, E>(&mut self, micro_batch: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        self.sync = false;
        let result = micro_batch(self);
        self.sync = true;
        result
    }

    /// Adds a gradient of this micro-batch: the sum over the rank's samples.
    ///
    /// # Errors
    /// No such parameter, another length, a second gradient, or a reduction that could not be started.
    pub fn gradient(&mut self, parameter: usize, gradient: &[f32]) -> Result<(), DdpError> {
        let (bucket, member) = self.place(parameter)?;
        let elements = self.reducer.range(bucket, member).len();
        if gradient.len() != elements {
            return Err(DdpError::Length { parameter, elements, found: gradient.len() });
        }
        if self.given[parameter] {
            return Err(DdpError::Twice { parameter });
        }
        let (sum, range, first) = self.reducer.gradient(bucket, member)?;
        let failed = |source: meshwork_core::BufferError| ReduceError::Vectors { bucket, source: source.into() };
        let sum = &mut sum.as_mut_slice::<f32>().map_err(failed)?[range];
        match first {
            true => sum.copy_from_slice(gradient),
            false => sum.iter_mut().zip(gradient).for_each(|(sum, x)| *sum += x),
        }
        self.arrived(parameter)
    }

    /// Says that the loss of this micro-batch does not depend on a parameter: its gradient is zero.
    ///
    /// # Errors
    /// As of [`gradient`](Self::gradient).
    pub fn unused(&mut self, parameter: usize) -> Result<(), DdpError> {
        self.place(parameter)?;
        if self.given[parameter] {
            return Err(DdpError::Twice { parameter });
        }
        self.arrived(parameter)
    }

    /// Waits for the sums over all ranks and divides them by the number of `samples` of all ranks. `samples` is this rank's number, over
    /// all its micro-batches: whatever its loss was summed over.
    ///
    /// # Errors
    /// A parameter without gradient, no samples, or a reduction that failed.
    pub fn finish(&mut self, samples: f64) -> Result<(), DdpError> {
        if let Some(parameter) = self.given.iter().position(|given| !given) {
            return Err(DdpError::Missing { parameter, rank: self.group.rank() });
        }
        let mut count = [samples];
        self.group.all_reduce_slice(&mut count, ReduceOp::Sum)?;
        let [count] = count;
        if !(count > 0.0 && count.is_finite()) {
            return Err(DdpError::Count { count });
        }
        self.reducer.finish(|_| {})?;
        for bucket in 0..self.awaited.len() {
            let sums = self.reducer.gradients_mut(bucket).ok_or(ReduceError::Lost { bucket })?;
            let sums =
                sums.as_mut_slice::<f32>().map_err(|source| ReduceError::Vectors { bucket, source: source.into() })?;
            sums.iter_mut().for_each(|sum| *sum = (f64::from(*sum) / count) as f32);
        }
        self.given.fill(false);
        self.next = 0;
        for &(bucket, _) in &self.places {
            self.awaited[bucket] += 1;
        }
        Ok(())
    }

    /// The gradient of a parameter as the last [`finish`](Self::finish) left it, the same on every rank.
    ///
    /// # Errors
    /// No such parameter, or a reduction that is under way or has failed.
    pub fn reduced(&self, parameter: usize) -> Result<&[f32], DdpError> {
        let (bucket, member) = self.place(parameter)?;
        let sums = self.reducer.gradients(bucket).ok_or(ReduceError::Lost { bucket })?;
        let sums = sums.as_slice::<f32>().map_err(|source| ReduceError::Vectors { bucket, source: source.into() })?;
        Ok(&sums[self.reducer.range(bucket, member)])
    }

    fn place(&self, parameter: usize) -> Result<(usize, usize), DdpError> {
        let unknown = DdpError::Parameter { parameter, count: self.places.len() };
        self.places.get(parameter).copied().ok_or(unknown)
    }

    /// Counts a gradient of the last micro-batch, and starts the reductions of the buckets that it completes: in the order of buckets,
    /// because the ranks' gradients may come in different orders.
    fn arrived(&mut self, parameter: usize) -> Result<(), DdpError> {
        if !self.sync {
            return Ok(());
        }
        self.given[parameter] = true;
        self.awaited[self.places[parameter].0] -= 1;
        while self.awaited.get(self.next) == Some(&0) {
            let members = self.places.iter().filter(|place| place.0 == self.next).count();
            for member in 0..members {
                self.reducer.ready(self.next, member)?;
            }
            self.next += 1;
        }
        Ok(())
    }
}
