//! A value in another type of floats.

use super::prelude::*;
use super::whole::require_whole;
use meshwork_core::DType;

#[derive(Debug)]
struct Cast {
    from: DType,
    to: DType,
}

impl Var {
    /// The value in `dtype`, each element rounded to the nearest: for what must be computed in f32 within a model of 16
    /// bits. Its gradient is in the type of the value. Not linear: refuses `Partial`.
    pub fn cast(&self, dtype: DType) -> Result<Var> {
        if self.tensor().dtype() == dtype {
            return Ok(self.clone());
        }
        let op = Cast { from: self.tensor().dtype(), to: dtype };
        require_whole(op.name(), &[self])?;
        self.tape().apply(op, &[self])
    }
}

impl Var {
    /// The value in the type in which the tape's model stores values: after a sum over ranks, whose shares may have
    /// f32. Its gradient is in the type of the value.
    pub fn stored(&self) -> Result<Var> {
        match self.tensor().dtype() {
            DType::F32 => self.cast(self.tape().params().declarations().dtype()),
            _ => Ok(self.clone()),
        }
    }
}

impl Op for Cast {
    stated! { "cast": x; padded Zeros }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::pointwise(self.name(), operands[0])
    }

    fn forward(&self, _cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        inputs[0].clone().cast(self.to)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        // The gradient of an operand that was rounded for a product in a model of f32 is in f32.
        let is_operand = self.from.is_half() && !cx.tape().params().declarations().dtype().is_half();
        let dtype = if is_operand { self.to } else { self.from };
        Ok(vec![cx.needs(0).then(|| grad.cast(dtype)).transpose()?])
    }
}
