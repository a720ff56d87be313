//! Functions of single tokens, on blocks of a sequence, one block after the other (Snowflake's ALST, section 3.2; the
//! blockwise feed-forward network of Liu and Abbeel, arXiv:2305.19370).
//!
//! Of the whole sequence only the input and the result exist. What the function keeps for backward exists for one block
//! at a time: backward computes the block again, on a tape of its own.

use super::{Backward, Forward, Mode, Op, Source, Tape, Var};
use super::{GradShard, GradSink, GradSlot, Padding, Seed, Weights};
use crate::error::{Error, Result};
use crate::param::ParamId;
use crate::tensor::Tensor;
use meshwork_core::rules::Operand;
use meshwork_core::{SpmdError, Types};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

/// The dim of tokens.
const SEQ: usize = 1;

/// The names of a value and of the parameters that a function of it reads.
const OPERANDS: [&str; 17] = {
    let mut names = ["parameter"; 17];
    names[0] = "x";
    names
};

type Function = dyn Fn(&Tape, &Var) -> Result<Var>;

/// A function on blocks of the tokens of its input.
struct Blocks {
    function: Rc<Function>,
    /// Tokens of a block.
    block: usize,
    /// The types of the input and of the result.
    types: [Types; 2],
    /// How the function reads each parameter.
    reads: BTreeMap<ParamId, Types>,
    /// The result, until forward returns it.
    made: RefCell<Option<Tensor>>,
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("block", &self.block).field("reads", &self.reads).finish_non_exhaustive()
    }
}

impl Var {
    /// `function` of x `[samples, seq, ..]`, for at most `block` tokens of each sample at a time: a function of single
    /// tokens, whose result for a token has the extents of the token. It runs once more in backward, and may read at
    /// most 16 parameters. On a tape that decodes, and of sequences of one block, it runs once on all tokens.
    ///
    /// # Errors
    /// Those of the function; a result of other extents; canonical numerics, whose sums over tokens have other blocks;
    /// blocks of no tokens.
    pub fn in_blocks(&self, block: usize, function: impl Fn(&Tape, &Self) -> Result<Self> + 'static) -> Result<Self> {
        let (tape, shape) = (self.tape(), self.shape());
        let seq = shape.get(SEQ).copied().unwrap_or(1);
        if block >= seq || tape.decodes() {
            return function(tape, self);
        }
        if block == 0 {
            return Err(misfit("a block has a token".to_owned(), &[self.tensor()]));
        }
        if tape.reduction_blocks().is_some() {
            return Err(Error::NotCanonical {
                op: "in_blocks",
                problem: "gradients of parameters would be sums over blocks of tokens, of any length",
                valid: "the function on all tokens",
            });
        }
        let mut result: Option<(Tensor, Types)> = None;
        let mut reads = BTreeMap::new();
        for tokens in blocks(seq, block) {
            let inner = tape.nested(Mode::Evaluate);
            let of_block = function(&inner, &inner.constant(part(self.tensor(), &tokens)?, self.types()))?;
            let (whole, _) = match &mut result {
                Some(result) => result,
                None => {
                    reads = inner.reads();
                    let shape = of_block.shape().with(SEQ, seq);
                    let room = tape.device().alloc(of_block.tensor().dtype(), shape.count())?;
                    result.insert((Tensor::from_buffer(tape.device(), room, shape)?, of_block.types()))
                }
            };
            put(of_block.tensor(), &tokens, whole)?;
        }
        let Some((made, of_result)) = result else { return function(tape, self) };
        if reads.len() >= OPERANDS.len() {
            let problem = format!("the function reads {} parameters, of at most {}", reads.len(), OPERANDS.len() - 1);
            return Err(misfit(problem, &[self.tensor()]));
        }
        // The function knows of padding; here a parameter is only named.
        let read = |&id: &ParamId| Ok(Self { padding: Padding::default(), ..tape.param(id)? });
        let parameters = reads.keys().map(read).collect::<Result<Vec<_>>>()?;
        let types = [self.types(), of_result];
        let op = Blocks { function: Rc::new(function), block, types, reads, made: RefCell::new(Some(made)) };
        let operands: Vec<&Self> = std::iter::once(self).chain(&parameters).collect();
        tape.apply(op, &operands)
    }
}

impl Tape {
    /// A tape for a part of this one's work, which keeps what it saves in memory.
    fn nested(&self, mode: Mode) -> Self {
        Self::new(
            self.inner.rank.clone(),
            self.inner.params.clone(),
            self.inner.device.clone(),
            mode,
            self.inner.position,
        )
    }
}

fn misfit(problem: String, of: &[&Tensor]) -> Error {
    Error::Shape { op: "in_blocks", problem, shapes: of.iter().map(|tensor| tensor.shape().to_vec()).collect() }
}

fn blocks(seq: usize, block: usize) -> impl Iterator<Item = Range<usize>> {
    (0..seq).step_by(block).map(move |start| start..seq.min(start + block))
}

/// Some tokens of each sample.
fn part(x: &Tensor, tokens: &Range<usize>) -> Result<Tensor> {
    let (outer, extent, inner) = x.shape().around(SEQ);
    let part = x.device().layout()?.narrow(x.buffer(), outer, extent, inner, tokens.clone())?;
    Tensor::from_buffer(x.device(), part, x.shape().with(SEQ, tokens.len()))
}

/// Writes these tokens of each sample to their places among all.
fn put(part: &Tensor, tokens: &Range<usize>, whole: &mut Tensor) -> Result<()> {
    let (outer, extent, inner) = whole.shape().around(SEQ);
    if part.shape() != whole.shape().with(SEQ, tokens.len()) {
        return Err(misfit("the result of the function has the extents of its tokens".to_owned(), &[part, whole]));
    }
    let (device, shape) = (whole.device().clone(), whole.shape());
    let mut buffer = std::mem::replace(whole, Tensor::zeros(&device, part.dtype(), [0])?).into_buffer();
    let each = tokens.len() * inner;
    for at in 0..outer {
        let to = (at * extent + tokens.start) * inner;
        device.layout()?.copy_into(part.buffer(), at * each..(at + 1) * each, &mut buffer, to)?;
    }
    *whole = Tensor::from_buffer(&device, buffer, shape)?;
    Ok(())
}

/// The gradients of a block's parameters go where those of the tape go; which of them are complete, the tape knows.
struct Shares<'a>(&'a mut dyn GradSink);

impl GradSink for Shares<'_> {
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()> {
        self.0.accumulate(share, grad)
    }

    fn place(&mut self, share: &GradShard) -> Result<Option<GradSlot<'_>>> {
        self.0.place(share)
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
        &OPERANDS[..1 + self.reads.len()]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        for (parameter, read) in operands[1..].iter().zip(self.reads.values()) {
            if let Some((axis, ty)) = read.iter().find(|&(axis, ty)| parameter.types.get(axis) != Some(ty)) {
                return Err(SpmdError {
                    op: self.name().to_owned(),
                    axis,
                    problem: format!("a parameter is read as {ty}, and is not beside x"),
                    fix: "give the function the value that the parameter is read with".to_owned(),
                });
            }
        }
        Ok(self.types[1])
    }

    fn forward(&self, cx: &mut Forward<'_>, _inputs: &[&Tensor]) -> Result<Tensor> {
        cx.save_input(0)?;
        let made = self.made.borrow_mut().take();
        made.ok_or_else(|| Error::Backward("the result of blocks was taken before".to_owned()))
    }

    /// All gradients at once, where backward comes to the value: what it would take to compute those of parameters
    /// later is what blocks do not keep.
    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let flows = matches!(cx.sources[0], Source::Node(_));
        (1..cx.sources.len()).for_each(|parameter| cx.written.push(parameter));
        let mut gradients = vec![None; self.operands().len()];
        if flows && !cx.values {
            return Ok(gradients);
        }
        let x = cx.saved(0)?;
        let mut dx: Option<Tensor> = None;
        for tokens in blocks(x.shape()[SEQ], self.block) {
            let inner = cx.tape.nested(Mode::Train);
            let (of_block, types) = (part(&x, &tokens)?, self.types[0]);
            let of_block = if flows { inner.input(of_block, types) } else { inner.constant(of_block, types) };
            let result = (self.function)(&inner, &of_block)?;
            let seed = Seed::typed(part(&grad, &tokens)?, self.types[1].dual());
            inner.backward(&result, seed, Weights::Now, &mut Shares(cx.sink))?;
            if let Some(of_block) = inner.take_grad(&of_block) {
                let whole = match &mut dx {
                    Some(whole) => whole,
                    None => dx.insert(Tensor::zeros(x.device(), of_block.dtype(), x.shape())?),
                };
                put(&of_block, &tokens, whole)?;
            }
        }
        gradients[0] = dx;
        Ok(gradients)
    }
}
