//! Tokens to their experts and back.
//!
//! ```text
//! x [b, s, h] ──gather──▶ one row per (token, rank) ══all-to-all══▶ ──gather──▶ one row per (token, expert), by expert
//!                                                                                        │ experts
//! y [b, s, h] ◀──combine── one row per (token, expert) ◀══all-to-all══ ◀──gather── their results
//! ```
//!
//! A token goes to a rank once, also if several of its experts are there. The results come back one by one, and are
//! weighted and added up where the token is ([`combine`](Dispatch::combine)). Integers say which rows these are; they
//! are made on the device, and the host reads counts alone: of tokens and rows for each sample and expert. Nothing has
//! the size tokens × experts × capacity.
//!
//! Where ranks share the experts, the samples of a rank are cut in two chunks, and the rows of one travel while the
//! experts compute the other:
//!
//! ```text
//! forward                                              backward
//! exchange    ═══ 0 ═══ ═══ 1 ═══ ═══ 0 ═══ ═══ 1 ═══  ═══ 1 ═══ ═══ 0 ═══ ═══ 1 ═══ ═══ 0 ═══
//! experts               ─── 0 ─── ─── 1 ───                      ─── 1 ─── ─── 0 ───
//! ```
//!
//! An operation that starts an exchange leaves it with its chunk, and gives a value without elements; the operation
//! that waits for it takes this value. In backward each starts what it waited for, and waits for what it started. So
//! the order in which the tape runs operations is all that makes exchange and computation overlap.
//!
//! Each exchange may be [compressed](Tape::compress_rows), row by row: what goes to a rank is one message, also what a
//! rank keeps for its own experts, so that what is lost of a token does not depend on where its experts are. The
//! numbers of rows are exchanged before, so both sides know how long a message is.
//!
//! The gradient of x sums the rows of a token's experts in the balanced tree over the experts: first those of a rank, a
//! subtree if it holds a power of two of them, then the ranks'. So its bits do not depend on how many ranks there are.
//! Chunks are whole samples, and [parts](Tape::for_parts) of one use of the experts' weights: nor do the bits depend on
//! them.
//!
//! On a device without values the counts are those of an even choice: the tokens of every sample are spread evenly over
//! the experts, and the number of tokens that a rank is sent is the mean over all choices of k experts.

mod chunk;
mod counts;
mod ops;

use chunk::{Chunk, Leaving};
use counts::{Announced, Counts};
use meshwork_core::{Axis, Buffer, Group, Types, tree};
use meshwork_tensor::op::RowGroups;
use meshwork_tensor::tape::RowCodec;
use meshwork_tensor::{Device, Error, Result, Tape, Tensor, Var};
use ops::{Arrive, Combine, Return, Send};
use std::rc::Rc;
use std::sync::Arc;

/// The chunks of samples where ranks exchange rows: the fewest with which an exchange and the experts have something to
/// do at a time. More would make the products of each smaller.
const CHUNKS: usize = 2;

/// Where the choices of a micro-batch go.
#[derive(Clone, Debug)]
pub struct Dispatch {
    plan: Rc<Plan>,
}

/// The choices of tokens: which experts take them.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// Experts in ascending order, -1 in places that are not used: `[samples, seq, places]` in i32.
    pub experts: Tensor,
    /// Experts in total.
    pub num_experts: usize,
    /// Types of the tokens.
    pub types: Types,
    /// On a device without values: tokens of a sample that each expert takes at most.
    pub capacity: Option<usize>,
    /// On a device without values: experts of a token.
    pub top_k: usize,
}

/// The permutations of one micro-batch.
#[derive(Debug)]
struct Plan {
    axis: Axis,
    types: Types,
    device: Arc<dyn Device>,
    group: Group,
    /// `[samples, seq]`
    tokens: [usize; 2],
    /// Places of a token.
    places: usize,
    chunks: Vec<Chunk>,
    /// Compresses what is exchanged, if the tape says so.
    codec: RowCodec,
}

impl Dispatch {
    /// The way of the chosen tokens to the experts, of which each rank of `axis` holds an equal run.
    ///
    /// # Errors
    /// Experts that the ranks cannot share; tokens that are the same on several ranks of `axis`; in canonical numerics
    /// ranks that hold no whole subtree of the experts.
    pub fn new(tape: &Tape, chosen: &Chosen, axis: Axis) -> Result<Self> {
        let (device, group) = (tape.device().clone(), tape.rank().group(axis).clone());
        let (ranks, num_experts) = (group.size(), chosen.num_experts);
        if num_experts % ranks != 0 {
            return Err(Error::uneven("dispatch", 0, num_experts, axis, ranks));
        }
        if tape.reduction_blocks().is_some() && !tree::fits(num_experts, ranks) {
            return Err(Error::Placement {
                what: "dispatch".to_owned(),
                dim: 0,
                extent: num_experts,
                axis,
                degree: ranks,
                problem: format!(
                    "in canonical numerics {num_experts} experts fit degrees {:?}",
                    tree::degrees(num_experts)
                ),
            });
        }
        let &[samples, seq, places] = &chosen.experts.shape()[..] else {
            return Err(Error::Shape {
                op: "dispatch",
                problem: "choices are [samples, seq, places]".to_owned(),
                shapes: vec![chosen.experts.shape().to_vec()],
            });
        };
        let (held, sample) = (num_experts / ranks, seq * places);
        let experts = chosen.experts.buffer();
        let once = device.permutation()?.group_ids(experts, places, held, true)?;
        let counts = Counts::read(&*device, chosen, &once, [samples, ranks])?;
        let chunks = if ranks == 1 {
            let own = tape.first_sample()..tape.first_sample() + samples as u64;
            let groups = RowGroups::new(axis, vec![own], counts.by_expert());
            vec![Chunk::here(&*device, experts, 0..samples, groups)?]
        } else {
            let announced = Announced::exchange(tape, &*device, &group, &counts, [samples, held])?;
            let chunks = CHUNKS.min(samples);
            let leave = |chunk| -> Result<(Leaving, Announced)> {
                let run = samples * chunk / chunks..samples * (chunk + 1) / chunks;
                let of = |all: &Buffer| all.slice(run.start * sample..run.end * sample);
                let (of_run, here, choices) = (counts.of(&run), announced.of(&run), [of(experts)?, of(&once)?]);
                Ok((Leaving::new(&*device, &group, run, choices, places, &of_run, &here)?, here))
            };
            // The choices of all chunks travel at once.
            let leaving: Vec<_> = (0..chunks).map(leave).collect::<Result<_>>()?;
            let arrive = |(leaving, here): (Leaving, Announced)| leaving.arrive(&*device, &group, &here, axis);
            leaving.into_iter().map(arrive).collect::<Result<_>>()?
        };
        let (tokens, codec) = ([samples, seq], tape.row_codec());
        let plan = Plan { axis, types: chosen.types, device, group, tokens, places, chunks, codec };
        Ok(Self { plan: Rc::new(plan) })
    }

    /// Sends `x [b, s, h]`, its samples cut over the axis of the experts, to the experts: `experts` takes rows
    /// `[rows, h]` by expert, `Varying` on that axis, and gives their results in the same places and of the same types.
    /// It is called for each chunk of the samples. The results are on their way back then, and the value returned, to
    /// [`combine`](Self::combine) once, has no elements.
    pub fn through(&self, x: &Var, mut experts: impl FnMut(&Var, &Rc<RowGroups>) -> Result<Var>) -> Result<Var> {
        let (tape, plan) = (x.tape(), &self.plan);
        let width = x.shape().last().copied().unwrap_or(1);
        let sent = tape.apply(Send { plan: Rc::clone(plan), width }, &[x])?;
        let mut returned: Option<Var> = None;
        tape.for_parts(plan.chunks.len(), |chunk| {
            let rows = tape.apply(Arrive { plan: Rc::clone(plan), chunk, width }, &[&sent])?;
            let results = experts(&rows, &plan.chunks[chunk].groups)?;
            let op = Return { plan: Rc::clone(plan), chunk };
            returned = Some(match &returned {
                None => tape.apply(op, &[&results])?,
                Some(before) => tape.apply(op, &[&results, before])?,
            });
            Ok(())
        })?;
        returned.ok_or_else(|| Error::Shape {
            op: "dispatch",
            problem: "there are no samples".to_owned(),
            shapes: vec![x.shape().to_vec()],
        })
    }

    /// `y_t = Σ_j weights[t, j] · results[t, j]`, `[b, s, h]`, over the experts that took the token, in the balanced
    /// tree over the experts. Zero for a token that none took. `results` is what [`through`](Self::through) returned.
    pub fn combine(&self, results: &Var, weights: &Var) -> Result<Var> {
        results.tape().apply(Combine { plan: Rc::clone(&self.plan) }, &[results, weights])
    }
}
