//! Verifies that files are as written. The work is a list of units, which ranks can share.

use crate::index::StoredTensor;
use crate::{Checkpoint, Damage, Slice, Unread, Unreadable, piece_file};

/// A unit of verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// The header of a file.
    Header {
        /// Its index in `Index::files`.
        file: usize,
    },
    /// A piece.
    Piece {
        /// The index of the tensor.
        tensor: usize,
        /// The index of the piece in its tensor.
        piece: usize,
    },
}

impl Checkpoint {
    /// All units: together they cover all bytes of all files.
    pub fn units(&self) -> Vec<Unit> {
        let headers = (0..self.index().files.len()).map(|file| Unit::Header { file });
        headers.chain(self.piece_units(|_, _| true)).collect()
    }

    /// The units that remain to be verified if these slices are read, by any rank: the headers, and the pieces that no
    /// slice covers completely. The reads verify the others.
    pub fn units_not_read_whole<'a>(&self, slices: impl IntoIterator<Item = (&'a str, &'a Slice)>) -> Vec<Unit> {
        let mut read: std::collections::BTreeMap<&str, Vec<&Slice>> = std::collections::BTreeMap::new();
        for (name, slice) in slices {
            read.entry(name).or_default().push(slice);
        }
        let partly = |of: &StoredTensor, piece: usize| {
            let slices = read.get(&*of.tensor.name).into_iter().flatten();
            !slices.into_iter().any(|slice| slice.contains(&of.pieces[piece].slice))
        };
        let headers = (0..self.index().files.len()).map(|file| Unit::Header { file });
        headers.chain(self.piece_units(partly)).collect()
    }

    fn piece_units(&self, take: impl Fn(&StoredTensor, usize) -> bool) -> Vec<Unit> {
        let tensors = self.index().tensors.iter().enumerate();
        let units = tensors.flat_map(|(tensor, of)| (0..of.pieces.len()).map(move |piece| (tensor, of, piece)));
        units
            .filter(|(_, of, piece)| take(of, *piece))
            .map(|(tensor, _, piece)| Unit::Piece { tensor, piece })
            .collect()
    }

    /// Verifies these units and returns the damage.
    ///
    /// # Errors
    /// A file that cannot be read now.
    pub fn verify(&self, units: &[Unit]) -> Result<Vec<Damage>, Unreadable> {
        let mut damage = Vec::new();
        for &unit in units {
            match self.verify_one(unit) {
                Ok(()) => {}
                Err(Unread::Damage(found)) => damage.push(found),
                Err(Unread::Unreadable(error)) => return Err(error),
            }
        }
        Ok(damage)
    }

    fn verify_one(&self, unit: Unit) -> Result<(), Unread> {
        match unit {
            Unit::Header { file } => {
                let of = &self.index().files[file];
                if self.file_checksum(file, (0, of.header_bytes))? == of.header_checksum {
                    return Ok(());
                }
                let header = self.file_bytes(file, (0, of.header_bytes))?;
                // A header of another length is read as far as the file goes, to describe whose it is.
                let length = header.first_chunk::<8>().map_or(0, |length| u64::from_le_bytes(*length));
                let end = length.saturating_add(8).min(of.bytes);
                let problem = piece_file::describe(&self.file_bytes(file, (0, end))?);
                Err(Damage::Header { path: self.file_path(file), problem }.into())
            }
            Unit::Piece { tensor, piece } => {
                let StoredTensor { tensor, pieces } = &self.index().tensors[tensor];
                let piece = &pieces[piece];
                Ok(self.require_written(tensor, piece, self.file_checksum(piece.file, piece.bytes)?)?)
            }
        }
    }

    fn unit_bytes(&self, unit: Unit) -> u64 {
        match unit {
            Unit::Header { file } => self.index().files[file].header_bytes,
            Unit::Piece { tensor, piece } => {
                let (start, end) = self.index().tensors[tensor].pieces[piece].bytes;
                end - start
            }
        }
    }
}

/// The units that one of `ranks` ranks verifies; the ranks share the units by bytes.
pub fn share(checkpoint: &Checkpoint, units: &[Unit], rank: usize, ranks: usize) -> Vec<Unit> {
    let total: u64 = units.iter().map(|&unit| checkpoint.unit_bytes(unit)).sum();
    let mut before = 0;
    let mut taken = Vec::new();
    for &unit in units {
        let bytes = checkpoint.unit_bytes(unit);
        // A unit goes to the rank whose part of all bytes contains the unit's middle.
        let middle = u128::from(before + bytes / 2);
        if middle * ranks as u128 / u128::from(total.max(1)) == rank as u128 {
            taken.push(unit);
        }
        before += bytes;
    }
    taken
}
