//! A batch: named tensors in host memory, with the samples along dim 0 of each.

use meshwork_core::hash;
use meshwork_core::{Axes, Axis, Buffer, DType, Element, Mesh, Ty, Types};
use meshwork_tensor::{Error, Result, Shape, Tape, Tensor, Var};
use std::ops::Range;

/// One named part of a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// `tokens`, `targets`, `images`, ...
    pub name: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Extents of one sample; empty for a single number.
    pub dims: Shape,
    /// The ids that there are, of a field of ids: a batch with another one is refused.
    pub ids: Option<Range<i32>>,
    /// The dim that ranks cut, and the axes over which they do.
    pub sequence: Option<(usize, Axes)>,
}

impl Field {
    /// A field of any numbers.
    pub fn new(name: &'static str, dtype: DType, dims: impl Into<Shape>) -> Self {
        Self { name, dtype, dims: dims.into(), ids: None, sequence: None }
    }

    /// A field of i32 ids, all of them in `ids`: tokens are in `0..vocab`, targets whose negative ids are masked in
    /// `i32::MIN..vocab`.
    pub fn ids(name: &'static str, dims: impl Into<Shape>, ids: Range<i32>) -> Self {
        Self { ids: Some(ids), ..Self::new(name, DType::I32, dims) }
    }

    /// The number of ids from 0 on, of a field of ids.
    pub fn id_count(&self) -> usize {
        self.ids.as_ref().map_or(0, |ids| ids.end.max(0) as usize)
    }

    /// The same, whose dim `dim` of a sample runs along the sequence: [`Batch::var`] gives each rank of `over` its
    /// slice. A batch has whole sequences on every mesh.
    pub fn sequence(self, dim: usize, over: impl Into<Axes>) -> Self {
        Self { sequence: Some((dim, over.into())), ..self }
    }
}

/// What [`Batch::var`] takes: the name of a field, whose samples are whole on each rank, or a [`Field`] that says how
/// ranks cut them.
#[derive(Clone, Copy, Debug)]
pub enum Reads<'a> {
    /// Whole samples.
    Whole(&'a str),
    /// Samples as the field says.
    Of(&'a Field),
}

impl<'a> From<&'a str> for Reads<'a> {
    fn from(name: &'a str) -> Self {
        Self::Whole(name)
    }
}

impl<'a> From<&'a Field> for Reads<'a> {
    fn from(field: &'a Field) -> Self {
        Self::Of(field)
    }
}

/// Some samples: for each field of the model a tensor `[samples, dims..]` in host memory. Clones and parts share it.
///
/// ```
/// use meshwork_nn::Batch;
///
/// let batch = Batch::new(2).with("tokens", [3], vec![1, 2, 3, 4, 5, 6])?.with("label", [], vec![0.5f32, 0.25])?;
/// assert_eq!(batch.part(1..2)?.values::<i32>("tokens")?, [4, 5, 6]);
///
/// let wrong = Batch::new(2).with("tokens", [3], vec![1, 2, 3, 4]).unwrap_err().to_string();
/// assert_eq!(wrong, "batch: tokens has 4 values: 2 samples of [3] have 6 (shapes [[2, 3]])");
/// # Ok::<(), meshwork_tensor::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Batch {
    samples: usize,
    fields: Vec<(String, Shape, Buffer)>,
}

/// The field of the numbers of samples, an i32 for each: a sample that comes again has the number that it had before.
/// No model reads it.
pub const SAMPLE: &str = "sample";

impl Batch {
    /// A batch of `samples` samples without fields.
    pub fn new(samples: usize) -> Self {
        Self { samples, fields: Vec::new() }
    }

    /// Adds a field, in the place of one of that name: `values` are row-major, one sample of extents `dims` after
    /// another.
    ///
    /// # Errors
    /// A number of values that does not fit the samples.
    pub fn with<T: Element>(self, name: &str, dims: impl Into<Shape>, values: Vec<T>) -> Result<Self> {
        self.with_buffer(name, dims.into(), Buffer::from_vec(values))
    }

    fn with_buffer(mut self, name: &str, dims: Shape, values: Buffer) -> Result<Self> {
        let wanted = self.samples * dims.count();
        if values.count() != wanted {
            let problem =
                format!("{name} has {} values: {} samples of {dims:?} have {wanted}", values.count(), self.samples);
            return Err(Error::Shape { op: "batch", problem, shapes: vec![self.extents(dims).to_vec()] });
        }
        self.fields.retain(|(held, ..)| held != name);
        self.fields.push((name.to_owned(), dims, values));
        Ok(self)
    }

    /// Samples of zeros in all of the model's fields, for passes that use only shapes.
    pub fn blank(fields: &[Field], samples: usize) -> Self {
        let blank = |field: &Field| {
            (field.name.to_owned(), field.dims, Buffer::zeros(field.dtype, samples * field.dims.count()))
        };
        Self { samples, fields: fields.iter().map(blank).collect() }
    }

    /// The number of samples.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Extents of one sample of a field.
    pub fn dims(&self, name: &str) -> Result<Shape> {
        Ok(self.field(name)?.1)
    }

    /// The values of a field, sample by sample.
    pub fn values<T: Element>(&self, name: &str) -> Result<&[T]> {
        Ok(self.field(name)?.2.as_slice::<T>()?)
    }

    /// A field as a value on a tape: the samples are `Shard(0)` on dp, and the same on every other axis. A field with a
    /// [sequence](Field::sequence) is `Shard` on the axes that cut it, of which the mesh may lack some: the slowest
    /// axis cuts outermost, and where ranks do not divide the sequence, the last ones hold zeros behind its end, of
    /// which the value knows ([`Var::padded`]).
    ///
    /// # Errors
    /// A field that the batch does not have, or not of these extents; a sequence along a dim that is not there, or over
    /// an axis that cuts the samples.
    pub fn var<'a>(&self, tape: &Tape, field: impl Into<Reads<'a>>) -> Result<Var> {
        let (name, sequence) = match field.into() {
            Reads::Whole(name) => (name, None),
            Reads::Of(field) => {
                self.require_field(field)?;
                (field.name, field.sequence)
            }
        };
        let (_, dims, values) = self.field(name)?;
        let (mut shape, mut types) = (self.extents(*dims), sample_types(tape.rank().mesh()));
        let Some((dim, over)) = sequence else { return constant(tape, values, shape, types) };
        let rank = tape.rank();
        let problem = match over.iter().find(|axis| axis.is_data()) {
            Some(axis) => format!("{name} cannot be cut over {axis}, which cuts the samples: use tp or cp"),
            None if dim >= dims.len() => format!("{name} has {} dims, and no dim {dim} for a sequence", dims.len()),
            None => String::new(),
        };
        if !problem.is_empty() {
            return Err(Error::Shape { op: "batch", problem, shapes: vec![shape.to_vec()] });
        }
        let over: Axes = over.iter().copied().filter(|&axis| rank.mesh().has(axis)).collect();
        let Some(&slowest) = over.last() else { return constant(tape, values, shape, types) };
        let (group, extent) = (rank.group_over(&over), dims[dim]);
        let held = extent.div_ceil(group.size());
        let first = (group.rank() * held).min(extent);
        let values = cut(values, shape.around(dim + 1), first..(first + held).min(extent), held)?;
        shape = shape.with(dim + 1, held);
        types = over.iter().fold(types, |types, &axis| types.with(axis, Ty::Shard(dim + 1)));
        constant(tape, &values, shape, types)?.padded(slowest, extent)
    }

    /// Some of the samples.
    pub fn part(&self, samples: Range<usize>) -> Result<Self> {
        let part = |(name, dims, values): &(String, Shape, Buffer)| {
            let n = dims.count();
            Ok((name.clone(), *dims, values.slice(samples.start * n..samples.end * n)?))
        };
        Ok(Self { samples: samples.len(), fields: self.fields.iter().map(part).collect::<Result<_>>()? })
    }

    /// The same samples with other fields: `make` gives the extents of one sample, and the values, of each.
    ///
    /// # Errors
    /// Those of `make`; a number of values that does not fit the samples.
    pub fn map(&self, mut make: impl FnMut(&str, Shape, &Buffer) -> Result<(Shape, Buffer)>) -> Result<Self> {
        self.fields.iter().try_fold(Self::new(self.samples), |made, (name, dims, values)| {
            let (dims, values) = make(name, *dims, values)?;
            made.with_buffer(name, dims, values)
        })
    }

    /// A hash of the samples: their number, and name, extents and values of each field.
    pub fn hash(&self) -> u64 {
        let field = |(name, dims, values): &(String, Shape, Buffer)| {
            let bytes = values.as_bytes().map_or(0, hash::hash);
            hash::combine(hash::hash(format!("{name} {dims:?}").as_bytes()), bytes)
        };
        self.fields.iter().map(field).fold(self.samples as u64, hash::combine)
    }

    /// A hash of the samples by what they have in these fields, whatever their order: by which ranks find that they
    /// have the same ones.
    ///
    /// # Errors
    /// A field that the batch does not have.
    pub fn hash_of_samples(&self, fields: &[Field]) -> Result<u64> {
        let mut samples = vec![0; self.samples];
        for field in fields {
            let (_, dims, values) = self.field(field.name)?;
            let (bytes, each) = (values.as_bytes()?, dims.count() * values.dtype().size());
            for (at, hash) in samples.iter_mut().enumerate() {
                *hash = hash::combine(*hash, hash::hash(&bytes[at * each..(at + 1) * each]));
            }
        }
        samples.sort_unstable();
        Ok(samples.into_iter().fold(self.samples as u64, hash::combine))
    }

    /// Refuses a batch without exactly `samples` samples of these fields, each of the type and extents that the model
    /// declares, and ids that it has.
    pub fn require(&self, fields: &[Field], samples: usize) -> Result<()> {
        let refuse = |problem: String| Err(Error::Shape { op: "batch", problem, shapes: Vec::new() });
        if self.samples != samples {
            return refuse(format!("{} samples given, {samples} expected on this rank", self.samples));
        }
        for wanted in fields {
            self.require_field(wanted)?;
            let (_, dims, values) = self.field(wanted.name)?;
            let Some(ids) = &wanted.ids else { continue };
            if let Some((at, id)) = values.as_slice::<i32>()?.iter().enumerate().find(|(_, id)| !ids.contains(id)) {
                let (sample, place) = (at / dims.count().max(1), at % dims.count().max(1));
                let valid = match ids.start {
                    i32::MIN => format!("ids below {}, negative ones masked", ids.end),
                    start => format!("ids from {start} to {}", ids.end - 1),
                };
                return refuse(format!(
                    "{} has the id {id} at place {place} of sample {sample}: the model takes {valid}",
                    wanted.name
                ));
            }
        }
        Ok(())
    }

    /// Refuses a field of another type or other extents.
    fn require_field(&self, wanted: &Field) -> Result<()> {
        let (_, dims, values) = self.field(wanted.name)?;
        if (*dims, values.dtype()) == (wanted.dims, wanted.dtype) {
            return Ok(());
        }
        let problem = format!(
            "{} is {} of {dims:?} for each sample, and the model takes {} of {:?}",
            wanted.name,
            values.dtype(),
            wanted.dtype,
            wanted.dims
        );
        Err(Error::Shape { op: "batch", problem, shapes: Vec::new() })
    }

    fn extents(&self, dims: Shape) -> Shape {
        Shape::new(&[&[self.samples], &dims[..]].concat())
    }

    fn field(&self, name: &str) -> Result<&(String, Shape, Buffer)> {
        self.fields.iter().find(|(held, ..)| held == name).ok_or_else(|| {
            let held: Vec<&str> = self.fields.iter().map(|(name, ..)| &**name).collect();
            let problem = format!("there is no field {name:?}; the batch has {held:?}");
            Error::Shape { op: "batch", problem, shapes: Vec::new() }
        })
    }
}

/// Values of the host on a tape.
fn constant(tape: &Tape, values: &Buffer, shape: Shape, types: Types) -> Result<Var> {
    let tensor = Tensor::from_buffer(tape.device(), tape.device().upload(values)?, shape)?;
    let stored = match tensor.dtype() {
        DType::F32 => tensor.cast(tape.params().declarations().dtype())?,
        _ => tensor,
    };
    Ok(tape.constant(stored, types))
}

/// `[outer, extent, inner] → [outer, held, inner]`: the elements `range`, and zeros behind them.
fn cut(
    values: &Buffer,
    (outer, extent, inner): (usize, usize, usize),
    range: Range<usize>,
    held: usize,
) -> Result<Buffer> {
    let mut part = Buffer::zeros(values.dtype(), outer * held * inner);
    let (unit, from) = (inner * values.dtype().size(), values.as_bytes()?);
    let to = part.as_bytes_mut()?;
    for at in 0..outer {
        let row = &from[(at * extent + range.start) * unit..(at * extent + range.end) * unit];
        to[at * held * unit..][..row.len()].copy_from_slice(row);
    }
    Ok(part)
}

/// The types of samples: a slice of the batch on each rank of dp, the same samples on every other axis.
pub fn sample_types(mesh: &Mesh) -> Types {
    let ty = |axis: Axis| if axis.is_data() { Ty::Shard(0) } else { Ty::Invariant };
    mesh.value_axes().fold(Types::NONE, |types, axis| types.with(axis, ty(axis)))
}

/// Where batches come from: text, images, a stream of your own. The samples of a step must depend on the step alone,
/// never on the mesh.
pub trait BatchSource: Sync {
    /// The samples `samples` of the global batch of training step `step`, which is counted from 0.
    ///
    /// # Errors
    /// Samples that do not exist or cannot be read.
    fn batch(&self, step: u64, global_batch_size: usize, samples: Range<usize>) -> Result<Batch>;
}
