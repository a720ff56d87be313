//! Where the elements of a parameter lie in a tensor of a file.

use std::ops::Range;

/// A part of a parameter that lies in one tensor: a box of its elements.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TensorPart {
    /// The tensor's name, without the prefix that some files have.
    pub(crate) tensor: String,
    /// Its extents.
    pub(crate) shape: Vec<usize>,
    /// The indices of each dim of the parameter that lie there.
    pub(crate) ranges: Vec<Range<usize>>,
    /// The element of the tensor that is the first of them.
    pub(crate) start: usize,
    /// Elements of the tensor between neighbours along each dim of the parameter; 0 along dims of one index.
    pub(crate) strides: Vec<usize>,
    /// What is added to its elements.
    pub(crate) offset: f32,
}

impl TensorPart {
    /// These indices of a parameter, from element `start` of a tensor of this shape on.
    pub(crate) fn of(
        tensor: impl Into<String>,
        shape: &[usize],
        ranges: Vec<Range<usize>>,
        start: usize,
        strides: Vec<usize>,
    ) -> Self {
        Self { tensor: tensor.into(), shape: shape.to_vec(), ranges, start, strides, offset: 0.0 }
    }

    /// The whole parameter, element for element, as a tensor of this shape.
    pub(crate) fn same(tensor: impl Into<String>, dims: &[usize], shape: &[usize]) -> Vec<Self> {
        vec![Self::of(tensor, shape, whole(dims), 0, row_major(dims))]
    }

    /// The whole parameter `[out.., in..]`, of which the first `out` dims are outputs, as a matrix `[in, out]`.
    pub(crate) fn transposed(tensor: impl Into<String>, dims: &[usize], out: usize) -> Vec<Self> {
        let (columns, rows) = (dims[..out].iter().product(), dims[out..].iter().product());
        let inner = row_major(&dims[out..]).into_iter().map(|stride| stride * columns);
        let strides = row_major(&dims[..out]).into_iter().chain(inner).collect();
        vec![Self::of(tensor, &[rows, columns], whole(dims), 0, strides)]
    }

    /// The part with these (dim, index) of some dims as a tensor of this shape, row-major in the others.
    pub(crate) fn at(tensor: String, dims: &[usize], at: Vec<(usize, usize)>, shape: &[usize]) -> Self {
        let is_fixed = |dim: usize| at.iter().any(|&(fixed, _)| fixed == dim);
        let others: Vec<usize> = (0..dims.len()).filter(|&dim| !is_fixed(dim)).map(|dim| dims[dim]).collect();
        let mut free = row_major(&others).into_iter();
        let strides = (0..dims.len()).map(|dim| if is_fixed(dim) { 0 } else { free.next().unwrap_or(0) }).collect();
        let mut ranges = whole(dims);
        at.into_iter().for_each(|(dim, index)| ranges[dim] = index..index + 1);
        Self::of(tensor, shape, ranges, 0, strides)
    }

    /// One tensor for each index of dim `dim`.
    pub(crate) fn each<const N: usize>(tensors: [String; N], dims: &[usize], dim: usize, shape: &[usize]) -> Vec<Self> {
        let part = |(index, tensor)| Self::at(tensor, dims, vec![(dim, index)], shape);
        tensors.into_iter().enumerate().map(part).collect()
    }

    /// The indices of this part among `ranges` of the parameter's dims, or of one dim if that is empty.
    pub(crate) fn within(&self, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
        let common = |(range, part): (&Range<usize>, &Range<usize>)| {
            part.start.clamp(range.start, range.end)..part.end.clamp(range.start, range.end)
        };
        ranges.iter().zip(&self.ranges).map(common).collect()
    }

    /// The element of the tensor at an index of one dim of the parameter, if it is the first of the others.
    pub(crate) fn along(&self, dim: usize, index: usize) -> usize {
        (index - self.ranges[dim].start) * self.strides[dim]
    }
}

fn whole(dims: &[usize]) -> Vec<Range<usize>> {
    dims.iter().map(|&extent| 0..extent).collect()
}

fn row_major(dims: &[usize]) -> Vec<usize> {
    (0..dims.len()).map(|dim| dims[dim + 1..].iter().product()).collect()
}
