//! The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names: read slice by slice.

use super::Error;
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

    /// Its name in `config.json`.
    pub(super) fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// Its name in a header.
    pub(super) fn header_name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
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
    /// `None` for a type that weights do not have.
    pub(super) dtype: Option<Dtype>,
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

/// A header is refused above this: the format's own limit.
const MAX_HEADER: u64 = 100_000_000;

impl Tensors {
    /// Opens the files of a folder, and reads their headers.
    pub(super) fn open(folder: &Path) -> Result<Self, Error> {
        let index = folder.join("model.safetensors.index.json");
        let names: BTreeSet<String> = match index.exists() {
            false => ["model.safetensors".to_owned()].into(),
            true => {
                #[derive(Deserialize)]
                struct Index {
                    weight_map: BTreeMap<String, String>,
                }
                let text = std::fs::read(&index).map_err(|source| Error::File { path: index.clone(), source })?;
                let parsed: Index = serde_json::from_slice(&text)
                    .map_err(|error| Error::Format { path: index.clone(), problem: error.to_string() })?;
                parsed.weight_map.into_values().collect()
            }
        };
        let (files, by_name, metadata) = Default::default();
        let mut tensors = Self { files, by_name, metadata, bytes_read: AtomicU64::new(0) };
        for name in names {
            // A name in an index must not lead out of the folder.
            let path = folder.join(&name);
            if Path::new(&name).components().count() != 1 {
                return Err(Error::Format {
                    path: index,
                    problem: format!("{name:?} is not the name of a file beside it"),
                });
            }
            tensors.add(path)?;
        }
        Ok(tensors)
    }

    fn add(&mut self, path: PathBuf) -> Result<(), Error> {
        let refuse = |problem: String| Err(Error::Format { path: path.clone(), problem });
        let failed = |source| Error::File { path: path.clone(), source };
        let mut file = File::open(&path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(failed)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length.saturating_add(8) > size {
            return refuse(format!("its header has {length} bytes, in a file of {size}"));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(failed)?;
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
            let dtype = [Dtype::F32, Dtype::Bf16, Dtype::F16].into_iter().find(|known| known.header_name() == dtype);
            let count = shape.iter().try_fold(1_u64, |count, &extent| count.checked_mul(extent as u64));
            let bytes = dtype.and_then(|dtype| count?.checked_mul(dtype.bytes() as u64));
            let inside = from <= to && to.checked_add(8 + length).is_some_and(|end| end <= size);
            if !inside || dtype.is_some() && bytes != Some(to - from) {
                return refuse(format!("{name} of {shape:?} lies in bytes {from}..{to} of {}", size - 8 - length));
            }
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

    /// The texts beside the tensors.
    pub(super) fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Bytes of weights read so far; headers are not counted.
    pub(super) fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Reads neighbouring elements of a tensor. `bytes` is memory to use again.
    pub(super) fn read(
        &self,
        tensor: &Tensor,
        elements: Range<usize>,
        bytes: &mut Vec<u8>,
        out: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let dtype = tensor.dtype.unwrap_or(Dtype::F32);
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
