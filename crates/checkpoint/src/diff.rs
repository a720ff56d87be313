//! Differences between two checkpoints.

use crate::{Checkpoint, Dtype, ReadError};
use half::{bf16, f16};
use serde_json::Value;
use std::fmt;

/// A tensor that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorDifference {
    /// The tensor.
    pub name: String,
    /// The difference.
    pub difference: Difference,
}

/// How a tensor differs between two checkpoints.
#[derive(Clone, Debug, PartialEq)]
pub enum Difference {
    /// Only the first checkpoint has it.
    OnlyFirst,
    /// Only the second checkpoint has it.
    OnlySecond,
    /// The extents or the types of elements differ.
    Shape {
        /// In the first checkpoint.
        first: (Vec<u64>, Dtype),
        /// In the second checkpoint.
        second: (Vec<u64>, Dtype),
    },
    /// Some elements differ.
    Values {
        /// Number of elements with different bits.
        differing: u64,
        /// Number of all elements.
        elements: u64,
        /// The largest difference of an element.
        largest: f64,
        /// The norm of the difference divided by the norm of the first; infinite if the first is zero.
        relative: f64,
    },
}

/// The tensors that differ, in the order of the first checkpoint. Reads both, piece by piece.
///
/// # Errors
/// Files that cannot be read or are damaged.
pub fn diff(first: &Checkpoint, second: &Checkpoint) -> Result<Vec<TensorDifference>, ReadError> {
    let mut differences = Vec::new();
    let mut push = |name: &str, difference| differences.push(TensorDifference { name: name.to_owned(), difference });
    for stored in &first.index().tensors {
        let tensor = &stored.tensor;
        let name = &*tensor.name;
        let Some(other) = second.tensor(name) else {
            push(name, Difference::OnlyFirst);
            continue;
        };
        let of = |tensor: &crate::Tensor| (tensor.dims.clone(), tensor.dtype);
        if of(tensor) != of(other) {
            push(name, Difference::Shape { first: of(tensor), second: of(other) });
            continue;
        }
        let mut sums = Sums::default();
        for piece in &stored.pieces {
            sums.add(tensor.dtype, &first.read(name, &piece.slice)?, &second.read(name, &piece.slice)?);
        }
        if sums.differing > 0 {
            let relative = (sums.squares_of_difference / sums.squares_of_first).sqrt();
            let elements = tensor.size().map_or(0, |(elements, _)| elements);
            push(name, Difference::Values { differing: sums.differing, elements, largest: sums.largest, relative });
        }
    }
    for stored in &second.index().tensors {
        if first.tensor(&stored.tensor.name).is_none() {
            push(&stored.tensor.name, Difference::OnlySecond);
        }
    }
    Ok(differences)
}

#[derive(Default)]
struct Sums {
    differing: u64,
    largest: f64,
    squares_of_difference: f64,
    squares_of_first: f64,
}

impl Sums {
    fn add(&mut self, dtype: Dtype, first: &[u8], second: &[u8]) {
        let width = dtype.size() as usize;
        for (a, b) in first.chunks_exact(width).zip(second.chunks_exact(width)) {
            let (x, y) = (number(dtype, a), number(dtype, b));
            self.squares_of_first += x * x;
            if a != b {
                let difference = (x - y).abs();
                self.differing += 1;
                // A NaN on one side counts as an infinite difference.
                self.largest = if difference.is_nan() { f64::INFINITY } else { self.largest.max(difference) };
                self.squares_of_difference += difference * difference;
            }
        }
    }
}

/// The value of an element; 0 for bytes that are not a number.
fn number(dtype: Dtype, bytes: &[u8]) -> f64 {
    fn read<const N: usize>(bytes: &[u8]) -> [u8; N] {
        bytes.first_chunk().copied().unwrap_or([0; N])
    }
    match dtype {
        Dtype::F64 => f64::from_le_bytes(read(bytes)),
        Dtype::F32 => f64::from(f32::from_le_bytes(read(bytes))),
        Dtype::F16 => f16::from_le_bytes(read(bytes)).to_f64(),
        Dtype::Bf16 => bf16::from_le_bytes(read(bytes)).to_f64(),
        Dtype::I64 => i64::from_le_bytes(read(bytes)) as f64,
        Dtype::U64 => u64::from_le_bytes(read(bytes)) as f64,
        Dtype::I32 => f64::from(i32::from_le_bytes(read(bytes))),
        Dtype::U32 => f64::from(u32::from_le_bytes(read(bytes))),
        Dtype::U8 => f64::from(u8::from_le_bytes(read(bytes))),
    }
}

impl fmt::Display for TensorDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.name)?;
        match &self.difference {
            Difference::OnlyFirst => write!(f, "only in the first"),
            Difference::OnlySecond => write!(f, "only in the second"),
            Difference::Shape { first: (dims, dtype), second: (other_dims, other_dtype) } => {
                write!(f, "{} {dims:?} in the first, {} {other_dims:?} in the second", dtype.name(), other_dtype.name())
            }
            Difference::Values { differing, elements, largest, relative } => {
                write!(
                    f,
                    "{differing} of {elements} elements differ, by {largest:.3e} at most and {relative:.3e} in norm"
                )
            }
        }
    }
}

/// A value that differs between two JSON documents.
#[derive(Clone, Debug, PartialEq)]
pub struct JsonDifference {
    /// Its path: `config.model.num_layers`.
    pub key: String,
    /// The first, if it has the key.
    pub first: Option<Value>,
    /// The second, if it has the key.
    pub second: Option<Value>,
}

/// The values that differ between two JSON documents: between the metadata of two checkpoints, or of a checkpoint and a
/// run.
pub fn json_differences(first: &Value, second: &Value) -> Vec<JsonDifference> {
    let mut differences = Vec::new();
    compare("", Some(first), Some(second), &mut differences);
    differences
}

fn compare(key: &str, first: Option<&Value>, second: Option<&Value>, into: &mut Vec<JsonDifference>) {
    match (first, second) {
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            let new = b.keys().filter(|name| !a.contains_key(*name));
            for name in a.keys().chain(new) {
                let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                compare(&key, a.get(name), b.get(name), into);
            }
        }
        _ if first == second => {}
        _ => into.push(JsonDifference { key: key.to_owned(), first: first.cloned(), second: second.cloned() }),
    }
}

impl fmt::Display for JsonDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<Value>| value.as_ref().map_or_else(|| "not there".to_owned(), Value::to_string);
        write!(f, "{}: {} and {}", self.key, shown(&self.first), shown(&self.second))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_is_compared_value_by_value() {
        let (a, b) = (json!({"m": {"x": 1, "y": [1]}, "s": 5}), json!({"m": {"x": 2, "y": [1], "z": true}}));
        let found: Vec<_> = json_differences(&a, &b).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["m.x: 1 and 2", "m.z: not there and true", "s: 5 and not there"]);
        assert_eq!(json_differences(&a, &a), []);
    }

    #[test]
    fn every_type_of_element_has_a_value() {
        let mut sums = Sums::default();
        sums.add(
            Dtype::F32,
            &[1.0f32, 2.0].map(f32::to_le_bytes).concat(),
            &[1.0f32, 2.5].map(f32::to_le_bytes).concat(),
        );
        sums.add(Dtype::I64, &(-3i64).to_le_bytes(), &(-5i64).to_le_bytes());
        sums.add(Dtype::Bf16, &bf16::from_f32(4.0).to_le_bytes(), &bf16::from_f32(4.0).to_le_bytes());
        assert_eq!((sums.differing, sums.largest), (2, 2.0));
        assert_eq!((sums.squares_of_first, sums.squares_of_difference), (1.0 + 4.0 + 9.0 + 16.0, 0.25 + 4.0));
        sums.add(Dtype::F64, &f64::NAN.to_le_bytes(), &0f64.to_le_bytes());
        assert_eq!(sums.largest, f64::INFINITY);
    }
}
