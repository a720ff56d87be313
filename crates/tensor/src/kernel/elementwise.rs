//! Functions of one and of two numbers, element by element.

use super::table::*;
use meshwork_core::Buffer;

/// A function of one number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Map {
    /// x times this factor.
    Scale(f64),
    /// `e^x`.
    Exp,
    /// `tanh(x)`.
    Tanh,
    /// `1/(1 + e^-x)`.
    Sigmoid,
    /// `x/(1 + e^-x)` (Elfwing et al., arXiv:1702.03118).
    Silu,
    /// `x Φ(x) = x/2 (1 + erf(x/√2))` (Hendrycks and Gimpel, arXiv:1606.08415).
    Gelu,
    /// `c tanh(x/c)` with this c: close to x near zero, bounded by ±c (Gemma 2, arXiv:2408.00118, section 2).
    SoftCap(f64),
    /// The natural logarithm: -∞ at 0, NaN below it.
    Log,
    /// The square root, correctly rounded: NaN below 0.
    Sqrt,
}

/// A function of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zip {
    /// x + y.
    Add,
    /// x - y.
    Sub,
    /// x · y.
    Mul,
    /// x / y.
    Div,
    /// x where y is not 0, else 0.
    Keep,
    /// x where y is 0, else 0.
    Drop,
    /// y, whatever x is.
    Second,
    /// 1 where x > y, else 0.
    Greater,
}

/// A function of the host, with one number from each of the given vectors.
pub type HostFn<'a> = dyn Fn(&[f64]) -> f64 + Sync + 'a;

kernels! {
    /// Functions of elements. Each element of a result is one fixed expression of the elements at its place.
    pub trait Elementwise at elementwise {
        /// f(x).
        fn map(&self, f: Map, x: &Buffer) -> Result<Buffer>
            | profile(Pointwise: x), halves(wide x -> x), meta(like x);
        /// dy · f'(x).
        fn map_grad(&self, f: Map, dy: &Buffer, x: &Buffer) -> Result<Buffer>
            | profile(Pointwise: dy, x), halves(wide dy, x -> x), meta(like dy);
        /// f(x, y), with y repeated over the middle dim of x: `[outer, extent, inner]` and `[outer, inner]`.
        fn zip(&self, f: Zip, x: &Buffer, y: &Buffer, shape: [usize; 3]) -> Result<Buffer>
            | profile(Pointwise: x, y), halves(wide x, y -> x), meta(like x);
        /// `f([a, b, ..])` of vectors of one type and length, computed in f64 and rounded. `None`: this device runs no
        /// functions of the host.
        fn host_map(&self, inputs: &[&Buffer], f: &HostFn<'_>) -> Result<Option<Buffer>>
            | profile(= Traffic::call(Class::Pointwise, "host_map", inputs)), halves({
                  let wide = inputs.iter().map(|x| self.wide(x)).collect::<Result<Vec<_>>>()?;
                  let y = self.inner.elementwise()?.host_map(&wide.iter().collect::<Vec<_>>(), f)?;
                  y.map(|y| self.rounded(y, inputs.first().map_or(F32, |x| x.dtype()))).transpose()
              }),
              meta(= inputs.first().map(|x| self.alloc(x.dtype(), x.count())).transpose()), proxy(default)
            | default {
                _ = (inputs, f);
                Ok(None)
            };
    }
}
