//! The work of one operation: pieces that any rank may do, in any order, and the only place that touches memory.
//!
//! A piece reads the same elements of some ranks' buffers and writes them to some ranks' buffers. Pieces of one
//! operation write disjoint elements, and none reads what another writes, so that they can run at the same time and
//! the result does not depend on which rank does which piece.
//!
//! More than 400 lines: every access to the members' buffers is here, beside the argument why it is sound.

use super::reduce::{self, BLOCK, Reduce, Scratch};
use super::stream;
use crate::buffer::{Buffer, BufferError};
use crate::comm::device::{DeviceWork, Member, Moment, WorkPiece};
use crate::comm::{Call, CommError, Op, OpKind, ReduceOp};
use crate::dtype::DType;
use crate::simd::Wide;
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// Bytes read and written per claim: large compared with a wake-up, small compared with a bucket. An operation of at
/// most this size is done by the rank that arrives last, and no rank is woken to help. For the model checker, small
/// operations have several claims.
const CLAIM_BYTES: usize = if cfg!(shuttle) { 256 } else { 256 << 10 };

/// Pieces that one range is cut into if it is large: enough that the ranks which share them end at about the same time.
const PIECES: usize = 32;

/// Size in bytes from which a collective writes its result with non-temporal stores. A larger result would be evicted
/// from the caches before it is read, and these stores need not read what they overwrite.
const STREAM_BYTES: usize = 24 << 20;

/// Bytes copied to one target before the next one, so that the source stays in the first-level cache.
const COPY_BYTES: usize = 16 << 10;

/// One rank's part in an operation: its call, and where its bytes are.
///
/// Owning the call's buffers keeps the pointers valid: the output is unique, so that no other owner can reach its bytes
/// while the post exists; the input may have other owners, but shared memory cannot be written.
#[derive(Debug)]
pub(super) struct Post {
    /// Dropped before the buffers of `call`.
    device: Option<OnDevice>,
    pub(super) call: Call,
    /// The operation whose elements take another way, where members only meet.
    pub(super) meets: Option<Op>,
    source: *const u8,
    target: *mut u8,
}

// SAFETY: the pointers lead into the buffers of `call`, which are `Send` and owned by the same value.
unsafe impl Send for Post {}

impl Post {
    /// The post of a checked call. Its buffers must be on the host or on a device, and its output unique.
    pub(super) fn new(mut call: Call) -> Result<Post, PostError> {
        if let Some(device) = OnDevice::new(&call)? {
            let (source, target) = (std::ptr::null(), std::ptr::null_mut());
            return Ok(Post { device: Some(device), call, meets: None, source, target });
        }
        let target = match &mut call.output {
            Some(output) => output.as_bytes_mut()?.as_mut_ptr(),
            None => std::ptr::null_mut(),
        };
        let source = if let Some(input) = &call.input { input.as_bytes()?.as_ptr() } else { target.cast_const() };
        Ok(Post { device: None, call, meets: None, source, target })
    }

    /// What members compare.
    pub(super) fn op(&self) -> &Op {
        self.meets.as_ref().unwrap_or(&self.call.op)
    }

    /// Delivers a whole message without copying it, if both ends own blocks of the same size that nothing else refers
    /// to. They swap the blocks, so that each rank owns as much memory as before.
    pub(super) fn trade(posts: &mut [&mut Post]) -> bool {
        let [Post { call: sender, .. }, Post { call: receiver, .. }] = posts else { return false };
        match (&sender.op, &mut sender.input, &mut receiver.output) {
            (Op::Send { .. }, Some(input), Some(output)) => input.trade(output),
            _ => false,
        }
    }

    /// The moments after which the buffers on devices are the members' again.
    pub(super) fn set_done(&mut self, done: Arc<[Moment]>) {
        if let Some(device) = &mut self.device {
            device.done = done;
        }
    }

    /// The buffer that the member gets back. On a device, what the member queues from now on comes after the operation.
    pub(super) fn into_result(self) -> Result<Buffer, String> {
        if let Some(mut device) = self.device {
            device.resume()?;
        }
        let buffer = if matches!(self.call.op.kind(), OpKind::Send) { self.call.input } else { self.call.output };
        Ok(buffer.unwrap_or_else(Buffer::empty))
    }
}

/// Why a call cannot be posted.
#[derive(Debug)]
pub(super) enum PostError {
    /// Its buffers cannot be used.
    Comm(CommError),
    /// The device refused.
    Device(String),
}

crate::from!(PostError: Comm(BufferError));

/// A post whose buffers lie on a device.
#[derive(Debug)]
struct OnDevice {
    member: Member,
    done: Arc<[Moment]>,
}

impl OnDevice {
    /// The part of a call on buffers of a device; none for host memory.
    fn new(call: &Call) -> Result<Option<OnDevice>, PostError> {
        let place = |buffer: &Option<Buffer>| {
            let buffer = buffer.as_ref()?;
            let mut place = buffer.memory().on_device()?;
            place.at += (buffer.offset() * buffer.dtype().size()) as u64;
            Some(place)
        };
        let [input, output] = [place(&call.input), place(&call.output)];
        let Some(carrier) = output.as_ref().or(input.as_ref()).map(|place| Arc::clone(&place.carrier)) else {
            return Ok(None);
        };
        for (buffer, place) in [(&call.input, &input), (&call.output, &output)] {
            if buffer.is_some() && place.is_none() {
                return Err(PostError::Device("one buffer lies on the device, and the other does not".to_owned()));
            }
        }
        let number = carrier.moment().map_err(PostError::Device)?;
        let target = output.map_or(0, |place| place.at);
        let source = input.map_or(target, |place| place.at);
        let ready = Moment { carrier, number };
        Ok(Some(OnDevice { member: Member { ready, source, target }, done: Arc::default() }))
    }

    fn resume(&mut self) -> Result<(), String> {
        match std::mem::take(&mut self.done) {
            none if none.is_empty() => Ok(()),
            done => self.member.ready.carrier.resume(&done),
        }
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        _ = self.resume(); // its error stays with the device, and comes out of the rank's next call
    }
}

/// The work of an operation that every member has posted.
#[derive(Debug)]
pub(super) struct Plan {
    dtype: DType,
    reduce: ReduceOp,
    sources: Vec<*const u8>,
    targets: Vec<*mut u8>,
    pieces: Vec<WorkPiece>,
    /// Whether writes bypass the caches.
    stream: bool,
    /// The members, if their buffers lie on devices.
    members: Vec<Member>,
    /// Elements of a piece, if that is not for the caches to say.
    step: Option<usize>,
}

// SAFETY: a plan only holds addresses; using them is `run`, whose contract says when that is sound.
unsafe impl Send for Plan {}
// SAFETY: as above; nothing in a plan changes after it is made.
unsafe impl Sync for Plan {}

impl Plan {
    /// The work of `posts`, one per member (a message: sender, receiver), which agree with each other.
    pub(super) fn new(posts: &[&Post]) -> Plan {
        let mut plan = Plan {
            dtype: DType::U8,
            reduce: ReduceOp::Sum,
            sources: posts.iter().map(|post| post.source).collect(),
            targets: posts.iter().map(|post| post.target).collect(),
            pieces: Vec::new(),
            stream: false,
            members: posts.iter().filter_map(|post| Some(post.device.as_ref()?.member.clone())).collect(),
            step: None,
        };
        let Some(first) = posts.first() else { return plan };
        let buffer = first.call.input.as_ref().or(first.call.output.as_ref());
        let (dtype, count) = buffer.map_or((DType::U8, 0), |b| (b.dtype(), b.count()));
        plan.dtype = dtype;
        let (n, all) = (posts.len(), 0..posts.len());
        if !plan.members.is_empty() {
            // Of what every member gets, each has one part computed by itself.
            let parts = if let Op::AllReduce(_) | Op::Broadcast { .. } = first.call.op { n } else { 1 };
            plan.step = Some(count.div_ceil(parts).next_multiple_of(BLOCK).max(1));
        }
        match &first.call.op {
            Op::AllReduce(op) => {
                plan.reduce = *op;
                plan.cut(all.clone(), 0, all, 0, count);
            }
            Op::ReduceScatter(op) => {
                plan.reduce = *op;
                let part = count / n;
                all.clone().for_each(|to| plan.cut(all.clone(), to * part, to..to + 1, 0, part));
            }
            Op::AllGather => {
                all.clone().for_each(|from| plan.cut(from..from + 1, 0, all.clone(), from * count, count));
            }
            Op::Broadcast { root } => plan.cut(*root..root + 1, 0, all, 0, count),
            Op::AllToAll { .. } => plan.exchange(posts),
            // Slot 0 is the sender and slot 1 the receiver.
            Op::Send { .. } | Op::Recv { .. } => plan.cut(0..1, 0, 1..2, 0, count),
            Op::Barrier => {}
        }
        // An in-place all-reduce writes to memory that it has just read, which is in the cache already.
        let in_place = |post: &&Post| matches!(post.call.op, Op::AllReduce(_)) && post.call.input.is_none();
        let written: usize = plan.pieces.iter().map(|piece| piece.count * piece.targets.len()).sum();
        plan.stream = plan.members.is_empty() && written * dtype.size() >= STREAM_BYTES && !posts.iter().any(in_place);
        plan
    }

    /// Nothing to do.
    pub(super) fn empty() -> Plan {
        Plan::new(&[])
    }

    fn exchange(&mut self, posts: &[&Post]) {
        let mut write_at = vec![0; posts.len()];
        for (from, post) in posts.iter().enumerate() {
            let Op::AllToAll { send_counts, .. } = &post.call.op else { continue };
            let mut read_at = 0;
            for (to, &count) in send_counts.iter().enumerate() {
                self.cut(from..from + 1, read_at, to..to + 1, write_at[to], count);
                read_at += count;
                write_at[to] += count;
            }
        }
    }

    /// Adds the pieces of one range. The cuts depend on sizes alone, and change no result.
    fn cut(&mut self, sources: Range<usize>, read_at: usize, targets: Range<usize>, write_at: usize, count: usize) {
        let element = self.dtype.size() * (sources.len() + targets.len());
        let step = (CLAIM_BYTES / element).max(count / PIECES).next_multiple_of(BLOCK);
        let step = self.step.unwrap_or(step);
        for at in (0..count).step_by(step) {
            self.pieces.push(WorkPiece {
                sources: sources.clone(),
                read_at: read_at + at,
                targets: targets.clone(),
                write_at: write_at + at,
                count: step.min(count - at),
            });
        }
    }

    /// Number of pieces.
    pub(super) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// One past the last piece of a claim that starts at `start`.
    pub(super) fn claim_end(&self, start: usize) -> usize {
        if !self.members.is_empty() {
            return self.len(); // one rank queues all of it
        }
        let mut bytes = 0;
        let enough = |piece: &WorkPiece| {
            bytes += piece.count * self.dtype.size() * (piece.sources.len() + piece.targets.len());
            bytes >= CLAIM_BYTES
        };
        let rest = &self.pieces[start..];
        start + rest.iter().position(enough).map_or(rest.len(), |last| last + 1)
    }

    /// Has devices carry out the whole plan, if its buffers lie there: the moments after which they are the members'
    /// again.
    pub(super) fn carry(&self) -> Option<Result<Vec<Moment>, String>> {
        let first = self.members.first()?;
        if self.members.len() < self.sources.len() {
            return Some(Err("some members' buffers lie on a device, and those of others in host memory".to_owned()));
        }
        let (members, pieces) = (self.members.clone(), self.pieces.clone());
        let work = DeviceWork { dtype: self.dtype, reduce: self.reduce, members, pieces };
        Some(first.ready.carrier.carry(&work))
    }

    /// Executes some pieces.
    ///
    /// # Safety
    ///
    /// The posts that the plan was made of must exist until this returns, they must have passed [`Call::check`] and
    /// agree with each other, and each piece must be done at most once.
    pub(super) unsafe fn run(&self, pieces: Range<usize>) {
        for piece in &self.pieces[pieces] {
            // SAFETY: the caller's promise is the same.
            unsafe {
                match (piece.sources.len(), self.dtype) {
                    (1, _) => self.copy(piece),
                    (_, DType::F32) => self.reduce::<f32>(piece),
                    (_, DType::F64) => self.reduce::<f64>(piece),
                    (_, DType::Bf16) => self.reduce::<bf16>(piece),
                    (_, DType::F16) => self.reduce::<f16>(piece),
                    (_, DType::I32) => self.reduce::<i32>(piece),
                    (_, DType::I64) => self.reduce::<i64>(piece),
                    (_, DType::U8) => self.reduce::<u8>(piece),
                }
            }
        }
        if self.stream {
            stream::fence();
        }
    }

    /// # Safety
    ///
    /// As for [`Plan::run`].
    unsafe fn copy(&self, piece: &WorkPiece) {
        let size = self.dtype.size();
        let source = self.sources[piece.sources.start];
        let bytes = piece.count * size;
        for at in (0..bytes).step_by(COPY_BYTES) {
            for &target in &self.targets[piece.targets.clone()] {
                if target.cast_const() == source {
                    continue; // the root of a broadcast, in place
                }
                // SAFETY: `Call::check` and the agreement of the posts put both ranges inside their buffers, which the
                // posts keep alive. A target is a unique buffer, so it overlaps no other buffer; and no other piece
                // reads or writes this range of it.
                unsafe {
                    let from = source.add(piece.read_at * size + at);
                    let to = target.add(piece.write_at * size + at);
                    self.write(from, to, COPY_BYTES.min(bytes - at));
                }
            }
        }
    }

    /// # Safety
    ///
    /// `bytes` can be read from `from` and written to `to`, and these do not overlap.
    #[inline(always)]
    unsafe fn write(&self, from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise is the same.
        unsafe {
            if self.stream { stream::copy(from, to, bytes) } else { std::ptr::copy_nonoverlapping(from, to, bytes) }
        }
    }

    /// # Safety
    ///
    /// As for [`Plan::run`]; `T` is the type of the elements.
    unsafe fn reduce<T: Reduce>(&self, piece: &WorkPiece) {
        // Sums alone are long: maxima and minima are of statistics, and do without wider vectors of their own.
        let (plan, elements) = (self, PhantomData::<T>);
        match self.reduce {
            ReduceOp::Sum if T::LONG => Reduction::<_, _, true> { plan, piece, f: T::sum, elements }.wide(),
            ReduceOp::Sum => Reduction::<_, _, false> { plan, piece, f: T::sum, elements }.run(),
            op => Reduction::<_, _, false> { plan, piece, f: T::extreme(op == ReduceOp::Max), elements }.run(),
        }
    }
}

/// One piece to be reduced by `f`. Made by [`Plan::reduce`] alone, whose contract holds as long as this exists.
struct Reduction<'a, T, F, const LONG: bool> {
    plan: &'a Plan,
    piece: &'a WorkPiece,
    f: F,
    elements: PhantomData<T>,
}

impl<T: Reduce, F: Fn(T::Acc, T::Acc) -> T::Acc + Copy, const LONG: bool> Wide for Reduction<'_, T, F, LONG> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (sources, mut scratch) = (self.piece.sources.clone(), Scratch::default());
        let count = self.piece.count;
        let whole = count - count % BLOCK;
        let mut last = vec![[T::zeroed(); BLOCK]; if whole < count { sources.len() } else { 0 }];
        for (block, rank) in last.iter_mut().zip(sources.clone()) {
            // SAFETY: in range and alive as in `copy`, for the elements that there are.
            unsafe { std::ptr::copy_nonoverlapping(self.source(rank, whole), block.as_mut_ptr(), count - whole) };
        }
        for start in (0..count).step_by(BLOCK) {
            let read = |rank: usize| match start < whole {
                // SAFETY: in range and alive as in `copy`; aligned, because blocks are to 64 bytes and offsets are
                // whole elements. In place, the range is also written, but only in `put`, after the last use of this
                // block, and by no other piece.
                true => unsafe { &*self.source(rank, start).cast::<[T; BLOCK]>() },
                false => &last[rank - sources.start],
            };
            let put = |result: &[T; BLOCK]| self.put(result, start, BLOCK.min(count - start));
            reduce::tree::<T, LONG>(self.f, read, sources.clone(), &mut scratch, put);
        }
    }
}

impl<T: Reduce, F, const LONG: bool> Reduction<'_, T, F, LONG> {
    #[inline(always)]
    fn source(&self, rank: usize, start: usize) -> *const T {
        self.plan.sources[rank].cast::<T>().wrapping_add(self.piece.read_at + start)
    }

    #[inline(always)]
    fn put(&self, result: &[T; BLOCK], start: usize, count: usize) {
        for &target in &self.plan.targets[self.piece.targets.clone()] {
            let to = target.cast::<T>().wrapping_add(self.piece.write_at + start);
            // SAFETY: in range and alive as in `copy`; `result` is on the stack, and no slice of this range is used any
            // more.
            unsafe { self.plan.write(result.as_ptr().cast(), to.cast(), count * size_of::<T>()) }
        }
    }
}
