//! Tokens by position: in memory, or in a file of which only the bytes of a sample are read.

use super::prelude::*;

/// The type of an id in a file, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    I64,
}

impl Width {
    /// Bytes of an id.
    pub fn bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Appends the ids in `bytes` to `to`.
    fn decode(self, bytes: &[u8], to: &mut Vec<i64>) {
        match self {
            Self::U8 => to.extend(bytes.iter().map(|&id| i64::from(id))),
            Self::I8 => to.extend(bytes.iter().map(|&id| i64::from(id as i8))),
            Self::U16 => to.extend(bytes.as_chunks().0.iter().map(|&id| i64::from(u16::from_le_bytes(id)))),
            Self::I16 => to.extend(bytes.as_chunks().0.iter().map(|&id| i64::from(i16::from_le_bytes(id)))),
            Self::U32 => to.extend(bytes.as_chunks().0.iter().map(|&id| i64::from(u32::from_le_bytes(id)))),
            Self::I32 => to.extend(bytes.as_chunks().0.iter().map(|&id| i64::from(i32::from_le_bytes(id)))),
            Self::I64 => to.extend(bytes.as_chunks().0.iter().map(|&id| i64::from_le_bytes(id))),
        }
    }
}

/// A file that is read by position, from any thread. Nothing of it is kept.
#[derive(Clone, Debug)]
pub(crate) struct Positioned {
    file: Arc<File>,
    path: Arc<PathBuf>,
    bytes: u64,
}

impl Positioned {
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let open = || {
            let file = File::open(path)?;
            let bytes = file.metadata()?.len();
            Ok((file, bytes))
        };
        let (file, bytes) = open().map_err(|error| Problem::Unreadable(error).in_file(path))?;
        Ok(Self { file: Arc::new(file), path: Arc::new(path.to_path_buf()), bytes })
    }

    /// Bytes of the file when it was opened.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fills `to` with the bytes from `at` on.
    pub fn read(&self, at: u64, to: &mut [u8]) -> Result<(), DataError> {
        read_exact_at(&self.file, to, at).map_err(|error| Problem::Read { at, error }.in_file(&self.path))
    }

    /// The `N` bytes from `at` on.
    pub fn array<const N: usize>(&self, at: u64) -> Result<[u8; N], DataError> {
        let mut bytes = [0; N];
        self.read(at, &mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, to: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, to, at)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut to: &mut [u8], mut at: u64) -> io::Result<()> {
    while !to.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, to, at)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => (to, at) = (&mut to[read..], at + read as u64),
        }
    }
    Ok(())
}

/// A stream of tokens.
#[derive(Clone, Debug)]
pub(crate) enum Tokens {
    Memory(Arc<[i32]>),
    File {
        file: Positioned,
        /// The first byte of the ids.
        start: u64,
        count: u64,
        width: Width,
    },
}

/// A stream of at most this many tokens is hashed, and checked against the vocabulary, as a whole.
pub(crate) const WHOLE: u64 = 1 << 24;
/// Of a longer one, this many blocks of this many tokens, spread evenly, the first and the last among them.
const BLOCKS: u64 = 1024;
const BLOCK: u64 = 4096;

impl Tokens {
    pub fn len(&self) -> u64 {
        match self {
            Self::Memory(tokens) => tokens.len() as u64,
            Self::File { count, .. } => *count,
        }
    }

    /// The tokens of a range that lies inside.
    pub fn read(&self, range: Range<u64>) -> Result<Vec<i32>, DataError> {
        let (file, start, width) = match self {
            Self::Memory(tokens) => return Ok(tokens[range.start as usize..range.end as usize].to_vec()),
            Self::File { file, start, width, .. } => (file, start, width),
        };
        let count = (range.end - range.start) as usize;
        let mut bytes = vec![0; count * width.bytes() as usize];
        file.read(start + range.start * width.bytes(), &mut bytes)?;
        let mut ids = Vec::with_capacity(count);
        width.decode(&bytes, &mut ids);
        let id = |(at, &id): (usize, &i64)| match i32::try_from(id) {
            Ok(id) if id >= 0 => Ok(id),
            _ => Err(Problem::Id { at: range.start + at as u64, id }.in_file(file.path())),
        };
        ids.iter().enumerate().map(id).collect()
    }

    /// Gives the blocks of tokens by which a stream is recognised, each with its place: all of them in a stream of at
    /// most [`WHOLE`] tokens.
    pub fn sample(&self, mut see: impl FnMut(u64, &[i32])) -> Result<(), DataError> {
        let len = self.len();
        let place = |block: u64| match len {
            ..=WHOLE => block * BLOCK,
            _ => (u128::from(len - BLOCK) * u128::from(block) / u128::from(BLOCKS - 1)) as u64,
        };
        let blocks = if len <= WHOLE { len.div_ceil(BLOCK) } else { BLOCKS };
        for start in (0..blocks).map(place) {
            see(start, &self.read(start..len.min(start + BLOCK))?);
        }
        Ok(())
    }

    /// FNV-1a of 64 bits over the sampled ids as little-endian i32, after the number of tokens if these are not all of
    /// them.
    pub fn hash(&self) -> Result<u64, DataError> {
        let mut hash = Fnv::default();
        if self.len() > WHOLE {
            hash.add(&self.len().to_le_bytes());
        }
        self.sample(|_, ids| ids.iter().for_each(|id| hash.add(&id.to_le_bytes())))?;
        Ok(hash.0)
    }
}

pub(crate) struct Fnv(pub u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    pub fn add(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    }
}
