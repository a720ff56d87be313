//! The angles by which queries and keys are rotated.

use super::{CudaDevice, launch::launch};
use crate::driver::Address;
use meshwork_core::{Buffer, DType};
use meshwork_tensor::Result;
use meshwork_tensor::kernel::{Layout, Rotary};
use std::sync::{Mutex, PoisonError};

/// The angles that were last used, `[positions, 2, head_dim / 2]`: all layers of a model share them.
#[derive(Debug, Default)]
pub(super) struct LastAngles(Mutex<Option<(Rotary, usize, Buffer)>>);

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

    /// A copy of `x`, rows of `row` elements, with the first `heads` heads of each row rotated, by `positions` or by
    /// the row in its sequence.
    pub(super) fn rotated(
        &self,
        rotary: Rotary,
        x: &Buffer,
        row: usize,
        [seq, heads, head_dim]: [usize; 3],
        positions: Option<&Buffer>,
    ) -> Result<Buffer> {
        let angles = self.angles(rotary, seq, head_dim)?;
        self.turned_by(self.place("rotary", &angles)?, x, row, [seq, heads, head_dim], positions)
    }

    /// The same, with the angles at `angles`.
    pub(super) fn turned_by(
        &self,
        angles: Address,
        x: &Buffer,
        row: usize,
        [seq, heads, head_dim]: [usize; 3],
        positions: Option<&Buffer>,
    ) -> Result<Buffer> {
        let op = "rotary";
        let mut to = self.scratch(x.dtype(), x.count())?;
        self.copy_into(x, 0..x.count(), &mut to, 0)?;
        let rows = x.count() / row.max(1);
        launch!(self, op, "rotary_forward", [rows * heads, head_dim / 2];
            x, row, angles, positions, &mut to, row, rows, seq, heads, head_dim
        )?;
        Ok(to)
    }

    /// Rotates gradients back, in place: the first `heads` heads of `rows` rows of `row` elements, of f32 or of bf16.
    pub(super) fn turned_back(
        &self,
        rotary: Rotary,
        (x, dtype): (Address, DType),
        [rows, row]: [usize; 2],
        [seq, heads, head_dim]: [usize; 3],
        positions: Option<&Buffer>,
    ) -> Result<()> {
        let op = "rotary";
        let angles = self.angles(rotary, seq, head_dim)?;
        let kernel = if dtype == DType::Bf16 { "rotary_backward_16" } else { "rotary_backward" };
        launch!(self, op, kernel, [rows * heads, head_dim / 2];
            x, row, &angles, positions, rows, seq, heads, head_dim
        )
    }
}
