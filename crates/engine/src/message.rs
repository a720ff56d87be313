//! Values between two stages, as a rank sends them, and where in a step they cross a cut.

use crate::prelude::*;
use meshwork_core::SpmdError;
use meshwork_nn::Activation;

/// An activation, or its gradient, between two stages.
#[derive(Clone, Debug)]
pub struct Message {
    pub tensor: Tensor,
    pub types: Types,
}

/// A value that crosses a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site {
    /// The number of the cut among all [boundaries](crate::ModelPlan::boundaries).
    pub cut: usize,
    /// Whether it is an activation or its gradient.
    pub direction: Direction,
    pub micro: usize,
}

/// A stage's output as a message, refused if the next stage expects another one.
pub fn outgoing(stage: usize, output: &Var, expected: &Activation) -> Result<Message> {
    let op = || format!("send from stage {stage} to {}", stage + 1);
    for (axis, ty) in output.types().iter() {
        let wanted = expected.types.get(axis);
        if wanted != Some(ty) {
            return Err(SpmdError {
                op: op(),
                axis,
                problem: format!(
                    "the activation is {ty} and the next stage expects {}",
                    wanted.map_or("nothing there".to_owned(), |ty| ty.to_string())
                ),
                fix: match ty {
                    Ty::Partial => format!("all_reduce it over {axis} first"),
                    _ => "bring it to the type of the activation first".to_owned(),
                },
            }
            .into());
        }
    }
    output.require_unpadded("a cut between stages", "the activation")?;
    let tensor = output.tensor().clone();
    if (tensor.shape(), tensor.dtype()) != (expected.shape, expected.dtype) {
        return Err(TrainError::Activation {
            op: op(),
            given: format!("{} {:?}", tensor.dtype(), tensor.shape()),
            expected: format!("{} {:?}", expected.dtype, expected.shape),
        });
    }
    Ok(Message { tensor, types: output.types() })
}
