//! A naive version of the effect of collectives on memory: element by element, from all ranks' values.

/// A row-major array on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Extents.
    pub shape: Vec<usize>,
    /// Elements.
    pub data: Vec<f64>,
}

impl Array {
    /// An array whose element at `index` is `value(index)`.
    pub fn build(shape: &[usize], value: impl Fn(&[usize]) -> f64) -> Self {
        let count = shape.iter().product();
        let mut index = vec![0; shape.len()];
        let mut data = Vec::with_capacity(count);
        for _ in 0..count {
            data.push(value(&index));
            for dim in (0..shape.len()).rev() {
                index[dim] += 1;
                if index[dim] < shape[dim] {
                    break;
                }
                index[dim] = 0;
            }
        }
        Self { shape: shape.to_vec(), data }
    }

    fn at(&self, index: &[usize]) -> f64 {
        self.data[index.iter().zip(&self.shape).fold(0, |at, (i, extent)| at * extent + i)]
    }
}

fn with(index: &[usize], dim: usize, value: usize) -> Vec<usize> {
    let mut index = index.to_vec();
    index[dim] = value;
    index
}

/// The sum over the ranks.
pub fn sum(parts: &[Array]) -> Array {
    Array::build(&parts[0].shape, |index| parts.iter().map(|part| part.at(index)).sum())
}

/// The largest element over the ranks.
pub fn max(parts: &[Array]) -> Array {
    Array::build(&parts[0].shape, |index| parts.iter().map(|part| part.at(index)).fold(f64::NEG_INFINITY, f64::max))
}

/// The ranks' slices of `dim`, one after the other.
pub fn concat(parts: &[Array], dim: usize) -> Array {
    let held = parts[0].shape[dim];
    let shape = with(&parts[0].shape, dim, held * parts.len());
    Array::build(&shape, |index| parts[index[dim] / held].at(&with(index, dim, index[dim] % held)))
}

/// Slice `which` of `of` equal ones along `dim`.
pub fn slice(whole: &Array, dim: usize, which: usize, of: usize) -> Array {
    let held = whole.shape[dim] / of;
    let shape = with(&whole.shape, dim, held);
    Array::build(&shape, |index| whole.at(&with(index, dim, which * held + index[dim])))
}

/// Zeros, with `part` as slice `which` of `of` along `dim`.
pub fn pad(part: &Array, dim: usize, which: usize, of: usize) -> Array {
    let held = part.shape[dim];
    let shape = with(&part.shape, dim, held * of);
    Array::build(&shape, |index| match index[dim] / held == which {
        true => part.at(&with(index, dim, index[dim] % held)),
        false => 0.0,
    })
}
