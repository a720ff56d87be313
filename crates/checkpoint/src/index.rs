//! The index of a checkpoint: one JSON file with its contents and their places.
//!
//! ```text
//! {"checksum":"0f5e..","format":1,"step":10,"metadata":{..},
//!  "files":[{"name":"rank-00000.safetensors","bytes":4096,"header_bytes":512,"header_checksum":".."},..],
//!  "tensors":[{"name":"wte.weight","kind":"weight","dtype":"F32","dims":[61,32],
//!              "pieces":[{"slice":[[0,61],[0,32]],"file":0,"bytes":[512,8320],"checksum":".."},..]},..]}
//! ```
//! The checksum at its head counts all bytes that follow its comma.

use crate::piece_file::{file_name, header};
use crate::{Checksum, Damage, FORMAT, SavePlan, Slice, Tensor, Unread, Unreadable};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Component, Path};

pub(crate) const FILE: &str = "index.json";

/// The contents of a checkpoint, and their places.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    /// The version of the format.
    pub format: u32,
    /// The step after which it was saved.
    pub step: u64,
    /// The caller's notes beside the tensors.
    pub metadata: Value,
    /// The files.
    pub files: Vec<File>,
    /// The tensors.
    pub tensors: Vec<StoredTensor>,
}

/// A file of a checkpoint, in the format safetensors: a header, then the pieces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// Its name in the folder.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// The bytes of its header, length included.
    pub header_bytes: u64,
    /// The checksum of the header.
    pub header_checksum: Checksum,
}

/// A tensor with its pieces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredTensor {
    /// The tensor as a whole.
    #[serde(flatten)]
    pub tensor: Tensor,
    /// Its slices: disjoint, and together the whole tensor.
    pub pieces: Vec<StoredPiece>,
}

/// A slice of a tensor, and its bytes: row-major, without padding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredPiece {
    /// The slice.
    pub slice: Slice,
    /// The index of its file in `Index::files`.
    pub file: usize,
    /// First byte in the file, and the byte after the last.
    pub bytes: (u64, u64),
    /// The checksum of the bytes.
    pub checksum: Checksum,
}

const HEAD: &[u8] = b"{\"checksum\":\"";
const NECK: &[u8] = b"\",";
const DIGITS: usize = 16;

/// The message of a rank to the others when its file is on disk.
#[derive(Serialize, Deserialize)]
pub(crate) struct Written {
    pub header_bytes: u64,
    pub header_checksum: Checksum,
    /// The checksum of each piece, in the order of the file.
    pub checksums: Vec<Checksum>,
}

impl SavePlan {
    /// The bytes of all files of a checkpoint of this plan, with such `metadata`: its room on a disk.
    pub fn file_bytes(&self, metadata: &Value) -> u64 {
        let nothing = Checksum::hash(&[]);
        let written = |rank| Written {
            header_bytes: header(self, rank, u64::MAX).len() as u64,
            header_checksum: nothing,
            checksums: vec![nothing; self.pieces(rank).len()],
        };
        let index = Index::new(self, u64::MAX, metadata.clone(), (0..self.world()).map(written));
        let files: u64 = index.files.iter().map(|file| file.bytes).sum();
        files + index.encode().map_or(0, |text| text.len() as u64)
    }
}

impl Index {
    /// The index of a checkpoint, once every rank has written its file.
    pub(crate) fn new(plan: &SavePlan, step: u64, metadata: Value, written: impl IntoIterator<Item = Written>) -> Self {
        let mut files = Vec::new();
        let tensors = plan.tensors().iter();
        let mut tensors: Vec<_> =
            tensors.map(|tensor| StoredTensor { tensor: tensor.clone(), pieces: Vec::new() }).collect();
        for (rank, Written { header_bytes, header_checksum, checksums }) in written.into_iter().enumerate() {
            for (piece, checksum) in plan.pieces(rank).iter().zip(checksums) {
                let bytes = (header_bytes + piece.bytes.start, header_bytes + piece.bytes.end);
                let stored = StoredPiece { slice: piece.slice.clone(), file: rank, bytes, checksum };
                tensors[piece.tensor].pieces.push(stored);
            }
            let bytes = header_bytes + plan.bytes(rank);
            files.push(File { name: file_name(rank), bytes, header_bytes, header_checksum });
        }
        tensors.iter_mut().for_each(|of| of.pieces.sort_by(|a, b| a.slice.cmp(&b.slice)));
        Self { format: FORMAT, step, metadata, files, tensors }
    }

    pub(crate) fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let mut body = serde_json::to_vec(self)?;
        body.push(b'\n');
        let body = &body[1..];
        Ok([HEAD, Checksum::hash(body).to_string().as_bytes(), NECK, body].concat())
    }

    /// Reads the bytes of the file at `path`.
    pub(crate) fn decode(path: &Path, bytes: &[u8]) -> Result<Self, Unread> {
        match Self::decode_sound(bytes) {
            Ok(Ok(index)) => Ok(index),
            Ok(Err(found)) => Err(Unreadable::Format { path: path.to_path_buf(), found }.into()),
            Err(problem) => Err(Damage::Index { path: path.to_path_buf(), problem }.into()),
        }
    }

    /// The index, or the version of an unknown format. The error describes the fault of the bytes.
    fn decode_sound(bytes: &[u8]) -> Result<Result<Self, u64>, String> {
        /// The one field that every version of the format has.
        #[derive(Deserialize)]
        struct Version {
            format: u64,
        }

        let head = HEAD.len() + DIGITS + NECK.len();
        let Some((head, body)) = bytes.split_at_checked(head) else { return Err("it ends in its checksum".to_owned()) };
        let digits = head.strip_prefix(HEAD).and_then(|rest| rest.strip_suffix(NECK));
        let stated = digits.and_then(|digits| Checksum::parse(std::str::from_utf8(digits).ok()?));
        let Some(stated) = stated else { return Err("it does not begin with a checksum".to_owned()) };
        let found = Checksum::hash(body);
        if stated != found {
            return Err(format!("its checksum is {found}, and it says {stated}"));
        }
        let text = [b"{", body].concat();
        let problem = |error: serde_json::Error| error.to_string();
        match serde_json::from_slice::<Version>(&text).map_err(problem)?.format {
            format if format == u64::from(FORMAT) => {}
            format => return Ok(Err(format)),
        }
        let index: Self = serde_json::from_slice(&text).map_err(problem)?;
        index.require_sound()?;
        Ok(Ok(index))
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.iter().find(|stored| stored.tensor.name == name)
    }

    /// The total bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().filter_map(|stored| stored.tensor.size()).map(|(_, bytes)| bytes).sum()
    }

    /// Checks that every element of every tensor, and every byte of every file, lies in exactly one piece.
    fn require_sound(&self) -> Result<(), String> {
        let mut names = BTreeSet::new();
        for File { name, bytes, header_bytes, .. } in &self.files {
            let plain = Path::new(name).components().eq([Component::Normal(name.as_ref())]);
            if !plain || name == FILE || !names.insert(name) {
                return Err(format!("{name:?} is no name of one file in its folder"));
            }
            if header_bytes > bytes {
                return Err(format!("{name} has {bytes} bytes, and a header of {header_bytes}"));
            }
        }
        let (mut names, mut ranges) = (BTreeSet::new(), vec![Vec::new(); self.files.len()]);
        for StoredTensor { tensor, pieces } in &self.tensors {
            let (name, dims) = (&tensor.name, &tensor.dims);
            if !names.insert(name) {
                return Err(format!("two tensors are called {name}"));
            }
            let Some((elements, _)) = tensor.size() else {
                return Err(format!("{name} {dims:?} has more bytes than can be counted"));
            };
            let mut held = 0u64;
            for (at, StoredPiece { slice, file, bytes: (start, end), .. }) in pieces.iter().enumerate() {
                let fits = slice.fits(dims) && slice.elements() > 0;
                let sized = end.checked_sub(*start) == slice.elements().checked_mul(tensor.dtype.size());
                let (true, true, Some(of_file)) = (fits, sized, ranges.get_mut(*file)) else {
                    return Err(format!("{name} {dims:?} has slice {slice} at bytes {start} to {end} of file {file}"));
                };
                if let Some(other) = pieces[..at].iter().find(|other| other.slice.overlap(slice).is_some()) {
                    return Err(format!("{name} has the slices {} and {slice}, which overlap", other.slice));
                }
                of_file.push((*start, *end));
                held += slice.elements(); // at most `elements`, because slices are disjoint
            }
            if held != elements {
                return Err(format!("the pieces of {name} {dims:?} have {held} elements"));
            }
        }
        for (file, ranges) in self.files.iter().zip(&mut ranges) {
            ranges.sort_unstable();
            let end = ranges.iter().try_fold(file.header_bytes, |end, &(from, to)| (from == end).then_some(to));
            if end != Some(file.bytes) {
                return Err(format!("the pieces of {} do not follow each other from its header to its end", file.name));
            }
        }
        Ok(())
    }
}
