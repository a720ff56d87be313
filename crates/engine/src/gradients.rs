//! Gradients: every use and micro-batch adds to a gradient's bucket, which is reduced once it is final.

use crate::layout::{Layout, Span};
use crate::prelude::*;
use meshwork_data_parallel::{BucketEvent, ReduceError, Reducer};
use meshwork_tensor::Result;
use meshwork_tensor::param::host_floats;
use meshwork_tensor::tape::{GradShard, GradSink, GradSlot};
use std::time::Instant;

/// The gradients of one rank's parameters, in the reducer's buckets.
#[derive(Debug)]
pub struct Gradients {
    /// Reading brings parked buckets back.
    reducer: RefCell<Reducer>,
    layout: Layout,
    /// The order of sums in canonical numerics; in fast numerics each share is added to the sum of those before it.
    ordered: Option<OrderedSums>,
    device: Arc<dyn Device>,
    /// When each bucket's reduction was started, and when it was seen to be over.
    pub events: Vec<(Instant, BucketEvent)>,
    seen_done: Vec<bool>,
}

impl Gradients {
    pub fn new(layout: Layout, reducer: Reducer, device: Arc<dyn Device>) -> Self {
        let parameters = layout.declarations.specs().len();
        let ordered = layout.declarations.reduction_blocks().map(|_| OrderedSums::new(parameters));
        let seen_done = vec![false; reducer.buckets()];
        Self { reducer: RefCell::new(reducer), layout, ordered, device, events: Vec::new(), seen_done }
    }

    /// Forgets every gradient before the update of this number, from 0: the first share of each overwrites it.
    pub fn begin(&mut self, update: u64) {
        self.reducer.get_mut().begin(update);
        self.events.clear();
        self.seen_done.fill(false);
        self.ordered.iter_mut().for_each(OrderedSums::clear);
    }

    /// Sets the segment whose shares come next.
    pub fn of_segment(&mut self, number: usize) {
        self.ordered.iter_mut().for_each(|ordered| ordered.segment = number);
    }

    /// Waits until every gradient is reduced, and adds up their copies.
    pub fn finish(&mut self) -> std::result::Result<(), TrainError> {
        let events = &mut self.events;
        let seen_done = &self.seen_done;
        self.reducer.get_mut().finish(|event| {
            if !matches!(event, BucketEvent::Done(bucket) if seen_done[bucket]) {
                events.push((Instant::now(), event));
            }
        })?;
        if self.ordered.is_none() {
            return Ok(());
        }
        let copies = |id: ParamId| self.layout.trace.copies[id.index()];
        for &id in self.layout.trained().iter().flatten().filter(|&&id| copies(id) > 1) {
            let &Span { flat: bucket, member, .. } = self.layout.span(id);
            // The sum goes to the gradient's place in a bucket without copies, before the copies of the next member.
            let (reducer, copies) = (self.reducer.get_mut(), copies(id));
            let all = reducer.range(bucket, member);
            reducer.fetch(bucket)?;
            let buffer = reducer.gradients_mut(bucket).ok_or(ReduceError::Lost { bucket })?;
            self.device.pointwise()?.tree_sum(buffer, all.start, copies, all.len() / copies, all.start / copies)?;
        }
        Ok(())
    }

    /// Gives `work` a state that the compressed sums of a bucket keep, by its name.
    pub fn sum_state<T>(
        &self,
        bucket: usize,
        name: &str,
        work: impl FnOnce(&mut Buffer) -> Result<T>,
    ) -> std::result::Result<T, TrainError> {
        let mut reducer = self.reducer.borrow_mut();
        let mut states = reducer.sum_mut(bucket).map_or_else(Vec::new, |sum| sum.states_mut());
        let state = states.iter_mut().find(|(state, _)| *state == name);
        let (_, state) = state.ok_or(ReduceError::Lost { bucket })?;
        Ok(work(state)?)
    }

    /// Sets all of these states to zero.
    pub fn forget_sums(&mut self) -> Result<()> {
        let (optim, reducer) = (self.device.optim()?, self.reducer.get_mut());
        for bucket in 0..reducer.buckets() {
            let states = reducer.sum_mut(bucket).map_or_else(Vec::new, |sum| sum.states_mut());
            states.into_iter().try_for_each(|(_, state)| optim.zero(state, 0..state.count()))?;
        }
        Ok(())
    }

    /// Whether gradients are parked: then one bucket should be used before the next is asked for.
    pub fn are_parked(&self) -> bool {
        self.reducer.borrow().parks()
    }

    /// The reduced gradients of a bucket, as [`bucket`](Self::bucket) has them, of `range`, counted from
    /// the first element that is kept, in host memory. Parked buckets stay parked, and the bytes read are not counted.
    pub fn peek(&self, bucket: usize, range: Range<usize>) -> std::result::Result<Vec<f32>, TrainError> {
        let reducer = self.reducer.borrow();
        if bucket >= reducer.buckets() || range.is_empty() {
            return Ok(Vec::new());
        }
        let host = match reducer.gradients(bucket) {
            Some(here) => self.device.download(&here.slice(range)?)?,
            None => match reducer.peek(bucket)? {
                Some(parked) => parked.slice(range)?,
                None => return Ok(Vec::new()),
            },
        };
        Ok(host_floats(&host)?)
    }

    /// The reduced gradients of a bucket, or this rank's slice of them; nothing for a flat buffer of frozen parameters.
    /// Parked ones come back.
    pub fn bucket(&self, bucket: usize) -> std::result::Result<Option<Buffer>, TrainError> {
        let mut reducer = self.reducer.borrow_mut();
        if bucket >= reducer.buckets() {
            return Ok(None);
        }
        reducer.fetch(bucket)?;
        Ok(reducer.gradients(bucket).cloned())
    }

    /// Records the reductions that have completed by now.
    pub fn poll(&mut self) {
        let reducer = self.reducer.get_mut();
        for bucket in 0..reducer.buckets() {
            if !self.seen_done[bucket] && reducer.is_reduced(bucket) {
                self.seen_done[bucket] = true;
                self.events.push((Instant::now(), BucketEvent::Done(bucket)));
            }
        }
    }
}

/// The sums of canonical numerics: one tree for each copy of a gradient, over the samples of the batch.
#[derive(Debug)]
struct OrderedSums {
    /// The segment whose shares come.
    segment: usize,
    /// Per parameter: waiting sums, by the first of the copies that arrive together.
    sums: Vec<BTreeMap<usize, Waiting>>,
}

/// Sums of subtrees that wait for their siblings, in the order of their samples. A micro-batch of experts has samples
/// of several ranks, so that they may come in any order.
#[derive(Debug, Default)]
struct Waiting {
    copies: usize,
    /// (samples, sum). The sum that came first is in the bucket, and is `None` here.
    sums: Vec<(Range<u64>, Option<Buffer>)>,
}

impl OrderedSums {
    fn new(parameters: usize) -> Self {
        Self { segment: 0, sums: (0..parameters).map(|_| BTreeMap::new()).collect() }
    }

    fn clear(&mut self) {
        self.sums.iter_mut().for_each(BTreeMap::clear);
    }
}

impl Waiting {
    /// Adds sum `i + 1` to sum `i`. The sum that is in the bucket begins at element `start` of it.
    fn join(&mut self, i: usize, device: &dyn Device, bucket: &mut Buffer, start: usize) -> Result<()> {
        let (right, right_sum) = self.sums.remove(i + 1);
        let (samples, left_sum) = &mut self.sums[i];
        samples.end = right.end;
        match (left_sum.as_mut(), right_sum) {
            (Some(left), Some(right)) => device.pointwise()?.add_assign(left, 0, &right),
            (None, Some(right)) => device.pointwise()?.add_assign(bucket, start, &right),
            // The same bits: a sum of two does not depend on their order.
            (Some(left), None) => {
                device.pointwise()?.add_assign(bucket, start, left)?;
                *left_sum = None;
                Ok(())
            }
            (None, None) => Err(Error::Backward("two sums of a gradient are in its bucket".to_owned())),
        }
    }

    /// The first of two sums that are siblings.
    fn siblings(&self) -> Option<usize> {
        self.sums.array_windows().position(|[(left, _), (right, _)]| {
            let len = left.end - left.start;
            left.end == right.start && len == right.end - right.start && left.start.is_multiple_of(2 * len)
        })
    }

    /// Where a sum of these samples belongs; `None` if some of them are here.
    fn place_of(&self, samples: &Range<u64>) -> Option<usize> {
        let at = self.sums.partition_point(|(range, _)| range.start < samples.start);
        let before = at.checked_sub(1).is_none_or(|before| self.sums[before].0.end <= samples.start);
        let after = self.sums.get(at).is_none_or(|(range, _)| samples.end <= range.start);
        (before && after).then_some(at)
    }
}

impl Gradients {
    /// Where a share goes in canonical numerics: new memory, or the bucket if it is the first of its tree.
    fn place_in_order(&mut self, share: &GradShard) -> Result<GradSlot<'_>> {
        let &Span { flat: bucket, member, .. } = self.layout.span(share.id);
        let (buffer, all, _) = self.reducer.get_mut().gradient(bucket, member).map_err(as_backward)?;
        let Some(ordered) = &mut self.ordered else {
            return Ok(GradSlot { buffer, start: all.start, first: true });
        };
        let copies = self.layout.trace.copies[share.id.index()];
        let before = self.layout.trace.first_copy.get(&(ordered.segment, share.id)).copied().unwrap_or(0);
        let first = before + share.copies.start;
        let n = all.len() / copies;
        let start = all.start + first * n;
        let waiting = ordered.sums[share.id.index()].entry(first).or_default();
        let place = waiting.place_of(&share.samples);
        let Some(_) = place.filter(|_| before + share.copies.end <= copies) else {
            return Err(Error::Backward(format!(
                "a share of samples {:?} for copies {:?} of the gradient of parameter {}, which has {copies}, and has samples {:?}",
                share.samples,
                share.copies,
                share.id.index(),
                waiting.sums.iter().map(|(samples, _)| samples).collect::<Vec<_>>()
            )));
        };
        while let Some(left) = waiting.siblings() {
            waiting.join(left, &*self.device, buffer, start)?;
        }
        waiting.copies = share.copies.len();
        if waiting.sums.is_empty() {
            waiting.sums.push((share.samples.clone(), None));
            return Ok(GradSlot { buffer, start, first: true });
        }
        let room = self.device.alloc(buffer.dtype(), n * share.copies.len())?;
        let at = waiting.sums.partition_point(|(range, _)| range.start < share.samples.start);
        waiting.sums.insert(at, (share.samples.clone(), None));
        Ok(GradSlot { buffer: waiting.sums[at].1.insert(room), start: 0, first: true })
    }

    /// Adds up the waiting sums of a gradient, and zeroes the copies that no stage of this rank fills.
    fn finish_order(&mut self, id: ParamId) -> Result<()> {
        let &Span { flat: bucket, member, .. } = self.layout.span(id);
        let Some(ordered) = &mut self.ordered else { return Ok(()) };
        let (buffer, all, _) = self.reducer.get_mut().gradient(bucket, member).map_err(as_backward)?;
        let n = all.len() / self.layout.trace.copies[id.index()];
        let mut filled = 0;
        for (&first, waiting) in &mut ordered.sums[id.index()] {
            let start = all.start + first * n;
            while let Some(left) = waiting.siblings() {
                waiting.join(left, &*self.device, buffer, start)?;
            }
            if let Some([(left, _), (right, _)]) = waiting.sums.array_windows().find(|[a, b]| a.0.end != b.0.start) {
                let id = id.index();
                return Err(Error::Backward(format!(
                    "the gradient of parameter {id} has samples {left:?} and {right:?}, and none between"
                )));
            }
            while let Some(left) = waiting.sums.len().checked_sub(2) {
                waiting.join(left, &*self.device, buffer, start)?;
            }
            self.device.optim()?.zero(buffer, all.start + filled * n..start)?;
            filled = first + waiting.copies;
        }
        self.device.optim()?.zero(buffer, all.start + filled * n..all.end)
    }
}

impl Gradients {
    /// Refuses a gradient of other types than its reduction was made for.
    fn require_traced(&self, share: &GradShard) -> Result<()> {
        match self.layout.trace.types[share.id.index()] {
            Some(types) if types == share.types => Ok(()),
            traced => Err(Error::Backward(format!(
                "the gradient of {} has the types {}, and before the first step it had {}: its reduction would be another \
                 one; a model reads a parameter in the same way in every micro-batch",
                self.layout.declarations.spec(share.id).name,
                share.types,
                traced.map_or("none".to_owned(), |types| types.to_string())
            ))),
        }
    }
}

impl GradSink for Gradients {
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()> {
        let device = Arc::clone(&self.device);
        let Some(GradSlot { buffer, start, first }) = self.place(share)? else { return Ok(()) };
        if first {
            device.optim()?.zero(buffer, start..start + grad.buffer().count())?;
        }
        device.pointwise()?.add_assign(buffer, start, grad.buffer())
    }

    fn place(&mut self, share: &GradShard) -> Result<Option<GradSlot<'_>>> {
        self.require_traced(share)?;
        if self.ordered.is_some() {
            return self.place_in_order(share).map(Some);
        }
        let &Span { flat: bucket, member, .. } = self.layout.span(share.id);
        let (buffer, range, first) = self.reducer.get_mut().gradient(bucket, member).map_err(as_backward)?;
        Ok(Some(GradSlot { buffer, start: range.start, first }))
    }

    fn ready(&mut self, id: ParamId) -> Result<()> {
        let &Span { flat: bucket, member, .. } = self.layout.span(id);
        if self.ordered.is_some() && self.reducer.get_mut().awaits(bucket, member) == 1 {
            self.finish_order(id)?;
        }
        if let Some(event) = self.reducer.get_mut().ready(bucket, member).map_err(as_backward)? {
            self.events.push((Instant::now(), event));
        }
        self.poll();
        Ok(())
    }
}

fn as_backward(error: ReduceError) -> Error {
    match error {
        ReduceError::Comm { source, .. } => Error::Comm(source),
        ReduceError::Vectors { source, .. } if source.is::<TrainError>() => Error::Saved(source),
        other => Error::Backward(other.to_string()),
    }
}
