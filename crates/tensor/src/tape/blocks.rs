//! Functions of single tokens, on blocks of a sequence, one block after the other (Snowflake's ALST, section 3.2; the
//! blockwise feed-forward network of Liu and Abbeel, arXiv:2305.19370).
//!
//! Of the whole sequence only the inputs and the result exist. What the function keeps for backward exists for one
//! block at a time: backward computes the block again, on a tape of its own.
//!
//! | numerics | a block | the gradient of a parameter |
//! |---|---|---|
//! | fast | neighbouring tokens of all samples | added to the parameter's gradient block by block |
//! | canonical | tokens of one sample, equally many of each reduction block of the sequence | the sum over the blocks of a sample is a share; a mesh that cuts the sequence cuts every block alike |
//!
//! More than 400 lines: which tokens a block has, the operation, and the sums of its gradients.

use super::reduction_blocks::{Slices, Tokens};
use super::uses::Uses;
use super::{Backward, Forward, Mode, Op, Position, Source, Tape, Var};
use super::{GradShard, GradSink, GradSlot, Padding, Seed, Weights};
use crate::error::{Error, Result};
use crate::param::ParamId;
use crate::tensor::Tensor;
use meshwork_core::rules::Operand;
use meshwork_core::{Buffer, DType, SpmdError, Types};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

/// The dim of tokens.
pub(super) const SEQ: usize = 1;

/// At most so many values and parameters.
const VALUES: usize = 4;
const PARAMETERS: usize = 16;

/// The names of up to so many values, and of the parameters that a function of them reads. Values have names of their
/// own, by which their gradients are told apart.
const OPERANDS: [[&str; VALUES + PARAMETERS]; VALUES + 1] = {
    let (names, mut of) = (["x", "x2", "x3", "x4"], [["parameter"; VALUES + PARAMETERS]; VALUES + 1]);
    let mut count = 1;
    while count <= VALUES {
        let mut at = 0;
        while at < count {
            of[count][at] = names[at];
            at += 1;
        }
        count += 1;
    }
    of
};

type Function = dyn Fn(&Tape, &[Var], &Block) -> Result<Var>;

/// Some tokens of some samples, of the tokens and samples that this rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    samples: Range<usize>,
    /// Several runs of tokens are of one sample.
    runs: Vec<Range<usize>>,
    /// Samples and tokens of each, on this rank.
    of: [usize; 2],
}

impl Block {
    fn whole(of: [usize; 2]) -> Self {
        Self { samples: 0..of[0], runs: std::iter::once(0..of[1]).collect(), of }
    }

    /// Its tokens of each sample.
    pub fn tokens(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }

    /// The runs of its tokens, among those of a sample.
    pub(crate) fn runs(&self) -> &[Range<usize>] {
        &self.runs
    }

    /// The tokens of a sample that this rank has, inside and outside of the block.
    pub(crate) fn seq(&self) -> usize {
        self.of[1]
    }

    /// Its part of a value `[samples, tokens, ..]`.
    ///
    /// # Errors
    /// A value of other samples or tokens; no memory.
    pub fn of(&self, x: &Tensor) -> Result<Tensor> {
        let shape = x.shape();
        if shape.get(..2) != Some(&self.of) {
            return Err(misfit(format!("a block of {:?} samples and tokens", self.of), &[x]));
        }
        if *self == Self::whole(self.of) {
            return Ok(x.clone());
        }
        let (device, (_, seq, inner)) = (x.device(), shape.around(SEQ));
        let samples = x.buffer().slice(self.samples.start * seq * inner..self.samples.end * seq * inner)?;
        let part = match &self.runs[..] {
            [run] => device.layout()?.narrow(&samples, self.samples.len(), seq, inner, run.clone())?,
            runs => {
                let (mut part, mut at) = (device.alloc(x.dtype(), self.tokens() * inner)?, 0);
                for run in runs {
                    device.layout()?.copy_into(&samples, run.start * inner..run.end * inner, &mut part, at)?;
                    at += run.len() * inner;
                }
                part
            }
        };
        Tensor::from_buffer(device, part, shape.with(0, self.samples.len()).with(SEQ, self.tokens()))
    }

    /// Writes its part to the place in `whole`, for which there is memory from the first part on.
    fn put(&self, part: &Tensor, whole: &mut Option<Tensor>) -> Result<()> {
        let (device, tokens) = (part.device(), self.tokens());
        let fits = part.shape().get(..2) == Some(&[self.samples.len(), tokens]);
        let shape = if fits { part.shape().with(0, self.of[0]).with(SEQ, self.of[1]) } else { part.shape() };
        if !fits || whole.as_ref().is_some_and(|whole| whole.shape() != shape) {
            return Err(misfit("the result of the function has the extents of its tokens".to_owned(), &[part]));
        }
        let mut buffer = match whole.take() {
            Some(whole) => whole.into_buffer(),
            None => device.alloc(part.dtype(), shape.count())?,
        };
        let (_, seq, inner) = shape.around(SEQ);
        let mut from = 0;
        for sample in self.samples.clone() {
            for run in &self.runs {
                let (n, to) = (run.len() * inner, (sample * seq + run.start) * inner);
                device.layout()?.copy_into(part.buffer(), from..from + n, &mut buffer, to)?;
                from += n;
            }
        }
        *whole = Some(Tensor::from_buffer(device, buffer, shape)?);
        Ok(())
    }
}

/// What the tape of a block knows of it.
#[derive(Debug)]
pub(super) struct Within {
    pub(super) block: Block,
    /// Whether operations are recorded for backward.
    pub(super) records: bool,
}

/// A function on blocks of the tokens of its inputs.
struct Blocks {
    function: Rc<Function>,
    blocks: Vec<Block>,
    /// Number of operations before it.
    number: usize,
    /// The types of the inputs, and of the result.
    inputs: Vec<Types>,
    result: Types,
    /// Whether layers computed without their adapters.
    plain: bool,
    /// How the function reads each parameter.
    reads: BTreeMap<ParamId, Types>,
    /// The result, until forward returns it.
    made: RefCell<Option<Tensor>>,
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("blocks", &self.blocks).field("reads", &self.reads).finish_non_exhaustive()
    }
}

impl Var {
    /// [`Tape::in_blocks`] of one value.
    ///
    /// # Errors
    /// Those of [`Tape::in_blocks`].
    pub fn in_blocks(&self, block: usize, function: impl Fn(&Tape, &Self) -> Result<Self> + 'static) -> Result<Self> {
        self.tape().in_blocks(&[self], block, move |tape, parts, _| function(tape, &parts[0]))
    }
}

impl Tape {
    /// `function` of values `[samples, seq, ..]` whose samples and tokens are the same, for at most `block` tokens of
    /// each sample at a time: a function of single tokens, whose result for a token has the extents of the token. It
    /// runs once more in backward, and may read at most 16 parameters. On a tape that decodes, and where no sequence is
    /// longer than a block, it runs once on all tokens.
    ///
    /// In canonical numerics a block has tokens of one sample, `block` divided by the number of reduction blocks from
    /// each reduction block of the sequence, and at least one. So every mesh has the bits of one rank with this
    /// `block`.
    ///
    /// # Errors
    /// Those of the function; a result of other extents; values of different tokens; blocks of no tokens; randomness
    /// under a name that the tape has drawn from; in canonical numerics, axes that cut the sequence into parts of which
    /// some hold no whole subtree of the reduction blocks.
    pub fn in_blocks(
        &self,
        inputs: &[&Var],
        block: usize,
        function: impl Fn(&Self, &[Var], &Block) -> Result<Var> + 'static,
    ) -> Result<Var> {
        let tensors = || inputs.iter().map(|input| input.tensor()).collect::<Vec<_>>();
        let Some(x) = inputs.first().filter(|_| inputs.len() <= VALUES) else {
            return Err(misfit(format!("it takes 1 to {VALUES} values"), &tensors()));
        };
        let clones: Vec<Var> = inputs.iter().copied().cloned().collect();
        let &[samples, seq, ..] = &x.shape()[..] else {
            return function(self, &clones, &Block::whole([x.shape().first().copied().unwrap_or(1), 1]));
        };
        if block == 0 {
            return Err(misfit("a block has a token".to_owned(), &tensors()));
        }
        let alike = |other: &&Var| {
            let cut = |dim| other.types.cuts(dim).eq(x.types.cuts(dim));
            other.shape().get(..2) == Some(&[samples, seq]) && cut(0) && cut(SEQ)
        };
        if !inputs.iter().all(alike) {
            return Err(misfit("the values have the same samples and tokens".to_owned(), &tensors()));
        }
        let slices = self.slices("in_blocks", Tokens::new(x, x.shape().len() - 2))?;
        let ranks: usize = x.types.cuts(SEQ).map(|axis| self.rank().mesh().degree(axis)).product();
        let all = seq * ranks;
        let whole = match &slices {
            None => block >= all,
            Some(Slices { all: slices, .. }) => (block / slices).max(1) >= all.div_ceil(*slices),
        };
        if whole || self.decodes() {
            return function(self, &clones, &Block::whole([samples, seq]));
        }
        let (blocks, number, plain) = (blocks([samples, seq], block, slices), self.applied(), !self.has_adapters());
        let (mut made, mut result, mut reads) = (None, Types::NONE, BTreeMap::new());
        for (at, block) in blocks.iter().enumerate() {
            let inner = self.nested(self.mode(), (number, plain), block, false);
            let parts = clones.iter().map(|x| Ok(inner.input_without_gradient(block.of(x.tensor())?, x.types())));
            let of_block = function(&inner, &parts.collect::<Result<Vec<_>>>()?, block)?;
            if at == 0 {
                (result, reads) = (of_block.types(), inner.reads());
                inner.random_names().iter().try_for_each(|name| self.random_key(name).map(drop))?;
            }
            block.put(of_block.tensor(), &mut made)?;
        }
        if reads.len() > PARAMETERS {
            let problem = format!("the function reads {} parameters, of at most {PARAMETERS}", reads.len());
            return Err(misfit(problem, &tensors()));
        }
        // The function knows of padding; here a parameter is only named.
        let read = |&id: &ParamId| Ok(Var { padding: Padding::default(), ..self.param(id)? });
        let parameters = reads.keys().map(read).collect::<Result<Vec<_>>>()?;
        let (types, made) = (inputs.iter().map(|input| input.types()).collect(), RefCell::new(made));
        let op = Blocks { function: Rc::new(function), blocks, number, plain, inputs: types, result, reads, made };
        self.apply(op, &inputs.iter().copied().chain(&parameters).collect::<Vec<_>>())
    }

    /// A tape for a block of this one's tokens, which keeps what it saves in memory.
    fn nested(&self, mode: Mode, (number, plain): (usize, bool), block: &Block, records: bool) -> Self {
        let position = self.inner.position;
        let position = Position { first_sample: position.first_sample + block.samples.start as u64, ..position };
        let (rank, params, device) = (self.rank().clone(), self.params().clone(), self.device().clone());
        let nested = Self::new(rank, params, device, mode, position);
        nested.count_from(number);
        nested.compress_rows(self.inner.rows.get());
        nested.inner.plain.set(plain);
        nested.inner.within.get_or_init(|| Within { block: block.clone(), records });
        nested
    }

    /// The block that this tape is for.
    pub(crate) fn block(&self) -> Option<&Block> {
        self.inner.within.get().map(|within| &within.block)
    }
}

fn misfit(problem: String, of: &[&Tensor]) -> Error {
    Error::Shape { op: "in_blocks", problem, shapes: of.iter().map(|tensor| tensor.shape().to_vec()).collect() }
}

/// The blocks of at most `block` tokens, in the order in which they are computed.
fn blocks([samples, seq]: [usize; 2], block: usize, slices: Option<Slices>) -> Vec<Block> {
    let of = [samples, seq];
    let Some(Slices { here, all }) = slices else {
        let run = |start: usize| std::iter::once(start..seq.min(start + block)).collect();
        return (0..seq).step_by(block).map(|start| Block { samples: 0..samples, runs: run(start), of }).collect();
    };
    let (here, each) = (here.len(), (block / all).max(1));
    let run = |slice: usize, skip: usize| {
        let (start, end) = (seq * slice / here, seq * (slice + 1) / here);
        end.min(start + skip)..end.min(start + skip + each)
    };
    let parts = (0..seq.div_ceil(here)).step_by(each);
    let of_sample = |sample: usize| {
        parts.clone().map(move |skip| {
            let runs = (0..here).map(|slice| run(slice, skip)).collect();
            Block { samples: sample..sample + 1, runs, of }
        })
    };
    (0..samples).flat_map(of_sample).collect()
}

/// The gradients of a block's parameters go where those of the tape go, or first to sums over blocks: in canonical
/// numerics, where a share is a sum over all of a sample's blocks, and where gradients have 16 bits, so that the sum is
/// rounded once. Which gradients are complete, the tape knows.
struct Shares<'a> {
    sink: &'a mut dyn GradSink,
    tape: &'a Tape,
    uses: &'a Uses,
    sums: BTreeMap<Key, Sum>,
}

/// A parameter, and in canonical numerics the first sample and the first copy.
type Key = (ParamId, Option<(u64, usize)>);

enum Sum {
    /// The sink has no memory for it.
    Passed,
    /// In the sink's memory; and whether the next share overwrites what is there.
    There(bool),
    /// Here.
    Here(GradShard, Buffer),
}

impl Shares<'_> {
    /// In fast numerics a parameter has one sum, also where the samples come in chunks.
    fn key(&self, share: &GradShard) -> Key {
        let part = self.tape.reduction_blocks().map(|_| (share.samples.start, share.copies.start));
        (share.id, part)
    }

    fn sum(&mut self, share: &GradShard) -> Result<&mut Sum> {
        let (tape, key, GradShard { id, copies, .. }) = (self.tape, self.key(share), share);
        match self.sums.entry(key) {
            Entry::Occupied(sum) => Ok(sum.into_mut()),
            Entry::Vacant(place) => {
                let params = tape.params();
                let (dtype, count) =
                    (params.declarations().stored_dtype(*id), copies.len() * params.shape(*id).count());
                let here = || {
                    let dtype = if dtype.is_half() { DType::F32 } else { dtype };
                    let zeros = Tensor::zeros(tape.device(), dtype, [count])?.into_buffer();
                    Ok::<_, Error>(Sum::Here(share.clone(), zeros))
                };
                let sum = match tape.reduction_blocks() {
                    Some(_) => here()?,
                    None => match self.sink.place(share)? {
                        None => Sum::Passed,
                        Some(GradSlot { buffer, start, first }) if buffer.dtype().is_half() => {
                            if first {
                                tape.device().optim()?.zero(buffer, start..start + count)?;
                            }
                            here()?
                        }
                        Some(slot) => Sum::There(slot.first),
                    },
                };
                Ok(place.insert(sum))
            }
        }
    }

    /// Passes on the sums that are here.
    fn finish(&mut self) -> Result<()> {
        let (tape, uses) = (self.tape, self.uses);
        for sum in std::mem::take(&mut self.sums).into_values() {
            let Sum::Here(mut share, sum) = sum else { continue };
            if tape.reduction_blocks().is_some() {
                let (id, of) = (share.id, share.of);
                uses.require_alike("in_blocks", id, of)?;
                let before = uses.index(id) * of;
                share.copies = before + share.copies.start..before + share.copies.end;
                share.of = uses.count(id) * of;
            }
            let count = sum.count();
            self.sink.accumulate(&share, Tensor::from_buffer(tape.device(), sum, [count])?)?;
        }
        Ok(())
    }
}

impl GradSink for Shares<'_> {
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()> {
        if let Sum::Passed = self.sum(share)? {
            return self.sink.accumulate(share, grad);
        }
        let device = grad.device().clone();
        let Some(GradSlot { buffer, start, first }) = self.place(share)? else { return Ok(()) };
        if first {
            device.optim()?.zero(buffer, start..start + grad.buffer().count())?;
        }
        device.pointwise()?.add_assign(buffer, start, grad.buffer())
    }

    fn place(&mut self, share: &GradShard) -> Result<Option<GradSlot<'_>>> {
        self.sum(share)?;
        let key = self.key(share);
        match self.sums.get_mut(&key) {
            None | Some(Sum::Passed) => Ok(None),
            Some(Sum::Here(_, sum)) => Ok(Some(GradSlot { buffer: sum, start: 0, first: false })),
            Some(Sum::There(first)) => {
                let first = std::mem::take(first);
                Ok(self.sink.place(share)?.map(|slot| GradSlot { first, ..slot }))
            }
        }
    }

    fn ready(&mut self, _id: ParamId) -> Result<()> {
        Ok(())
    }
}

impl Op for Blocks {
    fn name(&self) -> &'static str {
        "in_blocks"
    }

    fn operands(&self) -> &'static [&'static str] {
        &OPERANDS[self.inputs.len()][..self.inputs.len() + self.reads.len()]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        for (parameter, read) in operands[self.inputs.len()..].iter().zip(self.reads.values()) {
            if let Some((axis, ty)) = read.iter().find(|&(axis, ty)| parameter.types.get(axis) != Some(ty)) {
                return Err(SpmdError {
                    op: self.name().to_owned(),
                    axis,
                    problem: format!("a parameter is read as {ty}, and is not beside x"),
                    fix: "give the function the value that the parameter is read with".to_owned(),
                });
            }
        }
        Ok(self.result)
    }

    fn forward(&self, cx: &mut Forward<'_>, _inputs: &[&Tensor]) -> Result<Tensor> {
        (0..self.inputs.len()).try_for_each(|input| cx.save_input(input))?;
        let made = self.made.borrow_mut().take();
        made.ok_or_else(|| Error::Backward("the result of blocks was taken before".to_owned()))
    }

    /// All gradients at once, where backward comes to the value: what it would take to compute those of parameters
    /// later is what blocks do not keep.
    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let inputs = self.inputs.len();
        let flows: Vec<bool> = cx.sources[..inputs].iter().map(|of| matches!(of, Source::Node(_))).collect();
        (inputs..cx.sources.len()).for_each(|parameter| cx.written.push(parameter));
        let mut gradients = vec![None; self.operands().len()];
        if flows.contains(&true) && !cx.values {
            return Ok(gradients);
        }
        let values = (0..inputs).map(|input| cx.saved(input)).collect::<Result<Vec<_>>>()?;
        let tape = cx.tape;
        let mut shares = Shares { sink: &mut *cx.sink, tape, uses: cx.uses, sums: BTreeMap::new() };
        for (at, block) in self.blocks.iter().enumerate() {
            let inner = tape.nested(Mode::Train, (self.number, self.plain), block, true);
            let part = |((x, &types), &flows): ((&Tensor, &Types), &bool)| {
                let part = block.of(x)?;
                Ok(match flows {
                    true => inner.input(part, types),
                    false => inner.input_without_gradient(part, types),
                })
            };
            let parts = values.iter().zip(&self.inputs).zip(&flows).map(part).collect::<Result<Vec<_>>>()?;
            let result = (self.function)(&inner, &parts, block)?;
            let seed = Seed::typed(block.of(&grad)?, self.result.dual());
            inner.backward(&result, seed, Weights::Now, &mut shares)?;
            for (part, gradient) in parts.iter().zip(&mut gradients) {
                if let Some(of_block) = inner.take_grad(part) {
                    block.put(&of_block, gradient)?;
                }
            }
            if self.blocks.get(at + 1).is_none_or(|next| next.samples != block.samples) {
                shares.finish()?;
            }
        }
        Ok(gradients)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Comparisons of two runs took the gradients of two values of one name for one that is not the same on all ranks.
    #[test]
    fn values_have_names_of_their_own() {
        for (count, of) in OPERANDS.iter().enumerate() {
            let names: std::collections::BTreeSet<_> = of[..count].iter().collect();
            assert!(names.len() == count && of[count..].iter().all(|name| *name == "parameter"), "{of:?}");
        }
    }

    /// A rank that has half of a sequence has half of each block, whatever its length.
    #[test]
    fn every_block_has_a_part_of_each_slice() {
        for (seq, block) in [(16, 8), (10, 4), (10, 1), (12, 8), (22, 9)] {
            let of = |seq, here| blocks([2, seq], block, Some(Slices { here, all: 4 }));
            let (one, half) = (of(seq, 0..4), of(seq / 2, 2..4));
            assert_eq!(one.len(), half.len(), "{seq}, {block}");
            for (one, half) in one.iter().zip(&half) {
                assert_eq!(one.samples, half.samples);
                let shifted: Vec<_> = half.runs.iter().map(|run| run.start + seq / 2..run.end + seq / 2).collect();
                assert_eq!(one.runs[2..], shifted, "{seq}, {block}");
                // The tape cuts the block as it is cut here.
                let tokens = one.tokens();
                let cut = (0..4).map(|slice| tokens * (slice + 1) / 4 - tokens * slice / 4);
                assert!(cut.eq(one.runs.iter().map(Range::len)), "{seq}, {block}");
            }
            let mut tokens: Vec<_> =
                one.iter().filter(|of| of.samples.start == 1).flat_map(|of| of.runs.clone()).flatten().collect();
            tokens.sort_unstable();
            assert!(tokens.into_iter().eq(0..seq), "{seq}, {block}");
        }
    }
}
