//! A pass around a ring (Ring Attention, Liu et al., arXiv:2310.01889): keys and values travel from rank to rank while
//! attention computes.
//!
//! Of `n` ranks each holds the queries, keys and values of a part of the sequence. In step `t` a rank has the block of
//! the rank `t` places before it, and passes it on while it computes its own queries over the block's keys:
//!
//! ```text
//!   (o, l)   = (o, l) ⊕ attention(q, k_t, v_t)             ⊕ joins by the log-sum-exps l, in f32
//!   (k, v)_t ──▶ next rank                                  n - 1 times, started before the kernel, awaited after it
//! ```
//!
//! Backward, probabilities are recomputed from the joined l. The blocks travel again, and the sums of their gradients
//! one step behind them, in f32. A rank keeps its own share of its own block until the others' arrive:
//!
//! ```text
//!   dq       += dq_t
//!   d(k, v)_t = d(k, v)_t from the rank before + own share ──▶ next rank      n - 1 times
//! ```
//!
//! Pairs of a run of queries and a run of keys that the masks hide whole are not computed; in zigzag order each rank
//! then has the same work in each step. Runs of keys before a run of queries need no causal mask. With a sliding window
//! a block goes no further than queries read it. Pairs of runs that share no document are not computed, where the host
//! can read the documents.

use meshwork_core::{Buffer, DType, Group, Pending};
use meshwork_tensor::kernel::{AttentionMasks, AttentionShape, GroupedShape, seen_pairs};
use meshwork_tensor::op::Exchanged;
use meshwork_tensor::{Device, Error, Result, Tensor};
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;

/// One pass around a ring.
pub(crate) struct Pass<'a> {
    group: &'a Group,
    device: &'a Arc<dyn Device>,
    masks: AttentionMasks<'a>,
    /// Queries, keys and values of this rank.
    shape: GroupedShape,
    /// The ranks of the group at the places of the ring.
    ranks: Vec<usize>,
    /// This rank's place.
    place: usize,
    /// The tokens at each place, in runs.
    parts: Vec<Vec<Range<usize>>>,
    /// Places at which a block is read, its own and those after it: the others are outside of its window.
    steps: usize,
}

/// A run of queries with a run of keys.
struct Pair {
    /// The index of the run of queries.
    queries: usize,
    /// The elements of the run of keys in its block.
    keys: Range<usize>,
    shape: GroupedShape,
}

/// A block that travels.
struct Passing {
    coming: Pending,
    going: Pending,
}

impl Passing {
    fn wait(self) -> Result<Buffer> {
        let block = self.coming.wait()?;
        self.going.wait()?;
        Ok(block)
    }
}

impl<'a> Pass<'a> {
    /// Around `degree` places of a group. Neighbours in the group are at the same place, as far as they are more than
    /// the places: together they hold its tokens, and `shape` is the share of one of them in their heads.
    ///
    /// # Errors
    /// Masks that are not [plain](AttentionMasks::is_plain): queries would read blocks that do not travel to them.
    pub(crate) fn new(
        call: &Exchanged<'a>,
        group: &'a Group,
        degree: usize,
        shape: GroupedShape,
        masks: AttentionMasks<'a>,
    ) -> Result<Self> {
        if !masks.is_plain() {
            let problem = "keys go around a ring to the queries behind them: causal attention alone, without lengths or \
                           slopes; use all_gather or all_to_all";
            return Err(Error::Shape { op: "ring attention", problem: problem.to_owned(), shapes: Vec::new() });
        }
        let (beside, rank) = (group.size() / degree, group.rank());
        let each = shape.queries.seq;
        let part = |place: usize| call.order.tokens(degree * each, place * each..(place + 1) * each);
        let mut pass = Self {
            group,
            device: call.device,
            masks,
            shape,
            ranks: (0..degree).map(|place| place * beside + rank % beside).collect(),
            place: rank / beside,
            parts: (0..degree).map(part).collect::<Result<_>>()?,
            steps: degree,
        };
        pass.steps = steps(&pass.parts, masks.window);
        Ok(pass)
    }

    /// The results of this rank's queries, in their type, and their log-sum-exps.
    pub(crate) fn attend(&self, q: &Tensor, kv: &Tensor) -> Result<(Tensor, Tensor)> {
        let AttentionShape { batch, seq, heads, head_dim } = self.shape.queries;
        let (attention, width) = (self.device.attention()?, heads * head_dim);
        let queries = self.runs(&self.wide(q.buffer())?, batch, width)?;
        let mut sums: Vec<Option<(Buffer, Buffer)>> = vec![None; queries.len()];
        let mut block = self.block(kv.buffer())?;
        for step in 0..self.steps {
            let passing = self.pass_on(&block, step)?;
            let wide = self.wide(&block)?;
            for Pair { queries: run, keys, shape } in self.pairs(step) {
                if self.are_apart(shape) {
                    self.reserve(wide.dtype(), [queries[run].count(), batch * heads * shape.queries.seq])?;
                    continue;
                }
                let part = attention.grouped(shape, &queries[run], &wide.slice(keys)?, self.masks)?;
                match &mut sums[run] {
                    None => sums[run] = Some(part),
                    Some((out, lse)) => attention.join(shape.queries, out, lse, &part.0, &part.1)?,
                }
            }
            drop(wide);
            if let Some(passing) = passing {
                block = passing.wait()?;
            }
        }
        let (outs, lses): (Vec<_>, Vec<_>) = sums.into_iter().flatten().unzip();
        let out = self.rows(outs, batch, width)?;
        let lse = Tensor::from_buffer(self.device, self.rows(lses, batch * heads, 1)?, [batch, heads, seq])?;
        Ok((Tensor::from_buffer(self.device, out, q.shape())?.cast(q.dtype())?, lse))
    }

    /// The gradients of queries, in the type of the gradient of the result, and of keys and values, in f32, of this
    /// rank.
    pub(crate) fn gradients(&self, dout: &Tensor, [q, kv, out, lse]: &[Tensor; 4]) -> Result<(Tensor, Tensor)> {
        let AttentionShape { batch, heads, head_dim, .. } = self.shape.queries;
        let (attention, pointwise, width) = (self.device.attention()?, self.device.pointwise()?, heads * head_dim);
        let rows = |x: &Tensor| self.runs(&self.wide(x.buffer())?, batch, width);
        let (douts, queries, outs) = (rows(dout)?, rows(q)?, rows(out)?);
        let lses = self.runs(lse.buffer(), batch * heads, 1)?;
        let mut dqs: Vec<Option<Buffer>> = vec![None; queries.len()];
        let mut block = self.block(kv.buffer())?;
        let (mut own, mut following): (Option<Buffer>, Option<Passing>) = (None, None);
        for step in 0..self.steps {
            let passing = self.pass_on(&block, step)?;
            let wide = self.wide(&block)?;
            let mut share = self.device.zeros(wide.dtype(), wide.count())?;
            for Pair { queries: run, keys, shape } in self.pairs(step) {
                let (at, kv) = (keys.start, wide.slice(keys)?);
                if self.are_apart(shape) {
                    self.reserve(wide.dtype(), [queries[run].count(), kv.count()])?;
                    continue;
                }
                let [dout, q, out, lse] = [&douts, &queries, &outs, &lses].map(|runs| &runs[run]);
                let (dq, dkv) = attention.grouped_grad(shape, dout, q, &kv, out, lse, self.masks)?;
                pointwise.add_assign(&mut share, at, &dkv)?;
                match &mut dqs[run] {
                    None => dqs[run] = Some(dq),
                    Some(sum) => pointwise.add_assign(sum, 0, &dq)?,
                }
            }
            drop(wide);
            // The sum that follows the block of this step. The first to add to it is the rank behind the block's own.
            if let Some(sum) = following.take() {
                pointwise.add_assign(&mut share, 0, &sum.wait()?)?;
            }
            match step {
                0 => own = Some(share),
                _ if step + 1 < self.steps => following = Some(self.pass(&share, step, 1)?),
                // Those of the last step go home.
                _ => following = Some(self.pass(&share, step, self.parts.len() - step)?),
            }
            if let Some(passing) = passing {
                block = passing.wait()?;
            }
        }
        let dq = self.rows(dqs.into_iter().flatten().collect(), batch, width)?;
        let dq = Tensor::from_buffer(self.device, dq, q.shape())?.cast(dout.dtype())?;
        let mut dkv = own.map_or_else(|| self.device.zeros(lse.dtype(), kv.count()), Ok)?;
        if let Some(sum) = following {
            pointwise.add_assign(&mut dkv, 0, &sum.wait()?)?;
        }
        let row = kv.count() / (batch * self.shape.keys).max(1);
        let lens = self.parts[self.place].iter().map(|run| batch * run.len() * row);
        let runs = lens.scan(0, |end, len| Some(std::mem::replace(end, *end + len)..*end));
        let runs = runs.map(|run| Ok(dkv.slice(run)?)).collect::<Result<_>>()?;
        let dkv = if batch == 1 { dkv } else { self.rows(runs, batch, row)? };
        Ok((dq, Tensor::from_buffer(self.device, dkv, kv.shape())?))
    }

    /// In f32, if it has 16 bits: sums are.
    fn wide(&self, x: &Buffer) -> Result<Buffer> {
        match x.dtype().is_half() {
            true => self.device.pointwise()?.cast(x, x.dtype().widened()),
            false => Ok(x.clone()),
        }
    }

    /// `x [outer, seq, inner]` of this rank by its runs of tokens.
    fn runs(&self, x: &Buffer, outer: usize, inner: usize) -> Result<Vec<Buffer>> {
        let (layout, runs) = (self.device.layout()?, &self.parts[self.place]);
        if runs.len() == 1 {
            return Ok(vec![x.clone()]);
        }
        let begins = runs.iter().scan(0, |at, run| Some(std::mem::replace(at, *at + run.len())));
        let rows = runs.iter().zip(begins).map(|(run, at)| at..at + run.len());
        rows.map(|rows| layout.narrow(x, outer, self.shape.queries.seq, inner, rows)).collect()
    }

    /// Its inverse.
    fn rows(&self, runs: Vec<Buffer>, outer: usize, inner: usize) -> Result<Buffer> {
        if let [one] = &runs[..] {
            return Ok(one.clone());
        }
        let (layout, seq) = (self.device.layout()?, self.shape.queries.seq);
        let dtype = runs.first().map_or(DType::F32, Buffer::dtype);
        let (mut x, mut begin) = (self.device.alloc(dtype, outer * seq * inner)?, 0);
        for (tokens, run) in self.parts[self.place].iter().zip(&runs) {
            let each = tokens.len() * inner;
            for at in 0..outer {
                layout.copy_into(run, at * each..(at + 1) * each, &mut x, (at * seq + begin) * inner)?;
            }
            begin += tokens.len();
        }
        Ok(x)
    }

    /// Keys and values of this rank as they travel: run after run.
    fn block(&self, kv: &Buffer) -> Result<Buffer> {
        let batch = self.shape.queries.batch;
        let row = kv.count() / (batch * self.shape.keys).max(1);
        let runs = if batch == 1 { vec![kv.clone()] } else { self.runs(kv, batch, row)? };
        if let [one] = &runs[..] {
            return Ok(one.clone());
        }
        let (mut block, mut at) = (self.device.alloc(kv.dtype(), kv.count())?, 0);
        for run in &runs {
            self.device.layout()?.copy_into(run, 0..run.count(), &mut block, at)?;
            at += run.count();
        }
        Ok(block)
    }

    /// The place whose block is at a place in a step.
    fn owner(&self, place: usize, step: usize) -> usize {
        (place + self.parts.len() - step) % self.parts.len()
    }

    /// The calls of the kernel in a step: for each run of queries, the latest keys first, such as its own.
    fn pairs(&self, step: usize) -> Vec<Pair> {
        let (of, row) = (self.shape, self.shape.kv_elements() / self.shape.keys.max(1));
        let mut pairs = Vec::new();
        for (run, queries) in self.parts[self.place].iter().enumerate() {
            let mut end = 0;
            for keys in &self.parts[self.owner(self.place, step)] {
                let begin = end;
                end += keys.len() * row;
                let outside = |window| keys.end + window <= queries.start + 1;
                if keys.start > queries.start || self.masks.window.is_some_and(outside) {
                    continue; // hidden from all of these queries
                }
                let held = AttentionShape { seq: queries.len(), ..of.queries };
                let (first_query, first_key) = (queries.start, keys.start);
                let shape = GroupedShape { queries: held, keys: keys.len(), first_query, first_key, ..of };
                pairs.push(Pair { queries: run, keys: begin..end, shape });
            }
        }
        pairs.sort_by_key(|pair| (pair.queries, Reverse(pair.shape.first_key)));
        pairs
    }

    /// Whether no query of a pair is in a document of its keys, as far as the host can read the documents.
    fn are_apart(&self, GroupedShape { sequence, first_query, first_key, keys, .. }: GroupedShape) -> bool {
        let documents = self.masks.documents.filter(|documents| documents.apart);
        let positions = documents.and_then(|documents| documents.positions.as_slice::<i32>().ok());
        // Of all queries the first is in the earliest document.
        let begins =
            |of: &[i32]| of.get(first_query).map_or(0, |&at| first_query.saturating_sub(at.unsigned_abs() as usize));
        positions.is_some_and(|all| all.chunks(sequence.max(1)).all(|of| begins(of) >= first_key + keys))
    }

    /// The memory of the results of a pair that is not computed: a plan, which does not know documents, counts it.
    fn reserve(&self, dtype: DType, counts: [usize; 2]) -> Result<()> {
        let _held = [self.device.alloc(dtype, counts[0])?, self.device.alloc(dtype, counts[1])?];
        Ok(())
    }

    /// Starts to pass the block of a step on, if another step reads it.
    fn pass_on(&self, block: &Buffer, step: usize) -> Result<Option<Passing>> {
        (step + 1 < self.steps).then(|| self.pass(block, step, 1)).transpose()
    }

    /// Starts to send `x`, which belongs to the block of `step`, to the rank `places` ahead, and to receive the
    /// corresponding memory of the rank `places` behind.
    fn pass(&self, x: &Buffer, step: usize, places: usize) -> Result<Passing> {
        let degree = self.parts.len();
        let [next, before] = [self.place + places, self.place + degree - places].map(|place| place % degree);
        let room = self.device.alloc(x.dtype(), x.count())?;
        let [coming, going] = [before, self.place].map(|place| self.owner(place, step) as u64);
        let coming = self.group.start_recv(room, self.ranks[before], coming)?;
        Ok(Passing { coming, going: self.group.start_send(x.clone(), self.ranks[next], going)? })
    }
}

/// Places after its own, and its own, up to which a block of keys is read by queries of places that have the tokens of
/// `parts`: blocks outside of the window do not travel.
pub(crate) fn steps(parts: &[Vec<Range<usize>>], window: Option<usize>) -> usize {
    let Some(window) = window else { return parts.len() };
    let runs = || parts.iter().enumerate().flat_map(|(place, runs)| runs.iter().map(move |run| (run.clone(), place)));
    let mut keys: Vec<_> = runs().collect();
    keys.sort_unstable_by_key(|(run, _)| run.start);
    let of_queries = runs().flat_map(|(queries, place)| {
        let first = (queries.start + 1).saturating_sub(window);
        let begin = keys.partition_point(|(run, _)| run.end <= first);
        let read = keys[begin..].iter().take_while(move |(run, _)| run.start < queries.end);
        read.map(move |(_, owner)| (place + parts.len() - owner) % parts.len())
    });
    of_queries.max().map_or(1, |last| last + 1)
}

/// Pairs of a query at a place and a key of the block that is there in a step.
pub(crate) fn sees(parts: &[Vec<Range<usize>>], place: usize, step: usize, window: Option<usize>) -> u64 {
    let keys = &parts[(place + parts.len() - step) % parts.len()];
    let of_run =
        |run: &Range<usize>| keys.iter().map(|keys| seen_pairs(run.clone(), keys.clone(), window)).sum::<u64>();
    parts[place].iter().map(of_run).sum()
}
