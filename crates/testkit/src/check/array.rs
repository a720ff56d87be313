//! Arrays on the host, cut over ranks by a type and put together again.

use meshwork_core::Ty;
use meshwork_tensor::random::{key, uniform};

/// Extents and elements, in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Array {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

/// Element `i` of everything called `name`: between 0.5 and 1.5 or between -1.5 and -0.5, away from kinks and poles at
/// zero, and exact in f32.
pub(super) fn number(name: &str, i: u64) -> f64 {
    let u = uniform(key(17, name), i);
    f64::from(if u < 0.5 { u - 1.5 } else { u + 0.5 })
}

impl Array {
    pub fn named(name: &str, shape: &[usize]) -> Self {
        let count: usize = shape.iter().product();
        Self { shape: shape.to_vec(), values: (0..count as u64).map(|i| number(name, i)).collect() }
    }

    /// The part of this value that `rank` of `degree` holds as a `ty`. Shares of a sum, and values of a rank's own, are
    /// drawn by `name`.
    pub fn part(&self, name: &str, ty: Ty, rank: usize, degree: usize) -> Self {
        let drawn = |rank: usize| Self::named(&format!("{name} of rank {rank}"), &self.shape);
        match ty {
            Ty::Invariant | Ty::Replicate => self.clone(),
            Ty::Varying => drawn(rank),
            Ty::Partial if rank + 1 < degree => drawn(rank),
            Ty::Partial => (0..rank).fold(self.clone(), |rest, rank| rest.plus(&drawn(rank), -1.0)),
            Ty::Shard(dim) => {
                let mut shape = self.shape.clone();
                shape[dim] /= degree;
                let block: usize = shape[dim..].iter().product();
                let rows = self.values.chunks(block * degree);
                Self { values: rows.flat_map(|row| row[rank * block..][..block].to_vec()).collect(), shape }
            }
        }
    }

    /// The value of which the ranks hold these parts as a `ty`. `None` if they do not fit together: shapes differ, or
    /// values that should be the same.
    pub fn whole(parts: &[Self], ty: Ty, tolerance: f64) -> Option<Self> {
        let (first, others) = parts.split_first()?;
        if others.iter().any(|part| part.shape != first.shape) {
            return None;
        }
        match ty {
            Ty::Invariant | Ty::Replicate if others.iter().all(|part| part.is(first, tolerance)) => Some(first.clone()),
            Ty::Invariant | Ty::Replicate => None,
            Ty::Partial => Some(others.iter().fold(first.clone(), |sum, part| sum.plus(part, 1.0))),
            Ty::Shard(dim) => {
                let mut shape = first.shape.clone();
                *shape.get_mut(dim)? *= parts.len();
                let block: usize = first.shape[dim..].iter().product::<usize>().max(1);
                let rows = first.values.len() / block;
                let row = |row: usize| parts.iter().flat_map(move |part| &part.values[row * block..][..block]);
                Some(Self { shape, values: (0..rows).flat_map(row).copied().collect() })
            }
            Ty::Varying => None,
        }
    }

    pub fn plus(mut self, other: &Self, factor: f64) -> Self {
        self.values.iter_mut().zip(&other.values).for_each(|(sum, value)| *sum += factor * value);
        self
    }

    pub fn dot(&self, other: &Self) -> f64 {
        self.values.iter().zip(&other.values).map(|(a, b)| a * b).sum()
    }

    pub fn norm(&self) -> f64 {
        self.dot(self).sqrt()
    }

    /// The norm of the difference, of two values of one shape.
    pub fn distance(&self, other: &Self) -> f64 {
        self.clone().plus(other, -1.0).norm()
    }

    /// Whether this is `other` up to rounding. Not a number is nothing.
    pub fn is(&self, other: &Self, tolerance: f64) -> bool {
        self.shape == other.shape && self.distance(other) <= tolerance * (1.0 + other.norm())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_value_make_it_whole_again() {
        let whole = Array::named("x", &[6, 12, 3]);
        for ty in [Ty::Replicate, Ty::Invariant, Ty::Partial, Ty::Shard(0), Ty::Shard(1), Ty::Shard(2)] {
            for degree in [1, 3] {
                let parts: Vec<Array> = (0..degree).map(|rank| whole.part("x", ty, rank, degree)).collect();
                let again = Array::whole(&parts, ty, 0.0).unwrap();
                assert!(again.is(&whole, 1e-12), "{ty} of {degree}");
            }
        }
        let different = [Array::named("a", &[3]), Array::named("b", &[3])];
        assert_eq!(Array::whole(&different, Ty::Invariant, 1e-9), None);
    }
}
