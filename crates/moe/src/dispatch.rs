//! Tokens to their experts and back.
//!
//! ```text
//! x [b, s, h] ──gather──▶ one row per (token, rank) ══all-to-all══▶ ──gather──▶ one row per (token, expert), by expert
//!                                                                                        │ experts
//! y [b, s, h] ◀──combine── one row per (token, expert) ◀══all-to-all══ ◀──gather── their results
//! ```
//!
//! A token goes to a rank once, also if several of its experts are there. The results come back one by one, and are weighted and
//! added up where the token is ([`combine`](Dispatch::combine)). Integers say which rows these are; they are made on the device, and
//! the host reads counts alone: of tokens and rows for each sample and expert. Nothing has the size tokens × experts × capacity.
//!
//! The gradient of x sums the rows of a token's experts in the balanced tree over the experts: first those of a rank, a subtree if it
//! holds a power of two of them, then the ranks'. So its bits do not depend on how many ranks there are.
//!
//! On a device without values the counts are those of an even choice: the tokens of every sample are spread evenly over the experts,
//! and the number of tokens that a rank is sent is the mean over all choices of k experts.

mod counts;
mod ops;

use counts::{Announced, Counts};
use meshwork_core::{Axis, Buffer, Group, SpmdError, Types, tree};
use meshwork_tensor::kernel::Choices;
use meshwork_tensor::op::RowGroups;
use meshwork_tensor::{Device, Error, Result, Tape, Tensor, Var};
use ops::{Combine, Return, Send};
use std::rc::Rc;
use std::sync::Arc;

/// Where the choices of a micro-batch go.
#[derive(Clone, Debug)]
pub struct Dispatch {
    plan: Rc<Plan>,
    groups: Rc<RowGroups>,
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
    /// Rows that return to this rank.
    returned: usize,
    /// Experts of the choices of tokens.
    experts: Buffer,
    /// Positions of the rows that return to this rank, and their slots.
    order: Buffer,
    slots: Buffer,
    /// The exchange; `None` where one rank holds all experts.
    exchange: Option<Exchange>,
}

/// What goes between ranks.
#[derive(Debug)]
struct Exchange {
    /// Ranks of the choices of tokens, each once.
    ranks: Buffer,
    /// Positions of the choices whose tokens are sent, by rank, and their slots.
    sent: Buffer,
    sent_slots: Buffer,
    /// Tokens sent to each rank, and received from it.
    tokens: [Vec<usize>; 2],
    /// Choices of the tokens received.
    received: Buffer,
    /// Positions of the rows by expert, among the choices received, and their slots.
    here: Buffer,
    here_slots: Buffer,
    /// Row of each result that is returned, in the order of the choices received, and the inverse.
    results: Buffer,
    results_inverse: Buffer,
    /// Results returned to each rank, and received from it.
    rows: [Vec<usize>; 2],
}

impl Dispatch {
    /// The way of the chosen tokens to the experts, of which each rank of `axis` holds an equal run.
    ///
    /// # Errors
    /// Experts that the ranks cannot share; tokens that are the same on several ranks of `axis`; in canonical numerics ranks that
    /// hold no whole subtree of the experts.
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
        let (held, positions) = (num_experts / ranks, samples * seq * places);
        let permutation = device.permutation()?;
        let experts = chosen.experts.buffer();
        let once = permutation.group_ids(experts, places, held, true)?;
        let counts = Counts::read(&*device, chosen, &once, [samples, ranks])?;
        let rows_of = |sample: usize, expert: usize| counts.experts[sample * num_experts + expert];
        let (order, groups, exchange);
        let returned: usize = counts.experts.iter().sum();
        if ranks == 1 {
            order = permutation.sort(experts, 0..num_experts, returned)?;
            let of = |expert| (0..samples).map(|sample| rows_of(sample, expert)).collect();
            let own = tape.first_sample()..tape.first_sample() + samples as u64;
            groups = RowGroups::new(axis, vec![own], (0..num_experts).map(of).collect());
            exchange = None;
        } else {
            let by_rank = permutation.group_ids(experts, places, held, false)?;
            order = permutation.sort(&by_rank, 0..ranks, returned)?;
            let here = Announced::exchange(tape, &*device, &group, &counts, [samples, held])?;
            groups = here.groups(axis);
            exchange = Some(Exchange::new(&*device, &group, experts, once, &counts, &here, [places, held])?);
        }
        let slots = permutation.invert(&order, positions)?;
        let plan = Plan {
            axis,
            types: chosen.types,
            group,
            tokens: [samples, seq],
            places,
            returned,
            experts: experts.clone(),
            order,
            slots,
            exchange,
            device: device.clone(),
        };
        Ok(Self { plan: Rc::new(plan), groups: Rc::new(groups) })
    }

    /// The rows of this rank's experts.
    pub fn groups(&self) -> &Rc<RowGroups> {
        &self.groups
    }

    /// The first exchange: `x [b, s, h]`, its samples cut over the axis of the experts, to `[rows, h]` by expert, `Varying` there.
    pub fn dispatch(&self, x: &Var) -> Result<Var> {
        x.tape().apply(
            Send {
                plan: Rc::clone(&self.plan),
                rows: self.groups.total(),
                width: x.shape().last().copied().unwrap_or(1),
            },
            &[x],
        )
    }

    /// The second exchange: results `[rows, h]` by expert, back to the ranks of their tokens.
    pub fn give_back(&self, results: &Var) -> Result<Var> {
        results.tape().apply(Return { plan: Rc::clone(&self.plan), rows: self.groups.total() }, &[results])
    }

    /// `y_t = Σ_j weights[t, j] · results[t, j]`, `[b, s, h]`, over the experts that took the token, in the balanced tree over the
    /// experts. Zero for a token that none took.
    pub fn combine(&self, results: &Var, weights: &Var) -> Result<Var> {
        results.tape().apply(Combine { plan: Rc::clone(&self.plan) }, &[results, weights])
    }
}

impl Exchange {
    fn new(
        device: &dyn Device,
        group: &Group,
        experts: &Buffer,
        once: Buffer,
        counts: &Counts,
        here: &Announced,
        [places, held]: [usize; 2],
    ) -> Result<Self> {
        let (ranks, me) = (group.size(), group.rank());
        let permutation = device.permutation()?;
        let by_rank = |counts: &[usize], of_rank: usize| -> Vec<usize> {
            let of =
                |rank: usize| counts.chunks(ranks * of_rank).flat_map(|row| &row[rank * of_rank..][..of_rank]).sum();
            (0..ranks).map(of).collect()
        };
        let tokens = [by_rank(&counts.ranks, 1), here.tokens.clone()];
        let sent = permutation.sort(&once, 0..ranks, tokens[0].iter().sum())?;
        let sent_slots = permutation.invert(&sent, experts.count())?;
        let choices = permutation.gather(experts, &sent, places, places)?;
        let received = swap(device, group, choices, &tokens, places)?;
        let rows_here = here.rows_by_rank();
        let total = rows_here.iter().sum();
        let order = permutation.sort(&received, me * held..(me + 1) * held, total)?;
        let slots = permutation.invert(&order, received.count())?;
        let as_received =
            permutation.sort(&permutation.group_ids(&received, places, held, false)?, me..me + 1, total)?;
        let results = permutation.gather(&slots, &as_received, 1, 1)?;
        let results_inverse = permutation.invert(&results, total)?;
        Ok(Self {
            ranks: once,
            sent,
            sent_slots,
            tokens,
            received,
            here: order,
            here_slots: slots,
            results,
            results_inverse,
            rows: [rows_here, by_rank(&counts.experts, held)],
        })
    }
}

/// Exchanges rows of `width` elements, in these numbers to and from each rank.
fn swap(
    device: &dyn Device,
    group: &Group,
    rows: Buffer,
    [to, from]: &[Vec<usize>; 2],
    width: usize,
) -> Result<Buffer> {
    let elements = |rows: &[usize]| -> Vec<usize> { rows.iter().map(|rows| rows * width).collect() };
    let (to, from) = (elements(to), elements(from));
    let room = device.alloc(rows.dtype(), from.iter().sum())?;
    Ok(group.all_to_all(rows, room, &to, &from)?)
}

/// The same in the other direction.
fn back(counts: &[Vec<usize>; 2]) -> [Vec<usize>; 2] {
    let [to, from] = counts.clone();
    [from, to]
}

impl Plan {
    fn refuse(&self, op: &str, axis: Axis, problem: String, fix: &str) -> SpmdError {
        SpmdError { op: op.to_owned(), axis, problem, fix: fix.to_owned() }
    }

    fn of_tokens<'a>(&self, slots: &'a Buffer, ids: &'a Buffer) -> Choices<'a> {
        Choices { ids, slots, k: self.places }
    }
}
