//! The loss of pairs of a preferred and a rejected answer, against a reference: direct preference optimisation.

use super::prelude::*;
use super::whole::require_whole;
use crate::kernel::{Map, PairLosses, PairNumber, Preference};
use meshwork_core::DType;

#[derive(Debug)]
struct OfPairs {
    of: Preference,
    number: PairNumber,
}

impl Var {
    /// The loss of each sample's pairs, summed over them, `[samples]` in f64, of the losses of answers, `[samples,
    /// answers]` in f64: of each pair the chosen answer's, then the rejected one's, each summed over its tokens. A
    /// sample has the first of them, as many pairs as `pairs` says, `[samples]` in i32. `reference` `[samples,
    /// answers]` in f64 has the same of the model that the answers are compared with, and gets a gradient if it needs
    /// one.
    pub fn preference_loss(&self, reference: &Var, pairs: &Var, of: Preference) -> Result<Var> {
        self.of_pairs(reference, pairs, of, PairNumber::Loss)
    }

    /// Another number of each pair, summed over those of a sample, `[samples]` in f64. A metric: it has no gradient.
    pub fn preference(&self, reference: &Var, pairs: &Var, of: Preference, number: PairNumber) -> Result<Var> {
        self.detach().of_pairs(reference, pairs, of, number)
    }

    fn of_pairs(&self, reference: &Var, pairs: &Var, of: Preference, number: PairNumber) -> Result<Var> {
        require_whole("preference", &[self, reference])?;
        self.tape().apply(OfPairs { of, number }, &[self, reference, pairs])
    }
}

fn answers(of: [&Tensor; 3]) -> PairLosses<'_> {
    let [losses, reference, pairs] = of.map(Tensor::buffer);
    PairLosses { losses, reference, pairs }
}

impl Op for OfPairs {
    stated! { "preference": losses, reference, pairs }

    /// The samples are cut alike: no rank has half of a pair.
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
        let (losses, reference, pairs) = (inputs[0], inputs[1], inputs[2]);
        let samples = pairs.shape().first().copied().unwrap_or(0);
        let fits = losses.shape().len() == 2
            && losses.shape() == reference.shape()
            && losses.shape()[1] % 2 == 0
            && pairs.shape()[..] == losses.shape()[..1];
        let types = [losses, reference, pairs].map(Tensor::dtype) == [DType::F64, DType::F64, DType::I32];
        cx.require(
            fits && types,
            "losses and the reference are f64 of [samples, 2 pairs], and the numbers of pairs i32 of [samples]",
        )?;
        cx.save_input(0)?;
        cx.save_input(1)?;
        cx.save_input(2)?;
        let number = losses.device().loss()?.preference(self.of, self.number, answers([losses, reference, pairs]))?;
        Tensor::from_buffer(losses.device(), number, [samples])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (losses, reference, pairs, device) = (cx.saved(0)?, cx.saved(1)?, cx.saved(2)?, grad.device());
        let answers = answers([&losses, &reference, &pairs]);
        let dlosses = device.loss()?.preference_grad(self.of, answers, grad.buffer())?;
        // Rewards depend on the difference of the two.
        let dreference = cx.needs(1).then(|| device.elementwise()?.map(Map::Scale(-1.0), &dlosses)).transpose()?;
        let shaped = |of| Tensor::from_buffer(device, of, losses.shape());
        let dlosses = cx.needs(0).then(|| shaped(dlosses)).transpose()?;
        Ok(vec![dlosses, dreference.map(shaped).transpose()?, None])
    }
}
