//! Where a backward pass starts: the gradient of its outputs, with its types, and what a loss is divided by.

use super::prelude::*;
use meshwork_core::ReduceOp;

/// The gradient of an output. Its types are the duals of the output's: of a `Replicate` output it is `Partial`, each
/// rank's own part of a sum, and its types must say so.
#[derive(Clone, Debug)]
pub struct Seed {
    pub(super) tensor: Tensor,
    /// `None`: the value has the types of its gradient.
    types: Option<Types>,
}

impl Seed {
    /// A gradient of these types, as another stage sent it.
    pub fn typed(tensor: Tensor, types: Types) -> Self {
        Self { tensor, types: Some(types) }
    }

    /// Refuses a seed that is not the gradient of `output`.
    pub(super) fn require_gradient_of(&self, output: &Var) -> Result<()> {
        if self.tensor.shape() != output.shape() {
            return Err(Error::Shape {
                op: "backward",
                problem: "the seed is the gradient of the output and has its shape".to_owned(),
                shapes: vec![self.tensor.shape().to_vec(), output.shape().to_vec()],
            });
        }
        let refuse = |axis, problem, fix| Err(SpmdError { op: "backward".to_owned(), axis, problem, fix }.into());
        for (axis, ty) in output.types().iter() {
            let wanted = ty.dual();
            match self.types.map(|types| types.get(axis)) {
                None if ty == Ty::Replicate => {
                    return refuse(
                        axis,
                        "the output is Replicate: its gradient is the sum of one part of each rank, and the seed does not say which \
                         part it is"
                            .to_owned(),
                        "give each rank its part as Seed::typed(part, types) with Partial, or end in an Invariant value \
                         (all_reduce, all_gather_invariant)"
                            .to_owned(),
                    );
                }
                Some(given) if given != Some(wanted) => {
                    let given = given.map_or("not on it".to_owned(), |given| given.to_string());
                    let problem = format!("the output is {ty}, so its gradient is {wanted}, and the seed is {given}");
                    return refuse(axis, problem, format!("bring the seed to {wanted} first"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl From<Tensor> for Seed {
    fn from(tensor: Tensor) -> Self {
        Self { tensor, types: None }
    }
}

/// The divisor or factor of the sum of all losses, before its gradient is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Normaliser {
    /// The mean over the terms of the loss (tokens, samples), given the number of terms of *this rank's samples*, over
    /// all micro-batches that add up to one update. The numbers are summed over the axes that cut the samples, so that
    /// a rank whose samples have fewer terms does not count them more. Collective over these axes.
    LocalTerms(u64),
    /// A plain factor of the gradient, the same on every rank. Nothing is counted and nothing divided.
    Scale(f64),
}

impl Normaliser {
    /// The factor of the gradient of every loss on `loss`.
    fn scale(self, loss: &Var) -> Result<f64> {
        let terms = match self {
            Self::Scale(scale) => return Ok(scale),
            Self::LocalTerms(terms) => {
                let mut count = [i64::try_from(terms).unwrap_or(i64::MAX)];
                for (axis, _) in loss.types().iter().filter(|(_, ty)| ty.dim().is_some()) {
                    loss.tape().rank().group(axis).all_reduce_slice(&mut count, ReduceOp::Sum)?;
                }
                count[0] as u64
            }
        };
        match terms {
            0 => Err(Error::Backward("the loss has no terms to take a mean over: every target is masked".to_owned())),
            terms => Ok(1.0 / terms as f64),
        }
    }
}

impl Tape {
    /// The gradient from which [`backward_from_loss`](Self::backward_from_loss) starts, refused for the same types.
    ///
    /// # Errors
    /// A `Replicate` or `Varying` loss; no terms.
    pub fn loss_seed(&self, loss: &Var, normaliser: Normaliser) -> Result<Seed> {
        self.require_own("backward_from_loss", "loss", loss)?;
        if let Some((axis, ty)) = loss.types().iter().find(|(_, ty)| matches!(ty, Ty::Replicate | Ty::Varying)) {
            return Err(SpmdError {
                op: "backward_from_loss".to_owned(),
                axis,
                problem: format!("the loss is {ty}: each rank would add a gradient of its own"),
                fix:
                    "end in a loss that is Invariant or Partial: gather with all_gather_invariant, sum with all_reduce"
                        .to_owned(),
            }
            .into());
        }
        let scale = normaliser.scale(loss)?;
        if self.is_observed() {
            // Ranks weigh their losses against each other by this number.
            let types = Types::all(self.rank().mesh(), Ty::Invariant);
            self.show_source("the factor of a loss", types, &Tensor::from_slice(self.device(), &[scale], [1])?);
        }
        Ok(Tensor::from_slice(self.device(), &vec![scale; loss.shape().count()], loss.shape())?.into())
    }
}
