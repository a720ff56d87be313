//! Dispatch of tokens to their experts and back.
//!
//! ```text
//! x [b, s, h] ──gather──▶ one row per (token, rank) ══all-to-all══▶ ──gather──▶ one row per (token, expert), by expert
//!                                                                                        │ experts
//! y [b, s, h] ◀──combine── one row per (token, expert) ◀══all-to-all══ ◀──gather── their results
//! ```
//!
//! The tokens of a rank are whole sequences, or slices that axes cut of them once their experts are chosen.
//!
//! A token is sent to a rank once, even if several of its experts are there. Each expert's result is sent back
//! separately; the results are weighted and summed on the token's rank ([`combine`](Dispatch::combine)). Index tensors
//! on the device select the rows. The host reads only counts: of tokens and rows for each sample and expert. No tensor
//! has the size tokens × experts × capacity.
//!
//! If ranks share the experts, the samples of a rank are cut into two chunks, and the rows of one chunk are exchanged
//! while the experts compute the other:
//!
//! ```text
//! forward                                              backward
//! exchange    ═══ 0 ═══ ═══ 1 ═══ ═══ 0 ═══ ═══ 1 ═══  ═══ 1 ═══ ═══ 0 ═══ ═══ 1 ═══ ═══ 0 ═══
//! experts               ─── 0 ─── ─── 1 ───                      ─── 1 ─── ─── 0 ───
//! ```
//!
//! An operation that starts an exchange stores it in its chunk and returns a value without elements, which is the input
//! of the operation that waits for the exchange. In backward the roles are swapped: each operation starts the exchange
//! for which it waited, and waits for the exchange that it started. So the overlap of exchange and computation follows
//! only from the order of operations on the tape.
//!
//! Each exchange may be [compressed](Tape::compress_rows), row by row, with one message to each rank. Rows for a rank's
//! own experts are compressed too, so that the error of a token does not depend on the place of its experts. The
//! numbers of rows are exchanged first, so both sides know the length of each message.
//!
//! The gradient of x sums the rows of a token's experts in the balanced tree over the experts: first over the experts
//! of a rank (a subtree if their number is a power of two), then over ranks. So its bits do not depend on the number of
//! ranks. They do not depend on the chunks either, which are whole samples and [parts](Tape::for_parts) of one use of
//! the experts' weights.
//!
//! On a device without values, the counts assume an even load: the tokens of every sample are spread evenly over the
//! experts, and the number of tokens sent to a rank is the mean over all choices of k experts. Or they assume that all
//! tokens choose the experts of this rank ([`Device::takes_all`]): what else a token chooses is then on as many other
//! ranks as can be.

mod chunk;
mod counts;
mod ops;

use chunk::{Chunk, Leaving};
use counts::{Announced, Counts};
use meshwork_core::{Axes, Axis, Buffer, Group, Ty, Types, tree};
use meshwork_tensor::op::RowGroups;
use meshwork_tensor::tape::RowCodec;
use meshwork_tensor::{Device, Error, Result, Tape, Tensor, Var};
use ops::{Arrive, Combine, Return, Send};
use std::rc::Rc;
use std::sync::Arc;

/// Number of chunks when ranks exchange rows: the smallest number that overlaps exchange and computation. More chunks
/// would make the products smaller.
const CHUNKS: usize = 2;

/// The dispatch of the choices of a micro-batch.
#[derive(Clone, Debug)]
pub struct Dispatch {
    plan: Rc<Plan>,
}

/// The choices of tokens: the experts that take them.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// Experts in ascending order, -1 in unused places: `[samples, seq, places]` in i32.
    pub experts: Tensor,
    /// Experts in total.
    pub num_experts: usize,
    /// SPMD types of the tokens.
    pub types: Types,
    /// On a device without values: the capacity of each expert, in tokens of a sample that a rank has.
    pub capacity: Option<usize>,
    /// On a device without values: experts per token.
    pub top_k: usize,
}

/// The permutations of one micro-batch.
#[derive(Debug)]
struct Plan {
    axes: Axes,
    types: Types,
    device: Arc<dyn Device>,
    group: Group,
    /// `[samples, seq]`
    tokens: [usize; 2],
    /// Places for choices per token.
    places: usize,
    chunks: Vec<Chunk>,
    /// Compresses the exchanged rows, if the tape asks for it.
    codec: RowCodec,
}

impl Dispatch {
    /// Plans the dispatch of the chosen tokens to the experts; each rank of `axes` holds an equal run of experts.
    ///
    /// # Errors
    /// Experts that cannot be divided evenly among the ranks; tokens replicated over `axes`; with canonical numerics,
    /// ranks whose experts are not a whole subtree.
    pub fn new(tape: &Tape, chosen: &Chosen, axes: impl Into<Axes>) -> Result<Self> {
        let axes = axes.into();
        let axis = axes.last().copied().unwrap_or(Axis::Ep);
        let (device, group) = (tape.device().clone(), tape.rank().group_over(&axes).clone());
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
        let counts = Counts::read(&*device, chosen, &once, [samples, ranks, group.rank()])?;
        let chunks = if ranks == 1 {
            let own = tape.first_sample()..tape.first_sample() + samples as u64;
            let groups = RowGroups::new(axes, vec![own], counts.by_expert());
            vec![Chunk::here(&*device, experts, 0..samples, groups)?]
        } else {
            // Ranks that follow each other have the slices of the same sequences.
            let cut = axes.iter().filter(|&&axis| matches!(chosen.types.get(axis), Some(Ty::Shard(1))));
            let slices = cut.map(|&axis| tape.rank().mesh().degree(axis)).product();
            let announced = Announced::exchange(tape, &*device, &group, &counts, [samples, held, slices])?;
            // In canonical numerics a gradient is summed over whole sequences, token by token: the slices of one follow
            // each other in a chunk of one sample from each rank.
            let chunks = if slices > 1 && tape.reduction_blocks().is_some() { samples } else { CHUNKS.min(samples) };
            let leave = |chunk| -> Result<(Leaving, Announced)> {
                let run = samples * chunk / chunks..samples * (chunk + 1) / chunks;
                let of = |all: &Buffer| all.slice(run.start * sample..run.end * sample);
                let (of_run, here, choices) =
                    (counts.of_samples(&run), announced.of_samples(&run), [of(experts)?, of(&once)?]);
                Ok((Leaving::new(&*device, &group, run, choices, places, &of_run, &here)?, here))
            };
            // The choices of all chunks are exchanged at the same time.
            let leaving: Vec<_> = (0..chunks).map(leave).collect::<Result<_>>()?;
            let arrive = |(leaving, here): (Leaving, Announced)| leaving.arrive(&*device, &group, &here, axes);
            leaving.into_iter().map(arrive).collect::<Result<_>>()?
        };
        let (tokens, codec) = ([samples, seq], tape.row_codec());
        let plan = Plan { axes, types: chosen.types, device, group, tokens, places, chunks, codec };
        Ok(Self { plan: Rc::new(plan) })
    }

    /// Sends `x [b, s, h]`, whose tokens are sharded over the axes of the experts, to the experts. `experts` is called
    /// for each chunk of the samples: it takes rows `[rows, h]` sorted by expert, `Varying` on those axes, and returns
    /// their results in the same places and with the same types. The returned value has no elements, because the
    /// results are still in flight; pass it to [`combine`](Self::combine) once.
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
    /// tree over the experts. Zero for a token that no expert took. `results` is the value returned by
    /// [`through`](Self::through).
    pub fn combine(&self, results: &Var, weights: &Var) -> Result<Var> {
        results.tape().apply(Combine { plan: Rc::clone(&self.plan) }, &[results, weights])
    }
}
