//! A text summary of a checkpoint.

use crate::index::StoredTensor;
use crate::{Checkpoint, Damage, Unreadable};
use std::fmt;

/// The contents of a checkpoint, and whether they are intact. Displays as a page of text.
#[derive(Debug)]
pub struct Summary<'a> {
    checkpoint: &'a Checkpoint,
    /// The number of pieces and headers that were verified.
    pub verified: usize,
    /// The damage that was found.
    pub damage: Vec<Damage>,
}

impl<'a> Summary<'a> {
    /// Reads and verifies a whole checkpoint.
    ///
    /// # Errors
    /// A file that cannot be read now.
    pub fn read(checkpoint: &'a Checkpoint) -> Result<Self, Unreadable> {
        let units = checkpoint.units();
        Ok(Self { checkpoint, verified: units.len(), damage: checkpoint.verify(&units)? })
    }
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let index = self.checkpoint.index();
        let bytes: u64 = index.files.iter().map(|file| file.bytes).sum();
        writeln!(f, "{}: step {}, format {}", self.checkpoint.path().display(), index.step, index.format)?;
        let (tensors, files) = (index.tensors.len(), index.files.len());
        writeln!(f, "{tensors} tensors of {} bytes in {files} files of {bytes} bytes", index.tensor_bytes())?;
        match self.damage.len() {
            0 => writeln!(f, "all {} checksums are right", self.verified)?,
            count => writeln!(f, "{count} of {} checksums are wrong:", self.verified)?,
        }
        self.damage.iter().try_for_each(|damage| writeln!(f, "  {damage}"))?;
        writeln!(f, "\nmetadata {:#}\n", index.metadata)?;
        let width = index.tensors.iter().map(|of| of.tensor.name.chars().count()).max().unwrap_or(0);
        for StoredTensor { tensor, pieces } in &index.tensors {
            let (name, kind, dtype) = (&tensor.name, tensor.kind.name(), tensor.dtype.name());
            write!(f, "{name:width$}  {kind:15}  {dtype:4}  {:?}", tensor.dims)?;
            let slice = |piece: &crate::StoredPiece| format!("{} in {}", piece.slice, index.files[piece.file].name);
            match &pieces[..] {
                [piece] => writeln!(f, "  in {}", index.files[piece.file].name)?,
                _ => writeln!(f, "  {}", pieces.iter().map(slice).collect::<Vec<_>>().join(", "))?,
            }
        }
        Ok(())
    }
}
