//! A matrix as the product of two thin ones (PowerSGD; Vogels, Karimireddy and Jaggi 2019).

use crate::compressor::{Draws, Guarantee, SumMethod};
use crate::wire::{floats, put_floats};
use crate::{CompressError, Compressor, Fold, MessageError, Method, PowerSgd, Result, Shape};
use meshwork_core::random::fill_uniform;
use meshwork_core::simd::wide;

impl PowerSgd {
    /// Number of elements of P, then of Q.
    pub fn factors(self, shape: Shape) -> [usize; 2] {
        [shape.rows() * self.rank, shape.cols() * self.rank]
    }

    /// Fills the zero columns of Q with random numbers.
    pub fn start(self, q: &mut [f32], shape: Shape, draws: Draws) {
        for (column, q) in q.chunks_exact_mut(shape.cols().max(1)).enumerate() {
            if q.iter().all(|&q| q == 0.0) {
                fill_uniform(draws.key, draws.start + (column * q.len()) as u64, q);
                q.iter_mut().for_each(|q| *q = 2.0 * *q - 1.0);
            }
        }
    }

    /// `P = M Q`. Each element is summed in 16 lanes, column j in lane j % 16, then the lanes in order.
    pub fn times(self, m: &[f32], q: &[f32], shape: Shape, p: &mut [f32]) {
        let cols = shape.cols().max(1);
        wide!({
            for (m, p) in m.chunks_exact(cols).zip(p.chunks_exact_mut(self.rank)) {
                for (q, p) in q.chunks_exact(cols).zip(p) {
                    *p = dot(m, q);
                }
            }
        });
    }

    /// `Q = Mᵀ P`, summed in the order of the rows.
    pub fn transposed_times(self, m: &[f32], p: &[f32], shape: Shape, q: &mut [f32]) {
        q.fill(0.0);
        let cols = shape.cols().max(1);
        wide!({
            for (m, p) in m.chunks_exact(cols).zip(p.chunks_exact(self.rank)) {
                for (q, &p) in q.chunks_exact_mut(cols).zip(p) {
                    q.iter_mut().zip(m).for_each(|(q, m)| *q += m * p);
                }
            }
        });
    }

    /// `P Qᵀ`, summed in the order of the columns.
    pub fn product(self, p: &[f32], q: &[f32], shape: Shape, fold: Fold, out: &mut [f32]) {
        let cols = shape.cols().max(1);
        let mut row = vec![0.0; cols];
        wide!({
            for (out, p) in out.chunks_exact_mut(cols).zip(p.chunks_exact(self.rank)) {
                row.fill(0.0);
                for (q, &p) in q.chunks_exact(cols).zip(p) {
                    row.iter_mut().zip(q).for_each(|(row, q)| *row += p * q);
                }
                match fold {
                    Fold::Replace => out.copy_from_slice(&row),
                    Fold::Add => out.iter_mut().zip(&row).for_each(|(out, row)| *out += row),
                }
            }
        });
    }

    /// Makes the columns of P orthonormal, from the first to the last (modified Gram-Schmidt, dot products in f64). A
    /// column in the span of the previous columns, up to rounding, becomes zero.
    pub fn orthogonalise(self, p: &mut [f32]) {
        /// The part of a squared length that may be left by the rounding of f32, with a margin.
        const ROUNDING: f64 = 1e-10;
        let dot = |p: &[f32], a: usize, b: usize| -> f64 {
            p.chunks_exact(self.rank).map(|row| f64::from(row[a]) * f64::from(row[b])).sum()
        };
        let lengths: Vec<f64> = (0..self.rank).map(|column| dot(p, column, column)).collect();
        for (column, before) in lengths.into_iter().enumerate() {
            let left = dot(p, column, column);
            // This comparison is false for NaN, so a NaN stays.
            let factor = if left <= ROUNDING * before { 0.0 } else { 1.0 / left.sqrt() };
            p.chunks_exact_mut(self.rank).for_each(|row| row[column] = (f64::from(row[column]) * factor) as f32);
            for other in column + 1..self.rank {
                let along = dot(p, column, other);
                for row in p.chunks_exact_mut(self.rank) {
                    row[other] = (f64::from(row[other]) - along * f64::from(row[column])) as f32;
                }
            }
        }
    }
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 16];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a.iter().zip(b) {
        for l in 0..16 {
            lanes[l] += a[l] * b[l];
        }
    }
    for (l, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        lanes[l] += a * b;
    }
    lanes.into_iter().fold(0.0, |sum, lane| sum + lane)
}

impl Compressor for PowerSgd {
    fn name(&self) -> String {
        self.to_string()
    }

    fn method(&self) -> Method {
        Method::PowerSgd
    }

    fn check(&self, shape: Shape) -> Result<()> {
        match shape.is_empty() || (1..=shape.rows().min(shape.cols())).contains(&self.rank) {
            true => Ok(()),
            false => Err(CompressError::Rank { rank: self.rank, shape }),
        }
    }

    fn body_bytes(&self, shape: Shape) -> usize {
        if shape.is_empty() { 0 } else { self.factors(shape).into_iter().sum::<usize>() * 4 }
    }

    /// A projection never adds to an error, but its loss depends on the matrix.
    fn guarantee(&self, shape: Shape) -> Guarantee {
        Guarantee { error: f64::from(u8::from(!shape.is_empty())), unbiased: shape.is_empty() }
    }

    fn warm_len(&self, shape: Shape) -> usize {
        if shape.is_empty() { 0 } else { self.factors(shape)[1] }
    }

    fn sum(&self) -> SumMethod {
        SumMethod::Factors(*self)
    }

    fn write(&self, x: &[f32], shape: Shape, draws: Draws, q: &mut [f32], body: &mut [u8]) {
        if shape.is_empty() {
            return;
        }
        let mut p = vec![0.0; self.factors(shape)[0]];
        self.start(q, shape, draws);
        self.times(x, q, shape, &mut p);
        self.orthogonalise(&mut p);
        self.transposed_times(x, &p, shape, q);
        let rest = put_floats(body, p.iter().copied());
        put_floats(rest, q.iter().copied());
    }

    fn read(&self, body: &[u8], shape: Shape, fold: Fold, out: &mut [f32]) -> Result<(), MessageError> {
        if shape.is_empty() {
            return Ok(());
        }
        let [p_len, q_len] = self.factors(shape);
        let (p, rest) = floats(body, p_len);
        let (p, (q, _)) = (p.collect::<Vec<_>>(), floats(rest, q_len));
        self.product(&p, &q.collect::<Vec<_>>(), shape, fold, out);
        Ok(())
    }
}
