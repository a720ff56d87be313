//! Several activations that are sent over one cut: as one, `[samples, elements]`, one after the other.

use crate::Activation;
use meshwork_tensor::{Error, Result, Shape, Var};

/// Activations that cross a cut together, such as the states of an encoder and of a decoder: a stage joins them, and
/// the next one takes them apart. Their gradients come back in the same way.
///
/// ```
/// use meshwork_core::{DType, Types};
/// use meshwork_nn::{Activation, Joined};
/// use meshwork_tensor::Shape;
///
/// let of = |shape: &[usize]| Activation { dtype: DType::F32, shape: Shape::new(shape), types: Types::NONE };
/// // Two samples: four tokens of an encoder, three of a decoder.
/// let both = Joined::new(vec![of(&[2, 4, 8]), of(&[2, 3, 8])])?;
/// assert_eq!(both.activation(), of(&[2, 56]));
/// # Ok::<(), meshwork_tensor::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined(Vec<Activation>);

impl Joined {
    /// Of these parts, each `[samples, ..]`.
    ///
    /// # Errors
    /// No parts; parts of other samples, element types or SPMD types than the first, or whose dims other than the
    /// samples are cut: their elements would lie scattered.
    pub fn new(parts: Vec<Activation>) -> Result<Self> {
        let refuse = |problem: String| {
            let shapes = parts.iter().map(|part| part.shape.to_vec()).collect();
            Err(Error::Shape { op: "joined activations", problem, shapes })
        };
        let Some(first) = parts.first() else { return refuse("there are none".to_owned()) };
        let of = |part: &Activation| (part.dtype, part.types, part.shape.first().copied());
        if first.shape.len() < 2 || parts.iter().any(|part| of(part) != of(first) || part.shape.len() < 2) {
            return refuse(
                "all have the same samples, element type and SPMD types, and elements of each sample".to_owned(),
            );
        }
        let cut = first.types.iter().find(|(_, ty)| ty.dim().is_some_and(|dim| dim > 0));
        match cut {
            Some((axis, ty)) => {
                refuse(format!("they are {ty} on {axis}: all_gather what is cut but the samples first"))
            }
            None => Ok(Self(parts)),
        }
    }

    /// What is sent.
    pub fn activation(&self) -> Activation {
        let (samples, each) = (self.0[0].shape[0], self.0.iter().map(elements).sum());
        Activation { shape: Shape::new(&[samples, each]), ..self.0[0] }
    }

    /// The parts as one value.
    ///
    /// # Errors
    /// Another number of values than parts, or other shapes.
    pub fn join(&self, values: &[&Var]) -> Result<Var> {
        let wanted: Vec<Shape> = self.0.iter().map(|part| part.shape).collect();
        let given: Vec<Shape> = values.iter().map(|value| value.shape()).collect();
        if given != wanted {
            let problem = format!("they are {wanted:?}");
            let shapes = given.iter().map(|shape| shape.to_vec()).collect();
            return Err(Error::Shape { op: "joined activations", problem, shapes });
        }
        let flat = |value: &Var| value.flatten(1..value.shape().len());
        values[1..].iter().try_fold(flat(values[0])?, |all, value| all.concat(&flat(value)?, 1))
    }

    /// The parts of a joined value, in order.
    ///
    /// # Errors
    /// A value of another shape.
    pub fn split(&self, joined: &Var) -> Result<Vec<Var>> {
        let mut at = 0;
        let part = |part: &Activation| {
            let end = at + elements(part);
            let begin = std::mem::replace(&mut at, end);
            joined.narrow(1, begin..end)?.unflatten(1, &part.shape[1..])
        };
        self.0.iter().map(part).collect()
    }
}

/// Elements of a sample.
fn elements(part: &Activation) -> usize {
    part.shape[1..].iter().product()
}
