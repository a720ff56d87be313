//! The angles by which queries and keys are rotated.

use super::{CudaDevice, launch::launch};
use crate::driver::Address;
use meshwork_core::{Buffer, DType};
use meshwork_tensor::Result;
use meshwork_tensor::kernel::{GroupedShape, Layout, Rotary};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The angles that were last used, `[positions, 2, head_dim / 2]`: all layers of a model share them.
#[derive(Debug, Default)]
pub(super) struct LastAngles(Mutex<Option<(Rotary, usize, Buffer)>>);

/// Rows of heads that are rotated: `row` elements from one to the next, of which the first `heads` heads turn by
/// `positions`, or by the tokens that the rows of a sequence are.
pub(super) struct TurnedRows<'a> {
    pub(super) row: usize,
    pub(super) heads: usize,
    pub(super) tokens: Range<usize>,
    pub(super) positions: Option<&'a Buffer>,
}

impl CudaDevice {
    /// The angles for at least `seq` positions, computed in f64 and rounded once, as on the CPU.
    pub(super) fn angles(&self, rotary: Rotary, seq: usize, head_dim: usize) -> Result<Buffer> {
        let mut last = self.angles.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |of: &(Rotary, usize, Buffer)| (of.0, of.1) == (rotary, head_dim) && of.2.count() >= seq * head_dim;
        if let Some((.., angles)) = last.as_ref().filter(|last| fits(last)) {
            return Ok(angles.clone());
        }
        let frequencies: Vec<f64> = (0..head_dim / 2).map(|pair| rotary.frequency(pair, head_dim)).collect();
        let row = |position: usize| {
            let angles = frequencies.iter().map(move |frequency| position as f64 * frequency);
            angles.clone().map(f64::cos).chain(angles.map(f64::sin))
        };
        let angles: Vec<f32> = (0..seq).flat_map(row).map(|angle| angle as f32).collect();
        let angles = self.uploaded(&Buffer::from_vec(angles), false)?;
        *last = Some((rotary, head_dim, angles.clone()));
        Ok(angles)
    }

    /// The angles of all tokens that an attention knows, from those of the first of `rows` on where there are no
    /// positions.
    fn place_angles(&self, rotary: Rotary, shape: &GroupedShape, rows: &TurnedRows<'_>) -> Result<(Buffer, Address)> {
        let head_dim = shape.queries.head_dim;
        let angles = self.angles(rotary, shape.sequence.max(shape.tokens().end), head_dim)?;
        let first = if rows.positions.is_some() { 0 } else { rows.tokens.start };
        let at = self.place("rotary", &angles)?.offset(angles.dtype().size() * first * head_dim);
        Ok((angles, at))
    }

    /// A copy of `x` with the first heads of each row rotated.
    pub(super) fn rotated(
        &self,
        rotary: Rotary,
        shape: &GroupedShape,
        x: &Buffer,
        of: &TurnedRows<'_>,
    ) -> Result<Buffer> {
        let op = "rotary";
        let (_angles, angles) = self.place_angles(rotary, shape, of)?;
        let mut to = self.scratch(x.dtype(), x.count())?;
        self.copy_into(x, 0..x.count(), &mut to, 0)?;
        let (rows, head_dim) = (x.count() / of.row.max(1), shape.queries.head_dim);
        launch!(self, op, "rotary_forward", [rows * of.heads, head_dim / 2];
            x, of.row, angles, of.positions, &mut to, of.row, rows, of.tokens.len(), of.heads, head_dim
        )?;
        Ok(to)
    }

    /// Turns gradients of rotated heads back, in place, of f32 or of bf16.
    pub(super) fn turned_back(
        &self,
        rotary: Rotary,
        shape: &GroupedShape,
        (x, dtype): (Address, DType),
        of: &TurnedRows<'_>,
    ) -> Result<()> {
        let op = "rotary";
        let (_angles, angles) = self.place_angles(rotary, shape, of)?;
        let kernel = if dtype == DType::Bf16 { "rotary_backward_16" } else { "rotary_backward" };
        let (seq, head_dim) = (of.tokens.len(), shape.queries.head_dim);
        let rows = shape.queries.batch * seq;
        launch!(self, op, kernel, [rows * of.heads, head_dim / 2];
            x, of.row, angles, of.positions, rows, seq, of.heads, head_dim
        )
    }
}
