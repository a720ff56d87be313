use super::prelude::*;
use meshwork_tensor::kernel::{Elementwise, Map, Zip};

const OP: &str = "map";

impl Elementwise for CudaDevice {
    fn map(&self, f: Map, x: &Buffer) -> Result<Buffer> {
        match (f, x.dtype()) {
            (Map::Scale(factor), DType::F64) => self.elements(OP, "scale_forward_f64", &[x], factor),
            (Map::Scale(factor), _) => self.elements(OP, "scale_forward", &[x], factor as f32),
            (Map::Exp, _) => self.elements(OP, "exp_forward", &[x], ()),
            (Map::Tanh, _) => self.elements(OP, "tanh_forward", &[x], ()),
            (Map::Sigmoid, _) => self.elements(OP, "sigmoid_forward", &[x], ()),
            (Map::Silu, _) => self.elements(OP, "silu_forward", &[x], ()),
            (Map::Gelu, _) => self.elements(OP, "exact_gelu_forward", &[x], ()),
            (Map::SoftCap(cap), _) => self.elements(OP, "soft_cap_forward", &[x], cap as f32),
            (Map::Log, _) => self.elements(OP, "log_forward", &[x], ()),
            (Map::Sqrt, _) => self.elements(OP, "sqrt_forward", &[x], ()),
        }
    }

    fn map_grad(&self, f: Map, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        match f {
            Map::Scale(_) => self.map(f, dy),
            Map::Exp => self.elements(OP, "exp_backward", &[dy, x], ()),
            Map::Tanh => self.elements(OP, "tanh_backward", &[dy, x], ()),
            Map::Sigmoid => self.elements(OP, "sigmoid_backward", &[dy, x], ()),
            Map::Silu => self.elements(OP, "silu_backward", &[dy, x], ()),
            Map::Gelu => self.elements(OP, "exact_gelu_backward", &[dy, x], ()),
            Map::SoftCap(cap) => self.elements(OP, "soft_cap_backward", &[dy, x], cap as f32),
            Map::Log => self.elements(OP, "log_backward", &[dy, x], ()),
            Map::Sqrt => self.elements(OP, "sqrt_backward", &[dy, x], ()),
        }
    }

    fn zip(&self, f: Zip, x: &Buffer, y: &Buffer, [_, extent, inner]: [usize; 3]) -> Result<Buffer> {
        let kernel = match f {
            Zip::Add => "zip_add",
            Zip::Sub => "zip_sub",
            Zip::Mul => "zip_mul",
            Zip::Div => "zip_div",
            Zip::Keep => "zip_keep",
            Zip::Drop => "zip_drop",
            Zip::Second => "zip_second",
            Zip::Greater => "zip_greater",
        };
        self.elements("zip", kernel, &[x, y], [extent, inner])
    }
}
