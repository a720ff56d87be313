//! Functions of one number: `y = c x`, `e^x`, `tanh x`, `σ(x)`, `x σ(x)`, `x Φ(x)`, `c tanh(x/c)`, `ln x`, `√x`.

use super::prelude::*;
use super::whole::require_whole;
use crate::kernel::Map;

#[derive(Debug)]
struct Mapped(Map);

impl Var {
    /// `factor · x`. Linear: keeps every type, `Partial` included.
    pub fn scale(&self, factor: f64) -> Result<Var> {
        self.mapped(Map::Scale(factor))
    }

    /// `e^x`. Not linear: refuses `Partial`.
    pub fn exp(&self) -> Result<Var> {
        self.mapped(Map::Exp)
    }

    /// The hyperbolic tangent. Not linear: refuses `Partial`.
    pub fn tanh(&self) -> Result<Var> {
        self.mapped(Map::Tanh)
    }

    /// `1/(1 + e^-x)`. Not linear: refuses `Partial`.
    pub fn sigmoid(&self) -> Result<Var> {
        self.mapped(Map::Sigmoid)
    }

    /// `x/(1 + e^-x)`, also called swish (Elfwing et al., arXiv:1702.03118). Not linear: refuses `Partial`.
    pub fn silu(&self) -> Result<Var> {
        self.mapped(Map::Silu)
    }

    /// GELU as defined, `x Φ(x) = x/2 (1 + erf(x/√2))` (Hendrycks and Gimpel, arXiv:1606.08415), of which
    /// [`gelu`](Var::gelu) is an approximation. Not linear: refuses `Partial`.
    pub fn exact_gelu(&self) -> Result<Var> {
        self.mapped(Map::Gelu)
    }

    /// `cap · tanh(x/cap)`: logits or scores that stay within ±`cap` (Gemma 2, arXiv:2408.00118, section 2). Not
    /// linear: refuses `Partial`. Errors: a cap that is not a finite number above zero.
    ///
    /// ```
    /// # use meshwork_core::{Mesh, Rank, Ty, Types};
    /// # use meshwork_cpu::Cpu;
    /// # use meshwork_tensor::{Declarations, Error, Params, Tape, Tensor, tape::{Mode, Position}};
    /// # let rank = std::sync::Arc::new(Rank::recording(&"dp=1".parse::<Mesh>().unwrap(), 0).unwrap());
    /// # let device = Cpu::device();
    /// # let (all, mesh) = (std::sync::Arc::new(Declarations::new()), rank.mesh().clone());
    /// # let params = std::sync::Arc::new(Params::new(all, &mesh, rank.coords(), &device, &[], 7)?);
    /// # let tape = Tape::new(rank, params, device.clone(), Mode::Evaluate, Position::default());
    /// let x = Tensor::from_slice(&device, &[0.5_f32, 100.0, -1e9], [3])?;
    /// let capped = tape.constant(x, Types::all(&mesh, Ty::Invariant)).soft_cap(30.0)?;
    /// assert_eq!(capped.tensor().to_vec::<f32>()?, [0.49995375, 29.923738, -30.0]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn soft_cap(&self, cap: f64) -> Result<Var> {
        if !(cap.is_finite() && cap > 0.0) {
            let problem = format!("a cap of {cap} is none: use a finite number above zero");
            return Err(Error::Shape { op: "soft_cap", problem, shapes: vec![self.shape().to_vec()] });
        }
        self.mapped(Map::SoftCap(cap))
    }

    /// The natural logarithm: -∞ at 0, NaN below it. Not linear: refuses `Partial`.
    pub fn log(&self) -> Result<Var> {
        self.mapped(Map::Log)
    }

    /// The square root: NaN below 0. Its derivative at 0 is infinite: add an epsilon first. Not linear: refuses
    /// `Partial`.
    pub fn sqrt(&self) -> Result<Var> {
        self.mapped(Map::Sqrt)
    }

    fn mapped(&self, f: Map) -> Result<Var> {
        let op = Mapped(f);
        if !op.is_exact() {
            require_whole(op.name(), &[self])?;
        }
        self.tape().apply(op, &[self])
    }
}

impl Mapped {
    /// Whether the result is exact: a change of sign or a scale by a power of two.
    fn is_exact(&self) -> bool {
        matches!(self.0, Map::Scale(factor) if factor.is_normal() && factor.to_bits() << 12 == 0)
    }
}

fn map(f: Map, x: &Tensor) -> Result<Tensor> {
    Tensor::from_buffer(x.device(), x.device().elementwise()?.map(f, x.buffer())?, x.shape())
}

impl Op for Mapped {
    fn name(&self) -> &'static str {
        match self.0 {
            Map::Scale(_) => "scale",
            Map::Exp => "exp",
            Map::Tanh => "tanh",
            Map::Sigmoid => "sigmoid",
            Map::Silu => "silu",
            Map::Gelu => "exact_gelu",
            Map::SoftCap(_) => "soft_cap",
            Map::Log => "log",
            Map::Sqrt => "sqrt",
        }
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        match self.0 {
            Map::Scale(_) => rules::linear_map(self.name(), operands[0]),
            _ => rules::pointwise(self.name(), operands[0]),
        }
    }

    fn padded(&self) -> Padded {
        match self.0 {
            Map::Scale(_) | Map::Tanh | Map::Silu | Map::Gelu | Map::SoftCap(_) => Padded::Zeros,
            // e^0 is not 0, nor is ln 0; the derivative of √0 is infinite.
            Map::Exp | Map::Sigmoid | Map::Log | Map::Sqrt => Padded::Refused,
        }
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        match self.0 {
            Map::Scale(factor) => vec![("factor", factor)],
            Map::SoftCap(cap) => vec![("cap", cap)],
            _ => Vec::new(),
        }
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let f = self.0;
        if !matches!(f, Map::Scale(_)) {
            cx.save_input(0)?;
            cx.recipe(move |saved| map(f, &saved[0].restore()?));
        }
        map(f, inputs[0])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if let Map::Scale(_) = self.0 {
            return Ok(vec![Some(map(self.0, &grad)?)]);
        }
        let dx = grad.device().elementwise()?.map_grad(self.0, grad.buffer(), cx.saved(0)?.buffer())?;
        Ok(vec![Some(Tensor::from_buffer(grad.device(), dx, grad.shape())?)])
    }
}
