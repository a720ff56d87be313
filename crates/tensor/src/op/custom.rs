//! Your own operations in one call: a function of one number with its derivative, or a whole operation with its
//! gradient. An operation that needs more, such as a gradient that skips inputs or saves other values, implements
//! [`Op`].

use super::prelude::*;
use super::whole::require_whole;
use crate::kernel::HostFn;
use crate::tape::Tape;
use std::fmt;

struct HostMap<F, D> {
    name: &'static str,
    f: F,
    derivative: D,
}

impl Var {
    /// `f(x)` element by element, by a function of the host. `derivative` is given x and f(x). Not linear: refuses
    /// `Partial`.
    ///
    /// Both functions are computed in f64, and recomputed in backward, for which only x is kept; they must depend only
    /// on their arguments. It is an error on devices that cannot run functions of the host.
    ///
    /// ```
    /// # use meshwork_core::{Rank, Types};
    /// # use meshwork_cpu::Cpu;
    /// # use meshwork_tensor::{Error, Params, Tape, Tensor, Var, tape::{Mode, Position}};
    /// # use std::sync::Arc;
    /// # let (rank, device) = (Arc::new(Rank::alone()?), Cpu::device());
    /// # let params = Params::new(Arc::default(), rank.mesh(), rank.coords(), &device, &[], 0)?;
    /// # let tape = Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default());
    /// let x = tape.input(Tensor::from_slice(tape.device(), &[0.0f32, 1.0, -2.0], [3])?, Types::NONE);
    /// let softsign = |x: &Var| x.map("softsign", |x| x / (1.0 + x.abs()), |x, _| (1.0 + x.abs()).powi(-2));
    /// assert_eq!(softsign(&x)?.tensor().to_vec::<f32>()?, [0.0, 0.5, -2.0 / 3.0]);
    ///
    /// // A test of its derivative.
    /// use meshwork_testkit::check::{OpInput, check_op};
    /// check_op("softsign", &[OpInput::value("x", &[3])], |v| softsign(&v[0]))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn map(
        &self,
        name: &'static str,
        f: impl Fn(f64) -> f64 + Sync + 'static,
        derivative: impl Fn(f64, f64) -> f64 + Sync + 'static,
    ) -> Result<Var> {
        require_whole(name, &[self])?;
        self.tape().apply(HostMap { name, f, derivative }, &[self])
    }
}

impl<F, D> HostMap<F, D> {
    fn run(&self, inputs: &[&Tensor], f: &HostFn<'_>) -> Result<Tensor> {
        let device = inputs[0].device();
        let buffers: Vec<_> = inputs.iter().map(|input| input.buffer()).collect();
        let refused = || Error::HostFunction { op: self.name, device: device.name().to_owned() };
        let out = device.elementwise()?.host_map(&buffers, f)?.ok_or_else(refused)?;
        Tensor::from_buffer(device, out, inputs[0].shape())
    }
}

impl<F, D> fmt::Debug for HostMap<F, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMap").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<F: Fn(f64) -> f64 + Sync, D: Fn(f64, f64) -> f64 + Sync> Op for HostMap<F, D> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::pointwise(self.name, operands[0])
    }

    fn padded(&self) -> Padded {
        let at_zero = (self.f)(0.0);
        if at_zero == 0.0 && (self.derivative)(0.0, at_zero).is_finite() { Padded::Zeros } else { Padded::Refused }
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        vec![("f(1)", (self.f)(1.0)), ("f(-2)", (self.f)(-2.0))]
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        cx.save_input(0)?;
        self.run(inputs, &|x| (self.f)(x[0]))
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let slope = |x: f64| (self.derivative)(x, (self.f)(x));
        Ok(vec![Some(self.run(&[&grad, &cx.saved(0)?], &|at| at[0] * slope(at[1]))?)])
    }
}

struct Custom<R, F, B> {
    name: &'static str,
    operands: &'static [&'static str],
    types: R,
    forward: F,
    backward: B,
}

impl Tape {
    /// An operation in one call: the names of its operands for errors, the rule of its SPMD types (see
    /// [`meshwork_core::rules`]), a function from the inputs to the result, and a function from the inputs, the result
    /// and its gradient to the gradients of all inputs.
    ///
    /// Inputs and result are kept for backward. Canonical numerics refuse parameters among the inputs: the sum of their
    /// gradient over samples needs an order, see [`Backward::write_grad`].
    ///
    /// ```
    /// # use meshwork_core::{Rank, Types, rules};
    /// # use meshwork_cpu::Cpu;
    /// # use meshwork_tensor::{Error, Params, Tape, Tensor, Var, tape::{Mode, Position}};
    /// # use std::sync::Arc;
    /// use meshwork_testkit::check::{OpInput, check_op};
    ///
    /// /// √(x² + y²), element by element.
    /// fn length(x: &Var, y: &Var) -> Result<Var, Error> {
    ///     let each = |x: &Tensor, y: &Tensor, f: fn(f32, f32) -> f32| {
    ///         let values: Vec<f32> = x.to_vec()?.into_iter().zip(y.to_vec()?).map(|(x, y)| f(x, y)).collect();
    ///         Tensor::from_slice(x.device(), &values, x.shape())
    ///     };
    ///     x.tape().custom(
    ///         "length",
    ///         &["x", "y"],
    ///         &[x, y],
    ///         rules::elementwise,
    ///         move |inputs| each(inputs[0], inputs[1], f32::hypot),
    ///         move |inputs, length, grad| {
    ///             let slope = |x: &Tensor| each(grad, &each(x, length, |x, length| x / length)?, |grad, slope| grad * slope);
    ///             Ok(vec![slope(&inputs[0])?, slope(&inputs[1])?])
    ///         },
    ///     )
    /// }
    /// # let (rank, device) = (Arc::new(Rank::alone()?), Cpu::device());
    /// # let params = Params::new(Arc::default(), rank.mesh(), rank.coords(), &device, &[], 0)?;
    /// # let tape = Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default());
    /// # let float = |values: &[f32]| tape.input(Tensor::from_slice(tape.device(), values, [2]).unwrap(), Types::NONE);
    /// let (x, y) = (float(&[3.0, 5.0]), float(&[4.0, 12.0]));
    /// assert_eq!(length(&x, &y)?.tensor().to_vec::<f32>()?, [5.0, 13.0]);
    ///
    /// // A test of it: its rule and its gradient, with every combination of types on 1 to 4 ranks.
    /// check_op("length", &[OpInput::value("x", &[3]), OpInput::value("y", &[3])], |v| length(&v[0], &v[1]))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn custom(
        &self,
        name: &'static str,
        operands: &'static [&'static str],
        inputs: &[&Var],
        types: impl Fn(&str, &[Operand<'_>]) -> std::result::Result<Types, SpmdError> + 'static,
        forward: impl Fn(&[&Tensor]) -> Result<Tensor> + 'static,
        backward: impl Fn(&[Tensor], &Tensor, &Tensor) -> Result<Vec<Tensor>> + 'static,
    ) -> Result<Var> {
        if operands.len() != inputs.len() || inputs.is_empty() {
            return Err(Error::Shape {
                op: name,
                problem: format!(
                    "{} names of operands for {} inputs: one each, at least one",
                    operands.len(),
                    inputs.len()
                ),
                shapes: inputs.iter().map(|input| input.shape().to_vec()).collect(),
            });
        }
        require_whole(name, inputs)?;
        self.apply(Custom { name, operands, types, forward, backward }, inputs)
    }
}

impl<R, F, B> fmt::Debug for Custom<R, F, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Custom").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<R, F, B> Op for Custom<R, F, B>
where
    R: Fn(&str, &[Operand<'_>]) -> std::result::Result<Types, SpmdError>,
    F: Fn(&[&Tensor]) -> Result<Tensor>,
    B: Fn(&[Tensor], &Tensor, &Tensor) -> Result<Vec<Tensor>>,
{
    fn name(&self) -> &'static str {
        self.name
    }

    fn operands(&self) -> &'static [&'static str] {
        self.operands
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        (self.types)(self.name, operands)
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let output = (self.forward)(inputs)?;
        (0..inputs.len()).try_for_each(|i| cx.save_input(i))?;
        cx.save(&output)?;
        Ok(output)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let count = self.operands.len();
        let inputs = (0..count).map(|i| cx.saved(i)).collect::<Result<Vec<_>>>()?;
        let gradients = (self.backward)(&inputs, &cx.saved(count)?, &grad)?;
        let shapes = |tensors: &[Tensor]| tensors.iter().map(|tensor| tensor.shape().to_vec()).collect::<Vec<_>>();
        if shapes(&gradients) != shapes(&inputs) {
            return Err(Error::Shape {
                op: self.name,
                problem: format!(
                    "its gradient must give {count} tensors with the shapes of its inputs, {:?}",
                    shapes(&inputs)
                ),
                shapes: shapes(&gradients),
            });
        }
        Ok(gradients.into_iter().enumerate().map(|(i, gradient)| cx.needs(i).then_some(gradient)).collect())
    }
}
