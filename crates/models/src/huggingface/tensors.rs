//! The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names: read slice by slice.

use super::{Error, content};
use half::{bf16, f16};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// The element types of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// 16 bits, the upper half of f32.
    Bf16,
    /// 16 bits, IEEE 754 half precision.
    F16,
}

impl Dtype {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Its name in `config.json`.
    pub(super) fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// Its name in a header.
    pub(super) fn header_name(self) -> String {
        self.name().to_uppercase()
    }

    /// Whether a value is a number in this type.
    pub(super) fn holds(self, value: f32) -> bool {
        match self {
            Self::F32 => value.is_finite(),
            Self::Bf16 => bf16::from_f32(value).is_finite(),
            Self::F16 => f16::from_f32(value).is_finite(),
        }
    }

    fn decode(self, bytes: &[u8], out: &mut Vec<f32>) {
        out.clear();
        match self {
            Self::F32 => out.extend(bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes))),
            Self::Bf16 => out.extend(bytes.as_chunks().0.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32())),
            Self::F16 => out.extend(bytes.as_chunks().0.iter().map(|&bytes| f16::from_le_bytes(bytes).to_f32())),
        }
    }

    /// Appends values, rounded to this type.
    pub(super) fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            Self::F32 => values.iter().for_each(|value| out.extend(value.to_le_bytes())),
            Self::Bf16 => values.iter().for_each(|&value| out.extend(bf16::from_f32(value).to_le_bytes())),
            Self::F16 => values.iter().for_each(|&value| out.extend(f16::from_f32(value).to_le_bytes())),
        }
    }
}

/// One tensor in a file.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    file: usize,
    /// Its type, or the name of a type that weights do not have.
    pub(super) dtype: Result<Dtype, String>,
    pub(super) shape: Vec<usize>,
    /// Its first byte in the file.
    start: u64,
}

/// The files of a folder, open for reading.
#[derive(Debug)]
pub(super) struct Tensors {
    files: Vec<(PathBuf, Mutex<File>)>,
    by_name: BTreeMap<String, Tensor>,
    metadata: BTreeMap<String, String>,
    bytes_read: AtomicU64,
}

/// An entry of a header.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// Elements of a tensor that are hashed at once.
const CHUNK: usize = 1 << 22;

/// A header is refused above this: the format's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// The file of a model in one file.
const SINGLE: &str = "model.safetensors";
/// The file that names the shards of a larger one.
const INDEX: &str = "model.safetensors.index.json";

/// The files that have the weights of a folder: as in `transformers`, [`SINGLE`] before the shards that [`INDEX`]
/// names.
///
/// Other programs read the shards first. So a folder that has both is refused: whichever was meant, some program reads
/// the other without a word.
fn files_of(folder: &Path) -> Result<BTreeSet<String>, Error> {
    let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
    let refuse = |path: &Path, problem: String| Err(Error::Format { path: path.to_owned(), problem });
    if content::is_there(&single) {
        // An index that cannot be read, or whose shards are gone, is nothing that another program could read.
        let shards = if content::is_there(&index) { shards_of(&index).unwrap_or_default() } else { BTreeSet::new() };
        let other = shards.iter().find(|name| *name != SINGLE && content::is_there(&folder.join(name)));
        return match other {
            None => Ok([SINGLE.to_owned()].into()),
            Some(other) => refuse(
                &single,
                format!(
                    "lies beside {other} and other shards that {INDEX} names: these are two sets of weights, of which some programs read one \
                     and some the other; remove {SINGLE}, or {INDEX} with its shards"
                ),
            ),
        };
    }
    if !content::is_there(&index) {
        return Err(content::no_weights(folder));
    }
    let shards = shards_of(&index)?;
    // A name in an index must not lead out of the folder.
    if let Some(name) = shards.iter().find(|name| Path::new(name).components().count() != 1) {
        return refuse(&index, format!("{name:?} is not the name of a file beside it"));
    }
    let missing: Vec<&str> =
        shards.iter().filter(|name| !content::is_there(&folder.join(name))).map(|name| &**name).collect();
    match (&*missing, shards.len()) {
        (_, 0) => refuse(&index, "names no shards".to_owned()),
        ([], _) => Ok(shards),
        (missing, count) => {
            refuse(&index, format!("of its {count} shards {} missing: {}", one_or_more(missing), listed(missing)))
        }
    }
}

fn one_or_more(of: &[&str]) -> &'static str {
    if of.len() == 1 { "one is" } else { "some are" }
}

/// Names, the first of them if they are many.
pub(super) fn listed<T: AsRef<str>>(names: &[T]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<&str> = names.iter().take(SHOWN).map(AsRef::as_ref).collect();
    let more = names.len().saturating_sub(SHOWN);
    if more > 0 { format!("{} and {more} more", shown.join("; ")) } else { shown.join("; ") }
}

fn shards_of(index: &Path) -> Result<BTreeSet<String>, Error> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let parsed: Index = serde_json::from_value(content::json(index)?)
        .map_err(|error| Error::Format { path: index.to_owned(), problem: error.to_string() })?;
    Ok(parsed.weight_map.into_values().collect())
}

impl Tensors {
    fn none() -> Self {
        let (files, by_name, metadata) = Default::default();
        Self { files, by_name, metadata, bytes_read: AtomicU64::new(0) }
    }

    /// Opens one file, and reads its header.
    pub(super) fn open_file(path: PathBuf) -> Result<Self, Error> {
        let mut tensors = Self::none();
        tensors.add(path)?;
        Ok(tensors)
    }

    /// Opens the files of a folder, and reads their headers.
    pub(super) fn open(folder: &Path) -> Result<Self, Error> {
        let mut tensors = Self::none();
        let opened = files_of(folder)?.into_iter().filter_map(|name| tensors.add(folder.join(name)).err());
        if let Some(error) = Error::all(opened.collect()) { Err(error) } else { Ok(tensors) }
    }

    fn add(&mut self, path: PathBuf) -> Result<(), Error> {
        let refuse = |problem: String| Err(Error::Format { path: path.clone(), problem });
        let failed = |source| Error::File { path: path.clone(), source };
        let mut file = File::open(&path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        let mut first = Vec::new();
        Read::by_ref(&mut file).take(64).read_to_end(&mut first).map_err(failed)?;
        if let Some(what) = content::foreign(&first) {
            return refuse(format!("is {what}"));
        }
        let Some(&length) = first.first_chunk() else {
            return refuse(format!("has {size} bytes: it is cut short, or was not downloaded whole"));
        };
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length.saturating_add(8) > size {
            let problem = "it is cut short, or no file of safetensors";
            return refuse(format!("its header has {length} bytes, in a file of {size}: {problem}"));
        }
        let mut header = vec![0; length as usize];
        file.seek(SeekFrom::Start(8)).and_then(|_| file.read_exact(&mut header)).map_err(failed)?;
        let entries: BTreeMap<String, serde_json::Value> = match serde_json::from_slice(&header) {
            Ok(entries) => entries,
            Err(error) => return refuse(format!("its header is not JSON: {error}")),
        };
        for (name, value) in entries {
            if name == "__metadata__" {
                let texts = value.as_object().into_iter().flatten();
                let texts = texts.filter_map(|(name, text)| Some((name.clone(), text.as_str()?.to_owned())));
                self.metadata.extend(texts);
                continue;
            }
            let Entry { dtype, shape, data_offsets: [from, to] } = match serde_json::from_value(value) {
                Ok(entry) => entry,
                Err(error) => return refuse(format!("the entry of {name}: {error}")),
            };
            let known = [Dtype::F32, Dtype::Bf16, Dtype::F16].into_iter().find(|known| known.header_name() == dtype);
            let count = shape.iter().try_fold(1_u64, |count, &extent| count.checked_mul(extent as u64));
            let bytes = known.and_then(|dtype| count?.checked_mul(dtype.bytes() as u64));
            let inside = from <= to && to.checked_add(8 + length).is_some_and(|end| end <= size);
            if !inside || known.is_some() && bytes != Some(to - from) {
                let cut = if from <= to && to > size - 8 - length { ": the file is cut short" } else { "" };
                return refuse(format!("{name} of {shape:?} lies in bytes {from}..{to} of {}{cut}", size - 8 - length));
            }
            let dtype = known.ok_or(dtype);
            let tensor = Tensor { file: self.files.len(), dtype, shape, start: 8 + length + from };
            if self.by_name.insert(name.clone(), tensor).is_some() {
                return refuse(format!("{name} lies in another file too"));
            }
        }
        self.files.push((path, Mutex::new(file)));
        Ok(())
    }

    /// The tensor of this name.
    pub(super) fn find(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name)
    }

    /// All names.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(|name| &**name)
    }

    /// The type of all tensors of these names, if it is one.
    pub(super) fn dtype(&self, of: impl Fn(&str) -> bool) -> Option<Dtype> {
        let tensors = self.by_name.iter().filter(|(name, _)| of(name));
        let mut dtypes = tensors.map(|(_, tensor)| tensor.dtype.as_ref().ok().copied());
        let first = dtypes.next()??;
        dtypes.all(|dtype| dtype == Some(first)).then_some(first)
    }

    /// The texts beside the tensors.
    pub(super) fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Bytes of weights read so far; headers are not counted.
    pub(super) fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Reads all bytes of a tensor, with its type and extents in front, so many at a time.
    pub(super) fn for_each_chunk(&self, name: &str, mut visit: impl FnMut(&[u8])) -> Result<(), Error> {
        let Some(tensor) = self.by_name.get(name) else { return Ok(()) };
        visit(format!("{:?} {:?}", tensor.dtype, tensor.shape).as_bytes());
        let (count, (mut bytes, mut values)) = (tensor.shape.iter().product::<usize>(), Default::default());
        for start in (0..count).step_by(CHUNK) {
            self.read(tensor, start..count.min(start + CHUNK), &mut bytes, &mut values)?;
            visit(&bytes);
        }
        Ok(())
    }

    /// Reads neighbouring elements of a tensor. `bytes` is memory to use again.
    pub(super) fn read(
        &self,
        tensor: &Tensor,
        elements: Range<usize>,
        bytes: &mut Vec<u8>,
        out: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let dtype = *tensor.dtype.as_ref().unwrap_or(&Dtype::F32);
        let (path, file) = &self.files[tensor.file];
        let failed = |source| Error::File { path: path.clone(), source };
        bytes.resize(elements.len() * dtype.bytes(), 0);
        {
            let mut file = file.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            file.seek(SeekFrom::Start(tensor.start + (elements.start * dtype.bytes()) as u64)).map_err(failed)?;
            file.read_exact(bytes).map_err(failed)?;
        }
        self.bytes_read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        dtype.decode(bytes, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_of_a_large_tensor_are_visited() {
        let bytes: Vec<u8> = (0..2 * (CHUNK + 5)).map(|at| (at % 251) as u8).collect();
        let header = format!(r#"{{"w":{{"dtype":"F16","shape":[{}],"data_offsets":[0,{}]}}}}"#, CHUNK + 5, bytes.len());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SINGLE);
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes].concat()).unwrap();
        let mut chunks = Vec::new();
        Tensors::open_file(path).unwrap().for_each_chunk("w", |chunk| chunks.push(chunk.to_vec())).unwrap();
        assert_eq!(chunks.len(), 3, "the type and extents, and two chunks of elements");
        assert!(chunks[1..].concat() == bytes);
    }
}
