//! Rotary position embeddings (Su et al., arXiv:2104.09864), applied to rows of queries and keys when they are copied
//! for products, and undone in their gradients.

use super::super::Float;
use super::heads::RowsMut;
use meshwork_core::simd::wide;

/// Cosines and sines of the rotation angles of a head's features, row by row, `[positions, 2, head_dim / 2]`: for pair
/// i (features i and i + head_dim / 2) at position p, they are elements i and i + head_dim / 2 of row p.
#[derive(Clone, Copy, Debug)]
pub struct Angles<'a, T>(pub &'a [T]);

impl<T: Float> Angles<'_, T> {
    /// Panics unless there are rows for `seq` positions of heads of this size.
    pub(super) fn check(&self, seq: usize, head_dim: usize) {
        assert!(head_dim.is_multiple_of(2), "a head of {head_dim} features, which are no pairs");
        assert!(self.0.len() >= seq * head_dim, "angles of {} elements for {seq} rows of {head_dim}", self.0.len());
    }

    /// The angles from a position on.
    pub(super) fn from(self, position: usize, head_dim: usize) -> Self {
        Self(&self.0[position * head_dim..])
    }

    /// Rotates the rows of one head, `row` apart, by their positions; `to` gets them contiguously.
    pub(super) fn turn(self, (from, row): (&[T], usize), head_dim: usize, to: &mut [T]) {
        let half = head_dim / 2;
        wide(
            #[inline(always)]
            || {
                let rows = to.chunks_exact_mut(head_dim).zip(self.0.chunks_exact(head_dim));
                for (i, (to, angles)) in rows.enumerate() {
                    let (x, y) = from[i * row..][..head_dim].split_at(half);
                    let (to_x, to_y) = to.split_at_mut(half);
                    let (cos, sin) = angles.split_at(half);
                    let pairs = x.iter().zip(y).zip(cos.iter().zip(sin));
                    for ((to_x, to_y), ((&x, &y), (&cos, &sin))) in to_x.iter_mut().zip(to_y).zip(pairs) {
                        *to_x = x * cos - y * sin;
                        *to_y = y * cos + x * sin;
                    }
                }
            },
        );
    }

    /// Rotates the rows of one head back, in place: the gradient before the rotation from the gradient after it.
    pub(super) fn turn_back(self, rows: &mut RowsMut<'_, T>, seq: usize, head_dim: usize) {
        let half = head_dim / 2;
        wide(
            #[inline(always)]
            || {
                for (i, angles) in self.0.chunks_exact(head_dim).take(seq).enumerate() {
                    let (x, y) = rows.row(i)[..head_dim].split_at_mut(half);
                    let (cos, sin) = angles.split_at(half);
                    for ((x, y), (&cos, &sin)) in x.iter_mut().zip(y).zip(cos.iter().zip(sin)) {
                        (*x, *y) = (*x * cos + *y * sin, *y * cos - *x * sin);
                    }
                }
            },
        );
    }
}

/// A copy of `x [samples, seq, all, head_dim]` whose first `heads` heads are rotated by the positions of their tokens.
pub fn turn<T: Float>(angles: Angles<'_, T>, dims: [usize; 4], x: &[T], turned: &mut [T]) {
    let [seq, all, heads, head_dim] = dims;
    angles.check(seq, head_dim);
    turned.copy_from_slice(x);
    let (row, mut of_head) = (all * head_dim, vec![T::ZERO; seq * head_dim]);
    for (x, turned) in x.chunks_exact((seq * row).max(1)).zip(turned.chunks_exact_mut((seq * row).max(1))) {
        for head in (0..heads).map(|head| head * head_dim) {
            angles.turn((&x[head..], row), head_dim, &mut of_head);
            for (to, from) in turned.chunks_exact_mut(row).zip(of_head.chunks_exact(head_dim)) {
                to[head..head + head_dim].copy_from_slice(from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::values;
    use super::*;

    fn assert_close(got: &[f64], want: &[f64], tolerance: f64) {
        assert_eq!(got.len(), want.len());
        let near = |(got, want): (&f64, &f64)| (got - want).abs() <= tolerance * want.abs().max(1.0);
        assert!(got.iter().zip(want).all(near), "{got:?} instead of {want:?}");
    }

    /// Pairs are rotated by their angles, and back to their original values; other elements do not change.
    #[test]
    fn pairs_turn_and_turn_back() {
        let (seq, head_dim, row) = (5, 6, 9);
        let x: Vec<f64> = values("x", seq * row).into_iter().map(f64::from).collect();
        let angle = |i: usize, pair: usize| i as f64 * 0.7_f64.powi(pair as i32);
        let angles: Vec<f64> = (0..seq)
            .flat_map(|i| (0..head_dim).map(move |e| (e, angle(i, e % 3))))
            .map(|(e, angle)| if e < 3 { angle.cos() } else { angle.sin() })
            .collect();
        let mut turned = vec![f64::NAN; seq * head_dim];
        Angles(&angles).turn((&x, row), head_dim, &mut turned);
        for (i, turned) in turned.chunks(head_dim).enumerate() {
            for pair in 0..3 {
                let (re, im) = (x[i * row + pair], x[i * row + pair + 3]);
                let (sin, cos) = angle(i, pair).sin_cos();
                assert_close(&[turned[pair], turned[pair + 3]], &[re * cos - im * sin, re * sin + im * cos], 1e-15);
            }
        }
        let mut back = x.clone();
        for i in 0..seq {
            back[i * row..][..head_dim].copy_from_slice(&turned[i * head_dim..][..head_dim]);
        }
        Angles(&angles).turn_back(&mut RowsMut::new(&mut back, row), seq, head_dim);
        assert_close(&back, &x, 1e-15);
        assert!(
            (0..seq).all(|i| back[i * row + head_dim..][..row - head_dim] == x[i * row + head_dim..][..row - head_dim])
        );
    }
}
