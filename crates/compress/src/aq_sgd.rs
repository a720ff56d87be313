//! Compression of the activations of the same samples over epochs (AQ-SGD; Wang et al. 2022).
//!
//! Sender and receiver keep a buffer m of each sample's activation. In the first epoch the sender sends the activation
//! a uncompressed; later it sends C(a - m). Both add the sent value to m, and the receiver continues with m.

use crate::compressor::Draws;
use crate::{CompressError, Compressor, Fold, Message, Result, Shape, StateKind, StateSpec, Values, wire_bytes};
use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Storage of the buffers of samples.
pub trait Store: Send + Debug {
    /// Fills `values` with the values of a sample; false if it has none yet.
    ///
    /// # Errors
    /// A sample without room, or a failed read.
    fn read(&mut self, sample: usize, values: &mut [f32]) -> Result<bool>;

    /// Stores the values of a sample.
    ///
    /// # Errors
    /// A sample without room, or a failed write.
    fn write(&mut self, sample: usize, values: &[f32]) -> Result<()>;
}

/// Buffers in memory: 4 bytes for each element of each sample seen so far.
#[derive(Debug, Default)]
pub struct MemoryStore(Vec<Vec<f32>>);

impl MemoryStore {
    /// A store for this number of samples. None of them has been seen.
    pub fn new(samples: usize) -> MemoryStore {
        MemoryStore(vec![Vec::new(); samples])
    }
}

impl Store for MemoryStore {
    fn read(&mut self, sample: usize, values: &mut [f32]) -> Result<bool> {
        let samples = self.0.len();
        let kept = self.0.get(sample).ok_or(CompressError::Sample { sample, samples })?;
        if kept.is_empty() {
            return Ok(false);
        }
        crate::error::require_count("the buffer of a sample", kept.len(), values.len())?;
        values.copy_from_slice(kept);
        Ok(true)
    }

    fn write(&mut self, sample: usize, values: &[f32]) -> Result<()> {
        let samples = self.0.len();
        let place = self.0.get_mut(sample).ok_or(CompressError::Sample { sample, samples })?;
        place.clear();
        place.extend_from_slice(values);
        Ok(())
    }
}

/// Buffers in a file, which another run can reuse: the eight bytes `MWAQSGD1`, the numbers of samples and elements
/// (u64), one bit per sample (whether it was seen), then the f32s of each sample; all little-endian.
#[derive(Debug)]
pub struct FileStore {
    file: File,
    path: PathBuf,
    samples: usize,
    len: usize,
    seen: Vec<u8>,
}

const MAGIC: &[u8; 8] = b"MWAQSGD1";
const HEAD: usize = 24;

impl FileStore {
    /// Bytes of the file.
    pub fn bytes(samples: usize, len: usize) -> u64 {
        (HEAD + samples.div_ceil(8)) as u64 + 4 * samples as u64 * len as u64
    }

    /// Opens the file, or creates it, with `samples` buffers of `len` elements each.
    ///
    /// # Errors
    /// A file with another number or length of buffers, a file in another format, or a failed read or write.
    pub fn open(path: impl AsRef<Path>, samples: usize, len: usize) -> Result<FileStore> {
        let path = path.as_ref().to_path_buf();
        let fail = |problem: String| CompressError::File { path: path.display().to_string(), problem };
        let io = |error: std::io::Error| fail(error.to_string());
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
        let mut seen = vec![0; samples.div_ceil(8)];
        let head = [&MAGIC[..], &(samples as u64).to_le_bytes(), &(len as u64).to_le_bytes()].concat();
        let (found, wanted) = (file.metadata().map_err(io)?.len(), FileStore::bytes(samples, len));
        if found == 0 {
            file.set_len(wanted).map_err(io)?;
            file.write_all(&head).map_err(io)?;
        } else {
            let mut old = vec![0; HEAD.min(found as usize)];
            file.read_exact(&mut old).map_err(io)?;
            if old != head || found != wanted {
                return Err(fail(format!(
                    "it holds no activations of {samples} samples of {len} elements ({found} bytes, they take {wanted}); delete it or name another file"
                )));
            }
            file.read_exact(&mut seen).map_err(io)?;
        }
        Ok(FileStore { file, samples, len, seen, path })
    }

    /// Seeks to the values of a sample.
    fn seek(&mut self, sample: usize, count: usize) -> Result<()> {
        crate::error::require_count("the activation of a sample", count, self.len)?;
        if sample >= self.samples {
            return Err(CompressError::Sample { sample, samples: self.samples });
        }
        let start = FileStore::bytes(self.samples, 0) + 4 * sample as u64 * self.len as u64;
        self.file.seek(SeekFrom::Start(start)).map(drop).map_err(|error| self.fail(&error))
    }

    fn fail(&self, error: &std::io::Error) -> CompressError {
        CompressError::File { path: self.path.display().to_string(), problem: error.to_string() }
    }
}

impl Store for FileStore {
    fn read(&mut self, sample: usize, values: &mut [f32]) -> Result<bool> {
        self.seek(sample, values.len())?;
        if self.seen[sample / 8] >> (sample % 8) & 1 == 0 {
            return Ok(false);
        }
        self.file.read_exact(bytemuck::cast_slice_mut(values)).map_err(|error| self.fail(&error))?;
        values.iter_mut().for_each(|value| *value = f32::from_bits(u32::from_le(value.to_bits())));
        Ok(true)
    }

    fn write(&mut self, sample: usize, values: &[f32]) -> Result<()> {
        self.seek(sample, values.len())?;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.file.write_all(&bytes).map_err(|error| self.fail(&error))?;
        let byte = sample / 8;
        if self.seen[byte] >> (sample % 8) & 1 == 0 {
            self.seen[byte] |= 1 << (sample % 8);
            let place = SeekFrom::Start((HEAD + byte) as u64);
            let mark = self.file.seek(place).and_then(|_| self.file.write_all(&[self.seen[byte]]));
            mark.map_err(|error| self.fail(&error))?;
        }
        Ok(())
    }
}

/// One side, sender or receiver, of a link that transfers the activations of samples.
#[derive(Debug)]
pub struct AqSgd {
    compressor: Box<dyn Compressor>,
    shape: Shape,
    store: Box<dyn Store>,
    buffer: Vec<f32>,
}

impl AqSgd {
    /// A link for activations of one shape. Both sides use the same compressor.
    ///
    /// # Errors
    /// A shape that the scheme cannot compress. A scheme that keeps a state (PowerSGD), because each sample would need
    /// its own.
    pub fn new(compressor: Box<dyn Compressor>, shape: Shape, store: Box<dyn Store>) -> Result<AqSgd> {
        compressor.check(shape)?;
        match compressor.warm_len(shape) {
            0 => Ok(AqSgd { compressor, shape, store, buffer: vec![0.0; shape.len()] }),
            _ => Err(CompressError::Feedback {
                feedback: "AQ-SGD".to_owned(),
                scheme: compressor.name(),
                problem: "it needs a scheme without warm start: quant, topk, randk, sign, bf16 or fp8".to_owned(),
            }),
        }
    }

    /// Bytes of the message of a sample: the first one, and each later one.
    pub fn wire_bytes(&self) -> Result<[usize; 2]> {
        Ok([wire_bytes(&Values::F32, self.shape)?, wire_bytes(&*self.compressor, self.shape)?])
    }

    /// The buffers as a state for checkpoints.
    pub fn state(&self, name: &str, samples: usize) -> StateSpec {
        let dims = vec![samples, self.shape.rows(), self.shape.cols()];
        let slice = dims.iter().map(|&dim| 0..dim).collect();
        StateSpec { name: format!("{name}.activations"), dims, slice, kind: StateKind::Replicated }
    }

    /// Sends the activation of a sample. Both sides' buffers then equal the result of [`receive`](Self::receive).
    ///
    /// # Errors
    /// An activation of another shape, or a failure of the store.
    pub fn send(&mut self, sample: usize, activation: &[f32], draws: Draws) -> Result<Message> {
        crate::error::require_count("the activation", activation.len(), self.shape.len())?;
        let seen = self.store.read(sample, &mut self.buffer)?;
        let message = if seen {
            let change: Vec<f32> = activation.iter().zip(&self.buffer).map(|(a, m)| a - m).collect();
            Message::compress(&*self.compressor, &change, self.shape, draws, &mut [])?
        } else {
            Message::compress(&Values::F32, activation, self.shape, draws, &mut [])?
        };
        self.update(sample, seen, &message)?;
        Ok(message)
    }

    /// Receives the activation of a sample: its buffer.
    ///
    /// # Errors
    /// A message of another scheme or shape (also where only one side has seen the sample), or a failure of the store.
    pub fn receive(&mut self, sample: usize, message: &Message) -> Result<&[f32]> {
        let seen = self.store.read(sample, &mut self.buffer)?;
        self.update(sample, seen, message)?;
        Ok(&self.buffer)
    }

    fn update(&mut self, sample: usize, seen: bool, message: &Message) -> Result<()> {
        match seen {
            true => message.restore(&*self.compressor, self.shape, Fold::Add, &mut self.buffer)?,
            false => message.restore(&Values::F32, self.shape, Fold::Replace, &mut self.buffer)?,
        }
        self.store.write(sample, &self.buffer)
    }
}
