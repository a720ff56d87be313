//! The angles by which queries and keys are rotated.

use super::prelude::*;
use meshwork_tensor::kernel::{Layout, Rotary};

const OP: &str = "rotary";

/// The angles that were last used, `[positions, 2, head_dim / 2]`: all layers of a model share them.
#[derive(Debug, Default)]
pub(super) struct LastAngles(Mutex<Option<(Rotary, usize, Buffer)>>);

/// Rows of heads that are rotated: `row` elements from one to the next, of which the first `heads` heads turn by
/// `positions`, or by the tokens that the rows of each of `batch` sequences are, in runs.
pub(super) struct TurnedRows<'a> {
    pub(super) row: usize,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    pub(super) batch: usize,
    pub(super) runs: Vec<Range<usize>>,
    pub(super) positions: Option<&'a Buffer>,
}

/// Rows of one launch, and the position of the first where there are no positions. It begins anew with each sequence
/// of `seq` rows.
struct Piece {
    rows: Range<usize>,
    seq: usize,
    first: usize,
}

impl TurnedRows<'_> {
    fn pieces(&self) -> Vec<Piece> {
        let seq: usize = self.runs.iter().map(|run| run.len()).sum();
        if self.positions.is_some() || self.runs.len() == 1 {
            return vec![Piece { rows: 0..self.batch * seq, seq, first: self.runs.first().map_or(0, |run| run.start) }];
        }
        let of_sample = |sample: usize| {
            self.runs.iter().scan(sample * seq, |row, run| {
                let begin = std::mem::replace(row, *row + run.len());
                Some(Piece { rows: begin..*row, seq: run.len(), first: run.start })
            })
        };
        (0..self.batch).flat_map(of_sample).collect()
    }
}

impl CudaDevice {
    /// The angles for at least `seq` positions, computed in f64 and rounded once, as on the CPU.
    pub(super) fn angles(&self, rotary: Rotary, seq: usize, head_dim: usize) -> Result<Buffer> {
        let mut last = self.angles.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |of: &(Rotary, usize, Buffer)| (of.0, of.1) == (rotary, head_dim) && of.2.count() >= seq * head_dim;
        if let Some((.., angles)) = last.as_ref().filter(|last| fits(last)) {
            return Ok(angles.clone());
        }
        let angles: Vec<f32> = rotary.table(seq, head_dim).map(|angle| angle as f32).collect();
        let angles = self.uploaded(&Buffer::from_vec(angles), false)?;
        *last = Some((rotary, head_dim, angles.clone()));
        Ok(angles)
    }

    /// A copy of `x` with the first heads of each row rotated by the angles of `known` positions.
    pub(super) fn rotated(&self, rotary: Rotary, known: usize, x: &Buffer, of: &TurnedRows<'_>) -> Result<Buffer> {
        let mut to = self.scratch(x.dtype(), x.count())?;
        self.copy_into(x, 0..x.count(), &mut to, 0)?;
        let angles = self.angles(rotary, known, of.head_dim)?;
        let at = self.place_mut(OP, &mut to)?;
        self.turn_pieces(
            of,
            |this, piece, angles_at, positions| {
                let (at, rows) = (at.offset(x.dtype().size() * piece.rows.start * of.row), piece.rows.len());
                let at = (at, x.dtype());
                launch!(this, OP, "rotary_forward", [rows * of.heads, of.head_dim / 2];
                    at, of.row, angles_at, positions, at, of.row, rows, piece.seq, of.heads, of.head_dim
                )
            },
            &angles,
        )?;
        Ok(to)
    }

    /// Turns gradients of rotated heads back, in place.
    pub(super) fn turned_back(
        &self,
        rotary: Rotary,
        known: usize,
        (x, dtype): (Address, DType),
        of: &TurnedRows<'_>,
    ) -> Result<()> {
        let angles = self.angles(rotary, known, of.head_dim)?;
        self.turn_pieces(
            of,
            |this, piece, angles_at, positions| {
                let (at, rows) = (x.offset(dtype.size() * piece.rows.start * of.row), piece.rows.len());
                launch!(this, OP, "rotary_backward", [rows * of.heads, of.head_dim / 2];
                    (at, dtype), of.row, angles_at, positions, rows, piece.seq, of.heads, of.head_dim
                )
            },
            &angles,
        )
    }

    fn turn_pieces(
        &self,
        of: &TurnedRows<'_>,
        turn: impl Fn(&Self, &Piece, Address, Option<&Buffer>) -> Result<()>,
        angles: &Buffer,
    ) -> Result<()> {
        let at = self.place(OP, angles)?;
        of.pieces().iter().try_for_each(|piece| {
            let first = if of.positions.is_some() { 0 } else { piece.first };
            turn(self, piece, at.offset(angles.dtype().size() * first * of.head_dim), of.positions)
        })
    }
}
