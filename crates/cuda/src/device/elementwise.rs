use super::CudaDevice;
use meshwork_core::{Buffer, DType};

use meshwork_tensor::kernel::{Elementwise, Map, Zip};
use meshwork_tensor::{Device, Result};

const OP: &str = "map";

impl Elementwise for CudaDevice {
    fn map(&self, f: Map, x: &Buffer) -> Result<Buffer> {
        if let (Map::Scale(factor), DType::F64) = (f, x.dtype()) {
            let out = self.alloc(DType::F64, x.count())?;
            self.write_elements(OP, "scale_forward_f64", x.count(), &[x], &out, &[factor.into()])?;
            return Ok(out);
        }
        let (kernel, number) = match f {
            Map::Scale(factor) => ("scale_forward", Some((factor as f32).into())),
            Map::Exp => ("exp_forward", None),
            Map::Tanh => ("tanh_forward", None),
            Map::Sigmoid => ("sigmoid_forward", None),
            Map::Silu => ("silu_forward", None),
            Map::SoftCap(cap) => ("soft_cap_forward", Some((cap as f32).into())),
        };
        self.elements(OP, kernel, x.count(), &[x], number.as_slice())
    }

    fn map_grad(&self, f: Map, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        let (kernel, number) = match f {
            Map::Scale(_) => return self.map(f, dy),
            Map::Exp => ("exp_backward", None),
            Map::Tanh => ("tanh_backward", None),
            Map::Sigmoid => ("sigmoid_backward", None),
            Map::Silu => ("silu_backward", None),
            Map::SoftCap(cap) => ("soft_cap_backward", Some((cap as f32).into())),
        };
        self.elements(OP, kernel, x.count(), &[dy, x], number.as_slice())
    }

    fn zip(&self, f: Zip, x: &Buffer, y: &Buffer) -> Result<Buffer> {
        let kernel = match f {
            Zip::Sub => "zip_sub",
            Zip::Mul => "zip_mul",
            Zip::Div => "zip_div",
        };
        self.elements("zip", kernel, x.count(), &[x, y], &[y.count().into()])
    }
}
