//! Matrices made orthogonal, on any device.

use crate::device::Device;
use crate::error::Result;
use crate::kernel::{Gemm, Map};
use meshwork_core::{Buffer, DType};
use meshwork_optim::Transform;

/// The least norm that a matrix is divided by.
const LEAST: f64 = 1e-7;

/// Applies a transform to the matrix `[rows, columns]` in the f32 vector `x` from element `at` on. Takes memory for two
/// more matrices and three of their shorter sides.
///
/// # Errors
/// No memory; a device that cannot compute it.
pub fn transform(
    device: &dyn Device,
    transform: Transform,
    [rows, columns]: [usize; 2],
    x: &mut Buffer,
    at: usize,
) -> Result<()> {
    let Transform::Orthogonal { coefficients, iterations } = transform else { return Ok(()) };
    let count = rows * columns;
    let start = device.layout()?.narrow(x, 1, x.count(), 1, at..at + count)?;
    let orthogonal = orthogonal(device, coefficients, iterations, [rows, columns], start)?;
    device.layout()?.copy_into(&orthogonal, 0..count, x, at)
}

/// With the Gram matrix of the shorter side: X·Xᵀ from the left, or XᵀX from the right.
fn orthogonal(
    device: &dyn Device,
    [a, b, c]: [f64; 3],
    iterations: usize,
    [rows, columns]: [usize; 2],
    mut x: Buffer,
) -> Result<Buffer> {
    let (matmul, map) = (device.matmul()?, device.elementwise()?);
    let (side, tall) = (rows.min(columns), rows > columns);
    let gram_of = match tall {
        true => Gemm::linear_weight_grad(rows, columns, columns).exact(true),
        false => Gemm::linear(rows, rows, columns).exact(true),
    };
    let square = Gemm::linear_input_grad(side, side, side).exact(true);
    let apply = Gemm::linear_input_grad(rows, side, columns).accumulating(true).exact(true);
    let mut squares = device.zeros(DType::F64, 1)?;
    device.optim()?.sum_of_squares(std::slice::from_ref(&x), &mut squares, 0)?;
    device.optim()?.divide_by_root(&mut x, &squares, LEAST)?;
    for _ in 0..iterations {
        let mut gram = device.alloc(DType::F32, side * side)?;
        matmul.gemm(gram_of, &x, &x, &mut gram, 0)?; // A
        let mut polynomial = device.alloc(DType::F32, side * side)?;
        matmul.gemm(square, &gram, &gram, &mut polynomial, 0)?; // A²
        let mut polynomial = map.map(Map::Scale(c), &polynomial)?;
        device.pointwise()?.add_assign(&mut polynomial, 0, &map.map(Map::Scale(b), &gram)?)?; // b·A + c·A²
        let mut next = map.map(Map::Scale(a), &x)?;
        let [left, right] = if tall { [&x, &polynomial] } else { [&polynomial, &x] };
        matmul.gemm(apply, left, right, &mut next, 0)?;
        x = next;
    }
    Ok(x)
}
