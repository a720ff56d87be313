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

use meshwork_core::rules::{Operand, per_axis};
use meshwork_core::{Axis, Buffer, DType, Group, SpmdError, Ty, Types, tree};
use meshwork_tensor::kernel::Choices;
use meshwork_tensor::op::RowGroups;
use meshwork_tensor::tape::{Backward, Forward, Op};
use meshwork_tensor::{Device, Error, Result, Shape, Tape, Tensor, Var};
use std::ops::Range;
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

/// Numbers of rows for every sample: of each expert, and of tokens for each rank.
struct Counts {
    /// `[samples, experts]`
    experts: Vec<usize>,
    /// `[samples, ranks]`
    ranks: Vec<usize>,
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

impl Counts {
    fn read(device: &dyn Device, chosen: &Chosen, once: &Buffer, [samples, ranks]: [usize; 2]) -> Result<Self> {
        let permutation = device.permutation()?;
        let download = |counts: &Buffer| -> Result<Vec<usize>> {
            Ok(device.download(counts)?.as_slice::<i32>()?.iter().map(|&count| count as usize).collect())
        };
        let experts = permutation.counts(chosen.experts.buffer(), samples, 0..chosen.num_experts)?;
        let tokens = permutation.counts(once, samples, 0..ranks)?;
        let read = Self { experts: download(&experts)?, ranks: download(&tokens)? };
        if device.has_values() {
            return Ok(read);
        }
        let seq = chosen.experts.shape()[1];
        let Chosen { num_experts, capacity, top_k, .. } = *chosen;
        let of_sample =
            even(seq * top_k, num_experts).map(|count| capacity.map_or(count, |capacity| count.min(capacity)));
        let experts: Vec<usize> = of_sample.collect();
        let tokens = vec![spread(seq, top_k, num_experts, num_experts / ranks); ranks];
        Ok(Self { experts: experts.repeat(samples), ranks: tokens.repeat(samples) })
    }
}

/// `count` as evenly as possible in `parts` parts, the larger ones first.
fn even(count: usize, parts: usize) -> impl Iterator<Item = usize> {
    (0..parts).map(move |part| count / parts + usize::from(part < count % parts))
}

/// The mean number of `tokens` tokens with an expert among `held` of `experts`, where each chooses k of them: a token has none there
/// with probability `C(experts - held, k) / C(experts, k)`.
fn spread(tokens: usize, k: usize, experts: usize, held: usize) -> usize {
    let none: f64 = (0..k).map(|i| (experts - held).saturating_sub(i) as f64 / (experts - i) as f64).product();
    (tokens as f64 * (1.0 - none)).round() as usize
}

/// What the ranks announce to this one: numbers of tokens and rows for its experts.
struct Announced {
    /// Per rank: its samples.
    samples: Vec<Range<u64>>,
    /// `[ranks, samples, experts held here]`
    rows: Vec<usize>,
    held: usize,
    /// Tokens from each rank.
    tokens: Vec<usize>,
}

impl Announced {
    fn exchange(
        tape: &Tape,
        device: &dyn Device,
        group: &Group,
        counts: &Counts,
        [samples, held]: [usize; 2],
    ) -> Result<Self> {
        let (ranks, me, experts) = (group.size(), group.rank(), held * group.size());
        let first = tape.first_sample();
        // For each rank: the number of the first sample, and for every sample the tokens and the rows of each expert.
        let size = 1 + samples * (1 + held);
        let mut message = Vec::with_capacity(ranks * size);
        for rank in 0..ranks {
            message.push(first as i32);
            for sample in 0..samples {
                message.push(counts.ranks[sample * ranks + rank] as i32);
                let rows = &counts.experts[sample * experts + rank * held..][..held];
                message.extend(rows.iter().map(|&count| count as i32));
            }
        }
        let each = vec![size; ranks];
        let room = device.alloc(DType::I32, ranks * size)?;
        let received = group.all_to_all(device.upload(&Buffer::from_vec(message.clone()))?, room, &each, &each)?;
        let received = device.download(&received)?;
        // Without values every rank announces what this one announces to itself, of samples beside its own.
        let own = message[me * size..][..size].repeat(ranks);
        let read = if device.has_values() { received.as_slice::<i32>()? } else { &own };
        let (mut tokens, mut rows, mut runs) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, announced) in read.chunks_exact(size).enumerate() {
            let first = match device.has_values() {
                true => announced[0] as u64,
                false => first.saturating_sub((me * samples) as u64) + (rank * samples) as u64,
            };
            runs.push(first..first + samples as u64);
            let of_samples = announced[1..].chunks_exact(1 + held);
            tokens.push(of_samples.clone().map(|of| of[0] as usize).sum());
            rows.extend(of_samples.flat_map(|of| of[1..].iter().map(|&count| count as usize)));
        }
        Ok(Self { samples: runs, rows, held, tokens })
    }

    /// The rows of each expert: ranks have consecutive samples, so rows in the order of ranks are in that of samples.
    fn groups(&self, axis: Axis) -> RowGroups {
        let of = |expert| self.rows.iter().skip(expert).step_by(self.held).copied().collect();
        RowGroups::new(axis, self.samples.clone(), (0..self.held).map(of).collect())
    }

    /// Rows of the tokens of each rank.
    fn rows_by_rank(&self) -> Vec<usize> {
        self.rows.chunks(self.rows.len() / self.tokens.len()).map(|rows| rows.iter().sum()).collect()
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

/// The first exchange.
#[derive(Debug)]
struct Send {
    plan: Rc<Plan>,
    rows: usize,
    width: usize,
}

impl Op for Send {
    fn name(&self) -> &'static str {
        "dispatch"
    }

    fn operands(&self) -> &'static [&'static str] {
        &["x"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let plan = &*self.plan;
        let types = per_axis(self.name(), operands, |axis, types| match types[0] {
            Ty::Shard(0) => Ok(Ty::Varying),
            Ty::Shard(dim) => Err((
                format!("dim {dim} of x is sharded, and a token goes to its experts whole, a sequence as one group"),
                format!("all_gather_invariant x along dim {dim} first"),
            )),
            Ty::Partial => {
                Err(("x is Partial: a value used before its reduction".to_owned(), "all_reduce it first".to_owned()))
            }
            ty if axis == plan.axis => Err((
                format!("x is {ty}: an expert would get the same token from every rank"),
                "cut the samples over this axis".to_owned(),
            )),
            ty => Ok(ty),
        })?;
        match operands[0].types.iter().find(|&(axis, ty)| plan.types.get(axis) != Some(ty)) {
            None => Ok(types),
            Some((axis, ty)) => {
                let chosen = plan.types.get(axis).map_or("nothing".to_owned(), |ty| ty.to_string());
                Err(plan.refuse(
                    self.name(),
                    axis,
                    format!("x is {ty}, and its experts were chosen of {chosen}"),
                    "route the value that is dispatched",
                ))
            }
        }
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (plan, x) = (&*self.plan, inputs[0]);
        let [samples, seq] = plan.tokens;
        cx.require(
            x.shape()[..] == [samples, seq, self.width],
            || format!("x is [{samples}, {seq}, features], as its choices"),
            inputs,
        )?;
        let permutation = plan.device.permutation()?;
        let rows = match &plan.exchange {
            None => permutation.gather(x.buffer(), &plan.order, plan.places, self.width)?,
            Some(exchange) => {
                let sent = permutation.gather(x.buffer(), &exchange.sent, plan.places, self.width)?;
                let received = swap(&*plan.device, &plan.group, sent, &exchange.tokens, self.width)?;
                permutation.gather(&received, &exchange.here, plan.places, self.width)?
            }
        };
        Tensor::from_buffer(&plan.device, rows, [self.rows, self.width])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if !cx.needs(0) {
            return Ok(vec![None]);
        }
        let (plan, permutation) = (&*self.plan, self.plan.device.permutation()?);
        let combine = |rows: &Buffer, choices| permutation.combine(rows, choices, None, self.width);
        let dx = match &plan.exchange {
            None => combine(grad.buffer(), plan.of_tokens(&plan.slots, &plan.experts))?,
            Some(exchange) => {
                let received = combine(grad.buffer(), plan.of_tokens(&exchange.here_slots, &exchange.received))?;
                drop(grad);
                let sent = swap(&*plan.device, &plan.group, received, &back(&exchange.tokens), self.width)?;
                combine(&sent, plan.of_tokens(&exchange.sent_slots, &exchange.ranks))?
            }
        };
        let [samples, seq] = plan.tokens;
        Ok(vec![Some(Tensor::from_buffer(&plan.device, dx, [samples, seq, self.width])?)])
    }
}

/// The second exchange.
#[derive(Debug)]
struct Return {
    plan: Rc<Plan>,
    rows: usize,
}

impl Op for Return {
    fn name(&self) -> &'static str {
        "give_back"
    }

    fn operands(&self) -> &'static [&'static str] {
        &["results"]
    }

    fn only_moves(&self) -> bool {
        true
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let plan = &*self.plan;
        per_axis(self.name(), operands, |axis, types| match (types[0], plan.types.get(axis)) {
            (Ty::Varying, Some(Ty::Shard(0))) => Ok(Ty::Shard(0)),
            (ty, Some(Ty::Shard(0))) => Err((
                format!("results are {ty}, and rows of other ranks' tokens are Varying"),
                "give back the results of dispatched rows".to_owned(),
            )),
            (Ty::Partial, _) => Err((
                "results are Partial: a value used before its reduction".to_owned(),
                format!("all_reduce them over {axis} first"),
            )),
            (ty, _) => Ok(ty),
        })
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (plan, x) = (&*self.plan, inputs[0]);
        let fits = x.shape().len() == 2 && x.shape()[0] == self.rows;
        cx.require(fits, || format!("results are [{}, features], as the dispatched rows", self.rows), inputs)?;
        let Some(exchange) = &plan.exchange else {
            cx.same_as(0);
            return Ok(x.clone());
        };
        let width = x.shape()[1];
        let sent = plan.device.permutation()?.gather(x.buffer(), &exchange.results, 1, width)?;
        let received = swap(&*plan.device, &plan.group, sent, &exchange.rows, width)?;
        Tensor::from_buffer(&plan.device, received, [plan.returned, width])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let plan = &*self.plan;
        let (true, Some(exchange)) = (cx.needs(0), &plan.exchange) else {
            return Ok(vec![cx.needs(0).then_some(grad)]);
        };
        let width = grad.shape()[1];
        let received = swap(&*plan.device, &plan.group, grad.into_buffer(), &back(&exchange.rows), width)?;
        let rows = plan.device.permutation()?.gather(&received, &exchange.results_inverse, 1, width)?;
        Ok(vec![Some(Tensor::from_buffer(&plan.device, rows, [self.rows, width])?)])
    }
}

#[derive(Debug)]
struct Combine {
    plan: Rc<Plan>,
}

impl Op for Combine {
    fn name(&self) -> &'static str {
        "combine"
    }

    fn operands(&self) -> &'static [&'static str] {
        &["results", "weights"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        per_axis(self.name(), operands, |axis, types| match (types[0], types[1]) {
            (Ty::Varying, Ty::Shard(0)) => Err((
                "results are Varying: they are still on the ranks of their experts".to_owned(),
                "give them back first: the second exchange".to_owned(),
            )),
            (Ty::Partial, _) | (_, Ty::Partial) => Err((
                format!("results are {} and weights {}: a value used before its reduction", types[0], types[1]),
                format!("all_reduce it over {axis} first"),
            )),
            (results, weights) if results == weights && !matches!(weights, Ty::Shard(1..)) => Ok(weights),
            (results, weights) => Err((
                format!("results are {results} and weights are {weights}: they are not of the same tokens"),
                "combine results with the weights of the choices that were dispatched".to_owned(),
            )),
        })
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (plan, [results, weights]) = (&*self.plan, [inputs[0], inputs[1]]);
        let [samples, seq] = plan.tokens;
        let fits = results.shape().len() == 2 && results.shape()[0] == plan.returned;
        cx.require(
            fits && weights.shape()[..] == [samples, seq, plan.places],
            || format!("results are [{}, features], and weights [{samples}, {seq}, {}]", plan.returned, plan.places),
            inputs,
        )?;
        cx.save_input(0)?;
        cx.save_input(1)?;
        let (width, choices) = (results.shape()[1], plan.of_tokens(&plan.slots, &plan.experts));
        let y = plan.device.permutation()?.combine(results.buffer(), choices, Some(weights.buffer()), width)?;
        Tensor::from_buffer(&plan.device, y, [samples, seq, width])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let plan = &*self.plan;
        let (results, weights) = (cx.saved(0)?, cx.saved(1)?);
        let (shape, choices): (Shape, _) = (results.shape(), plan.of_tokens(&plan.slots, &plan.experts));
        let permutation = plan.device.permutation()?;
        let (dresults, dweights) = permutation.combine_grad(
            grad.buffer(),
            results.buffer(),
            choices,
            &plan.order,
            weights.buffer(),
            shape[1],
        )?;
        let dresults = Tensor::from_buffer(&plan.device, dresults, shape)?;
        let dweights = Tensor::from_buffer(&plan.device, dweights, weights.shape())?;
        Ok(vec![cx.needs(0).then_some(dresults), cx.needs(1).then_some(dweights)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_counts_and_the_mean_of_all_choices() {
        assert!(even(10, 4).eq([3, 3, 2, 2]));
        assert_eq!(spread(100, 2, 8, 8), 100, "one rank is sent every token once");
        assert_eq!(spread(100, 1, 8, 2), 25);
        // Of 28 pairs of 8 experts, 15 are among the 6 of other ranks.
        assert_eq!(spread(2800, 2, 8, 2), 1300);
        assert_eq!(spread(100, 3, 4, 2), 100, "some expert of three is always here");
    }
}
