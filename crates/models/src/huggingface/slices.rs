//! The elements that a rank holds of a parameter, read from the tensors in which they lie.

use super::Error;
use super::tensors::Tensors;
use crate::families::TensorPart;
use meshwork_tensor::param::LocalSlice;
use std::ops::Range;

/// Why the tensor of a part cannot be read; `whose` names the shape that it should have.
pub(super) fn problem_of(tensors: &Tensors, part: &TensorPart, name: &str, whose: &str) -> Option<String> {
    let Some(tensor) = tensors.find(name) else { return Some(format!("{name} {:?} is missing", part.shape)) };
    if tensor.shape != part.shape {
        return Some(format!("{name} is {:?}, and {whose} is {:?}", tensor.shape, part.shape));
    }
    let dtype = tensor.dtype.as_ref().err()?;
    Some(format!("{name} is of the type {dtype}, which is not supported: F32, BF16 and F16 are"))
}

/// The elements of a parameter with these parts that `slice` has, as they are stored: padding is zero.
pub(super) fn read_parts(
    tensors: &Tensors,
    parts: &[TensorPart],
    name: impl Fn(&TensorPart) -> String,
    slice: &LocalSlice,
) -> Result<Vec<f32>, Error> {
    let mut values = vec![0.0; slice.stored.count()];
    for part in parts {
        let ranges = part.within(&slice.ranges);
        if ranges.iter().any(|range| range.is_empty()) {
            continue;
        }
        let name = name(part);
        let tensor = tensors.find(&name).ok_or_else(|| Error::Tensors(vec![format!("{name} is missing")]))?;
        let (mut bytes, mut run) = (Vec::new(), Vec::new());
        for_each_run(part, slice, &ranges, |start, base, places| {
            tensors.read(tensor, start..start + places.len(), &mut bytes, &mut run)?;
            let read = |value: f32| {
                if part.offset == 0.0 { value } else { value + part.offset }
            };
            places.iter().zip(&run).for_each(|(&place, &value)| values[base + place] = read(value));
            Ok(())
        })?;
    }
    Ok(values)
}

/// Neighbouring elements of a tensor that are read at once: at most this many, but for a single dim.
const RUN: usize = 1 << 22;

/// Calls `visit(first, base, places)` for each run of neighbouring elements of `part` within `ranges`, the part's share
/// of the slice. The run begins at element `first` of the tensor; its element i goes to `base + places[i]` in the
/// memory of the slice.
pub(super) fn for_each_run(
    part: &TensorPart,
    slice: &LocalSlice,
    ranges: &[Range<usize>],
    mut visit: impl FnMut(usize, usize, &[usize]) -> Result<(), Error>,
) -> Result<(), Error> {
    let local: Vec<usize> = (0..ranges.len()).map(|dim| slice.stored[dim + 1..].iter().product()).collect();
    let start = |dim: usize| part.along(dim, ranges[dim].start);
    let base: usize = (0..ranges.len()).map(|dim| (ranges[dim].start - slice.ranges[dim].start) * local[dim]).sum();
    // From the dim whose neighbours are nearest in the tensor to the farthest.
    let mut dims: Vec<usize> = (0..ranges.len()).filter(|&dim| part.strides[dim] > 0).collect();
    dims.sort_by_key(|&dim| part.strides[dim]);
    // Dims whose elements follow each other in the tensor make up a run.
    let (mut places, mut joined) = (vec![0], 0);
    for &dim in &dims {
        let follows = places.len() == part.strides[dim];
        if !follows || joined > 0 && places.len() * ranges[dim].len() > RUN {
            break;
        }
        let step = local[dim];
        let moved = |at: usize| places.iter().map(move |place| place + at * step);
        places = (0..ranges[dim].len()).flat_map(moved).collect();
        joined += 1;
    }
    let first = part.start + dims.iter().map(|&dim| start(dim)).sum::<usize>();
    let outer = &dims[joined..];
    for number in 0..outer.iter().map(|&dim| ranges[dim].len()).product() {
        let (mut rest, mut element, mut place) = (number, first, base);
        for &dim in outer {
            let at = rest % ranges[dim].len();
            rest /= ranges[dim].len();
            element += at * part.strides[dim];
            place += at * local[dim];
        }
        visit(element, place, &places)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which element of the tensor lies at each place of a slice.
    fn places(dims: &[usize], ranges: [Range<usize>; 3], stored: &[usize]) -> (Vec<Option<usize>>, usize) {
        let part = &TensorPart::same("w", dims, dims)[0];
        let slice = LocalSlice { stored: stored.into(), ranges: ranges.to_vec() };
        let (mut found, mut runs) = (vec![None; slice.stored.count()], 0);
        for_each_run(part, &slice, &part.within(&slice.ranges), |start, base, places| {
            runs += 1;
            places.iter().enumerate().for_each(|(at, place)| found[base + place] = Some(start + at));
            Ok(())
        })
        .unwrap();
        (found, runs)
    }

    #[test]
    fn a_slice_has_padding_behind_each_of_its_rows() {
        let (found, _) = places(&[2, 3, 4], [0..2, 1..3, 2..4], &[2, 3, 3]);
        let row = |first| [Some(first), Some(first + 1), None];
        let none = [None; 3];
        assert_eq!(found, [row(6), row(10), none, row(18), row(22), none].concat());
    }

    /// More elements than are read at once: each of them once, in its place.
    #[test]
    fn large_tensors_are_read_in_several_runs() {
        let dims = [3, RUN / 4, 2];
        let (found, runs) = places(&dims, [0..3, 0..RUN / 4, 0..2], &dims);
        assert!(runs > 1 && found.iter().enumerate().all(|(at, found)| *found == Some(at)), "{runs} runs");
    }
}
