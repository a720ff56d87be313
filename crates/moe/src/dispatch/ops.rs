//! The operations of a dispatch on the tape: both exchanges, and the weighted sum.

use super::{Plan, back, swap};
use meshwork_core::rules::{Operand, per_axis};
use meshwork_core::{Buffer, SpmdError, Ty, Types};
use meshwork_tensor::tape::{Backward, Forward, Op};
use meshwork_tensor::{Result, Shape, Tensor};
use std::rc::Rc;

/// The first exchange.
#[derive(Debug)]
pub(super) struct Send {
    pub plan: Rc<Plan>,
    pub rows: usize,
    pub width: usize,
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
pub(super) struct Return {
    pub plan: Rc<Plan>,
    pub rows: usize,
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
