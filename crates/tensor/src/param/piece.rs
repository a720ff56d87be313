//! Assembling sharded values. All code that assembles them uses this module.

use super::LocalSlice;
use crate::shape::Shape;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// One rank's part of a value that is cut over ranks, in host memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// The world rank that holds it.
    pub rank: usize,
    /// Extents of the whole value.
    pub dims: Shape,
    /// The part that is held, and how it is stored.
    pub slice: LocalSlice,
    /// Its elements as they are stored, padding included.
    pub values: Vec<f32>,
}

/// Two ranks that hold different values of the same element.
#[derive(Clone, Debug, PartialEq)]
pub struct Conflict {
    /// The element, counted row-major in the whole value.
    pub element: usize,
    /// The first rank that holds it, and the first one with a different value.
    pub ranks: [usize; 2],
    /// Their values.
    pub values: [f32; 2],
    /// Total number of elements that conflict.
    pub count: usize,
}

impl Piece {
    /// Runs of contiguous elements: (start in the whole value, range here).
    pub fn runs(&self) -> Vec<(usize, Range<usize>)> {
        let mut runs = Vec::new();
        self.slice.for_each_run(self.dims, |start, run| runs.push((start as usize, run)));
        runs
    }

    /// Takes this piece of a whole value; padding is zero.
    pub fn cut(rank: usize, dims: Shape, slice: LocalSlice, whole: &[f32]) -> Self {
        let mut piece = Self { rank, dims, values: vec![0.0; slice.stored.count()], slice };
        for (start, run) in piece.runs() {
            let end = start + run.len();
            piece.values[run].copy_from_slice(&whole[start..end]);
        }
        piece
    }
}

/// The whole value: `None` for elements that no piece holds. Also returns the first conflict: every rank must hold the
/// same bits, except for the sign of zero.
///
/// ```
/// use meshwork_core::{Axis, Mesh};
/// use meshwork_tensor::param::{Piece, assemble};
/// use meshwork_tensor::{Declarations, Init, Placement, Role, Shape};
///
/// // Three columns over two ranks: the second holds one, and padding.
/// let (mesh, mut params) = ("tp=2".parse::<Mesh>()?, Declarations::new());
/// let id = params.declare("w", &[2, 3], Placement::replicated().shard(Axis::Tp, 1), Role::Weight, Init::Zeros)?;
/// let spec = params.spec(id);
/// let whole = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
/// let pieces = [0, 1].map(|rank| Piece::cut(rank, spec.dims, spec.local(&mesh, mesh.coords(rank)), &whole));
/// assert_eq!(pieces[1].values, [3.0, 0.0, 6.0, 0.0]);
/// assert_eq!(assemble(spec.dims, &pieces), (whole.map(Some).to_vec(), None));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn assemble<'a>(dims: Shape, pieces: impl IntoIterator<Item = &'a Piece>) -> (Vec<Option<f32>>, Option<Conflict>) {
    let mut whole: Vec<Option<(f32, usize)>> = vec![None; dims.count()];
    let mut conflict: Option<Conflict> = None;
    for piece in pieces {
        for (start, run) in piece.runs() {
            for (element, &value) in (start..).zip(&piece.values[run]) {
                let (there, first) = *whole[element].get_or_insert((value, piece.rank));
                if there.to_bits() == value.to_bits() || there == 0.0 && value == 0.0 {
                    continue;
                }
                let found = Conflict { element, ranks: [first, piece.rank], values: [there, value], count: 0 };
                let kept = conflict.get_or_insert(found.clone());
                if element < kept.element {
                    *kept = Conflict { count: kept.count, ..found };
                }
                kept.count += 1;
            }
        }
    }
    (whole.into_iter().map(|held| held.map(|(value, _)| value)).collect(), conflict)
}
