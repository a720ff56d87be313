//! The operations of a dispatch on the tape: both exchanges, each started and waited for, and the weighted sum.
//!
//! | operation | forward | backward |
//! |---|---|---|
//! | `dispatch` | starts the exchange of tokens, for all chunks | waits for the gradients of their rows |
//! | `arrive`, of a chunk | waits for them | starts the exchange of their gradients |
//! | `return`, of a chunk | starts the exchange of results | waits for their gradients |
//! | `combine` | waits for the results of all chunks | starts the exchange of their gradients |
//!
//! Starting and waiting operations are connected by values without elements, `[0, features]`.

use super::Plan;
use meshwork_core::rules::{Operand, per_axis};
use meshwork_core::{Axis, DType, SpmdError, Ty, Types};
use meshwork_tensor::tape::{Backward, Forward, Op, RowFlow};
use meshwork_tensor::{Result, Tensor};
use std::rc::Rc;

/// The placeholder for rows in flight.
fn away(plan: &Plan, dtype: DType, width: usize) -> Result<Tensor> {
    Tensor::zeros(&plan.device, dtype, [0, width])
}

/// The counts of an exchange in the other direction.
fn back([to, from]: &[Vec<usize>; 2]) -> [Vec<usize>; 2] {
    [from.clone(), to.clone()]
}

/// Starts the first exchange.
#[derive(Debug)]
pub(super) struct Send {
    pub plan: Rc<Plan>,
    pub width: usize,
}

impl Op for Send {
    fn name(&self) -> &'static str {
        "dispatch"
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let plan = &*self.plan;
        let types = per_axis(self.name(), operands, |axis, types| match types[0] {
            Ty::Shard(0) => Ok(Ty::Varying),
            // Slices of sequences whose experts were chosen before they were cut.
            Ty::Shard(1) if plan.types.get(axis) == Some(Ty::Shard(1)) => Ok(Ty::Varying),
            Ty::Shard(dim) => Err((
                format!("dim {dim} of x is sharded, and a token goes to its experts whole, a sequence as one group"),
                format!("all_gather_invariant x along dim {dim} first"),
            )),
            Ty::Partial => {
                Err(("x is Partial: a value used before its reduction".to_owned(), "all_reduce it first".to_owned()))
            }
            ty if plan.axes.contains(&axis) => Err((
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
            format_args!("x is [{samples}, {seq}, features], as its choices"),
        )?;
        let permutation = plan.device.permutation()?;
        for chunk in &plan.chunks {
            let x = x.buffer().slice(plan.elements(chunk, self.width))?;
            match &chunk.exchange {
                None => chunk.tokens.land(permutation.gather(&x, &chunk.order, plan.places, self.width)?),
                Some(exchange) => {
                    let sent = permutation.gather(&x, &exchange.sent, plan.places, self.width)?;
                    plan.start(
                        &chunk.tokens,
                        sent,
                        &exchange.tokens,
                        self.width,
                        (RowFlow::Forward, &chunk.named("tokens")),
                    )?;
                }
            }
        }
        away(plan, x.dtype(), self.width)
    }

    fn backward(&self, cx: &mut Backward<'_>, _grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if !cx.needs(0) {
            return Ok(vec![None]);
        }
        let (plan, permutation) = (&*self.plan, self.plan.device.permutation()?);
        let dx = plan.join(self.width, |chunk| {
            let rows = chunk.tokens.wait()?;
            let choices = chunk.exchange.as_ref().map_or(chunk.of_tokens(plan), |exchange| exchange.of_sent(plan));
            permutation.combine(&rows, choices, None, self.width)
        })?;
        let [samples, seq] = plan.tokens;
        Ok(vec![Some(Tensor::from_buffer(&plan.device, dx, [samples, seq, self.width])?)])
    }
}

/// Waits for the rows of a chunk in the first exchange.
#[derive(Debug)]
pub(super) struct Arrive {
    pub plan: Rc<Plan>,
    pub chunk: usize,
    pub width: usize,
}

impl Op for Arrive {
    fn name(&self) -> &'static str {
        "arrive"
    }

    fn operands(&self) -> &'static [&'static str] {
        &["sent"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        Ok(operands[0].types)
    }

    fn forward(&self, _cx: &mut Forward<'_>, _inputs: &[&Tensor]) -> Result<Tensor> {
        let (plan, chunk) = (&*self.plan, &self.plan.chunks[self.chunk]);
        let mut rows = chunk.tokens.wait()?;
        if let Some(exchange) = &chunk.exchange {
            rows = plan.device.permutation()?.gather(&rows, &exchange.here, plan.places, self.width)?;
        }
        Tensor::from_buffer(&plan.device, rows, [chunk.groups.total(), self.width])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if !cx.needs(0) {
            return Ok(vec![None]);
        }
        let (plan, chunk) = (&*self.plan, &self.plan.chunks[self.chunk]);
        let dtype = grad.dtype();
        match &chunk.exchange {
            None => chunk.tokens.land(grad.into_buffer()),
            Some(exchange) => {
                let permutation = plan.device.permutation()?;
                // If several experts of this rank read a token, the rank sends the sum of their gradients, which is a
                // part of the sum over all experts.
                let grad = cx.share(grad)?;
                let rows = permutation.combine(grad.buffer(), exchange.of_received(plan), None, self.width)?;
                drop(grad);
                plan.start(
                    &chunk.tokens,
                    rows,
                    &back(&exchange.tokens),
                    self.width,
                    (RowFlow::Backward, &chunk.named("tokens")),
                )?;
            }
        }
        Ok(vec![Some(away(plan, dtype, self.width)?)])
    }
}

/// Starts the second exchange of a chunk, after the exchange of the previous chunk.
#[derive(Debug)]
pub(super) struct Return {
    pub plan: Rc<Plan>,
    pub chunk: usize,
}

impl Op for Return {
    fn name(&self) -> &'static str {
        "give_back"
    }

    fn operands(&self) -> &'static [&'static str] {
        if self.chunk == 0 { &["results"] } else { &["results", "before"] }
    }

    fn only_moves(&self) -> bool {
        true
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let plan = &*self.plan;
        per_axis(self.name(), &operands[..1], |axis, types| match (types[0], plan.types.get(axis)) {
            (Ty::Varying, Some(Ty::Shard(0 | 1))) => Ok(Ty::Shard(0)),
            (ty, Some(Ty::Shard(0 | 1))) => Err((
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
        let (plan, chunk, x) = (&*self.plan, &self.plan.chunks[self.chunk], inputs[0]);
        let (shape, rows) = (x.shape(), chunk.groups.total());
        let fits = shape.len() == 2 && shape[0] == rows;
        cx.require(fits, format_args!("results are [{rows}, features], as the dispatched rows"))?;
        match &chunk.exchange {
            None => chunk.results.land(x.buffer().clone()),
            Some(exchange) => {
                let sent = plan.device.permutation()?.gather(x.buffer(), &exchange.results, 1, shape[1])?;
                plan.start(
                    &chunk.results,
                    sent,
                    &exchange.rows,
                    shape[1],
                    (RowFlow::Forward, &chunk.named("results")),
                )?;
            }
        }
        away(plan, x.dtype(), shape[1])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (plan, chunk, width) = (&*self.plan, &self.plan.chunks[self.chunk], grad.shape()[1]);
        let mut results = chunk.results.wait()?;
        if let Some(exchange) = &chunk.exchange {
            results = plan.device.permutation()?.gather(&results, &exchange.results_inverse, 1, width)?;
        }
        let results = Tensor::from_buffer(&plan.device, results, [chunk.groups.total(), width])?;
        let mut grads = vec![cx.needs(0).then_some(results)];
        if self.chunk > 0 {
            grads.push(cx.needs(1).then_some(grad));
        }
        Ok(grads)
    }
}

/// Waits for the second exchange of all chunks.
#[derive(Debug)]
pub(super) struct Combine {
    pub plan: Rc<Plan>,
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
            (Ty::Shard(0), Ty::Shard(1)) if self.plan.types.get(axis) == Some(Ty::Shard(1)) => Ok(Ty::Shard(1)),
            (results, weights) if results == weights && !matches!(weights, Ty::Shard(1..)) => Ok(weights),
            (results, weights) => Err((
                format!("results are {results} and weights are {weights}: they are not of the same tokens"),
                "combine results with the weights of the choices that were dispatched".to_owned(),
            )),
        })
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (plan, [results, weights]) = (&*self.plan, [inputs[0], inputs[1]]);
        let ([samples, seq], places) = (plan.tokens, plan.places);
        let fits = results.shape().len() == 2 && results.shape()[0] == 0;
        cx.require(
            fits && weights.shape()[..] == [samples, seq, places],
            format_args!("results are on their way back, [0, features], and weights [{samples}, {seq}, {places}]"),
        )?;
        cx.save_input(1)?;
        let (permutation, width) = (plan.device.permutation()?, results.shape()[1]);
        let y = plan.join(width, |chunk| {
            let results = chunk.results.wait()?;
            let returned = chunk.order.count();
            cx.save(&Tensor::from_buffer(&plan.device, results.clone(), [returned, width])?)?;
            let weights = weights.buffer().slice(plan.elements(chunk, places))?;
            permutation.combine(&results, chunk.of_tokens(plan), Some(&weights), width)
        })?;
        Tensor::from_buffer(&plan.device, y, [samples, seq, width])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (plan, weights, width) = (&*self.plan, cx.saved(0)?, grad.shape()[2]);
        let permutation = plan.device.permutation()?;
        let mut saved = 0;
        let dweights = plan.join(plan.places, |chunk| {
            saved += 1;
            let results = cx.saved(saved)?;
            let (dresults, dweights) = permutation.combine_grad(
                &grad.buffer().slice(plan.elements(chunk, width))?,
                results.buffer(),
                chunk.of_tokens(plan),
                &chunk.order,
                &weights.buffer().slice(plan.elements(chunk, plan.places))?,
                width,
            )?;
            match &chunk.exchange {
                _ if !cx.needs(0) => {}
                None => chunk.results.land(dresults),
                Some(exchange) => plan.start(
                    &chunk.results,
                    dresults,
                    &back(&exchange.rows),
                    width,
                    (RowFlow::Backward, &chunk.named("results")),
                )?,
            }
            Ok(dweights)
        })?;
        let dweights = Tensor::from_buffer(&plan.device, dweights, weights.shape())?;
        let dresults = cx.needs(0).then(|| away(plan, grad.dtype(), width)).transpose()?;
        Ok(vec![dresults, cx.needs(1).then_some(dweights)])
    }
}

impl Plan {
    fn refuse(&self, op: &str, axis: Axis, problem: String, fix: &str) -> SpmdError {
        SpmdError { op: op.to_owned(), axis, problem, fix: fix.to_owned() }
    }
}
