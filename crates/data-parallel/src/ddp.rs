//! Data parallelism for a training loop of any framework.
//!
//! More than 400 lines: the errors that a loop can meet stand beside the calls that give them.

use crate::plan::{BucketPlan, Member, plan};
use crate::reducer::{Bucket, ReduceError, Reducer};
use crate::vectors::HostVectors;
use meshwork_core::agreement::{Agreement, Disagreement, Fact, Must};
use meshwork_core::comm::Entered;
use meshwork_core::hash::combine;
use meshwork_core::{Buffer, BufferError, CommError, Group, Pending, ReduceOp};
use std::collections::VecDeque;
use std::ops::Range;

/// Why a step of [`Ddp`] failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum DdpError {
    /// There is no parameter of this number.
    #[error("there is no parameter {parameter}: {count} were declared")]
    Parameter { parameter: usize, count: usize },
    /// A gradient has another length than its parameter.
    #[error("the gradient of parameter {parameter} has {found} elements, the parameter {elements}")]
    Length { parameter: usize, elements: usize, found: usize },
    /// Two gradients of one parameter in a micro-batch that is reduced.
    #[error(
        "parameter {parameter} got two gradients in one micro-batch: add them up before, or pass those of earlier micro-batches within `no_sync`"
    )]
    Twice { parameter: usize },
    /// The last micro-batch of the step gave a parameter no gradient.
    #[error(
        "parameter {parameter} has no gradient from the last micro-batch (rank {rank}): if its loss does not depend on it, call `unused({parameter})`"
    )]
    Missing { parameter: usize, rank: usize },
    /// The ranks counted nothing, or something that is no count.
    #[error("the ranks have {count} samples together: the gradients' sum is divided by their number")]
    Count { count: f64 },
    /// No step has been finished whose gradients are there.
    #[error("there are no reduced gradients yet: call `finish` until it returns true")]
    NotYet,
    /// The ranks have other parameters or settings ([`Ddp::new`]), or what should be the same in a step is not
    /// ([`Ddp::verify`]). Every rank has the same error.
    #[error("{}{of}", step.map_or(String::new(), |step| format!("step {step}: ")))]
    Disagreement { step: Option<u64>, of: Box<Disagreement> },
    /// A reduction failed.
    #[error(transparent)]
    Reduce(#[from] ReduceError),
    /// The sum of the counts, or a comparison of the ranks, failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

meshwork_core::debug_as_display!(DdpError);

/// Gradients of replicas, summed over their ranks while backward goes on: PyTorch's `DistributedDataParallel`, for any
/// framework whose gradients can be read as `&[f32]`.
///
/// Each rank has all parameters and a part of the batch. In a step it passes the gradient of each parameter to
/// [`gradient`](Self::gradient), best from a hook that runs when backward has it; the gradients of all micro-batches
/// but the last within [`no_sync`](Self::no_sync). Full buckets are reduced at once, in one order on all ranks, in
/// whatever order gradients come. [`finish`](Self::finish) waits for them and divides by the number of samples of all
/// ranks: right for parts of unequal size too. Or ranks go on before they have each other's gradients:
/// [`with_staleness`](Self::with_staleness).
///
/// ```
/// use meshwork_core::World;
/// use meshwork_data_parallel::{Ddp, DdpError};
///
/// // The mean of x over three samples, of which rank 0 has two. Each gradient is of the sum over a rank's samples.
/// let means = World::Threads(2).run(|world| {
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
    /// With which the names of its calls begin.
    name: String,
    /// Bucket and member of each parameter.
    places: Vec<(usize, usize)>,
    /// A ring: the step whose gradients come in is at `now`, and those before it are being reduced.
    steps: Vec<Step>,
    /// Number of the step whose gradients come in.
    now: usize,
    /// The numbers of samples of the steps that are being reduced, the oldest first.
    counts: VecDeque<Pending>,
    /// Where in the ring the gradients are that were reduced last.
    reduced: Option<usize>,
    sync: bool,
}

/// The gradients of a step.
#[derive(Debug)]
struct Step {
    reducer: Reducer,
    /// Per bucket: parameters that still have no gradient of the last micro-batch.
    awaited: Vec<usize>,
    /// Whether a parameter's gradient of the last micro-batch is there.
    given: Vec<bool>,
    /// The first bucket whose reduction was not started.
    next: usize,
}

impl Ddp {
    /// Replicas over the ranks of `group`, which all call it with the same arguments, of parameters of so many
    /// `elements`, in the order in which forward uses them; reduced in buckets of at most `bucket_bytes`, or of one
    /// parameter.
    ///
    /// # Errors
    /// [`DdpError::Disagreement`] on every rank if ranks have other parameters or settings; no memory for the
    /// gradients.
    pub fn new(group: Group, elements: &[usize], bucket_bytes: usize) -> Result<Self, DdpError> {
        Self::with_staleness(group, elements, bucket_bytes, 0)
    }

    /// The same, asynchronous with bounded staleness: [`finish`](Self::finish) gives the gradients of the step that
    /// lies `staleness` steps back, and the gradients of later steps are reduced meanwhile. A rank waits for the others
    /// only when it is `staleness` steps ahead of them. The weights that an update changes are `staleness` updates
    /// newer than those that its gradients were computed with. All ranks make the same updates, and every run the same
    /// numbers. It takes the memory of `staleness` more gradients.
    pub fn with_staleness(
        group: Group,
        elements: &[usize],
        bucket_bytes: usize,
        staleness: usize,
    ) -> Result<Self, DdpError> {
        let mut facts = Agreement::default();
        let mut same = |name: String, value: usize| {
            facts.push(Fact::value(
                name,
                &value,
                "give Ddp the same parameters in the same order, and the same settings, on every rank",
            ));
        };
        same("the number of parameters".to_owned(), elements.len());
        elements.iter().enumerate().for_each(|(at, &count)| same(format!("the elements of parameter {at}"), count));
        same("the bytes of a bucket".to_owned(), bucket_bytes);
        same("the staleness".to_owned(), staleness);
        let entered = group.log().enter("Ddp::new");
        agree(&facts, &group, None)?;
        drop(entered);
        // Backward has the last one first.
        let members: Vec<_> =
            elements.iter().enumerate().rev().map(|(id, &elements)| Member { id, elements, key: () }).collect();
        let plan = plan(&members, bucket_bytes / size_of::<f32>());
        let mut places = vec![(0, 0); elements.len()];
        for (at, bucket) in plan.iter().enumerate() {
            bucket.members.iter().enumerate().for_each(|(member, &id)| places[id] = (at, member));
        }
        let rounds = if group.size() > 1 { vec![group.clone()] } else { Vec::new() };
        let bucket = |BucketPlan { members, elements: total, .. }: &BucketPlan<()>| {
            let members = members.iter().scan(0, |end, &id| {
                *end += elements[id];
                Some(*end - elements[id]..*end)
            });
            let (members, rounds) = (members.collect::<Vec<Range<usize>>>(), rounds.clone());
            Bucket { members, elements: *total, rounds, sum: None, last: None, scatter: false, shares: 1, fills: 1 }
        };
        let awaited: Vec<usize> = plan.iter().map(|bucket| bucket.members.len()).collect();
        let step = |_| {
            let reducer = Reducer::new(plan.iter().map(bucket).collect(), HostVectors)?;
            Ok::<_, DdpError>(Step { reducer, awaited: awaited.clone(), given: vec![false; places.len()], next: 0 })
        };
        let steps = (0..=staleness).map(step).collect::<Result<_, _>>()?;
        Ok(Self {
            name: group.log().name_next("Ddp"),
            group,
            places,
            steps,
            now: 0,
            counts: VecDeque::new(),
            reduced: None,
            sync: true,
        })
    }

    /// Runs a micro-batch whose gradients only add to the step's: the next one outside of it is the last, and is
    /// reduced.
    ///
    /// # Errors
    /// The error of the micro-batch.
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
        let Step { reducer, given, .. } = self.step();
        let elements = reducer.range(bucket, member).len();
        if gradient.len() != elements {
            return Err(DdpError::Length { parameter, elements, found: gradient.len() });
        }
        if given[parameter] {
            return Err(DdpError::Twice { parameter });
        }
        let (sum, range, first) = reducer.gradient(bucket, member)?;
        let sum = &mut sum.as_mut_slice::<f32>().map_err(|error| failed(bucket, error))?[range];
        if first {
            sum.copy_from_slice(gradient)
        } else {
            sum.iter_mut().zip(gradient).for_each(|(sum, x)| *sum += x)
        }
        self.arrived(parameter)
    }

    /// Says that the loss of this micro-batch does not depend on a parameter: its gradient is zero.
    pub fn unused(&mut self, parameter: usize) -> Result<(), DdpError> {
        self.place(parameter)?;
        if self.step().given[parameter] { Err(DdpError::Twice { parameter }) } else { self.arrived(parameter) }
    }

    /// Ends a step: waits for the sums over all ranks and divides them by the number of `samples` of all ranks.
    /// `samples` is this rank's number, over all its micro-batches: whatever its loss was summed over. Returns whether
    /// there are gradients to [apply](Self::reduced): with [staleness](Self::with_staleness) not in the first steps.
    ///
    /// # Errors
    /// A parameter without gradient, no samples, or a reduction that failed.
    pub fn finish(&mut self, samples: f64) -> Result<bool, DdpError> {
        if let Some(parameter) = self.step().given.iter().position(|given| !given) {
            return Err(DdpError::Missing { parameter, rank: self.group.rank() });
        }
        let _entered = self.enter("finish");
        let count = self.group.start_all_reduce(Buffer::from_vec(vec![samples]), ReduceOp::Sum)?;
        self.counts.push_back(count);
        self.now += 1;
        if self.counts.len() == self.steps.len() { self.flush() } else { Ok(false) }
    }

    /// Waits for the oldest step that is still being reduced, whatever the staleness: at the end of a run, until it
    /// returns that there is none.
    ///
    /// # Errors
    /// No samples, or a reduction that failed.
    pub fn flush(&mut self) -> Result<bool, DdpError> {
        let _entered = self.enter("flush");
        let at = (self.now - self.counts.len()) % self.steps.len();
        let Some(count) = self.counts.pop_front() else { return Ok(false) };
        let Step { reducer, awaited, given, next } = &mut self.steps[at];
        let count = count.wait()?;
        let count = count.as_slice::<f64>().map_or(f64::NAN, |count| count.iter().sum());
        reducer.finish(|_| {})?;
        // They are counted anew.
        given.fill(false);
        *next = 0;
        self.places.iter().for_each(|&(bucket, _)| awaited[bucket] += 1);
        if !(count > 0.0 && count.is_finite()) {
            return Err(DdpError::Count { count });
        }
        for bucket in 0..awaited.len() {
            let sums = reducer.gradients_mut(bucket).ok_or(ReduceError::Lost { bucket })?;
            let sums = sums.as_mut_slice::<f32>().map_err(|error| failed(bucket, error))?;
            sums.iter_mut().for_each(|sum| *sum = (f64::from(*sum) / count) as f32);
        }
        self.reduced = Some(at);
        Ok(true)
    }

    /// The gradient of a parameter as [`finish`](Self::finish) or [`flush`](Self::flush) left it, the same on every
    /// rank: until the first gradient of the next step.
    ///
    /// # Errors
    /// No such parameter, or no reduced gradients.
    pub fn reduced(&self, parameter: usize) -> Result<&[f32], DdpError> {
        let (bucket, member) = self.place(parameter)?;
        let reducer = &self.steps[self.reduced.ok_or(DdpError::NotYet)?].reducer;
        let sums = reducer.gradients(bucket).ok_or(ReduceError::Lost { bucket })?;
        Ok(&sums.as_slice::<f32>().map_err(|error| failed(bucket, error))?[reducer.range(bucket, member)])
    }

    /// Begins one of its collective calls: what this rank communicates until the result is dropped carries the name.
    fn enter(&self, call: &str) -> Entered {
        self.group.log().enter(&*format!("{}::{call}", self.name))
    }

    /// Compares the replicas, as often as a loop wants to know: the `parameters` in the order in which they were
    /// declared, and in the same way anything else that an update reads, such as its states. Collective over the group,
    /// whose ranks hash their own; a rank whose update did something else, which the gradients cannot show, is named.
    ///
    /// ```
    /// # use meshwork_core::World;
    /// # use meshwork_data_parallel::{Ddp, DdpError};
    /// let run = |rates: [f32; 2]| {
    ///     World::Threads(2).run(|world| {
    ///         let (mut weight, mut ddp) = ([1.0f32], Ddp::new(world.clone(), &[1], 1 << 20)?);
    ///         for step in 0..2 {
    ///             ddp.verify(step, [&weight[..]])?;
    ///             ddp.gradient(0, &[2.0])?;
    ///             ddp.finish(1.0)?;
    ///             weight[0] -= rates[world.rank()] * ddp.reduced(0)?[0];
    ///         }
    ///         Ok::<_, DdpError>(weight[0])
    ///     })
    /// };
    /// assert_eq!(run([0.25, 0.25])?, [0.0, 0.0]);
    /// let told = run([0.25, 0.5]).unwrap_err().to_string();
    /// assert!(told.contains("step 1: parameter 0 should be the same on all ranks, and ranks 0, 1 have different bits"), "{told}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`DdpError::Disagreement`] on every rank, with the first parameter that is not the same on all of them; a failed
    /// communication.
    pub fn verify<'a>(&self, step: u64, parameters: impl IntoIterator<Item = &'a [f32]>) -> Result<(), DdpError> {
        let mut facts = Agreement::default();
        for (at, values) in parameters.into_iter().enumerate() {
            let hash = values.iter().fold(values.len() as u64, |hash, value| combine(hash, u64::from(value.to_bits())));
            let valid =
                "start from the same values, and let every rank make the same updates from the reduced gradients alone";
            facts.push(Fact::hash(format!("parameter {at} should be the same"), Must::Agree, hash, valid));
        }
        let _entered = self.enter("verify");
        agree(&facts, &self.group, Some(step))
    }

    fn place(&self, parameter: usize) -> Result<(usize, usize), DdpError> {
        let unknown = DdpError::Parameter { parameter, count: self.places.len() };
        self.places.get(parameter).copied().ok_or(unknown)
    }

    /// The step whose gradients come in.
    fn step(&mut self) -> &mut Step {
        let at = self.now % self.steps.len();
        &mut self.steps[at]
    }

    /// Counts a gradient of the last micro-batch, and starts the reductions of the buckets that it completes: in the
    /// order of buckets, because the ranks' gradients may come in different orders.
    fn arrived(&mut self, parameter: usize) -> Result<(), DdpError> {
        let at = self.now % self.steps.len();
        // The memory of these is filled anew.
        self.reduced.take_if(|reduced| *reduced == at);
        if !self.sync {
            return Ok(());
        }
        let _entered = self.enter("gradient");
        let Step { reducer, awaited, given, next } = &mut self.steps[at];
        given[parameter] = true;
        awaited[self.places[parameter].0] -= 1;
        while awaited.get(*next) == Some(&0) {
            let members = self.places.iter().filter(|place| place.0 == *next).count();
            for member in 0..members {
                reducer.ready(*next, member)?;
            }
            *next += 1;
        }
        Ok(())
    }
}

/// Compares facts over the group.
fn agree(facts: &Agreement, group: &Group, step: Option<u64>) -> Result<(), DdpError> {
    match facts.find(group)? {
        None => Ok(()),
        Some((_, of)) => Err(DdpError::Disagreement { step, of: Box::new(of) }),
    }
}

fn failed(bucket: usize, error: BufferError) -> ReduceError {
    ReduceError::Vectors { bucket, source: error.into() }
}
