//! Writes a model into a folder that `transformers` loads.

use super::layout;
use super::slices::for_each_run;
use super::staged::{self, Staged};
use super::written::{self, Settings};
use super::{Architecture, Dtype, Error};
use crate::families::TensorPart;
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{ParamSpec, Role, Shape};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// The largest shard, in bytes of tensors.
const SHARD: u64 = 5_000_000_000;
/// Bytes that are written before they must be on the disk, so that the last wait for it is short.
const SYNC: usize = 1 << 28;

/// A tensor of the folder.
pub(super) struct Written {
    name: String,
    shape: Vec<usize>,
    dtype: Dtype,
    /// What it is made of: parts of the parameters of a unit, by number.
    parts: Vec<(usize, TensorPart)>,
    /// The number of its unit.
    unit: usize,
}

impl Written {
    fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.bytes()) as u64
    }
}

/// Parameters that share tensors: most are alone.
#[derive(Default)]
pub(super) struct Unit {
    pub specs: Vec<ParamSpec>,
    pub tensors: Vec<Written>,
}

/// The parameters of each unit, and the tensors of each file with their bytes.
type Shards = (Vec<Vec<ParamSpec>>, Vec<(u64, Vec<Written>)>);

/// The caller's weights, or why it cannot give them.
pub(super) type Given = Result<Vec<f32>, Box<dyn std::error::Error + Send + Sync>>;

/// A folder to be written: what it has beside the weights.
#[derive(Clone, Debug)]
pub struct Export {
    /// The model.
    pub architecture: Architecture,
    /// The type that weights are rounded to. Buffers stay in f32, as `transformers` keeps them: a bias of a router that
    /// were rounded would choose other experts.
    pub dtype: Dtype,
    /// Texts by name in the metadata of each file of weights, beside the `format` that `transformers` looks for.
    /// Programs that do not know them pass over them; [`Pretrained::metadata`](super::Pretrained::metadata) gives them
    /// back.
    pub metadata: BTreeMap<String, String>,
    /// The settings of the folder that the model comes from, which are kept: tokens, positions, generation, and what is
    /// not known here.
    pub from: Option<Settings>,
    /// Tokens that end a text, beside those that `from` names.
    pub ends_of_text: Vec<u32>,
    /// Other files of the folder by name: the tokenizer.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Whether a model that lies in the folder is replaced.
    pub overwrite: bool,
}

/// Writes a model with nothing beside it into a folder that has none yet: [`Export::write`].
pub fn export(
    folder: &Path,
    architecture: &Architecture,
    dtype: Dtype,
    weights: impl FnMut(&ParamSpec) -> Given,
) -> Result<(), Error> {
    Export::new(*architecture, dtype).write(folder, weights)
}

impl Export {
    /// A model with nothing beside it.
    #[must_use]
    pub fn new(architecture: Architecture, dtype: Dtype) -> Self {
        let (metadata, files) = (BTreeMap::new(), BTreeMap::new());
        Self { architecture, dtype, metadata, from: None, ends_of_text: Vec::new(), files, overwrite: false }
    }

    /// Whether the folder could be written now. Nothing stays of the attempt.
    ///
    /// # Errors
    /// A folder that cannot be made there, files of another model in it unless they are to be replaced, folders in it,
    /// a disk without the room.
    pub fn check(&self, folder: &Path) -> Result<(), Error> {
        let weights = self.units()?.iter().flat_map(|unit| &unit.tensors).map(Written::bytes).sum::<u64>();
        let files = self.files.values().map(|file| file.len() as u64).sum::<u64>();
        staged::check(folder, self.overwrite, weights + files)
    }

    /// Writes `config.json`, `generation_config.json`, the weights, above 5 GB in shards with an index, and the other
    /// files. `weights` gives a whole parameter, row-major; it is asked for each of them once, or again in the next
    /// shard where its tensors lie in several. One is in memory at a time, or those that share a tensor.
    ///
    /// The folder appears whole: a process that is killed leaves the one that was there before, or this one. Files in
    /// it that are of no model stay.
    ///
    /// # Errors
    /// As [`check`](Self::check); weights that the caller cannot give, of another size, or that are no numbers in this
    /// type.
    pub fn write(&self, folder: &Path, mut weights: impl FnMut(&ParamSpec) -> Given) -> Result<(), Error> {
        let staged = Staged::begin(folder, self.overwrite)?;
        let dir = staged.dir();
        let (specs, shards) = self.shards()?;
        let (total, count) = (shards.iter().map(|(size, _)| size).sum::<u64>(), shards.len());
        let mut weight_map = BTreeMap::new();
        for (number, (_, shard)) in shards.iter().enumerate() {
            let name = match count {
                1 => "model.safetensors".to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
            };
            weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), name.clone())));
            self.write_shard(&dir.join(name), &specs, shard, &mut weights)?;
        }
        let mut files = Vec::new();
        if count > 1 {
            let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            files.push(("model.safetensors.index.json", index));
        }
        let Settings { config, generation } =
            written::settings(&self.architecture, self.dtype, &self.ends_of_text, self.from.as_ref());
        files.extend(generation.map(|generation| ("generation_config.json", Value::Object(generation))));
        files.push(("config.json", Value::Object(config)));
        for (name, value) in files {
            write_file(&dir.join(name), format!("{value:#}\n").as_bytes())?;
        }
        for (name, bytes) in &self.files {
            let path = dir.join(name);
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent).map_err(|source| Error::File { path: parent.to_owned(), source })?;
            }
            write_file(&path, bytes)?;
        }
        staged.commit()
    }

    /// The parameters in the order in which [`write`](Self::write) asks for them.
    ///
    /// # Errors
    /// Sizes that no model has.
    pub fn order(&self) -> Result<Vec<ParamSpec>, Error> {
        let (specs, shards) = self.shards()?;
        let of =
            |shard: &[Written]| of_units(shard).flat_map(|tensors| specs[tensors[0].unit].clone()).collect::<Vec<_>>();
        Ok(shards.iter().flat_map(|(_, shard)| of(shard)).collect())
    }

    fn shards(&self) -> Result<Shards, Error> {
        let (mut specs, mut shards): (_, Vec<(u64, Vec<Written>)>) = (Vec::new(), Vec::new());
        for unit in self.units()? {
            specs.push(unit.specs);
            for tensor in unit.tensors {
                let size = tensor.bytes();
                match shards.last_mut().filter(|(held, _)| *held + size <= SHARD) {
                    Some((held, shard)) => {
                        *held += size;
                        shard.push(tensor);
                    }
                    None => shards.push((size, vec![tensor])),
                }
            }
        }
        Ok((specs, shards))
    }

    fn units(&self) -> Result<Vec<Unit>, Error> {
        let of = &self.architecture;
        let named = |part: TensorPart| (layout::name(of, &part, of.family.prefix), part);
        let parts = |spec: ParamSpec| {
            let parts = layout::parts(of, &spec.name, spec.dims).into_iter().map(named).collect();
            (spec, parts)
        };
        Ok(units_of(self.dtype, of.parameters()?.into_iter().map(parts)))
    }

    /// The caller's weights of a parameter.
    fn given(&self, spec: &ParamSpec, weights: &mut impl FnMut(&ParamSpec) -> Given) -> Result<Vec<f32>, Error> {
        let failed = |source| Error::Weights { name: spec.name.clone(), source };
        let values = weights(spec).map_err(failed)?;
        if values.len() != spec.dims.count() {
            let problem = format!("{} elements, and there are {}", values.len(), spec.dims.count());
            return Err(failed(problem.into()));
        }
        match values.iter().find(|&&value| !self.dtype.holds(value)) {
            Some(&value) => Err(Error::NotFinite { name: spec.name.clone(), value, dtype: self.dtype }),
            None => Ok(values),
        }
    }

    /// Writes a file of safetensors.
    pub(super) fn write_shard(
        &self,
        path: &Path,
        units: &[Vec<ParamSpec>],
        tensors: &[Written],
        mut weights: impl FnMut(&ParamSpec) -> Given,
    ) -> Result<(), Error> {
        let (mut header, mut at) = (Map::new(), 0);
        let mut texts = self.metadata.clone();
        texts.insert("format".to_owned(), "pt".to_owned());
        header.insert("__metadata__".to_owned(), json!(texts));
        for tensor in tensors {
            let (end, dtype) = (at + tensor.bytes(), tensor.dtype.header_name());
            let entry = json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": [at, end]});
            header.insert(tensor.name.clone(), entry);
            at = end;
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let failed = |source| Error::File { path: path.to_owned(), source };
        let mut file = BufWriter::new(File::create(path).map_err(failed)?);
        file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
        file.write_all(&header).map_err(failed)?;
        let mut unsynced = 0;
        for tensors in of_units(tensors) {
            let specs = &units[tensors[0].unit];
            let given = specs.iter().map(|spec| self.given(spec, &mut weights)).collect::<Result<Vec<_>, _>>()?;
            for Written { parts, shape, dtype, .. } in tensors {
                let mut values = vec![0.0; shape.iter().product()];
                for (parameter, part) in parts {
                    place(part, specs[*parameter].dims, &given[*parameter], &mut values)?;
                }
                let mut bytes = Vec::new();
                dtype.encode(&values, &mut bytes);
                file.write_all(&bytes).map_err(failed)?;
                unsynced += bytes.len();
            }
            if unsynced >= SYNC {
                file.flush().and_then(|()| file.get_ref().sync_data()).map_err(failed)?;
                unsynced = 0;
            }
        }
        let file = file.into_inner().map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(failed)
    }
}

/// The units of parameters with their parts, each with the name of its tensor, in this type; buffers in f32.
pub(super) fn units_of(
    dtype: Dtype,
    parameters: impl Iterator<Item = (ParamSpec, Vec<(String, TensorPart)>)>,
) -> Vec<Unit> {
    let (mut units, mut places): (Vec<Unit>, BTreeMap<String, (usize, usize)>) = Default::default();
    for (spec, parts) in parameters {
        let shared = parts.iter().find_map(|(name, _)| places.get(name)).map(|&(unit, _)| unit);
        let number = shared.unwrap_or(units.len());
        if number == units.len() {
            units.push(Unit::default());
        }
        let unit = &mut units[number];
        let parameter = unit.specs.len();
        let dtype = if spec.role == Role::Buffer { Dtype::F32 } else { dtype };
        unit.specs.push(spec);
        for (name, part) in parts {
            match places.get(&name) {
                Some(&(_, tensor)) => unit.tensors[tensor].parts.push((parameter, part)),
                None => {
                    places.insert(name.clone(), (number, unit.tensors.len()));
                    let shape = part.shape.clone();
                    unit.tensors.push(Written { name, shape, dtype, parts: vec![(parameter, part)], unit: number });
                }
            }
        }
    }
    units
}

/// The tensors of each unit, which follow each other.
fn of_units(tensors: &[Written]) -> impl Iterator<Item = &[Written]> {
    tensors.chunk_by(|one, next| one.unit == next.unit)
}

/// Writes the elements of a part to their places in its tensor.
fn place(part: &TensorPart, dims: Shape, values: &[f32], tensor: &mut [f32]) -> Result<(), Error> {
    for_each_run(part, &LocalSlice::whole(dims), &part.ranges, |first, base, places| {
        for (element, place) in tensor[first..].iter_mut().zip(places) {
            let value = values[base + place];
            *element = if part.offset == 0.0 { value } else { value - part.offset };
        }
        Ok(())
    })
}

pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let written = File::create(path).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.map_err(|source| Error::File { path: path.to_owned(), source })
}
