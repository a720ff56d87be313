//! Writes a model into a folder that `transformers` loads.

use super::layout::{self, Part};
use super::{Architecture, Dtype, Error, config};
use meshwork_tensor::ParamSpec;
use serde_json::{Map, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The largest shard, in bytes of tensors.
const SHARD: u64 = 5_000_000_000;

/// A tensor of the folder, and the parameters that it is made of.
struct Written {
    name: String,
    shape: Vec<usize>,
    part: Part,
    spec: ParamSpec,
}

/// Writes `config.json`, `generation_config.json` and the weights, rounded to `dtype`; above 5 GB in shards with an index.
/// `weights` gives a whole parameter, row-major; it is asked for each of them once, or again in the next shard where its tensors lie in
/// several, and one is in memory at a time. Files are complete when their names appear.
///
/// # Errors
/// A folder that cannot be written, weights that the caller cannot give or of another size.
pub fn export(
    folder: &Path,
    architecture: &Architecture,
    dtype: Dtype,
    weights: impl FnMut(&ParamSpec) -> Result<Vec<f32>, Box<dyn std::error::Error + Send + Sync>>,
) -> Result<(), Error> {
    export_with(folder, architecture, dtype, &BTreeMap::new(), weights)
}

/// As [`export`], with texts by name in the metadata of each file of weights, beside the `format` that `transformers` looks for. Programs that do
/// not know them pass over them; [`Pretrained::metadata`](super::Pretrained::metadata) gives them back.
///
/// # Errors
/// As [`export`].
pub fn export_with(
    folder: &Path,
    architecture: &Architecture,
    dtype: Dtype,
    metadata: &BTreeMap<String, String>,
    mut weights: impl FnMut(&ParamSpec) -> Result<Vec<f32>, Box<dyn std::error::Error + Send + Sync>>,
) -> Result<(), Error> {
    std::fs::create_dir_all(folder).map_err(|source| Error::File { path: folder.to_owned(), source })?;
    let mut tensors = Vec::new();
    for spec in architecture.parameters()? {
        for part in layout::parts(architecture, &spec.name, spec.dims) {
            let name = match &*part.tensor {
                "lm_head.weight" => part.tensor.clone(),
                tensor => format!("{}{tensor}", layout::prefix(architecture)),
            };
            tensors.push(Written { name, shape: part.shape.clone(), part, spec: spec.clone() });
        }
    }
    let bytes = |tensor: &Written| (tensor.shape.iter().product::<usize>() * dtype.bytes()) as u64;
    let mut shards: Vec<(u64, Vec<Written>)> = Vec::new();
    for tensor in tensors {
        let size = bytes(&tensor);
        match shards.last_mut().filter(|(held, _)| held + size <= SHARD) {
            Some((held, shard)) => {
                *held += size;
                shard.push(tensor);
            }
            None => shards.push((size, vec![tensor])),
        }
    }
    let (total, count) = (shards.iter().map(|(size, _)| size).sum::<u64>(), shards.len());
    let mut weight_map = BTreeMap::new();
    for (number, (_, shard)) in shards.iter().enumerate() {
        let name = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), name.clone())));
        write_shard(&folder.join(name), shard, (dtype, metadata), &mut weights)?;
    }
    if count > 1 {
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_json(&folder.join("model.safetensors.index.json"), &index)?;
    }
    write_json(&folder.join("generation_config.json"), &json!({"_from_model_config": true}))?;
    write_json(&folder.join("config.json"), &config::write(architecture, dtype.torch_name()))
}

fn write_shard(
    path: &Path,
    tensors: &[Written],
    (dtype, metadata): (Dtype, &BTreeMap<String, String>),
    weights: &mut impl FnMut(&ParamSpec) -> Result<Vec<f32>, Box<dyn std::error::Error + Send + Sync>>,
) -> Result<(), Error> {
    let (mut header, mut at) = (Map::new(), 0);
    let mut texts = metadata.clone();
    texts.insert("format".to_owned(), "pt".to_owned());
    header.insert("__metadata__".to_owned(), json!(texts));
    for Written { name, shape, .. } in tensors {
        let end = at + shape.iter().product::<usize>() * dtype.bytes();
        header.insert(name.clone(), json!({"dtype": dtype.header_name(), "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    into_place(path, |file| {
        let failed = |source| Error::File { path: path.to_owned(), source };
        file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
        file.write_all(&header).map_err(failed)?;
        // The tensors of a parameter follow each other.
        for tensors in tensors.chunk_by(|one, next| one.spec.name == next.spec.name) {
            let spec = &tensors[0].spec;
            let given = |source| Error::Weights { name: spec.name.clone(), source };
            let values = weights(spec).map_err(given)?;
            if values.len() != spec.dims.count() {
                let problem = format!("{} elements, and there are {}", values.len(), spec.dims.count());
                return Err(given(problem.into()));
            }
            for Written { part, shape, .. } in tensors {
                let mut bytes = Vec::new();
                dtype.encode(&gather(part, &spec.dims, shape.iter().product(), &values), &mut bytes);
                file.write_all(&bytes).map_err(failed)?;
            }
        }
        Ok(())
    })
}

/// The elements of one tensor, in its order.
fn gather(part: &Part, dims: &[usize], count: usize, values: &[f32]) -> Vec<f32> {
    let whole: Vec<_> = dims.iter().map(|&extent| 0..extent).collect();
    let ranges = part.within(&whole);
    let mut tensor = vec![0.0; count];
    for number in 0..ranges.iter().map(ExactSizeIterator::len).product() {
        let (mut rest, mut place, mut element, mut step) = (number, 0, 0, 1);
        for dim in (0..dims.len()).rev() {
            let index = ranges[dim].start + rest % ranges[dim].len();
            rest /= ranges[dim].len();
            place += index * part.strides[dim];
            element += index * step;
            step *= dims[dim];
        }
        tensor[place] = values[element];
    }
    tensor
}

fn write_json(path: &Path, value: &serde_json::Value) -> Result<(), Error> {
    into_place(path, |file| {
        let written = writeln!(file, "{value:#}");
        written.map_err(|source| Error::File { path: path.to_owned(), source })
    })
}

/// Writes a file under another name, and gives it its own once it is complete.
fn into_place(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> Result<(), Error>) -> Result<(), Error> {
    let failed = |source| Error::File { path: path.to_owned(), source };
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(".part");
    let unfinished = PathBuf::from(unfinished);
    let mut file = BufWriter::new(File::create(&unfinished).map_err(failed)?);
    write(&mut file)?;
    let file = file.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)?;
    std::fs::rename(&unfinished, path).map_err(failed)
}
