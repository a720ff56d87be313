//! The loss of pairs of a preferred and a rejected answer, against a reference: direct preference optimisation. Two
//! rows that follow each other are a pair.

use super::prelude::*;
use super::whole::require_whole;
use crate::kernel::{Map, PairNumber, Preference};
use meshwork_core::DType;

#[derive(Debug)]
struct OfPairs {
    of: Preference,
    number: PairNumber,
}

impl Var {
    /// The loss of each pair, `[pairs]` in f64, of the losses of answers, `[2 pairs]` in f64: of each pair the chosen
    /// answer's, then the rejected one's, each summed over its tokens. `reference` `[pairs, 2]` in f64 has the same of
    /// the model that the answers are compared with, and gets a gradient if it needs one.
    pub fn preference_loss(&self, reference: &Var, of: Preference) -> Result<Var> {
        self.of_pairs(reference, of, PairNumber::Loss)
    }

    /// Another number of each pair, `[pairs]` in f64. A metric: it has no gradient.
    pub fn preference(&self, reference: &Var, of: Preference, number: PairNumber) -> Result<Var> {
        self.detach().of_pairs(reference, of, number)
    }

    fn of_pairs(&self, reference: &Var, of: Preference, number: PairNumber) -> Result<Var> {
        require_whole("preference", &[self, reference])?;
        self.tape().apply(OfPairs { of, number }, &[self, reference])
    }
}

impl Op for OfPairs {
    stated! { "preference": losses, reference }

    /// The samples of both are cut alike: no rank has half of a pair.
    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::elementwise(
            self.name(),
            &operands.iter().map(|&operand| Operand { ndim: 1, ..operand }).collect::<Vec<_>>(),
        )
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        vec![("beta", self.of.beta), ("label_smoothing", self.of.label_smoothing)]
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (losses, reference) = (inputs[0], inputs[1]);
        let pairs = reference.shape().first().copied().unwrap_or(0);
        let fits = reference.shape()[..] == [pairs, 2] && losses.shape()[..] == [2 * pairs];
        let doubles = [losses, reference].iter().all(|x| x.dtype() == DType::F64);
        cx.require(
            fits && doubles,
            || "losses are f64 of [2 pairs], and the reference of [pairs, 2]".to_owned(),
            inputs,
        )?;
        cx.save_input(0)?;
        cx.save_input(1)?;
        let number = losses.device().loss()?.preference(losses.buffer(), reference.buffer(), self.of, self.number)?;
        Tensor::from_buffer(losses.device(), number, [pairs])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (losses, reference, device) = (cx.saved(0)?, cx.saved(1)?, grad.device());
        let dlosses = device.loss()?.preference_grad(losses.buffer(), reference.buffer(), grad.buffer(), self.of)?;
        // Rewards depend on the difference of the two.
        let dreference = cx.needs(1).then(|| device.elementwise()?.map(Map::Scale(-1.0), &dlosses)).transpose()?;
        let of_reference = |of| Tensor::from_buffer(device, of, reference.shape());
        let dlosses = cx.needs(0).then(|| Tensor::from_buffer(device, dlosses, losses.shape())).transpose()?;
        Ok(vec![dlosses, dreference.map(of_reference).transpose()?])
    }
}
